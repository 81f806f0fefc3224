"""Texts read without their typography, and the way back to the text as it stands."""

from __future__ import annotations

import pytest
from hypothesis import example, given
from hypothesis import strategies as st

from retrieval_copy.citations.words import (
    _SYMBOL,
    Reading,
    is_word,
    normalised,
    readings,
    terms,
)

# What PDF and web pages are made of finds more than text made of anything.
TYPESET = st.lists(
    st.one_of(
        st.sampled_from(["kiln", "cafe\u0301", "ﬁre", "窑", "Ｋ", "ｶﾞ", "นํา", "10²", "👩‍🏫", "ö", "\u0308"]),
        st.sampled_from([" ", "\n", "\r\n", "\t", "\u00a0", "\u2028", "\u200b", "\u00ad", "\u2060", "\x0c"]),
        st.sampled_from(["-", "–", "—", "--", "¬", "“", "”", "'", "''", "’", "…", "\x00", "\udcff", "."]),
        st.text(max_size=2),
    ),
    max_size=16,
).map("".join)


RUNS = {"'", '"', "-", ".", "`", "…"}  # runs of these are read as one


def same_symbols(one: str, other: str) -> bool:
    first, second = readings([one, other])
    return first.symbols == second.symbols


@given(TYPESET)
@example("a\u00ad")
def test_a_part_of_the_plain_text_leads_back_to_what_reads_the_same(text: str) -> None:
    plain = normalised(text)
    places = {0, len(plain.text)} | {place for change in plain.changes for place in change[:2]}
    for start in places:
        for end in places:
            if start < end:
                old_start, old_end = plain.original_span(start, end)
                assert normalised(text[old_start:old_end]).text == plain.text[start:end]


@given(TYPESET, st.data())
def test_words_lead_back_to_what_reads_the_same(text: str, data: st.DataObject) -> None:
    (reading,) = readings([text])
    if not reading.symbols:
        return
    start = data.draw(st.integers(0, len(reading.symbols) - 1))
    end = data.draw(st.integers(start + 1, len(reading.symbols)))
    part = reading.symbols[start:end]
    span = reading.original_span(start, end)
    assert set(part) <= set(readings([text, text[slice(*span)]])[1].symbols)
    first = reading.find(part)
    assert first is not None
    assert first[0] <= span[0]


@given(st.text(st.characters(max_codepoint=127)))
def test_the_fast_way_for_ascii_reads_like_the_general_one(text: str) -> None:
    plain = normalised(text).text
    if plain.isascii():
        parts = [part for part in _SYMBOL.findall(plain) if part not in RUNS]
        assert [part for part in Reading.of(text).symbols if part not in RUNS] == parts


@pytest.mark.parametrize(
    ("typeset", "plain"),
    [
        ("The ﬁrst oﬃce", "The first office"),
        ("cafe\u0301 Tu\u0308r", "café Tür"),
        ("각", "\u1100\u1161\u11a8"),
        ("ｶﾞｽ", "ガス"),
        ("Ｋｉｌｎ，１２", "Kiln,12"),
        ("open\u00ading ki\u200bln, \ufeffhot", "opening kiln, hot"),
        ("a\u00a0b\u2009c\td\n\n e\u2028f", "a b c d e f"),
        ("“quoted” ‘so’ «and» „so“ ``TeX'' ′", '"quoted" \'so\' "and" "so" "TeX" \''),
        ("don’t l＇eau", "don't l'eau"),
        ("1914–1918, kiln—hot - so -- well\u2011known \u22125", "1914-1918, kiln-hot—so – well-known -5"),
        ("and so on… end….", "and so on... end...."),
        ("❤️ 👩‍🏫", "❤ 👩‍🏫"),
        ("窑炉\n可以", "窑炉可以"),
        ("the kiln\x00\udcff", "the kiln\ufffd\ufffd"),
        ("𝐊iln Ⅳ 10㎏ ㎡", "Kiln IV 10kg m2"),
        ("open-\ning", "opening"),
        ("open\u2010\r\n  ing", "opening"),
        ("open\u00ad\ning", "opening"),
        ("open- ing", "opening"),
        ("in-\nterna-\ntional", "international"),
        ("well-\nknown", "well-known"),
        ("COVID-\n19 and 10-\n20", "COVID-19 and 10-20"),
    ],
)
def test_texts_that_read_the_same(typeset: str, plain: str) -> None:
    assert same_symbols(typeset, plain)
    assert same_symbols(f"so {typeset} it is", f"so {plain} it is")


@pytest.mark.parametrize(
    ("one", "other"),
    [
        ("10²", "102"),
        ("1½", "11⁄2"),
        ("10-20", "1020"),
        ("well-known", "well known"),
        ("Kiln", "kiln"),
        ("naïve", "naive"),
        ("ab", "a b"),
        ("①", "1"),
        ("👩‍🏫", "👩"),
        ("re-\nsign", "sign"),
    ],
)
def test_texts_that_do_not(one: str, other: str) -> None:
    assert not same_symbols(one, other)


def test_a_hyphen_joins_only_what_some_text_writes_as_one_word() -> None:
    one, other, third = readings(["vor- und nach-\nteilig", "nachteilig", "nach-teilig"])
    assert one.symbols == ["vor", "-", "und", "nachteilig"]
    assert other.symbols == third.symbols == ["nachteilig"]


def test_words_of_several_scripts() -> None:
    assert [part for part in Reading.of("Don’t panic, l'été_2 is x=[1].").symbols if is_word(part)] == [
        "Don't",
        "panic",
        "l'été_2",
        "is",
        "x",
        "1",
    ]
    assert sum(map(is_word, Reading.of("窑炉可以打开").symbols)) == 6
    assert sum(map(is_word, Reading.of("เตาเผา").symbols)) > 1
    assert not any(map(is_word, Reading.of("... -- !").symbols))


@pytest.mark.parametrize(
    ("text", "wanted"),
    [
        ("café", "cafe\u0301"),
        ("STRASSE", "straße"),
        ("oﬃce", "Office"),
        ("Ｋｉｌｎ", "kiln"),
        ("ｶﾞｽ", "ガス"),
        ("ki\u00adln", "kiln"),
        ("open-\ning", "opening"),
        ("don’t", "don't"),
        ("10 m²", "m2"),
        ("ΣΊΣΥΦΟΣ", "σίσυφος"),
        ("İstanbul", "i\u0307stanbul"),
    ],
)
def test_one_searches_without_case_and_typography(text: str, wanted: str) -> None:
    assert set(terms(wanted)) <= set(terms(text))


def test_long_chains_of_hyphens_take_linear_time() -> None:
    one, other = readings(["a-" * 100_000, "aaaa"])
    assert len(one.symbols) == 50_000
    assert other.symbols == ["aaaa"]
