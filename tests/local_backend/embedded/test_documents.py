"""Made-up documents: what is asked about them can be answered, and by one sentence."""

from __future__ import annotations

import random

import pytest

from local_backend.embedded.documents import make_document_cases
from local_backend.embedded.evaluation import unseen_documents
from local_backend.embedded.invented import random_word


@pytest.mark.parametrize("seed", range(20))
def test_a_question_has_one_answer(seed: int) -> None:
    """Also where two documents are of one family, as two minutes of two accidents."""
    rng = random.Random(seed)
    answers: dict[str, set[str]] = {}
    for case in make_document_cases(rng, num_documents=3, num_sentences=5, num_questions=120):
        if len(case.quotations) == 1:
            answers.setdefault(case.question, set()).add(case.quotations[0].sentence)
    assert len(answers) > 5
    assert all(len(sentences) == 1 for sentences in answers.values())


def test_the_answer_stands_in_the_document_it_is_said_to_be_of() -> None:
    for prompt in unseen_documents(200):
        for quotation in prompt.case.quotations:
            assert quotation.sentence in prompt.case.documents[quotation.document].text
            assert quotation.fact.lower() in quotation.sentence.lower()


def test_some_words_hold_full_stops() -> None:
    """So that a model learns where a sentence ends, and where only a name has a full stop in it."""
    rng = random.Random(0)
    drawn = [random_word(rng) for _ in range(2000)]
    assert 0.01 < sum("." in word.strip(".") for word in drawn) / len(drawn) < 0.1
