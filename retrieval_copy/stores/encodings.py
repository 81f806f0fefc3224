"""Decodes text whose encoding is unknown: Unicode first, then by what it declares, then by detection.

Knows bytes and encodings. Does not know files or formats. Needs ``chardet`` for text that is not Unicode.
"""

from __future__ import annotations

import codecs
import logging
from collections.abc import Iterator

import regex

_log = logging.getLogger(__name__)

_BYTE_ORDER_MARKS = (  # the longest first: that of UTF-32 begins like that of UTF-16
    (codecs.BOM_UTF32_LE, "utf-32"),
    (codecs.BOM_UTF32_BE, "utf-32"),
    (codecs.BOM_UTF8, "utf-8-sig"),
    (codecs.BOM_UTF16_LE, "utf-16"),
    (codecs.BOM_UTF16_BE, "utf-16"),
)
# The end of a UTF-8 file that was cut within a character, unless a single letter of Windows-1252 is likelier.
_CUT_END = regex.compile(rb"(?:[\xc2\xc3]|[\xe0-\xef][\x80-\xbf]|[\xf0-\xf4][\x80-\xbf]{1,2})\Z")
# Bytes that no text in Windows-1252 has; 0xff is a letter there, but hardly any text has it.
_DAMAGE = regex.compile(rb"[\x81\x8d\x8f\x90\x9d\xff]")
_REPLACED = "\ufffd"
_CONTROL = regex.compile("[\x00-\x08\x0e-\x1a\x1c-\x1f]")
# A text with a larger share of damage is none; one character always may be damaged.
_MOST_DAMAGE = 0.1
# Text in another encoding than UTF-16 or UTF-32 has no more NUL bytes than this share.
_MOST_NULS = 0.001
_DETECTED_BYTES = 200_000
_DOS_END = "\x1a"
_SWITCH = b"\x1b$"  # switches to another character set in ISO-2022 text, which has ASCII bytes only
_WITH_NULS_OR_SWITCHES = ("utf-16", "utf-32", "iso2022")
# So few letters beyond ASCII tell nothing about the language.
_FEW = 3
_FREQUENT = regex.compile("[ÀÁÂÃÄÅÆÇÈÉÊËÍÎÏÑÓÔÖÕØÚÛÜàáâãäåæçèéêëìíîïñòóôöõøùúûüßœŒ¿¡ªº]*")
_MARKS = regex.compile("[\x00-\x7f\xa0’‘“”„–—…€«»°§©®™•·£µ½²³]+")
# What no text has: C1 controls, scripts mixed within a word, a capital or a sign after a small letter.
_IMPLAUSIBLE = regex.compile(
    r"[\x80-\x9f]|[[\p{L}]--[\p{Latin}]](?:(?<=[a-zA-Z].)|(?=[a-zA-Z]))|(?<=\p{Ll})[\p{Lu}--[A-Z]]"
    r"|(?<=\p{L})[¡¿[\p{S}--[\x00-\x7f´¨™®©°]]](?=\p{L})",
    regex.V1,
)
# What a detector names, and the larger sets that are in use under the same name.
_IN_USE = {
    "ascii": "cp1252",
    "iso8859-1": "cp1252",
    "iso8859-9": "cp1254",
    "euc_kr": "cp949",
    "gb2312": "gb18030",
    "shift_jis": "cp932",
    "shift_jis_2004": "cp932",
    "euc_jis_2004": "euc_jp",
}


class NotTextError(ValueError):
    """The bytes are not text."""


def decoded(content: bytes, *, name: str, declared: str | None = None) -> str:
    """Decodes ``content``, with U+FFFD and a warning in the log for what is damaged.

    Args:
        content: Text in UTF-8, UTF-16, UTF-32 or one of the usual encodings of a language.
        name: Names the text in the warning.
        declared: The encoding that the text itself declares.

    Raises:
        NotTextError: The bytes are not text.
        ImportError: ``chardet`` is needed and not installed.
    """
    encoding = _encoding_of(content, declared)
    try:
        text, is_damaged = content.decode(encoding), False
    except UnicodeDecodeError:
        text, is_damaged = content.decode(encoding, "replace"), True
    text = text.removesuffix(_DOS_END)
    text, num_controls = _CONTROL.subn(_REPLACED, text)
    if text.count(_REPLACED) > 1 + _MOST_DAMAGE * len(text) or num_controls > _MOST_DAMAGE * len(text):
        raise NotTextError("the bytes are not text")
    if is_damaged or num_controls:
        _log.warning(
            "%s has bytes that are not %s; they were replaced, the rest is read", name, encoding.upper()
        )
    return str(text)


def _encoding_of(content: bytes, declared: str | None) -> str:
    for mark, encoding in _BYTE_ORDER_MARKS:
        if content.startswith(mark):
            return encoding
    if declared is not None and (usual := _usual(declared)):
        return usual
    if b"\0" in content or _SWITCH in content:
        likeliest = next(_candidates(content))
        if likeliest.startswith(_WITH_NULS_OR_SWITCHES):
            return likeliest
        if content.count(0) > 1 + _MOST_NULS * len(content):
            raise NotTextError("the bytes are not text")
    if _looks_like_utf8(content):
        return "utf-8"
    if _looks_western(content):
        return "cp1252"
    return _detected(content)


def _usual(declared: str) -> str | None:
    """The encoding that a page declares, as browsers read it; ``None`` if that is Unicode or nothing."""
    try:
        b"a".decode(declared)  # fails for what encodes no text, such as "hex"
        name = codecs.lookup(declared).name
    except (LookupError, ValueError):
        return None
    # What declares UTF-16 in readable ASCII is not in UTF-16; UTF-8 is recognised without being declared.
    return None if name.startswith("utf") or name == "idna" else _IN_USE.get(name, name)


def _looks_like_utf8(content: bytes) -> bool:
    """Whether most bytes beyond ASCII form characters of UTF-8, so that the others are damage."""
    try:
        content.decode("utf-8")
    except UnicodeDecodeError:
        text = content.decode("utf-8", "replace")
        num_replaced = text.count(_REPLACED)
        num_decoded = len(text) - len(text.encode("ascii", "ignore")) - num_replaced
        evidence = num_decoded + len(_DAMAGE.findall(content)) + bool(_CUT_END.search(content))
        return evidence >= num_replaced
    return True


def _looks_western(content: bytes) -> bool:
    """Whether Windows-1252 is likely: for typographic marks, or a few letters that are frequent in it."""
    try:
        text = content.decode("cp1252")
    except UnicodeDecodeError:
        return False
    letters = _MARKS.sub("", text)
    if not letters:
        return True
    return len(letters) <= _FEW and bool(_FREQUENT.fullmatch(letters)) and not _IMPLAUSIBLE.search(text)


def _detected(content: bytes) -> str:
    """The likeliest encoding in which the text is plausible, or else Windows-1252, the most frequent."""
    sample = content[:_DETECTED_BYTES]
    for encoding in _candidates(sample):
        text = sample.decode(encoding, "replace")
        if text.count(_REPLACED) <= 1 + _MOST_DAMAGE * len(text) and not _IMPLAUSIBLE.search(text):
            return encoding
    return "cp1252"


def _candidates(content: bytes) -> Iterator[str]:
    from chardet import EncodingEra, detect_all

    usual = EncodingEra.MODERN_WEB | EncodingEra.LEGACY_ISO | EncodingEra.LEGACY_MAC
    for candidate in detect_all(content[:_DETECTED_BYTES], encoding_era=usual, compat_names=False):
        name = candidate["encoding"]
        if name is None:
            raise NotTextError("the bytes are not text")
        yield _IN_USE.get(name, name)
