"""Fits the votes of reference copy to what a model has answered: which source is believed how much.

At every forward of decoding a known answer (no model is needed for that) each source votes for the token that
follows it; the answer shows which votes were right, then which of those were right one token deeper. The
weights maximise the likelihood of these outcomes under the mixture that ``copy_tree.grow`` computes, with a
small ridge penalty. The forwards depend on the drafter's weights, so fitting alternates with decoding.

``python -m benchmarks.copy_fit`` fits them to the answers that ``python -m local_backend.training collect``
stored. It changes no model: drafts by other weights give the same text.
"""

from __future__ import annotations

import argparse
import json
import math
import random
from collections.abc import Callable, Sequence
from dataclasses import asdict, dataclass, field
from pathlib import Path

import torch
from rich.console import Console
from rich.progress import track
from torch import Tensor

from local_backend.drafting.copy_sources import TRAITS, CopySources
from local_backend.drafting.copy_tree import CopyWeights, length_class
from local_backend.drafting.draft import Draft, Outcome
from local_backend.drafting.drafter import Drafter
from local_backend.drafting.reference_copy import FITTED, ReferenceCopy
from local_backend.drafting.suffix_index import BORDER, SharedIndexes, SuffixIndex
from local_backend.engine.verification import verify
from local_backend.training import stored_answers

_NUM_CLASSES = len(FITTED.by_length)
_MAX_DEPTH = 20
_RIDGE = 3e-3
_NUM_STEPS, _LEARNING_RATE = 400, 0.05
# Of stored answers: the share held out, the share and the number that weights are fitted to; the others are
# what these may copy.
_HELD_OUT_SHARE, _FITTED_SHARE, _MAX_FITTED = 0.1, 0.3, 200
_MIN_ANSWERS = 20
_MAX_INDEXED = 4_000_000


@dataclass(frozen=True)
class KnownAnswer:
    """One answer and what it may be copied from, as token ids."""

    prompt: tuple[int, ...]
    references: tuple[tuple[int, ...], ...]
    answer: tuple[int, ...]


@dataclass(eq=False)
class KnownRow:
    """A row as drafters see it."""

    token_ids: list[int]
    num_prompt_tokens: int
    references: tuple[tuple[int, ...], ...]
    room: int = field(default=0)


def decode_known(drafter: Drafter, known: KnownAnswer) -> tuple[int, int, list[Draft]]:
    """Decode a prompt with its known answer in place of a model.

    Returns:
        Forwards, drafted tokens, and every proposal.
    """
    row = KnownRow(list(known.prompt), len(known.prompt), known.references)
    proposals, num_forwards, num_drafted = [], 0, 0
    written = 0
    while written < len(known.answer):
        row.room = len(known.answer) - written
        (draft,) = drafter.propose([row])
        proposals.append(draft)
        depths = {-1: 0, **dict(enumerate(draft.depths()))}

        def choose(place: int, depths: dict[int, int] = depths, written: int = written) -> int:
            depth = written + depths[place]
            return known.answer[depth] if depth < len(known.answer) else -1

        outcome = verify(draft, choose)
        emitted = outcome.token_ids[: len(known.answer) - written]
        row.token_ids.extend(emitted)
        written += len(emitted)
        row.room = len(known.answer) - written
        drafter.observe([row], [Outcome(outcome.accepted, emitted, draft=draft)])
        num_forwards += 1
        num_drafted += len(draft)
    return num_forwards, num_drafted, proposals


@dataclass
class Votes:
    """Every vote at every node; a node is one depth of the answer after one forward.

    Attributes:
        traits: Traits of the voting source, ``[votes, traits]``.
        length: Its class of match length at that depth, ``[votes]``.
        group: Number of the group: the votes for one token at one node, ``[votes]``.
        group_node: Node of each group.
        group_is_right: Whether the answer continues with the group's token.
        miss: Features of "no group is right", ``[nodes, 2 + classes]``.
    """

    traits: list[tuple[float, ...]] = field(default_factory=list)
    length: list[int] = field(default_factory=list)
    group: list[int] = field(default_factory=list)
    group_node: list[int] = field(default_factory=list)
    group_is_right: list[bool] = field(default_factory=list)
    miss: list[list[float]] = field(default_factory=list)

    def add(self, sources: CopySources, text: Sequence[int], rest: Sequence[int]) -> None:
        """Add the votes after ``text``, which the answer continues with ``rest``."""
        voters = sources(text)
        for depth, truth in enumerate(rest[:_MAX_DEPTH]):
            groups: dict[int, int] = {}
            right, num_matching, longest = [], 0, 0
            for voter in voters:
                place = voter.index + depth
                if place >= len(voter.tokens) or (token := voter.tokens[place]) == BORDER:
                    continue
                if token not in groups:
                    groups[token] = len(self.group_node)
                    self.group_node.append(len(self.miss))
                    self.group_is_right.append(token == truth)
                self.traits.append(voter.traits)
                self.length.append(length_class(voter.num_tokens + depth))
                self.group.append(groups[token])
                num_matching += voter.num_tokens > 0
                longest = max(longest, voter.num_tokens + depth)
                if token == truth:
                    right.append(voter)
            if not groups:
                return
            classes = [float(each == length_class(longest)) for each in range(_NUM_CLASSES)]
            self.miss.append([math.log(num_matching or 0.5), sources.deviation, *classes])
            voters = right
            if not voters:
                return


def collect_votes(answers: Sequence[KnownAnswer], drafter: Drafter) -> Votes:
    """The votes at every forward of every answer, which ``drafter`` drafts."""
    votes, indexes = Votes(), SharedIndexes(_MAX_INDEXED)
    for known in track(answers, "votes", console=Console(stderr=True)):
        _, _, proposals = decode_known(drafter, known)
        sources = CopySources(indexes.of(known.references), SuffixIndex([known.prompt]))
        text, written = list(known.prompt), 0
        for draft in proposals:
            votes.add(sources, text, known.answer[written:])
            landed = len(draft.nodes_along(known.answer[written:])) + 1
            text.extend(known.answer[written : written + landed])
            sources.extend(text, len(known.prompt))
            written += landed
    return votes


class Likelihood:
    """The votes as tensors, and the likelihood of the answers for given weights."""

    def __init__(self, votes: Votes) -> None:
        self._traits, self._length = torch.tensor(votes.traits), torch.tensor(votes.length)
        self._group, self._node = torch.tensor(votes.group), torch.tensor(votes.group_node)
        self._is_right, self._miss = torch.tensor(votes.group_is_right), torch.tensor(votes.miss)

    def mean_loss(self, traits: Tensor, by_length: Tensor, miss: Tensor, sharpness: Tensor) -> Tensor:
        """Mean negative log likelihood of the nodes; takes the fields of :class:`CopyWeights` as tensors."""
        log_vote = self._traits @ traits + by_length[self._length]
        vote = torch.zeros(len(self._node)).index_add(0, self._group, log_vote.exp())
        sharp = vote.clamp_min(1e-12) ** sharpness
        total = torch.zeros(len(self._miss)).index_add(0, self._node, sharp)
        right = torch.zeros(len(self._miss)).index_add(0, self._node, sharp * self._is_right)
        none = (miss[0] + self._miss @ miss[1:]).exp()
        return -(torch.where(right > 0, right.clamp_min(1e-20), none).log() - (total + none).log()).mean()


def fit_votes(samples: Sequence[Votes]) -> CopyWeights:
    """The maximum-likelihood weights; every sample counts equally, whatever its size."""
    likelihoods = [Likelihood(votes) for votes in samples]
    weights = [
        torch.zeros(size, requires_grad=True) for size in (len(TRAITS), _NUM_CLASSES, 3 + _NUM_CLASSES)
    ]
    log_sharpness = torch.zeros((), requires_grad=True)
    optimizer = torch.optim.Adam([*weights, log_sharpness], lr=_LEARNING_RATE)
    for _ in track(range(_NUM_STEPS), "fitting", console=Console(stderr=True)):
        traits, by_length, miss = weights
        losses = [each.mean_loss(traits, by_length, miss, log_sharpness.exp()) for each in likelihoods]
        loss = torch.stack(losses).sum() + _RIDGE * torch.cat(weights).square().sum()
        optimizer.zero_grad()
        loss.backward()
        optimizer.step()
    rounded = [_rounded(each) for each in weights]
    return CopyWeights(rounded[0], rounded[1], rounded[2], round(log_sharpness.exp().item(), 3))


def _rounded(weights: Tensor) -> tuple[float, ...]:
    return tuple(round(weight, 3) for weight in weights.tolist())


def _drafter_with(weights: CopyWeights) -> Drafter:
    return ReferenceCopy(weights=weights)


def fit_copy_weights(
    samples: Sequence[Sequence[KnownAnswer]],
    *,
    num_rounds: int = 2,
    drafter_with: Callable[[CopyWeights], Drafter] = _drafter_with,
) -> CopyWeights:
    """In each round, decode with the current weights and fit them to the resulting forwards.

    Args:
        samples: Answers of several kinds; every kind counts equally, whatever its size.
        num_rounds: Rounds of decoding and fitting.
        drafter_with: The drafter that decodes them, with given weights.

    Raises:
        ValueError: There is no answer, or none has a token that a source votes for.
    """
    weights = FITTED
    for _ in range(num_rounds):
        votes = [collect_votes(answers, drafter_with(weights)) for answers in samples]
        if not votes or not all(each.traits for each in votes):
            raise ValueError("there is nothing to fit: no answer has a token that occurred before it")
        weights = fit_votes(votes)
    return weights


@dataclass(frozen=True)
class CopyFit:
    """Weights of reference copy that were fitted to a model's answers.

    Attributes:
        weights: Pass them as ``ReferenceCopy(weights=...)``.
        num_fitted: Answers that they were fitted to.
        num_held_out: Other answers, on which the figures were counted.
        tokens_per_forward: Of these, without a model: each may copy from the answers that are not held out.
        tokens_per_forward_before: With the default weights.
    """

    weights: CopyWeights
    num_fitted: int
    num_held_out: int
    tokens_per_forward: float
    tokens_per_forward_before: float


def fit_to_answers(answers: Sequence[tuple[Sequence[int], Sequence[int]]], *, seed: int = 0) -> CopyFit:
    """Fit reference copy to requests of one kind, whose earlier answers are passed as references.

    Args:
        answers: Token ids of prompts and of a model's answers to them, in any order. A part is held out for
            the figures, weights are fitted to another, and both may copy from the rest.
        seed: Of the order in which they are drawn.

    Raises:
        ValueError: There are too few answers.
    """
    drawn = [(tuple(prompt), tuple(answer)) for prompt, answer in answers if answer]
    if len(drawn) < _MIN_ANSWERS:
        raise ValueError(f"weights are fitted to {_MIN_ANSWERS} answers or more, got {len(drawn)}")
    random.Random(seed).shuffle(drawn)
    num_held_out = min(_MAX_FITTED, math.ceil(_HELD_OUT_SHARE * len(drawn)))
    num_fitted = min(_MAX_FITTED, math.ceil(_FITTED_SHARE * len(drawn)))
    held_out, rest = drawn[:num_held_out], drawn[num_held_out:]
    fitted, copied = rest[:num_fitted], tuple(answer for _, answer in rest[num_fitted:])
    weights = fit_copy_weights([[KnownAnswer(prompt, copied, answer) for prompt, answer in fitted]])
    everything = tuple(answer for _, answer in rest)

    def tokens_per_forward(weights: CopyWeights) -> float:
        drafter = ReferenceCopy(weights=weights)
        known = [KnownAnswer(prompt, everything, answer) for prompt, answer in held_out]
        num_forwards = sum(decode_known(drafter, each)[0] for each in known)
        return sum(len(each.answer) for each in known) / num_forwards

    return CopyFit(
        weights, len(fitted), len(held_out), tokens_per_forward(weights), tokens_per_forward(FITTED)
    )


def main(arguments: Sequence[str] | None = None) -> None:
    parser = argparse.ArgumentParser(prog="python -m benchmarks.copy_fit", description=__doc__)
    parser.add_argument("--answers", type=Path, required=True, help="folder that collect wrote")
    parser.add_argument("--output", type=Path, required=True, help="JSON file of the weights")
    options = parser.parse_args(arguments)
    try:
        stored = [
            (each.prompt_ids, each.answer_ids) for each in stored_answers(options.answers) if each.has_ended
        ]
        found = fit_to_answers(stored)
    except (ValueError, OSError) as error:
        parser.exit(2, f"{parser.prog}: {error}\n")
    report = {
        "num_fitted": found.num_fitted,
        "num_held_out": found.num_held_out,
        "tokens_per_forward": round(found.tokens_per_forward, 3),
        "tokens_per_forward_before": round(found.tokens_per_forward_before, 3),
    }
    options.output.parent.mkdir(parents=True, exist_ok=True)
    options.output.write_text(json.dumps({**asdict(found.weights), "report": report}) + "\n", "utf-8")
    print(json.dumps(report))


if __name__ == "__main__":
    main()
