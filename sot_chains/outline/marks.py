"""Marks by which a heading of an outline says what it builds on: "4. Total cost (needs 2, 3)".

A mark stands in brackets anywhere in the heading, or without brackets at its end. It names earlier points
only, so that no cycle can come about; other numbers in it are ignored. A pure function of text, in time
linear in it and in the number of points that are named.
"""

from __future__ import annotations

import re
import unicodedata
from collections.abc import Mapping
from dataclasses import replace
from types import MappingProxyType
from typing import NamedTuple

from sot_chains.outline.skeleton import Point

_NO_NAMES: Mapping[str, int] = MappingProxyType({})
_LONGEST_MARK = 160
_SEPARATORS = " \t–—,;:，；：|•·/→=>-"  # the hyphen last, as in a class of characters

# Words that say that one point builds on another, and nothing else; those that say it beside other things;
# and those that need more than a number behind them: "by 3" is a time of the day.
_ADVERB = (
    "this|it|which|that|is|are|also|only|directly|partly|mainly|must|can|to|be|come|comes|written|done|"
    "本点|此点|该点|同时|也|还|必须"
)
_REFERRING = (
    r"dep(?:ends?|endent|ending)? (?:up)?on"
    r"|(?:builds?|building|built|bas(?:ed|es)|rel(?:ies|y|ying)) (?:on top of|(?:up)?on|off)"
    r"|follows (?:up )?(?:on|from)|draws? (?:up)?on|deriv(?:ed|es) from|blocked by"
    r"|wait(?:s|ing)? (?:for|on)|←|⇐|<-+|<=="
    r"|(?:contingent|predicated|conditional) (?:up)?on|subject to"
    r"|depende de|dépend de|basado en|basé sur|baut auf|basiert auf"
    r"|依赖于?|依賴於?|取决于|取決於|基[于於]|建立[在于於]|承接"
)
_NEEDING = (
    r"need(?:s|ed|ing)?|requir(?:es?|ed|ing|ements?)|depend(?:s|enc(?:y|ies)(?: on)?)|deps?"
    r"|(?:pre-?)?requisites?|prereqs?"
    r"|inputs?(?: from)?|necesita|requiere|nécessite|requiert|braucht|benötigt"
    r"|(?:需要?|必须|须)(?:先(?:完成|写好?)?)?|先(?:完成|写好?)|前提(?:是|为|條件|条件)?|前置(?:要点|步骤)?|综合|綜合|结合"
)
_USING = (
    r"us(?:es?|ed|ing)(?: the)?|combin(?:es?|ed|ing)|after|given|follow(?:s|ing)?|see(?: also)?"
    r"|cf\.?|refs?\.?|refer(?:s|ring)? to|references?"
    r"|根[据據]|依[据據]|[参參][考见見]|[见見]|使用|利用|用到|完成"
)
_WEAK = "from|with|by|per|via|once|when|接|在|用"
_LEAD = re.compile(
    rf"(?:(?:{_ADVERB}) ?){{0,4}}"
    rf"(?:(?P<referring>{_REFERRING})|(?P<needing>{_NEEDING})|(?P<using>{_USING})|(?P<weak>{_WEAK}))"
    r"(?![a-z])(?P<gap>[ :=]*)"
)
_STAGE = re.compile("part|stage|phase|number|section")  # "Growth (phase 2)"
_PREVIOUS = "above|previous|earlier|preceding|prior|foregoing"
_NOUN = (
    r"(?:sub)?points?|steps?|items?|tasks?|sections?|headings?|ideas?"
    r"|parts?|stages?|phases?|numbers?|nos?\b\.?|nr\b\.?"
    r"|punkte?|schritte?|puntos?|pasos?|étapes?|#|\^|第|要点|步骤"
)
_RESULT = (
    "results?|outcomes?|completion|outputs?|texts?|answers?|info|information|data|contents?|findings|figures|"
    "conclusions?"
)
_NUMBER_WORDS = {
    word: number
    for words in (
        "one two three four five six seven eight nine ten eleven twelve",
        "first second third fourth fifth sixth seventh eighth ninth tenth",
        "一 二 三 四 五 六 七 八 九 十",
    )
    for number, word in enumerate(words.split(), 1)
} | {"两": 2}
_WORDS = "|".join(sorted(_NUMBER_WORDS, key=len, reverse=True))
_UNIT = "(?:[号个]?(?:要点|点|步骤|步|项|条|部分|者))?"
_TOKEN = re.compile(
    rf" ?(?:(?P<digits>[0-9]{{1,3}})(?!,[0-9]{{3}})(?:st|nd|rd|th)?{_UNIT}(?![0-9a-z%°])"
    rf"|(?P<word>{_WORDS}){_UNIT}(?![a-z])"
    rf"|(?P<noun>{_NOUN})(?![a-z])"
    r"|(?P<range>to\b|thru\b|through\b|bis\b|\.\.+|[-–—~至到])"
    r"|(?P<joint>,|;|&|\+|/|\||、|and\b|or\b|then\b|as well as\b|und\b|et\b|y\b|以及|[和与與及跟])"
    r"|(?P<filler>(?:the|both|either|also|above|first|of|from|be|are|is|has been|have been|being|done)\b"
    rf"|(?:{_RESULT}|completed?|finished|written|known|ready)\b"
    r"|(?:needs?|requires?|uses|depends on|builds on|after)\b"
    r"|的?(?:结果|内容|基础)?(?:完成)?[之以]?[后上]|的(?:结果|内容|基础)?))"
)
_ASIDE = re.compile(r" ?(?:;|[-–—] [^0-9])")
_REASON = re.compile(r" (?:for|to|because|since|so|as|in order)\b")
_NONE = re.compile(
    r"(?:none|nothing|nil|null|n/?a|[-–—∅]|无|没有"
    r"|no (?:other )?(?:points?|steps?|others?|one))(?: else| yet)?"
)
_NO_NEEDS = re.compile(
    r"(?:has |with )?no (?:other )?(?:dependenc(?:y|ies)|deps?|prerequisites?|prereqs?|needs)|none"
    r"|(?:is )?independent of (?:all |the |any )*others?(?: points?| steps?)?"
    r"|(?:does not|doesnt) (?:need|depend on) .{0,30}"
    r"|(?:无|無|没有|不)(?:需要?|须)?(?:任何|其他)?(?:依赖|依賴|前置|前提|需要)?(?:其他|任何)?(?:条件|要点|点|步骤)?"
)
_ALL = re.compile(
    rf"(?P<all>all|everything|every|each|both)? ?(?:of )?(?:the |these |those |its )?(?P<other>others?)? ?"
    rf"(?P<last>last|{_PREVIOUS})? ?(?P<count>{_WORDS}|[0-9]{{1,2}})? ?(?P<last2>{_PREVIOUS})? ?"
    r"(?P<noun>(?:point|step|item|part|section|one|task|heading)(?P<plural>s)?)? ?"
    rf"(?P<behind>{_PREVIOUS}|before(?: (?:it|this))?|so far)?(?: listed| mentioned)?"
)
_IDIOMS = ("all", "both", "everything", "each")  # "after all"
_FIRST = re.compile(rf"(?:the )?first (?P<count>{_WORDS}|[0-9]{{1,2}})(?: (?:points|steps|items|parts))?")
_HAN_ALL = re.compile(
    r"(?:(?P<previous>上一|前一)|前(?P<count>[0-9]{1,2}|[一二三四五六七八九十两])"
    r"|(?P<all>(?:以上|上述|前面|前述|之前|其他|所有|全部)+(?:的|各|每|几|所有|全部|其他)*))"
    r"个?(?:要点|点|步骤|步|项|内容|部分)?(?:的?(?:结果|内容))?(?:[之以][上后])?"
)

_OPEN, _CLOSE = r"(（\[【{〔", r")）\]】}〕"
_INNER = f"[^{_OPEN}{_CLOSE}]"
_GROUP = re.compile(
    rf"(?P<gap>[ \t]{{0,4}})(?P<wrap>[*_`~]{{0,3}})\\?(?P<open>[{_OPEN}]|<(?:!--)?)"
    rf"(?P<body>(?:{_INNER}|[{_OPEN}]{_INNER}{{0,60}}[{_CLOSE}]){{1,{_LONGEST_MARK}}})"
    rf"(?:\\?[{_CLOSE}]|(?:--)?>)(?:(?<=\])\([^()\s]{{0,80}}\))?(?P=wrap)(?:[.。;；,，]$)?"
)
_BARE = re.compile(
    rf"(?P<before>[.。{_SEPARATORS}]|^)[ \t]{{0,4}}[*_`~]{{0,3}}[ \t]{{0,4}}(?<![a-z])"
    rf"(?=(?:(?:{_ADVERB}) ?){{0,4}}(?:{_REFERRING}|{_NEEDING}|{_USING}|no |不|无))",
    re.IGNORECASE,
)
_EMPHASIS = re.compile(r"[*`~\"'“”‘’«»「」\\]|_(?![^\W_])|(?<![^\W_])_")
_NESTED = re.compile(f"[{_OPEN}]")
_UNOPENED = re.compile(rf"^{_INNER}+([{_CLOSE}])")
_LINK_TARGET = re.compile(r"\]\([^()\s]*\)")
_EDGE_EMPHASIS = re.compile(r"^[*_`~]{1,3}|(?<![*_`~])[*_`~]{1,3}$")
_JOINT = re.compile(r" ?(?:,|;|&|\+|/|、|\band\b|以及|[和与及]) ?(?:and )?")
_NUMBERED = re.compile(r"^(?:the )?(?:[0-9]{1,3}[.:)]? )?")
_WORD_CHARACTER = re.compile(r"[^\W_]")


class MarkReader:
    """Reads the marks of one point after the other. A later point changes nothing about those before it.

    Attributes:
        points: The points so far, without their marks, with what they build on.
    """

    def __init__(self) -> None:
        self.points: list[Point] = []
        self._numbers: dict[str, int] = {}

    def read(self, point: Point) -> Point:
        """The point without its mark, with what it builds on; it follows those that were read before."""
        text, needs = needs_of(point.text, point.number, self._numbers)
        if _plain(text) in self._numbers:  # points have different texts
            text = point.text
        self._numbers.setdefault(_plain(text), point.number)
        self.points.append(replace(point, text=text, needs=needs))
        return self.points[-1]


def needs_of(
    heading: str, number: int, numbers: Mapping[str, int] = _NO_NAMES
) -> tuple[str, tuple[int, ...]]:
    """A heading without its marks, and the numbers of the earlier points that the marks name.

    Args:
        heading: The heading of a point.
        number: The number of the point.
        numbers: The numbers of the points before it, by their headings, which marks may name.
    """
    heading = heading.rstrip()
    needs: set[int] = set()
    kept, start = "", 0
    for group in _GROUP.finditer(heading):
        # "[2]" is a mark at the edge of a heading, unlike "a[2]", "Let A = [1, 2]. Find" and "[[1], [2]]".
        is_apart = group.start() == 0 or (group["gap"] and group.end() == len(heading))
        opening = group["open"] if is_apart and not _NESTED.search(group["body"]) else "("
        found = _needs_in(group["body"], number, numbers, opening=opening)
        if found is not None:
            needs |= found
            kept += heading[start : group.start()] + _unpaired(group[0])
            start = group.end()
    kept += heading[start:]
    tail = max(0, len(kept) - _LONGEST_MARK)
    for bare in _BARE.finditer(kept, tail):
        mark = kept[bare.end() :]
        closing = _UNOPENED.search(mark)  # "(optional, needs 1)"
        if closing is None and len(_NESTED.findall(mark)) != len(re.findall(f"[{_CLOSE}]", mark)):
            continue  # "call(uses=[earlier])"
        found = _needs_in(mark, number, numbers, before=bare["before"].strip())
        if found is not None:
            needs |= found
            kept = kept[: bare.start()] + _unpaired(kept[bare.start() :]) + (closing[1] if closing else "")
            break
    if kept == heading or not _WORD_CHARACTER.search(kept):
        return heading, ()
    return _tidy(kept), tuple(sorted(needs))


class _Named(NamedTuple):
    """The points that a mark names, be they earlier ones or not.

    Attributes:
        numbers: Their numbers.
        is_plain: Whether they are numbers alone, which may count something else, and not "points 1, 2".
        is_single: Whether it is one number, or one range of numbers, which may be a time or an amount.
        is_word: Whether they are words, as in "one and two".
    """

    numbers: set[int]
    is_plain: bool = False
    is_single: bool = False
    is_word: bool = False


def _needs_in(
    text: str, number: int, numbers: Mapping[str, int], *, opening: str = "", before: str = ""
) -> set[int] | None:
    """The earlier points that ``text`` names if it is a mark, otherwise ``None``.

    Args:
        text: What may be a mark.
        number: The number of its point.
        numbers: The numbers of earlier points by heading.
        opening: The bracket before it, if it stands in brackets.
        before: What separates it from the heading, if it stands in none.
    """
    text = _plain(text)
    if _NO_NEEDS.fullmatch(text):
        return set() if opening or (before and text != "none") else None
    lead = _LEAD.match(text)
    if lead is None and (not opening or _STAGE.match(text)):
        return None
    rest = text[lead.end() :] if lead else text
    if lead and (lead["needing"] or lead["referring"]) and _NONE.fullmatch(rest):
        return set() if opening or before else None
    named = _named(rest.strip(" .,;:"), number, numbers)
    if named is None:
        return None
    earlier = {one for one in named.numbers if 1 <= one < number}
    if lead is None:
        is_mark = bool(earlier) and earlier == named.numbers and (not named.is_plain or opening in "[【")
    elif lead["referring"]:
        is_mark = bool(opening or before or earlier)
    elif lead["needing"]:
        is_sure = not named.is_plain or not (named.is_single and named.is_word and not text.isascii())
        is_mark = is_sure and bool(opening or not named.is_plain or (before and not named.is_word))
    elif lead["using"]:
        is_see = lead["using"].startswith(("see", "见"))
        is_mark = bool(earlier) and (not named.is_plain or bool(opening or (before and is_see)))
        is_mark = is_mark and not (named.is_plain and named.is_word)
    else:
        is_mark = bool(earlier) and bool(opening) and not (named.is_plain and named.is_single)
    return earlier if is_mark else None


def _named(text: str, number: int, numbers: Mapping[str, int]) -> _Named | None:
    """The points that ``text`` names and nothing else, otherwise ``None``."""
    if text in numbers:
        return _Named({numbers[text]})
    if found := _relative(text, number):
        is_idiom = text in _IDIOMS
        return _Named(found, is_plain=is_idiom, is_word=is_idiom)
    named: list[int] = []
    is_plain, num_ranges, is_word, in_range, place, end = True, 0, False, False, 0, 0
    while token := _TOKEN.match(text, place):
        place = token.end()
        match token.lastgroup:
            case "noun":
                is_plain = False
            case "range":
                in_range = True
            case "joint":
                in_range = False
            case "digits" | "word":
                if token["word"] == "first" and named:
                    continue  # "2 and 3 first"
                one = int(token["digits"] or _NUMBER_WORDS[token["word"]])
                is_word |= bool(token["word"])
                if in_range and named:
                    named.extend(range(named[-1] + 1, min(one, number)))
                    num_ranges, in_range = num_ranges + 1, False
                named.append(one)
                end = place
    is_single = len(named) < 2 or (num_ranges == 1 and named == list(range(named[0], named[-1] + 1)))
    is_whole = place == len(text) or _ASIDE.match(text, end)
    if named and (is_whole or (_REASON.match(text, end) and not (is_plain and is_single))):
        return _Named(set(named), is_plain, is_single, is_word)
    by_name = [numbers.get(_NUMBERED.sub("", part)) for part in _JOINT.split(text)]
    return _Named({one for one in by_name if one}) if text and all(by_name) else None


def _relative(text: str, number: int) -> set[int]:
    """The points named by where they stand: "all of the above", "the previous point", "the first two"."""
    every = set(range(1, number))
    if text and (found := _HAN_ALL.fullmatch(text)):
        if found["count"]:
            return set(range(1, _int(found["count"]) + 1))
        return {number - 1} if found["previous"] else every
    if found := _FIRST.fullmatch(text):
        return set(range(1, _int(found["count"]) + 1))
    found = _ALL.fullmatch(text)
    if not text or found is None:
        return set()
    before = found["last"] or found["last2"] or found["behind"]
    if found["all"] == "both" or (found["count"] and before):
        count = 2 if found["all"] == "both" else _int(found["count"])
        return set(range(max(1, number - count), number))
    if found["count"]:
        return set(range(1, _int(found["count"]) + 1)) if found["all"] else set()
    if found["all"] or found["plural"] or (found["other"] and not before):
        return every if found["all"] or found["other"] or before else set()
    is_one = found["noun"] or before in ("last", "previous", "preceding")
    return ({number - 1} if is_one else every) if before else set()


def _int(text: str) -> int:
    return _NUMBER_WORDS.get(text) or int(text)


def _plain(text: str) -> str:
    """``text`` in one width and case, without emphasis, quotes and inner brackets."""
    text = unicodedata.normalize("NFKC", text).casefold().lstrip(" →>=-!")
    text = _EMPHASIS.sub("", _LINK_TARGET.sub("]", text))
    return " ".join(re.sub(f"[{_OPEN}{_CLOSE}]", " ", text).replace("_", " ").split())


def _unpaired(text: str) -> str:
    """The marks of emphasis in ``text`` whose other end is outside of it."""
    open_marks: list[str] = []
    for mark in re.findall(r"[*`~]+|(?<![^\W_])_+|_+(?![^\W_])", text):
        if open_marks and open_marks[-1] == mark:
            open_marks.pop()
        else:
            open_marks.append(mark)
    return "".join(open_marks)


def _tidy(text: str) -> str:
    """A heading without what led to a mark, and without emphasis that has lost its other end."""
    text = " ".join(text.strip(_SEPARATORS).split())
    for edge in _EDGE_EMPHASIS.findall(text):
        if text.count(edge) % 2:
            text = text.removeprefix(edge) if text.startswith(edge) else text.removesuffix(edge)
    return text.strip(_SEPARATORS)
