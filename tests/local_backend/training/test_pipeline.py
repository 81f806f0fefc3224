"""From prompts to a tuned model at toy size: killed and resumed, with adapters, and bad input refused."""

from __future__ import annotations

import gc
import importlib.util
import json
import math
import resource
import signal
import subprocess
import sys
import time
from collections.abc import Callable
from copy import deepcopy
from dataclasses import replace
from itertools import count, islice
from pathlib import Path
from typing import Any

import pytest
import torch
from transformers import (
    AutoModelForCausalLM,
    AutoTokenizer,
    LlamaForCausalLM,
    PreTrainedTokenizerFast,
    modeling_utils,
)

import local_backend
from benchmarks.jacobi_tasks import TASKS, draw_cases
from benchmarks.jacobi_tasks.plain import make_model
from local_backend import ChatLocal, Engine
from local_backend.kernels import prepacked
from local_backend.training import (
    CollectOptions,
    NoiseOptions,
    Report,
    Training,
    TuneOptions,
    collect_answers,
    load_for_training,
    read_prompts,
    stored_answers,
    tune,
)
from local_backend.training.__main__ import main
from local_backend.training.checkpoints import write_model
from local_backend.training.packing import Texts
from local_backend.training.trainer import answer_tokens
from local_backend.training.tuning import split_held_out
from tests.local_backend.training.conftest import SHAPE
from tests.tiny import tiny_chat_model, tiny_tokenizer

TOY = TuneOptions(
    num_steps=6,
    batch_size=3,
    rows_per_forward=2,
    learning_rate=0.02,
    most_perplexity=math.inf,
    num_held_out=3,
    num_evaluations=2,
    save_steps=2,
    bf16=False,
    noise=NoiseOptions(block_size=4, num_streams=2),
    collect=CollectOptions(max_tokens=12, max_rows=8),
)


@pytest.fixture
def folder(model: LlamaForCausalLM, tokenizer: PreTrainedTokenizerFast, tmp_path: Path) -> Path:
    """A folder with a model whose answers end soon."""
    _write_plain(model, tokenizer, tmp_path / "plain")
    return tmp_path


@pytest.fixture(scope="module")
def whole(tokenizer: PreTrainedTokenizerFast, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The same model, tuned without an interruption."""
    folder = tmp_path_factory.mktemp("whole")
    _write_plain(make_model(SHAPE, tokenizer), tokenizer, folder / "plain")
    tune(folder / "plain", _prompts_file(folder), folder / "tuned", TOY, tell=lambda _: None)
    return folder / "tuned"


def _write_plain(model: LlamaForCausalLM, tokenizer: PreTrainedTokenizerFast, folder: Path) -> None:
    torch.manual_seed(3)
    with torch.no_grad():
        for parameter in model.parameters():
            if parameter.dim() > 1:
                parameter.normal_(0, 0.4)
    assert model.generation_config is not None
    model.generation_config.eos_token_id = list(range(0, len(tokenizer), 7))
    model.save_pretrained(folder)
    tokenizer.save_pretrained(folder)


def _prompts_file(folder: Path, count: int = 24) -> Path:
    path = folder / "prompts.jsonl"
    cases = islice(draw_cases(TASKS["word_problems"], "train"), count)
    path.write_text("".join(json.dumps({"prompt": case.prompt}) + "\n" for case in cases))
    return path


def _tune(folder: Path, options: TuneOptions = TOY, name: str = "tuned", **more: Any) -> Report:
    return tune(
        folder / "plain", _prompts_file(folder), folder / name, options, **{"tell": lambda _: None, **more}
    )


def _weights(folder: Path) -> dict[str, Any]:
    return dict(AutoModelForCausalLM.from_pretrained(folder).state_dict())


def _changed(folder: Path) -> set[str]:
    plain, tuned = _weights(folder / "plain"), _weights(folder / "tuned")
    assert plain.keys() == tuned.keys()  # the same architecture
    return {name for name in plain if not torch.equal(plain[name], tuned[name])}


def _are_equal(one: Path, other: Path) -> bool:
    weights, others = _weights(one), _weights(other)
    return all(torch.equal(weights[name], others[name]) for name in weights)


def test_prompts_become_a_tuned_model(whole: Path) -> None:
    assert _changed(whole.parent)
    written = json.loads((whole / "report.json").read_text())
    assert [record["step"] for record in written["history"]] == [0, 3, 6]
    assert written["history"][0]["perplexity"] == 1
    assert written["before"]["quality"] == 1.0
    assert written["plain"]["same_answers"] == 1
    assert written["tuned"]["same_answers"] == written["after"]["quality"]
    assert written["tuned"]["perplexity"] > 1
    assert written["after"]["speedup"] > 0
    assert written["counts"]["kept"] > 0
    fastest = max(written["history"], key=lambda record: record["tokens_per_forward"])
    assert written["kept_step"] == fastest["step"]
    assert written["after"]["tokens_per_forward"] == fastest["tokens_per_forward"]


def test_without_a_faster_model_within_the_bound_the_plain_one_is_written(folder: Path) -> None:
    report = _tune(folder, replace(TOY, most_perplexity=1e-9))
    assert report.kept_step == 0
    assert not _changed(folder)
    assert "kept step 0" in report.traded()


# Interrupted -------------------------------------------------------------------------------------


class _KilledError(Exception):
    """Stands for the process being killed."""


def _dying(function: Callable[..., Any], at: int) -> Callable[..., Any]:
    """The function, killed at its call number ``at``."""
    calls = count(1)

    def dies(*args: Any, **options: Any) -> Any:
        if next(calls) == at:
            raise _KilledError
        return function(*args, **options)

    return dies


@pytest.mark.parametrize(
    "killed",
    [
        (Training, "step", 2),  # before the first checkpoint
        pytest.param((Training, "step", 5), marks=pytest.mark.slow),
        pytest.param((Training, "keep_if_best", 2), marks=pytest.mark.slow),
        (torch, "save", 3),  # while a checkpoint is written
        # While the model is written: its configuration is there, its weights are not.
        (modeling_utils, "safe_save_file", 1),
    ],
)
def test_killed_and_resumed_it_ends_with_the_same_weights(
    folder: Path, whole: Path, killed: tuple[Any, str, int], monkeypatch: pytest.MonkeyPatch
) -> None:
    owner, name, at = killed
    with monkeypatch.context() as patch:
        patch.setattr(owner, name, _dying(getattr(owner, name), at))
        with pytest.raises(_KilledError):
            _tune(folder)
    _tune(folder)
    assert _are_equal(folder / "tuned", whole)


@pytest.mark.slow  # four processes that import torch
def test_a_command_that_is_killed_ends_with_the_weights_of_one_that_is_not(folder: Path) -> None:
    arguments = ["--model", str(folder / "plain"), "--prompts", str(_prompts_file(folder))]
    sizes = {"max-tokens": 12, "block-size": 4, "steps": 80, "batch-size": 3, "held-out": 3, "save-steps": 5}
    arguments += [text for name, number in sizes.items() for text in (f"--{name}", str(number))]
    command = [sys.executable, "-m", "local_backend.training", "tune", *arguments]
    subprocess.run([*command, "--output", str(folder / "whole")], check=True, capture_output=True)
    process = subprocess.Popen(
        [*command, "--output", str(folder / "cut")], stdout=subprocess.DEVNULL, stderr=subprocess.DEVNULL
    )
    while process.poll() is None and not (folder / "cut" / "work" / "checkpoint.pt").exists():
        time.sleep(0.01)
    process.send_signal(signal.SIGKILL)
    process.wait()
    assert not (folder / "cut" / "report.json").exists()
    subprocess.run([*command, "--output", str(folder / "cut")], check=True, capture_output=True)
    assert _are_equal(folder / "whole", folder / "cut")


@pytest.mark.parametrize("rank", [None, pytest.param(2, marks=pytest.mark.slow)])
def test_after_its_time_it_pauses_and_goes_on_to_the_same_weights(
    folder: Path, whole: Path, rank: int | None
) -> None:
    options = replace(TOY, lora_rank=rank)
    if rank:
        _tune(folder, options, "whole")
        whole = folder / "whole"
    short = replace(options, max_hours=1e-9)
    with pytest.raises(TimeoutError, match="the time was up after 0 of"):
        _tune(folder, short)
    model, tokenizer = load_for_training(folder / "plain")
    prompts = read_prompts(_prompts_file(folder), tokenizer, max_positions=1024, max_tokens=12)
    answers = folder / "tuned" / "work" / "answers"
    collect_answers(model, tokenizer, split_held_out(prompts, options)[0], answers, options.collect)
    told: list[str] = []
    assert not _tune(folder, short, tell=told.append).is_complete
    assert any("the same command trains the model further" in line for line in told)
    assert _tune(folder, options).is_complete
    assert _are_equal(folder / "tuned", whole)


def test_work_with_other_options_is_refused(folder: Path) -> None:
    options = replace(TOY, num_steps=1)
    _tune(folder, options)
    with pytest.raises(ValueError, match=r"options\.num_steps 1 \(asked for 6\)"):
        _tune(folder)
    with pytest.raises(ValueError, match="examples"):
        _tune(folder, options, examples=[{"prompt": "a", "answer": "b"}])
    # What the weights do not depend on may change.
    _tune(folder, replace(options, save_steps=9, collect=replace(TOY.collect, max_rows=2)))


# Variants ----------------------------------------------------------------------------------------


def test_chat_local_and_transformers_load_what_was_tuned(tmp_path: Path) -> None:
    """From questions alone, asked of a chat model; both give the same answer."""
    model, tokenizer = deepcopy(tiny_chat_model()), tiny_tokenizer()  # other tests share that model
    assert model.generation_config is not None
    model.generation_config.eos_token_id = list(range(0, len(tokenizer), 7))  # answers end soon
    model.save_pretrained(tmp_path / "plain")
    tokenizer.save_pretrained(tmp_path / "plain")
    questions = [{"question": f"What is {number} + {number}?"} for number in range(12)]
    output = tmp_path / "tuned"
    tune(tmp_path / "plain", questions, output, TOY, tell=lambda _: None)
    turns = [{"role": "user", "content": "What is 3 + 4?"}]
    with ChatLocal.from_pretrained(output, drafter="jacobi", dtype="float32", max_tokens=9) as chat:
        answer = chat.invoke("What is 3 + 4?").content
    reader: Any = AutoTokenizer.from_pretrained(output)
    tuned: Any = AutoModelForCausalLM.from_pretrained(output, dtype=torch.float32)
    prompt = reader.apply_chat_template(turns, add_generation_prompt=True, return_tensors="pt")
    generated = tuned.generate(**prompt, max_new_tokens=9, do_sample=False)[0, prompt["input_ids"].shape[1] :]
    assert answer == reader.decode(generated, skip_special_tokens=True)


def test_adapters_of_linear_layers_are_trained_and_merged(folder: Path) -> None:
    _tune(folder, replace(TOY, lora_rank=2))
    changed = _changed(folder)
    assert changed
    assert all("proj" in name for name in changed)
    assert (folder / "tuned" / "work" / "adapter" / "adapter_config.json").exists()


@pytest.mark.parametrize(("asked", "steps"), [(3, [0, 2, 4, 6]), (9, [0, 1, 2, 3, 4, 5, 6])])
def test_speed_is_measured_as_often_as_asked_for_and_weights_keep_their_type(
    folder: Path, asked: int, steps: list[int]
) -> None:
    AutoModelForCausalLM.from_pretrained(folder / "plain").bfloat16().save_pretrained(folder / "plain")
    report = _tune(folder, replace(TOY, num_evaluations=asked))
    assert [record["step"] for record in report.history] == steps
    assert {weight.dtype for weight in _weights(folder / "tuned").values()} == {torch.bfloat16}


def test_prompts_to_measure_on_may_be_given(folder: Path) -> None:
    cases = islice(draw_cases(TASKS["word_problems"], "test"), 9)
    held_out = [{"prompt": case.prompt} for case in cases]
    report = _tune(folder, replace(TOY, num_steps=1), held_out=held_out)
    assert report.before.num_prompts == TOY.num_held_out
    assert sum(report.counts.values()) == 24  # none of the prompts was held out


@pytest.mark.slow  # compiles
@pytest.mark.filterwarnings("ignore")  # of torch's compiler, about torch
@pytest.mark.parametrize("compile_layers", [False, True])
def test_kernels_are_chosen_for_a_step_alone(model: LlamaForCausalLM, compile_layers: bool) -> None:
    texts = Texts.of([([5, 6, 7], [8, 9, 10, 11])] * 4)
    losses, plans = [], []
    before = torch.backends.cuda.cudnn_sdp_enabled()
    for wanted in (None, compile_layers):
        one = deepcopy(model).requires_grad_(True)
        one.model.register_forward_pre_hook(lambda *_: plans.append(torch.backends.cuda.cudnn_sdp_enabled()))
        training = Training(one, one, texts, answer_tokens(texts), replace(TOY, compile_layers=wanted))
        losses.append([training.step()["loss"] for _ in range(3)])
        assert all(layer._compiled_call_impl is None for layer in one.model.layers)
    assert losses[0] == pytest.approx(losses[1], rel=1e-3)
    assert not any(plans)
    assert torch.backends.cuda.cudnn_sdp_enabled() == before


def test_right_answers_are_learned_from_and_wrong_ones_left_out(folder: Path) -> None:
    cases = islice(draw_cases(TASKS["word_problems"], "train", seed=2), 6)
    examples = [{"prompt": case.prompt, "answer": case.answer} for case in cases]
    counts = _tune(
        folder,
        TOY,
        examples=examples,
        accept=lambda prompts, _: [number % 2 == 0 for number in range(len(prompts))],
    ).counts
    assert counts["rejected"] > 0
    assert counts["kept"] > 0
    with pytest.raises(ValueError, match="record 1: there is no answer"):
        _tune(folder, name="other", examples=[{"prompt": "a"}])
    assert not (folder / "other").exists()


@pytest.mark.skipif(not torch.backends.mkldnn.is_available(), reason="this torch was built without oneDNN")
def test_a_model_with_prepacked_weights_is_measured_while_it_is_trained(
    folder: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """As larger ones than this are, by which what was laid out before a step would be wrong behind it."""
    monkeypatch.setattr(prepacked, "_LEAST_WEIGHTS", 1)
    report = _tune(folder, replace(TOY, learning_rate=0.1))
    assert [record["step"] for record in report.history] == [0, 3, 6]
    kept = next(record for record in report.history if record["step"] == report.kept_step)
    assert kept["tokens_per_forward"] == report.after.tokens_per_forward


def test_a_model_is_written_over_an_earlier_one(
    model: LlamaForCausalLM, tokenizer: PreTrainedTokenizerFast, tmp_path: Path
) -> None:
    """With several chat templates, which a tokenizer keeps in a separate folder."""
    talking = PreTrainedTokenizerFast(
        tokenizer_object=tokenizer.backend_tokenizer, chat_template={"default": "a", "tool_use": "b"}
    )
    for _ in range(2):
        write_model(model, talking, tmp_path)
        assert (tmp_path / "config.json").exists()
        assert not (tmp_path / "unfinished").exists()
        assert PreTrainedTokenizerFast.from_pretrained(tmp_path).chat_template["tool_use"] == "b"


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

    assert "holds no record" in refusal("")
    assert "holds no record" in refusal("\n\n")
    assert "line 2" in refusal(good.read_text().splitlines()[0] + "\nnot json\n")
    assert "(it has: text)" in refusal('{"text": "a"}\n')
    assert "the record has text" in refusal('{"text": "a"}\n', "plain", "--template", "{passage} {question}")
    assert "max_hours must be above 0" in refusal('{"prompt": "a"}\n', "plain", "--max-hours", "0")
    assert "the prompt is empty" in refusal('{"prompt": ""}\n')
    assert "no chat template" in refusal('{"messages": [{"role": "user", "content": "a"}]}\n')
    long = json.dumps({"prompt": "How many? " * 400})
    assert "positions for 1024 with an answer of" in refusal(f'{{"prompt": "a"}}\n{long}\n')
    assert "too few" in refusal('{"prompt": "a"}\n')
    assert "line 1" in refusal('{"prompt_ids": "abc"}\n')
    assert "line 1" in refusal('{"prompt_ids": [[1, 2]]}\n')
    assert "ids from -3 to 4" in refusal('{"prompt_ids": [4, -3]}\n')
    assert "ids from 4 to 1000000" in refusal('{"prompt_ids": [4, 1000000]}\n')
    assert "limit must be at least 1" in refusal('{"prompt": "a"}\n', "plain", "--limit", "0")
    plain = folder / "plain"
    given = ["tune", "--model", str(plain), "--prompts", str(good), "--output", str(plain)]
    assert "give another output folder" in _refusal(given, capsys)
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


def test_answers_of_another_model_is_refused(folder: Path, capsys: pytest.CaptureFixture[str]) -> None:
    prompts, stored = str(_prompts_file(folder)), str(folder / "trajectories")
    arguments = ["--model", str(folder / "plain"), "--max-tokens", "12"]
    main(["collect", *arguments, "--prompts", prompts, "--output", stored])
    assert json.loads(capsys.readouterr().out)["kept"] > 0
    other = AutoModelForCausalLM.from_pretrained(folder / "plain")
    with torch.no_grad():
        other.lm_head.weight.mul_(1.1)
    other.save_pretrained(folder / "plain")
    with pytest.raises(ValueError, match="another model"):
        stored_answers(Path(stored), other, AutoTokenizer.from_pretrained(folder / "plain"))


def test_messages_that_the_template_does_not_take_are_refused_by_line(
    tokenizer: PreTrainedTokenizerFast,
) -> None:
    talking = PreTrainedTokenizerFast(
        tokenizer_object=tokenizer.backend_tokenizer,
        eos_token=tokenizer.eos_token,
        chat_template="{% for m in messages %}{% if m.role != 'user' %}"
        "{{ raise_exception('users alone') }}{% endif %}{{ m.content }}{% endfor %}",
    )

    def read(*records: dict[str, Any]) -> list[list[int]]:
        return read_prompts(records, talking, max_positions=64, max_tokens=8)

    user, reply = ({"role": role, "content": "How many?"} for role in ("user", "assistant"))
    # Columns a record lacks are None in a dataset.
    told = read(
        {"messages": [user], "prompt": None, "prompt_ids": None},
        {"messages": None, "prompt": "How many?", "prompt_ids": None},
        {"messages": None, "prompt": None, "prompt_ids": talking.encode("How many?")},
    )
    assert told[0] == told[1] == told[2]
    (question,) = read({"question": "How many?"})
    assert question == talking.encode("How many?", add_special_tokens=False)
    template = "{documents} {question}"
    records = [{"question": "How many?", "documents": ["One.", "Two."]}]
    (filled,) = read_prompts(records, talking, max_positions=64, max_tokens=8, template=template)
    assert talking.decode(filled) == "One.\n\nTwo. How many?"
    with pytest.raises(ValueError, match=r"record 1: the template .* does not fit"):
        read_prompts(records, talking, max_positions=64, max_tokens=8, template="{passages[0]}")
    with pytest.raises(ValueError, match=r"record 2: .*users alone"):
        read({"messages": [user]}, {"messages": [user, reply]})
    for wrong in (5, [5], [{"content": "a"}], [{"role": "x", "content": "a"}]):
        with pytest.raises(ValueError, match=r"record 1: the messages cannot be rendered"):
            read({"messages": wrong})


def test_no_other_part_imports_training() -> None:
    package = Path(local_backend.__file__).parent
    others = [path for path in package.rglob("*.py") if path.parent.name != "training"]
    assert not [path for path in others if "local_backend.training" in path.read_text("utf-8")]


def test_without_the_extra_an_error_names_it(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delitem(sys.modules, "local_backend.training")
    find_spec = importlib.util.find_spec
    monkeypatch.setattr(
        importlib.util, "find_spec", lambda name, *more: None if name == "peft" else find_spec(name, *more)
    )
    with pytest.raises(ImportError, match=r"training needs peft: pip install '\.\[training\]'"):
        importlib.import_module("local_backend.training")


@pytest.mark.skipif(
    sys.platform != "linux", reason="elsewhere the C library is not GNU's, whose allocator is told"
)
def test_memory_stays_with_the_process_until_a_training_ends(model: LlamaForCausalLM) -> None:
    def num_new_pages() -> int:
        before = resource.getrusage(resource.RUSAGE_SELF).ru_minflt
        for _ in range(3):
            torch.ones(2**26, dtype=torch.uint8)  # the system clears 2 ** 14 pages of it if it is new
        return resource.getrusage(resource.RUSAGE_SELF).ru_minflt - before

    texts = Texts.of([([5, 6, 7], [8, 9, 10, 11])] * 4)
    trainings = [Training(one, one, texts, answer_tokens(texts), TOY) for one in (deepcopy(model),) * 2]
    for training in trainings:
        training.step()
    num_new_pages()
    assert num_new_pages() < 2**13
    del training, trainings
    gc.collect()
    assert num_new_pages() > 2**13


@pytest.mark.skipif(not torch.backends.mkldnn.is_available(), reason="this torch was built without oneDNN")
def test_layers_are_compiled_without_the_engines_products(
    model: LlamaForCausalLM, tokenizer: PreTrainedTokenizerFast, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Each is another object, so every layer would be compiled for itself."""
    monkeypatch.setattr(prepacked, "_LEAST_WEIGHTS", 1)
    one = deepcopy(model)
    Engine(one, tokenizer, prepacked=True).close()
    texts = Texts.of([([5, 6, 7], [8, 9, 10, 11])] * 4)
    training = Training(one, one, texts, answer_tokens(texts), TOY)
    packed = [module for module in one.modules() if "forward" in vars(module)]
    assert packed
    with training._kernels():
        assert not any("forward" in vars(module) for module in packed)
    assert all("forward" in vars(module) for module in packed)
