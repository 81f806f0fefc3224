"""Decodes text whose encoding is unknown: Unicode first, then by what it declares, then by detection.

Knows bytes and encodings. Does not know files or formats. Needs ``chardet`` for text that is not Unicode
(version 7 names all encodings of the tests, of which ``charset-normalizer`` 3.5 mistakes a twelfth).
"""

from __future__ import annotations

import codecs
import logging
import re

import regex

_log = logging.getLogger(__name__)

_BYTE_ORDER_MARKS = (  # the longest first: that of UTF-32 begins like that of UTF-16
    (codecs.BOM_UTF32_LE, "utf-32"),
    (codecs.BOM_UTF32_BE, "utf-32"),
    (codecs.BOM_UTF8, "utf-8-sig"),
    (codecs.BOM_UTF16_LE, "utf-16"),
    (codecs.BOM_UTF16_BE, "utf-16"),
)
# Bytes that no text in Windows-1252 has; 0xff is a letter there, but hardly any text has it.
_DAMAGE = regex.compile(rb"[\x81\x8d\x8f\x90\x9d\xff]")
_REPLACED = "\ufffd"
_CONTROL = re.compile("[\x00-\x08\x0e-\x1a\x1c-\x1f]")
# A text with a larger share of damage is none; one character always may be damaged.
_MOST_DAMAGE = 0.1
_DETECTED_BYTES = 200_000
_DOS_END = "\x1a"
_SWITCH = b"\x1b$"  # switches to another character set in ISO-2022 text, which has ASCII bytes only
# So few letters beyond ASCII tell a detector nothing about the language: Windows-1252 is the likeliest then.
_FEW = 4
_FREQUENT = regex.compile("[ÀÁÂÃÄÅÆÇÈÉÊËÍÎÏÑÓÔÖÕØÚÛÜàáâãäåæçèéêëìíîïñòóôöõøùúûüßœŒ¿¡ªº]*")
_MARKS = regex.compile("[\x00-\x7f\xa0’‘“”„–—…€«»°§©®™•·£µ½²³]+")
# What detectors and pages name, and the larger sets that are in use under the same name.
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
    """Decodes ``content``, with U+FFFD and a warning in the log, by ``name``, for what is damaged.

    Raises:
        NotTextError: The bytes are not text.
        ImportError: ``chardet`` is needed and not installed.
    """
    encoding = _find_encoding(content, declared)
    text = content.decode(encoding, "replace").removesuffix(_DOS_END)
    text, num_controls = _CONTROL.subn(_REPLACED, text)
    num_replaced = text.count(_REPLACED)
    if num_replaced > 1 + _MOST_DAMAGE * len(text) or num_controls > _MOST_DAMAGE * len(text):
        raise NotTextError("the bytes are not text")
    if num_replaced and _REPLACED.encode() not in content:
        message = "%s has bytes that are not %s; they were replaced, the rest is read"
        _log.warning(message, name, encoding.upper())
    return text


def in_unicode(text: str) -> str:
    """``text`` with halves of characters joined, and those without their other half replaced."""
    return text.encode("utf-16", "surrogatepass").decode("utf-16", "replace")


def _find_encoding(content: bytes, declared: str | None) -> str:
    for mark, encoding in _BYTE_ORDER_MARKS:
        if content.startswith(mark):
            return encoding
    if declared is not None and (usual := _usual(declared)):
        return usual
    if b"\0" not in content and _SWITCH not in content and _looks_like_utf8(content):
        return "utf-8"
    letters = _MARKS.sub("", content.decode("cp1252", "replace"))
    is_western = len(letters) <= _FEW and b"\0" not in content and _SWITCH not in content
    return "cp1252" if is_western and _FREQUENT.fullmatch(letters) else _detected(content)


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
    text = content.decode("utf-8", "replace")
    num_replaced = text.count(_REPLACED)
    num_decoded = len(text) - len(text.encode("ascii", "ignore")) - num_replaced
    return text.encode() == content or num_decoded + len(_DAMAGE.findall(content)) >= num_replaced


def _detected(content: bytes) -> str:
    from chardet import EncodingEra, detect

    usual = EncodingEra.MODERN_WEB | EncodingEra.LEGACY_ISO | EncodingEra.LEGACY_MAC
    name = detect(content[:_DETECTED_BYTES], encoding_era=usual, compat_names=False)["encoding"]
    if name is None:
        raise NotTextError("the bytes are not text")
    return _IN_USE.get(name, name)
