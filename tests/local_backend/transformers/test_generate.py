"""Our loop inside stock ``transformers`` writes what the stock loop writes."""

from __future__ import annotations

import copy
import os
import shutil
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import torch
from transformers import (
    AutoModelForCausalLM,
    GenerationConfig,
    LlamaForCausalLM,
    PreTrainedModel,
    PreTrainedTokenizerBase,
    StoppingCriteriaList,
    TextStreamer,
)

from local_backend import ChatLocal
from local_backend.models.default_model import default_model_folder
from local_backend.models.forward_cost import ForwardCost
from local_backend.sequences.sampling import SamplingParams, probabilities
from local_backend.transformers.generate import ParallelDecoding, generate
from tests.local_backend.conftest import ragged_prompts
from tests.tiny import tiny_chat_model, tiny_tokenizer

# As `docs/guides/engines.md` gives it.
_CUSTOM_GENERATE = """
from local_backend.transformers.generate import generate as parallel_generate


def generate(model, *arguments, **options):
    return parallel_generate(model, *arguments, **{"drafter": DRAFTER, **options})
"""
QUESTIONS = [
    "How can I bake bread at home?",
    "Bread?",
    "What should I do to sleep better at night, every night?",
]


@pytest.fixture(scope="module")
def tiny() -> tuple[PreTrainedModel, PreTrainedTokenizerBase]:
    return tiny_chat_model(), tiny_tokenizer()


@pytest.fixture(autouse=True)
def _shared_models_keep_no_engine(
    request: pytest.FixtureRequest, tiny: tuple[PreTrainedModel, PreTrainedTokenizerBase]
) -> Iterator[None]:
    yield
    models = [tiny[0]]
    if "default_chat" in request.fixturenames:
        models.append(request.getfixturevalue("default_chat").engine.model)
    for model in models:
        if (kept := vars(model).pop("_parallel_decoding", None)) is not None:
            kept.close()


@pytest.fixture(scope="module")
def decoding(tiny: tuple[PreTrainedModel, PreTrainedTokenizerBase]) -> Iterator[ParallelDecoding]:
    decoding = ParallelDecoding("reference_copy", tokenizer=tiny[1])
    yield decoding
    decoding.close()


def _batch(tokenizer: PreTrainedTokenizerBase, questions: list[str] = QUESTIONS) -> dict[str, torch.Tensor]:
    texts = [
        tokenizer.apply_chat_template(
            [{"role": "user", "content": question}], tokenize=False, add_generation_prompt=True
        )
        for question in questions
    ]
    batch = tokenizer(texts, return_tensors="pt", padding=True, padding_side="left", add_special_tokens=False)
    return {"input_ids": batch["input_ids"], "attention_mask": batch["attention_mask"]}


@pytest.mark.parametrize("drafter", ["autoregressive", "reference_copy", "jacobi", "lookahead", "combined"])
def test_a_padded_batch_is_continued_as_by_generate(
    drafter: str, tiny: tuple[PreTrainedModel, PreTrainedTokenizerBase]
) -> None:
    model, tokenizer = tiny
    call: dict[str, Any] = {**_batch(tokenizer), "do_sample": False, "max_new_tokens": 60}
    plain = model.generate(**call)
    decoding = ParallelDecoding(drafter, tokenizer=tokenizer)
    references = [["How can I bake"], None, ["Go to bed early."]]
    ours = model.generate(**call, custom_generate=decoding, references=references)
    assert ours.tolist() == plain.tolist()
    decoding.close()


def test_what_a_real_model_copies_takes_few_forwards(
    default_chat: ChatLocal, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("local_backend.engine.engine.forward_cost", lambda *_: ForwardCost.flat(64))
    model, tokenizer = default_chat.engine.model, default_chat.engine.tokenizer
    call: dict[str, Any] = {**_batch(tokenizer, QUESTIONS[:1]), "do_sample": False, "max_new_tokens": 24}
    plain = model.generate(**call)
    answer = tokenizer.decode(plain[0, call["input_ids"].shape[1] :], skip_special_tokens=True)
    decoding = ParallelDecoding("reference_copy", tokenizer=tokenizer)
    ours = model.generate(**call, custom_generate=decoding, references=[[answer]])
    assert ours.tolist() == plain.tolist()
    assert decoding._engine is not None
    assert decoding._engine.stats.num_forwards < 14
    decoding.close()


@pytest.mark.parametrize(
    "options",
    [
        {"repetition_penalty": 1.3},
        {"no_repeat_ngram_size": 2, "min_new_tokens": 22},
        {"min_length": 40, "exponential_decay_length_penalty": (4, 1.3)},
        {"bad_words_ids": [[token] for token in range(100, 300)], "begin_suppress_tokens": [20, 21]},
        {"forced_eos_token_id": 9, "eos_token_id": [1, *range(300, 330)]},
        {"max_new_tokens": 1},
    ],
)
def test_what_the_call_asks_for_holds(
    options: dict[str, Any],
    tiny: tuple[PreTrainedModel, PreTrainedTokenizerBase],
    decoding: ParallelDecoding,
) -> None:
    model, tokenizer = tiny
    call = {**_batch(tokenizer), "do_sample": False, "max_new_tokens": 25, **options}
    plain = model.generate(**call)
    assert model.generate(**call, custom_generate=decoding).tolist() == plain.tolist()
    dictionary = model.generate(**call, custom_generate=decoding, return_dict_in_generate=True)
    assert dictionary.sequences.tolist() == plain.tolist()


def test_sampling_has_the_distribution_of_the_call(model: LlamaForCausalLM) -> None:
    """Chi-square of 1,000 first tokens; right code would fail one seed in 10,000 (p = 1e-4)."""
    prompt = torch.tensor([ragged_prompts(1, seed=4)[0]])
    call = {"do_sample": True, "top_k": 6, "temperature": 1.3, "max_new_tokens": 1}
    decoding = ParallelDecoding("autoregressive")
    torch.manual_seed(0)
    ours = model.generate(prompt, **call, num_return_sequences=1000, custom_generate=decoding)
    torch.manual_seed(0)
    again = model.generate(prompt, **call, num_return_sequences=1000, custom_generate=decoding)
    decoding.close()
    assert torch.equal(ours, again)
    counts = torch.bincount(ours[:, -1], minlength=model.config.vocab_size)
    with torch.no_grad():
        logits = model(prompt).logits[0, -1]
    expected = 1000 * probabilities(logits, SamplingParams(temperature=1.3, top_k=6))
    possible = expected > 0
    assert counts[~possible].sum() == 0
    assert possible.sum() == 6
    assert ((counts - expected)[possible] ** 2 / expected[possible]).sum() < 25.74  # 5 degrees of freedom


def test_stopping_criteria_end_rows_where_generate_would(
    tiny: tuple[PreTrainedModel, PreTrainedTokenizerBase], decoding: ParallelDecoding
) -> None:
    model, tokenizer = tiny

    def after_a_rare_token(input_ids: torch.Tensor, scores: object) -> torch.Tensor:
        return torch.tensor([int(ids[-1]) % 16 == 3 for ids in input_ids])

    call: dict[str, Any] = {**_batch(tokenizer), "do_sample": False, "max_new_tokens": 150}
    call["stopping_criteria"] = StoppingCriteriaList([after_a_rare_token])
    plain = model.generate(**call)
    assert plain.shape[1] < call["input_ids"].shape[1] + 150
    assert model.generate(**call, custom_generate=decoding).tolist() == plain.tolist()


class _Recorder(TextStreamer):
    """Keeps what it is told."""

    def __init__(self, tokenizer: PreTrainedTokenizerBase) -> None:
        super().__init__(tokenizer, skip_prompt=True)
        self.text, self.num_ends = "", 0

    def on_finalized_text(self, text: str, stream_end: bool = False) -> None:
        self.text += text
        self.num_ends += stream_end


def test_streamers_and_stop_strings_work_as_in_generate(
    default_chat: ChatLocal,
) -> None:
    model, tokenizer = default_chat.engine.model, default_chat.engine.tokenizer
    call: dict[str, Any] = {**_batch(tokenizer, QUESTIONS[:1]), "do_sample": False, "max_new_tokens": 18}
    text = tokenizer.decode(model.generate(**call)[0, call["input_ids"].shape[1] :])
    stop = text[30:36]
    plain_streamer, ours_streamer = _Recorder(tokenizer), _Recorder(tokenizer)
    plain = model.generate(**call, stop_strings=stop, tokenizer=tokenizer, streamer=plain_streamer)
    ours = generate(model, **call, stop_strings=stop, tokenizer=tokenizer, streamer=ours_streamer)
    assert ours.tolist() == plain.tolist()
    assert plain.shape[1] < call["input_ids"].shape[1] + 18
    assert ours_streamer.text == plain_streamer.text
    assert ours_streamer.num_ends == plain_streamer.num_ends == 1
    config = GenerationConfig(
        max_new_tokens=18, stop_strings=[stop], eos_token_id=tokenizer.eos_token_id, pad_token_id=0
    )
    by_config = generate(
        model, **_batch(tokenizer, QUESTIONS[:1]), generation_config=config, tokenizer=tokenizer
    )
    assert by_config.tolist() == plain.tolist()
    assert config.stop_strings == [stop]
    with pytest.raises(ValueError, match="stop strings need the tokenizer"):
        generate(model, **call, stop_strings=stop)


def test_a_copy_of_a_model_makes_an_engine_of_its_own(
    tiny: tuple[PreTrainedModel, PreTrainedTokenizerBase],
) -> None:
    model, tokenizer = tiny
    call: dict[str, Any] = {**_batch(tokenizer), "do_sample": False, "max_new_tokens": 9}
    written = generate(model, **call, tokenizer=tokenizer)
    copied = copy.deepcopy(model)
    assert generate(copied, **call, tokenizer=tokenizer).tolist() == written.tolist()
    own, other = (vars(one)["_parallel_decoding"] for one in (model, copied))
    assert own is not other
    other.close()


@pytest.mark.parametrize(
    ("options", "words"),
    [
        ({"num_beams": 2}, "asks for beam search"),
        ({"prompt_lookup_num_tokens": 4}, "asks for assisted generation"),
        ({"guidance_scale": 2.0}, "runs the model a second time"),
        ({"output_scores": True, "return_dict_in_generate": True}, "output_scores: only the tokens"),
        ({"references": [["a"], ["b"]]}, "2 references for 3 rows"),
        ({"encoder_repetition_penalty": 1.4}, "encoder_repetition_penalty takes one prompt at a time"),
        ({"prefix_allowed_tokens_fn": lambda *_: [1]}, "prefix_allowed_tokens_fn takes one prompt at a time"),
    ],
)
def test_what_cannot_be_done_is_refused(
    options: dict[str, Any],
    words: str,
    tiny: tuple[PreTrainedModel, PreTrainedTokenizerBase],
    decoding: ParallelDecoding,
) -> None:
    model, tokenizer = tiny
    with pytest.raises(ValueError, match=words):
        model.generate(**_batch(tokenizer), max_new_tokens=5, custom_generate=decoding, **options)


def test_padding_on_the_right_and_a_missing_tokenizer_are_named(
    tiny: tuple[PreTrainedModel, PreTrainedTokenizerBase],
) -> None:
    model, tokenizer = tiny
    batch = _batch(tokenizer)
    flipped = {name: value.flip(1) for name, value in batch.items()}
    decoding = ParallelDecoding("reference_copy")
    with pytest.raises(ValueError, match="padding on the left only"):
        model.generate(**flipped, max_new_tokens=5, custom_generate=decoding)
    with pytest.raises(ValueError, match="need the tokenizer"):
        model.generate(**batch, max_new_tokens=5, custom_generate=decoding, references=[["a text"]])
    with pytest.raises(ValueError, match="one prompt at a time, got 3"):
        generate(model, **batch, max_new_tokens=5, streamer=_Recorder(tokenizer))
    decoding.close()


# The folder ----------------------------------------------------------------------------------------


@pytest.fixture
def model_dir(
    tmp_path: Path, _own_modules: None, tiny: tuple[PreTrainedModel, PreTrainedTokenizerBase]
) -> Path:
    model, tokenizer = tiny
    model.save_pretrained(tmp_path / "a-model")
    tokenizer.save_pretrained(tmp_path / "a-model")
    return tmp_path / "a-model"


def _write_custom_generate(model_dir: Path, drafter: str) -> Path:
    path = model_dir / "custom_generate" / "generate.py"
    path.parent.mkdir()
    path.write_text(_CUSTOM_GENERATE.replace("DRAFTER", repr(drafter)), "utf-8")
    return path


def test_a_model_directory_decodes_with_our_loop(
    model_dir: Path, tiny: tuple[PreTrainedModel, PreTrainedTokenizerBase]
) -> None:
    model, tokenizer = tiny
    call: dict[str, Any] = {**_batch(tokenizer), "do_sample": False, "max_new_tokens": 30}
    plain = model.generate(**call)
    _write_custom_generate(model_dir, "jacobi")
    by_name = model.generate(**call, custom_generate=str(model_dir), trust_remote_code=True)
    assert by_name.tolist() == plain.tolist()
    assert vars(model)["_parallel_decoding"].drafter == "jacobi"

    loaded = AutoModelForCausalLM.from_pretrained(model_dir, dtype=torch.float32, trust_remote_code=True)
    assert loaded.generate(**call).tolist() == plain.tolist()
    assert vars(loaded)["_parallel_decoding"]._engine.stats.num_tokens > 0
    untrusted = AutoModelForCausalLM.from_pretrained(model_dir, dtype=torch.float32)
    assert untrusted.generate(**call).tolist() == plain.tolist()
    assert "_parallel_decoding" not in vars(untrusted)


@pytest.mark.slow
def test_transformers_serve_decodes_with_our_loop(default_chat: ChatLocal, tmp_path: Path) -> None:
    """The folder's function leaves a mark at every call, so that the answers show who decoded them."""
    from openai import OpenAI

    from tests.servers import transformers_serve

    model, tokenizer = default_chat.engine.model, default_chat.engine.tokenizer
    model_dir = tmp_path / "a-model"  # the weights are large: they are linked
    shutil.copytree(default_model_folder(torch.float32), model_dir, copy_function=os.symlink)
    batch = _batch(tokenizer, QUESTIONS[:1])
    plain = model.generate(**batch, do_sample=False, max_new_tokens=24)
    text = tokenizer.decode(plain[0, batch["input_ids"].shape[1] :], skip_special_tokens=True)
    path = _write_custom_generate(model_dir, "lookahead")
    mark = tmp_path / "calls"
    path.write_text(
        path.read_text("utf-8").replace(
            "return parallel", f"open({str(mark)!r}, 'a').write('x')\n    return parallel"
        )
    )
    options = ("--trust-remote-code", "--dtype", "float32")
    with (
        transformers_serve(model_dir, tmp_path, *options) as url,
        OpenAI(base_url=url, api_key="none") as client,
    ):
        asked: dict[str, Any] = {"model": str(model_dir), "max_tokens": 24, "temperature": 0.0}
        asked["messages"] = [{"role": "user", "content": QUESTIONS[0]}]
        answer = client.chat.completions.create(**asked)
        streamed = "".join(
            chunk.choices[0].delta.content or ""
            for chunk in client.chat.completions.create(**asked, stream=True)
            if chunk.choices
        )
        stop = text[60:66]
        stopped = client.chat.completions.create(**asked, stop=[stop])
    assert answer.choices[0].message.content == text
    assert streamed == text
    # The server leaves a stop string in its answer; ours ends after the same token as its own would.
    assert stopped.choices[0].message.content == text[: len(stopped.choices[0].message.content or "")]
    assert stop in (stopped.choices[0].message.content or "")
    assert mark.read_text() == "xxx"
