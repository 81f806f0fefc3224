"""List markers: "1.", "**2)**", "(3)", "Step 4:", "b.", "IV.", "五、", "⑥", "- ".

Every pattern is anchored and bounded, so reading a marker takes the same short time whatever follows it.
Knows single lines. Does not know lists.
"""

from __future__ import annotations

import re
import unicodedata
from typing import NamedTuple

_DIGITS = "[0-9０-９]{1,3}"
_HAN = "[一二三四五六七八九十]{1,3}"
_WORDS = (
    "step|point|part|section|item|heading|topic|phase|stage|tip|idea|reason|schritt|punkt|teil|abschnitt|"
    "étape|etape|partie|paso|punto|parte|passo|stap|шаг|步骤"
)
_END = r"\\?(?:[.．、](?![0-9０-９])|[)）\]】])[*_]{0,3}"  # 1.5 is a number
_LOOSE_END = r"[*_]{0,3}[ \t]?(?:[:：]|[-–—])(?=[\s*_]|\Z)[*_]{0,3}|[*_]{0,3}：(?![0-9０-９])"
_MARKER = re.compile(
    rf"""
    (?:>[ \t]?)?(?:\#{{1,6}}[ \t]{{0,4}})?  # quoted, or a heading of Markdown
    (?:
        (?P<bullet>\\?[-+*]|[•‣◦·–—●○■□▪▫➢➤►✓✔✅])(?=[ \t])(?:[ \t]{{1,4}}\[[ xX]\](?=[ \t]))?
    |
        [*_]{{0,3}}[ \t]?
        (?:
            (?P<circled>[①-⑳❶-➓])[.、]?[*_]{{0,3}}
        |   (?P<keycap>[0-9])\ufe0f?\u20e3[.:]?[*_]{{0,3}}
        |   (?:(?:{_WORDS})[ \t]?(?P<step>{_DIGITS})|第[ \t]?(?P<nth>{_DIGITS}|{_HAN})[点步章节条部]?分?)
            (?:[*_]{{0,3}}{_END}|{_LOOSE_END}|[，,])
        |   (?:\\?[(（\[【](?P<number>{_DIGITS})\\?[)）\]】][*_]{{0,3}}
            |\#?(?P<ended>{_DIGITS})[*_]{{0,3}}{_END})
        |   \#?(?P<loose>{_DIGITS})(?:{_LOOSE_END})
        |   (?:[(（](?P<han>{_HAN})[)）]|(?P<plain_han>{_HAN})[、．.])
        |   \\?[(（]?(?:(?P<letter>[A-Za-z])|(?P<roman>[ivxlIVXL]{{2,6}}))[*_]{{0,3}}{_END}(?=\s|\Z)
        )
    )
    """,
    re.VERBOSE | re.IGNORECASE,
)
_NUMBERS = ("number", "ended", "loose", "circled", "keycap")
_ROMAN = {"i": 1, "v": 5, "x": 10, "l": 50}


class Marker(NamedTuple):
    """What a line of a list begins with.

    Attributes:
        kind: ``"number"``, ``"step"``, ``"han"``, ``"letter"``, ``"roman"``, the latter two also in capitals,
            or the bullet itself.
        number: The number it stands for; 0 for a bullet.
        end: Where the text behind it starts.
        is_strict: Whether it is a marker in the middle of a line, too: "2." is one, "2 -" is not.
    """

    kind: str
    number: int
    end: int
    is_strict: bool = True

    @property
    def is_bullet(self) -> bool:
        """Whether it does not count."""
        return not self.number


def read_marker(body: str, kind: str | None = None) -> Marker | None:
    """The marker that ``body`` begins with, if any.

    Args:
        body: A line without white space around it.
        kind: The kind of the list so far: "v." may be a letter or a number.
    """
    match = _MARKER.match(body)
    if match is None or match.lastgroup is None:
        return None
    name, text = match.lastgroup, match[match.lastgroup]
    end, case = match.end(), str.upper if text.isupper() else str.lower
    if name == "bullet":
        return Marker(text.lstrip("\\"), 0, end)
    if name in _NUMBERS:
        number = int(unicodedata.numeric(text)) if name == "circled" else int(text)
        return Marker("number", number, end, name != "loose") if number else None
    if name in ("step", "nth"):
        number = int(text) if text.isdecimal() else _han_number(text)
        return Marker("step", number, end) if number else None
    if name in ("han", "plain_han"):
        return Marker("han", _han_number(text), end)
    is_roman = name == "roman" or (text.lower() in _ROMAN and kind in (None, case("roman")))
    if is_roman:
        return Marker(case("roman"), _roman_number(text.lower()), end)
    return Marker(case("letter"), ord(text.lower()) - ord("a") + 1, end)


def _han_number(text: str) -> int:
    tens, ten, ones = text.rpartition("十")
    number = (int(unicodedata.numeric(tens[-1])) if tens else 1) * 10 if ten else 0
    return number + (int(unicodedata.numeric(ones[-1])) if ones else 0)


def _roman_number(text: str) -> int:
    values = [_ROMAN[letter] for letter in text]
    return sum(-value if value < max(values[place:]) else value for place, value in enumerate(values))
