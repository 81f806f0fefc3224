"""Training examples as tensors: what a step of the build computes on.

The points of one outline are trained as branches behind one shared prefix, under a mask in which a branch
sees the prefix and itself: the same arrangement in which they are decoded. What a step draws depends on
its number and on the topics dealt so far, so that a build that was interrupted goes on as if it had not been.
"""

from __future__ import annotations

import random
from collections.abc import Mapping, Sequence
from dataclasses import dataclass

import torch
from torch import Tensor
from transformers import PreTrainedTokenizerFast

from local_backend.embedded.corpus import Example
from local_backend.embedded.decks import Decks
from local_backend.embedded.tasks import TOPIC_KINDS, make_example
from local_backend.embedded.tokenization import END, ROLES, announcement
from local_backend.kv_cache import num_shared
from local_backend.precision import bf16_is_fast

# What an answer is about is decided in its first tokens, and what a point is about in the point's; without
# weight they drown in the rest.
NUM_DECIDING_TOKENS, DECIDING_WEIGHT = 10, 4.0
# Where a copy departs from what stands behind the same few tokens in the prompt, or ends, what is said there
# and shortly behind it weighs as much, or more: of a changed answer all the rest is copied.
NUM_MATCHING, NUM_DEPARTING_TOKENS = 3, 3
PARAGRAPH = "\n\n"  # what points are apart by
NUM_POINTED = 3  # tokens of a quotation whose place must be found; behind them it goes on by itself


@dataclass(frozen=True)
class EncodedExample:
    """Token ids of an :class:`Example`.

    Attributes:
        prefix_ids: What the branches share.
        branches: The rest of each, with the first position that is learned.
        paragraphs: Where a branch begins a paragraph: its number, and the place in its learned rest.
        departures: Where a branch that copies goes on otherwise, or may, than behind the same tokens in its
            prompt, and where it ends: its number, and the place in its learned rest.
        quotations: Where a branch quotes: its number, the position of the reply's first quoted token, the
            position that token was taken from, both counted from the beginning of the prefix, and how many
            tokens are quoted.
    """

    prefix_ids: list[int]
    branches: list[tuple[list[int], int]]
    paragraphs: tuple[tuple[int, int], ...] = ()
    departures: tuple[tuple[int, int], ...] = ()
    quotations: tuple[tuple[int, int, int, int], ...] = ()

    @property
    def num_tokens(self) -> int:
        """Tokens of the row this example fills."""
        return len(self.prefix_ids) + sum(len(ids) for ids, _ in self.branches)


def prompt_ids(example: Example, request: str, start: str, tokenizer: PreTrainedTokenizerFast) -> list[int]:
    """Token ids of a branch's prompt, as at inference: the rendered messages and the start of the reply."""
    messages = [{"role": turn.role, "content": turn.content} for turn in example.turns]
    messages.append({"role": "user", "content": request})
    prompt = tokenizer.apply_chat_template(messages, tokenize=False, add_generation_prompt=True)
    return list(tokenizer.encode(f"{prompt}{start}", add_special_tokens=False))


def encode_example(example: Example, tokenizer: PreTrainedTokenizerFast) -> EncodedExample:
    """Tokenize the prompt and the learned rest apart, then share what the branches have in common."""
    prompts = [prompt_ids(example, request, start, tokenizer) for request, start, _ in example.branches]
    rests = [
        tokenizer.encode(rest + (END if example.ends else ""), add_special_tokens=False)
        for _, _, rest in example.branches
    ]
    common = min((num_shared(prompts[0], other) for other in prompts[1:]), default=1) - 1
    branches = [
        (prompt[common:] + rest, len(prompt) - common) for prompt, rest in zip(prompts, rests, strict=True)
    ]
    quotations = []
    for number, (prompt, rest) in enumerate(zip(prompts, rests, strict=True)):
        place, count = _quoted_place(prompt, rest, tokenizer)
        if count:
            quotations.append((number, len(prompt) + len(announcement(tokenizer)), place, count))
    apart = tokenizer.encode(PARAGRAPH, add_special_tokens=False)[-1]
    paragraphs = tuple(
        (number, place)
        for number, rest in enumerate(rests)
        for place in range(len(rest))
        if not place or rest[place - 1] == apart
    )
    departures = [
        (number, place)
        for number, (prompt, rest) in enumerate(zip(prompts, rests, strict=True))
        if example.copies
        for place in _departures(prompt, rest)
    ]
    return EncodedExample(prompts[0][:common], branches, paragraphs, tuple(departures), tuple(quotations))


def _departures(prompt: list[int], rest: list[int]) -> list[int]:
    """Places of ``rest`` where the prompt goes on otherwise, or may, behind the same tokens; and its end."""
    followers: dict[tuple[int, ...], set[int]] = {}
    for place in range(NUM_MATCHING, len(prompt)):
        followers.setdefault(tuple(prompt[place - NUM_MATCHING : place]), set()).add(prompt[place])
    text = prompt[-NUM_MATCHING:] + rest
    departs = [
        place
        for place, token in enumerate(rest)
        if followers.get(tuple(text[place : place + NUM_MATCHING]), {token}) != {token}
    ]
    return sorted({*departs, len(rest) - 1})


def _quoted_place(prompt: list[int], rest: list[int], tokenizer: PreTrainedTokenizerFast) -> tuple[int, int]:
    """Where in the prompt the sentence begins that a reply quotes, and how many tokens; 0 for none."""
    announced = announcement(tokenizer)
    if tuple(rest[: len(announced)]) != announced:
        return 0, 0
    quoted = rest[len(announced) :]
    # Its first token may be another at the beginning of a line, where no space stands before it.
    longest, found = 0, 0
    for place in range(len(prompt) - 1):
        if prompt[place + 1] != quoted[1]:
            continue
        length = num_shared(prompt[place + 1 :], quoted[1:])
        if length >= max(longest, NUM_POINTED):
            longest, found = length + 1, place
    return found, longest


def collate(
    examples: Sequence[EncodedExample], pad_id: int, *, departing_weight: float = DECIDING_WEIGHT
) -> dict[str, Tensor]:
    """Rows of one batch, padded on the right.

    Args:
        examples: One a row.
        pad_id: What rows are padded with.
        departing_weight: Of tokens where a copy departs.

    Returns:
        ``input_ids``, ``position_ids``, ``targets`` (-100 where nothing is learned) and ``weights``, each
        ``[rows, width]``; where a row has branches also ``attention_mask`` ``[rows, 1, width, width]``,
        additive (without it the rows are plainly causal). Where a row quotes, ``quotations`` ``[count, 4]``:
        the row, the column before the first quoted token, the column that token was taken from, and how many
        tokens are quoted.
    """
    width = max(example.num_tokens for example in examples)
    shape = (len(examples), width)
    input_ids = torch.full(shape, pad_id)
    position_ids = torch.zeros(shape, dtype=torch.long)
    targets = torch.full(shape, -100)
    weights = torch.ones(shape)
    branch_of = torch.full(shape, -1)
    quotations = []
    for row, example in enumerate(examples):
        column = len(example.prefix_ids)
        input_ids[row, :column] = torch.tensor(example.prefix_ids, dtype=torch.long)
        position_ids[row, :column] = torch.arange(column)
        branch_of[row, :column] = 0
        first_columns = []
        for number, (ids, first_learned) in enumerate(example.branches, 1):
            end = column + len(ids)
            first_columns.append(column)
            input_ids[row, column:end] = torch.tensor(ids)
            start = len(example.prefix_ids)
            position_ids[row, column:end] = torch.arange(start, start + len(ids))
            branch_of[row, column:end] = number
            learned = column + first_learned - 1
            targets[row, learned : end - 1] = torch.tensor(ids[first_learned:])
            for places, count, weight in (
                (example.paragraphs, NUM_DECIDING_TOKENS, DECIDING_WEIGHT),
                (example.departures, NUM_DEPARTING_TOKENS, departing_weight),
            ):
                for branch, place in places:
                    if branch == number - 1:
                        first = learned + place
                        weights[row, first : min(first + count, end)] = weight
            column = end
        for branch, said, taken, count in example.quotations:
            shift = first_columns[branch] - len(example.prefix_ids)
            quotations.append(
                [row, said - 1 + shift, taken + (shift if taken >= len(example.prefix_ids) else 0), count]
            )
    batch = {
        "input_ids": input_ids,
        "position_ids": position_ids,
        "targets": targets,
        "weights": weights,
    }
    if quotations:
        batch["quotations"] = torch.tensor(quotations)
    if any(len(example.branches) > 1 for example in examples):
        same_branch = branch_of[:, None, :] == branch_of[:, :, None]
        seen = (same_branch | (branch_of[:, None, :] == 0)) & torch.ones(
            width, width, dtype=torch.bool
        ).tril()
        batch["attention_mask"] = torch.zeros(len(examples), 1, width, width).masked_fill(
            ~seen[:, None], torch.finfo(torch.float32).min
        )
    return batch


def fast_precision() -> torch.autocast:
    """The precision a training forward is fastest in: bfloat16 where the processor has units for it."""
    return torch.autocast("cpu", dtype=torch.bfloat16, enabled=bf16_is_fast())


def draw_batch(
    seed: str,
    shares: Mapping[str, float],
    num_tokens: int,
    decks: Decks,
    tokenizer: PreTrainedTokenizerFast,
    *,
    departing_weight: float = DECIDING_WEIGHT,
) -> tuple[str, dict[str, Tensor]]:
    """Examples of one kind, drawn by ``shares``, that fill about ``num_tokens`` padded tokens.

    Args:
        seed: The same seed and the same state of the decks give the same batch.
        shares: Kinds (see :mod:`~local_backend.embedded.tasks`) and how often each is drawn.
        num_tokens: Rows times width, at most, where more than one example fits.
        decks: What may be asked about; the topics of this batch are taken.
        tokenizer: Of the model.
        departing_weight: See :func:`collate`.

    Returns:
        The kind and the batch. One kind alone, so that rows are of like length.
    """
    rng = random.Random(seed)
    kind = rng.choices(list(shares), weights=list(shares.values()))[0]
    examples: list[EncodedExample] = []
    widest = 0
    while True:
        about = decks.top(kind) if kind in TOPIC_KINDS else None
        example = encode_example(make_example(kind, rng, decks.topics, about=about), tokenizer)
        widest = max(widest, example.num_tokens)
        if examples and widest * (len(examples) + 1) > num_tokens:
            break
        if about is not None:
            decks.take(kind)  # what did not fit comes first next time: else long topics would be taught less
        examples.append(example)
    batch = collate(examples, tokenizer.pad_token_id, departing_weight=departing_weight)
    if "quotations" in batch:
        nothing = torch.tensor([tokenizer.get_vocab()[f"<|{role}|>"] for role in ROLES[:2]])
        batch["is_nothing"] = torch.isin(batch["input_ids"], nothing)
    return kind, batch


__all__ = ["EncodedExample", "collate", "draw_batch", "encode_example", "fast_precision", "prompt_ids"]
