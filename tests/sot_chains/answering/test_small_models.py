"""What small and reasoning models need: bounds, another try, and reasoning left out."""

import asyncio
import itertools
from collections.abc import Callable, Sequence
from dataclasses import replace
from typing import Any

import pytest
from langchain_core.messages import BaseMessage

from sot_chains import ModelProfile, ProviderError, Retries, SkeletonOfThought, ThoughtGraph
from sot_chains.prompts.profile import ENGLISH, UNFILTERED
from tests.sot_chains.fakes import (
    ANSWER,
    EXPANSIONS,
    OUTLINE,
    PLAIN,
    POINTS_ONLY,
    QUESTION,
    FakeProvider,
    LocalChatModel,
    PacedChatModel,
    nothing_runs,
    sot_of,
    what,
)
from tests.sot_chains.router.test_routers import Always

AT_ONCE = Retries(max_attempts=2, first_pause_seconds=0.0)
GUARDED = replace(ModelProfile.STRONG, filters=ModelProfile.SMALL.filters)
LINE = "the cat sat on the mat and looked at me, "


def answers(point: str = "", plain: str = PLAIN, outline: str = OUTLINE) -> Any:
    def answer(messages: Sequence[BaseMessage]) -> str:
        asked = what(messages)
        return outline if asked == "outline" else plain if asked == "plain" else point or EXPANSIONS[asked]

    return answer


async def both(sot: SkeletonOfThought) -> dict[str, Any]:
    """The trace of an answer whose text is the same whole and streamed."""
    message = await sot.ainvoke(QUESTION)
    chunks = [chunk async for chunk in sot.astream(QUESTION)]
    assert "".join(chunk.text for chunk in chunks) == message.text
    assert await nothing_runs()
    trace: dict[str, Any] = message.response_metadata["sot"]
    return trace


async def test_a_loop_is_stopped_and_cut_back() -> None:
    provider = FakeProvider(answer=answers(f"Well: {LINE * 9}"), between=lambda asked: 0.001)
    trace = await both(sot_of(provider, profile=GUARDED))
    # What the others have said counts, too: a point that only says it once more is left out, and marked.
    texts = {point["number"]: point["text"] for point in trace["points"]}
    assert set(texts.values()) == {f"Well: {LINE.strip()}", ""}
    assert {point["stopped_by"] for point in trace["points"]} == {"loop"}
    assert [failure["number"] for failure in trace["failures"]] == [
        n for n, text in texts.items() if not text
    ]
    assert trace["cost"]["estimated"] is not None  # the calls were ended before their usage came
    assert provider.num_running == 0
    plain = FakeProvider(answer=answers(plain=LINE * 9, outline="none"))
    assert (await both(sot_of(plain, profile=GUARDED)))["plain_stopped_by"] == "loop"
    free = await both(sot_of(provider, profile=UNFILTERED))
    assert len(free["points"][0]["text"]) > 300


@pytest.mark.parametrize("speeds", [*itertools.permutations((0.0, 0.001, 0.004))])
async def test_points_that_say_the_same_are_compared_in_reading_order(speeds: tuple[float, ...]) -> None:
    pauses = dict(zip(EXPANSIONS, speeds, strict=True))
    provider = FakeProvider(
        answer=answers(f"They rest. Here {LINE}and slept."), between=lambda asked: pauses.get(asked, 0.0)
    )
    sot = sot_of(provider, profile=GUARDED, conclusion=True)
    texts = [point["text"] for point in (await both(sot))["points"]]
    assert texts == [f"They rest. Here {LINE}and slept.", "", ""]


@pytest.mark.parametrize("speeds", [*itertools.permutations((0.0, 0.001, 0.004))])
async def test_a_sentence_is_said_once(speeds: tuple[float, ...]) -> None:
    pauses = dict(zip(EXPANSIONS, speeds, strict=True))
    said = "They rest in a room that is dark."

    def answer(messages: Sequence[BaseMessage]) -> str:
        own = EXPANSIONS.get(what(messages))
        if own is None:
            return answers()(messages)
        rest = " ".join(f"{what(messages)}{number}" for number in range(40))
        return f"They rest. They rest. {said} In the U.S. too. {rest}. {rest}. {own} {said}"

    provider = FakeProvider(answer=answer, between=lambda asked: pauses.get(asked, 0.0))
    points = (await both(sot_of(provider, profile="small")))["points"]
    texts = [point["text"] for point in points]
    assert texts[0].startswith(f"They rest. {said} In the U.S. too. Fixed hours0")
    assert "".join(texts).count(said) == 1
    assert [text.count("They rest. ") for text in texts] == [1, 1, 1]
    assert all("In the U.S. too." in text for text in texts)
    assert all(text.count("39.") == 1 for text in texts)


@pytest.mark.parametrize("num_words", [12, 80])
async def test_a_local_model_that_answers_shortly_answers_plainly(num_words: int) -> None:
    class Bounded(LocalChatModel):
        async def _astream(
            self, messages: Any, stop: Any = None, run_manager: Any = None, **kwargs: Any
        ) -> Any:
            most = kwargs.get("max_tokens") or 1000
            given = 0
            async for chunk in super()._astream(messages, stop, run_manager, **kwargs):
                given += bool(chunk.text)
                if given > most:
                    chunk.message.content = ""
                    chunk.message.response_metadata = {"finish_reason": "length"}
                yield chunk
                if given > most:
                    return

    def answer(messages: Sequence[BaseMessage]) -> str:
        start = str(messages[-1].text)
        if start == QUESTION:
            return " ".join(f"word{n}" for n in range(num_words))
        return (
            OUTLINE.removeprefix("1.") if start == "1." else f" {' '.join(start + str(n) for n in range(9))}."
        )

    model = Bounded(answer=answer, pause=0.001)
    trace = await both(sot_of(model))
    assert trace["route"] == ("plain" if num_words == 12 else "sot")

    def num_tried() -> int:
        return [str(request[-1].text) for request in model.requests].count(QUESTION)

    assert num_tried() == 2
    await sot_of(model).ainvoke(QUESTION, {"max_concurrency": 2})
    assert num_tried() == 2
    await sot_of(model).abatch([QUESTION] * 4)
    assert num_tried() == 6


async def test_points_are_written_while_they_pay() -> None:
    def answer(messages: Sequence[BaseMessage]) -> str:
        start = str(messages[-1].text)
        return OUTLINE.removeprefix("1.") if start == "1." else f" {start} helps."

    sot = SkeletonOfThought(LocalChatModel(answer=answer), router=Always(True), profile=POINTS_ONLY)
    for num_answers, route in ((1, "sot"), (2, "sot"), (3, "plain"), (1, "sot")):
        traces = [one.response_metadata["sot"] for one in await sot.abatch([QUESTION] * num_answers)]
        assert {trace["route"] for trace in traces} == {route}
    assert sot.options.expectations.num_answers == 0


async def test_an_outline_ends_when_points_no_longer_pay() -> None:
    def answer(messages: Sequence[BaseMessage]) -> str:
        if str(messages[-1].text) != "1.":
            return " It helps."
        model.gain = 0.5  # others have begun meanwhile
        return OUTLINE.removeprefix("1.")

    model = LocalChatModel(answer=answer)
    sot = SkeletonOfThought(model, router=Always(True), profile=POINTS_ONLY)
    trace = (await sot.ainvoke(QUESTION)).response_metadata["sot"]
    assert (trace["route"], trace["points"]) == ("plain", [])
    assert "take longer" in trace["route_reason"]
    assert len(trace["skeleton_reply"]) < len(OUTLINE) / 2


async def test_no_outline_is_begun_before_it_is_known_what_else_is_asked() -> None:
    """Requests of a server come one by one: what comes while the first forward runs counts, too."""

    def answer(messages: Sequence[BaseMessage]) -> str:
        if str(messages[-1].text) == QUESTION:
            model.gain = 0.5  # others have begun meanwhile
            return "Go to bed early, and leave the telephone in another room."
        return OUTLINE.removeprefix("1.")

    model = LocalChatModel(answer=answer)
    trace = (await SkeletonOfThought(model, router=Always(True)).ainvoke(QUESTION)).response_metadata["sot"]
    assert (trace["route"], trace["num_calls"], trace["skeleton_call"]) == ("plain", 1, None)
    assert "take longer" in trace["route_reason"]


def _paced(outline: str, point: Callable[[str], str] = " {} helps.".format) -> LocalChatModel:
    """A local model that takes its time for the outline, and more for a plain answer."""

    def answer(messages: Sequence[BaseMessage]) -> str:
        start = str(messages[-1].text)
        return outline if start == "1." else PLAIN if start == QUESTION else point(start.strip("123456. :"))

    def pause(messages: Sequence[BaseMessage]) -> float:
        return {"1.": 0.01, QUESTION: 0.05}.get(str(messages[-1].text), 0.0)

    return LocalChatModel(answer=answer, pause=pause)


async def test_a_point_begins_with_its_heading() -> None:
    model = _paced(OUTLINE.removeprefix("1."))
    trace = await both(SkeletonOfThought(model, router="always"))
    starts = [point["start_seconds"] for point in trace["points"]]
    assert trace["skeleton_call"]["start_seconds"] < starts[0] < starts[1] < starts[2]
    assert starts[1] < trace["skeleton_call"]["end_seconds"]


async def test_the_end_of_a_point_is_told_once_though_it_comes_before_the_outlines() -> None:
    told: list[tuple[int, str | None]] = []
    model = _paced(OUTLINE.removeprefix("1."))
    await SkeletonOfThought(model, router="always").ainvoke(
        QUESTION, arrivals=lambda arrival: told.append((arrival[0].point.number, arrival[1]))
    )
    for number in (1, 2, 3):
        texts = [text for point, text in told if point == number]
        assert texts.count(None) == 1
        assert texts[-1] is None


@pytest.mark.parametrize("way", ["invoked", "streamed", "point by point"])
async def test_nobody_hears_of_the_points_of_an_outline_that_turns_out_to_be_none(way: str) -> None:
    model = _paced(" Fear of loss\n2. Fear of heights\n3. Fear of the dark\n4. Fear of bees\n")
    sot = SkeletonOfThought(model, router="always")
    if way == "invoked":
        message = await sot.ainvoke(QUESTION)
        text, trace = message.text, message.response_metadata["sot"]
    elif way == "streamed":
        chunks = [chunk async for chunk in sot.astream(QUESTION)]
        text, trace = "".join(chunk.text for chunk in chunks), chunks[-1].response_metadata["sot"]
    else:
        stream = sot.astream_points(QUESTION)
        text = "".join([delta.text async for delta in stream])
        trace = stream.message.response_metadata["sot"]
    assert (text, trace["route"], trace["points"]) == (PLAIN, "plain", [])
    assert "begin with 'fear'" in trace["route_reason"]
    assert any("1. Fear of loss:" in str(request[-1].text) for request in model.requests)  # it had begun
    assert await nothing_runs(model)


async def test_points_that_begin_earlier_are_longer() -> None:
    def sentences(heading: str) -> str:
        names = [f"{heading.replace(' ', '')}{number}" for number in range(80)]
        return "".join(f" {' '.join(names[start : start + 4])}." for start in range(0, 80, 4))

    trace = await both(sot_of(_paced(OUTLINE.removeprefix("1."), point=sentences)))
    bounds, most = ModelProfile.SMALL.points["normal"], ModelProfile.SMALL.max_points
    assert bounds.enough_words
    assert most
    wanted = [bounds.enough_words + (most - number) * bounds.more_words for number in (1, 2, 3)]
    assert [len(point["text"].split()) for point in trace["points"]] == wanted


async def test_the_thoughts_of_a_graph_are_as_long_as_the_model_writes_them() -> None:
    text = " ".join(f"Number {number} is a sentence." for number in range(30))
    graph = ThoughtGraph(LocalChatModel(answer=lambda messages: text), {"All": "{question} Tell all of it."})
    assert (await graph.ainvoke(QUESTION)).response_metadata["sot"]["points"][0]["text"] == text


async def test_a_point_that_goes_on_to_another_one_is_cut_there() -> None:
    text = "Go to bed.\n\n2. Dark room: Close the curtains.\n3. Less coffee: Drink none."
    trace = await both(sot_of(FakeProvider(answer=answers(text))))
    first = trace["points"][0]
    assert (first["text"], first["stopped_by"]) == ("Go to bed.", "overrun")


async def test_an_empty_point_is_left_out() -> None:
    def answer(messages: Sequence[BaseMessage]) -> str:
        start = str(messages[-1].text)
        if start == "1.":
            return OUTLINE.removeprefix("1.")
        return "" if "Less coffee" in start else " It helps."

    model = LocalChatModel(answer=answer)
    message = await sot_of(model, profile=POINTS_ONLY).ainvoke(QUESTION)
    points = message.response_metadata["sot"]["points"]
    assert [point["status"] for point in points] == ["complete", "complete", "omitted"]
    assert "3." not in message.text


async def test_headings_that_are_sentences_are_left_out() -> None:
    long = "This is a heading that is by far too long for one"
    provider = FakeProvider(
        answer=answers(outline=f"1. {long}\n2. Fixed hours\n3. Dark room\n4. {long} {long}")
    )
    trace = await both(sot_of(provider, profile="small"))
    assert trace["skeleton"] == ["Fixed hours", "Dark room"]
    provider = FakeProvider(answer=answers(outline=f"1. {long}\n2. Fixed hours\n3. {long} {long}"))
    trace = await both(sot_of(provider, profile="small"))
    assert (trace["route"], trace["route_reason"]) == ("plain", "the points of the skeleton are sentences")


async def test_no_more_points_are_asked_for_than_an_answer_may_have() -> None:
    def answer(messages: Sequence[BaseMessage]) -> str:
        return OUTLINE.removeprefix("1.") if str(messages[-1].text) == "1." else " It helps."

    model = LocalChatModel(answer=answer)
    message = await sot_of(model, max_points=3, profile=POINTS_ONLY).ainvoke(QUESTION)
    assert len(message.response_metadata["sot"]["points"]) == 3
    assert len(model.requests) == 4


@pytest.mark.parametrize(
    "form", ["<think>\n1. Hm\n2. Oh\n</think>\n\n", "1. Hm\n2. Oh\n</think>\n\n", "[THINK]Hm.[/THINK]"]
)
async def test_reasoning_reaches_neither_outline_nor_points(form: str) -> None:
    def answer(messages: Sequence[BaseMessage]) -> str:
        return form + answers()(messages)

    trace = await both(sot_of(FakeProvider(answer=answer)))
    assert trace["skeleton"] == list(EXPANSIONS)
    assert [point["text"] for point in trace["points"]] == list(EXPANSIONS.values())
    assert all(point["reasoning_tokens"] > 0 for point in trace["points"])


async def test_nothing_but_reasoning_is_an_error_that_says_so() -> None:
    provider = FakeProvider(
        reasoning="Let me think of it. " * 20,
        answer=lambda messages: "",
        usage=None,
        finish_reason=lambda asked, attempt: "length",
    )
    with pytest.raises(ProviderError, match=r"no answer: all of about \d+ tokens went into reasoning"):
        await sot_of(provider).ainvoke(QUESTION)


@pytest.mark.parametrize(
    ("said", "max_tokens", "shown", "status"),
    [
        ("Go to bed early. Then ri", None, "Go to bed early.", "complete"),  # the bound is ours
        ("Go to bed early.", None, "Go to bed early.", "complete"),
        ("Go to bed ear", None, "Go to bed ear", "cut"),  # there is no sentence to end with
        ("Go to bed early. Then ri", 20, "Go to bed early.", "cut"),  # the bound is the user's
    ],
)
async def test_a_point_that_is_cut_at_our_bound_is_whole_if_it_ends_with_a_sentence(
    said: str, max_tokens: int | None, shown: str, status: str
) -> None:
    provider = FakeProvider(
        answer=lambda messages: said if what(messages) == "Dark room" else answers()(messages),
        finish_reason=lambda asked, attempt: "length" if asked == "Dark room" else "stop",
        supports_prefill=True,
    )
    parameters = {} if max_tokens is None else {"max_tokens": max_tokens}
    sot = sot_of(provider, retries=AT_ONCE, profile="small")
    trace = (await sot.ainvoke(QUESTION, **parameters)).response_metadata["sot"]
    point = trace["points"][1]
    assert (point["text"], point["status"]) == (shown, status)
    assert (point["stopped_by"] == "length") == (status == "complete") == trace["is_complete"]


@pytest.mark.parametrize("refused", ["stop", "roles must alternate"])
async def test_what_a_server_refuses_is_left_out_from_then_on(refused: str) -> None:
    class Picky(FakeProvider):
        async def stream(self, messages: Any, *, config: Any, **kwargs: Any) -> Any:
            await asyncio.sleep(0)  # both questions have been sent by now
            if (refused == "stop" and kwargs.get("stop")) or (refused != "stop" and len(messages) > 2):
                raise ProviderError(f"unsupported: {refused}", status=400)
            async for delta in super().stream(messages[-1:], config=config):
                yield delta

    sot = sot_of(Picky(), retries=AT_ONCE, profile="small")
    for message in await sot.abatch([QUESTION, QUESTION]):
        assert message.text == ANSWER
        assert message.response_metadata["sot"]["is_complete"]


async def test_an_outline_that_copies_the_examples_costs_no_more_than_itself() -> None:
    copied = "\n".join(f"{n}. {point.text}" for n, point in enumerate(ENGLISH.examples[0].skeleton, 1))
    provider = FakeProvider(answer=answers(outline=copied))
    trace = await both(sot_of(provider, profile="small"))
    assert (trace["route"], trace["num_calls"]) == ("plain", 2)
    assert "copies the headings" in trace["route_reason"]


async def test_parameters_that_the_user_has_set_are_left_alone() -> None:
    model, bounds = LocalChatModel(), ModelProfile.SMALL.points["normal"]
    await sot_of(model, max_points=3, profile=POINTS_ONLY).ainvoke(QUESTION)
    assert [p["min_tokens"] for p in model.parameters[-3:]] == [bounds.min_tokens] * 3
    assert [p["presence_penalty"] for p in model.parameters[-3:]] == [bounds.presence_penalty] * 3
    await sot_of(model.bind(min_tokens=5, presence_penalty=0.5), max_points=3).ainvoke(QUESTION)
    assert [(p["min_tokens"], p["presence_penalty"]) for p in model.parameters[-3:]] == [(5, 0.5)] * 3


async def test_the_trace_has_the_reason_of_the_router() -> None:
    message = await SkeletonOfThought(PacedChatModel()).ainvoke(QUESTION)
    assert "trained router" in message.response_metadata["sot"]["route_reason"]
    for mistake in ("rules", None):
        with pytest.raises(ValueError, match='router must be a Runnable, "auto", "always"'):
            SkeletonOfThought(PacedChatModel(), router=mistake)  # type: ignore[arg-type]


async def test_reasoning_that_the_template_opens_stays_out_of_plain_answers() -> None:
    def answer(messages: Sequence[BaseMessage]) -> str:
        return f"The user asks how. 1. Hm\n2. Oh\n</think>\n\n{PLAIN}"

    model = LocalChatModel(answer=answer, opens_reasoning=True)
    plainly = Always(use_sot=False)
    assert (await SkeletonOfThought(model, router=plainly).ainvoke(QUESTION)).text == PLAIN
    chunks = [chunk.text async for chunk in SkeletonOfThought(model, router=plainly).astream(QUESTION)]
    assert "".join(chunks) == PLAIN
