"""``ObservedLengths``: prompts with the same beginning share a prediction."""

from __future__ import annotations

from hypothesis import given
from hypothesis import strategies as st

from local_backend.scheduling.lengths import LearningPredictor, ObservedLengths, Prediction


def test_templates_are_told_apart_and_strangers_get_what_all_gave() -> None:
    observed = ObservedLengths(min_answers=5)
    assert isinstance(observed, LearningPredictor)
    short, long = [1] * 10, [2] * 40
    assert observed.predict([short]) == [None]
    for number in range(10):
        observed.observe([*short, 100 + number], 10 + number)
        observed.observe([*long, 100 + number], 200 + number)
    predictions = observed.predict([[*short, 7], [*long, 7], [3] * 9, [1]])
    assert predictions[0] == Prediction(14, 18)
    assert predictions[1] == Prediction(204, 208)
    assert predictions[2] == predictions[3] == Prediction(19, 207)
    observed.observe([*short, 1], 1000)
    (after,) = observed.predict([[*short, 7]])
    assert after == Prediction(15, 19)


@given(st.lists(st.tuples(st.lists(st.integers(0, 2), max_size=20), st.integers(1, 99)), max_size=30))
def test_what_is_remembered_is_bounded_and_predictions_are_of_what_was_seen(
    seen: list[tuple[list[int], int]],
) -> None:
    observed = ObservedLengths(min_answers=1, max_templates=4)
    for prompt, length in seen:
        observed.observe(prompt, length)
    lengths = {length for _, length in seen}
    for prediction in observed.predict([prompt for prompt, _ in seen]):
        assert prediction is not None
        assert {prediction.num_tokens, prediction.max_num_tokens} <= lengths
