"""Fits the weights by which reference copy chooses among continuations, on known answers.

At every forward of target-directed decoding (:mod:`benchmarks.copy_steps`) each source votes for the token
that follows it; the answer shows which votes were right, then which of those were right one token deeper.
The weights maximise the likelihood of these outcomes under the mixture that ``copy_tree.grow`` computes, with
a small ridge penalty. The forwards depend on the drafter's weights, so fitting alternates with decoding.

The answers are the given ones and, unless ``--free 0``, what a model writes by itself when it is asked the
same questions: a model repeats itself and its prompt more often than the people or models do whose answers
are given. Its answers count twice, with the documents as references and with nothing but the prompt to copy.

Prints the weights as they stand in ``local_backend/drafting/reference_copy.py``, then one JSON line with the
tokens per forward on cases the weights were not fitted to (cross-validation over halves).
"""

from __future__ import annotations

import argparse
import json
import math
from collections.abc import Sequence
from dataclasses import dataclass, field, replace
from functools import partial
from pathlib import Path
from typing import cast

import torch
from rich.console import Console
from rich.progress import track
from torch import Tensor

from benchmarks.copy_steps import Case, TargetRow, load_cases, run_case, small_trees
from benchmarks.workloads import add_model_argument
from local_backend import Engine, SamplingParams
from local_backend.drafting.copy_sources import TRAITS, CopySources
from local_backend.drafting.copy_tree import CopyWeights, length_class
from local_backend.drafting.reference_copy import FITTED
from local_backend.drafting.suffix_index import BORDER, SuffixIndex
from local_backend.models.loading import load
from local_backend.requests.json_lines import read_lines

_NUM_CLASSES = 8
_MAX_DEPTH = 20
_RIDGE = 3e-3
_NUM_STEPS, _LEARNING_RATE = 400, 0.05
_REQUESTS = (
    "{documents}\n\n{query}\nAnswer with sentences from the text above.",
    "Sources:\n\n{documents}\n\nQuestion: {query}\nAnswer from the sources.",
)
_MAX_CHARACTERS, _MAX_DOCUMENTS, _NUM_ROWS = 1200, 3, 16


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
                place = voter.place + depth
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


def collect(cases: Sequence[Case], weights: CopyWeights) -> Votes:
    """The votes at every forward of every case."""
    votes = Votes()
    for case in track(cases, "votes", console=Console(stderr=True)):
        _, _, proposals = run_case(small_trees(weights), case)
        sources = CopySources(SuffixIndex(case.documents), SuffixIndex([case.query]))
        row = TargetRow(list(case.query), len(case.query), case.documents)
        written = 0
        for draft in proposals:
            votes.add(sources, row.token_ids, case.target[written:])
            landed = len(draft.places_along(case.target[written:])) + 1
            row.token_ids.extend(case.target[written : written + landed])
            sources.extend(row.token_ids, landed)
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


def fit(samples: Sequence[Votes]) -> CopyWeights:
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
    return CopyWeights(rounded[0], rounded[1], rounded[2], round(float(log_sharpness.exp()), 3))


def _rounded(weights: Tensor) -> tuple[float, ...]:
    return tuple(round(weight, 3) for weight in weights.tolist())


def fit_and_decode(samples: Sequence[Sequence[Case]], num_rounds: int) -> CopyWeights:
    """In each round, decode with the current weights and fit them to the resulting forwards."""
    weights = FITTED
    for _ in range(num_rounds):
        weights = fit([collect(cases, weights) for cases in samples])
    return weights


def free_answers(engine: Engine, paths: Sequence[Path], max_tokens: int) -> list[Case]:
    """What a model answers greedily to each case's question about its documents, asked in two ways."""
    tokenizer = engine.tokenizer
    records = [line.record() for path in paths for line in read_lines(path)]
    asked = [(record, request) for request in _REQUESTS for record in records]
    cases: list[Case] = []
    for start in track(range(0, len(asked), _NUM_ROWS), "answers", console=Console(stderr=True)):
        prompts, references = [], []
        for record, request in asked[start : start + _NUM_ROWS]:
            documents = [document[:_MAX_CHARACTERS] for document in record["documents"][:_MAX_DOCUMENTS]]
            text = request.format(documents="\n\n".join(documents), query=record["query"])
            turns = [{"role": "user", "content": text}]
            chat = tokenizer.apply_chat_template(turns, tokenize=False, add_generation_prompt=True)
            prompts.append(tuple(tokenizer.encode(cast("str", chat), add_special_tokens=False)))
            references.append(
                tuple(tuple(tokenizer.encode(each, add_special_tokens=False)) for each in documents)
            )
        completions = engine.generate(prompts, SamplingParams(max_tokens=max_tokens))
        answers = [tuple(completion.token_ids) for completion in completions]
        cases += map(Case, prompts, references, answers)
    return cases


def main(arguments: Sequence[str] | None = None) -> None:
    parser = argparse.ArgumentParser(prog="python -m benchmarks.copy_weights", description=__doc__)
    parser.add_argument("--data", type=Path, nargs="+", required=True, help="as in benchmarks.copy_steps")
    add_model_argument(parser)
    parser.add_argument(
        "--free", type=int, default=128, help="tokens of a free answer (%(default)s; 0: none)"
    )
    parser.add_argument("--rounds", type=int, default=2, help="rounds of decoding and fitting")
    options = parser.parse_args(arguments)
    model, tokenizer = load(options.model)
    samples = {
        path.stem: load_cases(path, partial(tokenizer.encode, add_special_tokens=False))
        for path in options.data
    }
    if options.free:
        free = free_answers(Engine(model, tokenizer), options.data, options.free)
        samples["free, references"] = free
        samples["free, prompt alone"] = [replace(case, documents=()) for case in free]
    unseen: dict[str, dict[str, float]] = {}
    counts = {name: [0, 0, 0] for name in samples}
    for half in (0, 1):
        weights = fit_and_decode([cases[half::2] for cases in samples.values()], options.rounds)
        for name, cases in samples.items():
            for case in cases[1 - half :: 2]:
                forwards, drafted, _ = run_case(small_trees(weights), case)
                counts[name] = [
                    a + b for a, b in zip(counts[name], (len(case.target), forwards, drafted), strict=True)
                ]
    for name, (tokens, forwards, drafted) in counts.items():
        unseen[name] = {
            "tokens_per_forward": round(tokens / forwards, 3),
            "draft_tokens_per_forward": round(drafted / forwards, 3),
        }
    print(fit_and_decode(list(samples.values()), options.rounds))
    print(json.dumps({"unseen_cases": unseen}))


if __name__ == "__main__":
    main()
