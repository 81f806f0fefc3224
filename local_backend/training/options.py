"""How a model is tuned, and the model as it is trained.

Knows ``from_pretrained`` and ``peft``. Does not know the training loop.
"""

from __future__ import annotations

import warnings
from dataclasses import dataclass, field
from pathlib import Path
from typing import TYPE_CHECKING, Any

import torch
from transformers import AutoConfig

from local_backend.drafting.drafter import require_at_least
from local_backend.models.loading import bf16_is_fast, load
from local_backend.offline.prompt_file import check_tokenizer
from local_backend.training.answers import CollectOptions
from local_backend.training.packing import use_fast_attention
from local_backend.training.streams import NoiseOptions

if TYPE_CHECKING:
    from transformers import PreTrainedModel, PreTrainedTokenizerBase

DEFAULT_MODEL = "default"  # instead of a path

# Options that do not affect the weights: they may change when work is resumed.
WITHOUT_EFFECT = (
    "options.max_hours",
    "options.save_steps",
    "options.compile_layers",
    "options.collect.max_rows",
)


@dataclass(frozen=True)
class TuneOptions:
    """How a model is tuned; the defaults are for pretrained models.

    Attributes:
        num_steps: Optimizer steps.
        batch_size: Examples of a step.
        rows_per_forward: Examples of a forward; by default 128 on a GPU and 16 on a CPU.
        learning_rate: Its peak, after a warm-up and before a linear decay to a hundredth.
        ar_weight: Weight of the clean text in the loss, where that of the guesses is 1.
        decay: Weight of a guess over that of the one before it in its block.
        num_likely: How many likely tokens of the plain model are learned, with their probabilities, at each
            place of an answer; with 0 the answer's tokens alone.
        learns_unfinished: Whether to learn from answers that do not end or repeat themselves, too. They
            keep the model what it is: all answers are, without them the perplexity rises.
        lora_rank: Of adapters that are trained instead of all weights; ``None`` trains all weights.
        bf16: Whether to train in mixed precision; by default if the machine is fast at it.
        compile_layers: Whether to compile the layers; by default on a GPU and for long training on a CPU.
        max_hours: Pause after this long, measuring included; another call trains the model further.
        most_perplexity: Bound on the perplexity of the plain model's answers, over that under the plain one.
            Of what was measured the fastest model within it is kept, the plain one if there is no other.
        num_held_out: Prompts held out for measuring, at most a fifth of them.
        num_evaluations: How often speed and quality are measured in training.
        save_steps: Steps between two checkpoints.
        seed: Of order, noise and adapters.
        noise, collect: See their classes.

    Raises:
        ValueError: A number is out of range.
    """

    num_steps: int = 300
    batch_size: int = 96
    rows_per_forward: int | None = None
    learning_rate: float = 1e-4
    ar_weight: float = 10.0
    decay: float = 0.95
    num_likely: int = 16
    learns_unfinished: bool = True
    lora_rank: int | None = None
    bf16: bool = field(default_factory=bf16_is_fast)
    compile_layers: bool | None = None
    max_hours: float | None = None
    most_perplexity: float = 1.05
    num_held_out: int = 48
    num_evaluations: int = 3
    save_steps: int = 100
    seed: int = 0
    noise: NoiseOptions = field(default_factory=NoiseOptions)
    collect: CollectOptions = field(default_factory=CollectOptions)

    def __post_init__(self) -> None:
        given = {name: value for name, value in vars(self).items() if type(value) is int and name != "seed"}
        require_at_least(0, num_likely=given.pop("num_likely"), ar_weight=self.ar_weight)
        require_at_least(1, **given)
        for name in ("learning_rate", "max_hours", "most_perplexity"):
            value = getattr(self, name)
            if value is not None and not value > 0:
                raise ValueError(f"{name} must be above 0, got {value}")


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
    """The model with gradients, of adapters alone if there is a rank."""
    trained: Any = model.requires_grad_(True)
    if rank := options.lora_rank:
        from peft import LoraConfig, get_peft_model

        torch.manual_seed(options.seed)
        config = LoraConfig(r=rank, lora_alpha=2 * rank, target_modules="all-linear", task_type="CAUSAL_LM")
        with warnings.catch_warnings():
            # peft still uses the name from before transformers 6.
            warnings.filterwarnings("ignore", message=".*gradient_checkpointing.*", category=FutureWarning)
            trained = get_peft_model(model, config)
    return trained
