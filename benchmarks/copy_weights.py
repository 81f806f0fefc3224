"""Fits the default weights of reference copy, by which it chooses among continuations, to known answers.

The answers are the given ones and, unless ``--free 0``, what a model writes by itself when it is asked the
same questions: a model repeats itself and its prompt more often than the people or models do whose answers
are given. Its answers count twice, with the documents as references and with nothing but the prompt to copy.
How weights are fitted stands in ``benchmarks.copy_fit``.

Prints the weights as they stand in ``local_backend/drafting/reference_copy.py``, then one JSON line with the
tokens per forward on cases the weights were not fitted to (cross-validation over halves).
"""

from __future__ import annotations

import argparse
import json
from collections.abc import Sequence
from dataclasses import replace
from functools import partial
from pathlib import Path
from typing import cast

from rich.console import Console
from rich.progress import track

from benchmarks.copy_fit import KnownAnswer, decode_known, fit_copy_weights
from benchmarks.copy_steps import load_cases, small_trees
from benchmarks.workloads import add_model_argument
from local_backend import Engine, SamplingParams
from local_backend.models.loading import load
from local_backend.offline.jsonl import read_lines

_REQUESTS = (
    "{documents}\n\n{query}\nAnswer with sentences from the text above.",
    "Sources:\n\n{documents}\n\nQuestion: {query}\nAnswer from the sources.",
)
_MAX_CHARACTERS, _MAX_DOCUMENTS, _NUM_ROWS = 1200, 3, 16


def free_answers(engine: Engine, paths: Sequence[Path], max_tokens: int) -> list[KnownAnswer]:
    """What a model answers greedily to each case's question about its documents, asked in two ways."""
    tokenizer = engine.tokenizer
    records = [line.record() for path in paths for line in read_lines(path)]
    asked = [(record, request) for request in _REQUESTS for record in records]
    cases: list[KnownAnswer] = []
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
        cases += map(KnownAnswer, prompts, references, answers)
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
        samples["free, prompt alone"] = [replace(case, references=()) for case in free]
    unseen: dict[str, dict[str, float]] = {}
    fit = partial(fit_copy_weights, num_rounds=options.rounds, drafter_with=small_trees)
    counts = {name: [0, 0, 0] for name in samples}
    for half in (0, 1):
        weights = fit([cases[half::2] for cases in samples.values()])
        for name, cases in samples.items():
            for case in cases[1 - half :: 2]:
                forwards, drafted, _ = decode_known(small_trees(weights), case)
                counts[name] = [
                    a + b for a, b in zip(counts[name], (len(case.answer), forwards, drafted), strict=True)
                ]
    for name, (tokens, forwards, drafted) in counts.items():
        unseen[name] = {
            "tokens_per_forward": round(tokens / forwards, 3),
            "draft_tokens_per_forward": round(drafted / forwards, 3),
        }
    print(fit(list(samples.values())))
    print(json.dumps({"unseen_cases": unseen}))


if __name__ == "__main__":
    main()
