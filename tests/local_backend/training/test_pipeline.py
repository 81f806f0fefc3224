"""From prompts to a tuned model at toy size: killed and resumed, with adapters, and bad input refused."""

from __future__ import annotations

import json
import subprocess
import sys
from itertools import islice
from pathlib import Path
from typing import Any

import pytest
import torch
from transformers import AutoModelForCausalLM, LlamaForCausalLM, PreTrainedTokenizerFast

from local_backend.training import CollectOptions, LossOptions, NoiseOptions, TuneOptions, tune
from local_backend.training.__main__ import main
from local_backend.training.tasks import TASKS, draw_cases

TOY = TuneOptions(
    num_rounds=2,
    num_steps=4,
    batch_size=3,
    num_held_out=3,
    num_evaluations=1,
    save_steps=2,
    noise=NoiseOptions(block_size=4, num_passes=2),
    losses=LossOptions(local_weight=0.5),
    collect=CollectOptions(block_size=4, max_tokens=12, max_rows=8, prompts_per_part=8),
)


@pytest.fixture
def folder(model: LlamaForCausalLM, tokenizer: PreTrainedTokenizerFast, tmp_path: Path) -> Path:
    """A model whose answers end soon."""
    torch.manual_seed(3)
    with torch.no_grad():
        for parameter in model.parameters():
            if parameter.dim() > 1:
                parameter.normal_(0, 0.4)
    assert model.generation_config is not None
    model.generation_config.eos_token_id = list(range(0, len(tokenizer), 7))
    model.save_pretrained(tmp_path / "plain")
    tokenizer.save_pretrained(tmp_path / "plain")
    return tmp_path


def _prompts_file(folder: Path, count: int = 24) -> Path:
    path = folder / "prompts.jsonl"
    cases = islice(draw_cases(TASKS["word_problems"], "train"), count)
    path.write_text("".join(json.dumps({"prompt": case.prompt}) + "\n" for case in cases))
    return path


def _weights(folder: Path) -> dict[str, Any]:
    return dict(AutoModelForCausalLM.from_pretrained(folder).state_dict())


def test_prompts_become_a_tuned_model(folder: Path) -> None:
    told: list[str] = []
    report = tune(folder / "plain", _prompts_file(folder), folder / "tuned", TOY, tell=told.append)
    plain, tuned = _weights(folder / "plain"), _weights(folder / "tuned")
    assert plain.keys() == tuned.keys()  # the same architecture
    assert any(not torch.equal(plain[name], tuned[name]) for name in plain)
    assert [record["step"] for record in report.history] == [0, 4, 8]
    assert any("FLOPs" in line and "min" in line for line in told[: told.index(told[-1])])
    written = json.loads((folder / "tuned" / "report.json").read_text())
    assert written["before"]["quality"] == 1.0
    assert written["after"]["speedup"] > 0
    assert len(written["counts"]) == 2
    assert (folder / "tuned" / "progress.png").stat().st_size > 1000


class _KilledError(Exception):
    """Stands for the process being killed."""


@pytest.mark.parametrize("killed_at", [3, 7])
def test_killed_and_resumed_it_ends_with_the_same_weights(
    folder: Path, killed_at: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    from local_backend.training.trainer import ConsistencyTrainer

    prompts = _prompts_file(folder)
    tune(folder / "plain", prompts, folder / "whole", TOY, tell=lambda _: None)
    original = ConsistencyTrainer.compute_loss
    num_steps = 0

    def dying(self: Any, *args: Any, **options: Any) -> Any:
        nonlocal num_steps
        num_steps += 1
        if num_steps == killed_at:
            raise _KilledError
        return original(self, *args, **options)

    with monkeypatch.context() as patch:
        patch.setattr(ConsistencyTrainer, "compute_loss", dying)
        with pytest.raises(_KilledError):
            tune(folder / "plain", prompts, folder / "cut", TOY, tell=lambda _: None)
    tune(folder / "plain", prompts, folder / "cut", TOY, tell=lambda _: None)
    whole, cut = _weights(folder / "whole"), _weights(folder / "cut")
    assert all(torch.equal(whole[name], cut[name]) for name in whole)


def test_adapters_are_trained_and_merged(folder: Path) -> None:
    from dataclasses import replace

    options = replace(TOY, lora_rank=2, num_rounds=1, accumulation_steps=2)
    tune(folder / "plain", _prompts_file(folder), folder / "tuned", options, tell=lambda _: None)
    plain, tuned = _weights(folder / "plain"), _weights(folder / "tuned")
    changed = {name for name in plain if not torch.equal(plain[name], tuned[name])}
    assert changed
    assert all("proj" in name for name in changed)  # linear layers alone
    assert (folder / "tuned" / "work" / "round-0" / "adapter" / "adapter_config.json").exists()


def test_work_with_other_options_is_refused(folder: Path) -> None:
    from dataclasses import replace

    prompts = _prompts_file(folder)
    options = replace(TOY, num_rounds=1, num_steps=1)
    tune(folder / "plain", prompts, folder / "tuned", options, tell=lambda _: None)
    with pytest.raises(ValueError, match="another options"):
        tune(folder / "plain", prompts, folder / "tuned", TOY, tell=lambda _: None)


def test_further_rounds_may_be_asked_for_later(folder: Path) -> None:
    from dataclasses import replace

    prompts = _prompts_file(folder)
    first = replace(TOY, num_rounds=1)
    tune(folder / "plain", prompts, folder / "one", first, tell=lambda _: None)
    tune(folder / "plain", prompts, folder / "one", TOY, tell=lambda _: None)
    tune(folder / "plain", prompts, folder / "both", TOY, tell=lambda _: None)
    one, both = _weights(folder / "one"), _weights(folder / "both")
    assert all(torch.equal(one[name], both[name]) for name in one)


def test_right_answers_are_learned_from_and_wrong_ones_left_out(folder: Path) -> None:
    from dataclasses import replace

    cases = islice(draw_cases(TASKS["word_problems"], "train", seed=2), 6)
    examples = [{"prompt": case.prompt, "answer": case.answer} for case in cases]
    options = replace(TOY, num_rounds=1)
    report = tune(
        folder / "plain",
        _prompts_file(folder),
        folder / "tuned",
        options,
        examples=examples,
        accept=lambda prompts, _: [number % 2 == 0 for number in range(len(prompts))],
        tell=lambda _: None,
    )
    (counts,) = report.counts
    assert counts["rejected"] > 0
    assert counts["kept"] > 0
    with pytest.raises(ValueError, match="record 1 has no answer"):
        tune(folder / "plain", _prompts_file(folder), folder / "other", examples=[{"prompt": "a"}])
    assert not (folder / "other").exists()


# Bad input ---------------------------------------------------------------------------------------


def _refusal(arguments: list[str], capsys: pytest.CaptureFixture[str]) -> str:
    with pytest.raises(SystemExit) as exit_:
        main(arguments)
    assert exit_.value.code == 2
    return capsys.readouterr().err


def test_bad_input_is_refused_before_any_work(folder: Path, capsys: pytest.CaptureFixture[str]) -> None:
    good, bad = _prompts_file(folder), folder / "bad.jsonl"

    def refusal(lines: str, model: str = "plain", *more: str) -> str:
        bad.write_text(lines)
        output = folder / "output"
        arguments = ["--model", str(folder / model), "--prompts", str(bad), "--output", str(output), *more]
        said = _refusal(["tune", *arguments], capsys)
        assert not output.exists()
        return said

    assert "holds no prompt" in refusal("")
    assert "holds no prompt" in refusal("\n\n")
    assert "line 2" in refusal(good.read_text().splitlines()[0] + "\nnot json\n")
    assert "(it has: text)" in refusal('{"text": "a"}\n')
    assert "empty prompt" in refusal('{"prompt": ""}\n')
    assert "no chat template" in refusal('{"messages": [{"role": "user", "content": "a"}]}\n')
    long = json.dumps({"prompt": "How many? " * 400})
    assert "exceeds the model's 1024 positions" in refusal(f'{{"prompt": "a"}}\n{long}\n')
    assert "too few" in refusal('{"prompt": "a"}\n')
    assert "does not exist" in _refusal(
        ["tune", "--model", str(folder / "plain"), "--prompts", "none.jsonl", "--output", str(folder / "o")],
        capsys,
    )


def test_a_tokenizer_without_an_end_token_is_refused(
    folder: Path, tokenizer: PreTrainedTokenizerFast, capsys: pytest.CaptureFixture[str]
) -> None:
    endless = PreTrainedTokenizerFast(tokenizer_object=tokenizer.backend_tokenizer, pad_token="<|pad|>")
    endless.save_pretrained(folder / "plain")
    arguments = ["--model", str(folder / "plain"), "--prompts", str(_prompts_file(folder))]
    said = _refusal(["tune", *arguments, "--output", str(folder / "output")], capsys)
    assert "no end token" in said
    assert not (folder / "output").exists()


def test_a_trajectory_file_of_another_model_is_refused(
    folder: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    prompts, stored = str(_prompts_file(folder)), str(folder / "trajectories")
    arguments = ["--model", str(folder / "plain"), "--max-tokens", "12", "--block-size", "4"]
    main(["collect", *arguments, "--prompts", prompts, "--output", stored])
    assert json.loads(capsys.readouterr().out)["kept"] > 0
    other = AutoModelForCausalLM.from_pretrained(folder / "plain")
    with torch.no_grad():
        other.lm_head.weight.mul_(1.1)
    other.save_pretrained(folder / "plain")
    said = _refusal(
        ["train", *arguments, "--trajectories", stored, "--output", str(folder / "output")], capsys
    )
    assert "another model" in said
    assert not (folder / "output").exists()


def test_the_command_evaluates(folder: Path, capsys: pytest.CaptureFixture[str]) -> None:
    arguments = ["--model", str(folder / "plain"), "--prompts", str(_prompts_file(folder, 4))]
    main(["evaluate", *arguments, "--max-tokens", "8", "--block-size", "4", "--timed", "1"])
    figures = json.loads(capsys.readouterr().out)
    assert figures["tokens_per_forward"] >= 1
    assert figures["num_prompts"] == 4


def test_importing_the_package_does_not_import_training() -> None:
    code = (
        "import sys, local_backend; local_backend.Engine; "
        "assert not [name for name in sys.modules if name.startswith('local_backend.training')]; "
        "assert 'datasets' not in sys.modules and 'peft' not in sys.modules; "
        "import local_backend.training; assert 'datasets' not in sys.modules"
    )
    subprocess.run([sys.executable, "-c", code], check=True)


def test_without_the_extra_an_error_names_it() -> None:
    code = (
        "import sys; sys.modules['datasets'] = None; sys.modules['peft'] = None\n"
        "import local_backend.training as training\n"
        "from pathlib import Path\n"
        "try:\n    training.StoredTrajectories\n    training.tune\n"
        "except ImportError as error:\n    assert '[training]' in str(error), error\n"
        "else:\n    raise SystemExit('no error')\n"
    )
    subprocess.run([sys.executable, "-c", code], check=True)
