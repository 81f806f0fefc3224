"""How often the next token in bfloat16 is that of float32, by the engine and by ``generate``.

Each prompt is a question in the model's chat template, more than half of them behind the beginning of a
document. Its next token is asked of the model in float32 (``transformers``' own modules), and in bfloat16 of
those modules and of the engine. ``kl`` is the mean divergence from float32's distribution. ``near_ties`` are
prompts whose best two tokens are closer than 0.1 in float32, where bfloat16 can hardly tell them apart.
"""

from __future__ import annotations

import argparse
from collections.abc import Sequence
from typing import TYPE_CHECKING, Any, cast

import torch
from rich.console import Console
from rich.progress import track
from rich.table import Table
from torch import Tensor

from benchmarks.results import add_save_argument, report
from benchmarks.workloads import add_model_argument, chapters, questions
from local_backend import Engine, SamplingParams
from local_backend.langchain.chat_format import chat_prompt
from local_backend.models.loading import choose_device, load

if TYPE_CHECKING:
    from transformers import PreTrainedModel, PreTrainedTokenizerBase

_NEAR = 0.1  # logits


def make_prompts(tokenizer: PreTrainedTokenizerBase, count: int) -> list[list[int]]:
    """Token ids of chat prompts of different lengths."""
    asked, documents = questions(), chapters()
    prompts = []
    for number in range(count):
        text = asked[number % len(asked)]
        if number >= len(asked):  # a document of 200 to 1,643 characters before it
            text = f"{documents[number % len(documents)].text[: 200 + 37 * (number % 40)]}\n\n{text}"
        prompts.append(chat_prompt(tokenizer, [{"role": "user", "content": text}])[0])
    return prompts


@torch.inference_mode()
def logits_of_model(model: PreTrainedModel, prompts: Sequence[list[int]], label: str) -> Tensor:
    """Logits ``[prompts, vocabulary]`` of the next token, each prompt by itself, as ``generate`` reads it."""
    forward = cast("Any", model)
    found = [
        forward(input_ids=torch.tensor([prompt], device=model.device), logits_to_keep=1).logits[0, -1]
        for prompt in track(prompts, label, console=Console(stderr=True))
    ]
    return torch.stack(found).float().cpu()


def logits_of_engine(engine: Engine, prompts: Sequence[list[int]]) -> Tensor:
    """The same of the engine, each prompt by itself."""
    found: list[Tensor] = []

    def note(_: Tensor, scores: Tensor) -> Tensor:
        found.append(scores.detach()[0].float().cpu())
        return scores

    params = SamplingParams(max_tokens=1, ignore_end=True, logits_processors=(note,))
    for prompt in track(prompts, "engine", console=Console(stderr=True)):
        engine.generate([prompt], params)
    return torch.stack(found)


def compare(exact: Tensor, other: Tensor) -> dict[str, float]:
    """Agreement and divergence of logits with float32's, both ``[prompts, vocabulary]``."""
    width = min(exact.shape[1], other.shape[1])
    of_exact, of_other = (one[:, :width].log_softmax(-1) for one in (exact, other))
    divergence = torch.nn.functional.kl_div(of_other, of_exact, reduction="none", log_target=True).sum(-1)
    return {
        "agree": int((of_exact.argmax(-1) == of_other.argmax(-1)).sum()),
        "kl": round(divergence.mean().item(), 6),
    }


def measure(model_name: str | None, device: str, num_prompts: int) -> dict[str, Any]:
    """The figures of a model."""
    model, tokenizer = load(model_name, dtype="float32", device=device)
    prompts = make_prompts(tokenizer, num_prompts)
    exact = logits_of_model(model, prompts, "float32")
    del model
    model, _ = load(model_name, dtype="bfloat16", device=device)
    figures: dict[str, Any] = {"generate": compare(exact, logits_of_model(model, prompts, "bfloat16"))}
    with Engine(model, tokenizer) as engine:
        figures["engine"] = compare(exact, logits_of_engine(engine, prompts))
    best = exact.topk(2, -1).values
    return {
        "prompts": num_prompts,
        "near_ties": int((best[:, 0] - best[:, 1] < _NEAR).sum()),
        "median_prompt_tokens": sorted(map(len, prompts))[num_prompts // 2],
        **figures,
    }


def main(arguments: Sequence[str] | None = None) -> None:
    parser = argparse.ArgumentParser(prog="python -m benchmarks.half_precision", description=__doc__)
    add_model_argument(parser)
    parser.add_argument("--device", default="auto", help="where the model runs (%(default)s)")
    parser.add_argument("--prompts", type=int, default=200, help="how many (%(default)s)")
    add_save_argument(parser)
    options = parser.parse_args(arguments)
    figures = measure(options.model, choose_device(options.device).type, options.prompts)
    table = Table("bfloat16", "same token as float32", "of prompts", "mean divergence")
    for way in ("generate", "engine"):
        table.add_row(way, str(figures[way]["agree"]), str(options.prompts), f"{figures[way]['kl']:.6f}")
    report("half_precision", table, {"model": options.model or "default", **figures}, keep=options.save)


if __name__ == "__main__":
    main()
