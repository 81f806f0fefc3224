"""Counts the forwards that a copied answer needs, without a model: target-directed decoding.

The answer of each case is known. A drafter proposes, the answer decides what is accepted, and the forwards
are counted. The drafter sees the query, the documents and the text so far, but neither the rest of the answer
nor any other case. It is the production drafter, called through its usual protocol.

It is compared with LLMA (arXiv 2304.04487; copies 20 tokens after the first occurrence of the last token),
``transformers``' prompt lookup (its own class; matches two tokens, copies 10), suffix decoding (arXiv
2411.04975; Arctic Inference's own suffix tree, if that package is installed) and an oracle that copies the
longest matching span of at most 19 tokens at each step.
"""

from __future__ import annotations

import argparse
import json
import statistics
from collections.abc import Callable, Sequence
from importlib import import_module
from importlib.util import find_spec
from pathlib import Path
from typing import Any, Protocol, cast

import torch
from rich.console import Console
from rich.progress import track
from rich.table import Table

from benchmarks.copy_fit import KnownAnswer, decode_known
from benchmarks.results import save
from local_backend.drafting import Drafter, ReferenceCopy, RowView
from local_backend.drafting.copy_tree import CopyWeights
from local_backend.drafting.draft import EMPTY_DRAFT, Draft, Outcome
from local_backend.drafting.reference_copy import FITTED
from local_backend.offline.jsonl import read_lines

# The best settings of a small grid that draft about as much as the others.
_SUFFIX_SETTINGS = {
    "max_spec_tokens": 24,
    "max_spec_factor": 8.0,
    "max_spec_offset": 8.0,
    "min_token_prob": 0.05,
    "use_tree_spec": True,
}
_LLMA_COPY_TOKENS, _LOOKUP_COPY_TOKENS, _ORACLE_COPY_TOKENS = 20, 10, 19


class FirstMatch:
    """LLMA's rule: copy a fixed number of tokens after the first occurrence of the last token."""

    def propose(self, rows: Sequence[RowView]) -> list[Draft]:
        """One chain for each row whose last generated token occurs in a document."""
        return [self._draft(row) for row in rows]

    def observe(self, rows: Sequence[RowView], outcomes: Sequence[Outcome]) -> None:
        """Nothing to learn."""

    @staticmethod
    def _draft(row: RowView) -> Draft:
        if len(row.token_ids) == row.num_prompt_tokens:
            return EMPTY_DRAFT
        last = row.token_ids[-1]
        for document in row.references:
            if last in document[:-1]:
                start = document.index(last) + 1
                return Draft.chain(document[start : start + _LLMA_COPY_TOKENS])
        return EMPTY_DRAFT


class PromptLookup:
    """``transformers``' own candidate generator, with the documents in the prompt."""

    def __init__(self) -> None:
        from transformers.generation.candidate_generator import PromptLookupCandidateGenerator

        self._generator = PromptLookupCandidateGenerator(
            num_output_tokens=_LOOKUP_COPY_TOKENS, max_matching_ngram_size=2, max_length=10**9
        )

    def propose(self, rows: Sequence[RowView]) -> list[Draft]:
        """The drafts it would have the model verify."""
        drafts = []
        for row in rows:
            prompt = [token for document in row.references for token in document] + list(row.token_ids)
            candidate, _ = self._generator.get_candidates(cast("torch.LongTensor", torch.tensor([prompt])))
            drafts.append(Draft.chain(candidate[0, len(prompt) :].tolist()))
        return drafts

    def observe(self, rows: Sequence[RowView], outcomes: Sequence[Outcome]) -> None:
        """Nothing to learn."""


class SuffixDecoding:
    """Proposes token trees from Arctic Inference's suffix tree over documents, query and generated text.

    Raises:
        ImportError: The package is not installed.
    """

    def __init__(self) -> None:
        module: Any = import_module("arctic_inference.suffix_decoding")
        self._cache = module.SuffixDecodingCache(max_tree_depth=64, max_cached_requests=0)
        self._num_read: dict[int, int] = {}

    def propose(self, rows: Sequence[RowView]) -> list[Draft]:
        """The drafts it would have the model verify."""
        return [self._draft(row) for row in rows]

    def observe(self, rows: Sequence[RowView], outcomes: Sequence[Outcome]) -> None:
        """Nothing to do: ``propose`` passes the new tokens on."""

    def _draft(self, row: RowView) -> Draft:
        request, written = id(row), list(row.token_ids)
        if request not in self._num_read:
            prompt = [token for document in row.references for token in document] + written
            self._cache.start_request(request, prompt)
        elif new := written[self._num_read[request] :]:
            self._cache.add_active_response(request, new)
        self._num_read[request] = len(written)
        found = self._cache.speculate(request, written, **_SUFFIX_SETTINGS)
        return Draft(tuple(found.token_ids), tuple(found.parents))


def oracle_forwards(case: KnownAnswer) -> tuple[int, int]:
    """Forwards and drafted tokens if the longest matching span were known and copied at each step."""
    written = num_forwards = num_drafted = 0
    while written < len(case.answer):
        rest = case.answer[written : written + _ORACLE_COPY_TOKENS]
        longest = 0
        for document in case.references:
            for start in range(len(document)):
                length = 0
                while (
                    length < len(rest)
                    and start + length < len(document)
                    and document[start + length] == rest[length]
                ):
                    length += 1
                longest = max(longest, length)
        num_drafted += longest
        written += longest + 1
        num_forwards += 1
    return num_forwards, num_drafted


def tokenizer_of(path: Path) -> Callable[[str], list[int]]:
    """The encoding function of a SentencePiece model or a ``tokenizers`` file."""
    if path.suffix == ".json":
        from tokenizers import Tokenizer

        tokenizer = Tokenizer.from_file(str(path))
        return lambda text: list(tokenizer.encode(text, add_special_tokens=False).ids)
    from sentencepiece import SentencePieceProcessor

    processor = SentencePieceProcessor(model_file=str(path))
    return lambda text: list(processor.encode(text))


def load_cases(data: Path, encode: Callable[[str], list[int]]) -> list[KnownAnswer]:
    """Known answers from JSON lines of ``query``, ``documents`` and ``target``."""
    cases = []
    for line in read_lines(data):
        record = line.record()
        documents = tuple(tuple(encode(document)) for document in record["documents"])
        cases.append(
            KnownAnswer(tuple(encode(record["query"])), documents, tuple(encode(record["target"].strip())))
        )
    return cases


class _Counts(Protocol):
    def __call__(self, case: KnownAnswer) -> tuple[int, int]: ...


def small_trees(weights: CopyWeights = FITTED) -> ReferenceCopy:
    """The production drafter, limited to drafting as much as the others.

    In an engine its trees are larger and cut by the measured cost of wider forwards; here there is no forward
    to measure.
    """
    return ReferenceCopy(mean_draft_tokens=16, max_draft_tokens=32, max_depth=32, weights=weights)


def methods() -> dict[str, _Counts]:
    """For each method, a function that counts a case's forwards and drafted tokens with a new drafter."""

    def by(make: Callable[[], Drafter]) -> _Counts:
        return lambda case: decode_known(make(), case)[:2]

    found: dict[str, _Counts] = {"llma": by(FirstMatch), "prompt_lookup": by(PromptLookup)}
    if find_spec("arctic_inference") is not None:
        found["suffix_decoding"] = by(SuffixDecoding)
    found["reference_copy"] = by(small_trees)
    found["oracle"] = oracle_forwards
    return found


def measure(cases: Sequence[KnownAnswer]) -> dict[str, dict[str, float]]:
    """For each method, tokens and drafted tokens per forward over all cases, and the mean over cases."""
    num_tokens = sum(len(case.answer) for case in cases)
    results = {}
    for name, counts in methods().items():
        pairs = [counts(case) for case in track(cases, name, console=Console(stderr=True))]
        num_forwards = sum(forwards for forwards, _ in pairs)
        each = [len(case.answer) / forwards for case, (forwards, _) in zip(cases, pairs, strict=True)]
        results[name] = {
            "tokens_per_forward": round(num_tokens / num_forwards, 3),
            "draft_tokens_per_forward": round(sum(drafted for _, drafted in pairs) / num_forwards, 3),
            "tokens_per_forward_mean_of_cases": round(statistics.mean(each), 3),
        }
    return results


def main(arguments: Sequence[str] | None = None) -> None:
    parser = argparse.ArgumentParser(prog="python -m benchmarks.copy_steps", description=__doc__)
    parser.add_argument("--data", type=Path, required=True, help="JSON lines: query, documents, target")
    parser.add_argument(
        "--tokenizer", type=Path, required=True, help="SentencePiece model or tokenizers JSON"
    )
    parser.add_argument("--limit", type=int, help="use at most this many cases")
    parser.add_argument("--save", action="store_true", help="keep a dated file under benchmarks/results")
    options = parser.parse_args(arguments)
    for path in (options.data, options.tokenizer):
        if not path.exists():
            parser.error(f"{path} does not exist")
    cases = load_cases(options.data, tokenizer_of(options.tokenizer))[: options.limit]
    if not cases:
        parser.error(f"{options.data} holds no case")
    results = measure(cases)
    table = Table("method", "tokens per forward", "mean of cases", "drafted per forward")
    for name, figures in results.items():
        table.add_row(
            name,
            f"{figures['tokens_per_forward']:.2f}",
            f"{figures['tokens_per_forward_mean_of_cases']:.2f}",
            f"{figures['draft_tokens_per_forward']:.1f}",
        )
    Console(width=100).print(table)
    summary: dict[str, Any] = {"methods": results}
    if options.save:
        save(f"copy_steps_{options.data.stem}", summary, [])
    print(json.dumps(summary))


if __name__ == "__main__":
    main()
