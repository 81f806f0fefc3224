"""How many functions of ours one question passes, and how deep the provider is called."""

from __future__ import annotations

import asyncio
import sys
from collections.abc import Sequence
from pathlib import Path
from types import CodeType, FrameType
from typing import Any

from langchain_core.messages import BaseMessage

from tests.sot_chains.fakes import QUESTION, PacedChatModel, answer_to, is_skeleton_request, sot_of

ROOT = Path(__file__).parents[2]
PACKAGES = tuple(str(ROOT / package) for package in ("sot_chains", "local_backend", "retrieval_copy"))
MOST_FUNCTIONS, MOST_HOPS = 130, 8


def two_points(messages: Sequence[BaseMessage]) -> str:
    if is_skeleton_request(str(messages[-1].text)):
        return "1. Fixed hours\n2. Dark room"
    return answer_to(messages)


def test_a_question_passes_few_functions() -> None:
    sot = sot_of(PacedChatModel(answer=two_points))
    message = asyncio.run(sot.ainvoke(QUESTION))  # what is made once is made now
    assert len(message.response_metadata["sot"]["points"]) == 2
    passed: set[CodeType] = set()
    hops: list[int] = []

    def note(frame: FrameType, event: str, _: Any) -> None:
        code = frame.f_code
        if event != "call" or not code.co_filename.startswith(PACKAGES):
            return
        passed.add(code)
        if code.co_qualname == "LangChainProvider.stream":
            caller, num_hops = frame.f_back, 1
            while caller is not None:
                num_hops += caller.f_code.co_filename.startswith(PACKAGES)
                caller = caller.f_back
            hops.append(num_hops)

    sys.setprofile(note)
    try:
        asyncio.run(sot.ainvoke(QUESTION))
    finally:
        sys.setprofile(None)
    assert len(passed) <= MOST_FUNCTIONS, sorted(code.co_qualname for code in passed)
    assert 0 < max(hops) <= MOST_HOPS
