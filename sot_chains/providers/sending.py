"""The transport under the SDKs: noticing when a request has left, which is when it counts.

An attempt may end before that: cancelled while it waits for a connection, or with none to be had. The trace
counts requests as the server does, so it asks the transport. Knows httpx2's hooks and no vendor.
"""

from __future__ import annotations

from typing import Any

import httpx2

from sot_chains.providers.vendor import on_sent


async def _watch(request: httpx2.Request) -> None:
    notice = on_sent.get()
    if notice is None:
        return

    async def trace(event: str, info: dict[str, Any]) -> None:
        # What follows is written before anything else can happen; whether it was is told only later, and
        # not to one who is cancelled meanwhile.
        if event.endswith("send_request_body.started"):
            notice()

    request.extensions["trace"] = trace


# Common servers hang up on a connection that was idle for 5 s, which is also how long httpx2 keeps one: a
# request sent at that moment is lost. So ours are given up before.
TRANSPORT: dict[str, Any] = {
    "event_hooks": {"request": [_watch]},
    "limits": httpx2.Limits(max_connections=1000, max_keepalive_connections=100, keepalive_expiry=4.0),
}
