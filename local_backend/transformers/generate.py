"""Our engine behind ``model.generate`` of stock ``transformers``: greedy or sampling; the rest is refused.

Knows what ``generate`` passes to its loop. Does not know how drafts are made.
"""

from __future__ import annotations

import copy
import threading
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import replace
from functools import partial
from queue import SimpleQueue
from typing import TYPE_CHECKING, Any, cast

import torch
from torch import Tensor
from torch.nn.utils.rnn import pad_sequence
from transformers import (
    EosTokenCriteria,
    GenerationConfig,
    LogitsProcessorList,
    MaxLengthCriteria,
    RepetitionPenaltyLogitsProcessor,
    StoppingCriteriaList,
    StopStringCriteria,
)
from transformers.generation.utils import GenerateDecoderOnlyOutput

from local_backend.drafting import Drafter
from local_backend.engine.engine import Engine
from local_backend.sequences.logits import refuse_generation_mode, refuse_processor
from local_backend.sequences.outputs import Update
from local_backend.sequences.request import References
from local_backend.sequences.sampling import SamplingParams

if TYPE_CHECKING:
    from transformers import PreTrainedModel, PreTrainedTokenizerBase
    from transformers.generation.streamers import BaseStreamer

Texts = Sequence[str] | References | None

# What `generate` prepares for its own loop and the engine replaces.
_CACHES = frozenset({"cache", "past_key_values"})  # the first from transformers 5.24 on
_SUPERSEDED = _CACHES | {"attention_mask", "position_ids", "use_cache", "logits_to_keep"}
_OUTPUTS = ("output_scores", "output_logits", "output_attentions", "output_hidden_states")
# These hold a state for each row of the batch, which the engine would have to split.
_ONE_ROW_ONLY = {
    "EncoderRepetitionPenaltyLogitsProcessor": "encoder_repetition_penalty",
    "EncoderNoRepeatNGramLogitsProcessor": "encoder_no_repeat_ngram_size",
    "PrefixConstrainedLogitsProcessor": "prefix_allowed_tokens_fn",
}


class ParallelDecoding:
    """A decoding loop for ``model.generate(..., custom_generate=ParallelDecoding())``.

    Greedy tokens are those of ``generate`` itself, sampled ones have the same distribution; sampling uses
    other random numbers, which follow ``torch.manual_seed``. A row ends at the model's last position at the
    latest. ``generate`` then also takes ``references=``, for which ``tokenizer`` is needed: for each prompt,
    texts the answer may copy from. Streamers and stop strings need :func:`generate`: no callable gets them.
    """

    def __init__(
        self, drafter: str | Drafter = "combined", *, tokenizer: PreTrainedTokenizerBase | None = None
    ) -> None:
        self.drafter = drafter
        self.tokenizer = tokenizer
        self._engine: Engine | None = None
        self._num_calls = 0
        self._lock = threading.Lock()

    def __reduce__(self) -> Any:
        # A copy, e.g. with a copy of the model, makes its own engine.
        return partial(ParallelDecoding, self.drafter, tokenizer=self.tokenizer), ()

    def __call__(
        self,
        model: PreTrainedModel,
        input_ids: Tensor,
        *,
        logits_processor: LogitsProcessorList,
        stopping_criteria: StoppingCriteriaList,
        generation_config: GenerationConfig,
        references: Sequence[Texts] | None = None,
        streamer: BaseStreamer | None = None,
        **model_kwargs: Any,
    ) -> Tensor | GenerateDecoderOnlyOutput:
        """Called by ``generate`` with what it has prepared; ``ValueError`` for unsupported arguments."""
        num_rows = len(input_ids)
        if streamer is not None and num_rows > 1:
            raise ValueError(f"a streamer takes one prompt at a time, got {num_rows}")
        if references is not None and (not len(references) or num_rows % len(references)):
            raise ValueError(f"{len(references)} references for {num_rows} rows: give one for each prompt")
        _refuse_unsupported(num_rows, logits_processor, generation_config, model_kwargs)
        ends_row = _row_criterion(input_ids, stopping_criteria)
        rows = []
        for index, num_padding in enumerate(_num_padding(input_ids, model_kwargs.get("attention_mask"))):
            prompt, padding = input_ids[index, num_padding:].tolist(), input_ids[index, :num_padding]
            params = _sampling_params(input_ids.shape[1], stopping_criteria, generation_config)
            if logits_processor:
                process = _RowProcessor(logits_processor, index, padding)
                params = replace(params, logits_processors=(process,))
            texts = references[index * len(references) // num_rows] if references else None
            rows.append({"prompt": prompt, "params": params, "references": texts})
        if streamer is not None:
            streamer.put(input_ids.cpu())
        with self._engine_for(model) as engine:
            answers = _decode(engine, rows, ends_row, streamer)
        if streamer is not None:
            streamer.end()
        pad = cast("Any", generation_config)._pad_token_tensor
        written = pad_sequence(
            [torch.tensor(answer, device=input_ids.device) for answer in answers],
            batch_first=True,
            padding_value=0 if pad is None else int(pad),
        )
        sequences = torch.cat([input_ids, written], dim=1)
        if generation_config.return_dict_in_generate:
            return GenerateDecoderOnlyOutput(sequences=cast("Any", sequences))
        return sequences

    def close(self) -> None:
        """Close the engine; the next call makes another."""
        with self._lock:
            if self._engine is not None:
                self._engine.close()
            self._engine = None

    @contextmanager
    def _engine_for(self, model: PreTrainedModel) -> Iterator[Engine]:
        """The engine for a call; the last call to end drops its caches, as weights may change."""
        was_training = model.training
        with self._lock:
            if self._engine is None or self._engine.model is not model:
                if self._engine is not None:
                    self._engine.close()
                tokenizer = self.tokenizer if self.tokenizer is not None else cast("Any", _NoText())
                # `generate` passes what applies to this call.
                self._engine = Engine(model, tokenizer, self.drafter, use_generation_config=False)
            model.eval()
            engine = self._engine
            self._num_calls += 1
        try:
            yield engine
        finally:
            with self._lock:
                self._num_calls -= 1
                if self._num_calls == 0:
                    engine.forget_weights()
                    model.train(was_training)


def _refuse_unsupported(
    num_rows: int, processors: LogitsProcessorList, config: GenerationConfig, model_kwargs: Mapping[str, Any]
) -> None:
    refuse_generation_mode(config)
    for processor in processors:
        refuse_processor(processor)
        if num_rows > 1 and (name := _ONE_ROW_ONLY.get(type(processor).__name__)):
            raise ValueError(f"{name} takes one prompt at a time in parallel decoding, got {num_rows}")
    if wanted := [name for name in _OUTPUTS if getattr(config, name, None)]:
        raise ValueError(f"{', '.join(wanted)}: only the tokens are returned by parallel decoding")
    given = {name for name, value in model_kwargs.items() if value is not None and value is not False}
    if others := given - _SUPERSEDED:
        raise ValueError(f"parallel decoding continues token ids only, but was given {sorted(others)}")
    if any(cache and cache.get_seq_length() for cache in map(model_kwargs.get, _CACHES)):
        raise ValueError("a cache is not supported: parallel decoding keeps its own")


def _num_padding(input_ids: Tensor, mask: Tensor | None) -> list[int]:
    if mask is None:
        return [0] * len(input_ids)
    num_padding = (mask == 0).sum(1)  # [rows]
    if not torch.equal(mask != 0, torch.arange(mask.shape[1], device=mask.device) >= num_padding[:, None]):
        raise ValueError(
            "parallel decoding needs padding on the left only: set tokenizer.padding_side='left'"
        )
    return [*map(int, num_padding)]


def _sampling_params(
    num_prompt_tokens: int, criteria: StoppingCriteriaList, config: GenerationConfig
) -> SamplingParams:
    assert config.max_length is not None
    ends = [one.eos_token_id.tolist() for one in criteria if isinstance(one, EosTokenCriteria)]
    return SamplingParams(
        max_tokens=config.max_length - num_prompt_tokens,
        temperature=1.0 if config.do_sample else 0.0,  # warpers are among the logits processors
        seed=int(torch.randint(2**62, ())) if config.do_sample else None,
        stop_token_ids=tuple(sorted({token for tokens in ends for token in tokens})),
        ignore_end=True,  # the end tokens of the call apply, not the model's
    )


class _RowProcessor:
    """The processors of a call for one row, which see its padding: ``generate`` counts it in lengths."""

    def __init__(self, processors: LogitsProcessorList, index: int, padding: Tensor) -> None:
        self._padding = padding[None]
        self._processors = LogitsProcessorList(map(copy.copy, processors))
        for one in self._processors:
            ignored: Any = getattr(one, "prompt_ignore_length", None)
            if isinstance(one, RepetitionPenaltyLogitsProcessor) and isinstance(ignored, Tensor):
                one.prompt_ignore_length = ignored[index : index + 1]

    def __call__(self, input_ids: Tensor, scores: Tensor) -> Tensor:
        padded = torch.cat([self._padding.to(input_ids.device), input_ids], dim=1)
        return self._processors(cast("Any", padded), cast("Any", scores))


def _row_criterion(input_ids: Tensor, criteria: StoppingCriteriaList) -> Callable[[int, list[int]], bool]:
    """Whether a criterion other than end tokens and length ends a row after an answer."""
    known = (EosTokenCriteria, MaxLengthCriteria)
    others = StoppingCriteriaList(one for one in criteria if not isinstance(one, known))

    def ends_row(index: int, answer: list[int]) -> bool:
        written = torch.tensor([answer], device=input_ids.device)
        so_far = torch.cat([input_ids[index : index + 1], written], dim=1)
        return bool(others) and bool(others(cast("Any", so_far), cast("Any", None))[0])

    return ends_row


def _decode(
    engine: Engine,
    arguments: Sequence[Mapping[str, Any]],
    ends_row: Callable[[int, list[int]], bool],
    streamer: BaseStreamer | None,
) -> list[list[int]]:
    """The tokens of each row, up to where a stopping criterion holds."""
    arrivals: SimpleQueue[tuple[int, Update]] = SimpleQueue()

    def put(index: int, update: Update) -> None:
        arrivals.put((index, update))

    rows = [
        engine.make_row(listener=partial(put, index), min_interval_seconds=0.0, **given)
        for index, given in enumerate(arguments)
    ]
    answers: list[list[int]] = [[] for _ in rows]
    running = set(range(len(rows)))
    try:
        engine.submit(rows)
        while running:
            index, update = arrivals.get()
            if index not in running:
                continue  # an update of a row that a criterion has ended
            if update.error is not None:
                raise update.error
            ended = update.is_last
            for token in update.token_ids:
                answers[index].append(token)
                if streamer is not None:
                    streamer.put(torch.tensor([token]))
                if ends_row(index, answers[index]):
                    ended = True
                    break
            if ended:
                running.discard(index)
                engine.cancel([rows[index]])
    finally:
        engine.cancel(rows)
    return answers


def generate(
    model: PreTrainedModel,
    inputs: Tensor | None = None,
    *,
    drafter: str | Drafter = "combined",
    references: Sequence[Texts] | None = None,
    tokenizer: PreTrainedTokenizerBase | None = None,
    streamer: BaseStreamer | None = None,
    stopping_criteria: StoppingCriteriaList | None = None,
    generation_config: GenerationConfig | None = None,
    **options: Any,
) -> Any:
    """``model.generate`` with our decoding loop, streamers and stop strings included.

    ``references`` are, for each prompt, texts the answer may copy from; they need ``tokenizer``. All other
    arguments but ``drafter`` are those of ``model.generate``. The model keeps the engine for later calls.
    """
    decoding = vars(model).get("_parallel_decoding")
    if decoding is None or decoding.drafter != drafter or decoding.tokenizer is not tokenizer:
        if decoding is not None:
            decoding.close()
        decoding = vars(model)["_parallel_decoding"] = ParallelDecoding(drafter, tokenizer=tokenizer)
    criteria = StoppingCriteriaList(stopping_criteria or [])
    own_config: Any = model.generation_config
    stop_strings = options.pop("stop_strings", None) or getattr(generation_config, "stop_strings", None)
    if stop_strings := stop_strings or own_config.stop_strings:
        if tokenizer is None:
            raise ValueError("stop strings need the tokenizer: generate(..., tokenizer=...)")
        criteria.append(StopStringCriteria(tokenizer, stop_strings))
        # Now handled: `generate` would look for a tokenizer, which it does not have with a callable.
        if generation_config is None or own_config.stop_strings:
            options["stop_strings"] = None
        if generation_config is not None:
            generation_config = copy.deepcopy(generation_config)
            generation_config.stop_strings = None
    options.pop("custom_generate", None)
    # The class's method, because the instance's may be this function.
    method: Callable[..., Any] = cast("Any", type(model)).generate
    return method(
        model,
        inputs,
        generation_config=generation_config,
        stopping_criteria=criteria,
        custom_generate=partial(decoding, streamer=streamer, references=references),
        **options,
    )


class _NoText:
    """Stands in for a tokenizer when only token ids are needed."""

    def decode(self, token_ids: Sequence[int], **_: Any) -> str:
        return ""

    def encode(self, text: str, **_: Any) -> list[int]:
        raise ValueError("references are texts, which need the tokenizer: ParallelDecoding(tokenizer=...)")
