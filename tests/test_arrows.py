"""Who may import whom, read off the code: the layout's arrows."""

from __future__ import annotations

import ast
import inspect
import re
import textwrap
from collections import Counter
from collections.abc import Iterator
from functools import cache
from graphlib import TopologicalSorter
from pathlib import Path

import pytest

from sot_chains.answering.answer import Answer

ROOT = Path(__file__).parent.parent
PACKAGES = ("sot_chains", "local_backend", "retrieval_copy")
ARCHITECTURE = ROOT / "docs" / "explanation" / "architecture.md"
COMMAND = "langchain_parallel_decoding"  # the command `sot`, above all three


@cache
def _nodes(path: Path) -> list[ast.AST]:
    """Of the module's syntax tree, which is read once for all tests."""
    return list(ast.walk(ast.parse(path.read_text("utf-8"))))


def _imports(path: Path) -> Iterator[str]:
    for node in _nodes(path):
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


def test_retrieval_copy_takes_public_names_providers_and_aio_only() -> None:
    assert _modules("retrieval_copy")
    for path in _modules("retrieval_copy"):
        for name in _imports(path):
            parts = name.split(".")
            if parts[0] == "local_backend":
                assert len(parts) <= 2, (path, name)
            if parts[0] == "sot_chains":
                assert parts[1:2] in (["providers"], ["aio"]), (path, name)


def test_the_command_wires_public_names_and_nobody_imports_it() -> None:
    for path in _modules(COMMAND):
        for name in _imports(path):
            parts = name.split(".")
            if parts[0] in ("local_backend", "retrieval_copy"):
                assert len(parts) <= 2, (path, name)
            if parts[0] == "sot_chains":
                assert parts[1:2] in (["cli"], ["serving"]), (path, name)
                assert len(parts) <= 3, (path, name)
    assert sum(len(path.read_text("utf-8").splitlines()) for path in _modules(COMMAND)) <= 120
    for package in PACKAGES:
        assert not any(COMMAND in _roots(path) for path in _modules(package)), package


def test_spans_never_need_opentelemetry() -> None:
    for path in [path for package in PACKAGES for path in _modules(package)]:
        assert "opentelemetry" not in _roots(path), path  # who sets a provider has imported it


def test_sot_chains_never_needs_torch() -> None:
    for path in _modules("sot_chains"):
        assert not _roots(path) & {"torch", "accelerate"}, path
        assert not {name for name in _imports(path) if name.startswith("safetensors.torch")}, path


# Folders and modules of a package, lowest first: each imports from lines above its own, and from itself.
# Imports inside functions and for types alone count like all others.
LAYERS = {
    "local_backend": [
        ["drafting", "caching"],
        ["kernels"],
        ["models"],
        ["sequences"],
        ["scheduling"],
        ["engine"],
        ["langchain", "transformers", "vllm"],
        ["offline"],
        ["training"],
        ["batch", "__init__"],
    ],
    "sot_chains": [
        ["outline", "aio"],
        ["prompts", "filters", "providers"],
        ["calls"],
        ["router"],
        ["answering"],
        ["chain"],
        ["thought_graph", "rendering", "middleware"],
        ["display", "evaluation"],
        ["serving"],
        ["cli"],
        ["__init__"],
    ],
    "retrieval_copy": [
        ["citations"],
        ["references", "conversation", "prompting", "model_adapter"],
        ["stores"],
        ["options"],
        ["answering"],
        ["chain"],
        ["with_citations", "display"],
        ["cli"],
        ["__main__", "__init__"],
    ],
}
# Lines of each package. They are only ever lowered: who adds lines finds them elsewhere.
BUDGET = {
    "sot_chains": 9_998,
    "local_backend": 12_722,
    "retrieval_copy": 3_700,
    "langchain_parallel_decoding": 80,
}
_LONGEST_MODULE, _LONGEST_CLASS, _LONGEST_FUNCTION = 350, 250, 60
_MOST_MODULES = 12  # of a folder


def _room(name: str) -> str:
    """The folder or module right below the package, of a dotted name."""
    parts = name.split(".")
    return parts[1] if len(parts) > 1 else "__init__"


def _dotted(path: Path) -> str:
    return ".".join(path.relative_to(ROOT).with_suffix("").parts)


@pytest.mark.parametrize("package", LAYERS)
def test_imports_follow_the_layers(package: str) -> None:
    rank = {room: number for number, rooms in enumerate(LAYERS[package]) for room in rooms}
    for path in _modules(package):
        room = _room(_dotted(path))
        assert room in rank, f"{path} is in no layer"
        for name in _imports(path):
            if name.split(".")[0] != package or name == package:
                continue
            other = _room(name)
            if other in rank:  # else a name that the package exports
                assert other == room or rank[other] < rank[room], (
                    f"{path} imports {name}, which is not below it"
                )


@pytest.mark.parametrize("package", PACKAGES)
def test_no_module_imports_back(package: str) -> None:
    modules = {_dotted(path).removesuffix(".__init__"): path for path in _modules(package)}
    sorter: TopologicalSorter[str] = TopologicalSorter()
    for name, path in modules.items():
        sorter.add(name, *({other for other in _imports(path) if other in modules} - {name, package}))
    sorter.prepare()  # raises CycleError, which names the circle


# Packages that this project is built on, at the wish of those it is for.
NAMED = ("langchain_core", "openai", "anthropic", "tiktoken", "asyncio_throttle", "pydantic", "transformers")


@pytest.mark.parametrize("name", NAMED)
def test_the_named_packages_are_used(name: str) -> None:
    assert any(name in _roots(path) for package in PACKAGES for path in _modules(package))


def _num_lines(path: Path) -> int:
    return len(path.read_text("utf-8").splitlines())


@pytest.mark.parametrize("package", BUDGET)
def test_packages_keep_to_their_budget(package: str) -> None:
    assert sum(map(_num_lines, _modules(package))) <= BUDGET[package]


@pytest.mark.parametrize("package", LAYERS)
def test_folders_and_modules_stay_small(package: str) -> None:
    folders = Counter(path.parent for path in _modules(package) if path.name != "__init__.py")
    assert max(folders.values()) <= _MOST_MODULES, folders
    assert not {str(path) for path in _modules(package) if _num_lines(path) > _LONGEST_MODULE}


@pytest.mark.parametrize("package", LAYERS)
def test_functions_and_classes_stay_short(package: str) -> None:
    long = [
        (path.name, node.name, node.end_lineno - node.lineno + 1)
        for path in _modules(package)
        for node in _nodes(path)
        if isinstance(node, ast.FunctionDef | ast.AsyncFunctionDef | ast.ClassDef)
        and (longest := _LONGEST_CLASS if isinstance(node, ast.ClassDef) else _LONGEST_FUNCTION)
        and node.end_lineno
        and node.end_lineno - node.lineno + 1 > longest
    ]
    assert not long


def test_langchain_is_imported_in_one_folder_alone() -> None:
    for path in _modules("local_backend"):
        if _room(_dotted(path)) != "langchain":
            assert not {root for root in _roots(path) if root.startswith("langchain")}, path


@pytest.mark.parametrize("package", ["sot_chains", "local_backend"])
def test_siblings_are_not_imported_by_string_either(package: str) -> None:
    siblings = re.compile("(" + "|".join(set(PACKAGES) - {package}) + r")([.:]\w+)*")
    found = {
        str(path.relative_to(ROOT))
        for path in _modules(package)
        for node in _nodes(path)
        if isinstance(node, ast.Constant)
        and isinstance(node.value, str)
        and siblings.fullmatch(node.value.rstrip(".:"))  # also the beginning of an f-string
    }
    assert not found


# What objects of other libraries are asked for by name, because no common class declares it.
_FOREIGN_ATTRIBUTES = {
    *("model_name", "model", "n"),  # of LangChain's chat models
    *("status_code", "response", "headers", "body", "is_retryable"),  # errors of SDKs and of LangChain
}


@pytest.mark.parametrize("room", ["answering", "calls", "providers"])
def test_models_are_asked_only_for_what_a_protocol_declares(room: str) -> None:
    for path in _modules(f"sot_chains/{room}"):
        for node in _nodes(path):
            if isinstance(node, ast.Call) and isinstance(node.func, ast.Name) and node.func.id == "getattr":
                named = node.args[1]
                if isinstance(named, ast.Constant):
                    assert named.value in _FOREIGN_ATTRIBUTES, (path, named.value)


def test_only_the_cache_touches_the_transformers_cache() -> None:
    for path in _modules("local_backend"):
        if path.name not in ("kv_cache.py", "cache_layer.py"):
            names = set(_imports(path))
            assert not {name for name in names if name.startswith("transformers") and "Cache" in name}, path
            assert not any("cache_utils" in name for name in names), path


def test_the_engine_knows_drafters_by_their_protocol() -> None:
    names = {
        name for path in _modules("local_backend/engine") for name in _imports(path) if "drafting" in name
    }
    assert not {
        name
        for name in names
        if name.startswith("local_backend.drafting.")
        and name.split(".")[2] not in ("Drafter", "make_drafter", "draft", "drafter")
    }


@pytest.mark.parametrize("package", PACKAGES)
def test_the_public_surface_is_what_all_says(package: str) -> None:
    module = __import__(package)
    assert len(module.__all__) == len(set(module.__all__)) > 0
    for name in module.__all__:
        assert getattr(module, name).__doc__, name
    assert (ROOT / package / "py.typed").exists()


def test_the_page_on_architecture_says_the_same() -> None:
    page = ARCHITECTURE.read_text("utf-8")
    said = {
        package: [layer.split() for layer in layers.split("<")]
        for package, layers in re.findall(r"^(\w+): (.+)$", page.split("## Layers")[1], re.MULTILINE)
    }
    assert said == LAYERS
    for name in re.findall(r"<br/>((?:\w+/)+\w+\.py)", page):
        assert any((ROOT / package / name).exists() or (ROOT / name).exists() for package in PACKAGES), name


def test_the_page_on_architecture_shows_the_algorithm_as_it_is() -> None:
    """Fails after a change of ``Answer.write``: copy its source into the page."""
    source = textwrap.dedent(inspect.getsource(Answer.write)).rstrip()
    assert f"```python\n{source}\n```" in ARCHITECTURE.read_text("utf-8")
    assert len(source.splitlines()) <= 40
