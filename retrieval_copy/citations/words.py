"""Compares texts as a reader does: by words and punctuation, whatever their typography.

Text from PDF and HTML has line breaks within sentences, words broken at hyphens, ligatures, decomposed
accents, invisible characters and several kinds of quotation marks, dashes and blanks, and models write the
plain form of all these. Both have the same :class:`Reading`, which knows where it stands in the text.
Knows Unicode. Does not know documents.
"""

from __future__ import annotations

import tomllib
import unicodedata
from bisect import bisect_left, bisect_right
from collections.abc import Collection, Iterable, Iterator, Sequence
from dataclasses import dataclass
from functools import cached_property, lru_cache
from importlib.resources import files
from operator import itemgetter

import regex

# Compatibility characters that differ in meaning from what they decompose to: 10² is not 102.
_DISTINCT = ("<super>", "<sub>", "<fraction>", "<circle>", "<compat> 0020 ")
_PLAIN_MARKS = str.maketrans(
    dict.fromkeys("‘’‚‛′‵´ʹʻʼʽˈ‹›❛❜", "'")
    | dict.fromkeys("“”„‟″‶«»❝❞〝〞〟", '"')
    | dict.fromkeys("−⁃¬", "-")
)
_IGNORABLE = regex.compile(r"\p{Default_Ignorable_Code_Point}")  # joiners, zero-width blanks
_SOFT_HYPHEN = "\u00ad"
_UNUSUAL = regex.compile(r"[\x00-\x08\x0e-\x1f\x7f]+|[\x00-\x7f]?[^\x00-\x7f]+")
_CLUSTER = regex.compile(r"\X")


@dataclass(frozen=True)
class NormalisedText:
    """A text in plain typography, and where its parts stand in the original."""

    text: str
    changes: Sequence[tuple[int, int, int, int]]  # in order: start and end in text, then in the original

    def original_span(self, start: int, end: int) -> tuple[int, int]:
        """The span of the original that ``text[start:end]`` stands for, ``start`` below ``end``.

        A part of a replacement stands for all of it; invisible characters at the ends are left out.
        """
        number = bisect_right(self.changes, start, key=itemgetter(0))
        original_start = start
        if number:
            _, new_end, old_start, old_end = self.changes[number - 1]
            original_start = old_start if start < new_end else old_end + start - new_end
        number = bisect_left(self.changes, end, key=itemgetter(0))
        original_end = end
        if number:
            _, new_end, _, old_end = self.changes[number - 1]
            original_end = old_end + max(0, end - new_end)
        return original_start, original_end


def normalised(text: str) -> NormalisedText:
    """``text`` composed (NFC), without invisible characters, ligatures, wide forms and typographic marks."""
    parts: list[str] = []
    changes: list[tuple[int, int, int, int]] = []
    read = length = 0  # characters of the original and of the plain text
    for run in _UNUSUAL.finditer(text):
        for cluster in _CLUSTER.finditer(run[0]):
            start, end = run.start() + cluster.start(), run.start() + cluster.end()
            breaks_line = cluster[0] == _SOFT_HYPHEN and not text[end : end + 1].strip()
            plain = "-" if breaks_line else _plain(cluster[0])
            if plain != cluster[0]:
                parts += (text[read:start], plain)
                length += start - read
                changes.append((length, length + len(plain), start, end))
                read, length = end, length + len(plain)
    return NormalisedText("".join([*parts, text[read:]]), changes)


@lru_cache(1 << 16)
def _plain(cluster: str) -> str:
    plain = unicodedata.normalize("NFC", "".join(map(_plain_character, cluster)))
    # What would become several symbols, such as joined emoji, stays: no citation may end within.
    return plain if not plain or plain.isalnum() or _CLUSTER.fullmatch(plain) else cluster


def _plain_character(character: str) -> str:
    category = unicodedata.category(character)
    if category in ("Cc", "Cs"):  # as in the prompt, see `references.cleaned`
        return character if "\t" <= character <= "\r" or character == "\x85" else "\ufffd"
    if _IGNORABLE.match(character):
        return ""
    character = character.translate(_PLAIN_MARKS)
    if not unicodedata.decomposition(character).startswith(_DISTINCT):
        character = unicodedata.normalize("NFKC", character).translate(_PLAIN_MARKS)
    return "-" if unicodedata.category(character[0]) == "Pd" else character


# Scripts without spaces between words: each character counts as a word.
_UNSPACED = r"\p{Han}\p{Hiragana}\p{Katakana}\p{Thai}\p{Lao}\p{Khmer}\p{Myanmar}"
_LETTER = rf"[[\p{{L}}\p{{N}}_]--[{_UNSPACED}]]"
_SYMBOL = regex.compile(
    rf"[{_UNSPACED}]\p{{M}}*"  # combining marks stay with their base character, here and below
    rf"|(?:{_LETTER}\p{{M}}*)+(?:'(?:{_LETTER}\p{{M}}*)+)*"
    r"|(?!\s)\X",
    regex.V1,
)
_RUNS = {"--": "-", "''": '"', "..": "…", "….": "…"}  # two symbols that are read as one
_MOST_BREAKS = 3  # of one word
_SEPARATOR = "\n"  # no symbol contains one


@dataclass(frozen=True)
class Reading:
    """The words and punctuation marks of a text. White space only separates them."""

    symbols: list[str]  # in plain typography; a run of dashes or dots is one
    starts: list[int]  # in the normalised text
    ends: list[int]
    normalised: NormalisedText

    @classmethod
    @lru_cache(512)  # documents are compared again with each piece of a streamed answer
    def of(cls, text: str) -> Reading:
        """Reads ``text``."""
        normal = normalised(text)
        reading = cls([], [], [], normal)
        symbols, starts, ends = reading.symbols, reading.starts, reading.ends
        for match in _SYMBOL.finditer(normal.text):
            symbol, last = match[0], symbols[-1] if symbols else ""
            symbol = "'" if symbol == "`" else symbol
            is_adjacent = ends[-1:] == [match.start()]
            if (run := _RUNS.get(last + symbol)) and (is_adjacent or run == "-"):
                symbols[-1], ends[-1] = run, match.end()
                continue
            symbols.append(symbol)
            starts.append(match.start())
            ends.append(match.end())
        return reading

    def joined(self, words: Collection[str]) -> Reading:
        """The same with words that are broken at a hyphen joined, where ``words`` has the whole word."""
        if "-" not in self.symbols:
            return self
        reading = Reading([], [], [], self.normalised)
        start = 0
        while start < len(self.symbols):
            symbol, end = self.symbols[start], start + 1
            for whole, whole_end in self._unbroken(start):
                if whole in words:
                    symbol, end = whole, whole_end
            reading.symbols.append(symbol)
            reading.starts.append(self.starts[start])
            reading.ends.append(self.ends[end - 1])
            start = end
        return reading

    def _unbroken(self, start: int) -> Iterator[tuple[str, int]]:
        """The words from symbol ``start`` on if the hyphens in them were breaks, and their ends."""
        whole = self.symbols[start]
        for end in range(start + 3, min(start + 3 + 2 * _MOST_BREAKS, len(self.symbols) + 1), 2):
            first, dash, second = self.symbols[end - 3 : end]
            if dash != "-" or self.starts[end - 2] != self.ends[end - 3]:
                return
            if not (is_word(first) and is_word(second)) or first[-1].isnumeric() or second[0].isnumeric():
                return
            whole += second
            yield whole, end

    def words_broken_at_line_ends(self) -> Iterator[str]:
        """The words that a hyphen and white space break, as one would write them otherwise."""
        for start in range(len(self.symbols) - 2):
            if self.symbols[start + 1] == "-" and self.starts[start + 2] > self.ends[start + 1]:
                yield from (whole for whole, end in self._unbroken(start) if end == start + 3)

    def original_span(self, start: int, end: int) -> tuple[int, int]:
        """The span of the text, as it stands, of ``symbols[start:end]``."""
        return self.normalised.original_span(self.starts[start], self.ends[end - 1])

    def has(self, symbols: Sequence[str]) -> bool:
        """Whether ``symbols`` occur in the text."""
        return _in_one(symbols) in self._text

    def find(self, symbols: Sequence[str]) -> tuple[int, int] | None:
        """The span of the text, as it stands, in which ``symbols`` first occur; ``None`` if they do not."""
        index = self._text.find(_in_one(symbols))
        if index < 0:
            return None
        start = self._text.count(_SEPARATOR, 0, index)
        return self.original_span(start, start + len(symbols))

    @cached_property
    def _text(self) -> str:
        return _in_one(self.symbols)


def _in_one(symbols: Sequence[str]) -> str:
    return _SEPARATOR + "".join(symbol + _SEPARATOR for symbol in symbols)


def readings(texts: Iterable[str]) -> list[Reading]:
    """Reads ``texts`` to compare them: a word broken at a hyphen is joined if one of them has it whole."""
    found = [Reading.of(text) for text in texts]
    words: set[str] = set().union(*(reading.symbols for reading in found))
    return [reading.joined(words) for reading in found]


def is_word(symbol: str) -> bool:
    """Whether a symbol of a :class:`Reading` is a word, not a punctuation mark."""
    return symbol[0].isalnum() or symbol[0] == "_"


_LANGUAGES = tomllib.loads(files(__package__).joinpath("languages.toml").read_text("utf-8"))
LANGUAGES = _LANGUAGES.values()
"""What is known of languages: their function words, abbreviations and question words."""

# Marks over letters that readers leave out or that writers add; in other scripts they are letters.
_OPTIONAL_MARKS = regex.compile(
    r"(?<=[\p{Latin}\p{Greek}\p{Arabic}\p{Hebrew}]\p{M}*)\p{M}|(?<=\p{Cyrillic}\p{M}*)[\p{M}--\u0306]",
    regex.V1,
)
_SAME_LETTERS = str.maketrans("ıłøđðħیک", "iloddhيك", "ـ") | str.maketrans({"œ": "oe", "æ": "ae"})
_HANGUL = regex.compile(r"\p{Hangul}+")
# The language whose endings are cut off, by a script's name; Latin endings are cut as English ones.
_STEMMED = {language["script"]: name for name, language in _LANGUAGES.items() if "script" in language}


def terms(text: str) -> list[str]:
    """The words of ``text`` to search by: without case, marks and endings.

    Those broken at line ends stand for the whole word, too; Korean words, to which particles are joined, are
    read by syllables, as the scripts without spaces are by characters.
    """
    reading = Reading.of(text)
    found = [*filter(is_word, reading.symbols), *reading.words_broken_at_line_ends()]
    return [term for word in found for term in _terms_of(word)]


@lru_cache(1 << 16)
def _terms_of(word: str) -> tuple[str, ...]:
    plain = unicodedata.normalize("NFKC", word.casefold())
    if _HANGUL.fullmatch(plain):
        return tuple(plain)
    bare = _OPTIONAL_MARKS.sub("", unicodedata.normalize("NFD", plain)).translate(_SAME_LETTERS)
    parts = unicodedata.normalize("NFC", bare).split("'")
    return tuple(_stem(part) for part in parts if len(part) > 1) or (bare,)  # without the s of Einstein's


def _stem(word: str) -> str:
    language = _STEMMED.get(unicodedata.name(word[0], "").partition(" ")[0])
    if language is None:
        return word
    from snowballstemmer import stemmer

    return str(stemmer(language).stemWord(word)) or word  # a new one each time: threads cannot share one
