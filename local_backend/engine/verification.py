"""Verification: which part of a draft the model itself would have written.

Pure functions of a draft and the model's logits at each position of it. One rule serves greedy decoding and
sampling. At the row's last token the model chooses the next token: the most likely one, or one drawn from its
distribution. If a child in the draft has this token, it is accepted and the model chooses again there;
otherwise the chosen token is the bonus.

For a deterministic draft this *is* speculative sampling (arXiv 2211.17192, 2302.01318): a child with model
probability p is accepted with probability p, and the token emitted on rejection follows the residual
distribution. It makes one choice per emitted token, in order, so a seed gives the same text for any draft.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import TYPE_CHECKING

import numpy as np
import torch
from torch import Tensor

from local_backend.drafting.draft import Draft, Outcome
from local_backend.sequences.outputs import token_logprob
from local_backend.sequences.sampling import sample

if TYPE_CHECKING:
    from local_backend.sequences.sequence import Row


def verify(
    draft: Draft,
    choose: Callable[[int], int],
    predictions: Sequence[int] = (),
) -> Outcome:
    """The longest path of a draft along the model's own choices, and one bonus token.

    ``choose`` returns the model's token after a node of the draft; -1 is the row's last token. It is called
    once for each emitted token, in order. ``predictions`` are passed on to the outcome.
    """
    accepted: list[int] = []
    token_ids: list[int] = []
    node = -1
    while True:
        token = choose(node)
        token_ids.append(token)
        below = range(node + 1, len(draft))
        children = (one for one in below if draft.parents[one] == node and draft.token_ids[one] == token)
        if (child := next(children, None)) is None:
            return Outcome(tuple(accepted), tuple(token_ids), tuple(predictions), draft)
        accepted.append(child)
        node = child


_POSITIONS_AT_ONCE = 8  # more in float32 would not fit into the processor's cache


def most_likely(logits: Tensor) -> Tensor:
    """The most likely token at each position, as ``argmax`` says; ties go to the first.

    On a CPU it is numpy's, which is vectorized, in float32: for 64 positions of a vocabulary of 49,000 in
    bfloat16 it takes half a millisecond, torch's ten.

    Args:
        logits: ``[..., vocabulary]``.

    Returns:
        Token ids ``[...]``.
    """
    if logits.device.type != "cpu":
        return logits.argmax(-1)
    # On one thread: those of torch would wait, spinning, on the cores that the next forward needs.
    scores = logits.reshape(-1, logits.shape[-1])
    starts = range(0, len(scores), _POSITIONS_AT_ONCE)
    found = [scores[start : start + _POSITIONS_AT_ONCE].float().numpy().argmax(-1) for start in starts]
    return torch.from_numpy(np.concatenate(found)).view(logits.shape[:-1])


def token_chooser(
    row: Row, draft: Draft, logits: Tensor, number: int, predictions: list[int]
) -> Callable[[int], int]:
    """The ``choose`` argument of :func:`~local_backend.engine.verification.verify` for one row.

    An error, e.g. in a processor, is stored in ``row.error`` and ends only this row; tokens chosen after it
    do not matter.

    Args:
        row: The row.
        draft: Its draft.
        logits: Of the whole batch, ``[rows, 1 + longest draft, vocabulary]``.
        number: Index of the row in the batch.
        predictions: The most likely token at the row's last token and at each position of the draft;
            overwritten by the chosen token where that differs.
    """
    if row.takes_most_likely:  # nothing to compute: the batch's most likely tokens are the choices
        return lambda node: predictions[node + 1]
    path: list[int] = []

    def choose(node: int) -> int:
        if node >= 0:
            path.append(draft.token_ids[node])
        if row.error is None:
            try:
                predictions[node + 1] = _choose(row, path, logits[number, node + 1], predictions[node + 1])
            except Exception as error:
                row.error = error
        return predictions[node + 1]

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
