"""Adapters for stock ``transformers``: our engine behind ``model.generate`` and ``transformers serve``.

:class:`ParallelDecoding` is a callable for ``generate(custom_generate=...)``; :func:`write_custom_generate`
writes a ``custom_generate/`` folder next to a model's weights. Both take what ``generate`` has prepared (end
tokens, logits processors, warpers, stopping criteria, lengths) and return what it would return.

Knows the engine and the order of a call. Does not know how drafts are made.
"""

from __future__ import annotations

import copy
import queue
import threading
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING, Any, cast

import torch
from torch import Tensor
from transformers import GenerationConfig, LogitsProcessorList, StoppingCriteriaList, StopStringCriteria
from transformers.generation.utils import GenerateDecoderOnlyOutput

from local_backend.drafting import Drafter, drafter_of
from local_backend.engine.engine import Engine
from local_backend.sequences.outputs import Update
from local_backend.sequences.request import References
from local_backend.sequences.sequence import Row
from local_backend.transformers.generate_call import GenerateCall

if TYPE_CHECKING:
    from transformers import PreTrainedModel, PreTrainedTokenizerBase
    from transformers.generation.streamers import BaseStreamer

Texts = Sequence[str] | References | None

_FILE = '''"""Lets `generate` of this model decode in parallel; written by `local_backend`."""

try:
    from local_backend.transformers.generate import generate as parallel_generate
except ImportError as error:
    raise ImportError("this model decodes with: pip install '.[local]' in a checkout") from error


def generate(model, *arguments, **options):
    return parallel_generate(model, *arguments, **{{"drafter": {drafter!r}, **options}})
'''


class ParallelDecoding:
    """A decoding loop for ``model.generate(..., custom_generate=ParallelDecoding())``.

    Greedy tokens are those of ``generate`` itself, sampled ones have the same distribution; sampling uses
    other random numbers, which follow ``torch.manual_seed``. A row ends at the model's last position at the
    latest. ``generate`` then also takes ``references=``: for each prompt, texts the answer may copy from.

    ``generate`` passes neither its ``streamer`` nor its ``tokenizer`` (for stop strings) to a callable;
    :func:`generate` does.

    Args:
        drafter: A drafter's name or a drafter.
        tokenizer: Encodes the references; only needed with them.
    """

    def __init__(
        self, drafter: str | Drafter = "combined", *, tokenizer: PreTrainedTokenizerBase | None = None
    ) -> None:
        self.drafter = drafter
        self.tokenizer = tokenizer
        self._engine: Engine | None = None
        self._num_calls = 0
        self._lock = threading.Lock()

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
        synced_gpus: bool = False,
        **model_kwargs: Any,
    ) -> Tensor | GenerateDecoderOnlyOutput:
        """Called by ``generate`` with what it has prepared.

        Args:
            model: The model to decode with.
            input_ids: Prompts, padded on the left, ``[rows, tokens]``.
            logits_processor: Applied at every drafted position.
            stopping_criteria: Checked after every token, row by row.
            generation_config: Determines sampling, the pad token and the kind of result.
            references: For each prompt, texts the answer may copy from.
            streamer: Receives the prompt and every token.
            synced_gpus: Not supported.
            model_kwargs: The attention mask, and arguments that the engine replaces with its own.

        Returns:
            Token ids ``[rows, tokens]``, or the output object with them as ``sequences``.

        Raises:
            ValueError: The call needs something that cannot be done with drafts in a batch.
        """
        if synced_gpus:
            raise ValueError("parallel decoding runs on one process: synced_gpus is not supported")
        if streamer is not None and len(input_ids) > 1:
            raise ValueError(f"a streamer takes one prompt at a time, got {len(input_ids)}")
        call = GenerateCall.of(
            input_ids, logits_processor, stopping_criteria, generation_config, model_kwargs
        )
        with self._engine_of(model) as engine:
            answers = self._decode(engine, call, references, streamer)
        sequences = call.sequences(answers)
        if generation_config.return_dict_in_generate:
            return GenerateDecoderOnlyOutput(sequences=cast("Any", sequences))
        return sequences

    def close(self) -> None:
        """Close the engine; the next call makes another."""
        with self._lock:
            engine, self._engine = self._engine, None
        if engine is not None:
            engine.close()

    def __getstate__(self) -> dict[str, Any]:
        return {"drafter": self.drafter, "tokenizer": self.tokenizer}

    def __setstate__(self, state: dict[str, Any]) -> None:
        # A copy, e.g. with a copy of the model, makes its own engine.
        self.drafter, self.tokenizer = state["drafter"], state["tokenizer"]
        self._engine, self._num_calls, self._lock = None, 0, threading.Lock()

    @contextmanager
    def _engine_of(self, model: PreTrainedModel) -> Iterator[Engine]:
        """The engine for a call; the last call to end drops its caches, as weights may change."""
        was_training = model.training
        with self._lock:
            if self._engine is None or self._engine.model is not model:
                if self._engine is not None:
                    self._engine.close()
                self._engine = Engine(
                    model,
                    self.tokenizer if self.tokenizer is not None else cast("Any", _NoText()),
                    self.drafter,
                    use_generation_config=False,  # `generate` passes what applies to this call
                )
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

    def _decode(
        self,
        engine: Engine,
        call: GenerateCall,
        references: Sequence[Texts] | None,
        streamer: BaseStreamer | None,
    ) -> list[list[int]]:
        """The tokens of each row, up to where a stopping criterion holds."""
        num_rows = len(call.input_ids)
        if references is not None and (not len(references) or num_rows % len(references)):
            raise ValueError(f"{len(references)} references for {num_rows} rows: give one for each prompt")
        arrivals: queue.SimpleQueue[tuple[int, Update]] = queue.SimpleQueue()

        def row(number: int) -> Row:
            return engine.make_row(
                call.prompt(number),
                lambda update: arrivals.put((number, update)),
                params=call.params(number),
                min_interval_seconds=0.0,
                references=references[number * len(references) // num_rows] if references else None,
            )

        if streamer is not None:
            streamer.put(call.input_ids.cpu())
        rows = [row(number) for number in range(num_rows)]
        answers: list[list[int]] = [[] for _ in rows]
        running = set(range(num_rows))
        try:
            engine.submit(rows)
            while running:
                number, update = arrivals.get()
                if number not in running:
                    continue  # an update of a row that a criterion has ended
                if update.error is not None:
                    raise update.error
                ended = update.is_last
                for token in update.token_ids:
                    answers[number].append(token)
                    if streamer is not None:
                        streamer.put(torch.tensor([token]))
                    if call.stops(number, answers[number]):
                        ended = True
                        break
                if ended:
                    running.discard(number)
                    engine.cancel([rows[number]])
        finally:
            engine.cancel(rows)
        if streamer is not None:
            streamer.end()
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

    Args:
        model: The model to decode with. It keeps the engine for later calls.
        inputs: As for ``model.generate``, like all others but ``drafter`` and ``references``.
        drafter: A drafter's name or a drafter.
        references: For each prompt, texts the answer may copy from; they need ``tokenizer``.
        tokenizer: Encodes stop strings and references.
        streamer: Receives the prompt and every token.
        stopping_criteria: Checked after every token, row by row.
        generation_config: Settings that the call does not give.
        options: Further arguments of ``model.generate``.

    Returns:
        What ``model.generate`` returns.

    Raises:
        ValueError: The call needs something that cannot be done with drafts in a batch.
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
            raise ValueError(
                "stop strings need the tokenizer: generate(..., stop_strings=..., tokenizer=...)"
            )
        criteria.append(StopStringCriteria(tokenizer, stop_strings))
        # Now handled: `generate` would look for a tokenizer, which it does not have with a callable.
        if generation_config is None or own_config.stop_strings:
            options["stop_strings"] = None
        if generation_config is not None:
            generation_config = copy.deepcopy(generation_config)
            generation_config.stop_strings = None
    # The class's method, because the instance's may be this function.
    method: Callable[..., Any] = cast("Any", type(model)).generate
    return method(
        model,
        inputs,
        generation_config=generation_config,
        stopping_criteria=criteria,
        custom_generate=partial(decoding, streamer=streamer, references=references),
        **{name: value for name, value in options.items() if name != "custom_generate"},
    )


def write_custom_generate(model_dir: str | Path, *, drafter: str = "combined") -> Path:
    """Make a model directory decode with our engine when it is loaded with ``trust_remote_code``.

    The folder is read by ``AutoModelForCausalLM.from_pretrained(model_dir, trust_remote_code=True)``, by
    ``transformers serve model_dir --trust-remote-code`` and by ``generate(custom_generate=model_dir,
    trust_remote_code=True)``.

    Args:
        model_dir: The folder of a model's weights.
        drafter: The drafter's name.

    Returns:
        The file written, ``custom_generate/generate.py``.

    Raises:
        FileNotFoundError: There is no model in ``model_dir``.
        ValueError: No drafter has that name.
    """
    drafter_of(drafter)
    if not (Path(model_dir) / "config.json").exists():
        raise FileNotFoundError(f"there is no model in {model_dir}: it holds no config.json")
    path = Path(model_dir) / "custom_generate" / "generate.py"
    path.parent.mkdir(exist_ok=True)
    path.write_text(_FILE.format(drafter=drafter), "utf-8")
    return path


class _NoText:
    """Stands in for a tokenizer when only token ids are needed."""

    def decode(self, token_ids: Sequence[int], **_: Any) -> str:
        return ""

    def encode(self, text: str, **_: Any) -> list[int]:
        raise ValueError("references are texts, which need the tokenizer: ParallelDecoding(tokenizer=...)")
