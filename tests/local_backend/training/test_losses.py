"""The loss of a packed batch agrees with a slow reference that runs the model once for every prefix."""

from __future__ import annotations

import math
import random
from collections.abc import Sequence

import pytest
import torch
from torch import Tensor
from transformers import PreTrainedModel

from local_backend.training.losses import Head, Targets
from local_backend.training.packing import Copies, PackedForward, Text, Texts, pack
from local_backend.training.trainer import answer_tokens, plain_predictions
from tests.local_backend.models.architectures import ARCHITECTURES, random_model

END = 7
AR_WEIGHT, DECAY = 3.0, 0.5


def _log_probability(model: PreTrainedModel, prefix: Sequence[int], token: int) -> float:
    with torch.no_grad():
        logits = model(torch.tensor([list(prefix)])).logits[0, -1].double()
    return float(logits.log_softmax(-1)[token])


def _reference(model: PreTrainedModel, texts: Sequence[Text], copies: Copies) -> float:
    """One forward for every prefix, sums in plain Python; ``texts`` from short to long."""
    clean = [
        _log_probability(model, [*prompt, *answer[:place]], token)
        for prompt, answer in texts
        for place, token in enumerate(answer)
    ]
    guessed, weights = [], []
    for (prompt, answer), starts, blocks in zip(
        texts, copies.starts.tolist(), copies.guesses.tolist(), strict=True
    ):
        for start, block in zip(starts, blocks, strict=True):
            for number in range(len(block)):
                if start + number + 1 < len(answer):  # else nothing is left to predict
                    prefix = [*prompt, *answer[:start], *block[: number + 1]]
                    guessed.append(_log_probability(model, prefix, answer[start + number + 1]))
                    weights.append(DECAY**number)
    behind = sum(weight * each for weight, each in zip(weights, guessed, strict=True)) / sum(weights)
    return -AR_WEIGHT * sum(clean) / len(clean) - behind


def _ragged(seed: str, vocabulary: int) -> tuple[list[Text], Copies]:
    """Texts of different lengths; blocks cut by the end token, beyond it, overlapping."""
    rng = random.Random(seed)

    def tokens(count: int) -> list[int]:
        return [rng.randrange(10, vocabulary) for _ in range(count)]

    texts: list[Text] = [
        (tokens(size), [*tokens(length - 1), END]) for size, length in ((1, 3), (6, 9), (11, 19))
    ]
    starts = torch.tensor([[0, 1, 2], [0, 3, 8], [0, 5, 17]])
    guesses = torch.tensor([[tokens(5) for _ in range(3)] for _ in texts])
    return texts, Copies(starts, guesses)


def _loss(model: PreTrainedModel, texts: Sequence[Text], copies: Copies) -> tuple[Tensor, Tensor]:
    laid_out = Texts.of(texts)
    batch = pack(
        laid_out,
        torch.arange(len(texts)),
        laid_out.groups[-1]._replace(first=0),
        copies,
        clean_weight=AR_WEIGHT,
        decay=DECAY,
    )
    return PackedForward(model).loss(batch, answer_tokens(laid_out))


@pytest.mark.parametrize("architecture", ARCHITECTURES)
def test_every_architecture_reads_a_packed_row_as_its_parts(architecture: str) -> None:
    model = random_model(architecture, vocab_size=60)
    texts, copies = _ragged(architecture, 60)
    loss, _ = _loss(model, texts, copies)
    assert loss.item() == pytest.approx(_reference(model, texts, copies), abs=1e-4, rel=1e-4)


@pytest.mark.parametrize("architecture", ["llama", "gpt2", "gemma3_text"])
@pytest.mark.parametrize("is_tied", [True, False])
def test_the_gradient_is_that_of_the_whole_logits(
    architecture: str, is_tied: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    """With a cap on the logits, tied weights and positions in several parts, too."""
    model = random_model(architecture, vocab_size=60, tie_word_embeddings=is_tied)
    token_ids = torch.randint(60, (2, 9), generator=torch.Generator().manual_seed(0))
    likely = torch.rand(18, 60, generator=torch.Generator().manual_seed(1)).softmax(-1).topk(4)
    probabilities = likely.values / likely.values.sum(-1, keepdim=True)
    weights = torch.linspace(0.1, 1, 18)
    logits = model(token_ids).logits.flatten(0, 1).log_softmax(-1)
    expected = -((logits.gather(1, likely.indices) * probabilities).sum(-1) * weights).sum()
    expected.backward()
    gradients = {
        name: value.grad.clone() for name, value in model.named_parameters() if value.grad is not None
    }
    model.zero_grad()
    head = Head(model)
    monkeypatch.setattr(head, "num_rows", 5)
    hidden = model.base_model(input_ids=token_ids).last_hidden_state.flatten(0, 1)
    loss, predicted = head.loss(hidden, Targets(likely.indices, probabilities, weights))
    loss.backward()
    assert loss.item() == pytest.approx(expected.item(), rel=1e-5)
    assert torch.equal(predicted, logits.argmax(-1))
    for name, value in model.named_parameters():
        if name in gradients:
            assert value.grad is not None, name
            assert torch.allclose(value.grad, gradients[name], atol=1e-5, rtol=1e-4), name


def test_padding_and_the_order_of_rows_change_nothing() -> None:
    model = random_model("llama", vocab_size=60)
    texts, copies = _ragged("padding", 60)
    loss, predicted = _loss(model, texts, copies)
    longer: Text = (list(range(10, 50)), [11, 12, END])  # another width
    laid_out = Texts.of([*texts, longer])
    rows = torch.tensor([2, 0, 1])
    group = laid_out.groups[-1]._replace(first=0, num_answer=19)
    some = Copies(copies.starts[rows], copies.guesses[rows])
    batch = pack(laid_out, rows, group, some, clean_weight=AR_WEIGHT, decay=DECAY)
    other, again = PackedForward(model).loss(batch, answer_tokens(laid_out))
    assert other.item() == pytest.approx(loss.item(), rel=1e-5)
    assert torch.equal(again[:, -15:], predicted[rows][:, -15:])


def test_the_teacher_holds_the_likeliest_tokens_of_every_place() -> None:
    model = random_model("llama", vocab_size=60)
    texts, _ = _ragged("teacher", 60)
    laid_out = Texts.of(texts)
    token_ids, probabilities = plain_predictions(PackedForward(model), laid_out, 5, bf16=False)
    place = 0
    for prompt, answer in texts:
        for number in range(len(answer)):
            with torch.no_grad():
                logits = model(torch.tensor([[*prompt, *answer[:number]]])).logits[0, -1]
            likely = logits.softmax(-1).topk(5)
            assert torch.equal(token_ids[place].long(), likely.indices)
            assert torch.allclose(probabilities[place], likely.values / likely.values.sum(), atol=1e-5)
            place += 1
    assert place == len(token_ids)


def test_tokens_that_a_model_never_writes_change_no_loss() -> None:
    """Some models say -inf to them."""
    model = random_model("llama", vocab_size=60)
    head = Head(model)
    hidden = torch.randn(4, 48)
    targets = Targets(torch.tensor([[3, 59]] * 4), torch.tensor([[1.0, 0.0]] * 4), torch.ones(4))
    assert head.linear.bias is None
    head.linear.bias = torch.nn.Parameter(torch.zeros(60).index_fill(0, torch.tensor([59]), -math.inf))
    loss, _ = head.loss(hidden.requires_grad_(), targets)
    loss.backward()
    assert loss.isfinite()
    assert hidden.grad is not None
    assert hidden.grad.isfinite().all()


def test_a_model_without_a_linear_output_layer_is_refused() -> None:
    model = random_model("llama", vocab_size=60)
    model.set_output_embeddings(torch.nn.Identity())
    with pytest.raises(ValueError, match="no linear output layer"):
        Head(model)
