"""What an engine has done, counted. Knows numbers only."""

from __future__ import annotations

from dataclasses import dataclass


@dataclass(slots=True)
class EngineStats:
    """What the engine has done since it was made.

    Attributes:
        num_forwards: Decode forwards, whatever the number of rows.
        num_prefill_forwards: Forwards that read prompts and nothing else.
        num_prefilled_tokens: Prompt tokens read.
        num_reused_tokens: Prompt tokens whose keys and values were there already.
        num_set_aside: How often a row gave its place to others for lack of memory.
        num_row_forwards: Decode forwards of each row, added up.
        num_positions: Tokens forwards had room for, of prompts, rows and drafts; and of these
        num_padding: Positions that held none, because another row of the forward was wider.
        num_tokens: Tokens emitted.
    """

    num_forwards: int = 0
    num_prefill_forwards: int = 0
    num_prefilled_tokens: int = 0
    num_reused_tokens: int = 0
    num_tokens: int = 0
    num_set_aside: int = 0
    num_row_forwards: int = 0
    num_positions: int = 0
    num_padding: int = 0

    def note_forward(self, num_rows: int, width: int, num_new_tokens: int) -> None:
        """Count a forward's positions.

        Args:
            num_rows: Rows that took part.
            width: Positions of each.
            num_new_tokens: Tokens that were read, in all.
        """
        self.num_positions += num_rows * width
        self.num_padding += num_rows * width - num_new_tokens
