"""Encodes texts and chats as token ids.

A chat template writes control tokens between messages, e.g. ``<|im_end|>``. In a message or a document they
are text: otherwise a document could end the user's turn and speak as the system. And lone surrogates, which
no tokenizer takes, are replaced.

Knows tokenizers and chat templates. Does not know models.
"""

from __future__ import annotations

import json
import re
import warnings
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from functools import wraps
from itertools import product
from typing import TYPE_CHECKING, Any, TypeVar
from weakref import WeakKeyDictionary

from jinja2 import TemplateError
from transformers.utils.chat_template_utils import encode_marked_chat, mark_control_tokens

if TYPE_CHECKING:
    from transformers import PreTrainedTokenizerBase

_TAG_OR_LINE_END = re.compile(r"[>\]\n]")
_TAG = re.compile(r"</?([^<>/]+)>")

# What templates raise where messages have another form than they expect.
REFUSALS = (TemplateError, TypeError, ValueError, KeyError, AttributeError)

_T = TypeVar("_T")


def cached_by_tokenizer(make: Callable[..., _T]) -> Callable[..., _T]:
    """Keep what ``make`` finds in a tokenizer until tokens are added or other arguments are given."""
    known: WeakKeyDictionary[PreTrainedTokenizerBase, tuple[object, _T]] = WeakKeyDictionary()

    @wraps(make)
    def find(tokenizer: PreTrainedTokenizerBase, *options: object) -> _T:
        key = (len(tokenizer), getattr(tokenizer, "chat_template", None), *options)
        found = known.get(tokenizer)
        if found is None or found[0] != key:
            found = known[tokenizer] = key, make(tokenizer, *options)
        return found[1]

    return find


def encode(tokenizer: PreTrainedTokenizerBase, text: str) -> list[int]:
    """Token ids of a text in which control tokens count as such, e.g. a prompt continued as it is."""
    # Not verbose: it would warn of documents longer than the model's positions, which nobody reads whole.
    return list(tokenizer.encode(without_surrogates(text), add_special_tokens=False, verbose=False))


def encode_continuation(tokenizer: PreTrainedTokenizerBase, text: str) -> list[int]:
    """Token ids of a text that follows another, in which control tokens count as such."""
    # Encoded after a line feed, so that SentencePiece adds no space before it.
    before = encode(tokenizer, "\n")
    token_ids = encode(tokenizer, "\n" + text)
    return token_ids[len(before) :] if token_ids[: len(before)] == before else encode(tokenizer, text)


def encode_plain(tokenizer: PreTrainedTokenizerBase, text: str) -> list[int]:
    """Token ids of a text in which control tokens are ordinary text, e.g. a document."""
    token_ids, text = encode(tokenizer, text), without_surrogates(text)
    marked = mark_control_tokens(text, _control_tokens(tokenizer)[False])
    return encode_marked_chat(tokenizer, marked) if marked != text else token_ids


def encode_chat(
    tokenizer: PreTrainedTokenizerBase, turns: Sequence[Mapping[str, Any]], **options: Any
) -> list[int]:
    """Token ids of a chat, in which only the chat template writes control tokens.

    For turns without control tokens these are the ids of ``apply_chat_template``, which takes ``options``.
    """
    given: list[dict[str, Any]] = [without_surrogates(dict(turn)) for turn in turns]
    controls = _control_tokens(tokenizer)
    marked = [mark_control_tokens(turn, controls[turn["role"] == "assistant"]) for turn in given]
    options = mark_control_tokens(without_surrogates(options), controls[False])
    return encode_marked_chat(tokenizer, _render(tokenizer, marked, options))


def _render(tokenizer: PreTrainedTokenizerBase, turns: list[dict[str, Any]], options: dict[str, Any]) -> str:
    """The chat in the first form that the template takes, with all that is said to the model.

    Templates refuse roles, e.g. a system's, and turns that do not alternate, or leave texts out.
    """
    chat, refusal = "", None
    changes = (list, _with_json_arguments, _with_blocks, _with_single_calls)
    for form, change in product(_forms(turns), changes):
        try:
            rendered = str(tokenizer.apply_chat_template(change(form), tokenize=False, **options))
        except REFUSALS as error:
            refusal = refusal or error
            continue
        if all(map(rendered.__contains__, map(_said, form))):
            return rendered
        chat = chat or rendered
    if not chat:
        raise ValueError(
            f"the chat template refuses these messages ({refusal}): expected turns like those it was made for"
        ) from refusal
    warnings.warn("the chat template leaves out part of the messages", stacklevel=4)
    return chat


def _said(turn: dict[str, Any]) -> str:
    """What of a turn is in every chat: of a reply what follows reasoning, of a result nothing as it is."""
    text = str(turn["content"]).strip()
    if turn["role"] == "assistant":
        return _TAG_OR_LINE_END.split(text)[-1].strip()
    return text if turn["role"] != "tool" else ""


def _forms(turns: list[dict[str, Any]]) -> Iterator[list[dict[str, Any]]]:
    """The turns as they are, then alternating after the system's, then without a system."""
    yield turns
    system = _paragraphs(*(turn["content"] for turn in turns if turn["role"] == "system"))
    others = [turn for turn in turns if turn["role"] != "system"]
    yield [{"role": "system", "content": system}] * bool(system) + _alternating(others)
    yield _alternating(others, system)


def _alternating(turns: list[dict[str, Any]], first: str = "") -> list[dict[str, Any]]:
    """User and assistant in turn: texts of one role are merged, and a missing turn is blank."""
    merged: list[dict[str, Any]] = [{"role": "user", "content": first}]
    for given in turns:
        before = merged[-1]
        turn = {**given, "role": given["role"] if given["role"] in ("assistant", "tool") else "user"}
        if turn["role"] == before["role"] != "tool":
            calls = [*before.get("tool_calls", ()), *turn.get("tool_calls", ())]
            merged[-1] = {**before, **turn, "content": _paragraphs(before["content"], turn["content"])}
            merged[-1] |= {"tool_calls": calls} if calls else {}
            continue
        if turn["role"] == "user" and before["role"] == "tool":
            merged.append({"role": "assistant", "content": ""})
        merged.append(turn)
    return merged


def _with_json_arguments(turns: list[dict[str, Any]]) -> list[dict[str, Any]]:
    """The turns with arguments of calls as text, to which e.g. DeepSeek's templates add their own."""

    def convert(call: dict[str, Any]) -> dict[str, Any]:
        arguments = json.dumps(call["function"]["arguments"], ensure_ascii=False)
        return {**call, "function": {**call["function"], "arguments": arguments}}

    calling = ({**turn, "tool_calls": [*map(convert, turn.get("tool_calls", ()))]} for turn in turns)
    return [changed if "tool_calls" in turn else turn for turn, changed in zip(turns, calling, strict=True)]


def _with_single_calls(turns: list[dict[str, Any]]) -> list[dict[str, Any]]:
    """The turns with each call and its result by themselves: Llama's templates refuse two calls at once."""
    calls = [call["id"] for turn in turns for call in turn.get("tool_calls", ())]
    results = {turn.get("tool_call_id"): turn for turn in turns if turn["role"] == "tool"}
    single: list[dict[str, Any]] = []
    for turn in turns:
        for call in turn.get("tool_calls", ()):
            single += [{**turn, "tool_calls": [call]}, *filter(None, [results.get(call["id"])])]
        if "tool_calls" not in turn and turn.get("tool_call_id", "") not in calls:
            single.append(turn)
    return single


def _with_blocks(turns: list[dict[str, Any]]) -> list[dict[str, Any]]:
    """The turns with texts as lists of blocks, which templates for images read."""
    return [{**turn, "content": [{"type": "text", "text": turn["content"]}]} for turn in turns]


def _paragraphs(*texts: str) -> str:
    return "\n\n".join(text for text in texts if text.strip())


def without_surrogates(value: Any) -> Any:
    """``value`` with pairs of surrogates joined to characters, and lone ones replaced."""
    if isinstance(value, str):
        return value.encode("utf-16-le", "surrogatepass").decode("utf-16-le", "replace")
    if isinstance(value, dict):
        return {without_surrogates(name): without_surrogates(part) for name, part in value.items()}
    return [without_surrogates(part) for part in value] if isinstance(value, list) else value


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
