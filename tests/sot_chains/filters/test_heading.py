"""Text of a point: what repeats the heading goes, everything else stays, however it is cut into pieces."""

import pytest
from hypothesis import given
from hypothesis import strategies as st

from sot_chains import Point
from sot_chains.filters.points import HeadingFilter

POINT = Point(3, "Careful watering")


def cleaned(pieces: list[str]) -> str:
    text = HeadingFilter(POINT, "How do I keep a plant alive?")
    return "".join(text.feed(piece) for piece in pieces) + text.end()


@pytest.mark.parametrize(
    ("raw", "expected"),
    [
        ("Soil dries.", "Soil dries."),
        ("  \n Soil dries. \n\n", "Soil dries."),
        ("3. Soil dries.", "Soil dries."),
        ("3) Soil dries.", "Soil dries."),
        ("(3) Soil dries.", "Soil dries."),
        ("3. Careful watering: Soil dries.", "Soil dries."),
        ("**3. Careful watering**\n\nSoil dries.", "Soil dries."),
        ("### 3. Careful watering\nSoil dries.", "Soil dries."),
        ("3. **Careful watering:** Soil dries.", "Soil dries."),
        ("Careful watering: Soil dries.", "Soil dries."),
        ("careful watering. Soil dries.", "Soil dries."),
        ("Careful watering - Soil dries.", "Soil dries."),
        ("Careful watering：土会干。", "土会干。"),
        ("Careful watering keeps soil moist.", "Careful watering keeps soil moist."),
        ("3. Careful watering keeps soil moist.", "Careful watering keeps soil moist."),
        ("**Careful watering** keeps soil moist.", "**Careful watering** keeps soil moist."),
        ("Careful planning.", "Careful planning."),
        ("Careful", "Careful"),
        ("3.5 litres are enough.", "3.5 litres are enough."),
        ("30. is not 3.", "30. is not 3."),
        ("*Soil* dries.", "*Soil* dries."),
        ("Careful watering: Careful watering: Soil dries.", "Soil dries."),
        ("How do I keep a plant alive? Soil dries.", "Soil dries."),
        ("3. Careful watering: How do I keep a plant alive? Soil dries.", "Soil dries."),
        (
            "How do I keep a plant alive in winter? Soil dries.",
            "How do I keep a plant alive in winter? Soil dries.",
        ),
        ("How do I keep a plant alive?", ""),
        ("3. Careful watering", ""),
        ("Careful watering:", ""),
        ("", ""),
        (" \n", ""),
    ],
)
def test_echoes(raw: str, expected: str) -> None:
    assert cleaned([raw]) == expected
    assert cleaned(list(raw)) == expected
    assert cleaned([raw[:4], raw[4:9], raw[9:]]) == expected


@given(
    st.lists(
        st.one_of(
            st.text(max_size=4), st.sampled_from(["3", ". ", "Careful", " ", "watering", ":", "\n", "**"])
        )
    )
)
def test_the_cut_into_pieces_makes_no_difference(pieces: list[str]) -> None:
    whole = "".join(pieces)
    assert cleaned(pieces) == cleaned([whole]) == cleaned(list(whole))
    assert whole.strip().endswith(cleaned(pieces))
