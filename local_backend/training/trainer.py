"""The training loop: a frozen teacher, streams of the model's own guesses, checkpoints that resume exactly.

Knows packed texts, streams and the optimizer. Does not know where answers come from or how speed is measured.
"""

from __future__ import annotations

import ctypes
import logging
import math
import sys
import time
import weakref
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager, suppress
from functools import cache
from pathlib import Path
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor
from torch.nn.attention import SDPBackend, sdpa_kernel
from tqdm.auto import tqdm

from local_backend.kernels.prepacked import PrepackedLinear
from local_backend.training.checkpoints import write_whole
from local_backend.training.options import TuneOptions
from local_backend.training.packing import Batch, PackedForward, Texts, one_thread, pack
from local_backend.training.streams import Streams

if TYPE_CHECKING:
    from transformers import PreTrainedModel

Measure = Callable[["PreTrainedModel"], Mapping[str, float]]
Teacher = tuple[Tensor, Tensor]  # token ids and probabilities, [places, likely]
_ROWS_PER_FORWARD = {"cuda": 128, "cpu": 16}
_WARMUP_STEPS = 60
_WORTH_COMPILING = {"cuda": 0.0, "cpu": 1e9}  # steps times parameters; it takes ten seconds on a CPU
_CHECKPOINT = "checkpoint.pt"
_MMAP_MAX, _TRIM_THRESHOLD = -4, -1  # parameters of `mallopt`
_log = logging.getLogger(__name__)


def answer_tokens(texts: Texts) -> Teacher:
    """A teacher that is sure of the answers' tokens."""
    column = torch.arange(texts.token_ids.shape[1], device=texts.token_ids.device)
    end = texts.num_prompt + texts.num_answer
    is_answer = (column >= texts.num_prompt[:, None]) & (column < end[:, None])
    token_ids = texts.token_ids[is_answer][:, None]
    return token_ids.int(), torch.ones_like(token_ids, dtype=torch.float32)


@torch.no_grad()
def plain_predictions(forward: PackedForward, texts: Texts, num_likely: int, *, bf16: bool) -> Teacher:
    """The model's ``num_likely`` likeliest tokens at each place of the answers, renormalized."""
    token_ids, probabilities = (each.repeat(1, num_likely) for each in answer_tokens(texts))
    device = texts.token_ids.device
    num_rows = _ROWS_PER_FORWARD.get(device.type, 16)
    for group in texts.groups:
        for rows in torch.arange(group.first, group.stop, device=device).split(num_rows):
            batch = pack(texts, rows, group)
            with _precision(device, bf16=bf16):
                hidden = forward.hidden(batch)
                row, learned = (batch.weights > 0).nonzero(as_tuple=True)
                states = hidden[row, batch.columns[row, learned]]
                for some, places in zip(
                    states.split(forward.head.num_rows),
                    batch.places[row, learned].split(forward.head.num_rows),
                    strict=True,
                ):
                    likely = forward.head.logits(some).float().softmax(-1).topk(num_likely)
                    token_ids[places] = likely.indices.int()
                    probabilities[places] = likely.values / likely.values.sum(-1, keepdim=True)
    return token_ids, probabilities


class Training:
    """One training of a model on texts, resumable in a folder.

    Args:
        model: The model; its adapters or all its weights have gradients.
        base: The causal language model in it, if it has adapters around it.
        texts: Prompts with answers, laid out on the model's device.
        teacher: Of the answers.
        options: How it is trained.
    """

    def __init__(
        self, model: Any, base: PreTrainedModel, texts: Texts, teacher: Teacher, options: TuneOptions
    ) -> None:
        self._base, self._texts, self._teacher, self._options = base, texts, teacher, options
        self.device = texts.token_ids.device
        self.forward = PackedForward(base)
        self.streams = Streams(texts, options.noise)
        self._named = {name: value for name, value in model.named_parameters() if value.requires_grad}
        parameters = list(self._named.values())
        self._optimizer = torch.optim.AdamW(parameters, betas=(0.9, 0.98), weight_decay=0.0, fused=True)
        self._random = torch.Generator(self.device)
        self._layers = next(one for one in base.modules() if isinstance(one, torch.nn.ModuleList))
        self._compiled = [self._compile(layer) for layer in self._layers]
        weakref.finalize(self, _keep_freed_memory, False)
        self.num_steps = 0
        self.history: list[dict[str, float]] = []
        self.best_step, self._best = 0, self._copied()  # of the fastest model within the bound
        self._fastest = 1.0

    def run(
        self,
        folder: Path,
        measure: Measure | None = None,
        *,
        deadline: float = math.inf,
        fastest: float = 1.0,
        tell: Callable[[str], None] = print,
    ) -> bool:
        """Train to the last step or to the deadline; whether it was the last step.

        ``measure`` gives ``tokens_per_forward`` and ``perplexity``, the latter over the plain model's; the
        plain model's own speed is ``fastest``. See :meth:`keep_if_best`.
        """
        options, self._fastest = self._options, fastest
        self._load(folder / _CHECKPOINT)
        evaluations = range(1, options.num_evaluations + 1)
        measured = {round(n * options.num_steps / options.num_evaluations) for n in evaluations}
        with tqdm(total=options.num_steps, initial=self.num_steps, unit="step", disable=None) as bar:
            while self.num_steps < options.num_steps and time.monotonic() < deadline:
                figures = self.step()
                bar.set_postfix({name: f"{value:.3f}" for name, value in figures.items()}, refresh=False)
                bar.update()
                is_measured = bool(measure) and self.num_steps in measured
                if measure and is_measured:
                    self.keep_if_best(measure(self._base.eval()), tell)
                if is_measured or self.num_steps % options.save_steps == 0:
                    self._save(folder / _CHECKPOINT)
        self._save(folder / _CHECKPOINT)
        return self.num_steps >= options.num_steps

    def step(self) -> dict[str, float]:
        """One optimizer step; the loss and the tokens that the streams emitted per forward."""
        options = self._options
        self._base.train()
        self._random.manual_seed(hash((options.seed, self.num_steps)) & 0x7FFFFFFF)
        with one_thread():
            rows, group = self._draw()
            copies = self.streams.copies(rows, self._random)
            weights = {"clean_weight": options.ar_weight, "decay": options.decay}
            batch = pack(self._texts, rows, group, copies, **weights)
        loss, predictions = self._learn(batch)
        with one_thread():
            guessed = predictions[:, group.num_answer :].view_as(copies.guesses)
            emitted = self.streams.advance(rows, copies, guessed, self._random)
        self.num_steps += 1
        return {"loss": float(loss), "tokens_per_forward": float(emitted.float().mean())}

    def _learn(self, batch: Batch) -> tuple[Tensor, Tensor]:
        """The loss of a batch and its predictions, with the weights moved."""
        options = self._options
        num_rows = options.rows_per_forward or _ROWS_PER_FORWARD.get(self.device.type, 16)
        losses, predictions = [], []
        _keep_freed_memory(True)
        with self._kernels():
            for part in batch.parts(num_rows):
                with _precision(self.device, bf16=options.bf16):
                    loss, predicted = self.forward.loss(part, self._teacher)
                loss.backward()
                losses.append(loss.detach())
                predictions.append(predicted)
        done = self.num_steps / options.num_steps
        warm = min(1.0, (self.num_steps + 1) / min(_WARMUP_STEPS, options.num_steps // 5 + 1))
        for parameters in self._optimizer.param_groups:
            parameters["lr"] = options.learning_rate * warm * max(0.01, 1 - done)
        torch.nn.utils.clip_grad_norm_(self._named.values(), 1.0)
        self._optimizer.step()
        self._optimizer.zero_grad(set_to_none=True)
        return torch.stack(losses).sum(), torch.cat(predictions)

    def _compile(self, layer: Any) -> Any:
        """What calls a layer while training; layers are alike, so they share what is compiled."""
        device, wanted = self.device.type, self._options.compile_layers
        least = _WORTH_COMPILING.get(device, math.inf)
        pays = self._options.num_steps * self._base.num_parameters() >= least
        if pays and _can_compile(device) if wanted is None else wanted:
            layer.compile(dynamic=device == "cpu")  # or else for each width
        compiled, layer._compiled_call_impl = layer._compiled_call_impl, None
        return compiled

    @contextmanager
    def _kernels(self) -> Iterator[None]:
        """Compiled layers, without the engine's own products; no cuDNN, which plans each shape."""
        modules = [vars(each) for each in self._base.modules()]
        packed = [each for each in modules if isinstance(each.get("forward"), PrepackedLinear)]
        products = [each.pop("forward") for each in packed]
        try:
            with sdpa_kernel([SDPBackend.EFFICIENT_ATTENTION, SDPBackend.FLASH_ATTENTION, SDPBackend.MATH]):
                for layer, compiled in zip(self._layers, self._compiled, strict=True):
                    layer._compiled_call_impl = compiled
                yield
        finally:
            for layer in self._layers:
                layer._compiled_call_impl = None
            for each, product in zip(packed, products, strict=True):
                each["forward"] = product

    def _draw(self) -> tuple[Tensor, Any]:
        """Texts of one group, each group as often as it has texts."""
        groups = self._texts.groups
        at = int(torch.randint(len(self._texts), (), generator=self._random, device=self.device))
        group = next(group for group in groups if at < group.stop)
        count = group.stop - group.first
        order = torch.randperm(count, generator=self._random, device=self.device)
        return order[: self._options.batch_size] + group.first, group

    def keep_if_best(self, figures: Mapping[str, float], tell: Callable[[str], None]) -> None:
        """Note what was measured; keep these weights if they are the fastest within the bound."""
        record = {"step": self.num_steps, **figures}
        self.history.append(record)
        tell(", ".join(f"{name} {value:.4g}" for name, value in record.items()))
        is_within = record["perplexity"] <= self._options.most_perplexity
        if is_within and record["tokens_per_forward"] > self._fastest:
            self._fastest, self.best_step = record["tokens_per_forward"], self.num_steps
            self._best = self._copied()

    def write_best(self) -> None:
        """Put the weights that were kept into the model: those it began with, if none were better."""
        self._write(self._best)

    def _copied(self) -> dict[str, Tensor]:
        return {name: value.detach().clone() for name, value in self._named.items()}

    @torch.no_grad()
    def _write(self, weights: Mapping[str, Tensor]) -> None:
        for name, value in weights.items():
            self._named[name].copy_(value)

    def _save(self, path: Path) -> None:
        state = {
            "weights": {name: value.detach() for name, value in self._named.items()},
            "optimizer": self._optimizer.state_dict(),
            "streams": self.streams.state,
            "progress": (self.num_steps, self.history, self.best_step, self._fastest),
            "best": self._best,
        }
        write_whole(path, state)

    def _load(self, path: Path) -> None:
        if path.exists():
            state = torch.load(path, map_location=self.device)
            self._write(state["weights"])
            self._optimizer.load_state_dict(state["optimizer"])
            self.streams.state = state["streams"]
            self.num_steps, self.history, self.best_step, self._fastest = state["progress"]
            self._best = state["best"]


@cache
def _can_compile(device: str) -> bool:
    with suppress(Exception):  # torch has one for each reason, most often that there is no C++ compiler
        torch.compile(torch.neg)(torch.zeros(1, device=device))
        return True
    _log.warning("steps take longer, because torch.compile does not work here: is a C++ compiler installed?")
    return False


def _keep_freed_memory(is_kept: bool, /) -> None:
    """Whether the process keeps what it frees: GNU's C library returns large blocks; new ones are slow."""
    library: Any = ctypes.CDLL(None) if sys.platform == "linux" else None
    if hasattr(library, "mallopt"):
        library.mallopt(_MMAP_MAX, 0 if is_kept else 65_536)
        library.mallopt(_TRIM_THRESHOLD, -1 if is_kept else 2**26)
        if not is_kept:
            library.malloc_trim(0)


def _precision(device: torch.device, *, bf16: bool) -> Any:
    return torch.autocast(device.type, torch.bfloat16, enabled=bf16)
