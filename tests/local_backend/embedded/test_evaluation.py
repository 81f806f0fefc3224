"""What the embedded model is measured on: requests whose good reply is known word for word."""

from __future__ import annotations

from collections import Counter

from local_backend.embedded.corpus import load_topics
from local_backend.embedded.evaluation import edit_prompts, follow_up_prompts, point_prompts
from local_backend.embedded.tasks import EDITS

TOPICS = load_topics()[:6]


def test_every_topic_has_an_answer_to_change_in_every_way() -> None:
    prompts = edit_prompts(TOPICS)
    assert prompts == edit_prompts(TOPICS)
    assert Counter(prompt.kind for prompt in prompts) == dict.fromkeys(EDITS, len(TOPICS))
    for prompt in prompts:
        (_, question), (_, answer), (role, request) = prompt.messages
        assert role == "user"
        assert any(question in topic.taught_questions for topic in TOPICS)
        assert request
        if prompt.kind == "shorter":
            assert answer.startswith(f"{prompt.reply}\n\n")
        elif prompt.kind == "add":
            assert prompt.reply.startswith(answer)
            assert len(prompt.reply) > len(answer)
        else:
            assert prompt.reply != answer
            assert len(set(prompt.reply.split()) ^ set(answer.split())) < 10


def test_follow_ups_are_drawn_alike_and_end_as_questions_of_the_user() -> None:
    prompts = follow_up_prompts(20, TOPICS)
    assert prompts == follow_up_prompts(20, TOPICS)
    assert len({prompt.messages for prompt in prompts}) == 20
    for prompt in prompts:
        assert prompt.kind == "condense"
        assert prompt.messages[-1][0] == "user"
        assert prompt.reply
        assert prompt.reply not in prompt.messages[-1][1]


def test_every_point_is_asked_for_by_itself_as_skeletons_are_expanded() -> None:
    prompts = point_prompts(TOPICS)
    points = [(topic, point) for topic in TOPICS for point in topic.points]
    assert len(prompts) == len(points)
    for prompt, (topic, point) in zip(prompts, points, strict=True):
        ((_, request),) = prompt.messages
        assert topic.skeleton in request
        assert point.heading in prompt.start
        assert prompt.reply == point.text
