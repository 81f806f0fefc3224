"""A reply that holds several points is taken apart, whatever a model makes of the form."""

import pytest
from hypothesis import given
from hypothesis import strategies as st

from sot_chains.text.reply_text import MultiPointSplitter
from sot_chains.text.skeleton import Point

POINTS = [Point(2, "Dark room"), Point(3, "Less coffee"), Point(5, "Fresh air")]
TEXTS = ["Close the curtains.", "Drink none after noon.", "Open a window."]


def split(reply: str, *, size: int = 1000, begun: bool = False) -> list[str]:
    several = MultiPointSplitter(POINTS, begun=begun)
    texts = ["", "", ""]
    for start in range(0, len(reply), size):
        for place, text in several.feed(reply[start : start + size]):
            texts[place] += text
    for place, text in several.end():
        texts[place] += text
    return texts


FORMS = {
    "as asked": "{n}. {h}: {t}\n",
    "blank lines": "{n}. {h}: {t}\n\n",
    "bold": "**{n}. {h}**: {t}\n",
    "bold heading": "{n}. **{h}:** {t}\n",
    "headings": "### {n}. {h}\n{t}\n\n",
    "brackets": "{n}) {h}: {t}\n",
    "without heading": "{n}. {t}\n",
    "shouting": "{n}. {h!u}: {t}\n",
    "on one line": "{n}. {h}: {t} ",
}


def in_form(form: str) -> str:
    lines = []
    for point, text in zip(POINTS, TEXTS, strict=True):
        heading = point.text.upper() if "!u" in form else point.text
        lines.append(form.replace("!u", "").format(n=point.number, h=heading, t=text))
    return "".join(lines)


@pytest.mark.parametrize("form", FORMS.values(), ids=FORMS)
@pytest.mark.parametrize("size", [1, 7, 1000])
def test_forms(form: str, size: int) -> None:
    assert split(in_form(form), size=size) == TEXTS
    assert split("Here are my points:\n\n" + in_form(form), size=size) == TEXTS


def test_a_reply_that_was_begun() -> None:
    reply = in_form(FORMS["as asked"]).removeprefix("2. Dark room:")
    assert split(reply, begun=True) == TEXTS
    assert split(in_form(FORMS["as asked"]), begun=True) == TEXTS  # begun anew after all


def test_lists_within_a_point_stay_in_it() -> None:
    reply = "2. Dark room: Do this:\n1. Curtains\n2. Blinds\n3. Less coffee: None.\n5. Fresh air: Yes.\n"
    assert split(reply) == ["Do this:\n1. Curtains\n2. Blinds", "None.", "Yes."]


def test_what_a_model_leaves_out_is_empty() -> None:
    assert split("2. Dark room: Yes.\n5. Fresh air: Too.") == ["Yes.", "", "Too."]
    assert split("I cannot help with that.") == ["", "", ""]
    assert split("") == ["", "", ""]


@given(
    st.lists(
        st.text(st.characters(blacklist_categories=["Cs", "Cc", "Zl", "Zp"]), min_size=1, max_size=40),
        min_size=3,
        max_size=3,
    ),
    st.integers(1, 20),
)
def test_what_was_written_comes_back_whatever_the_pieces(texts: list[str], size: int) -> None:
    texts = [f"It is {' '.join(text.split())}".strip() for text in texts]
    reply = "\n".join(
        f"{point.number}. {point.text}: {text}" for point, text in zip(POINTS, texts, strict=True)
    )
    if any(f" {point.number}" in text for point in POINTS for text in texts):
        return  # a number and heading within a text would begin a point
    assert split(reply, size=size) == texts


@given(st.text(max_size=200), st.integers(1, 20))
def test_nothing_crashes_it(reply: str, size: int) -> None:
    texts = split(reply, size=size)
    assert sum(map(len, texts)) <= len(reply)
