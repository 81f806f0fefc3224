"""The tokenizer of the embedded model: byte-level BPE with a chat template, trained on its corpus."""

from __future__ import annotations

import random
from collections.abc import Iterator, Sequence

import torch
from torch import Tensor
from transformers import PreTrainedTokenizerFast

from local_backend.embedded.corpus import Topic, all_texts
from local_backend.embedded.invented import words
from local_backend.embedded.tasks import make_example

END, PAD = "<|end|>", "<|pad|>"
ROLES = ("system", "user", "assistant")
CHAT_TEMPLATE = (
    "{%- for message in messages -%}"
    "{{ '<|' + message['role'] + '|>' + message['content'] + '<|end|>' }}"
    "{%- endfor -%}"
    "{%- if add_generation_prompt -%}{{ '<|assistant|>' }}{%- endif -%}"
)
_NUM_SAMPLES = 400


def _sampled_texts(topics: Sequence[Topic]) -> Iterator[str]:
    """Words and made-up documents, so that text outside the topics needs few tokens too."""
    for texts in words().values():
        for word in texts:
            yield from (f" {word}",) * 6
            yield word.capitalize()
    rng = random.Random("tokenizer")
    for _ in range(_NUM_SAMPLES):
        example = make_example("documents", rng, topics)
        yield from (turn.content for turn in example.turns)
        yield example.branches[0][0]


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
    tokenizer.train_from_iterator([*all_texts(topics), *_sampled_texts(topics)], trainer)
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


def rarity(tokenizer: PreTrainedTokenizerFast) -> Tensor:
    """How rare each token is in prompts with documents, ``[vocabulary]``: from 0, everywhere, to 1."""
    counts = torch.ones(len(tokenizer))
    rng = random.Random("rarity")
    for _ in range(_NUM_SAMPLES):
        for token_id in tokenizer.encode(make_example("documents", rng).branches[0][0]):
            counts[token_id] += 1
    rare = ((-(counts / counts.sum()).log() - 3) / 5).clamp(0, 1)
    rare[tokenizer.all_special_ids] = 0.0
    return rare


def ending_token_ids(tokenizer: PreTrainedTokenizerFast) -> list[int]:
    """Tokens behind which a sentence, a line or a message begins."""
    ends = {".", "!", "?", ":", "]", "-", "\n", "\n\n"}
    roles = {f"<|{role}|>" for role in ROLES}
    return sorted(
        token_id
        for token, token_id in tokenizer.get_vocab().items()
        if token in roles or str(tokenizer.decode([token_id])).strip(" ") in ends
    )


__all__ = ["CHAT_TEMPLATE", "END", "PAD", "ROLES", "ending_token_ids", "rarity", "train_tokenizer"]
