"""Tokens per second of batching methods on answers of different lengths.

All methods get the same prompts, limits and model, in float32, greedy, in alternating rounds, sixteen rows at
a time:

- ``vanilla``: ``transformers``' ``generate`` on padded batches in order of arrival;
- ``generate_batch``: its continuous batching, through the manager behind ``generate_batch`` so that every row
  has its own limit; pages for all rows at their longest, no block sharing among these short prompts, as its
  documentation advises; set up before timing starts;
- ``static``: sequence scheduling (Zheng et al., arXiv 2305.13144), micro-batches by predicted length;
- ``slots_first_come``, ``slots_predicted``: the engine, whose slots refill as rows finish, in order of
  arrival and longest predicted first; ``slots_combined``: the latter with the ``combined`` drafter.

There are two models: a pretrained one (``--model``) that answers questions in at most 96 tokens, and a Llama
of about 100 M random parameters. The answers of the latter (after short prompts) are a quarter as long as
Vicuna's, or as lengths drawn from a log-normal distribution if that data is missing. A predicted length is
the actual one times a random error, which the output states; ``benchmarks.length_prediction`` measures how
well lengths can be predicted.
"""

from __future__ import annotations

import argparse
import copy
import math
import random
import statistics
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING, Any, cast

import torch
from rich.console import Console
from rich.progress import Progress
from rich.table import Table
from transformers import GenerationConfig
from transformers.generation.configuration_utils import ContinuousBatchingConfig

from benchmarks.copy_workloads import random_llama
from benchmarks.paper_scheduling.static import StaticOptions
from benchmarks.paper_scheduling.static_run import run_static as run_static_batches
from benchmarks.peers import aside
from benchmarks.results import add_save_argument, report
from benchmarks.workloads import add_model_argument, questions
from local_backend import ChatLocal, Completion, Engine, SamplingParams
from local_backend.drafting import Drafter
from local_backend.langchain.chat_format import chat_prompt
from local_backend.models.loading import load
from local_backend.offline.jsonl import read_lines
from local_backend.scheduling.lengths import AdmissionPolicy, Prediction, Scheduling

if TYPE_CHECKING:
    from transformers import PreTrainedModel, PreTrainedTokenizerBase

_LENGTHS = Path(__file__).parents[2] / "shared" / "data" / "lengths" / "vicuna7b_alpaca_dev.jsonl"
_ERROR = 0.3  # standard deviation of the logarithm of predicted over actual lengths
_MAX_QUANTILE_DEVIATIONS = 1.2816  # nine of ten values of a normal distribution lie below
_PAGE_TOKENS = 32
_PRETRAINED_TOKENS = 96
_SEED = 0


@dataclass(frozen=True)
class Work:
    """The prompts to answer, and the model to answer them with.

    ``model`` is for ``transformers``, which changes its attention; the engine has its own copy.
    """

    model: PreTrainedModel
    engine_model: PreTrainedModel
    tokenizer: PreTrainedTokenizerBase
    prompts: list[list[int]]
    limits: list[int]  # maximum tokens of each answer
    ends: bool  # whether the end token ends an answer; otherwise it is as long as its limit
    rows: int  # of a forward, at most

    @property
    def end_token_id(self) -> int | None:
        """The token that ends an answer before its limit, if any."""
        return cast("int", self.tokenizer.eos_token_id) if self.ends else None

    def params(self) -> list[SamplingParams]:
        """The limits as sampling parameters."""
        return [SamplingParams(max_tokens=limit, ignore_end=not self.ends) for limit in self.limits]


@dataclass(frozen=True)
class Run:
    """The result of one batching method.

    ``num_forwards`` are those of the engine, prefill included; ``None`` for other methods.
    """

    answers: tuple[tuple[int, ...], ...]
    seconds: float
    num_forwards: int | None = None

    @property
    def tokens_per_second(self) -> float:
        """Answer tokens per second; padding does not count."""
        return sum(map(len, self.answers)) / self.seconds


class Told:
    """A predictor that knows the actual lengths up to a random error."""

    def __init__(self, prompts: Sequence[Sequence[int]], lengths: Sequence[int]) -> None:
        rng = random.Random(_SEED)
        self._predictions = {}
        for prompt, length in zip(prompts, lengths, strict=True):
            expected = length * rng.lognormvariate(0, _ERROR)
            most = expected * math.exp(_MAX_QUANTILE_DEVIATIONS * _ERROR)
            self._predictions[tuple(prompt)] = Prediction(expected, most)

    def predict(
        self, prompts: Sequence[Sequence[int]], params: Sequence[SamplingParams] | None = None
    ) -> list[Prediction | None]:
        """The stored prediction of each prompt."""
        return [self._predictions.get(tuple(prompt)) for prompt in prompts]


def run_vanilla(work: Work) -> Run:
    """Padded batches in order of arrival, each as long as its longest answer."""
    pad = cast("int", work.tokenizer.pad_token_id)

    def generate() -> tuple[list[tuple[int, ...]], float]:
        answers: list[tuple[int, ...]] = []
        seconds = 0.0
        for first in range(0, len(work.prompts), work.rows):
            prompts, limits = work.prompts[first : first + work.rows], work.limits[first : first + work.rows]
            width = max(map(len, prompts))
            ids = torch.tensor([[pad] * (width - len(prompt)) + prompt for prompt in prompts])
            mask = torch.tensor([[0] * (width - len(prompt)) + [1] * len(prompt) for prompt in prompts])
            started = time.perf_counter()
            with torch.inference_mode():
                output = cast("Any", work.model).generate(
                    input_ids=ids,
                    attention_mask=mask,
                    do_sample=False,
                    max_new_tokens=max(limits),
                    pad_token_id=pad,
                    eos_token_id=work.end_token_id,
                )
            seconds += time.perf_counter() - started
            lines = output[:, width:].tolist()
            answers += [_until_end(line[:limit], work) for line, limit in zip(lines, limits, strict=True)]
        return answers, seconds

    answers, seconds = aside(generate)
    return Run(tuple(answers), seconds)


def run_generate_batch(work: Work) -> Run:
    """``transformers``' continuous batching."""
    longest = max(len(prompt) + limit for prompt, limit in zip(work.prompts, work.limits, strict=True))
    limits = ContinuousBatchingConfig(
        page_size=_PAGE_TOKENS,
        num_blocks=work.rows * -(-longest // _PAGE_TOKENS) + work.rows,
        max_batch_tokens=max(256, *map(len, work.prompts)),
        max_requests_per_batch=work.rows,
        allow_block_sharing=False,
    )
    config = GenerationConfig(
        do_sample=False,
        max_new_tokens=max(work.limits),
        eos_token_id=-1 if work.end_token_id is None else work.end_token_id,
        pad_token_id=work.tokenizer.pad_token_id,
    )

    def generate() -> tuple[dict[str, list[int]], float]:
        model = cast("Any", work.model)
        found: dict[str, list[int]] = {}
        with model.continuous_batching_context_manager(
            generation_config=config, continuous_batching_config=limits, block=True, timeout=5
        ) as manager:
            started = time.perf_counter()
            for number, (prompt, limit) in enumerate(zip(work.prompts, work.limits, strict=True)):
                manager.add_request(prompt, request_id=str(number), max_new_tokens=limit)
            while len(found) < len(work.prompts):
                result = manager.get_result(timeout=1)
                if result is None and not manager.is_running():
                    raise RuntimeError("continuous batching ended before its requests")
                if result is not None and result.is_finished():
                    if result.error is not None:
                        raise RuntimeError(f"continuous batching failed on a row: {result.error}")
                    found[result.request_id] = list(result.generated_tokens)
            return found, time.perf_counter() - started

    found, seconds = aside(generate)
    return Run(tuple(_until_end(found[str(number)], work) for number in range(len(work.prompts))), seconds)


def run_slots(
    work: Work,
    policy: AdmissionPolicy = "first_come",
    predictor: Told | None = None,
    drafter: str | Drafter = "autoregressive",
) -> Run:
    """The engine, whose slots refill as rows finish."""
    with _engine(work, Scheduling(policy, predictor), drafter, max_rows=work.rows) as engine:
        return _timed(engine, lambda: engine.generate(work.prompts, work.params()))


def run_static(work: Work, predictor: Told) -> Run:
    """Micro-batches by predicted length, with all parts of the method."""
    options = StaticOptions(
        batch_rows=work.rows, max_tokens=max(work.limits), bin_tokens=max(1, max(work.limits) // 10)
    )
    predictions = predictor.predict(work.prompts)
    with _engine(work, Scheduling(), "autoregressive", max_rows=options.max_rows) as engine:
        return _timed(
            engine, lambda: run_static_batches(engine, work.prompts, work.params(), predictions, options)
        )


def _timed(engine: Engine, generate: Callable[[], Sequence[Completion]]) -> Run:
    started = time.perf_counter()
    completions = generate()
    seconds = time.perf_counter() - started
    answers = tuple(tuple(completion.token_ids) for completion in completions)
    return Run(answers, seconds, engine.stats.num_forwards + engine.stats.num_prefill_forwards)


def _engine(work: Work, scheduling: Scheduling, drafter: str | Drafter, *, max_rows: int) -> Engine:
    options: dict[str, Any] = {"max_rows": max_rows, "max_prefix_bytes": 0, "scheduling": scheduling}
    engine = aside(partial(Engine, work.engine_model, work.tokenizer, drafter, **options))
    if drafter != "autoregressive":
        aside(lambda: engine.width_costs)  # measured once per model, before timing starts
    return engine


def _until_end(answer: Sequence[int], work: Work) -> tuple[int, ...]:
    ids, end = tuple(answer), work.end_token_id
    return ids[: ids.index(end) + 1] if end is not None and end in ids else ids


def pretrained_work(model_name: str | None, num_rows: int, batch_rows: int) -> Work:
    """Questions to a pretrained model in float32, which ends its answers itself or is cut off."""
    with aside(lambda: ChatLocal.from_pretrained(model_name, dtype="float32")) as chat:
        tokenizer, model = chat.engine.tokenizer, chat.engine.model
    found = questions()
    turns = [[{"role": "user", "content": found[number % len(found)]}] for number in range(num_rows)]
    prompts = [chat_prompt(tokenizer, each)[0] for each in turns]
    limits = [_PRETRAINED_TOKENS] * num_rows
    return Work(_sdpa_copy(model), model, tokenizer, prompts, limits, ends=True, rows=batch_rows)


def random_work(shape: str, num_rows: int, batch_rows: int) -> Work:
    """A model with random weights, whose answers are exactly as long as their limits."""
    _, tokenizer = aside(load)
    rng = random.Random(_SEED)
    model = aside(lambda: cast("Any", random_llama(shape, 8192, "cpu")).float())
    prompts = [[rng.randrange(10, 8192) for _ in range(rng.randrange(4, 16))] for _ in range(num_rows)]
    limits = [max(1, min(512, length) // 4) for length in _answer_lengths(num_rows, rng)]
    return Work(_sdpa_copy(model), model, tokenizer, prompts, limits, ends=False, rows=batch_rows)


def _answer_lengths(count: int, rng: random.Random) -> list[int]:
    if _LENGTHS.exists():
        lengths = [line.record()["t0.7"] for line in read_lines(_LENGTHS)]
        return [int(length) for length in rng.choices(lengths, k=count)]
    return [round(rng.lognormvariate(4.7, 0.9)) for _ in range(count)]


def _sdpa_copy(model: PreTrainedModel) -> PreTrainedModel:
    copied: PreTrainedModel = copy.deepcopy(cast("Any", model))
    copied.set_attn_implementation("sdpa")
    return copied


def measure(work: Work, repeats: int, progress: Progress, label: str) -> dict[str, Any]:
    """Medians and ratios of ``repeats`` alternating runs, and how many answers differ from the engine's."""
    first = run_slots(work)  # warms up the engine's model and gives the answer lengths
    told = Told(work.prompts, [len(answer) for answer in first.answers])
    ways: dict[str, Callable[[], Run]] = {
        "vanilla": lambda: run_vanilla(work),
        "generate_batch": lambda: run_generate_batch(work),
        "static": lambda: run_static(work, told),
        "slots_first_come": lambda: run_slots(work),
        "slots_predicted": lambda: run_slots(work, "longest_first", told),
        "slots_combined": lambda: run_slots(work, "longest_first", told, "combined"),
    }
    runs: dict[str, list[Run]] = {name: [] for name in ways}
    for _ in progress.track(range(repeats), description=label):
        for name, way in ways.items():
            runs[name].append(way())
    speed = {name: statistics.median(run.tokens_per_second for run in each) for name, each in runs.items()}
    lengths = [len(answer) for answer in first.answers]
    return {
        "rows": len(work.prompts),
        "tokens": sum(lengths),
        "shortest_answer": min(lengths),
        "longest_answer": max(lengths),
        "tokens_per_second": _rounded(speed),
        "over_vanilla": _rounded({name: one / speed["vanilla"] for name, one in speed.items()}),
        "over_generate_batch": _rounded({name: one / speed["generate_batch"] for name, one in speed.items()}),
        "predicted_over_first_come": round(
            statistics.median(
                one.tokens_per_second / other.tokens_per_second
                for one, other in zip(runs["slots_predicted"], runs["slots_first_come"], strict=True)
            ),
            4,
        ),
        "engine_forwards": {
            name: each[0].num_forwards for name, each in runs.items() if each[0].num_forwards is not None
        },
        "answers_that_differ": {
            name: sum(
                one != other for run in each for one, other in zip(run.answers, first.answers, strict=True)
            )
            for name, each in runs.items()
        },
    }


def _rounded(values: dict[str, float]) -> dict[str, float]:
    return {name: round(value, 3) for name, value in values.items()}


def main(arguments: Sequence[str] | None = None) -> None:
    parser = argparse.ArgumentParser(prog="python -m benchmarks.batch_throughput", description=__doc__)
    add_model_argument(parser)
    parser.add_argument("--rows", type=int, default=48, help="answers per model (%(default)s)")
    parser.add_argument("--batch", type=int, default=16, help="maximum rows of a forward (%(default)s)")
    parser.add_argument("--repeats", type=int, default=2, help="rounds (%(default)s)")
    parser.add_argument("--shape", default="100m", help="shape of the random model (%(default)s)")
    parser.add_argument(
        "--models", nargs="+", default=["pretrained", "random"], choices=["pretrained", "random"]
    )
    add_save_argument(parser)
    options = parser.parse_args(arguments)
    results: dict[str, Any] = {
        "predictions": f"actual lengths times a log-normal error of {_ERROR}, not those of a predictor"
    }
    works = {
        "pretrained": partial(pretrained_work, options.model),
        "random": partial(random_work, options.shape),
    }
    with Progress(console=Console(stderr=True)) as progress:
        for kind in options.models:
            label = options.shape if kind == "random" else kind
            work = works[kind](options.rows, options.batch)
            results[label] = measure(work, options.repeats, progress, label)
    table = Table("model", "method", "tokens/s", "over vanilla", "over generate_batch", "answers that differ")
    for label, figures in results.items():
        if isinstance(figures, dict):
            for name, speed in figures["tokens_per_second"].items():
                ratios = (f"{figures[key][name]:.2f}" for key in ("over_vanilla", "over_generate_batch"))
                table.add_row(label, name, f"{speed:.1f}", *ratios, str(figures["answers_that_differ"][name]))
    report("batch_throughput", table, results, keep=options.save)


if __name__ == "__main__":
    main()
