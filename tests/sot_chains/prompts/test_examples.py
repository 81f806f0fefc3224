"""Small models see earlier turns that show what is asked for; nobody else pays for them."""

from __future__ import annotations

from typing import Any, get_args

import pytest
from langchain_core.messages import HumanMessage, SystemMessage

from sot_chains import CHINESE, ENGLISH, ModelProfile, PromptTemplates
from sot_chains.outline.skeleton import parse_skeleton
from sot_chains.prompts.conversation import Conversation
from sot_chains.prompts.profile import Detail
from tests.sot_chains.fakes import QUESTION, LocalChatModel, PacedChatModel, sot_of

SMALL = ModelProfile.SMALL


@pytest.mark.parametrize("templates", [ENGLISH, CHINESE])
def test_examples_are_what_the_parser_reads(templates: PromptTemplates) -> None:
    for example, (turn, unbegun) in zip(templates.examples, templates.skeleton_examples(), strict=True):
        request, begun = turn
        assert turn == unbegun
        assert parse_skeleton(begun) == example.skeleton
        assert begun.startswith(templates.skeleton_prefill), "what a reply is begun with is shown, too"
        assert example.question in request
    for detail in get_args(Detail):
        turns = templates.expansion_examples(detail)
        for example, ((request, begun), (named, unbegun)) in zip(templates.examples, turns, strict=True):
            assert begun == f"{templates.expansion_reply_start(example.point)} {unbegun}"
            assert unbegun == example.expansion(detail)
            assert "\n" not in begun
            assert templates.lengths[detail] in request
            assert named.startswith(request)
            assert named.endswith(f"{example.number}. {example.point.text}")
            assert example.point.text not in request, "all points have one request"


def test_they_stand_behind_system_messages_and_before_the_conversation() -> None:
    conversation = Conversation.of(
        [SystemMessage("Be brief."), HumanMessage("Hello"), HumanMessage("And now?")]
    )
    messages = conversation.asking("request", [("asked", "replied")])
    assert [message.text for message in messages] == [
        "Be brief.",
        "asked",
        "replied",
        "Hello",
        "request",
    ]


@pytest.mark.parametrize("continues", [True, False])
async def test_models_that_continue_a_reply_see_them_and_stop_at_the_line(continues: bool) -> None:
    model = LocalChatModel() if continues else PacedChatModel()
    trace = (await sot_of(model).ainvoke(QUESTION, stop=["END"])).response_metadata["sot"]
    for messages, parameters in zip(model.requests, model.parameters, strict=True):
        is_point = messages[-1].text.endswith(":")
        if continues and trace["route"] == "sot":
            assert len(messages) == 2 * len(ENGLISH.examples) + 2
            bounds = SMALL.points["normal"] if is_point else SMALL.outline
            assert parameters["stop"] == ["END", *bounds.stop]
            assert parameters["max_tokens"] == bounds.max_tokens
        if not continues:
            assert len(messages) == 1
            assert parameters == {"stop": ["END"]}


async def test_bounds_of_the_user_hold_beside_those_of_points() -> None:
    model = LocalChatModel()
    bound = model.bind(stop=["OWN"], max_tokens=7)
    await sot_of(bound.with_config(tags=["a"])).ainvoke(QUESTION)
    await sot_of(model).ainvoke(QUESTION, max_tokens=500)
    (_, outline, *_), last = model.parameters, model.parameters[-1]  # the plain answer is begun first
    assert (outline["stop"], outline["max_tokens"]) == (["OWN", "\n\n"], 7)
    assert last["max_tokens"] == 500


async def test_a_model_the_user_vouches_for_gets_the_requests_alone() -> None:
    model = PacedChatModel()
    trace = (await sot_of(model, profile=ModelProfile(prefill=True)).ainvoke(QUESTION)).response_metadata[
        "sot"
    ]
    assert trace["route"] == "sot"
    assert {len(messages) for messages in model.requests} == {2}  # the question and the reply's beginning
    assert model.parameters == [{"stop": None}] * 4


@pytest.mark.parametrize(
    ("model", "options", "profile"),
    [
        (LocalChatModel(), {}, ModelProfile.SMALL),
        (LocalChatModel().bind(stop=["x"]).with_retry(), {}, ModelProfile.SMALL),
        (PacedChatModel(), {}, ModelProfile.STRONG),
        (PacedChatModel(), {"profile": "small"}, ModelProfile.SMALL),
        ("openai:gpt-4.1-mini", {}, ModelProfile.STRONG),
        ("anthropic:claude-sonnet-4-5", {}, ModelProfile.STRONG),
        ("openai:gpt-4.1-mini", {"base_url": "http://127.0.0.1:9/v1"}, ModelProfile.STRONG),  # a gateway
        ("openai:tiny", {"base_url": "http://127.0.0.1:9/v1"}, ModelProfile.SMALL),
        ("openai:tiny", {"base_url": "http://127.0.0.1:9/v1", "profile": "strong"}, ModelProfile.STRONG),
    ],
)
def test_the_kind_of_provider_chooses_the_profile(
    model: Any, options: dict[str, Any], profile: ModelProfile, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.delenv("OPENAI_BASE_URL", raising=False)
    assert sot_of(model, **options).options.profile is profile
