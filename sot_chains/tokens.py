"""How many tokens a text is, before the server has counted them: for limits, budgets and calls cut short.

tiktoken fetches a vocabulary from the network when it is first used. Here that happens in a thread, at most
once, and nobody waits for it longer than a moment: until it is there, or where it cannot be had, characters
are counted instead, about four to a token, and a warning in the log says so once.
"""

from __future__ import annotations

import asyncio
import logging
import threading
import time
from collections.abc import Iterable
from concurrent.futures import Future
from typing import TYPE_CHECKING

from langchain_core.messages import BaseMessage

if TYPE_CHECKING:
    from tiktoken import Encoding

_log = logging.getLogger(__name__)
_ENCODING = "o200k_base"  # of OpenAI's models since 2024; for the others as good an estimate as any
_LONGEST_WAIT_SECONDS = 3.0
_TOKENS_OF_A_MESSAGE = 4  # role and separators
_CHARACTERS_OF_A_TOKEN = 4.0
_lock = threading.Lock()
_loading: tuple[Future[Encoding | None], float] | None = None
_encoding: Encoding | None = None


def num_tokens(text: str) -> int:
    """About how many tokens ``text`` is. Text that looks like a control token is text."""
    if _encoding is not None:
        return len(_encoding.encode_ordinary(text))
    # What is not ASCII takes more tokens: a Chinese character is about one.
    num_wide = 0 if text.isascii() else sum(ord(character) > 0x2E7F for character in text)
    return num_wide + round((len(text) - num_wide) / _CHARACTERS_OF_A_TOKEN + 0.49)


def num_message_tokens(messages: Iterable[BaseMessage]) -> int:
    """About how many tokens ``messages`` are as input. What is not text is not counted."""
    return sum(_TOKENS_OF_A_MESSAGE + num_tokens(str(message.text)) for message in messages)


async def vocabulary() -> None:
    """Waits a moment for tiktoken's vocabulary, so that estimates after it are good ones."""
    loading, begun = fetch_vocabulary()
    # A moment for all together: who comes later finds it, or goes on without.
    patience = begun + _LONGEST_WAIT_SECONDS - time.monotonic()
    if not loading.done() and patience > 0:
        await asyncio.wait([asyncio.wrap_future(loading)], timeout=patience)
    if not loading.done():
        _warn_once("it has not arrived yet")


def fetch_vocabulary() -> tuple[Future[Encoding | None], float]:
    """Has tiktoken's vocabulary fetched, unless it is; returns it, to come, and since when it is fetched."""
    global _loading  # noqa: PLW0603 - once in a process, whoever asks first
    with _lock:
        if _loading is None:
            _loading = Future(), time.monotonic()
            threading.Thread(target=_fetch, args=(_loading[0],), name="tiktoken", daemon=True).start()
        return _loading


def _fetch(loading: Future[Encoding | None]) -> None:
    global _encoding  # noqa: PLW0603 - likewise
    try:
        import tiktoken

        _encoding = tiktoken.get_encoding(_ENCODING)
    except Exception as error:  # offline, or a damaged cache: an estimate serves, with a warning
        _warn_once(f"{type(error).__name__}: {error}")
    loading.set_result(_encoding)


_has_warned = False


def _warn_once(reason: str) -> None:
    global _has_warned  # noqa: PLW0603 - likewise
    if not _has_warned:
        _has_warned = True
        _log.warning(
            "tiktoken's vocabulary %s is not at hand (%.200s): tokens are estimated from characters; to "
            "count offline, fill a folder once and name it in TIKTOKEN_CACHE_DIR",
            _ENCODING,
            reason,
        )
