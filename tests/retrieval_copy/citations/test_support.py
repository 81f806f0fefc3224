"""What passages support, and what only looks like it."""

from __future__ import annotations

from itertools import product

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from langchain_core.documents import Document

from retrieval_copy.citations.citations import cite
from retrieval_copy.citations.questions import Question
from retrieval_copy.citations.support import NOT_HELD, is_supported

HARBOUR = [
    "The harbour of Vardal was dredged in 1963 to a depth of eleven metres. Ferries leave it twice a day.",
    "Fishing boats land cod and haddock in the harbour before dawn, except on Sundays.",
]
BREAD = [
    "Sourdough rises slowly because its wild yeast is weak. Most bakers let it rest overnight in the cold.",
    "A loaf is done when it sounds hollow and its crust has the colour of chestnuts.",
]


def supported(answer: str, question: str, passages: list[str]) -> bool:
    return is_supported(
        answer, Question(question), passages, cite(answer, [Document(text) for text in passages])
    )


@pytest.mark.parametrize(
    ("question", "answer"),
    [
        ("how deep is the harbour of vardal", "It was dredged in 1963 to a depth of eleven metres."),
        ("When was Vardal's harbour dredged?", "In 1963."),
        ("what fish is landed in the harbour?", "Cod and haddock."),
        ("WHAT FISH DO BOATS LAND", "Fishing boats land cod and haddock in the harbour before dawn."),
        ("Какая глубина гавани?", "The harbour of Vardal was dredged in 1963 to a depth of eleven metres."),
    ],
)
def test_answers_taken_from_the_passages(question: str, answer: str) -> None:
    assert supported(answer, question, HARBOUR)


@pytest.mark.parametrize(
    ("question", "answer"),
    [
        ("how deep is the harbour of vardal", "It has been thirty fathoms deep since the Romans built it."),
        ("when was the harbour dredged?", "In 1871."),
        ("how deep is the harbour of vardal", NOT_HELD),
        ("how deep is the harbour", f"{NOT_HELD} {HARBOUR[0]}"),
        ("how deep is the harbour", "I'm sorry, but the documents provide no information about this."),
        ("how deep is the harbour", "  \n"),
        ("why does sourdough rise slowly", HARBOUR[0]),
        ("define sourdough", HARBOUR[1]),
    ],
)
def test_answers_from_elsewhere_and_passages_about_something_else(question: str, answer: str) -> None:
    assert not supported(answer, question, HARBOUR)


def test_each_question_is_supported_by_its_own_passages_alone() -> None:
    for question, own, other in (
        ("how often do ferries leave", HARBOUR, BREAD),
        ("how do I know that a loaf is done", BREAD, HARBOUR),
    ):
        assert sum(supported(passage, question, own) for passage in own) == 1
        for passage in other:
            assert not supported(passage, question, other)
    assert not supported(HARBOUR[0], "how deep is the harbour", [])


def test_what_is_sure_of_a_beginning_holds_of_the_whole() -> None:
    documents = [Document(text) for text in HARBOUR]
    sentences = [
        *(
            "The harbour of Vardal was dredged in 1963 to a depth of eleven metres.",
            "Ferries leave it twice a day.",
        ),
        *(HARBOUR[1], "In my opinion that is deep enough.", "The Romans built it in 1871."),
    ]
    num_sure = 0
    for asked in (
        "how deep is the harbour of vardal",
        "what fish is landed in the harbour?",
        "Who was Bach?",
    ):
        question = Question(asked)
        for begun in (" ".join(one) for length in (1, 2) for one in product(sentences, repeat=length)):
            if is_supported(begun, question, HARBOUR, cite(begun, documents), begun=True):
                num_sure += 1
                for rest in product(sentences, repeat=2):
                    assert supported(" ".join([begun, *rest]), asked, HARBOUR), (asked, begun, rest)
    assert num_sure > 10


RULES = [
    "# Handbook > Library\nIt is open on Tuesdays. A member may borrow five books. Late books cost 20 cents.",
    "# Minutes\nHenrik waters the garden in August.\n\nA soaker hose costs 18 euros and lies in the garden.",
    "# Preise > Zimmer\nZimmer: Eiche; Je Tag: 180 EUR\n\nDas Frühstück gibt es ab 7.30 Uhr.",
]


@pytest.mark.parametrize(
    ("question", "answer", "is_right"),
    [
        ("How many books may a member borrow?", "A member may borrow five books.", True),
        ("How many books may a member borrow?", "Late books cost 20 cents.", False),
        ("Who waters the garden in August?", "Henrik waters the garden in August.", True),
        (
            "What does the oak room cost per day?",
            "A soaker hose costs 18 euros and lies in the garden.",
            False,
        ),
        ("When is the library open?", "It is open on Tuesdays. A member may borrow five books.", True),
        ("How tall is the garden?", "Henrik waters the garden in August.", False),
        ("Was kostet das Zimmer Eiche?", "Zimmer: Eiche; Je Tag: 180 EUR", True),
        ("Wann gibt es Frühstück?", "Das Frühstück gibt es ab 7.30 Uhr.", True),
        ("Wann gibt es Abendessen?", "Das Frühstück gibt es ab 7.30 Uhr.", False),
    ],
)
def test_a_quotation_answers_what_is_asked(question: str, answer: str, is_right: bool) -> None:
    documents = [Document(text) for text in RULES]
    assert is_supported(answer, Question(question), RULES, cite(answer, documents, min_tokens=4)) is is_right


@settings(max_examples=50)
@given(st.text(max_size=60), st.text(max_size=30), st.lists(st.text(max_size=60), max_size=3))
def test_any_text_can_be_judged(answer: str, question: str, passages: list[str]) -> None:
    assert supported(answer, question, passages) in (True, False)
