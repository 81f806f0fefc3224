"""What the project shows is true: code and notebooks run, links lead somewhere, the reference is whole."""

from __future__ import annotations

import ast
import json
import os
import re
import tomllib
from collections.abc import Iterable, Iterator
from importlib import import_module
from pathlib import Path
from typing import Any

import nbformat
import pytest
from IPython.core.inputtransformer2 import TransformerManager
from nbclient import NotebookClient
from nbclient.output_widget import OutputWidget

from local_backend import ChatLocal, Engine
from sot_chains import SkeletonOfThought
from sot_chains.router.trained import WORDS_HEAD, Features, Head, TrainedRouter
from tests.sot_chains.server import chat_server

ROOT = Path(__file__).parent.parent
NOTEBOOKS = sorted((ROOT / "notebooks").glob("*.ipynb"))
DOCS = ROOT / "docs"
STATIC = ROOT / "sot_chains" / "serving" / "static"
PAGES = sorted(DOCS.rglob("*.md"))
# The page on architecture quotes the source, with which ``test_arrows.py`` compares it.
RUNNING_PAGES = [
    page for page in PAGES if "```python" in page.read_text("utf-8") and page.stem != "architecture"
]
README = (ROOT / "README.md").read_text("utf-8")
CONTRIBUTING = (ROOT / "CONTRIBUTING.md").read_text("utf-8")


def _python_blocks(text: str) -> list[str]:
    return re.findall(r"^```python\n(.*?)^```", text, re.DOTALL | re.MULTILINE)


@pytest.fixture
def openai_in_the_environment(monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    """What stands for the vendor's API: a server here that streams and counts."""
    with chat_server() as server:
        server.model = "gpt-4.1-mini"
        monkeypatch.setenv("OPENAI_BASE_URL", server.url)
        monkeypatch.setenv("OPENAI_API_KEY", "key-for-tests")
        yield


@pytest.fixture
def loaded_once(default_chat: ChatLocal, monkeypatch: pytest.MonkeyPatch) -> None:
    """``ChatLocal.default`` takes the weights of all tests, and its answers are cut early."""
    plain = default_chat.engine

    def default(*, drafter: Any = "autoregressive", max_tokens: int, **_: object) -> ChatLocal:
        engine = Engine(plain.model, plain.tokenizer, drafter, width_costs=plain.width_costs)
        return ChatLocal(engine=engine, max_tokens=min(max_tokens, 12))

    monkeypatch.setattr(ChatLocal, "default", default)


@pytest.mark.parametrize("number", range(len(_python_blocks(README))))
@pytest.mark.usefixtures("openai_in_the_environment", "loaded_once")
def test_the_code_of_the_readme_runs(number: int, capsys: pytest.CaptureFixture[str]) -> None:
    names: dict[str, object] = {}
    exec(compile(_python_blocks(README)[number], f"README.md, block {number}", "exec"), names)
    assert isinstance(names.get("sot", names.get("chat")), SkeletonOfThought | ChatLocal)
    if isinstance(chat := names.get("chat"), ChatLocal):
        chat.close()
    assert capsys.readouterr().out.strip()


@pytest.mark.parametrize("number", range(len(_python_blocks(CONTRIBUTING))))
@pytest.mark.usefixtures("loaded_once")
def test_the_code_for_contributors_runs(number: int, capsys: pytest.CaptureFixture[str]) -> None:
    exec(compile(_python_blocks(CONTRIBUTING)[number], f"CONTRIBUTING.md, block {number}", "exec"), {})
    assert capsys.readouterr().out.strip()


# What the first block of a page prints, where it is of the model's writing.
FIRST_PRINTED = {
    "agent": "Hanna Brandt",
    "cpu": "Paris",
    "documents": "Hanna Brandt",
    "drafting": "Paris.*tokens_per_forward",
    "jacobi": "Paris",
    "models": "Paris",
    "retrieval": "Hanna Brandt",
    "router_and_evaluation": r"arithmetic.*\nsot .*\n1\. \*\*",
    "scheduling": r"Paris.*\d tokens in \d+ forwards of",
    "serving": r"1\. \*\*Fixed hours\*\*.*\['Fixed hours'",
    "training": r"\d -> \d\.\d+ tokens per forward",
}


@pytest.mark.slow
@pytest.mark.parametrize("page", [ROOT / "README.md", *RUNNING_PAGES], ids=lambda page: page.stem)
@pytest.mark.usefixtures("openai_in_the_environment")
def test_the_code_of_a_page_runs_from_top_to_bottom(page: Path, capsys: pytest.CaptureFixture[str]) -> None:
    names: dict[str, object] = {}
    for number, block in enumerate(_python_blocks(page.read_text("utf-8"))):
        exec(compile(block, f"{page.name}, block {number}", "exec"), names)
        if number == 0:
            shown = capsys.readouterr().out
            assert re.search(FIRST_PRINTED.get(page.stem, ""), shown, re.DOTALL), shown
    for name in names.values():
        if isinstance(name, ChatLocal):
            name.close()
    assert (shown + capsys.readouterr().out).strip()


def test_the_questions_of_the_first_minute_are_answered_by_points() -> None:
    """Also by words alone: ``pip install ".[openai]"`` brings no sentence encoder."""
    pages = [README, *(page.read_text("utf-8") for page in (DOCS / "tutorials").glob("*.md"))]
    pages.append((ROOT / "sot_chains" / "commands.toml").read_text("utf-8"))
    asked = re.findall(r'(?:sot ask |(?:sot|SkeletonOfThought\(\w+\))\.\w+\()"(.+?)"', "\n".join(pages))
    examples = re.search(r"EXAMPLES = \[(.*?)\]", (STATIC / "race.js").read_text("utf-8"), re.DOTALL)
    assert examples
    asked += re.findall(r'"(.+?)"', examples[1])
    words, router = Head.load(WORDS_HEAD), TrainedRouter()
    assert len(set(asked)) >= 5
    for question in set(asked):
        assert words.probability(Features.of(question, None)) >= words.threshold, question
        assert router.decide(question).use_sot, question


def _links(text: str) -> list[str]:
    """Relative targets of Markdown and of pictures in HTML, without their anchors."""
    return re.findall(r"""(?:\]\(|(?:src|srcset|href)=")((?!https?:|#)[^)#\s"]+)""", text)


def test_pages_link_to_files_that_exist() -> None:
    """Whether anchors exist, too, is checked by ``make docs``."""
    for page in [*PAGES, *ROOT.glob("*.md")]:
        for target in _links(page.read_text("utf-8")):
            assert (page.parent / target).exists(), (page, target)


def test_every_page_is_in_the_navigation() -> None:
    navigation = re.findall(r": (\S+\.md)$", (ROOT / "mkdocs.yml").read_text("utf-8"), re.MULTILINE)
    assert len(navigation) == len(set(navigation))
    notebooks = {f"notebooks/{notebook.stem}.md" for notebook in NOTEBOOKS}
    assert set(navigation) == notebooks | {page.relative_to(DOCS).as_posix() for page in PAGES}


def test_pages_install_extras_that_exist_under_their_names() -> None:
    project = tomllib.loads((ROOT / "pyproject.toml").read_text("utf-8"))["project"]
    extras = set(project["optional-dependencies"]) - {"web"}  # an earlier name
    for page in [*PAGES, ROOT / "README.md", ROOT / "CONTRIBUTING.md", ROOT / "Makefile"]:
        for named in re.findall(r"\.\[([a-z,]+)\]", page.read_text("utf-8")):
            assert set(named.split(",")) <= extras, page
    table = (DOCS / "guides" / "install.md").read_text("utf-8")
    assert {*re.findall(r"^\| `(\w+)` \|", table, re.MULTILINE)} == extras - {"all"}


def test_the_table_of_engines_says_what_was_measured() -> None:
    page, results = (DOCS / "guides" / "engines.md").read_text("utf-8"), ROOT / "benchmarks" / "results"
    newest = {
        name: max(results.glob(f"*_{name}.json"))
        for name in ("peers_cpu_default", "sot_models_default_normal")
    }
    peers, sot = (json.loads(file.read_text("utf-8"))["summary"] for file in newest.values())
    assert f"({sot['equal_length_speedup_median']:.1f} at equal length)" in page
    names = {"`transformers` `generate`": "transformers greedy", "llama.cpp, 4 bits": "llama.cpp greedy"}
    names |= {"vLLM": "vLLM greedy", "vLLM, suffix decoding": "vLLM suffix"}
    table = page.partition("| SmolLM2-135M | chat | documents | edits |\n|---|---|---|---|\n")[2].partition(
        "\n\n"
    )[0]
    rows = [[cell.strip(" *") for cell in line.strip("|").split("|")] for line in table.splitlines()]
    assert len(rows) == 7
    for name, *figures in rows:
        way = names.get(name, name.removeprefix("this engine, ").replace("`", ""))
        found = [peers[kind][way]["tokens_per_second"] for kind in ("chat, 1", "documents, 1", "edit, 1")]
        assert all(abs(float(figure) - one) <= 0.51 for figure, one in zip(figures, found, strict=True)), name


def test_no_page_needs_a_script_from_elsewhere() -> None:
    """What draws Mermaid's diagrams would be fetched by every reader."""
    assert not [page.name for page in PAGES if "```mermaid" in page.read_text("utf-8")]


@pytest.mark.parametrize("package", ["sot_chains", "local_backend", "retrieval_copy"])
def test_the_reference_has_every_public_name(package: str) -> None:
    """Of the package and of its folders that say what is public; and nothing that is private."""
    page = (DOCS / "reference" / f"{package}.md").read_text("utf-8")
    named = re.findall(r"^(?:::: |### \w+ \{#)([\w.]+)", page, re.MULTILINE)
    assert len(named) == len(set(named))
    assert not [name for name in named if "._" in name]
    last = {name.rpartition(".")[2] for name in named}
    for module in (ROOT / package).rglob("__init__.py"):
        if "__all__" in module.read_text("utf-8"):
            dotted = ".".join(module.relative_to(ROOT).parent.parts)
            assert set(import_module(dotted).__all__) <= last, dotted


def test_the_readme_names_targets_of_the_makefile() -> None:
    for target in re.findall(r"`?make ([a-z-]+)`?", README):
        assert re.search(rf"^{target}:", (ROOT / "Makefile").read_text(), re.MULTILINE), target


class _Client(NotebookClient):
    """Lets an output widget be left twice.

    Progress bars in a notebook are such widgets, and two messages that one was left may come in a row;
    ``nbclient`` then takes a hook from an empty list and the whole notebook fails.
    """

    def remove_output_hook(self, msg_id: str, hook: OutputWidget) -> None:
        if self.output_hook_stack[msg_id]:
            super().remove_output_hook(msg_id, hook)


def _notebooks() -> list[Any]:
    """Most take minutes; the one that runs by default asks a server on this machine and loads no model."""
    slow = [pytest.mark.slow]
    return [
        pytest.param(path, id=path.stem, marks=[] if path.stem == "06_closed_models" else slow)
        for path in NOTEBOOKS
    ]


@pytest.mark.parametrize("path", _notebooks())
def test_the_notebook_runs_and_shows_a_picture(path: Path) -> None:
    notebook = nbformat.read(path, as_version=4)
    place = {"metadata": {"path": ROOT}}
    client = _Client(notebook, timeout=900, kernel_name="python3", resources=place)
    client.execute()
    shown = [output.get("data", {}) for cell in notebook.cells for output in cell.get("outputs", ())]
    assert _has_picture(shown)
    source = "\n".join(cell.source for cell in notebook.cells if cell.cell_type == "code")
    assert not re.search(r"\b(def|class) ", source), "notebooks define no logic"
    if "WRITE_NOTEBOOKS" in os.environ:  # make notebooks
        for cell in notebook.cells:
            cell.metadata.clear()
            if cell.cell_type == "code":
                cell.outputs = _joined(output for output in cell.outputs if not _is_of_this_run(output))
        notebook.metadata.pop("widgets", None)
        nbformat.write(notebook, path)


def _joined(outputs: Iterable[Any]) -> list[Any]:
    """Text printed in pieces as one. ``nbclient`` would join it across what is shown in between, too."""
    joined: list[Any] = []
    for output in outputs:
        if output.output_type == "stream" and joined and joined[-1].get("name") == output.name:
            joined[-1].text += output.text
        else:
            joined.append(output)
    return joined


def _is_of_this_run(output: Any) -> bool:
    """Progress bars and warnings, which a reader has no use for."""
    data = output.get("data", {"text/plain": "printed"})
    is_bar = "application/vnd.jupyter.widget-view+json" in data or not data.get("text/plain")
    return is_bar or output.get("name") == "stderr"


@pytest.mark.parametrize("path", NOTEBOOKS, ids=[path.stem for path in NOTEBOOKS])
def test_a_notebook_imports_what_there_is(path: Path) -> None:
    cells = [cell.source for cell in nbformat.read(path, as_version=4).cells if cell.cell_type == "code"]
    python = "\n".join(map(TransformerManager().transform_cell, cells))
    for node in ast.walk(
        compile(python, path.name, "exec", ast.PyCF_ONLY_AST | ast.PyCF_ALLOW_TOP_LEVEL_AWAIT)
    ):
        if isinstance(node, ast.Import):
            assert all(import_module(one.name) for one in node.names)
        if isinstance(node, ast.ImportFrom):
            module = import_module(node.module or "")
            assert not [one.name for one in node.names if not hasattr(module, one.name)], node.module


@pytest.mark.parametrize("path", NOTEBOOKS, ids=[path.stem for path in NOTEBOOKS])
def test_what_a_notebook_stores_is_whole_and_of_no_machine(path: Path) -> None:
    """``make notebooks`` writes what it shows."""
    text = path.read_text("utf-8")
    assert len(text) < 1_000_000
    assert str(ROOT) not in text
    cells = [cell for cell in nbformat.reads(text, as_version=4).cells if cell.cell_type == "code"]
    outputs = [output for cell in cells for output in cell.outputs]
    assert not [output for output in outputs if output.output_type == "error" or _is_of_this_run(output)]
    assert _has_picture([output.get("data", {}) for output in outputs])


def _has_picture(shown: list[Any]) -> bool:
    return any("image/png" in data or "<svg" in data.get("text/html", "") for data in shown)
