"""Says what is wrong with a model before it is loaded: a name that nobody has, a web page for its weights.

Knows files and the model hub. Does not know models.
"""

from __future__ import annotations

import json
import os
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from huggingface_hub import HfApi, snapshot_download
from safetensors import SafetensorError, safe_open

_HUB_TIMEOUT_SECONDS = 2.0
_EXPECTED = "expected a folder, a GGUF file or a name on the model hub"
_STAND_INS = {
    b"<!doctype": "is a web page: download the file itself",
    b"<html": "is a web page: download the file itself",
    b"version https://git-lfs": "is a pointer of Git LFS: run `git lfs pull` there",
    b"": "is empty: download it again",
}
_NEEDED_FILES = (
    *("config.json", "generation_config.json", "*token*.json", "vocab.json", "*.index.json"),
    *("*.safetensors", "*.jinja", "*.model"),
)


def find_model(path_or_name: str | Path, subfolder: str = "", **options: Any) -> str:
    """Check, within seconds, what can be known of a model: its files, or its name on the model hub.

    ``subfolder`` and ``options`` are those of ``from_pretrained``.

    Returns:
        The path or name to load. It is the folder in the hub's cache if the hub does not give the model: to
        load it by its name would try for minutes.

    Raises:
        OSError: There is no such path, and neither the hub's cache nor the hub has a model of this name.
        ValueError: The path holds no model, or a file is damaged or is something else.
    """
    given = os.path.expanduser(path_or_name)
    path = Path(given, subfolder)
    if path.is_dir():
        if not any((path / name).exists() for name in ("config.json", "adapter_config.json")):
            ggufs = "".join(f"; give the path of {file.name} to load that" for file in path.glob("*.gguf"))
            raise ValueError(f"there is no model in {path}: it holds no config.json{ggufs}")
        for file in sorted({file for pattern in _NEEDED_FILES for file in path.glob(pattern)}):
            _check(file)
    elif path.exists():
        _check(path)
        if not _first_bytes(path).startswith(b"GGUF"):  # Ollama's files have no suffix
            raise ValueError(f"{path} is no GGUF file: give one, or the folder of a model")
    elif path.is_absolute() or path.suffix == ".gguf" or len(path.parts) > 2 or path.parts[:1] == ("..",):
        raise FileNotFoundError(f"{path} does not exist: {_EXPECTED}")
    else:
        return _find_on_hub(given, options)
    return given


def _find_on_hub(name: str, options: Mapping[str, Any]) -> str:
    where: dict[str, Any] = {key: options.get(key) for key in ("revision", "token")}
    try:
        HfApi().model_info(name, timeout=_HUB_TIMEOUT_SECONDS, **where)
    except Exception as error:  # of whatever HTTP client the hub's library uses
        where |= {"cache_dir": options.get("cache_dir"), "local_files_only": True, "allow_patterns": []}
        try:
            return str(snapshot_download(name, **where))
        except (OSError, ValueError):
            missing = f"{name} is not on this machine, and the Hugging Face hub has not given it"
            raise OSError(f"{missing} ({type(error).__name__}): {_EXPECTED}") from error
    return name


def _check(file: Path) -> None:
    begin = _first_bytes(file).lstrip().lower()
    for start, problem in _STAND_INS.items():
        if begin.startswith(start) if start else not begin:
            raise ValueError(f"{file} {problem}")
    try:
        if file.suffix == ".json":
            json.loads(file.read_text("utf-8"))
        elif file.suffix == ".safetensors":
            with safe_open(file, framework="pt"):
                pass
    except (ValueError, SafetensorError) as error:
        raise ValueError(f"{file} is damaged or cut off ({error}): download it again") from None


def _first_bytes(file: Path) -> bytes:
    with file.open("rb") as opened:
        return opened.read(64)
