"""Target-directed decoding counts forwards, and lets no drafter see what it is to guess."""

from __future__ import annotations

import json
import random
from pathlib import Path

import pytest

from benchmarks.copy_fit import KnownAnswer, decode_known
from benchmarks.copy_steps import FirstMatch, PromptLookup, main, measure, oracle_forwards
from benchmarks.span_copy import SpanCopy
from local_backend import Draft, Drafter
from local_backend.drafting import make_drafter

SHARED = Path(__file__).parents[3] / "shared" / "data"


def _case(seed: int) -> KnownAnswer:
    """Documents, and an answer of pieces from them with other tokens between."""
    rng = random.Random(seed)
    documents = tuple(tuple(rng.randrange(40) for _ in range(60)) for _ in range(3))
    target: list[int] = []
    while len(target) < 80:
        document, start = rng.choice(documents), rng.randrange(40)
        target += document[start : start + rng.randrange(3, 18)]
        target.append(rng.randrange(40, 50))
    return KnownAnswer((41, 42, 43), documents, tuple(target))


def _drafters() -> list[Drafter]:
    return [make_drafter("reference_copy"), SpanCopy(), FirstMatch(), PromptLookup()]


@pytest.mark.parametrize("number", range(4))
def test_proposals_do_not_depend_on_the_unseen_rest(number: int) -> None:
    case = _case(number)
    cut = 40
    rest = list(case.answer[cut:])
    random.Random(1).shuffle(rest)
    scrambled = KnownAnswer(case.prompt, case.references, case.answer[:cut] + tuple(rest))
    drafter, other = _drafters()[number], _drafters()[number]
    _, _, proposals = decode_known(drafter, case)
    _, _, again = decode_known(other, scrambled)
    written, seen = 0, 0
    for draft, twin in zip(proposals, again, strict=False):
        if written > cut:
            break
        assert draft == twin
        written += _num_landed(draft, case.answer[written:])
        seen += 1
    assert seen > 4


def _num_landed(draft: Draft, rest: tuple[int, ...]) -> int:
    return len(draft.nodes_along(rest)) + 1


def test_the_tree_needs_fewer_forwards_than_any_single_span() -> None:
    figures = measure([_case(seed) for seed in range(6)])
    per_forward = {name: figure["tokens_per_forward"] for name, figure in figures.items()}
    assert per_forward["oracle"] > per_forward["reference_copy"] > per_forward["llma"] > 1
    assert per_forward["reference_copy"] > per_forward["prompt_lookup"]


def test_the_oracle_copies_what_fits_longest() -> None:
    assert oracle_forwards(KnownAnswer((), ((1, 2, 3, 4), (3, 4, 5)), (1, 2, 3, 4, 5, 9, 3, 4, 5))) == (3, 7)


@pytest.mark.parametrize("name", ["rag_dev", "cnndm_dev"])
def test_it_measures_the_papers_cases(name: str, capsys: pytest.CaptureFixture[str]) -> None:
    data, tokenizer = SHARED / "reference" / f"{name}.jsonl", SHARED / "tokenizers" / "llama2.model"
    if not data.exists():
        pytest.skip(f"the paper's cases are not part of the project, and {data} is not here")
    main(["--data", str(data), "--tokenizer", str(tokenizer), "--limit", "12"])
    methods = json.loads(capsys.readouterr().out.splitlines()[-1])["methods"]
    copied = methods["reference_copy"]
    assert copied["tokens_per_forward"] > max(
        methods[peer]["tokens_per_forward"] for peer in ("llma", "prompt_lookup")
    )
    assert copied["draft_tokens_per_forward"] <= 17
