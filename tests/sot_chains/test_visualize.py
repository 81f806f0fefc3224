"""The timeline of an answer."""

import sys

import pytest
from langchain_core.messages import AIMessage

from sot_chains.display import timeline
from tests.sot_chains.fakes import PLAIN, QUESTION, PacedChatModel, sot_of


def test_a_bar_for_each_call() -> None:
    figure = timeline(sot_of(PacedChatModel(pause=0.001)).invoke(QUESTION))
    labels = [label.get_text() for label in figure.axes[0].get_yticklabels()]
    assert labels == ["skeleton", "1. Fixed hours", "2. Dark room", "3. Less coffee"]
    assert figure._repr_png_().startswith(b"\x89PNG")  # type: ignore[attr-defined]  # what Jupyter calls


def test_a_plain_answer() -> None:
    figure = timeline(sot_of(PacedChatModel(answer=lambda _: PLAIN)).invoke(QUESTION))
    assert [label.get_text() for label in figure.axes[0].get_yticklabels()] == ["skeleton", "plain answer"]


def test_a_message_without_a_trace() -> None:
    with pytest.raises(ValueError, match="no response_metadata"):
        timeline(AIMessage("hello"))


def test_without_matplotlib(monkeypatch: pytest.MonkeyPatch) -> None:
    message = sot_of(PacedChatModel()).invoke(QUESTION)
    monkeypatch.setitem(sys.modules, "matplotlib.figure", None)
    with pytest.raises(ImportError, match=r"\.\[notebooks\]"):
        timeline(message)
