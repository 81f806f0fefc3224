"""Rebuilds the embedded model from its corpus: tokenizer, weights, model card.

Run ``python -m local_backend.embedded.build``; see ``--help``. On two CPU cores it takes 81 minutes, with
units for bfloat16 less. First the model learns its corpus alone, then to land several tokens a forward under
Jacobi decoding as well (:mod:`local_backend.embedded.consistency`), at last, at a low rate, to change
its answers and to let follow-ups stand alone, and everything else once more.
``--without-consistency`` goes on with the corpus instead: the plain model that the tuned one is compared
with. A build that was interrupted continues from its last checkpoint and ends with the same weights, because
what a step draws depends on its number and on the topics dealt before, which the checkpoint counts.
"""

from __future__ import annotations

import argparse
import copy
import ctypes
import hashlib
import json
import random
import shutil
import sys
import time
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import asdict, replace
from pathlib import Path
from typing import Any

import torch
from torch import Tensor
from transformers import LlamaConfig, LlamaForCausalLM, PreTrainedTokenizerFast

from local_backend.embedded.attention import PARTWISE
from local_backend.embedded.batches import draw_batch
from local_backend.embedded.card import write_card
from local_backend.embedded.circuits import begin_with_circuits, fits, held_weights
from local_backend.embedded.consistency import NUM_GUESSED, draw_guessed, guessing_loss
from local_backend.embedded.corpus import Topic, load_topics
from local_backend.embedded.decks import Decks
from local_backend.embedded.initialization import begin_copying
from local_backend.embedded.losses import loss_of, only_quoted
from local_backend.embedded.optimizers import Optimizers
from local_backend.embedded.recipe import PLAIN_OPTIONS, BuildOptions, Refining, lesson_at, rate_at
from local_backend.embedded.tasks import KINDS, make_example
from local_backend.embedded.tokenization import guess_token_ids, token_traits, train_tokenizer

# What the command line can ask for.
_ASKED = (
    "num_steps",
    "num_tuning_steps",
    "num_first_steps",
    "num_last_steps",
    "num_consistency_steps",
    "num_editing_steps",
    "num_following_up_steps",
    "seed",
    "num_layers",
    "hidden_size",
    "tokens_per_batch",
)

_M_TRIM_THRESHOLD, _M_MMAP_MAX = -1, -4  # of glibc's malloc.h


def make_model(
    options: BuildOptions, tokenizer: PreTrainedTokenizerFast, topics: Sequence[Topic] | None = None
) -> LlamaForCausalLM:
    """The untrained model, float32, seeded; see :mod:`local_backend.embedded.circuits`."""
    torch.manual_seed(options.seed)
    config = LlamaConfig(
        vocab_size=len(tokenizer),
        hidden_size=options.hidden_size,
        intermediate_size=options.intermediate_size,
        head_dim=options.head_size,
        num_hidden_layers=options.num_layers,
        num_attention_heads=options.num_heads,
        num_key_value_heads=options.num_heads,
        max_position_embeddings=2048,
        rope_parameters={"rope_type": "default", "rope_theta": options.rope_theta},
        tie_word_embeddings=False,
        bos_token_id=None,
        eos_token_id=tokenizer.eos_token_id,
        pad_token_id=tokenizer.pad_token_id,
    )
    model = LlamaForCausalLM(config)
    if fits(model):
        begin_with_circuits(model, token_traits(tokenizer, load_topics() if topics is None else topics))
    else:
        begin_copying(model)
    return model


def train(
    model: LlamaForCausalLM,
    tokenizer: PreTrainedTokenizerFast,
    topics: Sequence[Topic],
    options: BuildOptions,
    checkpoint: Path,
    *,
    checkpoint_every: int = 100,
) -> Iterator[tuple[int, dict[str, float]]]:
    """Train in place, resuming from ``checkpoint`` where it exists.

    Yields:
        Each step's number and its losses by kind of example.

    Raises:
        ValueError: The checkpoint is of a build with other options.
    """
    identity = _identity(options, model, tokenizer)
    state: dict[str, Any] = {"step": 0}
    if checkpoint.exists():
        state = torch.load(checkpoint, weights_only=True)
        if state.get("identity") != identity:
            raise ValueError(
                f"{checkpoint} is of another build, {state.get('identity')}; asked for {identity}. "
                "Delete it, or give another --checkpoint."
            )
        model.load_state_dict(state["model"])
    first: int = state["step"]
    optimizers, decks, guessed_decks = _begin(model, topics, options, max(0, first - 1))
    began_with: dict[str, Tensor] = state.get("began_with", {})
    if first:
        optimizers.load(state["optimizers"])
        decks.load(state["dealt"])
        guessed_decks.load(state["dealt_guessed"])
    guess_ids = guess_token_ids(tokenizer, NUM_GUESSED)
    model.set_attn_implementation(PARTWISE)
    model.train()
    last_step = options.num_steps_in_all
    for step in range(first, last_step):
        if (stage := options.refining_at(step)) is not None and step == stage.first_step:
            # It goes on from weights as they would ship, and from nothing else.
            _keep_a_share(model, began_with, options.refining_at(step - 1))
            _round(model)
            began_with = {name: weight.clone() for name, weight in model.state_dict().items()}
            optimizers, decks, guessed_decks = _begin(model, topics, options, step)
        losses = {}
        lesson = lesson_at(step, options)
        if lesson.guessed_size:
            num_tokens = round(lesson.guessed_size * options.tokens_per_batch)
            guessed = draw_guessed(f"{options.seed}:{step}", num_tokens, guessed_decks, tokenizer, guess_ids)
            loss = guessing_loss(model, guessed)
            loss.backward()
            optimizers.collect(for_circuits=False)
            losses["guessed"] = loss.item()
        for number, shares in enumerate(lesson.streams):
            seed = f"{options.seed}:{step}:{number}"
            kind, batch = draw_batch(
                seed,
                shares,
                options.tokens_per_batch,
                decks,
                tokenizer,
                departing_weight=lesson.departing_weight,
            )
            loss = loss_of(model, only_quoted(batch) if step < options.num_tuning_steps else batch)
            loss.backward()
            optimizers.collect()
            losses[kind] = loss.item()
        if lesson.follow_ups_size:
            num_tokens = round(lesson.follow_ups_size * options.tokens_per_batch)
            kind, batch = draw_batch(
                f"{options.seed}:{step}:follow-ups", {"follow-ups": 1.0}, num_tokens, decks, tokenizer
            )
            loss = loss_of(model, batch)
            loss.backward()
            optimizers.collect()
            losses[kind] = loss.item()
        optimizers.step(step, rate_at(step, options))
        yield step, losses
        if (step + 1) % checkpoint_every == 0 or step + 1 == last_step:
            state = {
                "identity": identity,
                "model": model.state_dict(),
                "optimizers": optimizers.state(),
                "dealt": decks.state(),
                "dealt_guessed": guessed_decks.state(),
                "began_with": began_with,
                "step": step + 1,
            }
            _write_checkpoint(checkpoint, state)
    _keep_a_share(model, began_with, options.refining_at(last_step - 1))
    model.eval()
    model.set_attn_implementation("sdpa")


def _begin(
    model: LlamaForCausalLM, topics: Sequence[Topic], options: BuildOptions, step: int
) -> tuple[Optimizers, Decks, Decks]:
    """What the stage of a step begins with beside weights: optimizers, and decks, of guessed answers last."""
    stage = options.refining_at(step)
    optimizers = Optimizers(
        model,
        options.learning_rates,
        weight_decay=options.weight_decay,
        num_tuning_steps=options.num_tuning_steps if stage is None else 0,
    )
    seed = f"{options.seed}" if stage is None else f"{options.seed}:{stage.name}"
    return optimizers, Decks(topics, seed), Decks(topics, f"{seed}:guessed")


@torch.no_grad()
def _round(model: LlamaForCausalLM) -> None:
    """Round weights to what is stored of them."""
    for parameter in model.parameters():
        parameter.copy_(parameter.bfloat16())


@torch.no_grad()
def _keep_a_share(model: LlamaForCausalLM, began_with: Mapping[str, Tensor], stage: Refining | None) -> None:
    """When a stage that refines has ended, keep some of what it began with (Wortsman and others, 2022)."""
    if stage is not None:
        for name, weight in model.state_dict().items():
            weight.lerp_(began_with[name], stage.kept_share)


def _identity(
    options: BuildOptions, model: LlamaForCausalLM, tokenizer: PreTrainedTokenizerFast
) -> dict[str, Any]:
    """What tells a build from others: its options, its tokens, its lessons, and the model it begins with.

    Args:
        options: Of the build.
        model: Untrained.
        tokenizer: Of the model.
    """
    lessons = {str(lesson_at(step, options)) for step in range(options.num_steps_in_all)}
    examples = {kind: str(make_example(kind, random.Random(options.seed))) for kind in KINDS}
    known = json.dumps([tokenizer.get_vocab(), sorted(lessons), examples], sort_keys=True)
    digest = hashlib.sha256(known.encode())
    masks = held_weights(model) if fits(model) else {}
    for name, tensor in (*model.state_dict().items(), *masks.items()):
        digest.update(name.encode())
        digest.update(tensor.contiguous().numpy().tobytes())
    return {"options": asdict(options), "taught": digest.hexdigest()}


def _write_checkpoint(path: Path, state: dict[str, Any]) -> None:
    path.parent.mkdir(parents=True, exist_ok=True)
    partial = path.with_suffix(".partial")
    torch.save(state, partial)
    partial.replace(path)


def save(model: LlamaForCausalLM, tokenizer: PreTrainedTokenizerFast, folder: Path) -> None:
    """Write weights (bfloat16, safetensors), configuration and tokenizer; the model stays as it is."""
    folder.mkdir(parents=True, exist_ok=True)
    copy.deepcopy(model).bfloat16().save_pretrained(folder)
    tokenizer.save_pretrained(folder)


def main(arguments: Sequence[str] | None = None) -> None:
    """Command line of the build."""
    given = _parse(arguments)
    asked = {name: value for name in _ASKED if (value := getattr(given, name)) is not None}
    options = replace(PLAIN_OPTIONS if given.without_consistency else BuildOptions(), **asked)
    checkpoint = given.checkpoint or Path(
        f"build/embedded/{'plain' if given.without_consistency else 'tuned'}.pt"
    )
    _keep_freed_memory()
    topics = load_topics()
    tokenizer = train_tokenizer(topics, options.vocabulary_size)
    model = make_model(options, tokenizer, topics)
    num_parameters = sum(parameter.numel() for parameter in model.parameters())
    print(
        f"{len(topics)} topics, {len(tokenizer)} tokens, {num_parameters / 1e6:.1f} M parameters", flush=True
    )
    started = time.monotonic()
    smooth: dict[str, float] = {}
    steps = train(model, tokenizer, topics, options, checkpoint, checkpoint_every=given.checkpoint_every)
    for step, losses in steps:
        for kind, loss in losses.items():
            smooth[kind] = 0.95 * smooth.get(kind, loss) + 0.05 * loss
        if (step + 1) % 20 == 0:
            told = "  ".join(f"{kind} {loss:.3f}" for kind, loss in sorted(smooth.items()))
            print(
                f"step {step + 1}/{options.num_steps_in_all}  {time.monotonic() - started:.0f} s  {told}",
                flush=True,
            )
        if step + 1 == given.stop_after:
            print(f"left off after step {step + 1}")
            return
    _write(model, tokenizer, topics, given.output, options)


def _keep_freed_memory() -> None:
    """Let what is freed be used again: to map the pages of large tensors anew takes a third of a step."""
    mallopt = getattr(ctypes.CDLL(None), "mallopt", None) if sys.platform == "linux" else None
    if mallopt is not None:
        mallopt(_M_MMAP_MAX, 0)
        mallopt(_M_TRIM_THRESHOLD, 2**31 - 1)


def _write(
    model: LlamaForCausalLM,
    tokenizer: PreTrainedTokenizerFast,
    topics: tuple[Topic, ...],
    folder: Path,
    options: BuildOptions,
) -> None:
    shutil.rmtree(folder, ignore_errors=True)
    if options.num_consistency_steps:  # by which drafters know that there are such
        model.config.guess_token_ids = list(guess_token_ids(tokenizer, NUM_GUESSED))
    save(model, tokenizer, folder)
    names = sorted(topic.name for topic in topics)
    (folder / "topics.json").write_text(json.dumps(names, indent=0) + "\n", encoding="utf-8")
    write_card(
        folder,
        topics,
        num_steps=options.num_steps,
        num_consistency_steps=options.num_consistency_steps,
        num_last_steps=options.num_last_steps,
        num_editing_steps=options.num_editing_steps,
        num_following_up_steps=options.num_following_up_steps,
    )
    print(f"written to {folder}", flush=True)


def _parse(arguments: Sequence[str] | None) -> argparse.Namespace:
    parser = argparse.ArgumentParser(prog="python -m local_backend.embedded.build", description=__doc__)
    parser.add_argument("--output", type=Path, default=Path(__file__).parent / "weights")
    parser.add_argument(
        "--without-consistency", action="store_true", help="leave the second stage out, for a plain model"
    )
    parser.add_argument("--checkpoint", type=Path, help="default: a file in build/embedded")
    for name in _ASKED:
        option = name.removeprefix("num_").removesuffix("_size").replace("_", "-")
        parser.add_argument(f"--{option}", type=int, dest=name, help="default: as shipped")
    parser.add_argument("--checkpoint-every", type=int, default=100, help="steps between two checkpoints")
    parser.add_argument("--stop-after", type=int, help="leave off after this many steps; run again to go on")
    return parser.parse_args(arguments)


if __name__ == "__main__":
    main()
