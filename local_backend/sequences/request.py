"""Checks a request and turns it into a row: its prompt, its parameters and the references it may copy from.

Knows token ids and texts. Does not know the engine.
"""

from __future__ import annotations

import hashlib
import threading
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from functools import lru_cache
from typing import TYPE_CHECKING

from local_backend.sequences.detokenizing import Detokenizer
from local_backend.sequences.grammar import GrammarRule
from local_backend.sequences.logits import LogitsRules, TokenBiases
from local_backend.sequences.outputs import Update
from local_backend.sequences.sampling import SamplingParams
from local_backend.sequences.sequence import STREAM_INTERVAL_SECONDS, Row
from local_backend.sequences.spans import begin_span
from local_backend.sequences.tokenizing import encode_plain

if TYPE_CHECKING:
    from transformers import PreTrainedModel, PreTrainedTokenizerBase


class ContextLengthError(ValueError):
    """A prompt that leaves no room for an answer in the model's positions."""


def check_prompt(prompt: Sequence[int], num_answer: int, max_positions: int, vocabulary_size: int) -> None:
    """Check that a model can read a prompt and has positions for an answer of ``num_answer`` tokens.

    Raises:
        ValueError: It has no token, or ids outside the vocabulary.
        ContextLengthError: It is too long.
    """
    if not prompt:
        raise ValueError("the prompt is empty: give at least one token")
    if len(prompt) + num_answer > max_positions:
        raise ContextLengthError(
            f"the prompt has {len(prompt)} tokens, but the model has positions for {max_positions} with an "
            f"answer of {num_answer}: shorten it, leave out earlier turns, or lower max_tokens"
        )
    if min(prompt) < 0 or max(prompt) >= vocabulary_size:
        raise ValueError(
            f"there are token ids from {min(prompt)} to {max(prompt)}, but the model knows 0 to "
            f"{vocabulary_size - 1}: is the tokenizer another model's?"
        )


TokenizedTexts = tuple[tuple[int, ...], ...]


class References:
    """Texts that an answer may copy from, e.g. retrieved documents, in order.

    ``repr``, equality and hash are short and depend only on the texts, and the object is not iterable. So it
    can be part of cache keys and traces, where the texts themselves should not appear.

    Raises:
        TypeError: ``texts`` is a single string or contains non-strings.
    """

    __slots__ = ("digest", "texts")

    def __init__(self, texts: Sequence[str]) -> None:
        if isinstance(texts, str) or not all(isinstance(text, str) for text in texts):
            raise TypeError(f"references are a sequence of texts: give a list of str, got {texts!r:.80}")
        self.texts = tuple(texts)
        hashed = hashlib.sha256()
        for text in self.texts:
            encoded = text.encode("utf-8", "surrogatepass")
            hashed.update(len(encoded).to_bytes(8, "little"))
            hashed.update(encoded)
        self.digest = hashed.hexdigest()

    @classmethod
    def of(cls, texts: Sequence[str] | References) -> References:
        """Wrap ``texts``; a ``References`` object is returned unchanged."""
        return texts if isinstance(texts, References) else cls(texts)

    def __len__(self) -> int:
        return len(self.texts)

    def __eq__(self, other: object) -> bool:
        return isinstance(other, References) and self.digest == other.digest

    def __hash__(self) -> int:
        return int(self.digest[:15], 16)  # the same in every process, unlike the hash of a str

    def __repr__(self) -> str:
        return f"References({len(self)} texts, {self.digest[:16]})"


class ReferenceTokens:
    """Tokenizes references, and keeps those used last; thread-safe.

    Equal references give the same object, so data built from it can be looked up by identity.
    """

    def __init__(self, tokenizer: PreTrainedTokenizerBase) -> None:
        self._tokenizer = tokenizer
        self._encode = lru_cache(maxsize=32)(self._encoded)
        self._lock = threading.Lock()

    def __call__(self, references: Sequence[str] | References | None) -> TokenizedTexts:
        """Token ids of each text; see :class:`References` for what is no reference."""
        if references is None or not len(references):
            return ()
        with self._lock:  # two threads with equal references get one object
            return self._encode(References.of(references))

    def _encoded(self, references: References) -> TokenizedTexts:
        return tuple(tuple(encode_plain(self._tokenizer, text)) for text in references.texts)


@dataclass(eq=False)
class RowMaker:
    """Makes rows for one model; ``require_memory`` raises if a row of that many tokens cannot fit."""

    tokenizer: PreTrainedTokenizerBase
    rules: LogitsRules
    require_memory: Callable[[int], None]
    max_positions: int
    vocabulary_size: int
    model_name: str | None = None  # in traces
    _with_stop: dict[frozenset[str], frozenset[int]] = field(init=False, default_factory=dict)

    def __post_init__(self) -> None:
        self._reference_tokens = ReferenceTokens(self.tokenizer)

    def __call__(
        self,
        prompt: Sequence[int],
        listener: Callable[[Update], None],
        *,
        params: SamplingParams | None = None,
        references: Sequence[str] | References | None = None,
        num_context_tokens: int = 0,
        min_interval_seconds: float = STREAM_INTERVAL_SECONDS,
    ) -> Row:
        """Check one request and make its row.

        Args:
            prompt: Token ids to continue.
            listener: Called with every update, on the engine's thread; must return at once.
            params: How tokens are chosen.
            references: Text that may be copied.
            num_context_tokens: How many last tokens of the prompt are a reply already begun, so that the
                space between them and the answer is kept.
            min_interval_seconds: Minimum time between two updates before the last one.

        Raises:
            ValueError: The prompt is empty, leaves no room in the model's positions or the memory, or has ids
                outside the vocabulary; or a processor of ``params`` cannot be applied to drafted tokens.
            TypeError: The prompt is text, or a single token.
        """
        prompt, params = self._checked(prompt), params or SamplingParams()
        room = self.max_positions - len(prompt)
        max_length = len(prompt) + min(room, params.max_tokens or room)
        num_before = len(prompt) - num_context_tokens  # of the reply
        end_token_ids = frozenset(params.stop_token_ids)
        if not params.ignore_end:
            end_token_ids |= self.rules.end_token_ids
        stop = params.stop + self.rules.stop
        row = Row(
            prompt_token_ids=prompt,
            params=params,
            end_token_ids=end_token_ids,
            max_length=max_length,
            detokenizer=Detokenizer(
                self.tokenizer, stop, prompt[num_before:], keep_special_tokens=params.keep_special_tokens
            ),
            listener=listener,
            references=self._reference_tokens(references),
            logits=self.rules.for_row(prompt, max_length, params.logits_processors),
            min_interval_seconds=min_interval_seconds,
            span=begin_span(self.model_name, len(prompt)),
        )
        row.biases = self._biases(row, num_before)
        if params.grammar is not None:
            row.grammar = GrammarRule(self.tokenizer, params.grammar, end_token_ids, self.vocabulary_size)
        return row

    def _checked(self, prompt: Sequence[int]) -> tuple[int, ...]:
        if isinstance(prompt, str | int):
            raise TypeError(
                f"a prompt is a sequence of token ids, got {prompt!r:.60}: give a list of prompts, each "
                "of them encoded by the engine's tokenizer; ChatLocal takes text"
            )
        prompt = tuple(prompt)
        check_prompt(prompt, 1, self.max_positions, self.vocabulary_size)
        self.require_memory(len(prompt) + 1)
        return prompt

    def _biases(self, row: Row, num_before: int) -> TokenBiases | None:
        """What the parameters of ``row`` add to single scores, if anything."""
        params = row.params
        if not (params.presence_penalty or params.frequency_penalty or params.min_tokens):
            return None
        ending = (
            row.end_token_ids | self._tokens_with(row.detokenizer.stops.stop) if params.min_tokens else ()
        )
        known = [token for token in ending if 0 <= token < self.vocabulary_size]
        min_length = row.num_prompt_tokens + params.min_tokens
        return TokenBiases(num_before, params.presence_penalty, params.frequency_penalty, min_length, known)

    def _tokens_with(self, stop: Sequence[str]) -> frozenset[int]:
        """The tokens whose text contains one of ``stop``."""
        key = frozenset(stop)
        if key and key not in self._with_stop:
            token_ids = range(min(len(self.tokenizer), self.vocabulary_size))
            fast = self.tokenizer.backend_tokenizer if self.tokenizer.is_fast else None  # ten times as fast
            decode = fast.decode_batch if fast else self.tokenizer.batch_decode
            texts = decode([[token_id] for token_id in token_ids], skip_special_tokens=False)
            self._with_stop[key] = frozenset(
                token_id
                for token_id, text in zip(token_ids, texts, strict=True)
                if any(string in text for string in key)
            )
        return self._with_stop.get(key, frozenset())


def vocabulary_size(model: PreTrainedModel) -> int:
    """How many token ids a model can read."""
    embeddings = model.get_input_embeddings()
    return int(getattr(embeddings, "num_embeddings", 0)) or int(
        model.config.get_text_config(decoder=True).vocab_size
    )
