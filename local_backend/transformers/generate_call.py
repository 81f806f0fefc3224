"""One call of ``transformers``' generation loop, split into rows.

``generate`` prepares one padded batch and processors for all of it; a row of the engine has no padding and is
processed alone. For the same results, a row's processors are given its padding back, because ``generate``
counts padding in lengths and penalties.

Knows what ``generate`` hands to its loop. Does not know the engine.
"""

from __future__ import annotations

import copy
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any, cast

import torch
from torch import Tensor
from transformers import (
    EncoderNoRepeatNGramLogitsProcessor,
    EncoderRepetitionPenaltyLogitsProcessor,
    EosTokenCriteria,
    GenerationConfig,
    LogitsProcessorList,
    MaxLengthCriteria,
    PrefixConstrainedLogitsProcessor,
    RepetitionPenaltyLogitsProcessor,
    StoppingCriteriaList,
)

from local_backend.sequences.logits import LogitsProcessorLike, refuse_generation_mode, refuse_processor
from local_backend.sequences.sampling import SamplingParams

# What `generate` prepares for its own loop and the engine replaces.
_SUPERSEDED = frozenset({"attention_mask", "position_ids", "past_key_values", "use_cache", "logits_to_keep"})
_OUTPUTS = ("output_scores", "output_logits", "output_attentions", "output_hidden_states")


@dataclass(frozen=True, slots=True)
class GenerateCall:
    """What ``generate`` passes to its loop.

    Attributes:
        input_ids: Prompts, padded on the left, ``[rows, tokens]``.
        num_padding: Padding tokens of each row.
        logits_processor: For the whole batch.
        stopping_criteria: For the whole batch.
        config: Determines sampling, the pad token and the kind of result.
    """

    input_ids: Tensor
    num_padding: tuple[int, ...]
    logits_processor: LogitsProcessorList
    stopping_criteria: StoppingCriteriaList
    config: GenerationConfig

    @classmethod
    def of(
        cls,
        input_ids: Tensor,
        logits_processor: LogitsProcessorList,
        stopping_criteria: StoppingCriteriaList,
        config: GenerationConfig,
        model_kwargs: Mapping[str, Any],
    ) -> GenerateCall:
        """Check a call.

        Raises:
            ValueError: The call needs something that cannot be done with drafts in a batch.
        """
        refuse_generation_mode(config)
        for processor in logits_processor:
            refuse_processor(processor)
        wanted = [name for name in _OUTPUTS if getattr(config, name, None)]
        if wanted:
            raise ValueError(f"{', '.join(wanted)}: only the tokens are returned by parallel decoding")
        given = {name for name, value in model_kwargs.items() if value is not None}
        if others := given - _SUPERSEDED:
            raise ValueError(f"parallel decoding continues token ids only, but was given {sorted(others)}")
        cache = model_kwargs.get("past_key_values")
        if cache is not None and cache.get_seq_length() > 0:
            raise ValueError("parallel decoding keeps its own cache: leave past_key_values out")
        num_padding = _num_padding(input_ids, model_kwargs)
        call = cls(input_ids, num_padding, logits_processor, stopping_criteria, config)
        ends = any(isinstance(one, EosTokenCriteria) for one in stopping_criteria)
        if call.own_criteria and not ends and len(input_ids) > 1:
            raise ValueError("stopping criteria in a batch need an end token, which says how to pad: set one")
        return call

    @property
    def own_criteria(self) -> StoppingCriteriaList:
        """Stopping criteria other than end tokens and length."""
        known = (EosTokenCriteria, MaxLengthCriteria)
        return StoppingCriteriaList(one for one in self.stopping_criteria if not isinstance(one, known))

    def prompt(self, number: int) -> list[int]:
        """Token ids of a row, without padding."""
        return self.input_ids[number, self.num_padding[number] :].tolist()

    def params(self, number: int) -> SamplingParams:
        """Sampling parameters of a row; warpers are among the processors, so no others are set."""
        processors = [_of_row(one, number, len(self.input_ids)) for one in self.logits_processor]
        padding = self.input_ids[number, : self.num_padding[number]]
        ends = {
            token
            for one in self.stopping_criteria
            if isinstance(one, EosTokenCriteria)
            for token in one.eos_token_id.tolist()
        }
        assert self.config.max_length is not None
        return SamplingParams(
            max_tokens=self.config.max_length - self.input_ids.shape[1],
            temperature=1.0 if self.config.do_sample else 0.0,
            seed=int(torch.randint(2**62, ())) if self.config.do_sample else None,
            stop_token_ids=tuple(sorted(ends)),
            ignore_end=True,  # the end tokens of the call apply, not the model's
            logits_processors=(_Padded(processors, padding),) if processors else (),
        )

    def stops(self, number: int, answer: Sequence[int]) -> bool:
        """Whether a criterion other than end tokens and length holds after ``answer``."""
        if not (criteria := self.own_criteria):
            return False
        written = torch.tensor([answer], device=self.input_ids.device)
        so_far = torch.cat([self.input_ids[number : number + 1], written], dim=1)
        return bool(criteria(cast("Any", so_far), cast("Any", None))[0])

    def sequences(self, answers: Sequence[Sequence[int]]) -> Tensor:
        """Prompts and answers, padded, ``[rows, tokens]``."""
        pad = cast("Any", self.config)._pad_token_tensor
        longest = max(map(len, answers))
        pads = [int(pad) if pad is not None else 0] * longest
        written = [[*answer, *pads][:longest] for answer in answers]
        return torch.cat([self.input_ids, torch.tensor(written, device=self.input_ids.device)], dim=1)


class _Padded:
    """The processors of one row, called with the padding that ``generate`` would include."""

    def __init__(self, processors: Sequence[LogitsProcessorLike], padding: Tensor) -> None:
        self._processors = LogitsProcessorList(cast("Any", processors))
        self._padding = padding[None]

    def __call__(self, input_ids: Tensor, scores: Tensor) -> Tensor:
        padded = torch.cat([self._padding.to(input_ids.device), input_ids], dim=1)
        return self._processors(cast("Any", padded), cast("Any", scores))


def _of_row(processor: LogitsProcessorLike, number: int, num_rows: int) -> LogitsProcessorLike:
    """A processor for one row of a batch: if it has per-row state, a copy with that row's state only."""
    own: Any = copy.copy(processor)
    if isinstance(processor, RepetitionPenaltyLogitsProcessor) and isinstance(
        processor.prompt_ignore_length, Tensor
    ):
        own.prompt_ignore_length = own.prompt_ignore_length[number : number + 1]
    elif isinstance(processor, EncoderRepetitionPenaltyLogitsProcessor):
        prompt = number * len(own.encoder_input_ids) // num_rows
        own.encoder_input_ids = own.encoder_input_ids[prompt : prompt + 1]
    elif isinstance(processor, EncoderNoRepeatNGramLogitsProcessor):
        prompt = number * own.batch_size // num_rows
        own.generated_ngrams, own.batch_size = own.generated_ngrams[prompt : prompt + 1], 1
    elif isinstance(processor, PrefixConstrainedLogitsProcessor):
        allowed = own._prefix_allowed_tokens_fn
        own._prefix_allowed_tokens_fn = lambda _, token_ids: allowed(number, token_ids)
    else:
        return processor
    return cast("LogitsProcessorLike", own)


def _num_padding(input_ids: Tensor, model_kwargs: Mapping[str, Any]) -> tuple[int, ...]:
    mask = model_kwargs.get("attention_mask")
    if mask is None:
        mask = torch.ones_like(input_ids)
    num_padding = (mask == 0).sum(1)  # [rows]
    place = torch.arange(mask.shape[1], device=mask.device)
    if not torch.equal(mask != 0, place >= num_padding[:, None]):
        raise ValueError(
            "parallel decoding needs padding on the left only: set tokenizer.padding_side='left'"
        )
    positions = model_kwargs.get("position_ids")
    if positions is not None:
        usual = ((mask != 0).long().cumsum(1) - 1).clamp(min=0)
        if not torch.equal(
            (positions * (mask != 0)).to(usual.device), (usual * (mask != 0)).expand_as(positions)
        ):
            raise ValueError("parallel decoding counts positions itself: leave position_ids out")
    return tuple(num_padding.tolist())
