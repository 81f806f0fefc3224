"""Rebuilds the embedded model from its corpus: tokenizer, weights, model card.

Run ``python -m local_backend.embedded.build``; see ``--help``. On two CPU cores it takes somewhat less than
an hour and a half. First a plain model is trained, then it is tuned so that it lands several tokens a forward
under Jacobi decoding (:mod:`local_backend.embedded.consistency`); ``--without-consistency`` leaves that out,
``--plain-output`` keeps the plain model as well. A build that was interrupted continues from its last
checkpoint and ends with the same weights, because what a step draws depends on its number alone.
"""

from __future__ import annotations

import argparse
import copy
import ctypes
import json
import shutil
import sys
import time
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import asdict, dataclass, field
from pathlib import Path

import torch
from transformers import LlamaConfig, LlamaForCausalLM, PreTrainedTokenizerFast

from local_backend.embedded.batches import draw_batch
from local_backend.embedded.card import write_card
from local_backend.embedded.consistency import KEPT_KINDS, NUM_GUESSED, draw_guessed, guessing_loss
from local_backend.embedded.corpus import Topic, load_topics
from local_backend.embedded.initialization import begin_copying
from local_backend.embedded.losses import loss_of, only_quoted
from local_backend.embedded.optimizers import LearningRates, Optimizers
from local_backend.embedded.quoting import begin_quoting, fits
from local_backend.embedded.tokenization import guess_token_ids, token_traits, train_tokenizer
from local_backend.training.masks import use_fast_attention

# A step learns from one batch of each stream, a batch holding examples of one kind. First the circuits are
# tuned; then the model learns to tell topics apart and to begin answers, from many short examples; then what
# to say, from long ones; at last whole answers above all, in which one slip spoils what follows.
STREAMS_TUNING: Sequence[Mapping[str, float]] = ({"questions": 0.6, "many questions": 0.4},)
STREAMS_FIRST: Sequence[Mapping[str, float]] = (
    {"beginning": 0.7, "skeleton": 0.15, "plain": 0.15},
    {"choices": 0.2, "questions": 0.4, "repeat": 0.2, "short documents": 0.2},
)
STREAMS_THEN: Sequence[Mapping[str, float]] = (
    {"plain": 0.28, "expansion": 0.17, "skeleton": 0.21, "several": 0.12, "beginning": 0.22},
    {
        "questions": 0.27,
        "many questions": 0.1,
        "documents": 0.15,
        "edit": 0.3,
        "condense": 0.12,
        "repeat": 0.06,
    },
)
STREAMS_LAST: Sequence[Mapping[str, float]] = (
    {"plain": 0.75, "expansion": 0.1, "skeleton": 0.05, "several": 0.1},
    STREAMS_THEN[1],
)


# Of a batch's tokens so many in the consistency stage, where as many guess tokens as there are places hang
# from each of them; and how much the batch counts that has none.
_CONSISTENCY_SHARE, _KEPT_WEIGHT = 0.65, 0.5

_M_TRIM_THRESHOLD, _M_MMAP_MAX = -1, -4  # of glibc's malloc.h


@dataclass(frozen=True)
class BuildOptions:
    """What a build depends on.

    Attributes:
        num_steps: Optimizer steps of the plain model.
        num_tuning_steps: How many of them, at the beginning, tune the circuits alone, on questions about
            documents, while nothing else changes.
        num_first_steps: How many after these draw from ``STREAMS_FIRST``; the others from ``STREAMS_THEN``.
        num_last_steps: How many at the end draw from ``STREAMS_LAST`` instead.
        num_consistency_steps: Steps of the consistency stage; 0 leaves it out.
        tokens_per_batch: Padded tokens of each of a step's two batches.
        learning_rates: At their peak: after warm-up, until they fall linearly in the last ``decay_share`` of
            the steps.
        then_learning_rate_share: Of the learning rates, after the first steps: longer at their peaks, the
            stream grows without bound, because the ballast keeps the norms from shrinking it.
        last_learning_rate_share: The same of the last steps, when it has fallen already.
        consistency_learning_rate_share: Peak of the consistency stage, as a share of the plain one.
        seed: Of the initial weights and of every step's examples.
        hidden_size, intermediate_size, num_layers, num_heads, head_size, vocabulary_size, rope_theta: Shape
            of the model, which with its tokenizer fits into 16 MB.
    """

    num_steps: int = 1750
    num_tuning_steps: int = 40
    num_first_steps: int = 240
    num_last_steps: int = 150
    num_consistency_steps: int = 350
    tokens_per_batch: int = 2_000
    learning_rates: LearningRates = field(default_factory=LearningRates)
    then_learning_rate_share: float = 0.4
    last_learning_rate_share: float = 0.05
    consistency_learning_rate_share: float = 0.4
    warmup_steps: int = 30
    decay_share: float = 0.54
    weight_decay: float = 0.5
    seed: int = 0
    hidden_size: int = 380
    intermediate_size: int = 256
    num_layers: int = 6
    num_heads: int = 5
    head_size: int = 64
    vocabulary_size: int = 4096
    rope_theta: float = 1e12


def make_model(
    options: BuildOptions, tokenizer: PreTrainedTokenizerFast, topics: Sequence[Topic] | None = None
) -> LlamaForCausalLM:
    """The untrained model, float32, seeded; see :mod:`local_backend.embedded.quoting`."""
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
        begin_quoting(model, token_traits(tokenizer, load_topics() if topics is None else topics))
    else:
        begin_copying(model)
    return model


def rate_at(step: int, options: BuildOptions) -> float:
    """Share of the learning rate at a step: warm-up, the first steps, a lower plateau, a fall to a fiftieth.

    Then once more, lower, for the last steps, and for the consistency stage. While the circuits are tuned it
    is that of warm-up.
    """
    first = options.num_tuning_steps
    if step >= options.num_steps - options.num_last_steps and step < options.num_steps:
        num_left = options.num_steps - step
        return options.last_learning_rate_share * max(0.02, num_left / options.num_last_steps)
    if step < options.num_steps:
        place, count = max(0, step - first), options.num_steps - options.num_last_steps - first
        peak = 1.0 if place < options.num_first_steps else options.then_learning_rate_share
    else:
        place, count = step - options.num_steps, options.num_consistency_steps
        peak = options.consistency_learning_rate_share
    warm = min(1.0, (place + 1) / options.warmup_steps)
    fall = min(1.0, (count - place) / max(1.0, options.decay_share * count))
    return peak * min(warm, max(0.02, fall))


def _streams_at(step: int, options: BuildOptions) -> Sequence[Mapping[str, float]]:
    if step < options.num_tuning_steps:
        return STREAMS_TUNING
    if step < options.num_tuning_steps + options.num_first_steps:
        return STREAMS_FIRST
    is_last = options.num_steps - options.num_last_steps <= step < options.num_steps
    return STREAMS_LAST if is_last else STREAMS_THEN


def train(
    model: LlamaForCausalLM,
    tokenizer: PreTrainedTokenizerFast,
    topics: Sequence[Topic],
    options: BuildOptions,
    checkpoint: Path,
    *,
    last_step: int,
    checkpoint_every: int = 100,
) -> Iterator[tuple[int, dict[str, float]]]:
    """Train in place up to ``last_step``, resuming from ``checkpoint`` where it exists.

    Yields:
        Each step's number and its losses by kind of example.

    Raises:
        ValueError: The checkpoint is of a build with other options.
    """
    optimizers = Optimizers(
        model,
        options.learning_rates,
        weight_decay=options.weight_decay,
        num_tuning_steps=options.num_tuning_steps,
    )
    first = 0
    if checkpoint.exists():
        state = torch.load(checkpoint, weights_only=True)
        if state["options"] != asdict(options):
            raise ValueError(
                f"{checkpoint} is of another build, {state['options']}; asked for {asdict(options)}. "
                "Delete it, or give another --checkpoint."
            )
        model.load_state_dict(state["model"])
        optimizers.load(state["optimizers"])
        first = state["step"]
    guess_ids = guess_token_ids(tokenizer, NUM_GUESSED)
    use_fast_attention(model)
    model.train()
    for step in range(first, last_step):
        losses = {}
        streams, weight, num_tokens = _streams_at(step, options), 1.0, options.tokens_per_batch
        if step >= options.num_steps:
            num_tokens = int(_CONSISTENCY_SHARE * num_tokens)
            guessed = draw_guessed(f"{options.seed}:{step}", num_tokens, topics, tokenizer, guess_ids)
            loss = guessing_loss(model, guessed)
            loss.backward()
            optimizers.collect(for_circuits=False)
            losses["guessed"] = loss.item()
            streams, weight = (KEPT_KINDS,), _KEPT_WEIGHT
        for number, shares in enumerate(streams):
            seed = f"{options.seed}:{step}:{number}"
            kind, batch = draw_batch(seed, shares, num_tokens, topics, tokenizer)
            loss = loss_of(model, only_quoted(batch) if step < options.num_tuning_steps else batch)
            loss.backward()
            optimizers.collect(weight=weight)
            losses[kind] = loss.item()
        optimizers.step(step, rate_at(step, options))
        yield step, losses
        if (step + 1) % checkpoint_every == 0 or step + 1 == last_step:
            _write_checkpoint(checkpoint, options, model, optimizers, step + 1)
    model.eval()
    model.set_attn_implementation("sdpa")


def _write_checkpoint(
    path: Path, options: BuildOptions, model: LlamaForCausalLM, optimizers: Optimizers, step: int
) -> None:
    path.parent.mkdir(parents=True, exist_ok=True)
    state = {
        "options": asdict(options),
        "model": model.state_dict(),
        "optimizers": optimizers.state(),
        "step": step,
    }
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
    options = BuildOptions(
        num_steps=given.steps,
        num_tuning_steps=min(given.tuning_steps, given.steps),
        num_first_steps=given.first_steps,
        num_last_steps=min(given.last_steps, max(0, given.steps - given.tuning_steps - given.first_steps)),
        num_consistency_steps=0 if given.without_consistency else given.consistency_steps,
        seed=given.seed,
        num_layers=given.layers,
        hidden_size=given.hidden,
        tokens_per_batch=given.tokens_per_batch,
    )
    _keep_freed_memory()
    topics = load_topics()
    tokenizer = train_tokenizer(topics, options.vocabulary_size)
    model = make_model(options, tokenizer, topics)
    num_parameters = sum(parameter.numel() for parameter in model.parameters())
    print(
        f"{len(topics)} topics, {len(tokenizer)} tokens, {num_parameters / 1e6:.1f} M parameters", flush=True
    )
    num_steps = options.num_steps + options.num_consistency_steps
    plain_output = given.plain_output
    if not options.num_consistency_steps and plain_output is None:
        plain_output = given.output
    started = time.monotonic()
    smooth: dict[str, float] = {}
    # One call trains up to the plain model, the next goes on from its checkpoint.
    for last_step in dict.fromkeys((options.num_steps, num_steps)):
        steps = train(
            model,
            tokenizer,
            topics,
            options,
            given.checkpoint,
            last_step=last_step,
            checkpoint_every=given.checkpoint_every,
        )
        for step, losses in steps:
            for kind, loss in losses.items():
                smooth[kind] = 0.95 * smooth.get(kind, loss) + 0.05 * loss
            if (step + 1) % 20 == 0:
                told = "  ".join(f"{kind} {loss:.3f}" for kind, loss in sorted(smooth.items()))
                print(f"step {step + 1}/{num_steps}  {time.monotonic() - started:.0f} s  {told}", flush=True)
            if step + 1 == given.stop_after:
                print(f"left off after step {step + 1}")
                return
        if (
            last_step == options.num_steps
            and plain_output is not None
            and _step_of(given.checkpoint) == last_step
        ):
            _write(model, tokenizer, topics, plain_output, options, is_tuned=False)
    if options.num_consistency_steps:
        _write(model, tokenizer, topics, given.output, options, is_tuned=True)


def _keep_freed_memory() -> None:
    """Let what is freed be used again: to map the pages of large tensors anew takes a third of a step."""
    mallopt = getattr(ctypes.CDLL(None), "mallopt", None) if sys.platform == "linux" else None
    if mallopt is not None:
        mallopt(_M_MMAP_MAX, 0)
        mallopt(_M_TRIM_THRESHOLD, 2**31 - 1)


def _step_of(checkpoint: Path) -> int:
    return int(torch.load(checkpoint, weights_only=True)["step"])


def _write(
    model: LlamaForCausalLM,
    tokenizer: PreTrainedTokenizerFast,
    topics: tuple[Topic, ...],
    folder: Path,
    options: BuildOptions,
    *,
    is_tuned: bool,
) -> None:
    shutil.rmtree(folder, ignore_errors=True)
    if is_tuned:  # by which drafters know that there are such
        model.config.guess_token_ids = list(guess_token_ids(tokenizer, NUM_GUESSED))
    save(model, tokenizer, folder)
    names = sorted(topic.name for topic in topics)
    (folder / "topics.json").write_text(json.dumps(names, indent=0) + "\n", encoding="utf-8")
    write_card(
        folder,
        topics,
        num_steps=options.num_steps,
        num_consistency_steps=options.num_consistency_steps if is_tuned else 0,
    )
    print(f"written to {folder}", flush=True)


def _parse(arguments: Sequence[str] | None) -> argparse.Namespace:
    default = BuildOptions()
    parser = argparse.ArgumentParser(prog="python -m local_backend.embedded.build", description=__doc__)
    parser.add_argument("--output", type=Path, default=Path(__file__).parent / "weights")
    parser.add_argument("--plain-output", type=Path, help="where to keep the model before it is tuned")
    parser.add_argument(
        "--without-consistency", action="store_true", help="leave the plain model as it is, in --output"
    )
    parser.add_argument("--checkpoint", type=Path, default=Path("build/embedded/checkpoint.pt"))
    parser.add_argument("--steps", type=int, default=default.num_steps)
    parser.add_argument("--tuning-steps", type=int, default=default.num_tuning_steps)
    parser.add_argument("--first-steps", type=int, default=default.num_first_steps)
    parser.add_argument("--last-steps", type=int, default=default.num_last_steps)
    parser.add_argument("--consistency-steps", type=int, default=default.num_consistency_steps)
    parser.add_argument("--seed", type=int, default=default.seed)
    parser.add_argument("--layers", type=int, default=default.num_layers)
    parser.add_argument("--hidden", type=int, default=default.hidden_size)
    parser.add_argument("--tokens-per-batch", type=int, default=default.tokens_per_batch)
    parser.add_argument("--checkpoint-every", type=int, default=100, help="steps between two checkpoints")
    parser.add_argument("--stop-after", type=int, help="leave off after this many steps; run again to go on")
    return parser.parse_args(arguments)


if __name__ == "__main__":
    main()
