"""Streams: every text has several blocks that Jacobi decoding is working on, one forward a training step.

A training forward predicts what follows each guess; that is the next iterate of the block, by the model as it
is at this step. So the noise it learns from is always its own (CLLM, arXiv 2403.00835, collects and stores
it) and costs nothing. A block that has reached the end of its answer starts again elsewhere, a few with drawn
noise in place of what Jacobi decoding fills a new block with.

Knows packed texts. Does not know models.
"""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch import Tensor

from local_backend.drafting.drafter import require_at_least
from local_backend.training.packing import Copies, Texts

_AT_BEGIN = 0.35  # share of new blocks at the begin of an answer, where decoding starts
_RESTARTED = 0.03  # share of blocks that start again before their answer ends
_MOST_RIGHT = 0.75  # of a block of drawn noise
_MOST_SHIFT = 4


@dataclass(frozen=True, slots=True)
class NoiseOptions:
    """Which guesses a model learns from.

    Attributes:
        block_size: Guesses of a block.
        num_streams: Blocks of a text in one forward; with 0 the clean text alone is learned.
        drawn_share: Share of new blocks with drawn noise; with 1 every block of every step is drawn, so that
            no model's own guesses are learned from.

    Raises:
        ValueError: A number is out of range.
    """

    block_size: int = 16
    num_streams: int = 8
    drawn_share: float = 0.15

    def __post_init__(self) -> None:
        require_at_least(1, block_size=self.block_size)
        require_at_least(0, num_streams=self.num_streams)
        if not 0 <= self.drawn_share <= 1:
            raise ValueError(f"drawn_share must be between 0 and 1, got {self.drawn_share}")


class Streams:
    """The blocks of all texts. ``state`` is all there is to save, random numbers come from the caller."""

    def __init__(self, texts: Texts, options: NoiseOptions) -> None:
        self._texts, self._options = texts, options
        shape, device = (len(texts), options.num_streams), texts.num_prompt.device
        self.state = {
            "starts": torch.zeros(shape, dtype=torch.long, device=device),
            "guesses": torch.zeros(*shape, options.block_size, dtype=torch.long, device=device),
            "is_over": torch.ones(shape, dtype=torch.bool, device=device),
        }

    def copies(self, rows: Tensor, random: torch.Generator) -> Copies:
        """The blocks of some texts, those that were over at new places."""
        new = self._new_blocks(rows, random)
        starts, guesses, is_over = (self.state[name][rows] for name in ("starts", "guesses", "is_over"))
        if self._options.drawn_share == 1:
            is_over = torch.ones_like(is_over)
        return Copies(
            torch.where(is_over, new.starts, starts), torch.where(is_over[..., None], new.guesses, guesses)
        )

    def advance(self, rows: Tensor, copies: Copies, predicted: Tensor, random: torch.Generator) -> Tensor:
        """Move on by one forward.

        Args:
            rows: Which texts.
            copies: Their blocks, as :meth:`copies` returned them.
            predicted: What the model predicts behind each guess; ``[rows, blocks, block]``.
            random: Where random numbers come from.

        Returns:
            Tokens each block emitted, the bonus included; ``[rows, blocks]``.
        """
        texts, (starts, guesses) = self._texts, copies
        block = torch.arange(guesses.shape[2], device=rows.device)
        num_answer = texts.num_answer[rows, None]
        place = starts[..., None] + block
        is_right = (guesses == self._answers(rows, place)) & (place < num_answer[..., None])
        emitted = is_right.long().cumprod(-1).sum(-1) + 1
        starts = starts + emitted
        # The predictions from the bonus token's on, then what Jacobi decoding adds to a block.
        filling = self._filled(rows, torch.minimum(starts, num_answer - 1), predicted[..., -1])
        ahead = emitted[..., None] - 1 + block
        kept = predicted.gather(2, ahead.clamp(max=len(block) - 1))
        added = filling.gather(2, (ahead - len(block)).clamp(min=0))
        self.state["guesses"][rows] = torch.where(ahead < len(block), kept, added)
        self.state["starts"][rows] = starts
        chance = torch.rand(starts.shape, generator=random, device=rows.device)
        self.state["is_over"][rows] = (starts >= num_answer - 1) | (chance < _RESTARTED)
        return emitted

    def _answers(self, rows: Tensor, place: Tensor) -> Tensor:
        """Answer tokens of texts at ``place`` ``[rows, blocks, block]``; the last one beyond the end."""
        last = self._texts.num_answer[rows, None, None] - 1
        column = self._texts.num_prompt[rows, None, None] + torch.minimum(place, last).clamp(min=0)
        return self._tokens(rows, column)

    def _tokens(self, rows: Tensor, column: Tensor) -> Tensor:
        return self._texts.token_ids[rows].gather(1, column.flatten(1)).view(column.shape)

    def _filled(self, rows: Tensor, starts: Tensor, behind: Tensor) -> Tensor:
        """What Jacobi decoding fills blocks with, ``[rows, blocks, block]``.

        It is what stood behind the last ``behind`` of the text before the block, or ``behind`` over and over.
        """
        begin = self._texts.num_prompt[rows, None] + starts
        text = self._texts.token_ids[rows]
        column = torch.arange(text.shape[1], device=rows.device)
        is_found = (text[:, None] == behind[..., None]) & (column < begin[..., None] - 1)
        follows = (is_found * (column + 1)).amax(-1)[..., None]  # 0 if there is none
        source = follows + torch.arange(self._options.block_size, device=rows.device)
        filling = self._tokens(rows, torch.minimum(source, begin[..., None] - 1))
        return torch.where(follows > 0, filling, behind[..., None])

    def _new_blocks(self, rows: Tensor, random: torch.Generator) -> Copies:
        options, device = self._options, rows.device
        shape = (len(rows), options.num_streams)

        def uniform(*more: int) -> Tensor:
            return torch.rand(*shape, *more, generator=random, device=device)

        num_prompt, num_answer = self._texts.num_prompt[rows, None], self._texts.num_answer[rows, None]
        starts = (uniform() * (num_answer - 1)).long()
        starts = torch.where(uniform() < _AT_BEGIN, 0, starts)
        before = self._tokens(rows, num_prompt + starts - 1)
        filled = self._filled(rows, starts, before)
        # Right tokens first, then others of the text, the filling, shifted ones, or right and wrong mixed.
        block = torch.arange(options.block_size, device=device)
        place = starts[..., None] + block
        right = self._answers(rows, place)
        any_column = uniform(options.block_size) * (num_prompt + num_answer)[..., None]
        other = self._tokens(rows, any_column.long())
        shift = (uniform(1) * (2 * _MOST_SHIFT + 1)).long() - _MOST_SHIFT
        shifted = self._answers(rows, place + shift)
        mixed = torch.where(uniform(options.block_size) < 0.5, right, other)
        wrong = torch.stack((other, filled, shifted, mixed))
        kind = (uniform(1) * len(wrong)).long().expand_as(right)
        wrong = wrong.gather(0, kind[None])[0]
        num_right = uniform(1) * _MOST_RIGHT * options.block_size
        drawn = torch.where(block < num_right.long(), right, wrong)
        return Copies(starts, torch.where(uniform(1) < options.drawn_share, drawn, filled))
