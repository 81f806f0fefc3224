"""The model's own answers to prompts, in wide batches, and how they are kept: JSON lines, appended.

``collection.json`` says what they depend on: model, prompts and options. Line ``k`` of ``answers.jsonl`` is
the answer to prompt ``k``, or the fault for which it was left out. So the number of lines says which prompt
comes next.
"""

from __future__ import annotations

import json
import math
import os
import time
from collections import Counter
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any, Literal

import torch
from tqdm.auto import tqdm
from transformers import GenerationConfig

from local_backend.drafting.drafter import require_at_least
from local_backend.offline.prompt_file import check_tokenizer
from local_backend.training.checkpoints import claim, digest, fingerprint

if TYPE_CHECKING:
    from transformers import PreTrainedModel, PreTrainedTokenizerBase

_SETTINGS, _ANSWERS = "collection.json", "answers.jsonl"
KEPT = "kept"
Fault = Literal["empty", "unfinished", "repetitive", "broken", "rejected"]
# Of these, "rejected" comes only from the caller's filter; unfinished and repetitive answers may be kept.
FAULTS: tuple[Fault, ...] = ("empty", "unfinished", "repetitive", "broken", "rejected")

_LONGEST_PERIOD, _LEAST_REPEATED_TOKENS, _LEAST_REPEATS = 24, 24, 4


@dataclass(frozen=True, slots=True)
class StoredAnswer:
    """An answer to a prompt.

    Attributes:
        prompt_ids, answer_ids: Token ids; the end token is the last one if the model ended its answer.
        has_ended: Whether it did, without repeating itself.
    """

    prompt_ids: tuple[int, ...]
    answer_ids: tuple[int, ...]
    has_ended: bool = True


@dataclass(frozen=True, slots=True)
class CollectOptions:
    """How answers are collected.

    Attributes:
        max_tokens: Maximum tokens of an answer.
        max_rows: Answers decoded at once; by default 1,024 on a GPU and 32 on a CPU.

    Raises:
        ValueError: A number is less than 1.
    """

    max_tokens: int = 256
    max_rows: int | None = None

    def __post_init__(self) -> None:
        require_at_least(1, max_tokens=self.max_tokens, max_rows=self.max_rows or 1)


def is_repetitive(token_ids: Sequence[int]) -> bool:
    """Whether part of the answer repeats the same few tokens over and over.

    That is a span of at most 24 tokens, at least four times in a row, over at least 24 tokens.
    """
    for period in range(1, _LONGEST_PERIOD + 1):
        run = 0
        wanted = max(_LEAST_REPEATED_TOKENS, period * _LEAST_REPEATS) - period
        for one, other in zip(token_ids, token_ids[period:], strict=False):
            run = run + 1 if one == other else 0
            if run >= wanted:
                return True
    return False


def find_fault(token_ids: Sequence[int], text: str, *, has_stopped: bool) -> Fault | None:
    """What is wrong with an answer, ``None`` if nothing is."""
    if len(token_ids) < 2 or not text.strip():
        return "empty"
    if is_repetitive(token_ids):
        return "repetitive"
    if not has_stopped:
        return "unfinished"
    return "broken" if "\N{REPLACEMENT CHARACTER}" in text else None


# Given the prompts and the texts of their answers, whether each answer is worth learning from.
Accept = Callable[[Sequence[Sequence[int]], Sequence[str]], Sequence[bool]]


@torch.inference_mode()
def decode_greedily(
    model: PreTrainedModel, tokenizer: PreTrainedTokenizerBase, prompts: Sequence[Sequence[int]], limit: int
) -> list[list[int]]:
    """Greedy answers of at most ``limit`` tokens, all prompts in one batch; an end token is the last one.

    The engine decodes such a batch as fast on a CPU; on a GPU its work for each row adds up over a thousand.
    """
    end = check_tokenizer(tokenizer)
    config = model.generation_config
    ends = {end, *_as_list(config.eos_token_id if config is not None else None)}
    pad = end if tokenizer.pad_token_id is None else tokenizer.pad_token_id
    width = max(map(len, prompts))
    token_ids = torch.tensor([[pad] * (width - len(prompt)) + list(prompt) for prompt in prompts])
    is_read = torch.tensor([[0] * (width - len(prompt)) + [1] * len(prompt) for prompt in prompts])
    greedy = GenerationConfig(
        max_new_tokens=limit, do_sample=False, eos_token_id=sorted(ends), pad_token_id=pad, use_cache=True
    )
    # Answers need not be exact in the last bit, so a GPU multiplies in the format that it is fast at.
    with torch.autocast(model.device.type, torch.bfloat16, enabled=model.device.type == "cuda"):
        output: Any = model.eval().generate(
            token_ids.to(model.device), attention_mask=is_read.to(model.device), generation_config=greedy
        )
    answers = output[:, width:].tolist()
    stops = [next((at for at, token in enumerate(answer) if token in ends), limit) for answer in answers]
    return [answer[: stop + 1] for answer, stop in zip(answers, stops, strict=True)]


def _as_list(value: int | list[int] | None) -> list[int]:
    return [] if value is None else [value] if isinstance(value, int) else value


def collect_answers(
    model: PreTrainedModel,
    tokenizer: PreTrainedTokenizerBase,
    prompts: Sequence[Sequence[int]],
    folder: Path,
    options: CollectOptions | None = None,
    *,
    accept: Accept | None = None,
    deadline: float = math.inf,
) -> dict[str, int]:
    """Decode every prompt and store its answer in a folder; resumes an interrupted call.

    ``accept`` filters answers in addition to the checks for faults. After ``deadline``, by
    ``time.monotonic()``, no further batch is begun.

    Returns:
        The number of answers ``"kept"``, and for each fault that of answers left out.

    Raises:
        ValueError: The folder holds answers of another model, to other prompts or with other options.
        TimeoutError: The deadline has passed; what was collected until then is kept.
    """
    folder, options = folder.expanduser(), options or CollectOptions()
    wanted = {
        "model": fingerprint(model, tokenizer),
        "prompts": {"count": len(prompts), "digest": digest(map(list, prompts))},
        "options": {"max_tokens": options.max_tokens},
    }
    claim(folder / _SETTINGS, wanted)
    counts = _resume(folder / _ANSWERS)
    num_rows = options.max_rows or (1024 if model.device.type == "cuda" else 32)
    ends = set(_as_list(getattr(model.generation_config, "eos_token_id", None))) | {tokenizer.eos_token_id}
    with tqdm(total=len(prompts), initial=counts.total(), unit="answer", disable=None) as bar:
        while (start := counts.total()) < len(prompts):
            if time.monotonic() > deadline:
                raise TimeoutError(
                    f"the time was up after {start} of {len(prompts)} prompts: the same command goes on with "
                    "the others; fewer prompts or a longer time leave some for training"
                )
            some = prompts[start : start + num_rows]
            answers = decode_greedily(model, tokenizer, some, options.max_tokens)
            texts = tokenizer.batch_decode(answers, skip_special_tokens=True)
            accepted = accept(some, texts) if accept else [True] * len(some)
            records: list[dict[str, Any]] = []
            for prompt, answer, text, is_accepted in zip(some, answers, texts, accepted, strict=True):
                fault = find_fault(answer, text, has_stopped=answer[-1] in ends)
                is_kept = fault in (None, "repetitive", "unfinished")
                record = {"prompt_ids": list(prompt), "answer_ids": answer, "has_ended": fault is None}
                records.append(record if is_kept and is_accepted else {"fault": fault or "rejected"})
            with (folder / _ANSWERS).open("a", encoding="utf-8") as file:
                file.write("".join(json.dumps(record) + "\n" for record in records))
            counts.update(record.get("fault", KEPT) for record in records)
            bar.update(len(records))
    return {name: counts[name] for name in (KEPT, *FAULTS)}


def stored_answers(
    folder: Path,
    model: PreTrainedModel | None = None,
    tokenizer: PreTrainedTokenizerBase | None = None,
) -> list[StoredAnswer]:
    """The answers kept in a folder; of ``model`` alone, if given.

    Raises:
        FileNotFoundError: The folder holds no answers.
        ValueError: They come from another model, or none was kept.
    """
    folder = folder.expanduser()
    settings = folder / _SETTINGS
    if not settings.exists():
        raise FileNotFoundError(f"{folder} holds no answers ({_SETTINGS} is missing): collect them first")
    if model is not None and tokenizer is not None:
        found, wanted = json.loads(settings.read_text("utf-8"))["model"], fingerprint(model, tokenizer)
        if found != wanted:
            raise ValueError(
                f"{folder} holds answers of another model: their fingerprint is {found}, this model's is "
                f"{wanted}. Collect this model's own, in another folder"
            )
    kept = [
        StoredAnswer(tuple(record["prompt_ids"]), tuple(record["answer_ids"]), record["has_ended"])
        for record in map(json.loads, _whole_lines(folder / _ANSWERS))
        if "fault" not in record
    ]
    if not kept:
        raise ValueError(f"{folder} holds no answer that was kept: does the model answer these prompts?")
    return kept


def _resume(path: Path) -> Counter[str]:
    """Counts the outcomes that a file already holds, by fault or as ``"kept"``, and cuts off a torn line."""
    path.touch()
    lines = _whole_lines(path)
    os.truncate(path, sum(map(len, lines)))
    return Counter(json.loads(line).get("fault", KEPT) for line in lines)


def _whole_lines(path: Path) -> list[bytes]:
    return [line for line in path.read_bytes().splitlines(keepends=True) if line.endswith(b"\n")]
