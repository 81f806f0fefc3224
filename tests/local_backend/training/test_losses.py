"""The losses agree with a slow reference that runs the model once for every prefix."""

from __future__ import annotations

import math
import random
from collections.abc import Callable, Sequence
from dataclasses import replace

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from transformers import PreTrainedModel

from local_backend.training.losses import (
    IGNORED,
    NO_TEACHER,
    autoregressive_loss,
    consistency_loss,
    divergence,
)
from local_backend.training.packing import Copy, Example, PackedForward, pack
from local_backend.training.trainer import LossOptions, packed_losses
from tests.local_backend.models.architectures import ARCHITECTURES, random_model

END = 7


# The reference: one forward for every prefix, sums in plain Python ------------------------------------


def _distribution(model: PreTrainedModel, prefix: Sequence[int]) -> list[float]:
    with torch.no_grad():
        logits = model(torch.tensor([list(prefix)])).logits[0, -1].double()
    largest = max(logits.tolist())
    weights = [math.exp(value - largest) for value in logits.tolist()]
    return [weight / sum(weights) for weight in weights]


def _kl(p: list[float], q: list[float]) -> float:
    return sum(a * math.log(a / b) for a, b in zip(p, q, strict=True) if a > 0)


def _reference_global(model: PreTrainedModel, examples: Sequence[Example]) -> float:
    apart = []
    for example in examples:
        for copy in example.copies:
            for number in range(len(copy.token_ids)):
                place = copy.start + number
                if place + 1 >= len(example.answer_ids):
                    break  # nothing follows the end token
                right = [*example.prompt_ids, *example.answer_ids[: place + 1]]
                guess = [
                    *example.prompt_ids,
                    *example.answer_ids[: copy.start],
                    *copy.token_ids[: number + 1],
                ]
                apart.append(_kl(_distribution(model, right), _distribution(model, guess)))
    return sum(apart) / len(apart)


def _reference_local(model: PreTrainedModel, examples: Sequence[Example]) -> float:
    apart = []
    for example in examples:
        for copy in example.copies:
            if copy.next_copy is None:
                continue
            following = example.copies[copy.next_copy]
            for number in range(len(copy.token_ids)):
                place = copy.start + number
                if place + 1 >= len(example.answer_ids):
                    break
                guess = [
                    *example.prompt_ids,
                    *example.answer_ids[: copy.start],
                    *copy.token_ids[: number + 1],
                ]
                settled = [*example.prompt_ids, *example.answer_ids[: min(place + 1, following.start)]]
                ahead = place + 1 - following.start
                if ahead > len(following.token_ids):
                    continue  # the next iterate does not reach so far
                later = [*settled, *following.token_ids[: max(0, ahead)]]
                apart.append(_kl(_distribution(model, later), _distribution(model, guess)))
    return sum(apart) / len(apart)


def _reference_autoregressive(model: PreTrainedModel, examples: Sequence[Example]) -> float:
    surprise = []
    for example in examples:
        for place, token in enumerate(example.answer_ids):
            prefix = [*example.prompt_ids, *example.answer_ids[:place]]
            surprise.append(-math.log(_distribution(model, prefix)[token]))
    return sum(surprise) / len(surprise)


def _ragged_examples(rng: random.Random, vocabulary: int) -> list[Example]:
    """Rows of different lengths: blocks cut by the end token, beyond it, empty, overlapping, chained."""

    def tokens(count: int) -> tuple[int, ...]:
        return tuple(rng.randrange(10, vocabulary) for _ in range(count))

    examples = []
    for num_prompt, num_answer in ((1, 9), (6, 3), (11, 14)):
        answer = (*tokens(num_answer - 1), END)
        copies = [
            Copy(0, tokens(4), next_copy=1),
            Copy(2, tokens(5), next_copy=2),
            Copy(min(6, num_answer), tokens(8)),  # reaches beyond the end token
            Copy(num_answer, tokens(3)),  # nothing left to predict
            Copy(1, answer[1:3]),  # right already
            Copy(0, ()),
        ]
        examples.append(Example(tokens(num_prompt), answer, tuple(copies)))
    return examples


@pytest.fixture(scope="module")
def model() -> PreTrainedModel:
    return random_model("llama", vocab_size=60, num_hidden_layers=2)


def test_consistency_losses_agree_with_the_reference(model: PreTrainedModel) -> None:
    examples = _ragged_examples(random.Random(1), 60)
    batch = pack(examples, pad_id=3)
    with torch.no_grad():
        logits = PackedForward(model)(model, batch)
    got = consistency_loss(logits, batch.fixed_point_column)
    assert got.item() == pytest.approx(_reference_global(model, examples), abs=1e-5, rel=1e-5)
    got = consistency_loss(logits, batch.next_iterate_column)
    assert got.item() == pytest.approx(_reference_local(model, examples), abs=1e-5, rel=1e-5)


def test_the_autoregressive_loss_agrees_with_the_reference(model: PreTrainedModel) -> None:
    examples = _ragged_examples(random.Random(0), 60)
    batch = pack(examples, pad_id=3)
    with torch.no_grad():
        logits = PackedForward(model)(model, batch)
    expected = _reference_autoregressive(model, examples)
    assert autoregressive_loss(logits, batch.labels).item() == pytest.approx(expected, abs=1e-5, rel=1e-5)


@pytest.mark.parametrize("architecture", ARCHITECTURES)
def test_every_architecture_reads_a_packed_row_as_its_parts(architecture: str) -> None:
    model = random_model(architecture, vocab_size=60)
    examples = _ragged_examples(random.Random(architecture), 60)
    # Longer than the sliding windows of the architectures that have one.
    examples.append(Example(tuple(range(10, 40)), (*range(20, 34), END), (Copy(3, tuple(range(30, 40))),)))
    batch = pack(examples, pad_id=0)
    with torch.no_grad():
        logits, narrowed = PackedForward(model).learned(model, batch)
    got = consistency_loss(logits, narrowed.fixed_point_column)
    assert got.item() == pytest.approx(_reference_global(model, examples), abs=1e-4, rel=1e-4)


def test_losses_are_the_same_on_the_columns_with_targets(model: PreTrainedModel) -> None:
    # Prompts begin alike, so that some columns have no target in any row.
    ragged = _ragged_examples(random.Random(2), 60)
    examples = [replace(one, prompt_ids=(5,) * 9 + one.prompt_ids) for one in ragged]
    batch, forward, options = pack(examples, pad_id=0), PackedForward(model), LossOptions(local_weight=1.0)
    with torch.no_grad():
        logits, narrowed = forward.learned(model, batch)
        every = packed_losses(forward(model, batch), batch, options)
    assert logits.shape[1] < batch.input_ids.shape[1]
    for name, loss in packed_losses(logits, narrowed, options).items():
        assert loss.item() == pytest.approx(every[name].item(), abs=1e-5, rel=1e-5)


def test_padding_changes_nothing(model: PreTrainedModel) -> None:
    examples = _ragged_examples(random.Random(1), 60)
    forward = PackedForward(model)
    one, other = pack(examples, pad_id=3), pack(examples, pad_id=50)
    with torch.no_grad():
        got = [consistency_loss(forward(model, batch), batch.fixed_point_column) for batch in (one, other)]
    assert got[0] == got[1]


def test_where_nobody_agrees_the_loss_is_zero_and_has_a_gradient() -> None:
    logits = torch.randn(2, 3, 5, requires_grad=True)
    nobody = torch.full((2, 3), NO_TEACHER)
    losses: list[Callable[[], torch.Tensor]] = [
        lambda: consistency_loss(logits, nobody),
        lambda: autoregressive_loss(logits, torch.full((2, 3), IGNORED)),
    ]
    for loss in losses:
        value = loss()
        assert value.item() == 0
        value.backward()
        assert logits.grad is not None
        assert not logits.grad.any()


@given(seed=st.integers(0, 2**31), scale=st.floats(0.01, 30))
@settings(max_examples=30, deadline=None)
def test_the_divergence_is_zero_for_equals_and_positive_else(seed: int, scale: float) -> None:
    generator = torch.Generator().manual_seed(seed)
    one, other = (torch.randn(4, 9, generator=generator) * scale for _ in range(2))
    assert divergence(one, one).abs().max() < 1e-5
    assert (divergence(one, other) > -1e-6).all()
    assert torch.allclose(
        divergence(one, other), divergence(one + 3, other - 2), atol=1e-4
    )  # of softmax alone


def test_tokens_that_a_model_never_writes_change_no_loss() -> None:
    """Some models say -inf to them."""
    student, teacher = torch.randn(4, 7, requires_grad=True), torch.randn(4, 7)
    never = torch.full((4, 1), -math.inf)
    with_them = divergence(torch.cat([student, never], -1), torch.cat([teacher, never], -1))
    assert torch.allclose(with_them, divergence(student, teacher))
    with_them.sum().backward()
    assert student.grad is not None
    assert student.grad.isfinite().all()
    assert student.grad.any()
    nothing = consistency_loss(never.expand(4, 7)[None], torch.full((1, 4), NO_TEACHER))
    assert nothing.item() == 0


def test_no_gradient_flows_through_the_teacher() -> None:
    student, teacher = (torch.randn(3, 6, requires_grad=True) for _ in range(2))
    divergence(student, teacher).sum().backward()
    assert teacher.grad is None or not teacher.grad.any()
    assert student.grad is not None
    assert student.grad.any()
