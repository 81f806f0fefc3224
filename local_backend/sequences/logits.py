"""Logits processors of a model's generation config and of users, applied to drafts as in ``generate``.

``transformers`` builds the processors; here they are built for one row at a time and applied to one node of
its draft at a time, after the row's tokens and the path to that node. So they must be pure functions of the
preceding tokens and the scores. Others (guidance, which runs the model again; watermarks with state; beams)
are refused when the engine is created. Penalties and least lengths are :class:`TokenBiases` instead.

Knows ``transformers``' generation config and processors. Does not know drafts or how a token is chosen.
"""

from __future__ import annotations

import copy
import inspect
from collections.abc import Callable, Sequence
from typing import TYPE_CHECKING, Any, cast

import numpy as np
import numpy.typing as npt
import torch
from torch import Tensor
from transformers import GenerationConfig, LogitsProcessorList
from transformers.generation.configuration_utils import GenerationMode

if TYPE_CHECKING:
    from transformers import PreTrainedModel

LogitsProcessorLike = Callable[[Tensor, Tensor], Tensor]
"""A ``LogitsProcessor`` or function: token ids ``[1, tokens]`` and scores ``[1, vocabulary]`` to scores."""

Array = npt.NDArray[Any]
_FIRST_TOKENS = 256
# Processors of `transformers` that are no function of the preceding tokens and the scores, and why.
_REFUSED = {
    "UnbatchedClassifierFreeGuidanceLogitsProcessor": "it runs the model a second time for every token "
    "(guidance_scale)",
    "ClassifierFreeGuidanceLogitsProcessor": "it needs a second, unconditional row beside every row",
    "SynthIDTextWatermarkLogitsProcessor": "it remembers earlier calls (watermarking_config)",
}
# Settings that change the text but are no logits processors, their value when off, and what to do instead.
_REFUSED_SETTINGS = {
    "token_healing": (False, "heal the prompt before it is given"),
    "max_time": (None, "cancel the call instead"),
    "num_return_sequences": (1, "give the prompt that many times"),
}


class RowLogits:
    """The processors of one row, applied in order."""

    def __init__(self, processors: LogitsProcessorList, device: torch.device) -> None:
        self._processors = processors
        self._device = device
        # The row's tokens as a tensor that grows with the row: only new tokens are copied.
        self._token_ids = torch.empty((1, _FIRST_TOKENS), dtype=torch.long, device=device)
        self._num_known = 0

    def __call__(self, token_ids: Sequence[int], path: Sequence[int], logits: Tensor) -> Tensor:
        """Scores ``[vocabulary]``, float32, of the token after ``token_ids`` and a ``path`` in its draft.

        Between calls ``token_ids`` may only grow; ``logits`` ``[vocabulary]`` are not modified.
        """
        input_ids = self._tensor_of(token_ids, path)
        scores = logits[None].to(device=self._device, dtype=torch.float32, copy=True)
        for processor in self._processors:  # the list's own call inspects every signature each time
            scores = processor(cast("Any", input_ids), cast("Any", scores))
        return scores[0]

    def _tensor_of(self, token_ids: Sequence[int], path: Sequence[int]) -> Tensor:
        """Both as one tensor, ``[1, tokens]``."""
        known, size = self._num_known, len(token_ids) + len(path)
        if size > self._token_ids.shape[1]:
            longer = self._token_ids.new_empty((1, 2 * size))
            longer[:, :known] = self._token_ids[:, :known]
            self._token_ids = longer
        if size > known:
            new = [*token_ids[known:], *path]
            self._token_ids[0, known:size] = torch.tensor(new, device=self._device)
        self._num_known = len(token_ids)
        return self._token_ids[:, :size]


class TokenBiases:
    """What one row adds to the scores of single tokens.

    Tokens of the answer are penalized by OpenAI's formula: ``presence`` once and ``frequency`` for each
    occurrence. Until prompt and answer have ``min_length`` tokens, those of ``ending`` are ruled out.
    ``num_before`` tokens come before the answer.
    """

    def __init__(
        self, num_before: int, presence: float, frequency: float, min_length: int, ending: Sequence[int]
    ) -> None:
        self._presence, self._frequency, self._min_length = presence, frequency, min_length
        self._num_ending, self._num_read = len(ending), num_before
        self._slots: dict[int, int] = {}  # of each token of the answer
        # First those of ``ending``, then those of the answer, in order of appearance.
        self._ids = np.array([*ending, *[0] * _FIRST_TOKENS], np.int64)
        self._amounts = np.full(len(self._ids), -np.inf, np.float32)

    def __call__(self, token_ids: Sequence[int], path: Sequence[int]) -> tuple[Array, Array]:
        """Tokens and what is added to their scores after ``token_ids`` and a ``path`` in a draft.

        A token may occur several times. Between calls ``token_ids`` may only grow.
        """
        is_penalized = bool(self._presence or self._frequency)
        for token in token_ids[self._num_read :] if is_penalized else ():
            if token not in self._slots:
                self._begin(token)
            self._amounts[self._slots[token]] -= self._frequency
        self._num_read = len(token_ids)
        is_short = len(token_ids) + len(path) < self._min_length
        known = slice(0 if is_short else self._num_ending, self._num_ending + len(self._slots))
        ids, amounts = self._ids[known], self._amounts[known]
        if path and is_penalized:
            is_new = [token not in self._slots and token not in path[:at] for at, token in enumerate(path)]
            added = -self._frequency - self._presence * np.array(is_new, np.float32)
            ids, amounts = np.concatenate([ids, np.array(path)]), np.concatenate([amounts, added])
        return ids, amounts

    def _begin(self, token: int) -> None:
        slot = self._slots[token] = self._num_ending + len(self._slots)
        if slot == len(self._ids):
            self._ids = np.resize(self._ids, 2 * slot)
            self._amounts = np.resize(self._amounts, 2 * slot)
        self._ids[slot], self._amounts[slot] = token, -self._presence


class LogitsRules:
    """Rules for every row of an engine, from a snapshot of the model's ``generation_config``.

    Args:
        model: Provides the generation config and builds the processors.
        processors: Further processors for every row; each replaces one of the same class from the generation
            config, as in ``generate``.
        use_generation_config: Whether the model's generation config applies.

    Attributes:
        end_token_ids: Tokens that end a row.
        stop: Strings that end a row.

    Raises:
        ValueError: The generation config asks for something that cannot be applied to drafted tokens.
        TypeError: A processor cannot be called with token ids and scores.
    """

    def __init__(
        self,
        model: PreTrainedModel,
        processors: Sequence[LogitsProcessorLike] = (),
        *,
        use_generation_config: bool = True,
    ) -> None:
        self._model, self._device = model, model.device
        given = getattr(model, "generation_config", None) if use_generation_config else None
        config = copy.deepcopy(given) if given is not None else GenerationConfig()
        config.do_sample = False  # sampling is decided by SamplingParams
        if given is not None:
            refuse_generation_mode(config)
            for name, (off, instead) in _REFUSED_SETTINGS.items():
                if (value := getattr(config, name, None)) not in (None, off):
                    raise ValueError(
                        f"model.generation_config.{name} = {value!r} is not supported by the engine: "
                        f"set it to None and {instead}"
                    )
            cast("Any", model)._prepare_special_tokens(config, device=self._device)
        self._config: Any = config
        self._processors = tuple(_checked(processor) for processor in processors)
        ends, stop = config.eos_token_id, config.stop_strings
        self.end_token_ids = frozenset([ends] if isinstance(ends, int) else ends or ())
        self.stop = (stop,) if isinstance(stop, str) else tuple(stop or ())
        # The row determines the parameters of the processors, not which ones there are.
        self._is_empty = not self._build((0, 0), 2, ())

    def for_row(
        self, prompt_token_ids: Sequence[int], max_length: int, processors: Sequence[LogitsProcessorLike] = ()
    ) -> RowLogits | None:
        """The processors of one row, its own last; ``None`` if there are none.

        Raises:
            ValueError: One of ``processors`` cannot be applied to drafted tokens.
            TypeError: One of ``processors`` cannot be called with token ids and scores.
        """
        if self._is_empty and not processors:
            return None
        own = tuple(_checked(processor) for processor in processors)
        return RowLogits(self._build(prompt_token_ids, max_length, own), self._device)

    def _build(
        self, prompt_token_ids: Sequence[int], max_length: int, own: tuple[LogitsProcessorLike, ...]
    ) -> LogitsProcessorList:
        users = LogitsProcessorList([*self._processors, *own])
        if not hasattr(self._config, "_eos_token_tensor"):  # no generation config applies
            return users
        config = copy.copy(self._config)
        config.max_length = max_length
        if config.min_new_tokens is not None:  # overrides min_length, as in `generate`
            config.min_length = len(prompt_token_ids) + config.min_new_tokens
        built = cast("Any", self._model)._get_logits_processor(
            config,
            input_ids_seq_length=len(prompt_token_ids),
            # A decoder-only model has no encoder: like `generate`, pass the prompt as encoder input.
            encoder_input_ids=torch.tensor([prompt_token_ids], device=self._device),
            logits_processor=users,
            device=self._device,
        )
        return LogitsProcessorList([_checked(processor) for processor in built])


def refuse_generation_mode(config: GenerationConfig) -> None:
    """Check that a generation config asks for greedy decoding or sampling.

    Raises:
        ValueError: It asks for beam search, an assistant or another decoding method.
    """
    mode = config.get_generation_mode()
    if mode not in (GenerationMode.GREEDY_SEARCH, GenerationMode.SAMPLE):
        raise ValueError(
            f"the generation config asks for {mode.value.replace('_', ' ')}, but the engine decodes greedily "
            "or samples; reset those settings of model.generation_config (drafts come from the drafter)"
        )


def refuse_processor(processor: LogitsProcessorLike) -> None:
    """Check that a processor can be applied to one token of one row.

    Raises:
        ValueError: It is known to need more than the tokens before and the scores.
    """
    for kind in type(processor).__mro__:
        if kind.__name__ in _REFUSED and kind.__module__.startswith("transformers."):
            raise ValueError(
                f"{kind.__name__} cannot be applied token by token to drafts: {_REFUSED[kind.__name__]}; "
                "switch it off in model.generation_config or leave it out"
            )
    if getattr(processor, "_num_beams", 1) != 1:
        raise ValueError(f"{type(processor).__name__} is made for beams, but a row has none: use num_beams=1")


def _checked(processor: LogitsProcessorLike) -> LogitsProcessorLike:
    if not callable(processor):
        raise TypeError(f"a logits processor is called with token ids and scores, got {processor!r}")
    refuse_processor(processor)
    function = processor if inspect.isroutine(processor) else type(processor).__call__
    num_given = 2 if inspect.isroutine(processor) else 3
    try:
        inspect.signature(function).bind(*[None] * num_given)
    except TypeError as error:
        raise TypeError(
            f"a logits processor is called with token ids and scores, but {processor!r} takes other arguments"
        ) from error
    return processor
