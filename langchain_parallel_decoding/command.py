"""The console command ``sot``: :mod:`sot_chains.cli` with local models and copying from the other packages.

What takes long to import is imported where it is used: ``sot --help`` is fast, hosted models need no torch.
"""

import os
import platform
import shutil
import subprocess
import sys
from collections.abc import Mapping, Sequence
from functools import partial
from pathlib import Path
from typing import Any

import local_backend
from sot_chains.cli import run
from sot_chains.serving import Copying, Extras


def main(arguments: Sequence[str] | None = None) -> int:
    """Runs the command; see :func:`sot_chains.cli.run`."""
    return run(arguments, Extras(load_local, make_copying, examine_machine, _find_local))


def _find_local(path: str) -> str:
    return local_backend.find_model(path)


def load_local(path: str | None, **options: Any) -> Any:
    """Loads a model that runs on this machine; see ``ChatLocal.from_pretrained``."""
    return local_backend.ChatLocal.from_pretrained(path, **options)


def make_copying(model: Any, docs: Path | None) -> Copying:
    """References for models that run here, citations, and answers from the folder ``docs``.

    Raises:
        NotADirectoryError: ``docs`` is not a folder.
        ImportError: The extra ``rag`` is not installed, which ``docs`` needs.
    """
    from retrieval_copy import FolderIndex, HybridRetriever, RetrievalCopyChain, SentenceEmbeddings, cite

    from_folder = None
    if docs is not None:
        from langchain_core.vectorstores import InMemoryVectorStore

        store = InMemoryVectorStore(SentenceEmbeddings())
        index = FolderIndex(docs, store=store)
        index.update()
        retriever = HybridRetriever(documents=index.documents, store=store)
        from_folder = partial(RetrievalCopyChain, retriever, on_unsupported="refuse")
    # Models that run here have imported torch, for which others need not wait.
    is_local = "torch" in sys.modules and isinstance(model, local_backend.ChatLocal)
    return Copying(cite, from_folder, local_backend.References if is_local else None)


def examine_machine(known: Mapping[str, Any], loads_torch: bool) -> dict[str, Any]:
    """What local models run on. ``known`` are the flags that count, and the programs that are asked."""
    info = Path("/proc/cpuinfo")  # on Linux alone; elsewhere torch knows
    words = info.read_text().split() if info.exists() else []
    return {
        "system": f"{platform.system()}, {platform.machine()}, {os.cpu_count()} cores",
        "flags": [flag for flag in known["flags"] if flag in words],
        "gpus": _output(*known["gpu"]),
        "torch": _output(sys.executable, "-c", known["torch"]) if loads_torch else [],
    }


def _output(*command: str) -> list[str]:
    """The lines that a program prints, be they an error; none if there is no such program."""
    if shutil.which(command[0]) is None:
        return []
    done = subprocess.run(command, capture_output=True, text=True, timeout=60, check=False)
    return (done.stdout or done.stderr).splitlines()


if __name__ == "__main__":
    sys.exit(main())
