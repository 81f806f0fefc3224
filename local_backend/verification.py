"""Which part of a draft the model itself would have written.

Pure functions of a draft and of what the model says at each of its places. One rule serves greedy
decoding and sampling. Let the model choose its token at the row's last token: the most likely one, or
one drawn from its distribution. If a child of the draft carries this token, it is accepted and the model
chooses again there; if none does, the token chosen is the bonus.

For a draft that is a fixed guess this *is* speculative sampling (arXiv 2211.17192, 2302.01318): a child with
model probability p is accepted with probability p, and what is emitted on refusal is distributed as the
residual. It asks for one choice per emitted token, in order, so a seed gives the same text whatever was
drafted.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence

from local_backend.draft import Draft, Outcome


def verify(
    draft: Draft,
    choose: Callable[[int], int],
    predictions: Sequence[int] = (),
) -> Outcome:
    """Walk down the draft along the model's own choices.

    Args:
        draft: The guessed tokens.
        choose: The model's token after a place of the draft; place -1 is the row's last token. Called once
            for each emitted token, in order.
        predictions: Passed on to the outcome.

    Returns:
        The longest accepted path and one bonus token.
    """
    accepted: list[int] = []
    token_ids: list[int] = []
    place = -1
    while True:
        token = choose(place)
        token_ids.append(token)
        child = _child_with_token(draft, place, token)
        if child is None:
            return Outcome(tuple(accepted), tuple(token_ids), tuple(predictions), draft)
        accepted.append(child)
        place = child


def _child_with_token(draft: Draft, parent: int, token: int) -> int | None:
    for place in range(parent + 1, len(draft.token_ids)):
        if draft.parents[place] == parent and draft.token_ids[place] == token:
            return place
    return None
