"""Packs the clean text of answers and guesses at parts of them into one forward, kept apart by the mask.

A row holds prompt and answer, padded, then a fixed number of blocks of guesses. A block has the position ids
of the part it guesses and attends to itself and the clean text before it; nothing else attends to it. So one
forward gives the model's predictions on the clean text and behind every guess. This is the packing of Jacobi
Forcing (arXiv 2512.14681). Rows of a group have one width and a run has few groups, because kernels are
chosen, planned and compiled by shape.

Knows token ids. Does not know where guesses come from, models or losses.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from itertools import pairwise
from typing import TYPE_CHECKING, NamedTuple

import torch
from torch import Tensor

from local_backend.kernels.openmp import set_num_threads
from local_backend.models.architecture import Architecture
from local_backend.models.runner import make_masks
from local_backend.sequences.request import vocabulary_size
from local_backend.training.losses import Head, Targets

if TYPE_CHECKING:
    from transformers import PreTrainedModel

_MAX_GROUPS = 4
_WIDTH_STEP = 16  # kernels of attention want masks whose rows are aligned
Text = tuple[Sequence[int], Sequence[int]]  # token ids of a prompt and of its answer


class Group(NamedTuple):
    """Texts ``first`` to ``stop``, in ``width`` columns; answers have at most ``num_answer`` tokens."""

    first: int
    stop: int
    width: int
    num_answer: int


@dataclass(frozen=True, slots=True)
class Texts:
    """Prompts with answers on one device, from short to long.

    Attributes:
        token_ids: ``[texts, longest]``, padded with 0.
        num_prompt, num_answer: Tokens of each; ``[texts]``.
        first_place: Index of each answer's first token among those of all answers; ``[texts]``.
        groups: At most four, which together hold every text.
    """

    token_ids: Tensor
    num_prompt: Tensor
    num_answer: Tensor
    first_place: Tensor
    groups: tuple[Group, ...]

    @classmethod
    def of(cls, texts: Sequence[Text], device: torch.device | None = None) -> Texts:
        """Lay out texts.

        Raises:
            ValueError: There is no text, or one has no prompt or no answer.
        """
        if not texts:
            raise ValueError("there is nothing to pack: give at least one text")
        if not all(prompt and answer for prompt, answer in texts):
            raise ValueError("a text has no prompt or no answer: give at least one token of each")
        in_order = sorted(texts, key=lambda text: len(text[0]) + len(text[1]))
        num_prompt = torch.tensor([len(prompt) for prompt, _ in in_order])
        num_answer = torch.tensor([len(answer) for _, answer in in_order])
        lengths = num_prompt + num_answer
        token_ids = torch.zeros(len(texts), _padded(int(lengths[-1])), dtype=torch.long)
        for row, (prompt, answer) in enumerate(in_order):
            token_ids[row, : len(prompt) + len(answer)] = torch.tensor([*prompt, *answer])
        edges = [round(len(texts) * number / _MAX_GROUPS) for number in range(_MAX_GROUPS + 1)]
        groups: dict[int, Group] = {}  # by width
        for begin, stop in pairwise(edges):
            if begin < stop:
                width = _padded(int(lengths[stop - 1]))
                first = groups[width].first if width in groups else begin
                groups[width] = Group(first, stop, width, int(num_answer[first:stop].max()))
        return cls(
            token_ids.to(device),
            num_prompt.to(device),
            num_answer.to(device),
            (num_answer.cumsum(0) - num_answer).to(device),
            tuple(groups.values()),
        )

    def __len__(self) -> int:
        return len(self.num_prompt)


def _padded(width: int) -> int:
    return -(-width // _WIDTH_STEP) * _WIDTH_STEP


class Copies(NamedTuple):
    """Guesses at parts of some texts' answers.

    Attributes:
        starts: Index in the answer of each block's first guess; ``[rows, blocks]``.
        guesses: ``[rows, blocks, block]``.
    """

    starts: Tensor
    guesses: Tensor


class Batch(NamedTuple):
    """Packed rows, all of one width.

    Attributes:
        input_ids, position_ids: ``[rows, width]``.
        sees: Whether a column (second axis) attends to another (third axis); ``[rows, width, width]``.
        columns: The columns that may learn: those which predict the answer, then those of the guesses;
            ``[rows, learned]``.
        places: What each predicts, as an index into the tokens of all answers; ``[rows, learned]``.
        weights: Of each in the loss, 0 if nothing is left to predict; ``[rows, learned]``.
        is_guess: Whether a column is one of the copies'; ``[rows, width]``.
    """

    input_ids: Tensor
    position_ids: Tensor
    sees: Tensor
    columns: Tensor
    places: Tensor
    weights: Tensor
    is_guess: Tensor

    def parts(self, num_rows: int) -> Iterator[Batch]:
        """The same rows, at most ``num_rows`` at a time."""
        for first in range(0, len(self.input_ids), num_rows):
            yield Batch(*(tensor[first : first + num_rows] for tensor in self))


def pack(
    texts: Texts,
    rows: Tensor,
    group: Group,
    copies: Copies | None = None,
    *,
    clean_weight: float = 1.0,
    decay: float = 1.0,
) -> Batch:
    """Pack texts ``rows`` ``[rows]`` of a group with their copies.

    The weights of clean text sum to ``clean_weight`` and those of guesses to 1; a guess has ``decay`` times
    the weight of the one before it in its block.
    """
    device, width = rows.device, group.width
    num_prompt, num_answer = texts.num_prompt[rows, None], texts.num_answer[rows, None]
    first_place = texts.first_place[rows, None]
    clean = torch.arange(width, device=device)
    input_ids = texts.token_ids[rows, :width]
    place = torch.arange(group.num_answer, device=device)
    is_answer = (place < num_answer).float()
    columns = (num_prompt - 1 + place).clamp(max=width - 1)
    places = first_place + torch.minimum(place, num_answer - 1)
    weights = is_answer * (clean_weight / is_answer.sum())
    sees = (clean[:, None] >= clean).expand(len(rows), -1, -1)
    positions = clean.expand(len(rows), -1)
    is_guess = torch.zeros_like(input_ids, dtype=torch.bool)
    if copies is None:
        return Batch(input_ids, positions, sees, columns, places, weights, is_guess)
    num_guesses, block = copies.guesses[0].numel(), copies.guesses.shape[2]
    number = torch.arange(num_guesses, device=device)
    starts = copies.starts.repeat_interleave(block, 1)  # [rows, guesses]
    guessed = starts + number % block  # index in the answer of each guess
    predicts = (guessed + 1 < num_answer) * decay ** (number % block).float()
    whole = sees.new_zeros(len(rows), width + num_guesses, width + num_guesses)
    whole[:, :width, :width] = sees
    whole[:, width:, :width] = clean < (num_prompt + starts)[..., None]
    is_same_block = number[:, None] // block == number // block
    whole[:, width:, width:] = is_same_block & (number[:, None] >= number)
    return Batch(
        torch.cat((input_ids, copies.guesses.flatten(1)), 1),
        torch.cat((positions, num_prompt + guessed), 1),
        whole,
        torch.cat((columns, (width + number).expand(len(rows), -1)), 1),
        torch.cat((places, first_place + torch.minimum(guessed + 1, num_answer - 1)), 1),
        torch.cat((weights, predicts / predicts.sum().clamp(min=1e-9)), 1),
        torch.cat((is_guess, ~is_guess.new_zeros(len(rows), num_guesses)), 1),
    )


@contextmanager
def one_thread() -> Iterator[None]:
    """Compute on one thread: small operations wait for workers that another process keeps from a core."""
    num_threads = torch.get_num_threads()
    set_num_threads(1)
    try:
        yield
    finally:
        set_num_threads(num_threads)


class PackedForward:
    """Runs a model, without adapters around it, on packed batches.

    Raises:
        ValueError: The model does not take masks and positions; says why.
    """

    def __init__(self, model: PreTrainedModel) -> None:
        architecture = Architecture.of(model)
        self.max_positions = architecture.max_positions
        self.vocabulary_size = vocabulary_size(model)
        self.head = Head(model)
        self._windows = architecture.windows
        # Boolean masks are right when autocast computes in another dtype than the weights', too.
        is_additive = getattr(model.config, "_attn_implementation", None) == "eager"
        self._dtype = model.dtype if is_additive else torch.bool

    def hidden(self, batch: Batch) -> Tensor:
        """Hidden states ``[rows, width, size]``."""
        states: Tensor = self.head.body(
            input_ids=batch.input_ids,
            # One copy of the positions: some models compile or compare by their strides.
            position_ids=batch.position_ids.contiguous(),
            attention_mask=self._masks(batch),
            use_cache=False,
        ).last_hidden_state
        return states

    def loss(self, batch: Batch, teacher: tuple[Tensor, Tensor]) -> tuple[Tensor, Tensor]:
        """The loss of a batch against a teacher's likely tokens and their probabilities at each place.

        Returns:
            The loss, and what each learned column predicts, 0 where there is nothing; ``[rows, learned]``.
        """
        hidden = self.hidden(batch)
        row, learned = (batch.weights > 0).nonzero(as_tuple=True)
        places = batch.places[row, learned]
        targets = Targets(
            teacher[0][places].long(), teacher[1][places].float(), batch.weights[row, learned].float()
        )
        loss, predicted = self.head.loss(hidden[row, batch.columns[row, learned]], targets)
        predictions = torch.zeros_like(batch.places)
        predictions[row, learned] = predicted
        return loss, predictions

    def _masks(self, batch: Batch) -> Tensor | dict[str, Tensor]:
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
