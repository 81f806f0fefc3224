"""Says what is wrong with a model's files before they are read, e.g. a web page in place of the weights.

Knows files. Does not know models.
"""

from __future__ import annotations

import json
from pathlib import Path

from safetensors import SafetensorError, safe_open

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


def check_files(path: Path) -> None:
    """Check the file or folder of a model; anything else may be a name on the model hub.

    Raises:
        FileNotFoundError: There is no such path.
        ValueError: It holds no model, or a file is damaged or is something else.
    """
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
        raise FileNotFoundError(
            f"{path} does not exist: give a folder, a GGUF file or a name on the model hub"
        )


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
