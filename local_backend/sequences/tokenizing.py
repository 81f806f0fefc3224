"""Encodes texts and chats as token ids.

A chat template writes control tokens between messages, e.g. ``<|im_end|>``. In a message or a document they
are text: otherwise a document could end the user's turn and speak as the system. And lone surrogates, which
no tokenizer takes, are replaced.

Knows tokenizers and chat templates. Does not know models.
"""

from __future__ import annotations

import re
from collections.abc import Callable, Iterable, Mapping, Sequence
from functools import wraps
from typing import TYPE_CHECKING, Any, TypeVar
from weakref import WeakKeyDictionary

from transformers.utils.chat_template_utils import encode_marked_chat, mark_control_tokens

if TYPE_CHECKING:
    from transformers import PreTrainedTokenizerBase

_TAG = re.compile(r"</?([^<>/]+)>")

_T = TypeVar("_T")


def cached_by_tokenizer(make: Callable[..., _T]) -> Callable[..., _T]:
    """Keep what ``make`` finds in a tokenizer until tokens are added or other arguments are given."""
    known: WeakKeyDictionary[PreTrainedTokenizerBase, tuple[object, _T]] = WeakKeyDictionary()

    @wraps(make)
    def find(tokenizer: PreTrainedTokenizerBase, *options: object) -> _T:
        key = (len(tokenizer), getattr(tokenizer, "chat_template", None), *options)
        if tokenizer not in known or known[tokenizer][0] != key:
            known[tokenizer] = key, make(tokenizer, *options)
        return known[tokenizer][1]

    return find


def encode(tokenizer: PreTrainedTokenizerBase, text: str) -> list[int]:
    """Token ids of a text in which control tokens count as such, e.g. a prompt continued as it is."""
    return list(tokenizer.encode(_without_surrogates(text), add_special_tokens=False))


def encode_continuation(tokenizer: PreTrainedTokenizerBase, text: str) -> list[int]:
    """Token ids of a text that follows another, in which control tokens count as such."""
    # Encoded after a line feed, so that SentencePiece adds no space before it.
    before = encode(tokenizer, "\n")
    token_ids = encode(tokenizer, "\n" + text)
    return token_ids[len(before) :] if token_ids[: len(before)] == before else encode(tokenizer, text)


def encode_plain(tokenizer: PreTrainedTokenizerBase, text: str, *, is_reply: bool = False) -> list[int]:
    """Token ids of a text in which control tokens are ordinary text, e.g. a document or a reply."""
    token_ids = encode(tokenizer, text)
    text = _without_surrogates(text)
    marked = mark_control_tokens(text, _control_tokens(tokenizer)[is_reply])
    return encode_marked_chat(tokenizer, marked) if marked != text else token_ids


def encode_chat(
    tokenizer: PreTrainedTokenizerBase, turns: Sequence[Mapping[str, Any]], **options: Any
) -> list[int]:
    """Token ids of a chat, in which only the chat template writes control tokens.

    For turns without control tokens these are the ids of ``apply_chat_template``, which takes ``options``.
    """
    controls = _control_tokens(tokenizer)
    messages: list[dict[str, Any]] = [_without_surrogates(dict(turn)) for turn in turns]
    options = _without_surrogates(options)
    marked_messages = [mark_control_tokens(turn, controls[turn["role"] == "assistant"]) for turn in messages]
    marked_options = mark_control_tokens(options, controls[False])
    if (marked_messages, marked_options) == (messages, options):
        token_ids = tokenizer.apply_chat_template(messages, tokenize=True, return_dict=False, **options)
        return [*map(int, token_ids)]
    rendered = tokenizer.apply_chat_template(marked_messages, tokenize=False, **marked_options)
    return encode_marked_chat(tokenizer, str(rendered))


def _without_surrogates(value: Any) -> Any:
    """``value`` with pairs of surrogates joined to characters, and lone ones replaced."""
    if isinstance(value, str):
        return value.encode("utf-16-le", "surrogatepass").decode("utf-16-le", "replace")
    if isinstance(value, dict):
        return {name: _without_surrogates(part) for name, part in value.items()}
    return [_without_surrogates(part) for part in value] if isinstance(value, list) else value


@cached_by_tokenizer
def _control_tokens(tokenizer: PreTrainedTokenizerBase) -> tuple[re.Pattern[str], re.Pattern[str]]:
    """Match special tokens, and added tokens that the chat template writes: in texts, and in replies.

    In replies pairs of tags, e.g. ``<think>`` and ``</think>``, that are not special may stand: the model
    writes them itself, and templates look for them in its earlier replies.
    """
    added = tokenizer.added_tokens_decoder.values()
    special = {token.content for token in added if token.special}
    named = getattr(tokenizer, "chat_control_tokens", None)
    if named is None:
        named = str(getattr(tokenizer, "chat_template", None) or "")
    # White space, e.g. Gemma's line feeds, is written by everyone.
    others = {token.content for token in added if token.content in named and token.content.strip()} - special
    tags = {
        token
        for token in others
        if (tag := _TAG.fullmatch(token)) and {f"<{tag[1]}>", f"</{tag[1]}>"} <= others
    }
    return _match_any(special | others), _match_any((special | others) - tags)


def _match_any(tokens: Iterable[str]) -> re.Pattern[str]:
    """Matches any token, the longest where several begin; nothing if there are none."""
    return re.compile("|".join(map(re.escape, sorted(tokens, key=len, reverse=True))) or "(?!)")
