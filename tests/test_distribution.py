"""The wheel and the sdist, as a user without extras gets them: no torch, no SDK, and answers all the same."""

from __future__ import annotations

import re
import subprocess
import sys
import zipfile
from importlib import import_module
from pathlib import Path

import pytest

import sot_chains

ROOT = Path(__file__).parent.parent

PROGRAM = """
import importlib.util, os, sys, warnings
os.environ["HF_HUB_OFFLINE"] = "1"  # the router's base model is in no package here, so words decide
warnings.filterwarnings("ignore", "the router reads words alone")
for heavy in ("torch", "transformers", "openai", "anthropic", "tokenizers"):
    assert importlib.util.find_spec(heavy) is None, heavy
from langchain_core.language_models import FakeListChatModel
from sot_chains import SkeletonOfThought
model = FakeListChatModel(responses=["1. Plan\\n2. Rest", "Make a list.", "Take breaks."])
print(SkeletonOfThought(model).invoke("What is 12 * 7?").text)  # routed by words and form
model.i = 0
message = SkeletonOfThought(model, router="always").invoke("How can I get more done in a day?")
assert message.response_metadata["sot"]["route"] == "sot", message
print(message.text)
assert "torch" not in sys.modules
from langchain_core.documents import Document
from langchain_core.runnables import RunnableLambda
from retrieval_copy import RetrievalCopyChain
found = RunnableLambda(lambda query: [Document("Make a list.", id="list")])
plain = FakeListChatModel(responses=["Simply: Make a list."])
cited = RetrievalCopyChain(found, plain, min_citation_tokens=3).invoke("How?")
assert [span["text"] for span in cited.response_metadata["citations"]] == ["Make a list."], cited
assert "torch" not in sys.modules

def retrieve(): from retrieval_copy import FolderIndex; FolderIndex(".")
def decode(): from local_backend import ChatLocal
def train(): import local_backend.training
def ask(vendor): SkeletonOfThought(vendor + ":some-model")
missing = [("rag", retrieve), ("local", decode), ("training", train)]
for extra, use in missing + [(name, lambda name=name: ask(name)) for name in ("openai", "anthropic")]:
    try:
        use()
    except ImportError as error:
        assert f"pip install '.[{extra}]'" in str(error), error
    else:
        raise AssertionError(f"nothing was missing without the extra {extra}")

from langchain_parallel_decoding.command import main
assert main(["ask", "Why?"]) == main(["serve", "--model", "openai:m"]) == 1
"""


def _run(*command: str | Path, cwd: Path) -> str:
    done = subprocess.run(command, cwd=cwd, capture_output=True, text=True, timeout=400, check=False)
    assert done.returncode == 0, f"{command}\n{done.stdout}\n{done.stderr}"
    return done.stdout + done.stderr


@pytest.fixture(scope="module")
def wheel(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("wheel")
    _run(sys.executable, "-m", "hatchling", "build", "--target", "wheel", "--directory", folder, cwd=ROOT)
    (built,) = folder.glob("*.whl")
    return built


def test_the_wheel_holds_the_packages(wheel: Path) -> None:
    names = zipfile.ZipFile(wheel).namelist()
    for wanted in (
        "sot_chains/py.typed",
        "local_backend/py.typed",
        "retrieval_copy/py.typed",
        "langchain_parallel_decoding/py.typed",
        "sot_chains/router/weights/adapter.safetensors",
        "sot_chains/router/weights/head.safetensors",
        "sot_chains/router/weights/words_head.safetensors",
        "sot_chains/router/weights/NOTICE",
        *(f"sot_chains/rendering/templates/{name}" for name in ("run.html", "page.html", "style.css")),
        *(f"sot_chains/serving/static/{name}" for name in ("race.html", "race.js", "race.css")),
    ):
        assert wanted in names
    assert not [name for name in names if name.startswith(("tests", "benchmarks", "examples"))]
    assert wheel.stat().st_size <= 8e6


# What the first line of an extra's page does, in an environment that has this extra alone.
FIRST = {
    "openai": "from sot_chains import SkeletonOfThought as S; S('openai:some-model', api_key='k')",
    "anthropic": "from sot_chains import SkeletonOfThought as S; S('anthropic:some-model', api_key='k')",
    "serve": "from sot_chains.serving.app import create_app",
    "router": "from sot_chains.router.encoder import find_minilm; import tokenizers, threadpoolctl",
    "documents": "import chardet, mammoth, markdown_it, nbformat, pypdf, selectolax",
    "local": "from local_backend import ChatLocal, Engine, References",
    "training": "from local_backend.training import tune",
    "rag": "from retrieval_copy import FolderIndex; print(FolderIndex('.').update())",
    "all": "import sot_chains.serving.app, local_backend.training; from retrieval_copy import FolderIndex",
}


@pytest.mark.slow
@pytest.mark.parametrize("extra", FIRST)
def test_the_sdist_installs_with_each_extra_alone(extra: str, tmp_path: Path) -> None:
    _run(sys.executable, "-m", "hatchling", "build", "--target", "sdist", "--directory", tmp_path, cwd=ROOT)
    (sdist,) = tmp_path.glob("*.tar.gz")
    uv = Path(sys.executable).parent / "uv"
    _run(uv, "venv", "--quiet", "--python", sys.executable, "alone", cwd=tmp_path)
    python = tmp_path / "alone" / "bin" / "python"
    install = (uv, "pip", "install", "--quiet", "--python", python, "--constraint", ROOT / "constraints.txt")
    _run(*install, f"langchain-parallel-decoding[{extra}] @ {sdist.as_uri()}", cwd=tmp_path)
    _run(python, "-W", "error", "-c", FIRST[extra], cwd=tmp_path)
    sizes = (path.stat().st_size for path in (tmp_path / "alone").rglob("*") if not path.is_symlink())
    print(f"{extra}: {sum(sizes) / 1e6:.0f} MB")  # as docs/guides/install.md says


def _find_python(version: str) -> str:
    uv = Path(sys.executable).parent / "uv"
    found = subprocess.run(
        [uv, "python", "find", "--no-python-downloads", version], capture_output=True, text=True, check=False
    )
    return found.stdout.strip() or pytest.skip(f"no Python {version} on the PATH")


@pytest.mark.parametrize(
    "version", ["", *(pytest.param(f"3.{minor}", marks=pytest.mark.slow) for minor in (12, 13, 14))]
)
def test_it_answers_without_extras_and_without_torch(version: str, wheel: Path, tmp_path: Path) -> None:
    """Installs into an empty environment; the package index is the one place it goes to."""
    uv = Path(sys.executable).parent / "uv"
    interpreter = _find_python(version) if version else sys.executable
    _run(uv, "venv", "--quiet", "--python", interpreter, "empty", cwd=tmp_path)
    python = tmp_path / "empty" / "bin" / "python"
    install = (uv, "pip", "install", "--quiet", "--python", python)
    _run(*install, "--constraint", ROOT / "constraints.txt", wheel, cwd=tmp_path)
    said = _run(python, "-W", "error", "-c", PROGRAM, cwd=tmp_path)
    assert "1. **Plan**: Make a list." in said
    for extra in ("local", "serve"):  # what a command misses
        assert f"pip install '.[{extra}]'" in said
    assert "usage: sot" in _run(tmp_path / "empty" / "bin" / "sot", "--help", cwd=tmp_path)


def test_all_say_the_same_version() -> None:
    said = {
        *(import_module(name).__version__ for name in ("sot_chains", "local_backend", "retrieval_copy")),
        *re.findall(r"^version: (.+)$", (ROOT / "CITATION.cff").read_text("utf-8"), re.MULTILINE),
        re.findall(r"^## \[(\d[^]]*)\]", (ROOT / "CHANGELOG.md").read_text("utf-8"), re.MULTILINE)[0],
    }
    assert said == {sot_chains.__version__}


def test_importing_the_package_imports_no_heavy_library() -> None:
    program = "import sot_chains, sys; print([n for n in %r if n in sys.modules])"
    heavy = ("torch", "transformers", "openai", "anthropic", "tiktoken", "tokenizers", "starlette", "rich")
    heavy += ("matplotlib",)
    heavy += ("langchain_core.runnables.base", "langchain_core.tracers", "langsmith", "numpy", "jinja2")
    assert _run(sys.executable, "-c", program % (heavy,), cwd=ROOT).strip() == "[]"
