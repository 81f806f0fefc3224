"""Why reference copy accepts fewer tokens than an oracle, by kind of miss.

Decodes known answers as :mod:`benchmarks.copy_steps` does. After every forward that accepted fewer tokens
than the longest span of the references that the answer goes on with, it looks up why, at the first token that
was not accepted:

- *no source*: no place that the drafter considered continues with the token; it is a word of the answer's own
  that happens to stand somewhere in the references.
- *others drafted*: a considered place continues with it, but the draft spent its tokens on likelier ones.
- *nothing drafted*: the draft ended there, because no continuation was likely enough.

"At the start" is the forward's first token, "on the way" a later one. The place's evidence is the number of
tokens before it that match, or none: a guess.
"""

from __future__ import annotations

import argparse
import json
from collections import Counter
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from rich.console import Console
from rich.table import Table

from benchmarks.copy_fit import KnownAnswer, KnownRow, decode_known
from benchmarks.copy_steps import load_cases, small_trees, tokenizer_of
from benchmarks.results import save
from local_backend.drafting.copy_sources import CopySources
from local_backend.drafting.copy_tree import Source
from local_backend.drafting.draft import Draft
from local_backend.drafting.suffix_index import SuffixIndex

_LONGEST_SPAN = 19  # of the oracle


def longest_span(documents: Sequence[Sequence[int]], rest: Sequence[int]) -> int:
    """The most tokens of ``rest`` from its beginning on that stand together in a document."""
    longest = 0
    for document in documents:
        for start in range(len(document)):
            length = 0
            for token, wanted in zip(document[start : start + _LONGEST_SPAN], rest, strict=False):
                if token != wanted:
                    break
                length += 1
            longest = max(longest, length)
    return longest


def kind_of_miss(draft: Draft, sources: Sequence[Source], rest: Sequence[int]) -> str:
    """Why ``draft`` ends before ``rest`` does; ``sources`` are those it was grown from."""
    path = draft.nodes_along(rest)
    wanted = rest[: len(path) + 1]
    right = [
        source
        for source in sources
        if tuple(source.tokens[source.index : source.index + len(wanted)]) == tuple(wanted)
    ]
    where = "on the way" if path else "at the start"
    if not right:
        return f"no source {where}"
    others = (path[-1] if path else -1) in draft.parents
    longest = max(source.num_tokens for source in right)
    evidence = f"{min(longest, 3)}{'+' if longest > 2 else ''} matching" if longest else "a guess"
    return f"{'others' if others else 'nothing'} drafted {where}, {evidence}"


def misses(cases: Sequence[KnownAnswer]) -> tuple[Counter[str], Counter[str]]:
    """How often each kind of miss occurs, and the tokens by which the oracle is ahead there."""
    times, tokens = Counter[str](), Counter[str]()
    for case in cases:
        _, _, drafts = decode_known(small_trees(), case)
        sources = CopySources(SuffixIndex(case.references), SuffixIndex([case.prompt]))
        row = KnownRow(list(case.prompt), len(case.prompt), case.references)
        written = 0
        for draft in drafts:
            rest = case.answer[written:]
            num_accepted = len(draft.nodes_along(rest))
            possible = min(longest_span(case.references, rest), len(rest) - 1)
            if num_accepted < possible:
                kind = kind_of_miss(draft, sources(row.token_ids), rest)
                times[kind] += 1
                tokens[kind] += possible - num_accepted
            emitted = rest[: num_accepted + 1]
            row.token_ids.extend(emitted)
            sources.extend(row.token_ids, row.num_prompt_tokens)
            written += len(emitted)
    return times, tokens


def main(arguments: Sequence[str] | None = None) -> None:
    parser = argparse.ArgumentParser(prog="python -m benchmarks.copy_misses", description=__doc__)
    parser.add_argument("--data", type=Path, nargs="+", required=True, help="as in benchmarks.copy_steps")
    parser.add_argument("--tokenizer", type=Path, required=True)
    parser.add_argument("--save", action="store_true", help="keep a dated file under benchmarks/results")
    options = parser.parse_args(arguments)
    encode = tokenizer_of(options.tokenizer)
    summary: dict[str, Any] = {}
    for path in options.data:
        times, tokens = misses(load_cases(path, encode))
        total = sum(tokens.values())
        table = Table(f"{path.stem}: kind of miss", "times", "tokens", "share")
        for kind, count in tokens.most_common():
            table.add_row(kind, str(times[kind]), str(count), f"{count / total:.0%}")
        Console().print(table)
        summary[path.stem] = {
            kind: {"times": times[kind], "tokens": count} for kind, count in tokens.most_common()
        }
    if options.save:
        save("copy_misses", summary, [])
    print(json.dumps(summary))


if __name__ == "__main__":
    main()
