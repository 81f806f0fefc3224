"""Bounds an answer by a grammar, e.g. that of a JSON schema: only tokens that fit are left to choose from.

The library ``llguidance`` reads the grammar and says which tokens may follow. It remembers the tokens it was
given, but what it says is a pure function of them, so the rule is applied to drafted tokens like any other.
It says so in bits, which are applied to the scores of all rows at once.

Knows tokenizers and grammars. Does not know rows or the model.
"""

from __future__ import annotations

import json
import re
from collections.abc import Collection, Mapping, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

import numpy as np
import numpy.typing as npt
import torch
from llguidance import LLMatcher, LLParserLimits, LLTokenizer
from torch import Tensor
from torch.nn.functional import pad

from local_backend.sequences.tokenizing import cached_by_tokenizer, without_surrogates

if TYPE_CHECKING:
    from transformers import PreTrainedTokenizerBase

# One line, as json.dumps writes it: a small model that may choose its white space can repeat it for ever.
_JSON_OPTIONS = {
    "whitespace_flexible": False,
    "item_separator": ", ",
    "key_separator": ": ",
    "coerce_one_of": True,
    "lenient": True,  # what a grammar cannot express is named by `ignored_keywords`
}
_BITS = torch.from_numpy(np.unpackbits(np.arange(256, dtype=np.uint8)[:, None], 1, bitorder="little")).bool()
_START = re.compile(r"^start\s*:", re.MULTILINE)
_QUIET = LLParserLimits(verbose_errors=False)
_MAPS_OF_SCHEMAS = {"$defs", "definitions", "patternProperties", "properties"}
_SCHEMAS = {"additionalProperties", "items"}
_ALTERNATIVES = {"anyOf", "oneOf", "prefixItems"}
_COMBINATIONS = {"$ref", "allOf", "anyOf", "oneOf"}


def json_grammar(schema: Mapping[str, Any]) -> str:
    """The grammar of JSON texts that follow a schema; for what it leaves out see :func:`ignored_keywords`.

    An object has only the properties that its schema names, unless it says ``additionalProperties`` itself.
    """
    return alternatives_grammar([Alternative(schema)])


@dataclass(frozen=True, slots=True)
class Alternative:
    """One form of a text: a JSON value after something fixed.

    Attributes:
        schema: Of the value.
        before: The text before the value; no beginning of another alternative's value.
        control_token: A token before that text.
    """

    schema: Mapping[str, Any]
    before: str = ""
    control_token: int | None = None


def alternatives_grammar(alternatives: Sequence[Alternative]) -> str:
    """The grammar of texts that have one of several forms."""
    names = [f"alternative_{number}" for number in range(len(alternatives))]
    lines = [f"start: {' | '.join(names)}"]
    for name, each in zip(names, alternatives, strict=True):
        value = "%json " + json.dumps(
            without_surrogates({**_closed(each.schema), "x-guidance": _JSON_OPTIONS})
        )
        before = json.dumps(without_surrogates(each.before)) if each.before else ""
        control = "" if each.control_token is None else f"<[{each.control_token}]>"
        lines.append(f"{name}: {control} {before} {value}")
    return "\n".join(lines)


def ignored_keywords(schema: Mapping[str, Any]) -> list[str]:
    """What a grammar does not express of a schema, in words, e.g. that items are unique.

    Raises:
        ValueError: The schema cannot be used, e.g. because no value fits it.
    """
    is_error, messages = LLMatcher.validate_grammar_with_warnings(json_grammar(schema), limits=_QUIET)
    if is_error:
        raise ValueError(f"this schema cannot bound an answer: {messages[0]}")
    return messages


def _closed(schema: Any) -> Any:
    """``schema`` with ``additionalProperties: false`` in objects that name their properties."""
    if not isinstance(schema, Mapping):
        return schema
    closed = dict(schema)
    maps = {key for key in _MAPS_OF_SCHEMAS & schema.keys() if isinstance(schema[key], Mapping)}
    for key in maps:
        closed[key] = {name: _closed(part) for name, part in schema[key].items()}
    for key in _SCHEMAS & schema.keys():
        closed[key] = _closed(schema[key])
    if "properties" in schema and _COMBINATIONS & schema.keys():
        return closed  # schemas that are combined leave room for each other's properties
    for key in _ALTERNATIVES & schema.keys():
        closed[key] = [*map(_closed, schema[key])] if isinstance(schema[key], list) else schema[key]
    if "properties" in schema and not {"additionalProperties", "patternProperties"} & schema.keys():
        closed["additionalProperties"] = False
    return closed


class GrammarRule:
    """Which tokens a grammar allows after an answer, and end tokens where the text is complete.

    Raises:
        ValueError: The grammar or the tokenizer cannot be used, or there is no end token.
    """

    def __init__(
        self,
        tokenizer: PreTrainedTokenizerBase,
        grammar: str,
        end_token_ids: Collection[int],
        vocabulary_size: int,
    ) -> None:
        if not end_token_ids:
            raise ValueError("a grammar needs a token that ends the answer: set stop_token_ids")
        self._end_token_ids = sorted(end_token_ids)
        self._tokens = tokens = _make_tokens(tokenizer, vocabulary_size)
        if tokens.decode_str(tokenizer.encode("a", add_special_tokens=False)).startswith(" "):
            # It writes a space before the first word, which is no part of the text.
            grammar = 'start: " "? answer\n' + _START.sub("answer:", grammar, count=1)
        self._tokenizer_end = tokens.eos_token
        self._matcher = LLMatcher(tokens, without_surrogates(grammar), log_level=0, limits=_QUIET)
        if error := self._matcher.get_error():
            raise ValueError(f"this grammar cannot bound an answer: {error}")
        self._read: list[int] = []  # by the matcher

    def __call__(self, answer: list[int]) -> npt.NDArray[np.uint8] | None:
        """One bit for each token, the lowest of a byte first; ``None`` if ``answer`` has ended."""
        if answer and answer[-1] in self._end_token_ids:  # at the end of a draft: nothing follows
            return None
        self._read_to(answer)
        bits = np.frombuffer(self._matcher.compute_bitmask(), np.uint8).copy()
        _set_bit(bits, self._tokenizer_end, False)  # which tokens end an answer depends on the row
        for token in self._end_token_ids:
            _set_bit(bits, token, self._matcher.is_accepting())
        return bits

    def forced(self, answer: list[int]) -> list[int]:
        """A guess of the tokens of what must follow ``answer``, as far as only one text can."""
        try:
            self._read_to(answer)
        except ValueError:  # told when the next token is chosen
            return []
        return self._tokens.tokenize_bytes(self._matcher.compute_ff_bytes())

    def _read_to(self, answer: list[int]) -> None:
        if answer[: len(self._read)] != self._read:
            self._matcher.reset()
            self._read = []
        if not self._matcher.consume_tokens(answer[len(self._read) :]):
            raise ValueError(f"the answer left its grammar: {self._matcher.get_error()}")
        self._read = list(answer)


def bound_scores(scores: Tensor, bits: npt.NDArray[np.uint8]) -> Tensor:
    """Scores ``[positions, vocabulary]`` of the tokens whose bits are set, and -inf for the others.

    Where other rules leave none of them, e.g. because the text is complete before it has its fewest tokens,
    all allowed tokens are equally likely.
    """
    numbers = torch.from_numpy(bits).to(scores.device).flatten().int()
    allowed = _BITS.to(scores.device).index_select(0, numbers).view(len(scores), -1)
    allowed = pad(allowed, (0, scores.shape[-1] - allowed.shape[-1]))
    bounded = scores.masked_fill(~allowed, -torch.inf)
    is_empty = bounded.amax(-1, keepdim=True) == -torch.inf
    return bounded.masked_fill_(is_empty & allowed, 0)


def _set_bit(bits: npt.NDArray[np.uint8], token: int, value: bool) -> None:
    bit = np.uint8(1 << (token & 7))
    bits[token >> 3] = bits[token >> 3] | bit if value else bits[token >> 3] & ~bit


@cached_by_tokenizer
def _make_tokens(tokenizer: PreTrainedTokenizerBase, vocabulary_size: int) -> LLTokenizer:
    """The bytes of each token, in the form of ``llguidance``; takes up to a second."""
    if not tokenizer.is_fast:
        raise ValueError(f"a grammar needs a fast tokenizer, but {type(tokenizer).__name__} is not")
    described = json.loads(tokenizer.backend_tokenizer.to_str())
    described |= {"padding": None, "truncation": None, "post_processor": None}
    _rename_control_tokens(described)
    if (described["decoder"] or {}).get("type") == "Metaspace":  # llguidance knows it in parts
        space = {"type": "Replace", "pattern": {"String": "▁"}, "content": " "}
        parts = [space, {"type": "ByteFallback"}, {"type": "Fuse"}]
        described["decoder"] = {"type": "Sequence", "decoders": parts}
    ends = (tokenizer.eos_token_id, *tokenizer.all_special_ids, 0)
    end = next(token for token in ends if token is not None)
    try:
        size = max(len(tokenizer), vocabulary_size)
        return LLTokenizer(json.dumps(described), n_vocab=size, eos_token=end)
    except ValueError as error:
        raise ValueError(f"a grammar cannot bound the tokens of this tokenizer: {error}") from error


def _rename_control_tokens(described: dict[str, Any]) -> None:
    """Give control tokens names that no text has, in the JSON form of a tokenizer.

    Otherwise ``llguidance`` would write a text of a schema, e.g. the value ``"</s>"``, by the control token.
    """
    names: dict[str, str] = {}
    for token in described["added_tokens"]:
        name = token["content"]
        if token["special"] or (name.startswith("<") and name.endswith(">")):  # as llguidance sees it
            names[name] = token["content"] = f"\ue000{token['id']}"
            token["special"] = True
    model = described["model"]
    if isinstance(model["vocab"], dict):
        model["vocab"] = {names.get(name, name): token for name, token in model["vocab"].items()}
    else:  # Unigram
        model["vocab"] = [[names.get(name, name), score] for name, score in model["vocab"]]
    if model.get("unk_token") in names:
        model["unk_token"] = names[model["unk_token"]]
