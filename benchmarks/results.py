"""Reports of benchmarks: a table, a JSON line and a dated file that records machine, versions and commit.

Does not know what was measured.
"""

from __future__ import annotations

import argparse
import json
import os
import platform
import subprocess
import sys
from datetime import UTC, datetime
from importlib.metadata import PackageNotFoundError, version
from pathlib import Path
from typing import TYPE_CHECKING, Any

from rich.console import Console

if TYPE_CHECKING:
    from rich.table import Table

RESULTS = Path(__file__).parent / "results"
_PACKAGES = ("torch", "transformers", "langchain-core", "openai")


def environment() -> dict[str, Any]:
    """Machine, versions and commit of this run."""
    return {
        "machine": platform.machine(),
        "processor": _processor(),
        "gpu": _gpu(),
        "cores": os.cpu_count(),
        "threads": os.environ.get("OMP_NUM_THREADS", "not set"),
        "python": platform.python_version(),
        "versions": {name: _version(name) for name in _PACKAGES},
        "commit": _commit(),
    }


def _processor() -> str:
    try:
        lines = Path("/proc/cpuinfo").read_text("utf-8").splitlines()
    except OSError:
        return platform.processor()
    return next((line.split(":", 1)[1].strip() for line in lines if line.startswith("model name")), "")


def _gpu() -> str | None:
    torch = sys.modules.get("torch")  # a benchmark without it does not wait for it
    return torch.cuda.get_device_name() if torch is not None and torch.cuda.is_available() else None


def _version(name: str) -> str | None:
    try:
        return version(name)
    except PackageNotFoundError:
        return None


def _commit() -> str | None:
    command = ["git", "-C", str(RESULTS.parent), "describe", "--always", "--dirty"]
    done = subprocess.run(command, capture_output=True, text=True, check=False)
    return done.stdout.strip() or None


def save(name: str, summary: dict[str, Any], cases: list[dict[str, Any]]) -> Path:
    """Write one dated result file; returns its path."""
    now = datetime.now(UTC)
    RESULTS.mkdir(exist_ok=True)
    path = RESULTS / f"{now:%Y-%m-%d}_{name}.json"
    record = {
        "name": name,
        "measured": now.isoformat(timespec="seconds"),
        "environment": environment(),
        "summary": summary,
        "cases": cases,
    }
    path.write_text(json.dumps(record, indent=1) + "\n", encoding="utf-8")
    return path


def add_save_argument(parser: argparse.ArgumentParser) -> None:
    """``--save``, the same in every benchmark; pass it to :func:`report`."""
    parser.add_argument("--save", action="store_true", help="keep a dated file under benchmarks/results")


def report(name: str, table: Table, summary: dict[str, Any], *, keep: bool, width: int = 110) -> None:
    """End a benchmark: print its table, save the figures if asked to, print them as one line of JSON."""
    Console(width=width).print(table)
    if keep:
        save(name, summary, [])
    print(json.dumps(summary))
