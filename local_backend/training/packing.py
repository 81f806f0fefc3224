"""Packs the clean text and noisy copies of an answer into one forward, separated by the attention mask.

A row holds prompt and answer, then any number of noisy copies of parts of the answer. A copy has the position
ids of the part it copies and attends to itself and the clean text before it; nothing else attends to it. So
one forward gives the model's predictions on the clean text and on every copy. This is the packing of Jacobi
Forcing (arXiv 2512.14681); the iterates of a Jacobi trajectory (CLLM, arXiv 2403.00835) are copies, too.

Knows token ids. Does not know where noise comes from, models or losses.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from itertools import accumulate
from typing import TYPE_CHECKING, Any, NamedTuple

import torch
from torch import Tensor

from local_backend.models.architecture import Architecture
from local_backend.models.runner import make_masks
from local_backend.sequences.request import vocabulary_size
from local_backend.training.losses import IGNORED, NO_TEACHER

if TYPE_CHECKING:
    from transformers import PreTrainedModel


@dataclass(frozen=True, slots=True)
class Copy:
    """Guesses at a part of an answer.

    Attributes:
        start: Position in the answer of the first guess.
        token_ids: The guesses, right or wrong; those past the answer's end are dropped when packed.
        next_copy: Index, among the copies of the example, of the iterate that follows this one; ``None`` if
            there is none.
    """

    start: int
    token_ids: tuple[int, ...]
    next_copy: int | None = None


@dataclass(frozen=True, slots=True)
class Example:
    """A prompt, the model's own answer to it (the right tokens, any end token included) and guesses at it.

    Raises:
        ValueError: There is no prompt, a copy starts outside the answer, or a ``next_copy`` does not exist.
    """

    prompt_ids: tuple[int, ...]
    answer_ids: tuple[int, ...]
    copies: tuple[Copy, ...] = ()

    def __post_init__(self) -> None:
        if not self.prompt_ids:
            raise ValueError("the prompt is empty: give at least one token")
        for copy in self.copies:
            if not 0 <= copy.start <= (length := len(self.answer_ids)):
                raise ValueError(f"a copy starts at token {copy.start} of an answer of {length} tokens")
            if not 0 <= (copy.next_copy or 0) < (number := len(self.copies)):
                raise ValueError(f"a copy is followed by copy {copy.next_copy}, but there are {number}")


class PackedBatch(NamedTuple):
    """Rows of examples, padded to one width.

    Attributes:
        input_ids, position_ids: ``[rows, width]``.
        sees: Whether a column (second axis) attends to another (third axis); ``[rows, width, width]``.
            Padding attends to itself, so that no row of a softmax is empty.
        labels: Target token of each column of the clean text, :data:`IGNORED` elsewhere; ``[rows, width]``.
        fixed_point_column: For each column of a copy the column of the clean text that predicts the same
            token, :data:`NO_TEACHER` elsewhere; ``[rows, width]``.
        next_iterate_column: The same for the copy's next iterate.
    """

    input_ids: Tensor
    position_ids: Tensor
    sees: Tensor
    labels: Tensor
    fixed_point_column: Tensor
    next_iterate_column: Tensor


def num_packed_tokens(example: Example) -> int:
    """Tokens an example fills in a row, without padding."""
    num_clean = len(example.prompt_ids) + len(example.answer_ids)
    return num_clean + sum(_num_used(example, copy) for copy in example.copies)


def _num_used(example: Example, copy: Copy) -> int:
    """Guesses of a copy that have a next token to predict."""
    return max(0, min(len(copy.token_ids), len(example.answer_ids) - 1 - copy.start))


def pack(examples: Sequence[Example], pad_id: int = 0) -> PackedBatch:
    """Pack examples, one per row; none attends to padding.

    Raises:
        ValueError: There is no example.
    """
    if not examples:
        raise ValueError("there is nothing to pack: give at least one example")
    shape = (len(examples), max(map(num_packed_tokens, examples)))
    batch = PackedBatch(
        input_ids=torch.full(shape, pad_id),
        position_ids=torch.zeros(shape, dtype=torch.long),
        sees=torch.eye(shape[1], dtype=torch.bool).repeat(shape[0], 1, 1),
        labels=torch.full(shape, IGNORED),
        fixed_point_column=torch.full(shape, NO_TEACHER),
        next_iterate_column=torch.full(shape, NO_TEACHER),
    )
    for row, example in enumerate(examples):
        _fill(batch, row, example)
    return batch


def _fill(batch: PackedBatch, row: int, example: Example) -> None:
    clean = torch.tensor([*example.prompt_ids, *example.answer_ids])
    num_prompt, num_clean = len(example.prompt_ids), len(clean)
    batch.input_ids[row, :num_clean] = clean
    batch.position_ids[row, :num_clean] = torch.arange(num_clean)
    batch.sees[row, :num_clean, :num_clean] = torch.ones(num_clean, num_clean, dtype=torch.bool).tril()
    batch.labels[row, num_prompt - 1 : num_clean - 1] = clean[num_prompt:]
    counts = [_num_used(example, copy) for copy in example.copies]
    first_columns = list(accumulate(counts, initial=num_clean))
    for copy, first, count in zip(example.copies, first_columns, counts, strict=False):
        columns = slice(first, first + count)
        start = num_prompt + copy.start
        positions = torch.arange(start, start + count)
        batch.input_ids[row, columns] = torch.tensor(copy.token_ids[:count], dtype=torch.long)
        batch.position_ids[row, columns] = positions
        batch.sees[row, columns, :start] = True
        batch.sees[row, columns, columns] = torch.ones(count, count, dtype=torch.bool).tril()
        batch.fixed_point_column[row, columns] = positions
        if copy.next_copy is not None:
            following = example.copies[copy.next_copy]
            ahead = positions - num_prompt - following.start
            teacher = first_columns[copy.next_copy] + ahead
            teacher[ahead >= counts[copy.next_copy]] = NO_TEACHER
            # Before the next iterate the text has settled.
            batch.next_iterate_column[row, columns] = torch.where(ahead < 0, positions, teacher)


class PackedForward:
    """Runs a model, without adapters around it, on packed batches.

    Raises:
        ValueError: The model does not take masks and positions; says why.
    """

    def __init__(self, model: PreTrainedModel) -> None:
        architecture = Architecture.of(model)
        self.max_positions = architecture.max_positions
        self.vocabulary_size = vocabulary_size(model)
        self._windows = architecture.windows
        self._keeps_logits = architecture.keeps_logits
        # Boolean masks are right when autocast computes in another dtype than the weights', too.
        is_additive = getattr(model.config, "_attn_implementation", None) == "eager"
        self._dtype = model.dtype if is_additive else torch.bool

    def __call__(self, model: Any, batch: PackedBatch, **options: Any) -> Tensor:
        """Logits ``[rows, width, vocabulary]`` by the model this was made for, or a wrapper of it."""
        logits: Tensor = model(
            input_ids=batch.input_ids,
            position_ids=batch.position_ids,
            attention_mask=self.masks(batch),
            use_cache=False,
            **options,
        ).logits
        return logits

    def learned(self, model: Any, batch: PackedBatch) -> tuple[Tensor, PackedBatch]:
        """Logits of the columns that have a target in some row, and the batch with its targets renumbered.

        The output layer is a large part of a small model, and most columns of a prompt have no target.
        """
        is_learned = (batch.labels != IGNORED) | (batch.fixed_point_column != NO_TEACHER)
        columns = is_learned.any(0).nonzero()[:, 0]
        if not self._keeps_logits or not len(columns):
            return self(model, batch), batch
        number_of = torch.full((is_learned.shape[1] + 1,), NO_TEACHER, device=columns.device)  # of -1, too
        number_of[columns] = torch.arange(len(columns), device=columns.device)
        narrowed = batch._replace(
            labels=batch.labels[:, columns],
            fixed_point_column=number_of[batch.fixed_point_column[:, columns]],
            next_iterate_column=number_of[batch.next_iterate_column[:, columns]],
        )
        return self(model, batch, logits_to_keep=columns), narrowed

    def masks(self, batch: PackedBatch) -> Tensor | dict[str, Tensor]:
        """Masks ``[rows, 1, width, width]``; a dict by kind of layer if kinds differ."""
        distance = batch.position_ids[:, :, None] - batch.position_ids[:, None, :]
        seen = {
            kind: batch.sees if window is None else batch.sees & (distance < window)
            for kind, window in self._windows.items()
        }
        return make_masks(seen, self._dtype)


def use_fast_attention(model: PreTrainedModel) -> None:
    """On a CPU, switch to eager attention: its backward pass takes half the time of the fused kernel's."""
    if model.device.type == "cpu":
        model.set_attn_implementation("eager")
