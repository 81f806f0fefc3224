"""Which token the model writes next, for all rows of a forward at once.

The tokens of rows that ask for nothing are the most likely ones. Other rows are asked position by position
of their drafts: what they add to scores, their grammars, and drawing are a few operations for all of them
together. Only logits processors, which may be any function, are called row by row.

Knows rows, drafts and logits. Does not know what is accepted, nor the cache.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field
from typing import Any

import numpy as np
import torch
from torch import Tensor

from local_backend.drafting.draft import Draft
from local_backend.engine.verification import child_of
from local_backend.sequences.grammar import bound_scores
from local_backend.sequences.sampling import sample
from local_backend.sequences.sequence import Row

_NO_TOKEN = "no token can be sampled: the scores hold NaN or rule out every token"
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
    found = [some.float().numpy().argmax(-1) for some in scores.split(_POSITIONS_AT_ONCE)]
    return torch.from_numpy(np.concatenate(found)).view(logits.shape[:-1])


@dataclass(eq=False, slots=True)
class _Position:
    """A node of a row's draft (-1 is the row's last token), and the drafted tokens up to it."""

    row: Row
    number: int  # of the row in the batch
    node: int = -1
    path: list[int] = field(default_factory=list)

    def below(self, draft: Draft) -> Iterator[_Position]:
        """This position and all nodes of the draft, which is at its root."""
        paths = {-1: self.path}
        yield self
        for node, (token, parent) in enumerate(zip(draft.token_ids, draft.parents, strict=True)):
            paths[node] = [*paths[parent], token]
            yield _Position(self.row, self.number, node, paths[node])

    def descend(self, draft: Draft, chosen: Sequence[int]) -> bool:
        """Move to the node that guesses the token chosen here; returns whether there is one."""
        child = child_of(draft, self.node, chosen[self.node + 1])
        if child is None or self.row.error is not None:
            return False
        self.node = child
        self.path.append(draft.token_ids[child])
        return True


def choose_tokens(
    rows: Sequence[Row], drafts: Sequence[Draft], logits: Tensor, *, ahead: bool
) -> list[list[int]]:
    """The model's own tokens after each row's last token and after the nodes of its draft.

    Nodes that are not visited hold the most likely token of the plain logits. An error, e.g. in a processor,
    is stored in ``row.error`` and ends only this row; its tokens do not matter.

    Args:
        rows: Rows of the forward.
        drafts: Their drafts.
        logits: ``[rows, 1 + longest draft or more, vocabulary]``; overwritten unless a row reports log
            probabilities.
        ahead: Visit all nodes at once where possible. Otherwise the chosen tokens lead from node to node,
            which computes less and waits for the device more often.

    Returns:
        ``1 + len(draft)`` token ids for each row.
    """
    if logits.device.type == "mps":  # which has no double precision, and shares its memory
        logits = logits.cpu()
    asked: list[_Position] = []
    led = [_Position(row, number) for number, row in enumerate(rows) if not row.takes_most_likely]
    if ahead:
        free = [one for one in led if one.row.logits is None and one.row.grammar is None]
        asked = [each for one in free for each in one.below(drafts[one.number])]
        led = [one for one in led if one not in free]
    asked += led
    width = logits.shape[1]
    is_asked_alone = len(asked) == len(rows) and width == 1
    likeliest = logits.new_zeros(len(rows), 1, dtype=torch.long) if is_asked_alone else most_likely(logits)
    found = [likeliest.flatten(), *([_choose(asked, _scores(asked, rows, logits))] if asked else [])]
    read: list[int] = torch.cat(found).tolist()  # all at once: each reading waits for the device
    chosen = [read[row * width :][: 1 + len(draft)] for row, draft in enumerate(drafts)]
    tokens = read[len(rows) * width :]
    while asked:
        for position, token in zip(asked, tokens, strict=True):
            chosen[position.number][position.node + 1] = max(0, token)
            if token < 0 and position.row.error is None:
                position.row.error = ValueError(_NO_TOKEN)
        asked = led = [one for one in led if one.descend(drafts[one.number], chosen[one.number])]
        tokens = _choose(asked, _scores(asked, rows, logits)).tolist() if asked else []
    return chosen


def _scores(asked: Sequence[_Position], rows: Sequence[Row], logits: Tensor) -> Tensor:
    """Scores ``[positions, vocabulary]`` in float32; without copying, if ``logits`` hold just these."""
    if len(asked) == len(rows) and logits.shape[1] == 1 and all(row.params.logprobs is None for row in rows):
        return logits[:, 0].float()
    index = torch.tensor([[one.number, one.node + 1] for one in asked]).T.to(logits.device)
    return logits[index[0], index[1]].float()


def _choose(asked: Sequence[_Position], scores: Tensor) -> Tensor:
    """The token at each position, -1 where none can be drawn; overwrites ``scores``."""
    _process(asked, scores)
    _add_biases(asked, scores)
    _bound(asked, scores)
    drawn = [number for number, one in enumerate(asked) if not one.row.params.is_greedy]
    if not drawn:
        return most_likely(scores)
    places = [len(one.row.token_ids) - one.row.num_prompt_tokens + len(one.path) for one in asked]
    uniforms = [asked[number].row.uniform(places[number]) for number in drawn]
    params = [asked[number].row.params for number in drawn]
    if len(drawn) == len(asked):
        return sample(scores, params, uniforms)
    index, tokens = torch.tensor(drawn, device=scores.device), most_likely(scores)
    return tokens.index_copy(0, index, sample(scores[index], params, uniforms))


def _process(asked: Sequence[_Position], scores: Tensor) -> None:
    """Call the logits processors of the rows that have some."""
    for number, one in enumerate(asked):
        if one.row.logits is not None and one.row.error is None:
            try:
                scores[number] = one.row.logits(one.row.token_ids, one.path, scores[number])
            except Exception as error:  # anything: it ends this row alone
                one.row.error = error


def _add_biases(asked: Sequence[_Position], scores: Tensor) -> None:
    """Add what rows add to the scores of single tokens."""
    size, device = scores.shape[-1], scores.device
    ids, amounts = [], []
    for number, one in enumerate(asked):
        if one.row.biases is not None:
            tokens, added = one.row.biases(one.row.token_ids, one.path)
            ids.append(tokens + number * size)
            amounts.append(added)
    if ids:
        index, amount = torch.from_numpy(np.concatenate(ids)), torch.from_numpy(np.concatenate(amounts))
        scores.view(-1).index_add_(0, index.to(device), amount.to(device))


def _bound(asked: Sequence[_Position], scores: Tensor) -> None:
    """Leave the tokens that the grammars of rows allow."""
    bits: dict[int, Any] = {}
    for number, one in enumerate(asked):
        if one.row.grammar is not None and one.row.error is None:
            try:
                bits[number] = one.row.grammar([*one.row.token_ids[one.row.num_prompt_tokens :], *one.path])
            except Exception as error:  # anything: it ends this row alone
                one.row.error = error
    found = [number for number, each in bits.items() if each is not None]
    if found:
        index = torch.tensor(found, device=scores.device)
        scores[index] = bound_scores(scores[index], np.stack([bits[number] for number in found]))
