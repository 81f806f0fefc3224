"""When free slots are refilled: at once, or together with more of them. Knows numbers of rows."""

from __future__ import annotations

# While more rows wait than slots are free, refill once this share of all slots is free, so that one forward
# prefills several prompts; but leave no slot free for more than this many forwards.
_REFILL_SHARE, _MAX_FREE_FORWARDS = 1 / 8, 8


class RefillDelay:
    """Counts the forwards for which slots were left free."""

    def __init__(self) -> None:
        self._num_free_forwards = 0

    def is_time(self, *, num_running: int, num_free: int, num_waiting: int) -> bool:
        """Whether to refill free slots now or wait for more of them; called once before each forward."""
        few = num_free < _REFILL_SHARE * (num_running + num_free)
        if few and num_running and num_free < num_waiting:
            self._num_free_forwards += 1
            if self._num_free_forwards <= _MAX_FREE_FORWARDS:
                return False
        self._num_free_forwards = 0
        return True
