"""The wheel, as a user without extras gets it: ``sot_chains`` answers where torch was never installed."""

from __future__ import annotations

import subprocess
import sys
import zipfile
from pathlib import Path

import pytest

ROOT = Path(__file__).parent.parent

PROGRAM = """
import importlib.util, os, sys, warnings
os.environ["HF_HUB_OFFLINE"] = "1"  # the router's base model is in no package here, so words decide
warnings.filterwarnings("ignore", "the router reads words alone")
assert importlib.util.find_spec("torch") is None
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
try:
    from retrieval_copy import FolderIndex
    FolderIndex(".")
except ImportError as error:
    assert ".[rag]" in str(error), error
else:
    raise AssertionError("folders were split without the splitters")
try:
    from local_backend import ChatLocal
except ImportError as error:
    assert ".[local]" in str(error), error
else:
    raise AssertionError("local_backend came up without torch")
"""


def _run(*command: str | Path, cwd: Path) -> str:
    done = subprocess.run(command, cwd=cwd, capture_output=True, text=True, timeout=400, check=False)
    assert done.returncode == 0, f"{command}\n{done.stdout}\n{done.stderr}"
    return done.stdout


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


def test_it_answers_without_extras_and_without_torch(wheel: Path, tmp_path: Path) -> None:
    """Installs into an empty environment; the package index is the one place it goes to."""
    uv = Path(sys.executable).parent / "uv"
    _run(uv, "venv", "--quiet", "--python", sys.executable, "empty", cwd=tmp_path)
    python = tmp_path / "empty" / "bin" / "python"
    install = (uv, "pip", "install", "--quiet", "--python", python)
    _run(*install, "--constraint", ROOT / "constraints.txt", wheel, cwd=tmp_path)
    assert "1. **Plan**: Make a list." in _run(python, "-W", "error", "-c", PROGRAM, cwd=tmp_path)
    sot = tmp_path / "empty" / "bin" / "sot"
    assert "usage: sot" in _run(sot, "--help", cwd=tmp_path)
    asked = subprocess.run([sot, "ask", "Why?"], cwd=tmp_path, capture_output=True, text=True, check=False)
    assert asked.returncode == 1
    assert ".[local]" in asked.stderr
