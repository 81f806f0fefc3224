"""Rebuilds the embedded model from its corpus: tokenizer, weights, model card.

Run ``python -m local_backend.embedded.build``; see ``--help``. On two CPU cores it takes about half an
hour. A build that was interrupted continues from its last checkpoint and ends with the same weights,
because every step draws its examples from a generator seeded with the step's number.

The points of one outline are trained as branches behind one shared prefix, under a mask in which a branch
sees the prefix and itself: the same arrangement in which they are decoded.
"""

from __future__ import annotations

import argparse
import math
import random
import shutil
import time
from collections.abc import Iterator, Sequence
from dataclasses import asdict, dataclass
from pathlib import Path

import torch
from torch import Tensor
from torch.nn import functional
from transformers import LlamaConfig, LlamaForCausalLM, PreTrainedTokenizerFast

from local_backend.embedded.card import write_card
from local_backend.embedded.corpus import Example, Topic, all_texts, load_topics, make_example
from local_backend.kv_cache import num_shared

END, PAD = "<|end|>", "<|pad|>"
ROLES = ("system", "user", "assistant")
CHAT_TEMPLATE = (
    "{%- for message in messages -%}"
    "{{ '<|' + message['role'] + '|>' + message['content'] + '<|end|>' }}"
    "{%- endfor -%}"
    "{%- if add_generation_prompt -%}{{ '<|assistant|>' }}{%- endif -%}"
)
# Shares of training steps; a step holds examples of one kind, so that rows are of like length. First the
# model learns what a question is about, from many short examples; then what to say, from long ones; at last,
# gently, to tell the topics apart when asked for an outline, where the question stands far from the answer.
KINDS_FIRST = {"expansion": 0.28, "plain": 0.14, "skeleton": 0.34, "beginning": 0.24}
KINDS_THEN = {"expansion": 0.44, "plain": 0.34, "skeleton": 0.14, "beginning": 0.08}
KINDS_LAST = {"expansion": 0.12, "plain": 0.12, "skeleton": 0.6, "beginning": 0.16}
# Which topic an answer is about is decided in its first tokens; without weight they drown in the rest.
NUM_DECIDING_TOKENS, DECIDING_WEIGHT = 6, 4.0


@dataclass(frozen=True)
class BuildOptions:
    """What a build depends on.

    Attributes:
        num_steps: Optimizer steps before the last ones.
        num_first_steps: How many of them draw from ``KINDS_FIRST``; those that follow, from ``KINDS_THEN``.
        num_last_steps: How many more draw from ``KINDS_LAST``, at a quarter of the learning rate.
        tokens_per_step: Padded tokens of a step.
        learning_rate: At its peak, after warm-up; it falls to a twentieth along a cosine, in the last steps
            once more.
        seed: Of the initial weights and of every step's examples.
        hidden_size, num_layers, num_heads, vocabulary_size: Shape of the model.
    """

    num_steps: int = 1400
    num_first_steps: int = 500
    num_last_steps: int = 320
    tokens_per_step: int = 5_200
    learning_rate: float = 2e-3
    warmup_steps: int = 80
    weight_decay: float = 0.05
    seed: int = 0
    hidden_size: int = 256
    num_layers: int = 6
    num_heads: int = 4
    vocabulary_size: int = 4096


def train_tokenizer(topics: Sequence[Topic], vocabulary_size: int) -> PreTrainedTokenizerFast:
    """A byte-level BPE tokenizer: every string has a code, and decoding gives it back."""
    from tokenizers import Tokenizer, decoders, models, pre_tokenizers, trainers

    tokenizer = Tokenizer(models.BPE())
    tokenizer.pre_tokenizer = pre_tokenizers.Sequence(
        [pre_tokenizers.Digits(individual_digits=True), pre_tokenizers.ByteLevel(add_prefix_space=False)]
    )
    tokenizer.decoder = decoders.ByteLevel()
    special = [PAD, END, *(f"<|{role}|>" for role in ROLES)]
    trainer = trainers.BpeTrainer(
        vocab_size=vocabulary_size,
        special_tokens=special,
        initial_alphabet=pre_tokenizers.ByteLevel.alphabet(),
        show_progress=False,
    )
    tokenizer.train_from_iterator(all_texts(topics), trainer)
    fast = PreTrainedTokenizerFast(
        tokenizer_object=tokenizer,
        pad_token=PAD,
        eos_token=END,
        additional_special_tokens=special[2:],
        model_max_length=2048,
        clean_up_tokenization_spaces=False,
        padding_side="left",
    )
    fast.chat_template = CHAT_TEMPLATE
    return fast


def make_model(options: BuildOptions, tokenizer: PreTrainedTokenizerFast) -> LlamaForCausalLM:
    """The untrained model, float32, seeded."""
    torch.manual_seed(options.seed)
    config = LlamaConfig(
        vocab_size=len(tokenizer),
        hidden_size=options.hidden_size,
        intermediate_size=round(options.hidden_size * 2.6875 / 16) * 16,
        num_hidden_layers=options.num_layers,
        num_attention_heads=options.num_heads,
        num_key_value_heads=options.num_heads,
        max_position_embeddings=2048,
        tie_word_embeddings=True,
        bos_token_id=None,
        eos_token_id=tokenizer.eos_token_id,
        pad_token_id=tokenizer.pad_token_id,
    )
    return LlamaForCausalLM(config)


@dataclass(frozen=True)
class EncodedExample:
    """Token ids of an :class:`Example`: a shared prefix, then branches with the first learned position."""

    prefix_ids: list[int]
    branches: list[tuple[list[int], int]]

    @property
    def num_tokens(self) -> int:
        """Tokens of the row this example fills."""
        return len(self.prefix_ids) + sum(len(ids) for ids, _ in self.branches)


def encode_example(example: Example, tokenizer: PreTrainedTokenizerFast) -> EncodedExample:
    """Tokenize as at inference: the rendered prompt and the learned rest apart, then share what is common."""
    turns = [{"role": turn.role, "content": turn.content} for turn in example.turns]
    prompts, rests = [], []
    for request, start, rest in example.branches:
        prompt = tokenizer.apply_chat_template(
            [*turns, {"role": "user", "content": request}], tokenize=False, add_generation_prompt=True
        )
        prompts.append(tokenizer.encode(f"{prompt}{start}", add_special_tokens=False))
        rests.append(tokenizer.encode(rest + (END if example.ends else ""), add_special_tokens=False))
    common = num_shared(prompts[0], prompts[-1]) - 1 if len(prompts) > 1 else 0
    branches = [
        (prompt[common:] + rest, len(prompt) - common) for prompt, rest in zip(prompts, rests, strict=True)
    ]
    return EncodedExample(prompts[0][:common], branches)


def collate(examples: Sequence[EncodedExample], pad_id: int) -> dict[str, Tensor]:
    """Rows of one batch.

    Returns:
        ``input_ids``, ``position_ids``, ``targets`` (-100 where nothing is learned) and ``weights``, each
        ``[rows, width]``, and ``attention_mask`` ``[rows, 1, width, width]``, additive.
    """
    width = max(example.num_tokens for example in examples)
    shape = (len(examples), width)
    input_ids = torch.full(shape, pad_id)
    position_ids = torch.zeros(shape, dtype=torch.long)
    targets = torch.full(shape, -100)
    weights = torch.ones(shape)
    branch_of = torch.full(shape, -1)
    for row, example in enumerate(examples):
        column = len(example.prefix_ids)
        input_ids[row, :column] = torch.tensor(example.prefix_ids, dtype=torch.long)
        position_ids[row, :column] = torch.arange(column)
        branch_of[row, :column] = 0
        for number, (ids, first_learned) in enumerate(example.branches, 1):
            end = column + len(ids)
            input_ids[row, column:end] = torch.tensor(ids)
            start = len(example.prefix_ids)
            position_ids[row, column:end] = torch.arange(start, start + len(ids))
            branch_of[row, column:end] = number
            learned = column + first_learned - 1
            targets[row, learned : end - 1] = torch.tensor(ids[first_learned:])
            weights[row, learned : learned + NUM_DECIDING_TOKENS] = DECIDING_WEIGHT
            column = end
    same_branch = branch_of[:, None, :] == branch_of[:, :, None]
    seen = (same_branch | (branch_of[:, None, :] == 0)) & torch.ones(width, width, dtype=torch.bool).tril()
    mask = torch.zeros(len(examples), 1, width, width).masked_fill(
        ~seen[:, None], torch.finfo(torch.float32).min
    )
    return {
        "input_ids": input_ids,
        "position_ids": position_ids,
        "targets": targets,
        "weights": weights,
        "attention_mask": mask,
    }


def batch_of_step(
    step: int, options: BuildOptions, topics: Sequence[Topic], tokenizer: PreTrainedTokenizerFast
) -> dict[str, Tensor]:
    """The examples of one step; the same for the same step, whatever was trained before."""
    rng = random.Random(f"{options.seed}:{step}")
    if step >= options.num_steps:
        kinds = KINDS_LAST
    else:
        kinds = KINDS_FIRST if step < options.num_first_steps else KINDS_THEN
    kind = rng.choices(list(kinds), weights=list(kinds.values()))[0]
    examples: list[EncodedExample] = []
    widest = 0
    while True:
        example = encode_example(make_example(kind, rng.choice(topics), topics, rng), tokenizer)
        widest = max(widest, example.num_tokens)
        if examples and widest * (len(examples) + 1) > options.tokens_per_step:
            break
        examples.append(example)
    return collate(examples, tokenizer.pad_token_id)


def learning_rate_at(step: int, options: BuildOptions) -> float:
    """Linear warm-up, then a cosine to a twentieth of the peak; in the last steps from a quarter of it."""
    if step < options.warmup_steps:
        return options.learning_rate * (step + 1) / options.warmup_steps
    if step < options.num_steps:
        peak = options.learning_rate
        progress = (step - options.warmup_steps) / max(1, options.num_steps - options.warmup_steps)
    else:
        peak = options.learning_rate / 4
        progress = (step - options.num_steps) / options.num_last_steps
    return peak * (0.05 + 0.95 * 0.5 * (1 + math.cos(math.pi * progress)))


def loss_of(model: LlamaForCausalLM, batch: dict[str, Tensor]) -> Tensor:
    """Weighted mean cross-entropy over the learned positions."""
    with torch.autocast("cpu", dtype=torch.bfloat16):
        hidden = model.model(
            input_ids=batch["input_ids"],
            position_ids=batch["position_ids"],
            attention_mask=batch["attention_mask"],
            use_cache=False,
        ).last_hidden_state
        learned = batch["targets"] != -100
        logits = model.lm_head(hidden[learned])  # [learned positions, vocabulary]
    losses = functional.cross_entropy(logits.float(), batch["targets"][learned], reduction="none")
    weights = batch["weights"][learned]
    return (losses * weights).sum() / weights.sum()


def train(
    model: LlamaForCausalLM,
    tokenizer: PreTrainedTokenizerFast,
    topics: Sequence[Topic],
    options: BuildOptions,
    checkpoint: Path,
    *,
    checkpoint_every: int = 100,
) -> Iterator[tuple[int, float]]:
    """Train in place, resuming from ``checkpoint`` where it exists; yields each step's number and loss.

    Raises:
        ValueError: The checkpoint is of a build with other options.
    """
    decayed = [p for p in model.parameters() if p.dim() >= 2]
    rest = [p for p in model.parameters() if p.dim() < 2]
    optimizer = torch.optim.AdamW(
        [{"params": decayed, "weight_decay": options.weight_decay}, {"params": rest, "weight_decay": 0.0}],
        lr=options.learning_rate,
        betas=(0.9, 0.98),
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
        optimizer.load_state_dict(state["optimizer"])
        first = state["step"]
    model.train()
    for step in range(first, options.num_steps + options.num_last_steps):
        for group in optimizer.param_groups:
            group["lr"] = learning_rate_at(step, options)
        loss = loss_of(model, batch_of_step(step, options, topics, tokenizer))
        optimizer.zero_grad(set_to_none=True)
        loss.backward()
        torch.nn.utils.clip_grad_norm_(model.parameters(), 1.0)
        optimizer.step()
        yield step, loss.item()
        if (step + 1) % checkpoint_every == 0:
            checkpoint.parent.mkdir(parents=True, exist_ok=True)
            state = {
                "options": asdict(options),
                "model": model.state_dict(),
                "optimizer": optimizer.state_dict(),
                "step": step + 1,
            }
            partial = checkpoint.with_suffix(".partial")
            torch.save(state, partial)
            partial.replace(checkpoint)
    model.eval()


def save(model: LlamaForCausalLM, tokenizer: PreTrainedTokenizerFast, folder: Path) -> None:
    """Write weights (bfloat16, safetensors), configuration and tokenizer."""
    folder.mkdir(parents=True, exist_ok=True)
    model.bfloat16().save_pretrained(folder)
    tokenizer.save_pretrained(folder)


def main(arguments: Sequence[str] | None = None) -> None:
    """Command line of the build."""
    default = BuildOptions()
    parser = argparse.ArgumentParser(prog="python -m local_backend.embedded.build", description=__doc__)
    parser.add_argument("--output", type=Path, default=Path(__file__).parent / "weights")
    parser.add_argument("--checkpoint", type=Path, default=Path("build/embedded/checkpoint.pt"))
    parser.add_argument("--steps", type=int, default=default.num_steps)
    parser.add_argument("--last-steps", type=int, default=default.num_last_steps)
    parser.add_argument("--seed", type=int, default=default.seed)
    parser.add_argument("--layers", type=int, default=default.num_layers)
    parser.add_argument("--hidden", type=int, default=default.hidden_size)
    parser.add_argument("--tokens-per-step", type=int, default=default.tokens_per_step)
    parser.add_argument("--checkpoint-every", type=int, default=100, help="steps between two checkpoints")
    parser.add_argument("--stop-after", type=int, help="leave off after this many steps; run again to go on")
    options_given = parser.parse_args(arguments)
    options = BuildOptions(
        num_steps=options_given.steps,
        num_last_steps=options_given.last_steps,
        seed=options_given.seed,
        num_layers=options_given.layers,
        hidden_size=options_given.hidden,
        tokens_per_step=options_given.tokens_per_step,
    )
    topics = load_topics()
    tokenizer = train_tokenizer(topics, options.vocabulary_size)
    model = make_model(options, tokenizer)
    num_parameters = sum(parameter.numel() for parameter in model.parameters())
    print(
        f"{len(topics)} topics, {len(tokenizer)} tokens, {num_parameters / 1e6:.1f} M parameters", flush=True
    )
    num_steps = options.num_steps + options.num_last_steps
    started, smooth = time.monotonic(), None
    steps = train(
        model,
        tokenizer,
        topics,
        options,
        options_given.checkpoint,
        checkpoint_every=options_given.checkpoint_every,
    )
    for number, (step, loss) in enumerate(steps, 1):
        smooth = loss if smooth is None else 0.95 * smooth + 0.05 * loss
        if (step + 1) % 20 == 0:
            seconds = time.monotonic() - started
            print(f"step {step + 1}/{num_steps}  loss {smooth:.4f}  {seconds:.0f} s", flush=True)
        if number == options_given.stop_after:
            print(f"left off after step {step + 1}")
            return
    shutil.rmtree(options_given.output, ignore_errors=True)
    save(model, tokenizer, options_given.output)
    write_card(options_given.output, model, tokenizer, topics, num_steps=num_steps, loss=smooth or math.nan)
    print(f"written to {options_given.output}")


if __name__ == "__main__":
    main()
