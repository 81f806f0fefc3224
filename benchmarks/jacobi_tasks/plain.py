"""Plain models of a task: a tokenizer and a small Llama trained on its cases, autoregressively.

Knows tasks and the trainer. Consistency training comes later, with the same code as for any other model.
"""

from __future__ import annotations

import random
from collections.abc import Sequence
from dataclasses import dataclass
from itertools import islice
from pathlib import Path
from typing import Any, cast

import torch
from transformers import LlamaConfig, LlamaForCausalLM, PreTrainedTokenizerFast

from benchmarks.jacobi_tasks.base import Case, Task, draw_cases
from benchmarks.jacobi_tasks.initialization import begin_copying
from local_backend.models.loading import choose_device
from local_backend.training import NoiseOptions, TuneOptions, prepare
from local_backend.training.checkpoints import write_model
from local_backend.training.packing import use_fast_attention
from local_backend.training.trainer import Measure

END, PAD = "<|end|>", "<|pad|>"


@dataclass(frozen=True)
class PlainOptions:
    """Shape of a plain model and how long it trains.

    Attributes:
        hidden_size, num_layers, num_heads, vocabulary_size: Shape.
        num_cases: Cases it is trained on.
        num_steps: Optimizer steps.
        batch_size: Cases per step.
        learning_rate: Peak value, after a warm-up and before a cosine decay to nearly 0.
        learned_prompts: Share of cases whose prompt is also learned; prompts are mostly random.
        seed: Seed of weights, cases and order.
    """

    hidden_size: int = 128
    num_layers: int = 4
    num_heads: int = 4
    vocabulary_size: int = 1792
    num_cases: int = 32_000
    num_steps: int = 3600
    batch_size: int = 16
    learning_rate: float = 2e-3
    learned_prompts: float = 0.5
    seed: int = 0


def train_tokenizer(cases: Sequence[Case], vocabulary_size: int) -> PreTrainedTokenizerFast:
    """A byte-level BPE tokenizer with single digits."""
    from tokenizers import Regex, Tokenizer, decoders, models, pre_tokenizers, trainers

    tokenizer = Tokenizer(models.BPE())
    # Words and punctuation marks with the space before them, digits one by one.
    words = Regex(r" ?[A-Za-z]+|[0-9]| ?[^\sA-Za-z0-9]|\s+(?!\S)|\s")
    tokenizer.pre_tokenizer = pre_tokenizers.Sequence(
        [
            pre_tokenizers.Split(words, behavior="isolated"),
            pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=False),
        ]
    )
    tokenizer.decoder = decoders.ByteLevel()
    trainer = trainers.BpeTrainer(
        vocab_size=vocabulary_size,
        special_tokens=[PAD, END],
        initial_alphabet=pre_tokenizers.ByteLevel.alphabet(),
        show_progress=False,
    )
    tokenizer.train_from_iterator((case.prompt + case.answer for case in cases), trainer)
    return PreTrainedTokenizerFast(
        tokenizer_object=tokenizer,
        pad_token=PAD,
        eos_token=END,
        clean_up_tokenization_spaces=False,
        model_max_length=1024,
        padding_side="left",
    )


def make_model(options: PlainOptions, tokenizer: PreTrainedTokenizerFast) -> LlamaForCausalLM:
    """The untrained model, float32, seeded; if it is wide enough, it starts with an induction pair."""
    torch.manual_seed(options.seed)
    model = LlamaForCausalLM(
        LlamaConfig(
            vocab_size=len(tokenizer),
            hidden_size=options.hidden_size,
            intermediate_size=round(options.hidden_size * 2.6875 / 16) * 16,
            num_hidden_layers=options.num_layers,
            num_attention_heads=options.num_heads,
            num_key_value_heads=options.num_heads,
            max_position_embeddings=1024,
            tie_word_embeddings=True,
            bos_token_id=None,
            eos_token_id=tokenizer.eos_token_id,
            pad_token_id=tokenizer.pad_token_id,
        )
    )
    begin_copying(model)
    return model


def train_plain(
    task: Task,
    folder: Path,
    options: PlainOptions,
    *,
    tokenizer: PreTrainedTokenizerFast | None = None,
    measure: Measure | None = None,
) -> None:
    """Train a plain model of ``task`` and write it to ``folder``; resumes after an interruption.

    Args:
        task: The task to learn.
        folder: Output folder; checkpoints go to ``folder/work``.
        options: Shape and length of training.
        tokenizer: Tokenizer of another model of the task, to share it.
        measure: Called at the end, to print what it returns.
    """
    cases = list(islice(draw_cases(task, "train", seed=options.seed), options.num_cases))
    if tokenizer is None:
        tokenizer = train_tokenizer(cases[:6000], options.vocabulary_size)
    tokenizer.save_pretrained(folder)  # first, because ``measure`` needs it during training
    model = make_model(options, tokenizer)
    cast("Any", model).to(choose_device())
    use_fast_attention(model)
    prompts = tokenizer([case.prompt for case in cases], add_special_tokens=False)["input_ids"]
    answers = tokenizer([case.answer + END for case in cases], add_special_tokens=False)["input_ids"]
    rng = random.Random(options.seed)
    texts = []
    for prompt, answer in zip(prompts, answers, strict=True):
        # What follows the first token is learned, too, of some prompts.
        num_read = 1 if rng.random() < options.learned_prompts else len(prompt)
        text = (*prompt, *answer)
        texts.append((text[:num_read], text[num_read:]))
    learning = TuneOptions(
        num_steps=options.num_steps,
        batch_size=options.batch_size,
        rows_per_forward=options.batch_size,
        learning_rate=options.learning_rate,
        ar_weight=1.0,
        num_likely=0,
        save_steps=200,
        seed=options.seed,
        noise=NoiseOptions(num_streams=0),
    )
    _, training = prepare(model, texts, learning, folder / "work")
    training.run(folder / "work")
    if measure:
        print(f"{task.name}: {measure(model)}")
    write_model(model, tokenizer, folder)
