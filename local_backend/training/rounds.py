"""One round of training: trajectories in, a model out, resumable.

Knows how ``transformers`` and ``peft`` train. Does not know where trajectories come from.
"""

from __future__ import annotations

import json
import math
import time
import warnings
from collections.abc import Callable
from dataclasses import asdict, dataclass, field
from pathlib import Path
from typing import TYPE_CHECKING, Any

import torch
from transformers import AutoConfig, TrainerCallback, TrainerControl, TrainerState, TrainingArguments

from local_backend.drafting.drafter import require_at_least
from local_backend.models.loading import bf16_is_fast, load
from local_backend.offline.prompt_file import check_tokenizer
from local_backend.sequences.outputs import Trajectory
from local_backend.training.checkpoints import claim, digest, fingerprint, newest_checkpoint, write_model
from local_backend.training.examples import NoiseOptions, NoisyExamples
from local_backend.training.packing import use_fast_attention
from local_backend.training.trainer import ConsistencyTrainer, LossOptions, Measure
from local_backend.training.trajectories import CollectOptions

if TYPE_CHECKING:
    from _typeshed import SupportsLenAndGetItem
    from transformers import PreTrainedModel, PreTrainedTokenizerBase

DEFAULT_MODEL = "default"  # instead of a path

# Options that do not affect the weights: they may change when work is resumed. Rounds may be added later.
WITHOUT_EFFECT = (
    "options.num_rounds",
    "options.max_hours",
    "options.save_steps",
    "options.activation_checkpointing",
    "options.collect.max_rows",
    "options.collect.prompts_per_part",
)


@dataclass(frozen=True)
class TuneOptions:
    """How a model is tuned.

    Attributes:
        num_rounds: Rounds of collecting trajectories and training on them.
        num_steps: Optimizer steps of each round.
        batch_size: Examples per forward.
        accumulation_steps: Forwards per optimizer step.
        learning_rate: Its peak, after a warm-up and before a cosine decay to a tenth, in each round.
        lora_rank: Of adapters that are trained instead of all weights; ``None`` trains all weights.
        bf16: Whether to train in mixed precision; by default if the machine is fast at it.
        activation_checkpointing: Whether to recompute activations in the backward pass, to save memory.
        max_hours: Pause after this long, measuring included; another call trains the model further.
        num_held_out: Prompts held out for measuring, at most a fifth of them.
        num_evaluations: How often speed and quality are measured in a round.
        save_steps: Steps between two checkpoints.
        seed: Of order, noise and adapters.
        noise, losses, collect: See their classes.

    Raises:
        ValueError: A number is out of range.
    """

    num_rounds: int = 2
    num_steps: int = 400
    batch_size: int = 16
    accumulation_steps: int = 1
    learning_rate: float = 1e-3
    lora_rank: int | None = None
    bf16: bool = field(default_factory=bf16_is_fast)
    activation_checkpointing: bool = False
    max_hours: float | None = None
    num_held_out: int = 64
    num_evaluations: int = 2
    save_steps: int = 100
    seed: int = 0
    noise: NoiseOptions = field(default_factory=NoiseOptions)
    losses: LossOptions = field(default_factory=LossOptions)
    collect: CollectOptions = field(default_factory=CollectOptions)

    def __post_init__(self) -> None:
        given = {name: value for name, value in vars(self).items() if type(value) is int and name != "seed"}
        require_at_least(1, **given)
        if not self.learning_rate > 0:
            raise ValueError(f"learning_rate must be above 0, got {self.learning_rate}")
        if self.max_hours is not None and not self.max_hours > 0:
            raise ValueError(f"max_hours must be above 0, got {self.max_hours}")


def train_round(
    model: PreTrainedModel,
    tokenizer: PreTrainedTokenizerBase,
    trajectories: SupportsLenAndGetItem[Trajectory],
    folder: Path,
    options: TuneOptions,
    *,
    measure: Measure | None = None,
    deadline: float = math.inf,
    tell: Callable[[str], None] = print,
) -> bool:
    """Train a model on its own trajectories and write it to ``folder/model``; resumable.

    The folder also gets ``checkpoints`` and ``history.json``, with what ``measure`` returned at
    ``num_evaluations`` steps. After ``deadline``, by ``time.monotonic()``, training pauses: the model is
    written to ``folder/unfinished``, and another call trains it further.

    Returns:
        Whether the round is complete.

    Raises:
        ValueError: The folder holds a round on other trajectories, of another model or with other options;
            or there is no trajectory.
    """
    folder = folder.expanduser()
    examples = NoisyExamples(
        trajectories,
        options.num_steps * options.batch_size * options.accumulation_steps,
        options.batch_size,
        noise=options.noise if options.losses.needs_copies else None,
        with_next=options.losses.local_weight > 0,
        seed=options.seed,
    )
    wanted = {
        "model": fingerprint(model, tokenizer),
        "trajectories": digest(trajectories[number] for number in range(len(trajectories))),
        "options": asdict(options),
    }
    claim(folder / "round.json", wanted, may_differ=WITHOUT_EFFECT)
    tokens_per_step = examples.mean_tokens() * len(examples) / options.num_steps
    tell(f"training: {options.num_steps} steps of about {tokens_per_step:,.0f} tokens")
    trained = trainable(model, options)
    checkpoints = folder / "checkpoints"
    trainer = ConsistencyTrainer(
        trained,
        training_arguments(checkpoints, options, model.device),
        examples,
        options.losses,
        pad_id=tokenizer.pad_token_id or 0,
        measure=measure,
        callbacks=[_Schedule(options.num_steps, options.num_evaluations if measure else 0, deadline)],
    )
    trainer.train(resume_from_checkpoint=newest_checkpoint(checkpoints))
    (folder / "history.json").write_text(json.dumps(trainer.measurements()) + "\n", encoding="utf-8")
    if options.lora_rank:
        trained.save_pretrained(folder / "adapter")
        trained = trained.merge_and_unload()
    is_complete = trainer.state.global_step >= options.num_steps
    write_model(trained, tokenizer, folder / ("model" if is_complete else "unfinished"))
    return is_complete


class _Schedule(TrainerCallback):
    """Measures at even intervals, the last time at the end, and pauses at a deadline."""

    def __init__(self, num_steps: int, num_evaluations: int, deadline: float) -> None:
        count = min(num_evaluations, num_steps)
        self._measured_at = {round(number * num_steps / count) for number in range(1, count + 1)}
        self._deadline = deadline

    def on_step_end(
        self, args: TrainingArguments, state: TrainerState, control: TrainerControl, **_: Any
    ) -> None:
        control.should_evaluate = state.global_step in self._measured_at
        if time.monotonic() > self._deadline:
            control.should_save = control.should_training_stop = True


def training_arguments(folder: Path, options: TuneOptions, device: torch.device) -> TrainingArguments:
    """The ``TrainingArguments`` of one round."""
    return TrainingArguments(
        output_dir=str(folder),
        max_steps=options.num_steps,
        per_device_train_batch_size=options.batch_size,
        gradient_accumulation_steps=options.accumulation_steps,
        activation_checkpointing=options.activation_checkpointing,
        learning_rate=options.learning_rate,
        lr_scheduler_type="cosine_with_min_lr",
        lr_scheduler_kwargs={"min_lr_rate": 0.1},
        warmup_steps=min(40, options.num_steps // 10),
        weight_decay=0.01,
        adam_beta2=0.98,
        max_grad_norm=1.0,
        bf16=options.bf16,
        use_cpu=device.type == "cpu",
        logging_steps=max(1, min(25, options.num_steps // 4)),
        save_steps=options.save_steps,
        save_total_limit=1,
        eval_strategy="no",  # a callback triggers it
        train_sampling_strategy="sequential",
        remove_unused_columns=False,
        dataloader_pin_memory=device.type == "cuda",
        report_to="none",
        seed=options.seed,
    )


def load_for_training(
    path: str | Path, device: str | torch.device = "auto"
) -> tuple[PreTrainedModel, PreTrainedTokenizerBase]:
    """Load a model with float32 weights, by default on the GPU if there is one, and its tokenizer.

    ``path`` is a folder, a GGUF file, or a name on the model hub; ``"default"`` is the default model.

    Raises:
        OSError: There is no such model.
        ValueError: Its tokenizer has no end token.
    """
    source = None if str(path) == DEFAULT_MODEL else path
    model, tokenizer = load(source, dtype=torch.float32, device=device)
    check_tokenizer(tokenizer)
    use_fast_attention(model)
    return model, tokenizer


def stored_dtype(path: str | Path) -> torch.dtype:
    """The dtype of a model's stored weights, by its configuration; float32 if they are quantized."""
    if str(path) == DEFAULT_MODEL or Path(path).is_file():
        return torch.float32
    dtype = AutoConfig.from_pretrained(path).dtype
    return dtype if isinstance(dtype, torch.dtype) else torch.float32


def trainable(model: PreTrainedModel, options: TuneOptions) -> Any:
    """The model, with adapters if there is a rank."""
    trained: Any = model
    if rank := options.lora_rank:
        from peft import LoraConfig, get_peft_model

        torch.manual_seed(options.seed)
        config = LoraConfig(r=rank, lora_alpha=2 * rank, target_modules="all-linear", task_type="CAUSAL_LM")
        with warnings.catch_warnings():
            # peft still uses the name from before transformers 6.
            warnings.filterwarnings("ignore", message=".*gradient_checkpointing.*", category=FutureWarning)
            trained = get_peft_model(model, config)
    return trained
