"""Verification: which part of a draft the model itself would have written.

Pure functions of a draft and the model's choice at each position of it. One rule serves greedy decoding and
sampling. At the row's last token the model chooses the next token: the most likely one, or one drawn from its
distribution. If a child in the draft has this token, it is accepted and the model chooses again there;
otherwise the chosen token is the bonus.

For a deterministic draft this *is* speculative sampling (arXiv 2211.17192, 2302.01318): a child with model
probability p is accepted with probability p, and the token emitted on rejection follows the residual
distribution. It makes one choice per emitted token, in order, so a seed gives the same text for any draft.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence

from local_backend.drafting.draft import Draft, Outcome


def verify(
    draft: Draft, choose: Callable[[int], int] | None = None, predictions: Sequence[int] = ()
) -> Outcome:
    """The longest path of a draft along the model's own choices, and one bonus token.

    ``choose`` returns the model's token after a node of the draft; -1 is the row's last token. It is called
    once for each emitted token, in order. By default these are the ``predictions``, one after the row's last
    token and one after each node, which are passed on to the outcome.
    """
    accepted: list[int] = []
    token_ids: list[int] = []
    node = -1
    while True:
        token = predictions[node + 1] if choose is None else choose(node)
        token_ids.append(token)
        if (child := child_of(draft, node, token)) is None:
            return Outcome(tuple(accepted), tuple(token_ids), tuple(predictions), draft)
        accepted.append(child)
        node = child


def child_of(draft: Draft, node: int, token: int) -> int | None:
    """The node below ``node`` that guesses ``token``; the first of equal ones."""
    below = range(node + 1, len(draft))
    return next((one for one in below if draft.parents[one] == node and draft.token_ids[one] == token), None)
