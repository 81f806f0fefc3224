"""The tokenizer of the embedded model: byte-level BPE with a chat template, trained on its corpus."""

from __future__ import annotations

import math
import random
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from functools import cache

import torch
from transformers import PreTrainedTokenizerFast

from local_backend.embedded.corpus import Topic, all_texts, request_table
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
_ENDS = {".", "!", "?", ":", "]", "-"}
_STOPS, _CLOSING = (".", "!", "?"), "\"'`)"  # a token that holds a stop and what closes is an end, too
_LAYOUT = {"[", "-", "#", "<"}


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


# Bytes that occur in no text in UTF-8; a byte's own token is the character of that number.
_BYTES_OF_NO_TEXT = (0xC0, 0xC1, *range(0xF5, 0x100))


def guess_token_ids(tokenizer: PreTrainedTokenizerFast, count: int) -> tuple[int, ...]:
    """Ids of ``count`` tokens that no text holds, so that they can stand for tokens to come."""
    vocabulary = tokenizer.get_vocab()
    return tuple(vocabulary[chr(byte)] for byte in _BYTES_OF_NO_TEXT[:count])


@dataclass(frozen=True)
class TokenTraits:
    """What :func:`~local_backend.embedded.circuits.begin_with_circuits` must know of each token.

    Attributes:
        rarity: How rare a token's word is in prompts with documents and their answers, from 0, everywhere,
            to 1; below 0 what is no word.
        ends: 1 for tokens behind which a sentence or a line begins.
        beginning: What speaks against a sentence that begins with the token, 0 or less: a small letter or a
            digit without a space, as behind the point of a number; all of what an end says for layout, which
            begins a line but no sentence: brackets, dashes, further line ends.
        words: A number for each word, alike in any case, behind a space or not.
        said_first: 1 for tokens a quotation can begin with, behind its announcement, -1 for others.
        nothing: Ids of the tokens that begin every prompt.
        cue: The token before the one behind which a quotation begins.
        digits: Ids of the ten digits.
        paragraph: Id of what points are apart by.
        opening: Id of what opens a point's heading.
        adds: Ids of words, and of the quotation mark, of which two in a row stand before a heading that is to
            be added.
        shortens: Ids of words that ask for less; of one that is several tokens, the last.
        reply: Id of what begins a reply.
        line: Id of what begins a line.
        end: Id of what ends a message.
        topics: For each token how much it speaks for each topic, from 0 to 1.
    """

    rarity: list[float]
    ends: list[float]
    beginning: list[float]
    said_first: list[float]
    words: list[int]
    nothing: tuple[int, ...]
    cue: int
    digits: tuple[int, ...]
    paragraph: int
    opening: int
    adds: tuple[int, ...]
    shortens: tuple[int, ...]
    reply: int
    line: int
    end: int
    topics: list[list[float]]


def token_traits(tokenizer: PreTrainedTokenizerFast, topics: Sequence[Topic]) -> TokenTraits:
    """The traits of every token of a tokenizer that :func:`train_tokenizer` made for ``topics``."""
    special = set(tokenizer.all_special_ids)

    def last_token(text: str) -> int:
        return int(tokenizer.encode(text, add_special_tokens=False)[-1])

    texts = ["" if token in special else str(tokenizer.decode([token])) for token in range(len(tokenizer))]
    bare = [text.strip(" ") for text in texts]
    layout = [float("\n" in text or text in _LAYOUT) for text in bare]
    numbers: dict[str, int] = {}
    words = [
        numbers.setdefault(text.lower() or f"<{token}>", len(numbers)) for token, text in enumerate(bare)
    ]
    return TokenTraits(
        rarity=_rarity(tokenizer, words),
        ends=[float("\n" in text or text in _ENDS or text.strip(_CLOSING)[-1:] in _STOPS) for text in bare],
        beginning=[
            -1.0 if is_layout else -0.7 if text.strip(" ")[:1].islower() or text[:1].isdigit() else 0.0
            for text, is_layout in zip(texts, layout, strict=True)
        ],
        said_first=[1.0 if text[:1] == " " and not text[1:2].islower() else -1.0 for text in texts],
        words=words,
        nothing=tuple(tokenizer.get_vocab()[f"<|{role}|>"] for role in ROLES[:2]),
        cue=announcement(tokenizer)[-2],
        digits=tuple(last_token(digit) for digit in "0123456789"),
        paragraph=last_token("\n\n"),
        opening=last_token(" **"),
        adds=tuple(last_token(word) for word in (" on", " about", ":", ' "')),
        shortens=tuple(last_token(word) for word in ("Shorter", " shorter", " shorten", " concise")),
        reply=last_token("<|assistant|>"),
        line=last_token("\n"),
        end=last_token(END),
        topics=_associations(tokenizer, topics, words),
    )


def _associations(
    tokenizer: PreTrainedTokenizerFast, topics: Sequence[Topic], words: Sequence[int]
) -> list[list[float]]:
    """Positive pointwise mutual information of words and topics, of few counts the less, at most 1."""
    counts = torch.zeros(max(words) + 1, len(topics))
    for number, topic in enumerate(topics):
        questions = " ".join((topic.title, *topic.taught_questions))
        for text, weight in ((questions, 2.0), (topic.answer, 1.0)):
            for token_id in tokenizer.encode(text, add_special_tokens=False):
                counts[words[token_id], number] += weight
    total = counts.sum(1, keepdim=True)
    share = counts / total.clamp(min=1.0)
    information = (share * len(topics)).clamp(min=1.0).log() / math.log(len(topics))
    associated = information * total / (total + 3.0) * (counts > 0)
    return [[float(value) for value in associated[word]] for word in words]


@cache
def announcement(tokenizer: PreTrainedTokenizerFast) -> tuple[int, ...]:
    """The tokens by which replies from documents announce a quotation; the last is the colon."""
    text = request_table()["documents"]["reply"].split("{", 1)[0].rstrip()
    return tuple(tokenizer.encode(text, add_special_tokens=False))


def _rarity(tokenizer: PreTrainedTokenizerFast, words: Sequence[int]) -> list[float]:
    counts = torch.ones(max(words) + 1)
    rng = random.Random("rarity")
    for _ in range(_NUM_SAMPLES):
        request, _, reply = make_example("documents", rng).branches[0]
        for token_id in tokenizer.encode(request) + tokenizer.encode(reply):
            counts[words[token_id]] += 1
    rare = ((-(counts / counts.sum()).log() - 5) / 2.7).clamp(0, 1)[torch.tensor(words)]
    for token in range(len(tokenizer)):
        if not any(map(str.isalnum, str(tokenizer.decode([token])))):
            rare[token] = -1.5
    rare[tokenizer.all_special_ids] = -1.5
    return [float(value) for value in rare]


__all__ = [
    "CHAT_TEMPLATE",
    "END",
    "PAD",
    "ROLES",
    "TokenTraits",
    "announcement",
    "guess_token_ids",
    "token_traits",
    "train_tokenizer",
]
