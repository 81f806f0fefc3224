"""Skeleton-of-Thought over the default model: the main job, with every part real."""

from __future__ import annotations

import asyncio
import json
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
from langchain_core.output_parsers import StrOutputParser
from langchain_core.prompts import ChatPromptTemplate
from langchain_core.runnables import Runnable

from benchmarks import sot_latency
from examples import demo
from langchain_parallel_decoding import command
from local_backend import ChatLocal
from sot_chains import ModelProfile, SkeletonOfThought
from sot_chains.filters.points import HeadingFilter, OverrunFilter
from sot_chains.outline.skeleton import parse_skeleton
from sot_chains.prompts.profile import ENGLISH

QUESTION = {"question": "How can I bake bread at home?"}
OTHER = {"question": "What helps against stress?"}


@pytest.fixture(scope="module")
def chat(default_chat: ChatLocal) -> ChatLocal:
    """Replies are cut early: what is looked at is there by then."""
    return default_chat.model_copy(update={"max_tokens": 16})


@pytest.fixture(scope="module")
def brief(chat: ChatLocal) -> SkeletonOfThought:
    return SkeletonOfThought(chat, router="always", detail="brief", max_points=2)


async def _is_idle(chat: ChatLocal) -> bool:
    for _ in range(300):
        if chat.engine.num_rows == 0:
            return True
        await asyncio.sleep(0.01)
    return False


async def test_it_composes_in_all_six_ways_at_once(chat: ChatLocal, brief: SkeletonOfThought) -> None:
    """From threads and tasks, into one batch of the engine."""
    prompt = ChatPromptTemplate.from_messages([("user", "{question}")])
    chain: Runnable[dict[str, Any], str] = prompt | brief | StrOutputParser()

    async def streamed() -> str:
        return "".join([piece async for piece in chain.astream(QUESTION)])

    *answers, batch, abatch = await asyncio.gather(
        asyncio.to_thread(chain.invoke, QUESTION),
        chain.ainvoke(QUESTION),
        asyncio.to_thread(lambda: "".join(chain.stream(QUESTION))),
        streamed(),
        asyncio.to_thread(chain.batch, [QUESTION, OTHER]),
        chain.abatch([QUESTION, OTHER]),
    )
    (answer,) = set(answers)
    assert isinstance(answer, str)
    assert answer.startswith("1. **")
    assert answer.count("\n\n") >= 1
    assert batch == abatch
    assert batch[0] == answer != batch[1]
    assert await _is_idle(chat)


async def test_leaving_early_frees_every_row(chat: ChatLocal, brief: SkeletonOfThought) -> None:
    async for chunk in brief.astream(QUESTION["question"]):
        if chunk.text:
            break
    assert await _is_idle(chat)
    task = asyncio.create_task(brief.ainvoke(QUESTION["question"]))
    await asyncio.sleep(0.1)
    task.cancel()
    with pytest.raises(asyncio.CancelledError):
        await task
    assert await _is_idle(chat)


def test_points_in_parallel_share_forwards_and_say_what_each_says_alone(chat: ChatLocal) -> None:
    """Lossless: sharing a batch and a prefix changes no word."""
    question = QUESTION["question"]
    bounds = replace(ModelProfile.SMALL.points["normal"], presence_penalty=0.0)
    profile = replace(
        ModelProfile.SMALL, filters=frozenset({"heading", "overrun"}), points={"normal": bounds}
    )
    sot = SkeletonOfThought(chat, router="always", profile=profile, max_points=3)
    before = chat.engine.stats.num_forwards
    message = sot.invoke(question)
    assert chat.engine.stats.num_forwards - before < chat.get_num_tokens(message.text)
    trace = message.response_metadata["sot"]
    json.dumps(trace)
    assert trace["route"] == "sot"
    skeleton = parse_skeleton("\n".join(f"{n}. {label}" for n, label in enumerate(trace["skeleton"], 1)))
    shown = [
        turn
        for (asked, begun), _ in ENGLISH.expansion_examples("normal")
        for turn in (("user", asked), ("ai", begun))
    ]
    num_same = 0
    for point, traced in [*zip(skeleton.points, trace["points"], strict=True)][:2]:
        chat.engine.forget_prefixes()
        request, _ = ENGLISH.expansion_request(question, skeleton, point, detail="normal")
        begun = [*shown, ("user", request), ("ai", ENGLISH.expansion_reply_start(point))]
        stripper = HeadingFilter(point)  # a model may repeat the heading it was given
        alone = stripper.feed(chat.invoke(begun, stop=["\n"]).text) + stripper.end()
        guard = OverrunFilter(point, skeleton.folded)
        alone = guard.feed(alone) + ("" if guard.is_over else guard.end())
        if alone.strip():  # else it was asked for once more, in other words
            assert alone.strip().startswith(traced["text"].strip())  # which may end earlier, with a sentence
            num_same += bool(traced["text"].strip())
    assert num_same == 2


async def test_bad_input_is_named_and_nothing_is_left_running(chat: ChatLocal) -> None:
    with pytest.raises(ValueError, match="empty"):
        await SkeletonOfThought(chat, router="always").ainvoke("  ")
    with pytest.raises(ValueError, match="positions for 8192"):
        await SkeletonOfThought(chat, router="always").ainvoke("bread " * 9000)
    assert await _is_idle(chat)


async def test_a_model_that_writes_garbage_answers_plainly(chat: ChatLocal) -> None:
    garbage = chat.bind(temperature=50.0, seed=1, max_tokens=12)
    message = await SkeletonOfThought(
        garbage, router="always", profile=replace(ModelProfile.SMALL, prefill=False)
    ).ainvoke(QUESTION["question"])
    trace = message.response_metadata["sot"]
    assert trace["route"] == "plain"
    assert "usable point" in trace["route_reason"]
    assert message.text


def test_the_demo_is_readable_in_a_pipe(chat: ChatLocal, capsys: pytest.CaptureFixture[str]) -> None:
    demo.show(chat, "Who won the football match?")
    shown = capsys.readouterr().out
    assert shown.index("Plain decoding") < shown.index("Skeleton-of-Thought")
    assert "speed-up" in shown
    assert not [c for c in shown if ord(c) < 32 and c != "\n"]


def test_the_command_asks_the_default_model_unless_told_otherwise(
    chat: ChatLocal, tmp_path: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    asked: list[object] = []
    file = tmp_path / "model.gguf"
    file.write_bytes(b"GGUF")  # that it is there, and not empty, is looked at first

    def load(cls: type[ChatLocal], path_or_name: object, **options: object) -> ChatLocal:
        asked.append(path_or_name)
        return ChatLocal(engine=chat.engine, max_tokens=8)

    monkeypatch.setattr(ChatLocal, "from_pretrained", classmethod(load))
    monkeypatch.setattr(ChatLocal, "close", lambda self: None)
    for arguments in ([], ["--model", f"local:{file}"]):
        assert command.main(["ask", QUESTION["question"], "--no-plain", *arguments]) == 0
    assert asked == [None, str(file)]
    assert "critical path" in capsys.readouterr().out


@pytest.mark.slow
def test_the_benchmark_ends_with_its_json_line(
    chat: ChatLocal, tmp_path: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    loaded = ChatLocal(engine=chat.engine, max_tokens=28)
    monkeypatch.setattr(ChatLocal, "from_pretrained", classmethod(lambda cls, **options: loaded))
    monkeypatch.setattr(ChatLocal, "close", lambda self: None)
    file = tmp_path / "questions.jsonl"
    file.write_text("\n".join(json.dumps(one) for one in (QUESTION, OTHER)))
    sot_latency.main(["--questions", str(file), "--limit", "1", "--repeats", "1"])
    summary = json.loads(capsys.readouterr().out.splitlines()[-1])
    assert list(summary) == [
        "model",
        "max_tokens",
        "questions",
        "answered",
        "by_sot",
        "repeat_themselves",
        "tokens_ratio",
        "speedup_median",
        "speedup_p10",
        "critical_path_ratio_median",
    ]
    assert summary["questions"] == summary["answered"] == summary["by_sot"] == 1
