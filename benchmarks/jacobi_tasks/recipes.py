"""How each task's models are trained: sizes and steps, and the function that trains them.

Knows tasks, plain models and tuning. The sizes train on two CPU cores in minutes.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass, field, replace
from itertools import islice
from pathlib import Path
from typing import TYPE_CHECKING, Any

from transformers import AutoModelForCausalLM, AutoTokenizer

from benchmarks.jacobi_tasks.base import Case, Task, draw_cases
from benchmarks.jacobi_tasks.plain import PlainOptions, train_plain
from local_backend.engine.engine import Engine
from local_backend.sequences.outputs import Completion
from local_backend.sequences.sampling import SamplingParams
from local_backend.training import CollectOptions, NoiseOptions, Report, TuneOptions, tune
from local_backend.training.evaluation import Quality
from local_backend.training.trainer import Measure

if TYPE_CHECKING:
    from transformers import PreTrainedModel, PreTrainedTokenizerBase

_NUM_MEASURED = 100
_TUNING_SEED = 1  # cases the plain model was not trained on


_TUNING = TuneOptions(
    num_steps=1000,
    batch_size=16,
    rows_per_forward=16,
    learning_rate=2e-3,
    ar_weight=1.0,
    learns_unfinished=False,
    most_perplexity=math.inf,  # these models are to learn right answers, not to stay what they are
    num_evaluations=1,
    collect=CollectOptions(160),
)


@dataclass(frozen=True)
class Recipe:
    """How the models of a task are trained.

    Attributes:
        plain, draft: Shape and training of the plain model and of the smaller draft model.
        tuning: How the plain model is tuned.
        num_prompts: Prompts it is tuned on.
        num_examples: Further cases it learns from directly, whose tokens are its teacher.
        only_right: Whether it learns from correct answers only.
    """

    plain: PlainOptions = field(default_factory=PlainOptions)
    draft: PlainOptions = field(
        default_factory=lambda: PlainOptions(hidden_size=64, num_layers=2, num_heads=2, num_steps=800)
    )
    tuning: TuneOptions = _TUNING
    num_prompts: int = 1200
    num_examples: int = 8000
    only_right: bool = True


RECIPES: dict[str, Recipe] = {
    # With longer training in float32 a plain model is correct in more than 95 of 100 cases, so a loss would
    # not show; the same holds for word problems.
    "text_to_sql": Recipe(
        plain=PlainOptions(num_steps=1000, num_cases=20_000), tuning=replace(_TUNING, num_steps=1400)
    ),
    # Turning words into code is learned sooner than looking up names; with much longer training the plain
    # model is nearly always correct, so a loss would not show.
    "python": Recipe(
        plain=PlainOptions(num_steps=600, num_cases=24_000, vocabulary_size=640, learning_rate=3e-3)
    ),
    "word_problems": Recipe(
        plain=PlainOptions(num_steps=1200, num_cases=24_000, vocabulary_size=640, learning_rate=3e-3),
        tuning=replace(_TUNING, num_steps=700),
        num_prompts=700,
    ),
}


# Everything in half a minute, to try things out: it learns the form of the answers and little more.
TOY = Recipe(
    plain=PlainOptions(
        hidden_size=64,
        num_layers=3,
        vocabulary_size=480,
        num_cases=3000,
        num_steps=180,
        learning_rate=5e-3,
        learned_prompts=0.0,
    ),
    tuning=TuneOptions(
        num_steps=160,
        batch_size=16,
        rows_per_forward=16,
        learning_rate=3e-3,
        ar_weight=1.0,
        most_perplexity=math.inf,
        num_held_out=12,
        noise=NoiseOptions(block_size=12, num_streams=4),
        collect=CollectOptions(80),
    ),
    num_prompts=100,
    num_examples=1000,
    only_right=False,
)


def train_task(
    task: Task,
    folder: Path,
    recipe: Recipe | None = None,
    *,
    stages: Sequence[str] = ("plain", "draft", "tuned"),
) -> Report | None:
    """Train models in ``folder/plain``, ``folder/draft`` and ``folder/tuned``; resumes after an interruption.

    Args:
        task: The task.
        folder: Output folder.
        recipe: How they are trained; by default the task's own recipe.
        stages: Stages to run; finished ones are left as they are.

    Returns:
        The report of tuning, or ``None`` without that stage.
    """
    recipe = recipe or RECIPES[task.name]
    max_tokens = recipe.tuning.collect.max_tokens
    if "plain" in stages and not (folder / "plain" / "config.json").exists():
        train_plain(task, folder / "plain", recipe.plain, measure=_measure(task, folder, max_tokens))
    tokenizer: Any = AutoTokenizer.from_pretrained(folder / "plain")
    if "draft" in stages and not (folder / "draft" / "config.json").exists():
        train_plain(task, folder / "draft", recipe.draft, tokenizer=tokenizer)
    if "tuned" not in stages:
        return None
    drawn = draw_cases(task, "train", seed=_TUNING_SEED)
    cases = list(islice(drawn, recipe.num_prompts))
    examples = [{"prompt": case.prompt, "answer": case.answer} for case in islice(drawn, recipe.num_examples)]
    token_ids = [tokenizer.encode(case.prompt, add_special_tokens=False) for case in cases]
    case_of = {tuple(ids): case for ids, case in zip(token_ids, cases, strict=True)}

    def quality(held_out: Sequence[Sequence[int]]) -> Quality:
        return judge_of(task, [case_of[tuple(ids)] for ids in held_out])

    def accept(prompts: Sequence[Sequence[int]], texts: Sequence[str]) -> list[bool]:
        """Correct answers only: wrong ones are not worth speeding up."""
        return task.score([case_of[tuple(ids)] for ids in prompts], texts)

    return tune(
        folder / "plain",
        [{"prompt_ids": ids} for ids in token_ids],
        folder / "tuned",
        recipe.tuning,
        examples=examples or None,
        quality=quality,
        accept=accept if recipe.only_right else None,
    )


def judge_of(task: Task, cases: Sequence[Case]) -> Quality:
    """A function that gives the share of correct answers to ``cases``."""

    def judge(completions: Sequence[Completion]) -> float:
        right = task.score(cases, [completion.text for completion in completions])
        return sum(right) / len(right)

    return judge


def score_model(task: Task, path: Path, num_cases: int, *, max_tokens: int = 256) -> float:
    """The share of held-out cases that a model answers correctly."""
    tokenizer = AutoTokenizer.from_pretrained(path)
    model = AutoModelForCausalLM.from_pretrained(path)
    cases = list(islice(draw_cases(task, "test"), num_cases))
    return _score(task, cases, model, tokenizer, max_tokens)


def _score(
    task: Task,
    cases: Sequence[Case],
    model: PreTrainedModel,
    tokenizer: PreTrainedTokenizerBase,
    max_tokens: int,
) -> float:
    prompts = [tokenizer.encode(case.prompt, add_special_tokens=False) for case in cases]
    with Engine(model, tokenizer) as engine:
        completions = engine.generate(prompts, SamplingParams(max_tokens=max_tokens))
    return judge_of(task, cases)(completions)


def _measure(task: Task, folder: Path, max_tokens: int) -> Measure:
    """Quality on held-out cases, with the tokenizer that training writes first."""
    cases = list(islice(draw_cases(task, "test", seed=_TUNING_SEED), _NUM_MEASURED))

    def measure(model: PreTrainedModel) -> dict[str, float]:
        tokenizer = AutoTokenizer.from_pretrained(folder / "plain")
        return {"quality": _score(task, cases, model, tokenizer, max_tokens)}

    return measure
