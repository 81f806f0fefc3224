"""The trained predictor of the paper: the model itself, with low-rank adapters, learns to say the length.

As in Zheng et al., arXiv 2305.13144, adapters are trained on the model that answers, so it may use all it
knows of the prompt. Where theirs writes the number as text, a head on the last hidden states says quantiles
at once: one forward over the prompt, nothing to generate and nothing to misread.
Knows ``transformers`` and ``peft`` (of the ``training`` extra). Does not know the engine.
"""

from __future__ import annotations

import json
import math
import random
import warnings
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any

import torch
from safetensors.torch import load_file, save_file
from torch import Tensor, nn

from local_backend.sampling import SamplingParams
from local_backend.scheduling.length_log import LengthExample
from local_backend.scheduling.lengths import Prediction
from local_backend.scheduling.quantiles import (
    MIN_EXAMPLES,
    QUANTILES,
    ascending_tokens,
    pinball,
    predictions_of,
)

if TYPE_CHECKING:
    from transformers import PreTrainedModel

_HEAD, _ABOUT, _ADAPTER = "head.safetensors", "lengths.json", "adapter"


@dataclass(frozen=True, slots=True)
class LoraOptions:
    """How adapters and head are trained.

    Attributes:
        rank: Of the adapters.
        num_steps: Optimizer steps.
        batch_size: Prompts of a step.
        learning_rate: At its peak; a warm-up before, a cosine to 0 behind.
        held_out_share: Prompts held out; the state that was best on them is kept.
        num_evaluations: How often it is measured on them.
        max_prompt_tokens: Of a longer prompt, the first and the last tokens are read, half of each.
        seed: Of adapters, order and split.

    Raises:
        ValueError: A number is out of range.
    """

    rank: int = 8
    num_steps: int = 300
    batch_size: int = 16
    learning_rate: float = 1e-3
    held_out_share: float = 0.15
    num_evaluations: int = 10
    max_prompt_tokens: int = 1024
    seed: int = 0

    def __post_init__(self) -> None:
        for name in ("rank", "num_steps", "batch_size", "num_evaluations", "max_prompt_tokens"):
            if getattr(self, name) < 1:
                raise ValueError(f"{name} must be at least 1, got {getattr(self, name)}")
        if not self.learning_rate > 0 or not 0 < self.held_out_share < 1:
            raise ValueError(
                "learning_rate must be above 0 and held_out_share between 0 and 1, got "
                f"{self.learning_rate} and {self.held_out_share}"
            )


class LoraLengths:
    """Predicts lengths with an adapted copy of the model; make one with :meth:`fit` or :meth:`load`.

    Args:
        adapted: The model with its adapters, from ``peft``.
        head: Hidden states to free numbers, one for each quantile.
        centre: Mean of the logarithms of the lengths it was trained on.
        spread: Their standard deviation.
        max_prompt_tokens: See :class:`LoraOptions`.
    """

    def __init__(
        self, adapted: Any, head: nn.Linear, *, centre: float, spread: float, max_prompt_tokens: int
    ) -> None:
        self._adapted = adapted
        self._head = head
        self._centre = torch.tensor(centre)
        self._spread = torch.tensor(spread)
        self._max_prompt_tokens = max_prompt_tokens

    @classmethod
    def fit(
        cls, model: PreTrainedModel, examples: Sequence[LengthExample], options: LoraOptions | None = None
    ) -> LoraLengths:
        """Train adapters and a head.

        Args:
            model: In float32, and nobody else's: adapters are put into it.
            examples: Prompts and the lengths of their answers.
            options: How.

        Raises:
            ImportError: ``peft`` is not installed.
            ValueError: There are too few examples.
        """
        options = options or LoraOptions()
        if len(examples) < MIN_EXAMPLES:
            raise ValueError(
                f"{len(examples)} prompts are too few to learn from: give at least {MIN_EXAMPLES}"
            )
        rng = random.Random(options.seed)
        shuffled = rng.sample(list(examples), len(examples))
        num_held_out = max(5, round(options.held_out_share * len(shuffled)))
        held_out, learned = shuffled[:num_held_out], shuffled[num_held_out:]
        logarithms = torch.tensor([example.num_tokens for example in learned]).float().log()
        predictor = cls(
            _with_adapters(model, options),
            _new_head(model, options.seed),
            centre=logarithms.mean().item(),
            spread=max(0.05, logarithms.std().item()),
            max_prompt_tokens=options.max_prompt_tokens,
        )
        predictor._train(learned, held_out, options, rng)
        return predictor

    def predict(
        self, prompts: Sequence[Sequence[int]], params: Sequence[SamplingParams] | None = None
    ) -> list[Prediction | None]:
        """One prediction for each prompt; see :class:`~local_backend.scheduling.lengths.LengthPredictor`."""
        order = sorted(range(len(prompts)), key=lambda number: len(prompts[number]))
        found: dict[int, Prediction | None] = {}
        for at in range(0, len(order), 16):  # of like length, so that little of a forward is padding
            batch = order[at : at + 16]
            with torch.inference_mode():
                quantiles = self._quantiles([prompts[number] for number in batch])
            found.update(zip(batch, predictions_of(quantiles), strict=True))
        return [found[number] for number in range(len(prompts))]

    def save(self, folder: str | Path) -> None:
        """Write adapters and head."""
        folder = Path(folder)
        folder.mkdir(parents=True, exist_ok=True)
        self._adapted.save_pretrained(str(folder / _ADAPTER))
        save_file({name: value.cpu() for name, value in self._head.state_dict().items()}, folder / _HEAD)
        about = {
            "centre": self._centre.item(),
            "spread": self._spread.item(),
            "max_prompt_tokens": self._max_prompt_tokens,
        }
        (folder / _ABOUT).write_text(json.dumps(about) + "\n", encoding="utf-8")

    @classmethod
    def load(cls, folder: str | Path, model: PreTrainedModel) -> LoraLengths:
        """What :meth:`save` wrote.

        Args:
            folder: Where to.
            model: The one that was adapted; adapters are put into it, so it must be nobody else's.

        Raises:
            FileNotFoundError: There is none.
            ImportError: ``peft`` is not installed.
        """
        from peft import PeftModel

        folder = Path(folder)
        if not (folder / _ABOUT).exists():
            raise FileNotFoundError(f"{folder} holds no adapted length predictor: train one first")
        about = json.loads((folder / _ABOUT).read_text("utf-8"))
        head = _new_head(model, 0)
        head.load_state_dict(load_file(folder / _HEAD))
        with _without_deprecations():
            adapted = PeftModel.from_pretrained(model, str(folder / _ADAPTER))
        adapted.eval()
        return cls(adapted, head, **about)

    def _quantiles(self, prompts: Sequence[Sequence[int]]) -> Tensor:
        """Quantiles ``[prompts, quantiles]`` in tokens."""
        half = self._max_prompt_tokens // 2
        read = [
            prompt if len(prompt) <= self._max_prompt_tokens else [*prompt[:half], *prompt[-half:]]
            for prompt in prompts
        ]
        width = max(map(len, read))
        device = self._head.weight.device
        token_ids = torch.tensor([[*prompt, *[0] * (width - len(prompt))] for prompt in read], device=device)
        lengths = torch.tensor([len(prompt) for prompt in read], device=device)
        is_token = torch.arange(width, device=device) < lengths[:, None]  # [prompts, width]
        states = self._adapted.base_model.model.base_model(
            input_ids=token_ids, attention_mask=is_token.long(), use_cache=False
        ).last_hidden_state  # [prompts, width, hidden]
        mean = (states * is_token[:, :, None]).sum(1) / lengths[:, None]
        last = states[torch.arange(len(read), device=device), lengths - 1]
        raw = self._head(torch.cat([mean, last], dim=1)).float().cpu()
        return ascending_tokens(raw, self._centre, self._spread)

    def _loss(self, examples: Sequence[LengthExample]) -> Tensor:
        actual = torch.tensor([example.num_tokens for example in examples], dtype=torch.float32)
        return pinball(self._quantiles([example.prompt_ids for example in examples]), actual) / math.exp(
            float(self._centre)
        )

    def _train(
        self,
        learned: Sequence[LengthExample],
        held_out: Sequence[LengthExample],
        options: LoraOptions,
        rng: random.Random,
    ) -> None:
        parameters = [
            *(one for one in self._adapted.parameters() if one.requires_grad),
            *self._head.parameters(),
        ]
        optimizer = torch.optim.AdamW(parameters, lr=options.learning_rate, weight_decay=0.01)
        every = max(1, options.num_steps // options.num_evaluations)
        best, best_values = math.inf, [one.detach().clone() for one in parameters]
        for step in range(options.num_steps + 1):
            if step % every == 0 or step == options.num_steps:
                loss = self._held_out_loss(held_out, options.batch_size)
                if loss < best:
                    best, best_values = loss, [one.detach().clone() for one in parameters]
            if step == options.num_steps:
                break
            for group in optimizer.param_groups:
                group["lr"] = options.learning_rate * _schedule(step, options.num_steps)
            optimizer.zero_grad()
            self._loss(rng.choices(learned, k=options.batch_size)).backward()
            nn.utils.clip_grad_norm_(parameters, 1.0)
            optimizer.step()
        with torch.no_grad():
            for one, value in zip(parameters, best_values, strict=True):
                one.copy_(value)
        self._adapted.eval()

    @torch.no_grad()
    def _held_out_loss(self, held_out: Sequence[LengthExample], batch_size: int) -> float:
        batches = [held_out[at : at + batch_size] for at in range(0, len(held_out), batch_size)]
        return sum(float(self._loss(batch)) * len(batch) for batch in batches) / len(held_out)


def _schedule(step: int, num_steps: int) -> float:
    """The share of the learning rate at a step."""
    warm_up = max(1, num_steps // 20)
    return min(1.0, (step + 1) / warm_up) * 0.5 * (1 + math.cos(math.pi * step / num_steps))


def _new_head(model: PreTrainedModel, seed: int) -> nn.Linear:
    embeddings: Any = model.get_input_embeddings()
    hidden_size = model.config.get_text_config(decoder=True).hidden_size
    head: nn.Linear = nn.utils.skip_init(
        nn.Linear, 2 * hidden_size, len(QUANTILES)
    )  # draws no shared random numbers
    with torch.no_grad():
        head.weight.normal_(std=0.01, generator=torch.Generator().manual_seed(seed))
        head.bias.copy_(torch.tensor([-1.3, *[-0.3] * (len(QUANTILES) - 1)]))  # quantiles of a bell curve
    head.to(embeddings.weight.device)
    return head


def _with_adapters(model: PreTrainedModel, options: LoraOptions) -> Any:
    from peft import LoraConfig, get_peft_model

    config = LoraConfig(r=options.rank, lora_alpha=2 * options.rank, target_modules="all-linear")
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(options.seed)  # peft draws the adapters' first weights from the global generator
        with _without_deprecations():
            adapted: Any = get_peft_model(model, config)
    adapted.train()
    return adapted


@contextmanager
def _without_deprecations() -> Iterator[None]:
    """``peft`` still asks for a property by the name it had before transformers 6."""
    with warnings.catch_warnings():
        warnings.filterwarnings("ignore", message=".*gradient_checkpointing.*", category=FutureWarning)
        yield
