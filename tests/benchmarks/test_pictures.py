"""The picture of decoding shows one block a forward."""

from __future__ import annotations

import pytest
from langchain_core.language_models import FakeListChatModel
from langchain_core.runnables import RunnableLambda
from langchain_core.tools import tool
from langchain_core.tracers.run_collector import RunCollectorCallbackHandler
from transformers import LlamaForCausalLM, PreTrainedTokenizerBase

from benchmarks.pictures import CopiedText, landings, timelines
from local_backend import Engine, SamplingParams
from local_backend.sequences.outputs import Completion, Stats
from tests.local_backend.conftest import ragged_prompts


def test_blocks_are_forwards(model: LlamaForCausalLM, tokenizer: PreTrainedTokenizerBase) -> None:
    with Engine(model, tokenizer) as engine:
        one, other = engine.generate(ragged_prompts(2), SamplingParams(max_tokens=9, ignore_end=True))
    assert one.stats.tokens_by_forward == [1] * 9
    other.stats.tokens_by_forward[:] = [4, 3, 2]
    axes = landings({"one": one, "other": other}).axes[0]
    widths = [path.get_extents().width for bars in axes.collections for path in bars.get_paths()]
    assert widths == [1] * 9 + [4, 3, 2]
    assert [label.get_text() for label in axes.get_yticklabels()] == ["one", "other"]


def test_nothing_to_draw_is_named() -> None:
    with pytest.raises(ValueError, match="at least one completion"):
        landings({})
    with pytest.raises(ValueError, match="at least one run"):
        timelines({})


def test_a_timeline_has_a_bar_for_each_call_and_tool() -> None:
    tracer = RunCollectorCallbackHandler()
    model = FakeListChatModel(responses=["a", "b"], sleep=0.01)
    (model | RunnableLambda(lambda message: look_up.invoke(message.text)) | model).invoke(
        "?", {"callbacks": [tracer]}
    )
    (axes,) = timelines({"chain": tracer.traced_runs[0]}).axes
    assert [one.get_text() for one in axes.get_yticklabels()] == [
        "FakeListChatModel",
        "look_up",
        "FakeListChatModel",
    ]
    starts, ends = zip(*((bar.get_x(), bar.get_x() + bar.get_width()) for bar in axes.patches), strict=True)
    assert list(starts) == sorted(starts)
    assert 0.01 <= ends[0] <= starts[2]


@tool
def look_up(word: str) -> str:
    """Looks up a word."""
    return word


def test_copied_text_has_the_colour_of_its_reference(tokenizer: PreTrainedTokenizerBase) -> None:
    texts = ["the first reference says <this> & that", "another text altogether"]
    references = [tokenizer.encode(text, add_special_tokens=False) for text in texts]
    own = tokenizer.encode("qqq zzz", add_special_tokens=False)
    ids = [*references[1], *own, *references[0]]
    completion = Completion(ids, tokenizer.decode(ids), "stop", Stats(), 1, references=references)
    shown = CopiedText(completion, tokenizer, min_tokens=3)
    assert [span.reference for span in shown.spans] == [1, 0]
    assert str(shown) == f"[2: {texts[1]}]{tokenizer.decode(own)}[1: {texts[0]}]"
    html = shown._repr_html_()
    assert html.count("<span") == 2
    assert "&lt;this&gt; &amp; that" in html
