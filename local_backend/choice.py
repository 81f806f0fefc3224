"""Which token the model chooses after a place of a draft, and how likely it was.

Joins what the other modules keep apart: a row's processors, its parameters and its randomness. Knows one row
and its logits. Does not know how choices become accepted tokens; see :mod:`local_backend.verification`.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import TYPE_CHECKING

from torch import Tensor

from local_backend.draft import Draft
from local_backend.sampling import sample

if TYPE_CHECKING:
    from local_backend.sequence import Row


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


def token_logprob(logits: Tensor, token_id: int, num_top: int) -> TokenLogprob:
    """Look up ``token_id`` and the ``num_top`` likeliest tokens in ``logits`` ``[vocabulary]``."""
    logprobs = logits.float().log_softmax(-1)
    values, ids = logprobs.topk(min(num_top, logprobs.numel()))
    top = tuple(zip(ids.tolist(), values.tolist(), strict=True))
    return TokenLogprob(token_id, float(logprobs[token_id]), top)


def likeliest_tokens(logits: Tensor, count: int) -> list[list[list[tuple[int, float]]]]:
    """Per row and column of ``logits`` ``[rows, columns, vocabulary]`` the ``count`` likeliest tokens.

    Returns:
        Each with its probability, the likeliest first.
    """
    scores = logits.float()
    values, ids = scores.topk(min(count, scores.shape[-1]))
    shares = (values - scores.logsumexp(-1, keepdim=True)).exp()
    return [
        [list(zip(*column, strict=True)) for column in zip(*row, strict=True)]
        for row in zip(ids.tolist(), shares.tolist(), strict=True)
    ]


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


def _choose(row: Row, path: list[int], logits: Tensor, most_likely: int) -> int:
    scores = logits
    if row.logits is not None:
        scores = row.logits(row.token_ids, path, logits)
        most_likely = int(scores.argmax())
    token = most_likely if row.params.is_greedy else sample(scores, row.params, row.generator)
    if row.params.logprobs is not None:
        row.logprobs.append(token_logprob(logits, token, row.params.logprobs))
    return token
