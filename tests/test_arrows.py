"""Who may import whom, read off the code: the layout's arrows."""

from __future__ import annotations

import ast
from collections.abc import Iterator
from pathlib import Path

import pytest

ROOT = Path(__file__).parent.parent
PACKAGES = ("sot_chains", "local_backend", "retrieval_copy")


def _imports(path: Path) -> Iterator[str]:
    for node in ast.walk(ast.parse(path.read_text("utf-8"))):
        if isinstance(node, ast.Import):
            yield from (alias.name for alias in node.names)
        elif isinstance(node, ast.ImportFrom):
            assert node.level == 0, f"{path}: imports are absolute here"
            yield node.module or ""
            yield from (f"{node.module}.{alias.name}" for alias in node.names)


def _modules(package: str) -> list[Path]:
    return sorted((ROOT / package).rglob("*.py"))


def _roots(path: Path) -> set[str]:
    return {name.split(".")[0] for name in _imports(path)}


@pytest.mark.parametrize("package", ["sot_chains", "local_backend"])
def test_siblings_do_not_import_each_other(package: str) -> None:
    others = set(PACKAGES) - {package}
    assert _modules(package)
    for path in _modules(package):
        assert not _roots(path) & others, path


def test_retrieval_copy_takes_public_names_and_providers_only() -> None:
    assert _modules("retrieval_copy")
    for path in _modules("retrieval_copy"):
        for name in _imports(path):
            parts = name.split(".")
            if parts[0] == "local_backend":
                assert len(parts) <= 2, (path, name)
            if parts[0] == "sot_chains":
                assert parts[1:2] == ["providers"], (path, name)


def test_sot_chains_never_needs_torch() -> None:
    for path in _modules("sot_chains"):
        assert not _roots(path) & {"torch", "accelerate"}, path
        assert not {name for name in _imports(path) if name.startswith("safetensors.torch")}, path


def test_langchain_is_imported_by_the_chat_model_alone() -> None:
    for path in _modules("local_backend"):
        if path.name != "chat_model.py":
            assert not {root for root in _roots(path) if root.startswith("langchain")}, path


def test_only_the_cache_module_touches_the_transformers_cache() -> None:
    for path in _modules("local_backend"):
        if path.name != "kv_cache.py":
            names = set(_imports(path))
            assert not {name for name in names if name.startswith("transformers") and "Cache" in name}, path
            assert not any("cache_utils" in name for name in names), path


def test_the_engine_knows_drafters_by_their_protocol() -> None:
    names = [name for name in _imports(ROOT / "local_backend" / "engine.py") if "drafters" in name]
    assert set(names) <= {
        "local_backend.drafters",
        "local_backend.drafters.Drafter",
        "local_backend.drafters.drafter_of",
        "local_backend.drafters.base",
        "local_backend.drafters.base.Drafter",
    }
    for path in _modules("local_backend/drafters"):
        for name in _imports(path):
            assert not name.startswith(("local_backend.engine", "local_backend.kv_cache")), (path, name)


@pytest.mark.parametrize("package", PACKAGES)
def test_the_public_surface_is_what_all_says(package: str) -> None:
    module = __import__(package)
    assert len(module.__all__) == len(set(module.__all__)) > 0
    for name in module.__all__:
        assert getattr(module, name).__doc__, name
    assert (ROOT / package / "py.typed").exists()
