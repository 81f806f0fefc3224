"""What every router promises, and what each adds."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace

import pytest
from hypothesis import example, given
from hypothesis import strategies as st
from langchain_core.messages import AIMessage, BaseMessage, HumanMessage
from langchain_core.runnables import RunnableLambda

from sot_chains import SkeletonOfThought
from sot_chains.router import (
    PromptedRouter,
    Route,
    Router,
    RulesRouter,
    TrainedRouter,
    first_certain_of,
)
from sot_chains.router.route import read_letter
from tests.sot_chains.fakes import ANSWER, PLAIN, QUESTION, FakeProvider, PacedChatModel


class Always(Router):
    """Decides the same each time, and counts."""

    def __init__(self, use_sot: bool, confidence: float = 1.0, name: str = "always") -> None:
        self.route = Route(use_sot, "as always", confidence, name)
        self.num_asked = 0

    async def adecide(self, conversation: object, config: object) -> Route:
        self.num_asked += 1
        return self.route


def _says(letter: str) -> FakeProvider:
    return FakeProvider(answer=lambda messages: letter)


ROUTERS: dict[str, Router] = {
    "rules": RulesRouter(),
    "trained": TrainedRouter(),
    "prompted": PromptedRouter(_says("A")),
    "first certain of": first_certain_of(RulesRouter(), TrainedRouter(), PromptedRouter(_says("C"))),
}
INPUTS: dict[str, object] = {
    "string": QUESTION,
    "message": [HumanMessage(QUESTION)],
    "pairs": [("system", "Be brief."), ("user", QUESTION)],
}


@pytest.mark.parametrize("name", ROUTERS)
@pytest.mark.parametrize("form", INPUTS)
async def test_every_router_takes_what_a_chat_model_takes_in_every_way(name: str, form: str) -> None:
    router, question = ROUTERS[name], INPUTS[form]
    route = await router.ainvoke(question)
    assert isinstance(route, Route)
    assert route.reason
    assert router.invoke(question) == route
    assert router.batch([question, question]) == [route, route]
    assert await router.abatch([question]) == [route]
    assert [chunk async for chunk in router.astream(question)] == [route]


@pytest.mark.parametrize("name", ROUTERS)
async def test_what_asks_nothing_is_refused(name: str) -> None:
    with pytest.raises(ValueError, match="question"):
        await ROUTERS[name].ainvoke([AIMessage("Hello!")])
    with pytest.raises(TypeError, match="chat model"):
        await ROUTERS[name].ainvoke(3)


def test_a_confidence_is_a_share() -> None:
    with pytest.raises(ValueError, match="from 0 to 1"):
        Route(True, "why not", 1.2, "mine")


# --- rules


@pytest.mark.parametrize(
    ("question", "reason"),
    [
        ("Write a Python function that adds two numbers.", "it asks for a program"),
        ("编写一个计算斐波那契数列的函数", "it asks for a program"),
        ("What is 12 * (3 + 4)?", "it is arithmetic"),
        ("Solve 4x - 3 = 9.", "it is arithmetic"),
        ("Translate this letter into Dutch: Dear Kees", "it wants a translation"),
        ("请把下面的句子翻译成英文：今天下雨。", "it wants a translation"),
        ("In one word, what is courage?", "it wants a very short answer"),
        ("Briefly, what are the pros and cons of trams?", "it wants a very short answer"),
        ("Please name three rivers in Norway.", "it wants a very short answer"),
        ("What are the seven continents?", "it wants a very short answer"),
        ("Is Oslo in Sweden? Answer only with yes or no.", "it wants a very short answer"),
        ("Which is a bird? A) cod B) robin C) newt", "it is a multiple-choice question"),
        ("Write me a short story about a tram.", "it wants a text that is told in one piece"),
        ("写一首关于大海的诗", "it wants a text that is told in one piece"),
        ("Thanks a lot!", "it is a greeting or thanks"),
        ("Why does this fail?\n```python\nx = 1\ny = 2\nprint(x / (y - 2))\n```", "it contains code"),
    ],
)
def test_a_rule_recognises_its_case(question: str, reason: str) -> None:
    route = RulesRouter().invoke(question)
    assert (route.use_sot, route.reason) == (False, reason)
    assert route.confidence > 0.9


@pytest.mark.parametrize(
    "question",
    [
        "What are the advantages of functional programming?",
        "Name three benefits of exercise and explain each.",
        "What are the five best ways to learn a language quickly?",
        "How do I write better stories?",
        "What should I pack for 10-12 days in Peru?",
        "How did the 24/7 news cycle change politics, and what came of it for papers?",
        "What are tips for someone who wants to translate novels?",
        "How can I learn to solve equations faster?",
        "What is the difference between `map` and `filter`, and when is each of use?",
        "学翻译有哪些好处？",
        "",
    ],
)
def test_rules_say_nothing_of_other_questions(question: str) -> None:
    assert RulesRouter().decide(question).confidence == 0.0


@given(st.text(max_size=400))
@example("A) " * 100)
@example("write a " + "very " * 200)
def test_rules_read_any_text(question: str) -> None:
    route = RulesRouter().decide(question)
    assert route.confidence == 0.0 or not route.use_sot


# --- prompted


@pytest.mark.parametrize(
    ("reply", "letter"),
    [
        ("A", "A"),
        (" b", None),
        ("B.", "B"),
        ("**C**", "C"),
        ("C - one thing", "C"),
        ("(A)", "A"),
        ("A. Several points", "A"),
        ("The answer is B", "B"),
        ("答案是C", "C"),
        ("A：并列", "A"),
        ("", None),
        ("A good answer has several points.", None),
        ("I cannot help with that.", None),
        ("Sleep well by going to bed early.", None),
    ],
)
def test_a_reply_is_read_as_a_letter_or_not_at_all(reply: str, letter: str | None) -> None:
    assert read_letter(reply) == letter


@pytest.mark.parametrize(("letter", "use_sot"), [("A", True), ("B", False), ("C", False), ("Maybe.", False)])
async def test_only_independent_points_take_sot(letter: str, use_sot: bool) -> None:
    route = await PromptedRouter(_says(letter)).ainvoke(QUESTION)
    assert route.use_sot == use_sot
    assert (route.confidence == 0.0) == (letter == "Maybe.")


async def test_a_question_is_asked_in_its_own_language() -> None:
    asked: list[str] = []

    def answer(messages: Sequence[BaseMessage]) -> str:
        asked.append(str(messages[-1].text))
        return "A"

    router = PromptedRouter(FakeProvider(answer=answer))
    await router.ainvoke("What is {braces}?")
    await router.ainvoke("怎样养花？")
    assert len(asked) == 2
    assert "What is {braces}?" in asked[0]
    assert "怎样养花？" in asked[1]
    assert "要点" in asked[1]


async def test_a_model_that_answers_instead_is_cut_short() -> None:
    model = PacedChatModel(answer=lambda messages: "word " * 10_000)
    assert (await PromptedRouter(model).ainvoke(QUESTION)).confidence == 0.0
    assert model.num_running == 0


# --- composition


async def test_the_first_certain_router_decides_and_later_ones_are_not_asked() -> None:
    unsure, sure, late = Always(True, 0.3), Always(False, 0.95), Always(True, 1.0)
    route = await first_certain_of(unsure, sure, late).ainvoke(QUESTION)
    assert route == sure.route
    assert (unsure.num_asked, sure.num_asked, late.num_asked) == (1, 1, 0)


async def test_of_unsure_routers_the_surest_decides() -> None:
    routers = Always(True, 0.3), Always(False, 0.6), Always(True, 0.5)
    assert await first_certain_of(*routers).ainvoke(QUESTION) == routers[1].route
    with pytest.raises(ValueError, match="at least one"):
        first_certain_of()


async def test_any_runnable_that_gives_a_route_is_a_router() -> None:
    mine = RunnableLambda(lambda messages: Route("sleep" in messages[-1].text, "my rule", 1.0, "mine"))
    assert (await first_certain_of(mine).ainvoke(QUESTION)).router == "mine"


# --- in the chain


@pytest.mark.parametrize("use_sot", [True, False])
@pytest.mark.parametrize("eager", [True, False])
async def test_the_chain_follows_its_router(use_sot: bool, eager: bool) -> None:
    model = PacedChatModel()
    sot = SkeletonOfThought(model, router=Always(use_sot), eager=eager)
    message = await sot.ainvoke(QUESTION)
    trace = message.response_metadata["sot"]
    assert message.text == (ANSWER if use_sot else PLAIN)
    assert trace["route"] == ("sot" if use_sot else "plain")
    if not use_sot:
        assert trace["route_reason"] == "always router: as always"
        assert trace["skeleton_call"] is None
        assert len(model.requests) == 1
    assert "".join([chunk.text async for chunk in sot.astream(QUESTION)]) == message.text


async def test_the_shipped_router_in_the_chain() -> None:
    model = PacedChatModel()
    sot = SkeletonOfThought(model, router=first_certain_of(RulesRouter(), TrainedRouter()))
    routes = [m.response_metadata["sot"]["route"] for m in await sot.abatch([QUESTION, "What is 3 + 4?"])]
    assert routes == ["sot", "plain"]


async def test_a_router_that_fails_fails_the_answer() -> None:
    def fail(_: object) -> Route:
        raise RuntimeError("no route")

    with pytest.raises(RuntimeError, match="no route"):
        await SkeletonOfThought(PacedChatModel(), router=RunnableLambda(fail)).ainvoke(QUESTION)


def test_routes_are_values() -> None:
    route = Route(True, "so", 0.5, "mine")
    assert replace(route, use_sot=False) != route
    assert hash(route) == hash(replace(route))
