"""From a request to a row: what can be wrong with it is said before anything runs.

Knows what the model can read and how much there is room for. Does not know who else runs.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import TYPE_CHECKING

from local_backend.detokenizer import Detokenizer
from local_backend.logits import LogitsRules
from local_backend.references import References, ReferenceTokens
from local_backend.sampling import SamplingParams
from local_backend.scheduling.memory import RowMemory
from local_backend.sequence import Row, Update

if TYPE_CHECKING:
    from transformers import PreTrainedModel, PreTrainedTokenizerBase


class RowMaker:
    """Makes rows for one model.

    Args:
        tokenizer: The model's.
        rules: End tokens, stop strings and logits processors that apply to all rows.
        memory: What a row must fit into.
        max_positions: Tokens of prompt and answer together, at most.
        vocabulary_size: How many token ids the model can read.
    """

    def __init__(
        self,
        tokenizer: PreTrainedTokenizerBase,
        rules: LogitsRules,
        memory: RowMemory,
        *,
        max_positions: int,
        vocabulary_size: int,
    ) -> None:
        self._tokenizer = tokenizer
        self._rules = rules
        self._memory = memory
        self._max_positions = max_positions
        self._vocabulary_size = vocabulary_size
        self._reference_tokens = ReferenceTokens(tokenizer)

    def __call__(
        self,
        prompt: Sequence[int],
        listener: Callable[[Update], None],
        params: SamplingParams,
        references: Sequence[str] | References | None,
        *,
        num_context_tokens: int,
    ) -> Row:
        """Check one request; see :meth:`local_backend.engine.Engine.make_row`.

        Raises:
            ValueError: Something is wrong with it.
            TypeError: The prompt is text, or a single token.
        """
        if isinstance(prompt, str | int):
            raise TypeError(
                f"a prompt is a sequence of token ids, got {prompt!r:.60}: give a list of prompts, each "
                "of them encoded by the engine's tokenizer; ChatLocal takes text"
            )
        prompt = tuple(prompt)
        if not prompt:
            raise ValueError("the prompt is empty: give at least one token")
        if len(prompt) >= self._max_positions:
            raise ValueError(
                f"the prompt has {len(prompt)} tokens, but the model has positions for {self._max_positions} "
                "with the answer: shorten it"
            )
        if min(prompt) < 0 or max(prompt) >= self._vocabulary_size:
            raise ValueError(
                f"the prompt has token ids from {min(prompt)} to {max(prompt)}, but the model knows 0 to "
                f"{self._vocabulary_size - 1}: is the tokenizer another model's?"
            )
        self._memory.require(len(prompt) + 1)
        room = self._max_positions - len(prompt)
        max_length = len(prompt) + min(room, params.max_tokens or room)
        context = prompt[len(prompt) - num_context_tokens :] if num_context_tokens else ()
        return Row(
            prompt_token_ids=prompt,
            params=params,
            end_token_ids=frozenset(params.stop_token_ids)
            | (frozenset() if params.ignore_end else self._rules.end_token_ids),
            max_length=max_length,
            detokenizer=Detokenizer(self._tokenizer, params.stop + self._rules.stop, context),
            listener=listener,
            references=self._reference_tokens(references),
            logits=self._rules.for_row(prompt, max_length, params.logits_processors),
        )


def vocabulary_size(model: PreTrainedModel) -> int:
    """How many token ids a model can read."""
    embeddings = model.get_input_embeddings()
    return int(getattr(embeddings, "num_embeddings", 0)) or int(
        model.config.get_text_config(decoder=True).vocab_size
    )
