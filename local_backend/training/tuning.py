"""From prompts to a tuned model: the plain model's answers and predictions, training, measuring; resumable.

Knows the stages and their order.
"""

from __future__ import annotations

import json
import math
import os
import random
import time
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any, cast

import torch

from local_backend.offline.prompt_file import read_examples, read_prompts
from local_backend.training.answers import KEPT, Accept, collect_answers, stored_answers
from local_backend.training.checkpoints import claim, digest, fingerprint, write_model, write_whole
from local_backend.training.evaluation import Evaluation, Exam, Likeness, MakeQuality, describe
from local_backend.training.options import (
    WITHOUT_EFFECT,
    TuneOptions,
    load_for_training,
    stored_dtype,
    trainable,
)
from local_backend.training.packing import PackedForward, Text, Texts
from local_backend.training.trainer import Teacher, Training, answer_tokens, plain_predictions

if TYPE_CHECKING:
    from transformers import PreTrainedModel, PreTrainedTokenizerBase

Prompts = list[list[int]]  # token ids
Records = str | Path | Iterable[Mapping[str, Any]]


@dataclass(frozen=True)
class Report:
    """Results of tuning, on held-out prompts.

    Attributes:
        before, after: Speed and quality of the plain and of the tuned model.
        plain, tuned: How near the answers of each are to the plain model's; for the plain model that is its
            answers by Jacobi decoding, which rounding alone can change.
        history: Records of ``step``, ``tokens_per_forward``, ``quality`` and ``perplexity``, the last over
            the plain model's.
        kept_step: Which of them was kept: the fastest whose perplexity is within the bound.
        counts: How many answers were kept and left out.
        is_complete: Whether all steps were taken; ``False`` if the time was up before.
    """

    before: Evaluation
    after: Evaluation
    plain: Likeness
    tuned: Likeness
    history: Sequence[Mapping[str, float]]
    kept_step: int
    counts: Mapping[str, int]
    is_complete: bool = True

    def as_dict(self) -> dict[str, Any]:
        """The report as it is written to ``report.json``."""
        report = asdict(self)
        del report["before"]["answers"], report["after"]["answers"]
        return report

    def traded(self) -> str:
        """What was gained and what was given for it, in one line."""
        before, after = self.before, self.after
        return (
            f"kept step {self.kept_step}: {before.tokens_per_forward:.2f} -> {after.tokens_per_forward:.2f} "
            f"tokens per forward, perplexity of the plain answers {self.plain.perplexity:.4f} -> "
            f"{self.tuned.perplexity:.4f} ({self.tuned.perplexity / self.plain.perplexity - 1:+.1%}), "
            f"{self.tuned.same_answers:.0%} of the answers the same, quality {before.quality:.3f} -> "
            f"{after.quality:.3f}"
        )


def tune(
    model_path: str | Path,
    prompts: Records,
    output: Path,
    options: TuneOptions | None = None,
    *,
    limit: int | None = None,
    held_out: Records | None = None,
    examples: Records | None = None,
    quality: MakeQuality | None = None,
    accept: Accept | None = None,
    template: str | None = None,
    device: str = "auto",
    tell: Callable[[str], None] = print,
) -> Report:
    """Tune a causal language model for Jacobi decoding on its own answers; resumes what it began.

    Args:
        model_path: Folder, or name on the model hub, of the model; ``"default"`` is the default model.
        prompts: See :func:`~local_backend.offline.prompt_file.read_prompts`.
        output: Folder of the model, which keeps the stored dtype; work in progress is in ``output/work``.
        options: How it is tuned.
        limit: Use only this many first prompts.
        held_out: Prompts to measure on; by default some of ``prompts``, which are not trained on then.
        examples: Prompts with right answers to learn from, too; see ``read_examples``.
        quality: Given held-out prompts, returns a measure of answers; by default, the share of equal ones.
        accept: Which answers are worth learning from.
        template: A user's message with fields of the prompts' records, see ``read_prompts``.
        device: Where it computes; by default on a GPU if there is one.
        tell: Called with messages about progress and results.

    Raises:
        ValueError: An argument or the work in progress is invalid; checked before any computation.
        TimeoutError: The time was up before training began; what was collected is kept.
    """
    path, output, options = os.path.expanduser(model_path), output.expanduser(), options or TuneOptions()
    deadline = time.monotonic() + 3600 * (options.max_hours or math.inf)
    if output.resolve() == Path(path).resolve():
        raise ValueError(f"{output} holds the model that is to be tuned: give another output folder")
    model, tokenizer = load_for_training(path, device)
    limits = {**prompt_limits(model), "template": template, "max_tokens": options.collect.max_tokens}
    token_ids = read_prompts(prompts, tokenizer, limit=limit, **limits)
    if held_out is None:
        learned, measured = split_held_out(token_ids, options)
    else:
        learned = token_ids
        measured = read_prompts(held_out, tokenizer, limit=options.num_held_out, **limits)
    right = [] if examples is None else read_examples(examples, tokenizer, **prompt_limits(model))
    wanted = {
        "model": fingerprint(model, tokenizer),
        "prompts": digest([*learned, None, *measured]),
        "examples": digest(right),
        "options": asdict(options),
    }
    claim(output / "work" / "tuning.json", wanted, may_differ=WITHOUT_EFFECT)
    exam = Exam(model, tokenizer, measured, options, quality)
    report = _tune(path, output, model, tokenizer, learned, right, exam, options, accept, deadline, tell)
    write_whole(output / "report.json", json.dumps(report.as_dict(), indent=1) + "\n")
    return report


def _tune(
    path: str,
    output: Path,
    model: PreTrainedModel,
    tokenizer: PreTrainedTokenizerBase,
    learned: Prompts,
    right: Sequence[Text],
    exam: Exam,
    options: TuneOptions,
    accept: Accept | None,
    deadline: float,
    tell: Callable[[str], None],
) -> Report:
    """Measure, collect, train, measure again, with arguments that have been checked."""
    work, measuring = output / "work", time.monotonic()
    before, plain = exam.grade(model)
    tell(f"plain: {describe(before, plain)}")
    deadline -= time.monotonic() - measuring  # measuring the tuned model takes about as long
    folder = work / "answers"
    counts = collect_answers(
        model, tokenizer, learned, folder, options.collect, accept=accept, deadline=deadline
    )
    left_out = [f"{count} {fault}" for fault, count in counts.items() if fault != KEPT and count]
    tell(f"{counts[KEPT]} answers kept, left out: {', '.join(left_out) or 'none'}")
    stored = stored_answers(folder, model, tokenizer)
    kept = [one for one in stored if one.has_ended or options.learns_unfinished]
    texts = [*((one.prompt_ids, one.answer_ids) for one in kept), *right]
    trained, training = prepare(model, texts, options, work, tell=tell)
    is_complete = training.run(
        work, exam.measure, deadline=deadline, fastest=before.tokens_per_forward, tell=tell
    )
    if not is_complete:
        tell("the time was up: the same command trains the model further")
        training.keep_if_best(exam.measure(model), tell)
    training.write_best()
    if options.lora_rank:
        trained.save_pretrained(work / "adapter")
        model = trained.merge_and_unload()
    cast("Any", model).to(stored_dtype(path))
    write_model(model, tokenizer, output)
    after, tuned = exam.grade(model.float())  # rounded, as it will be used
    history = [{"step": 0, **before.logged(), "perplexity": 1.0}, *training.history]
    report = Report(before, after, plain, tuned, history, training.best_step, counts, is_complete)
    tell(f"tuned: {describe(after, tuned)}")
    tell(report.traded())
    return report


def prepare(
    model: PreTrainedModel,
    answers: Sequence[Text],
    options: TuneOptions,
    work: Path,
    *,
    tell: Callable[[str], None] = print,
) -> tuple[Any, Training]:
    """A model's training on its answers; with adapters if there is a rank, else on all its weights.

    The teacher is computed once, by the model as it is now, and kept in ``work``.
    """
    texts = Texts.of(answers, model.device)
    widths = [group.width + options.noise.block_size * options.noise.num_streams for group in texts.groups]
    tell(f"training: {options.num_steps} steps of {options.batch_size} x {max(widths)} tokens; {widths=}")
    teacher, path = answer_tokens(texts), work / "teacher.pt"
    if options.num_likely:
        if path.exists():
            teacher = cast("Teacher", torch.load(path, map_location=model.device))
        else:
            forward = PackedForward(model.eval())
            teacher = plain_predictions(forward, texts, options.num_likely, bf16=options.bf16)
            write_whole(path, teacher)
    trained = trainable(model, options)
    return trained, Training(trained, model, texts, teacher, options)


def prompt_limits(model: PreTrainedModel) -> dict[str, Any]:
    """What :func:`~local_backend.offline.prompt_file.read_prompts` checks prompts of a model against."""
    forward = PackedForward(model)  # raises if the model cannot be trained
    return {"max_positions": forward.max_positions, "vocabulary_size": forward.vocabulary_size}


def split_held_out(prompts: Sequence[list[int]], options: TuneOptions) -> tuple[Prompts, Prompts]:
    """Prompts to train on and held-out prompts, drawn at random; the same for the same seed.

    Raises:
        ValueError: There are too few to hold one out.
    """
    different = [list(prompt) for prompt in dict.fromkeys(map(tuple, prompts))]
    num_held_out = min(options.num_held_out, len(different) // 5)
    if not num_held_out:
        raise ValueError(
            f"there are {len(different)} different prompts, too few to hold some out for measuring: "
            "give at least 5"
        )
    random.Random(options.seed).shuffle(different)
    return different[num_held_out:], different[:num_held_out]
