"""Tokens chosen for all rows at once are those that each row would choose by itself."""

from __future__ import annotations

import random
from typing import Any

import pytest
import torch
from transformers import PreTrainedTokenizerBase

from local_backend import Draft, Engine, SamplingParams
from local_backend.engine.choosing import choose_tokens
from local_backend.engine.verification import verify
from local_backend.sequences.grammar import json_grammar
from local_backend.sequences.sequence import Row
from tests.tiny import random_llama, tiny_chat_model, tiny_tokenizer

PARAMS: list[dict[str, Any]] = [
    {},
    {"presence_penalty": 1.5, "frequency_penalty": 0.5},
    {"temperature": 0.9, "seed": 3},
    {"temperature": 0.9, "seed": 4, "top_p": 0.8, "frequency_penalty": 0.7, "min_tokens": 20},
    {"temperature": 1.2, "seed": 5, "top_k": 9, "logprobs": 2},
    {"min_tokens": 20},
    {"grammar": json_grammar({"type": "string", "minLength": 200}), "temperature": 1.0, "seed": 6},
    {"logits_processors": (lambda ids, scores: scores.roll(ids.shape[1], 1),), "presence_penalty": 0.5},
]


def _rows(engine: Engine) -> list[Row]:
    return [
        engine.make_row([9, 8, number], lambda _: None, params=SamplingParams(max_tokens=40, **options))
        for number, options in enumerate(PARAMS)
    ]


def _draft(rng: random.Random, size: int, likely: list[int]) -> Draft:
    parents = tuple(rng.randrange(-1, node) for node in range(size))
    return Draft(tuple(rng.choice(likely) for _ in parents), parents)


@pytest.mark.parametrize("seed", range(6))
def test_all_nodes_at_once_or_one_after_another_give_the_same_tokens(seed: int) -> None:
    """And the same as one row alone, without a draft, step by step."""
    rng = random.Random(seed)
    with Engine(tiny_chat_model(), tiny_tokenizer()) as engine:
        batches = [_rows(engine), _rows(engine)]
        alone = _rows(engine)
        for step in range(4):
            generator = torch.Generator().manual_seed(100 * seed + step)
            logits = 2 * torch.randn(len(alone), 8, 500, generator=generator)
            # Few tokens are likely, so that drafts are accepted.
            logits[:, :, 250:253] += 9
            drafts = [_draft(rng, rng.randrange(3, 8), [250, 251, 252]) for _ in alone]
            outcomes = []
            for rows, ahead in zip(batches, (False, True), strict=True):
                chosen = choose_tokens(rows, drafts, logits.clone(), ahead=ahead)
                outcomes.append(
                    [verify(draft, predictions=tokens) for draft, tokens in zip(drafts, chosen, strict=True)]
                )
                for row, outcome in zip(rows, outcomes[-1], strict=True):
                    assert row.error is None
                    row.token_ids += outcome.token_ids
            ways = [[(one.accepted, one.token_ids) for one in each] for each in outcomes]
            assert ways[0] == ways[1]
            for number, (row, outcome) in enumerate(zip(alone, outcomes[0], strict=True)):
                for node, token in zip((-1, *outcome.accepted), outcome.token_ids, strict=True):
                    one = logits[number : number + 1, node + 1 : node + 2].clone()
                    assert choose_tokens([row], [Draft()], one, ahead=False) == [[token]]
                    row.token_ids.append(token)
    assert sum(len(row.token_ids) for row in alone) > 3 * len(alone) + 4 * len(alone)


def test_an_end_token_beyond_the_vocabulary_concerns_no_other_row(tokenizer: PreTrainedTokenizerBase) -> None:
    prompts = [[5, 6], [7, 8]]
    plain = SamplingParams(max_tokens=12)
    odd = SamplingParams(max_tokens=12, min_tokens=12, ignore_end=True, stop_token_ids=(500 + 33, 10**7))
    with Engine(random_llama(), tokenizer) as engine:
        want = engine.generate(prompts, [SamplingParams(max_tokens=12, ignore_end=True), plain])
        got = engine.generate(prompts, [odd, plain])
    assert [one.token_ids for one in got] == [one.token_ids for one in want]
