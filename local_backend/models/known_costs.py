"""Remembers the cost of forwards: for this process, and in the user's cache directory for the next one.

An entry is found by all that the cost depends on: processor, threads, shape of the model, dtype, kernels. A
few forwards check it when it is read, since other processes may have disturbed the measurement, or share the
processor now. A damaged or outdated entry is measured again.

Knows what a cost depends on, and files. Does not know how it is measured.
"""

from __future__ import annotations

import hashlib
import json
import logging
import os
import platform
import tempfile
import threading
from collections.abc import Callable, Mapping
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING, Any

import torch

from local_backend.kernels.prepacking import has_prepacked
from local_backend.kernels.quantization import is_in_4_bits
from local_backend.models.architecture import Architecture
from local_backend.models.forward_cost import (
    MAX_TIMED_ROWS,
    ForwardCost,
    ForwardTimer,
    measure_forward_cost,
    still_holds,
)

if TYPE_CHECKING:
    from transformers import PreTrainedModel

_FORMAT = 2  # of entries; raise it when measuring changes

_log = logging.getLogger(__name__)
_known: dict[str, ForwardCost] = {}
_lock = threading.Lock()


def known_forward_cost(
    model: PreTrainedModel,
    architecture: Architecture,
    *,
    is_prepacked: bool = True,
    with_graphs: bool = False,
) -> ForwardCost:
    """The cost of a model's forwards, measured once on this machine for models of one shape. Thread-safe.

    Args:
        model: In evaluation mode, with its final weights, dtype and device.
        architecture: Its architecture.
        is_prepacked: Whether forwards use prepacked weights, if the model has them.
        with_graphs: Whether forwards are replayed as CUDA graphs.
    """
    is_prepacked = is_prepacked and has_prepacked(model)
    return known_cost(
        _key_of(model, is_prepacked=is_prepacked, with_graphs=with_graphs),
        partial(ForwardTimer.of, model, architecture, is_prepacked=is_prepacked, with_graphs=with_graphs),
        is_kept=bool(model.name_or_path),  # a model that was made, not loaded, is rarely made again
    )


def known_cost(key: Mapping[str, Any], timer: Callable[..., ForwardTimer], *, is_kept: bool) -> ForwardCost:
    """The cost of forwards, measured once on this machine for each key. Thread-safe.

    Args:
        key: What the cost depends on beside the machine and torch.
        timer: Makes the timer; takes ``max_rows``.
        is_kept: Whether the measurement is kept for other processes.
    """
    name = json.dumps(
        {"format": _FORMAT, "threads": torch.get_num_threads(), "torch": torch.__version__, **key},
        sort_keys=True,
        default=str,
    )
    with _lock:
        if name not in _known:
            costs = _read(name)
            if costs is None or not still_holds(costs, timer(max_rows=1)):
                costs = measure_forward_cost(timer(max_rows=MAX_TIMED_ROWS))
                if is_kept:
                    _write(name, costs)
            _known[name] = costs
        return _known[name]


def _key_of(model: PreTrainedModel, *, is_prepacked: bool, with_graphs: bool) -> dict[str, Any]:
    """All that the cost depends on. Models that differ in their weights alone have the same."""
    config = model.config.to_dict()
    for name in ("_name_or_path", "transformers_version"):
        config.pop(name, None)
    return {
        "processor": processor(model.device),
        "model": type(model).__name__,
        "config": config,
        "dtype": model.dtype,
        "attention": getattr(model.config, "_attn_implementation", None),
        "is_quantized": bool(getattr(model, "hf_quantizer", None)),
        "is_in_4_bits": any(map(is_in_4_bits, model.modules())),
        "is_prepacked": is_prepacked,
        "with_graphs": with_graphs,
    }


def processor(device: torch.device) -> list[Any]:
    """Names and abilities of what computes on ``device``."""
    if device.type == "cuda":
        return [str(device), torch.cuda.get_device_name(device)]
    try:
        lines = Path("/proc/cpuinfo").read_text("utf-8").splitlines()
    except OSError:  # not Linux
        lines = []
    name = next((line.split(":", 1)[1].strip() for line in lines if line.startswith("model name")), "")
    return [str(device), name or platform.processor(), os.cpu_count(), torch.cpu.get_capabilities()]


def _file_of(key: str) -> Path:
    from platformdirs import user_cache_path

    folder = user_cache_path("langchain-parallel-decoding") / "forward_costs"
    return folder / f"{hashlib.sha256(key.encode()).hexdigest()[:24]}.json"


def _read(key: str) -> ForwardCost | None:
    try:
        entry = json.loads(_file_of(key).read_text("utf-8"))
        costs = ForwardCost.from_dict(entry["costs"])
        is_usable = entry["key"] == key and all(
            0 < seconds < float("inf") for table in costs.seconds for line in table for seconds in line
        )
    except (OSError, ValueError, KeyError, TypeError):  # not there, or damaged
        return None
    return costs if is_usable else None


def _write(key: str, costs: ForwardCost) -> None:
    file = _file_of(key)
    try:
        file.parent.mkdir(parents=True, exist_ok=True)
        # Renamed when complete: another process may be reading or writing the same entry.
        with tempfile.NamedTemporaryFile("w", encoding="utf-8", dir=file.parent, delete=False) as unfinished:
            json.dump({"key": key, "costs": costs.to_dict()}, unfinished)
        Path(unfinished.name).replace(file)
    except OSError as error:  # e.g. a cache directory that cannot be written to, or a full disk
        _log.warning("cannot save the cost of forwards in %s: %s", file.parent, error)
