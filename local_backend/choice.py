"""Which token the model chooses after a place of a draft, and how likely it was.

Joins what the other modules keep apart: a row's processors, its parameters and its randomness. Knows one row
and its logits. Does not know how choices become accepted tokens; see :mod:`local_backend.verification`.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import TYPE_CHECKING

import torch
from torch import Tensor

from local_backend.draft import Draft
from local_backend.sampling import sample

if TYPE_CHECKING:
    from local_backend.sequence import Row

_BLOCK_SCORES = 256
_LEAST_SCORES_IN_BLOCKS = 30_000  # for fewer, the operations themselves take longer


@dataclass(frozen=True, slots=True)
class TokenLogprob:
    """How likely an emitted token was.

    Attributes:
        token_id: The token.
        logprob: Natural logarithm of its probability, as the model gave it.
        top: The most likely tokens there and their log probabilities, the likeliest first.
    """

    token_id: int
    logprob: float
    top: tuple[tuple[int, float], ...] = ()


def most_likely(logits: Tensor) -> Tensor:
    """The most likely token at each place, the first of several that are equally likely.

    What ``argmax`` says; but on a CPU torch's own compares one by one, where it compares many at a time to
    find out how large the largest is. So here the block that holds the largest is found first: for 64 places
    and a vocabulary of 32,000 in bfloat16 that takes a millisecond instead of five.

    Args:
        logits: ``[..., vocabulary]``.

    Returns:
        Token ids ``[...]``.
    """
    if logits.device.type != "cpu" or logits.numel() < _LEAST_SCORES_IN_BLOCKS:
        return logits.argmax(-1)
    size = logits.shape[-1]
    num_full = size // _BLOCK_SCORES
    full = logits[..., : num_full * _BLOCK_SCORES].unflatten(-1, (num_full, _BLOCK_SCORES))
    largest = full.amax(-1)  # [..., blocks]
    if num_full * _BLOCK_SCORES < size:
        rest = logits[..., num_full * _BLOCK_SCORES :].amax(-1, keepdim=True)
        largest = torch.cat([largest, rest], -1)
    first = largest.argmax(-1, keepdim=True) * _BLOCK_SCORES
    # What the last block lacks is its last token again, which then is not the first of its likelihood.
    place = (first + torch.arange(_BLOCK_SCORES)).clamp_(max=size - 1)
    token_ids: Tensor = first[..., 0] + logits.gather(-1, place).argmax(-1)
    return token_ids


def token_logprob(logits: Tensor, token_id: int, num_top: int) -> TokenLogprob:
    """Look up ``token_id`` and the ``num_top`` likeliest tokens in ``logits`` ``[vocabulary]``."""
    logprobs = logits.float().log_softmax(-1)
    values, ids = logprobs.topk(min(num_top, logprobs.numel()))
    top = tuple(zip(ids.tolist(), values.tolist(), strict=True))
    return TokenLogprob(token_id, float(logprobs[token_id]), top)


def chooser(
    row: Row, draft: Draft, logits: Tensor, number: int, predictions: list[int]
) -> Callable[[int], int]:
    """What :func:`~local_backend.verification.verify` asks, for one row.

    An error, e.g. in a processor, is left in ``row.error`` and ends this row only; what is chosen from then
    on does not matter.

    Args:
        row: Chooses.
        draft: Its draft.
        logits: Of the whole batch, ``[rows, 1 + longest draft, vocabulary]``.
        number: Of the row in the batch.
        predictions: The most likely token at the row's last token and at each place of the draft; where
            something else is chosen, that takes its place.
    """
    if row.takes_most_likely:  # nothing to compute: the batch's most likely tokens are the choices
        return lambda place: predictions[place + 1]
    path: list[int] = []

    def choose(place: int) -> int:
        if place >= 0:
            path.append(draft.token_ids[place])
        if row.error is None:
            try:
                predictions[place + 1] = _choose(row, path, logits[number, place + 1], predictions[place + 1])
            except Exception as error:
                row.error = error
        return predictions[place + 1]

    return choose


def _choose(row: Row, path: list[int], logits: Tensor, likeliest: int) -> int:
    scores = logits
    if row.logits is not None:
        scores = row.logits(row.token_ids, path, logits)
        likeliest = int(most_likely(scores))
    token = likeliest if row.params.is_greedy else sample(scores, row.params, row.generator)
    if row.params.logprobs is not None:
        row.logprobs.append(token_logprob(logits, token, row.params.logprobs))
    return token
