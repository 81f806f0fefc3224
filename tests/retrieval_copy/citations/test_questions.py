"""What a question asks for, and which sentences answer it."""

from __future__ import annotations

import pytest

from retrieval_copy.citations.questions import Question, is_follow_up
from retrieval_copy.citations.sentences import placed_sentences

SURELY, MAYBE, NEVER = 0.5, 0.25, 0.0


@pytest.mark.parametrize(
    ("question", "text", "kind"),
    [
        ("How old is the director?", "Ring 112, then the director.", NEVER),
        ("How old must a driver be?", "Drivers are at least 21 years old.", SURELY),
        ("How long is the film?", "The film has 3 parts.", NEVER),
        ("Wie lange dauert der Kurs?", "Der Kurs dauert zwei Wochen.", SURELY),
        ("How heavy is a full bin?", "A bin holds 320 kilograms.", SURELY),
        ("How hot does the oven get?", "The oven reaches 900 degrees.", SURELY),
        ("How tall is the tree?", "Tree: Bramley; Height: 6 m", SURELY),
        ("How much is the audio guide?", "The audio guide has 42 stations.", MAYBE),
        ("How much is the audio guide?", "Article: Audio guide; Price: 3.50", SURELY),
        ("How much is the audio guide?", "The audio guide costs €3.", SURELY),
        ("How much is the audio guide?", "That of the new eight is new.", NEVER),
        ("How much is the audio guide?", "It is three for members.", MAYBE),
        ("How much is the audio guide?", "The audio guide is free.", SURELY),
        ("What does a student pay?", "Member: Student; Fee: 145 EUR", SURELY),
        ("Was bezahlt ein Kind?", "Kinder zahlen 3 Euro.", SURELY),
        ("Qué tengo que pagar?", "Una familia paga 20 euros.", SURELY),
        ("What happens if I pay late?", "There is a reminder.", MAYBE),
        ("Cosa succede se pago tardi?", "Arriva una lettera.", MAYBE),
        ("How many books may I borrow?", "A late book costs 20 cents.", MAYBE),
        ("How many books may I borrow?", "Members borrow five old books.", SURELY),
        ("How many seats are there?", "Room: Oak; Seats: 60", SURELY),
        ("How many seats are there?", "There are seats in the hall.", NEVER),
        ("When is my rent due?", "The rent is due on the third working day of the month.", MAYBE),
        ("Wann ist die Miete fällig?", "Die Miete ist am dritten Werktag fällig.", MAYBE),
        ("When does it open?", "The gate has a new lock.", NEVER),
        ("Where do dogs sleep?", "Dogs sleep behind the woodshed.", SURELY),
        ("Where is the meeting?", "The meeting is in January.", MAYBE),
        ("Wo liegt der Schlüssel?", "Der Schlüssel liegt unter der Treppe.", SURELY),
        ("From what age can babies come?", "They begin at eighteen months.", SURELY),
        ("Who may open the kiln, and when?", "Only Hanna Brandt may open it.", SURELY),
    ],
)
def test_an_answer_is_of_the_kind_that_is_asked_for(question: str, text: str, kind: float) -> None:
    assert Question(question)._kind_of(text) == kind


def test_sentences_that_lead_to_a_question_count_half() -> None:
    asked = Question("What does a dinghy cost per day? And a canoe?")
    dinghy, canoe = placed_sentences("Boat: Dinghy; Per day: 70\n\nBoat: Canoe; Per day: 24")
    assert asked.score(canoe) > asked.score(dinghy)
    assert Question("I have lost my key. What does a new key cost?").terms >= {"key", "new"}


@pytest.mark.parametrize(
    ("question", "expected"),
    [
        ("And a canoe?", True),
        ("What about the fee?", True),
        ("Who teaches it?", True),
        ("Und im Winter?", True),
        ("Wie viel kostet das für ihn?", True),
        ("How many people live in one?", True),
        ("What did it cost to fix the pump?", False),
        ("How cold is it in the store?", False),
        ("How long does one wait before a row that was sprayed may be entered?", False),
        ("Was kostet es, eine Maschine zu waschen?", False),
        ("Et les enfants ?", True),
        ("Why?", True),
        ("Who keeps the list of firings?", False),
        ("Outline:\n1. Buy it.\nWrite point 1.", False),  # a request that is no question of a conversation
        ("Wo ist die Andacht?", False),
        ("How many books may a member borrow?", False),
        ("How many members are there?", False),  # words that refer to nothing
        ("What can I buy there?", True),
        ("Is it allowed to smoke in the garden?", False),
        ("Is it allowed?", True),
        ("Combien de membres y a-t-il ?", False),
        ("Y a-t-il une liste d'attente ?", False),
        ("Combien coûte-t-il ?", True),
        ("Est-il permis de fumer dans le jardin ?", False),
        ("¿Y a qué hora?", True),
    ],
)
def test_a_follow_up_refers_to_what_was_asked_before(question: str, expected: bool) -> None:
    assert is_follow_up(question) is expected
