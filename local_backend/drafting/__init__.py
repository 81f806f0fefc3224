"""Drafters by name. Each module holds one; none of them knows the engine."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

from local_backend.drafting.by_row import ByRow
from local_backend.drafting.combined import Combined
from local_backend.drafting.drafter import Autoregressive, Drafter, RowView
from local_backend.drafting.jacobi import Jacobi
from local_backend.drafting.lookahead import Lookahead
from local_backend.drafting.reference_copy import ReferenceCopy

_BY_NAME: dict[str, Callable[[], Drafter]] = {
    "autoregressive": Autoregressive,
    "combined": lambda: Combined([ReferenceCopy(), Jacobi(), Lookahead()]),
    "jacobi": Jacobi,
    "lookahead": Lookahead,
    "none": Autoregressive,
    "reference_copy": ReferenceCopy,
}


def make_drafter(drafter: str | Drafter, name_of: Callable[[Any], str | None] | None = None) -> Drafter:
    """Look up a drafter by name, or return one unchanged; by ``name_of`` each row may name another.

    Raises:
        ValueError: No drafter has that name.
        TypeError: The argument is neither a name nor a drafter.
    """
    if isinstance(drafter, str):
        if drafter not in _BY_NAME:
            raise ValueError(f"no drafter is named {drafter!r}; there are {', '.join(sorted(_BY_NAME))}")
        return _BY_NAME[drafter]()
    if not isinstance(drafter, Drafter):
        raise TypeError(f"a drafter has propose() and observe(), got {type(drafter).__name__}")
    return drafter if name_of is None else ByRow(drafter, name_of, make_drafter)


__all__ = ["Autoregressive", "Combined", "Drafter", "Jacobi", "Lookahead", "ReferenceCopy", "RowView"]
__all__ += ["make_drafter"]
