"""The evaluation of answers from documents: what its figures count."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
from langchain_core.documents import Document
from langchain_core.messages import AIMessage

from benchmarks import rag_quality
from retrieval_copy import cite

RECORDS = [
    {
        "query": "how deep is the harbour of vardal",
        "documents": [
            "The harbour of Vardal was dredged in 1963 to a depth of eleven metres.",
            "Fishing boats land cod and haddock in the harbour before dawn, except on Sundays.",
        ],
        "target": " The harbour of Vardal is eleven metres deep.",
    },
    {
        "query": "why does sourdough rise slowly",
        "documents": ["Sourdough rises slowly because its wild yeast is weak and the dough is cold."],
        "target": " Because its wild yeast is weak.",
    },
]


@pytest.fixture
def data(tmp_path: Path) -> Path:
    path = tmp_path / "cases.jsonl"
    path.write_text("".join(json.dumps(record) + "\n" for record in RECORDS), encoding="utf-8")
    return path


def case(**changed: Any) -> dict[str, Any]:
    figures: dict[str, Any] = {
        **dict.fromkeys(("looped", "chain_looped", "unsupported"), False),
        **{"unsupported_swapped": True, "wrong_citations": 0, "num_tokens": 10, "num_cited": 8},
        **{"rouge_l": 0.5, "chain_rouge_l": 0.25, "seconds": 1.0, "chain_seconds": 3.0},
        **{"num_written": 11, "num_forwards": 4},
    }
    return {**figures, **changed}


def test_cases_have_the_passages_of_another_question_too(data: Path) -> None:
    first, second = rag_quality.read(data, None)
    assert (first.swapped, second.swapped) == (second.documents, first.documents)
    assert first.target == "The harbour of Vardal is eleven metres deep."
    assert len(rag_quality.read(data, 1)) == 1
    with pytest.raises(ValueError, match="need 2 and 1"):
        rag_quality.read(data, 0)


def test_figures_are_medians_and_shares() -> None:
    slow = case(chain_seconds=9.0, num_tokens=30, num_cited=0, unsupported_swapped=False, looped=True)
    row = rag_quality.summarize([case(), case(), slow])
    assert row["answers"] == 3
    assert row["speedup"] == 3.0
    assert row["cited_share"] == round(16 / 50, 3)
    assert row["unsupported_right"] == 0
    assert row["unsupported_swapped"] == round(2 / 3, 3)
    assert row["loops"] == 1
    assert row["tokens_per_forward"] == 2.75


def test_a_citation_that_stands_elsewhere_is_wrong() -> None:
    documents = [Document(text) for text in RECORDS[0]["documents"]]
    text = f"It is known: {documents[0].page_content}"
    citations = cite(text, documents)
    answer = AIMessage(text, response_metadata={"citations": citations})
    assert rag_quality.num_wrong(answer, documents) == 0
    assert rag_quality.num_wrong(answer, [documents[1], documents[0]]) == len(citations) == 1


@pytest.mark.slow
def test_two_cases_on_the_default_model(data: Path, capsys: pytest.CaptureFixture[str]) -> None:
    rag_quality.main(["--data", str(data), "--cases", "2"])
    row = json.loads(capsys.readouterr().out.splitlines()[-1])
    assert list(row) == [
        *("answers", "wrong_citations", "loops", "cited_share", "rouge_l", "chain_rouge_l", "speedup"),
        *("unsupported_right", "unsupported_swapped"),
    ]
    assert (row["answers"], row["wrong_citations"], row["loops"]) == (2, 0, 0)
    assert row["cited_share"] > 0.5
    assert row["unsupported_swapped"] == 1
