"""The second stage of the build: the model learns to say several next tokens in one forward.

Jacobi decoding begins a block with guesses. Here these are guess tokens, which no text holds, one for each
place ahead; behind any token of an answer the model is to say on the n-th of them what stands n places
further on. That is the global consistency loss (CLLM, arXiv 2403.00835) for the guess that decoding begins
with, which here is always the same; that tokens of their own stand for tokens to come is from PaSS (arXiv
2311.13581) and BiTA (arXiv 2401.12522). A guess token sees the text before it and itself, and no other guess
token: as they hang in a draft of :class:`~local_backend.drafters.guess_tokens.GuessTokens`.

What the model knew is kept by learning from the corpus beside it. Knows batches of text. Does not know
drafters, optimizers or when the stage begins.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass

import torch
from torch import Tensor
from torch.nn.functional import cross_entropy, linear
from transformers import LlamaForCausalLM, PreTrainedTokenizerFast

from local_backend.embedded.batches import draw_batch, fast_precision
from local_backend.embedded.decks import Decks

NUM_GUESSED = 4
GUESSED_KINDS: Mapping[str, float] = {"plain": 0.75, "expansion": 0.12, "questions": 0.13}
# A place further on is only worth something where those before it are right.
_PLACE_WEIGHT = 0.9
_AUTOREGRESSIVE_WEIGHT = 1.0


@dataclass(frozen=True)
class GuessedBatch:
    """Rows of text, and behind each row guess tokens that hang from its tokens.

    Attributes:
        input_ids, position_ids: ``[rows, text + guess columns]``.
        mask: Additive, over the columns of text alone, ``[rows, 1, text + guess columns, text]``.
        targets: What each column is to predict, -100 for nothing; ``[rows, text + guess columns]``.
        places: How many places ahead a guess token stands for, 0 in columns of text; of the same shape.
        weights: Of the columns' losses; of the same shape.
    """

    input_ids: Tensor
    position_ids: Tensor
    mask: Tensor
    targets: Tensor
    places: Tensor
    weights: Tensor


def with_guesses(batch: dict[str, Tensor], guess_ids: Sequence[int]) -> GuessedBatch:
    """Hang guess tokens from every column that learns something.

    Args:
        batch: See :func:`~local_backend.embedded.batches.collate`.
        guess_ids: For the first place ahead, the second and so on.
    """
    input_ids, position_ids, targets = batch["input_ids"], batch["position_ids"], batch["targets"]
    rows, width = input_ids.shape
    if "attention_mask" in batch:
        seen = batch["attention_mask"][:, 0] == 0
    else:
        seen = torch.ones(width, width, dtype=torch.bool).tril().repeat(rows, 1, 1)
    hangs: list[list[tuple[int, int]]] = []  # per row the column a guess token hangs from, and its place
    for row in range(rows):
        learned = (targets[row] != -100).tolist()
        position = position_ids[row].tolist()
        hangs.append(
            [
                (column, place)
                for column in range(width)
                for place in range(1, min(len(guess_ids), width - 1 - column) + 1)
                # Behind a branch's last column another begins.
                if all(learned[column : column + place + 1])
                and position[column + place] == position[column] + place
            ]
        )
    num_guesses = max(map(len, hangs))
    parents = torch.zeros(rows, num_guesses, dtype=torch.long)
    places = torch.zeros(rows, num_guesses, dtype=torch.long)
    for row, pairs in enumerate(hangs):
        if pairs:
            parents[row, : len(pairs)], places[row, : len(pairs)] = torch.tensor(pairs).T
    row_of = torch.arange(rows)[:, None]
    ahead = targets[row_of, (parents + places).clamp(max=width - 1)]
    sees = torch.cat([seen, seen[row_of, parents]], 1)
    return GuessedBatch(
        input_ids=torch.cat([input_ids, torch.tensor([0, *guess_ids])[places]], 1),
        position_ids=torch.cat([position_ids, position_ids[row_of, parents] + 1], 1),
        mask=torch.zeros(sees.shape).masked_fill_(~sees, torch.finfo(torch.float32).min)[:, None],
        targets=torch.cat([targets, ahead.masked_fill(places == 0, -100)], 1),
        places=torch.cat([torch.zeros_like(input_ids), places], 1),
        weights=torch.cat([batch["weights"], _PLACE_WEIGHT ** (places - 1).float()], 1),
    )


def draw_guessed(
    seed: str,
    num_tokens: int,
    decks: Decks,
    tokenizer: PreTrainedTokenizerFast,
    guess_ids: Sequence[int],
) -> GuessedBatch:
    """Answers with guess tokens, about ``num_tokens`` padded tokens without these; see :func:`draw_batch`."""
    _, batch = draw_batch(seed, GUESSED_KINDS, num_tokens, decks, tokenizer)
    return with_guesses(batch, guess_ids)


def guessing_loss(model: LlamaForCausalLM, batch: GuessedBatch) -> Tensor:
    """Cross-entropy of what is said on guess tokens, and with less weight that of the text itself.

    The output head is not learned by it: what it says a token by is the same at every place.

    Args:
        model: With the attention of :mod:`~local_backend.embedded.attention`.
        batch: See :func:`with_guesses`.
    """
    with fast_precision():
        hidden = model.model(
            input_ids=batch.input_ids,
            position_ids=batch.position_ids,
            attention_mask=batch.mask,
            use_cache=False,
        ).last_hidden_state
        learned = batch.targets != -100
        logits = linear(hidden[learned], model.lm_head.weight.detach())  # [learned columns, vocabulary]
    losses = cross_entropy(logits.float(), batch.targets[learned], reduction="none")
    weights, is_guess = batch.weights[learned], batch.places[learned] > 0

    def mean_over(chosen: Tensor) -> Tensor:
        return (losses * weights)[chosen].sum() / weights[chosen].sum().clamp(min=1.0)

    return mean_over(is_guess) + _AUTOREGRESSIVE_WEIGHT * mean_over(~is_guess)


__all__ = [
    "GUESSED_KINDS",
    "NUM_GUESSED",
    "GuessedBatch",
    "draw_guessed",
    "guessing_loss",
    "with_guesses",
]
