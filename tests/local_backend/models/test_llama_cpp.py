"""llama.cpp as the runtime: the same tokens with and without drafts, and what ``transformers`` would write.

The rows are tested everywhere, on a context that knows every token its sequences hold. The rest needs
``llama-cpp-python``, which compiles for minutes: ``make test-llama-cpp`` installs it and runs it all.
"""

from __future__ import annotations

import importlib.util
from collections.abc import Callable, Iterator, Sequence
from pathlib import Path
from typing import Any, cast

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import Tensor
from transformers import AutoModelForCausalLM

from local_backend import ChatLocal, Engine, SamplingParams, Scheduling
from local_backend.drafting.draft import EMPTY_DRAFT, Draft
from local_backend.models.llama_cpp.context import MAX_EXACT_TOKENS, LlamaContext
from local_backend.models.llama_cpp.rows import LlamaRows
from local_backend.models.loading import load_into
from tests.local_backend.models.test_gguf import write_gguf

needs_llama_cpp = pytest.mark.skipif(
    importlib.util.find_spec("llama_cpp") is None,
    reason="llama-cpp-python is not installed here; `make test-llama-cpp` compiles it",
)
DOCUMENT = (
    "The kiln is fired on the first Saturday of every month. Pots that are dry by then are glazed the week "
    "before, by whoever made them. The glaze is mixed from ash and clay, and takes two days to settle. "
)


# Rows ------------------------------------------------------------------------------------------------


class RememberingContext:
    """A context whose logits tell the token and all tokens before it in its sequence."""

    num_token_ids = 11

    def __init__(self) -> None:
        self.sequences: dict[int, list[int]] = {}
        self.num_tokens: list[int] = []  # of each forward

    def decode(
        self,
        token_ids: Sequence[int],
        positions: Sequence[int],
        sequences: Sequence[int],
        is_wanted: Sequence[bool],
    ) -> Tensor:
        found = []
        self.num_tokens.append(len(token_ids))
        for token, position, sequence, wanted in zip(token_ids, positions, sequences, is_wanted, strict=True):
            held = self.sequences.setdefault(sequence, [])
            assert position == len(held), "llama.cpp takes consecutive positions only"
            held.append(token)
            if wanted:
                found.append(logits_after(held))
        return torch.stack(found) if found else torch.empty(0)

    def copy(self, source: int, target: int, start: int = 0, end: int = -1) -> None:
        assert not self.sequences.get(target)
        held = self.sequences.get(source, [])
        self.sequences[target] = held[start : len(held) if end < 0 else end]

    def remove(self, sequence: int, start: int = 0) -> None:
        self.sequences[sequence] = self.sequences.get(sequence, [])[:start]

    def clear(self) -> None:
        self.sequences.clear()


def logits_after(token_ids: Sequence[int]) -> Tensor:
    generator = torch.Generator().manual_seed(hash(tuple(token_ids)) % 2**31)
    return torch.rand(RememberingContext.num_token_ids, generator=generator)


TOKENS = st.lists(st.integers(0, 10), min_size=1, max_size=6)


@settings(deadline=None, max_examples=60)
@given(st.data())
def test_every_row_sees_its_own_tokens_and_no_others(data: st.DataObject) -> None:
    """Whatever is drafted, refused, copied, exchanged, kept and loaded before."""
    context = RememberingContext()
    rows = LlamaRows(
        cast("LlamaContext", context), max_rows=3, max_tokens=900, bytes_per_token=2, max_prefix_bytes=40
    )
    held: list[list[int]] = []
    for _ in range(data.draw(st.integers(1, 12))):
        step = data.draw(st.sampled_from(["add", "forward", "forward", "swap", "keep", "load", "remove"]))
        if step == "add" and len(held) < 3:
            assert rows.add_row() == len(held)
            held.append([])
            if len(held) > 1:
                shared = data.draw(st.integers(0, len(held[0])))
                rows.copy_row(0, len(held) - 1, shared)
                held[-1] = held[0][:shared]
        elif step == "forward" and held:
            first = data.draw(st.integers(0, len(held) - 1))
            unread = [data.draw(TOKENS) for _ in held[first:]]
            drafts = [Draft.chain(data.draw(TOKENS) if data.draw(st.booleans()) else []) for _ in unread]
            logits = rows.forward(first, unread, drafts)
            assert logits is not None
            for number, (tokens, draft) in enumerate(zip(unread, drafts, strict=True)):
                before = held[first + number] + tokens
                for place in range(1 + len(draft)):
                    seen = before + list(draft.token_ids[:place])
                    assert torch.equal(logits[number, place], logits_after(seen))
                num_kept = data.draw(st.integers(0, len(draft)))
                rows.commit(first + number, range(len(tokens) + num_kept))
                held[first + number] = before + list(draft.token_ids[:num_kept])
        elif step == "swap" and held:
            one, other = (data.draw(st.integers(0, len(held) - 1)) for _ in range(2))
            rows.swap_rows(one, other)
            held[one], held[other] = held[other], held[one]
        elif step == "keep" and held:
            rows.keep_prefix(0, held[0])
        elif step == "load" and held:
            prefix, shared = rows.find_prefix(data.draw(TOKENS))
            if prefix is not None:
                rows.load_prefix(0, prefix, shared)
                held[0] = list(prefix.token_ids[:shared])
        elif step == "remove" and held:
            place = data.draw(st.integers(0, len(held) - 1))
            rows.move_row(len(held) - 1, place)
            held[place] = held[-1]
            rows.remove_last_row()
            held.pop()
        assert list(rows.lengths) == list(map(len, held))
    rows.clear()
    assert not any(context.sequences.values())


@settings(deadline=None, max_examples=40)
@given(st.integers(1, 80), st.integers(1, 80))
def test_no_draft_changes_how_a_row_alone_is_computed(num_unread: int, num_drafted: int) -> None:
    """From 32 tokens on a library multiplies, which rounds otherwise: prompts are read as without drafts."""
    context = RememberingContext()
    rows = LlamaRows(
        cast("LlamaContext", context), max_rows=1, max_tokens=900, bytes_per_token=1, max_prefix_bytes=0
    )
    rows.add_row()
    unread, drafted = [1] * num_unread, [number % 11 for number in range(num_drafted)]
    logits = rows.forward(0, [unread], [Draft.chain(drafted)])
    assert logits is not None
    for place in range(1 + num_drafted):
        assert torch.equal(logits[0, place], logits_after(unread + drafted[:place]))
    if num_unread + num_drafted <= MAX_EXACT_TOKENS:
        assert context.num_tokens == [num_unread + num_drafted]
    else:
        assert context.num_tokens[0] == num_unread
        assert max(context.num_tokens[1:]) <= MAX_EXACT_TOKENS


def test_no_sequence_is_lost() -> None:
    """Sequences of rows and of dropped prefixes are used again: there are 256 of them."""
    rows = LlamaRows(
        cast("LlamaContext", RememberingContext()),
        max_rows=2,
        max_tokens=900,
        bytes_per_token=1,
        max_prefix_bytes=30,
    )
    for number in range(600):
        place = rows.add_row()
        rows.forward(place, [[number % 11, number // 11 % 11, number // 121]], [EMPTY_DRAFT])
        rows.commit(place, range(3))
        rows.keep_prefix(place, [number % 11, number // 11 % 11, number // 121])
        rows.remove_last_row()


# Asked for wrongly -----------------------------------------------------------------------------------


def test_what_llama_cpp_cannot_do_is_refused_with_the_reason(tmp_path: Path) -> None:
    with pytest.raises(ValueError, match=r"'transformers' or 'llama\.cpp', got 'ollama'"):
        load_into(cast("Any", "ollama"), None)
    with pytest.raises(ValueError, match="leave out quantization and dtype"):
        load_into("llama.cpp", None, "float32", quantization="int4")
    with pytest.raises(ValueError, match="takes a GGUF file, got"):
        load_into("llama.cpp", tmp_path)


@pytest.mark.skipif(importlib.util.find_spec("llama_cpp") is not None, reason="llama-cpp-python is installed")
def test_the_missing_package_is_named() -> None:
    with pytest.raises(ImportError, match="pip install llama-cpp-python"):
        ChatLocal.default(runtime="llama.cpp")


# With llama.cpp --------------------------------------------------------------------------------------


class GuessesOfAnswers:
    """Drafts the known answer, with a wrong token now and then, as chains or beside a wrong branch."""

    def __init__(self, answers: dict[tuple[int, ...], list[int]]) -> None:
        self._answers = answers
        self.num_proposed = 0

    def propose(self, rows: Sequence[Any]) -> list[Draft]:
        drafts = []
        for row in rows:
            prompt = tuple(row.prompt_token_ids)
            written = len(row.token_ids) - len(prompt)
            right = self._answers[prompt][written : written + 1 + written % 7]
            if written % 5 == 2 and right:
                right[-1] += 1
            branch = Draft.chain([right[0] + 1, right[0] + 2]) if right and written % 3 else EMPTY_DRAFT
            drafts.append(Draft.merged([Draft.chain(right), branch]))
            self.num_proposed += len(right)
        return drafts

    def observe(self, rows: Sequence[Any], outcomes: Sequence[Any]) -> None:
        pass


@pytest.fixture(params=["llama", "qwen2"])
def tiny_file(request: pytest.FixtureRequest, tmp_path: Path) -> Path:
    write_gguf(tmp_path / "tiny.gguf", request.param)
    return tmp_path / "tiny.gguf"


@needs_llama_cpp
def test_a_file_is_decoded_as_transformers_does(tiny_file: Path) -> None:
    """Up to rounding: weights are float32 in this file, keys and values are not."""
    theirs = AutoModelForCausalLM.from_pretrained(
        tiny_file.parent, gguf_file=tiny_file.name, dtype=torch.float32
    )
    with ChatLocal.from_pretrained(tiny_file, runtime="llama.cpp", max_tokens=20) as chat:
        prompt = chat.engine.tokenizer.encode("How can I bake bread?")
        (ours,) = chat.engine.generate([prompt], SamplingParams(max_tokens=8, ignore_end=True, logprobs=1))
        assert ours.logprobs is not None
        with torch.inference_mode():
            scores = theirs(torch.tensor([[*prompt, *ours.token_ids]])).logits[0, len(prompt) - 1 : -1]
        expected = scores.log_softmax(-1).gather(-1, torch.tensor(ours.token_ids)[:, None])[:, 0]
        found = torch.tensor([token.logprob for token in ours.logprobs])
        assert (found - expected).abs().max() < 0.1
        message = chat.invoke("How can I bake bread?")
        assert message.usage_metadata
        streamed = "".join(chunk.text for chunk in chat.stream("How can I bake bread?"))
        assert streamed == message.text


@needs_llama_cpp
@pytest.mark.parametrize("max_prefix_bytes", [0, 2**20])
def test_drafts_change_nothing(tiny_file: Path, max_prefix_bytes: int) -> None:
    model, tokenizer = load_into("llama.cpp", tiny_file)
    prompts = [tokenizer.encode(text) for text in ("How can I bake bread?", "Sleep", "1. Plan the day")]
    params = SamplingParams(max_tokens=60, ignore_end=True)

    def answers(drafter: Any) -> list[list[int]]:
        with Engine(model, tokenizer, drafter, max_prefix_bytes=max_prefix_bytes) as engine:
            return [list(engine.generate([prompt], params)[0].token_ids) for prompt in prompts * 2]

    plain = answers("autoregressive")
    asked = [tuple(prompt) for prompt in prompts * 2]
    guesses = GuessesOfAnswers(dict(zip(asked, plain, strict=True)))
    assert answers(guesses) == plain
    assert guesses.num_proposed
    for drafter in ("jacobi", "lookahead", "reference_copy", "combined"):
        assert answers(drafter) == plain


@needs_llama_cpp
def test_many_rows_in_little_memory(tiny_file: Path) -> None:
    """More rows than fit are answered in turns; rows share what they have in common."""
    model, tokenizer = load_into("llama.cpp", tiny_file)
    prompts = [tokenizer.encode(f"{DOCUMENT} Question {number}") for number in range(12)]
    params = SamplingParams(max_tokens=12, ignore_end=True)
    longest = max(map(len, prompts)) + 12
    scheduling = Scheduling(max_cache_bytes=4 * longest * 2 * 2 * 32 * 2 * 2)
    with Engine(model, tokenizer, "reference_copy", max_rows=8, scheduling=scheduling) as engine:
        completions = engine.generate(prompts, params, [[DOCUMENT]] * len(prompts))
        assert [len(completion.token_ids) for completion in completions] == [12] * 12
        assert engine.stats.num_reused_tokens
    with pytest.raises(ValueError, match="max_cache_bytes=10 is too little"):
        Engine(model, tokenizer, scheduling=Scheduling(max_cache_bytes=10))
    with pytest.raises(ValueError, match="at most 192 rows"):
        Engine(model, tokenizer, max_rows=200)


@needs_llama_cpp
def test_a_model_of_many_positions_takes_no_more_than_a_quarter_of_the_free_memory(
    tiny_file: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    model, tokenizer = load_into("llama.cpp", tiny_file)
    bytes_per_token = model.ready(max_rows=1, max_prefix_bytes=0, max_bytes=2**20).bytes_per_token
    monkeypatch.setattr("local_backend.models.llama_cpp.model._USUAL_BYTES", 0)
    monkeypatch.setattr("local_backend.models.llama_cpp.model.free_bytes", lambda: 4 * 100 * bytes_per_token)
    with Engine(model, tokenizer, max_prefix_bytes=0) as engine:
        assert engine.max_positions == 100
        (completion,) = engine.generate(
            [tokenizer.encode("How can I bake bread?")], SamplingParams(max_tokens=5)
        )
        assert completion.token_ids


@needs_llama_cpp
def test_what_is_no_model_is_refused(tmp_path: Path, tiny_file: Path) -> None:
    cut = tmp_path / "cut.gguf"
    cut.write_bytes(tiny_file.read_bytes()[:-5000])
    with pytest.raises(ValueError, match=r"cannot read .*cut\.gguf"):
        ChatLocal.from_pretrained(cut, runtime="llama.cpp")
    with pytest.raises(ValueError, match="cuda_graphs"):
        Engine(*load_into("llama.cpp", tiny_file), cuda_graphs=True)


@pytest.fixture(scope="module")
def default_engines() -> Iterator[Callable[[str], Engine]]:
    model, tokenizer = load_into("llama.cpp", None)
    made: dict[str, Engine] = {}

    def engine(drafter: str) -> Engine:
        if drafter not in made:
            made[drafter] = Engine(model, tokenizer, drafter, max_prefix_bytes=0)
        return made[drafter]

    yield engine
    for each in made.values():
        each.close()


@needs_llama_cpp
@pytest.mark.parametrize("drafter", ["reference_copy", "combined"])
@pytest.mark.parametrize("num_copies", [1, 6, 16])
def test_copying_writes_what_the_default_model_writes(
    default_engines: Callable[[str], Engine], drafter: str, num_copies: int
) -> None:
    """After prompts of 100 to 1,000 tokens: beyond 512 llama.cpp has other ways to compute attention."""
    plain, copying = default_engines("autoregressive"), default_engines(drafter)
    texts = [f"{DOCUMENT} Note {number}. " for number in range(num_copies)]
    for request in ("Repeat the first two sentences.", "When is the kiln fired, and who glazes?"):
        turns = [{"role": "user", "content": f"{''.join(texts)}\n\n{request}"}]
        text = plain.tokenizer.apply_chat_template(turns, tokenize=False, add_generation_prompt=True)
        prompt = plain.tokenizer.encode(text, add_special_tokens=False)
        params = SamplingParams(max_tokens=60)
        (expected,) = plain.generate([prompt], params)
        (found,) = copying.generate([prompt], params, [texts])
        assert found.token_ids == expected.token_ids
