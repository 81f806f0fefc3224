"""Reading the reply to the skeleton request, whole or while it is being written."""

from __future__ import annotations

from collections.abc import Callable

from sot_chains.skeleton import Skeleton, parse_skeleton


def skeleton_of(reply: str, reply_start: str | None, max_points: int | None) -> Skeleton:
    """The skeleton in ``reply``, which may or may not go on from ``reply_start``.

    A model may continue the reply begun for it or begin anew; the reading with more points is right.
    """
    skeleton = parse_skeleton(reply)
    if reply_start:
        skeleton = max(parse_skeleton(reply_start + reply), skeleton, key=len)
    return skeleton.first(max_points)


class GrowingSkeleton:
    """A skeleton whose reply is still being written.

    Args:
        reply_start: What the reply was begun with.
        max_points: How many points to take.
    """

    def __init__(self, reply_start: str | None, max_points: int | None) -> None:
        self._reply_start = reply_start
        self._max_points = max_points
        self._lines: list[str] = []
        self._rest = ""

    def feed(self, text: str) -> Skeleton | None:
        """The skeleton in the lines that are complete, if ``text`` has completed any."""
        *complete, rest = text.split("\n")
        for line in complete:
            self._lines.append(self._rest + line)
            self._rest = ""
        self._rest += rest
        if not complete:
            return None
        return skeleton_of("\n".join(self._lines) + "\n", self._reply_start, self._max_points)


class OutlineReply:
    """Takes the outline as it comes, and tells how far it has grown.

    Args:
        growing: Makes a new growing skeleton, once the request is known.
        grow: Called with the skeleton so far whenever a line is complete; ``None`` if nobody wants to know.
        ungrow: Called when the outline is asked for again; ``False`` if what it began has been read.
    """

    def __init__(
        self,
        growing: Callable[[], GrowingSkeleton],
        grow: Callable[[Skeleton], None] | None,
        ungrow: Callable[[], bool],
    ) -> None:
        self._new_growing = growing
        self._growing: GrowingSkeleton | None = None
        self._grow = grow
        self._ungrow = ungrow
        self._pieces: list[str] = []

    @property
    def text(self) -> str:
        """The reply so far."""
        return "".join(self._pieces)

    def take(self, text: str) -> None:
        """Takes the next piece."""
        self._pieces.append(text)
        if self._grow:
            if self._growing is None:  # not before the request was made: it decides how the reply begins
                self._growing = self._new_growing()
            if skeleton := self._growing.feed(text):
                self._grow(skeleton)

    def start_over(self) -> bool:
        """Forgets it, for another attempt."""
        if not self._ungrow():
            return False
        self._pieces, self._growing = [], None
        return True
