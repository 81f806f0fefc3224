"""How wide a forward pays: measured, interpolated, and spent where most is expected."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st
from pydantic import TypeAdapter
from transformers import PreTrainedModel, PreTrainedTokenizerBase

from local_backend import Draft, Engine, ReferenceCopy, SamplingParams
from local_backend.models.architecture import Architecture
from local_backend.models.forward_cost import ForwardCost, ForwardTimer, measure_forward_cost
from local_backend.models.runner import ModelRunner, padded_width
from tests.local_backend.models.architectures import random_model

COSTS = ForwardCost((100, 300), (1, 4), (1, 9), (((1.0, 2.0), (2.0, 10.0)), ((3.0, 4.0), (4.0, 12.0))))


@pytest.mark.parametrize(
    ("context", "rows", "width", "seconds"),
    [
        (100, 1, 1, 1.0),
        (100, 1, 5, 1.5),
        (100, 1, 17, 3.0),
        (200, 1, 1, 2.0),
        (100, 4, 9, 10.0),
        (10, 1, 1, 1.0),
        (500, 4, 9, 14.0),
    ],
)
def test_costs_are_linear_between_what_was_measured_and_beyond(
    context: int, rows: int, width: int, seconds: float
) -> None:
    assert COSTS(context=context, rows=rows, width=width) == pytest.approx(seconds)


def test_costs_go_through_json() -> None:
    adapter = TypeAdapter(ForwardCost)
    assert adapter.validate_json(adapter.dump_json(COSTS)) == COSTS


def test_free_tokens_are_free_and_the_rest_is_not() -> None:
    costs = ForwardCost.flat(16)
    assert costs(context=9, rows=1, width=16) == costs(context=9, rows=4, width=4) == 1.0
    assert costs(context=9, rows=2, width=16) == pytest.approx(2.0)


@pytest.mark.parametrize("axis", [(), (3, 2), (2, 2)])
def test_an_axis_must_ascend(axis: tuple[int, ...]) -> None:
    with pytest.raises(ValueError, match="widths must ascend"):
        ForwardCost((1,), (1,), axis, (((1.0,) * len(axis),),))


def test_a_table_has_the_shape_of_its_axes() -> None:
    with pytest.raises(ValueError, match="1 contexts x 1 rows x 2 widths"):
        ForwardCost((1,), (1,), (1, 2), (((1.0,),),))


def _likely(*probabilities: float) -> Draft:
    size = len(probabilities)
    return Draft(tuple(range(size)), tuple(range(-1, size - 1)), probabilities)


def test_a_draft_is_as_wide_as_pays() -> None:
    costs = ForwardCost((1,), (1,), (1, 6, 8), (((1.0, 1.0, 3.0),),))
    assert costs.best_draft_width([_likely(0.9, 0.8, 0.7, 0.6, 0.5, 0.4)], context=1) == 5
    assert costs.best_draft_width([_likely(0.9, 0.8)], context=1) == 2
    dear = ForwardCost((1,), (1,), (1, 2), (((1.0, 2.0),),))
    assert dear.best_draft_width([_likely(0.5, 0.4)], context=1) == 0
    assert dear.best_draft_width([Draft.chain([1, 2])], context=1) == 2  # who does not say is not cut


def test_rows_share_one_budget() -> None:
    """What one row alone would not be given is spent when others need the width anyway, and the reverse."""
    costs = ForwardCost((1,), (1, 2), (1, 2), (((1.0, 1.3), (1.0, 1.5)),))
    assert costs.best_draft_width([_likely(0.35)], context=1) == 1
    assert costs.best_draft_width([_likely(0.35), _likely(0.05)], context=1) == 0
    assert costs.best_draft_width([_likely(0.35), _likely(0.9)], context=1) == 1


@given(st.lists(st.lists(st.floats(0, 1), max_size=12), min_size=1, max_size=4))
def test_no_other_width_promises_more_tokens_a_second(rows: list[list[float]]) -> None:
    drafts = [_likely(*sorted(each, reverse=True)) for each in rows]

    def rate(width: int) -> float:
        expected = sum(1 + sum(draft.probabilities[:width]) for draft in drafts)
        return expected / COSTS(context=150, rows=len(drafts), width=padded_width(1 + width))

    best = COSTS.best_draft_width(drafts, context=150)
    assert rate(best) == pytest.approx(max(map(rate, range(13))))


@given(st.lists(st.lists(st.integers(0, 2), max_size=5), max_size=6), st.integers(0, 12))
def test_the_likeliest_part_is_a_tree_with_the_largest_probabilities(
    paths: list[list[int]], max_tokens: int
) -> None:
    chains = [
        Draft(tuple(path), tuple(range(-1, len(path) - 1)), tuple(0.9 ** (n + 1) for n in range(len(path))))
        for path in paths
    ]
    whole = Draft.merged(chains)
    part = whole.likeliest(max_tokens)
    assert len(part) == min(len(whole), max_tokens)
    assert sorted(part.probabilities) == sorted(sorted(whole.probabilities, reverse=True)[:max_tokens])


def test_probabilities_survive_cutting_and_merging() -> None:
    draft = _likely(0.9, 0.5, 0.2)
    assert draft.truncated(max_tokens=2, max_depth=9).probabilities == (0.9, 0.5)
    assert Draft.merged([draft, Draft.chain([0])]).probabilities == ()
    assert Draft.merged([draft, Draft((0,), (-1,), (0.95,))]).probabilities == (0.95, 0.5, 0.2)
    with pytest.raises(ValueError, match="1 tokens but 2 probabilities"):
        Draft((1,), (-1,), (0.1, 0.2))


def test_a_forward_is_padded_to_one_of_few_widths() -> None:
    widths = [padded_width(width) for width in range(1, 300)]
    assert all(padded >= width for width, padded in enumerate(widths, 1))
    assert len(set(widths)) <= 16
    assert all(padded_width(padded) == padded for padded in set(widths))


# Measured ------------------------------------------------------------------------------------------


@pytest.mark.parametrize(("seconds", "rows"), [(60.0, (1, 4)), (0.0, (1,))])
def test_measuring_leaves_a_table_that_ascends(
    seconds: float, rows: tuple[int, ...], monkeypatch: pytest.MonkeyPatch
) -> None:
    """Of fewer batches where time is up: what is not tried costs by the token."""
    monkeypatch.setattr("local_backend.models.forward_cost._MAX_SECONDS", seconds)
    costs = _measure(max_rows=4)
    assert costs.rows == rows
    for table in costs.seconds:
        for line in table:
            assert all(seconds > 0 for seconds in line)
            assert list(line) == sorted(line)


@pytest.fixture
def forwards_take(monkeypatch: pytest.MonkeyPatch) -> Callable[[Callable[[int], float]], Callable[[], float]]:
    """Makes forwards take as long as a function of their tokens says, on a clock that it returns."""

    def install(seconds_of: Callable[[int], float]) -> Callable[[], float]:
        now = 0.0

        def forward(_: ModelRunner, __: int, unread: list[object], drafts: list[Draft]) -> None:
            nonlocal now
            now += seconds_of(len(unread) * (1 + len(drafts[0])))

        monkeypatch.setattr(ModelRunner, "__call__", forward)
        monkeypatch.setattr("local_backend.models.forward_cost.time.perf_counter", lambda: now)
        return lambda: now

    return install


def _measure(max_rows: int = 1, **changes: object) -> ForwardCost:
    model = random_model("llama", **changes)
    return measure_forward_cost(ForwardTimer(model, Architecture.of(model), max_rows=max_rows))


@pytest.mark.parametrize("max_seconds", [0.0, 100.0])
def test_two_widths_are_enough_to_know_them_all(
    max_seconds: float, forwards_take: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    """On a slow or busy machine there is time for few forwards, and a table for the rest all the same."""
    clock = forwards_take(lambda tokens: 2.0 + 0.125 * tokens)
    monkeypatch.setattr("local_backend.models.forward_cost._MAX_SECONDS", max_seconds)
    costs = _measure()
    for width in (1, 2, 3, 8, 20, 64, 100):
        assert costs(context=100, rows=1, width=width) == pytest.approx(2.0 + 0.125 * width)
    assert clock() < (40 if max_seconds == 0 else 200)


@pytest.mark.parametrize("begins", range(0, 120, 5))
def test_one_disturbance_changes_nothing(
    begins: int, forwards_take: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Another process may compute while forwards are timed, and some in a row take longer."""

    def seconds_of(tokens: int) -> float:
        return 2.0 + 0.125 * tokens + 9.0 * (begins < clock() < begins + 20)

    monkeypatch.setattr("local_backend.models.forward_cost._MAX_SECONDS", 1000.0)
    clock = forwards_take(seconds_of)
    costs = _measure()
    for width in (1, 2, 4, 8):
        assert costs(context=100, rows=1, width=width) == pytest.approx(2.0 + 0.125 * width)


def test_a_narrow_forward_costs_at_most_what_a_wider_one_does(
    forwards_take: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    forwards_take(lambda tokens: 2.0 + 0.125 * tokens + 9.0 * (tokens == 2))
    monkeypatch.setattr("local_backend.models.forward_cost._MAX_SECONDS", 1000.0)
    costs = _measure()
    for width in (1, 4, 8, 64):
        assert costs(context=100, rows=1, width=width) == pytest.approx(2.0 + 0.125 * width)
    assert costs(context=100, rows=1, width=2) == pytest.approx(2.5)


def test_a_model_with_few_positions_can_be_measured() -> None:
    costs = _measure(max_position_embeddings=12)
    assert costs(context=5, rows=1, width=2) > 0


def test_an_engine_uses_the_costs_it_is_given(
    model: PreTrainedModel, tokenizer: PreTrainedTokenizerBase
) -> None:
    """Where draft tokens cost a forward each, unlikely ones are not verified; the text is the same."""
    prompt = [5, 6, 7, 8, 9] * 6
    drafted = {}
    texts = []
    for name, costs in (("free", ForwardCost.flat(1000)), ("dear", ForwardCost.flat(1, per_token=50.0))):
        with Engine(model, tokenizer, ReferenceCopy(), width_costs=costs) as engine:
            assert engine.width_costs is costs
            (completion,) = engine.generate([prompt], SamplingParams(max_tokens=30, ignore_end=True))
            drafted[name] = completion.stats.num_drafted
            texts.append(completion.token_ids)
    assert texts[0] == texts[1]
    assert drafted["dear"] < drafted["free"]


@pytest.mark.parametrize(("drafter", "is_measured"), [("combined", True), ("autoregressive", False)])
def test_no_answer_waits_for_costs(
    drafter: str, is_measured: bool, tokenizer: PreTrainedTokenizerBase, monkeypatch: pytest.MonkeyPatch
) -> None:
    """They are measured when the first engine of a model is made, if it drafts."""
    measured: list[ForwardTimer] = []

    def measure(timer: ForwardTimer) -> ForwardCost:
        measured.append(timer)
        return COSTS

    monkeypatch.setattr("local_backend.models.forward_cost.measure_forward_cost", measure)
    model = random_model("llama")
    for _ in range(2):
        with Engine(model, tokenizer, drafter) as engine:
            assert len(measured) == is_measured
            engine.generate([[5, 6, 7, 8, 9] * 6], SamplingParams(max_tokens=30, ignore_end=True))
            assert len(measured) == is_measured
    with Engine(random_model("llama"), tokenizer, drafter):
        assert len(measured) == 2 * is_measured
