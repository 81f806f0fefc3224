"""What every test of this package starts with."""

from __future__ import annotations

from weakref import WeakValueDictionary

import pytest

from sot_chains.calls import rate_limits


@pytest.fixture(autouse=True)
def _accounts_are_new(monkeypatch: pytest.MonkeyPatch) -> None:
    """A server on the port of an earlier one is another account: it has not asked for a pause."""
    monkeypatch.setattr(rate_limits, "_limiters", WeakValueDictionary())
    monkeypatch.setattr(rate_limits, "_kept", {})
