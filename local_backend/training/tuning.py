"""From prompts to a tuned model: rounds of collecting, training and measuring, resumable at every point.

Knows the stages and their order. Each round decodes the prompts with the current model, so that it learns
from its own guesses (CLLM, arXiv 2403.00835).
"""

from __future__ import annotations

import json
import math
import os
import random
import time
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import asdict, dataclass, field
from pathlib import Path
from typing import TYPE_CHECKING, Any, cast

from torch.utils.data import ConcatDataset

from local_backend.offline.prompt_file import read_examples, read_prompts
from local_backend.sequences.outputs import Trajectory
from local_backend.training.checkpoints import claim, digest, fingerprint, has_model, write_model, write_whole
from local_backend.training.evaluation import Evaluation, Exam, Likeness, MakeQuality, describe
from local_backend.training.packing import PackedForward
from local_backend.training.rounds import (
    WITHOUT_EFFECT,
    TuneOptions,
    load_for_training,
    stored_dtype,
    train_round,
)
from local_backend.training.trajectories import Accept, collect_trajectories
from local_backend.training.trajectory_store import KEPT, StoredTrajectories

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
        history: Records of ``step``, ``tokens_per_forward`` and ``quality``.
        counts: For each round, how many trajectories were kept and left out.
        is_complete: Whether all rounds were trained; ``False`` if the time was up before.
    """

    before: Evaluation
    after: Evaluation
    plain: Likeness
    tuned: Likeness
    history: Sequence[Mapping[str, float]]
    counts: Sequence[Mapping[str, int]]
    is_complete: bool = True

    def as_dict(self) -> dict[str, Any]:
        """The report as it is written to ``report.json``."""
        return {**asdict(self), "before": self.before.as_dict(), "after": self.after.as_dict()}


def tune(
    model_path: str | Path,
    prompts: Records,
    output: Path,
    options: TuneOptions | None = None,
    *,
    limit: int | None = None,
    examples: Records | None = None,
    quality: MakeQuality | None = None,
    accept: Accept | None = None,
    template: str | None = None,
    device: str = "auto",
    tell: Callable[[str], None] = print,
) -> Report:
    """Tune a causal language model for consistency on its own trajectories; resumes what it began.

    Args:
        model_path: Folder, or name on the model hub, of the model; ``"default"`` is the default model.
        prompts: See :func:`~local_backend.offline.prompt_file.read_prompts`.
        output: Folder of the model, which keeps the stored dtype; work in progress is in ``output/work``.
        options: How it is tuned. More rounds may be added later.
        limit: Use only this many first prompts.
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
    model_path, output = os.path.expanduser(model_path), output.expanduser()
    options = options or TuneOptions()
    deadline = time.monotonic() + 3600 * (options.max_hours or math.inf)
    model, tokenizer, (train_prompts, held_out), references = _prepare(
        model_path, output, options, prompts, examples, limit=limit, template=template, device=device
    )
    exam = Exam(model, tokenizer, held_out, options.collect, quality)
    measuring = time.monotonic()
    before, plain = exam.grade(model)
    tell(f"plain: {describe(before, plain)}")
    deadline -= time.monotonic() - measuring  # measuring the tuned model takes about as long
    rounds = _Rounds(tokenizer, train_prompts, references, exam, options, accept, deadline, tell)
    model, is_complete = rounds.train(model, output / "work")

    cast("Any", model).to(stored_dtype(model_path))
    write_model(model, tokenizer, output)
    after, tuned = exam.grade(model.float())  # rounded, as it will be used
    tell(f"tuned: {describe(after, tuned)}")
    history = [{"step": 0, **before.logged()}, *rounds.history]
    report = Report(before, after, plain, tuned, history, rounds.counts, is_complete)
    write_whole(output / "report.json", json.dumps(report.as_dict(), indent=1) + "\n")
    return report


def _prepare(
    model_path: str | Path,
    output: Path,
    options: TuneOptions,
    prompts: Records,
    examples: Records | None,
    *,
    limit: int | None,
    template: str | None,
    device: str,
) -> tuple[PreTrainedModel, PreTrainedTokenizerBase, tuple[Prompts, Prompts], list[Trajectory]]:
    """Load the model, read prompts and examples; the folder must be new or hold this work."""
    if output.resolve() == Path(model_path).resolve():
        raise ValueError(f"{output} holds the model that is to be tuned: give another output folder")
    model, tokenizer = load_for_training(model_path, device)
    limits, max_tokens = prompt_limits(model), options.collect.max_tokens
    token_ids = read_prompts(
        prompts, tokenizer, **limits, max_tokens=max_tokens, limit=limit, template=template
    )
    prompts_apart = split_held_out(token_ids, options)
    references: list[Trajectory] = []
    if examples is not None:
        references = read_examples(examples, tokenizer, **limits)
    wanted = {
        "model": fingerprint(model, tokenizer),
        "prompts": digest(token_ids),
        "examples": digest(references),
        "options": asdict(options),
    }
    claim(output / "work" / "tuning.json", wanted, may_differ=WITHOUT_EFFECT)
    return model, tokenizer, prompts_apart, references


def prompt_limits(model: PreTrainedModel) -> dict[str, int]:
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


@dataclass
class _Rounds:
    """Rounds of collecting the current model's trajectories and training it on them.

    Attributes:
        history, counts: As in :class:`Report`, filled by :meth:`train`.
    """

    tokenizer: PreTrainedTokenizerBase
    prompts: Sequence[Sequence[int]]
    examples: Sequence[Trajectory]
    exam: Exam
    options: TuneOptions
    accept: Accept | None
    deadline: float
    tell: Callable[[str], None]
    history: list[dict[str, float]] = field(default_factory=list)
    counts: list[dict[str, int]] = field(default_factory=list)

    def train(self, model: PreTrainedModel, work: Path) -> tuple[PreTrainedModel, bool]:
        """The model after the last round or as it is at the deadline, and whether all rounds were trained."""
        for number in range(self.options.num_rounds):
            folder = work / f"round-{number}"
            try:
                collected = collect_trajectories(
                    model,
                    self.tokenizer,
                    self.prompts,
                    folder / "trajectories",
                    self.options.collect,
                    accept=self.accept,
                    deadline=self.deadline,
                )
            except TimeoutError:
                if not number:
                    raise
                return model, False
            self.counts.append(collected)
            self.tell(f"round {number + 1}: {_describe_counts(collected)}")
            is_complete = has_model(folder / "model") or self._train_round(model, folder)
            num_before = number * self.options.num_steps
            log = json.loads((folder / "history.json").read_text("utf-8"))
            self.history += [{**record, "step": record["step"] + num_before} for record in log]
            model, _ = load_for_training(folder / ("model" if is_complete else "unfinished"), model.device)
            if not is_complete:
                self.tell("the time was up: the same command trains the model further")
                return model, False
        return model, True

    def _train_round(self, model: PreTrainedModel, folder: Path) -> bool:
        stored = StoredTrajectories(folder / "trajectories", model, self.tokenizer)
        return train_round(
            model,
            self.tokenizer,
            ConcatDataset(cast("Any", [stored, self.examples])),
            folder,
            self.options,
            measure=self.exam.measure,
            deadline=self.deadline,
            tell=self.tell,
        )


def _describe_counts(counts: Mapping[str, int]) -> str:
    left_out = [f"{count} {fault}" for fault, count in counts.items() if fault != KEPT and count]
    return f"{counts[KEPT]} trajectories kept, left out: {', '.join(left_out) or 'none'}"
