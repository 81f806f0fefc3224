"""The replay: every token written once, one row in a slot at a time, costs as computed by hand."""

from __future__ import annotations

import pytest
from hypothesis import given
from hypothesis import strategies as st

from benchmarks.paper_scheduling.pictures import draw_predictions, draw_schedules, schedule_bars
from benchmarks.paper_scheduling.remaining import expected_remaining, replay_longest_remaining
from benchmarks.paper_scheduling.replay import Replay, made_up_lengths, replay_slots, replay_static
from benchmarks.paper_scheduling.static import StaticOptions
from local_backend.models.forward_cost import ForwardCost
from local_backend.scheduling.lengths import Prediction

VANILLA = StaticOptions.vanilla(batch_rows=2, max_tokens=64, group_rows=4)
ALL = StaticOptions(batch_rows=2, max_tokens=64, group_rows=8, bin_tokens=8)


def known(lengths: list[int]) -> list[Prediction | None]:
    return [Prediction(length, length) for length in lengths]


def test_vanilla_by_hand() -> None:
    lengths = [3, 10, 1, 4, 6]
    replay = replay_static(lengths, known(lengths), VANILLA)
    # Batches of 3 and 10, of 1 and 4; the fifth row is a separate group.
    assert replay.num_forwards == 10 + 4 + 6
    assert replay.cost(ForwardCost.flat(2), padded=True) == 20
    assert replay.cost(ForwardCost.flat(1), padded=True) == 2 * 14 + 6
    assert replay.cost(ForwardCost.flat(1)) == sum(lengths)
    assert replay.padding_share() == pytest.approx(1 - 24 / 40)


def test_slots_by_hand() -> None:
    lengths = [4, 1, 1, 6]
    first_come = replay_slots(lengths, known(lengths), "first_come", num_slots=2, group_rows=4)
    assert [(stay.row, stay.start, stay.place) for stay in first_come.stays] == [
        (0, 0, 0),
        (1, 0, 1),
        (2, 1, 1),
        (3, 2, 1),
    ]
    assert first_come.num_forwards == 8
    longest = replay_slots(lengths, known(lengths), "longest_first", num_slots=2, group_rows=4)
    assert longest.num_forwards == 6
    assert [stay.is_refill for stay in longest.stays] == [False, False, True, True]


def test_a_stream_does_not_wait_for_the_longest_row_of_a_group() -> None:
    lengths = [8, 2, 2, 2, 2, 2]
    groups = replay_slots(lengths, known(lengths), "first_come", num_slots=2, group_rows=3)
    assert groups.num_forwards == 8 + 4
    stream = replay_slots(lengths, known(lengths), "first_come", num_slots=2, group_rows=3, is_streamed=True)
    assert stream.num_forwards == 10
    assert [stay.start for stay in stream.stays] == [0, 0, 2, 4, 6, 8]


def test_delayed_slots_are_refilled_together_as_in_the_engine() -> None:
    lengths = [40, 10, 12, 40, *[20] * 40]
    delayed = replay_slots(
        lengths, known(lengths), "first_come", num_slots=32, group_rows=64, is_streamed=True, is_delayed=True
    )
    starts = [stay.start for stay in delayed.stays]
    # Two of 32 slots are free after 10 and 12 forwards, fewer than an eighth: they wait for eight forwards.
    assert starts == [*[0] * 32, 18, 18, *[20] * 10]


def test_an_answer_that_outgrows_its_prediction_is_expected_to_go_on_for_longer() -> None:
    sure, unsure = (expected_remaining(Prediction(100, most), 512) for most in (110, 200))
    assert sure[0] == pytest.approx(100, rel=0.05)
    assert unsure[0] > sure[0]
    assert sure[300] > sure[150] > sure[110] < sure[0]
    assert (sure >= 1).all()


def test_the_row_with_the_longest_expected_remainder_gets_the_slot() -> None:
    # The first row was thought to be the longest; when it is nearly done, the second takes its slot.
    replay = replay_longest_remaining([40, 40], [Prediction(100, 100), Prediction(70, 70)], num_slots=1)
    assert replay.stays[0].end == "ended"
    replay = replay_longest_remaining([100, 60], [Prediction(100, 100), Prediction(60, 60)], num_slots=1)
    assert replay.num_failures
    assert replay.stays[0].end == "preempted"
    assert replay.num_forwards == 160


def _check(replay: Replay, lengths: list[int], *, resumed: bool = True) -> None:
    written = [0] * len(lengths)
    ends: dict[int, int] = {}
    for stay in sorted(replay.stays, key=lambda one: one.start):
        assert ends.get(stay.place, 0) <= stay.start
        ends[stay.place] = stay.start + stay.num_tokens
        if resumed or stay.end == "ended":
            written[stay.row] += stay.num_tokens
        assert stay.start + stay.num_tokens <= replay.num_forwards
    assert written == lengths
    assert sorted(stay.row for stay in replay.stays if stay.end == "ended") == list(range(len(lengths)))
    assert replay.num_failures == sum(stay.end == "preempted" for stay in replay.stays)


@given(
    st.lists(st.tuples(st.integers(1, 64), st.integers(0, 64)), min_size=1, max_size=30),
    st.booleans(),
)
def test_every_token_is_written_once_in_a_place_of_its_own(
    rows: list[tuple[int, int]], resumed: bool
) -> None:
    lengths = [length for length, _ in rows]
    predictions = [Prediction(said, said) for _, said in rows]
    _check(replay_static(lengths, predictions, VANILLA), lengths)
    options = StaticOptions(2, 64, 8, 8, resume=resumed)
    _check(replay_static(lengths, predictions, options), lengths, resumed=resumed)
    for policy in ("first_come", "shortest_first", "longest_first"):
        slots = replay_slots(lengths, predictions, policy, num_slots=3, group_rows=8)
        _check(slots, lengths)
        assert slots.cost(ForwardCost.flat(3)) >= sum(lengths) / 3 - 1e-9
        for is_delayed in (False, True):
            stream = replay_slots(
                lengths,
                predictions,
                policy,
                num_slots=3,
                group_rows=8,
                is_streamed=True,
                is_delayed=is_delayed,
            )
            _check(stream, lengths)
    _check(replay_longest_remaining(lengths, predictions, num_slots=3, group_rows=8), lengths)


def test_what_is_known_beforehand_helps() -> None:
    lengths = [sample[0] for sample in made_up_lengths(256, seed=2)]
    costs = ForwardCost.flat(16)
    vanilla = replay_static(lengths, known(lengths), StaticOptions.vanilla()).cost(costs, padded=True)
    static = replay_static(lengths, known(lengths), StaticOptions()).cost(costs)
    first_come = replay_slots(lengths, known(lengths), "first_come").cost(costs)
    longest = replay_slots(lengths, known(lengths), "longest_first").cost(costs)
    assert longest < first_come < vanilla
    assert longest < static < vanilla
    assert longest == pytest.approx(sum(lengths) / 16, rel=0.05)


def test_contexts_count_where_costs_do() -> None:
    costs = ForwardCost((0, 100), (1,), (1, 2), (((1.0, 1.0),), ((2.0, 2.0),)))
    replay = replay_static([64], [None], StaticOptions.vanilla(batch_rows=1))
    assert 64 < replay.cost(costs) < 128


def test_lengths_out_of_range_are_refused() -> None:
    with pytest.raises(ValueError, match="between 1 and 64 tokens, got 65"):
        replay_static([65], [None], VANILLA)
    with pytest.raises(ValueError, match="1 lengths and 0 predictions"):
        replay_slots([1], [], "first_come")
    with pytest.raises(ValueError, match="at least 1"):
        replay_slots([1], [None], "first_come", num_slots=0)


def test_made_up_lengths_are_the_same_for_the_same_seed() -> None:
    assert made_up_lengths(5, seed=1) == made_up_lengths(5, seed=1) != made_up_lengths(5, seed=2)
    assert all(1 <= length <= 512 for answers in made_up_lengths(200) for length in answers)


def test_the_picture_holds_every_forward_of_every_row() -> None:
    lengths = [30, 3, 9, 40]
    wrong: list[Prediction | None] = [Prediction(2, 2)] * 4
    replay = replay_static(lengths, wrong, ALL)
    assert replay.num_failures
    bars = schedule_bars(replay)
    assert bars["preempted"]
    assert bars["resumed or restarted"]
    drawn = {kind: sum(width for _, _, width in places) for kind, places in bars.items()}
    assert sum(drawn.values()) - drawn["padding"] == sum(lengths)
    figure = draw_schedules({"static": replay, "slots": replay_slots(lengths, wrong, "first_come")})
    assert figure._repr_png_().startswith(b"\x89PNG")  # type: ignore[attr-defined]  # of our own subclass
    with pytest.raises(ValueError, match="nothing to draw"):
        draw_schedules({})


def test_predictions_are_drawn() -> None:
    figure = draw_predictions([Prediction(10, 20), Prediction(30, 40)], [15, 50])
    assert figure._repr_png_().startswith(b"\x89PNG")  # type: ignore[attr-defined]  # of our own subclass
