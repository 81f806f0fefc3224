"""Workloads for timing copying: a model with random weights, and tasks whose answers quote or repeat nothing.

Knows prompts, references and answers. Does not know decoding methods or timing.
"""

from __future__ import annotations

import random
from pathlib import Path
from typing import TYPE_CHECKING, Any, cast

import torch
from transformers import LlamaConfig, LlamaForCausalLM

from benchmarks.copy_steps import load_cases, tokenizer_of
from benchmarks.peers import Task
from benchmarks.workloads import document_request, edit_request, edited_answer, quoting_answer

if TYPE_CHECKING:
    from transformers import PreTrainedTokenizerBase

    from local_backend import ChatLocal

SHAPES: dict[str, dict[str, int]] = {
    "tiny": {"hidden_size": 64, "intermediate_size": 128, "num_hidden_layers": 2, "num_attention_heads": 2},
    "100m": {
        "hidden_size": 768,
        "intermediate_size": 2048,
        "num_hidden_layers": 12,
        "num_attention_heads": 12,
        "num_key_value_heads": 4,
    },
    "1b": {
        "hidden_size": 2048,
        "intermediate_size": 8192,
        "num_hidden_layers": 16,
        "num_attention_heads": 32,
        "num_key_value_heads": 8,
    },
    "7b": {
        "hidden_size": 4096,
        "intermediate_size": 11008,
        "num_hidden_layers": 32,
        "num_attention_heads": 32,
    },
}
QUOTING_REQUESTS = {"documents": document_request, "edit": edit_request}  # requests to quote the prompt


def llama_config(shape: str, vocabulary_size: int) -> LlamaConfig:
    """The configuration of a Llama of one of :data:`SHAPES`, without special tokens."""
    return LlamaConfig(
        vocab_size=vocabulary_size,
        max_position_embeddings=8192,
        bos_token_id=None,
        eos_token_id=None,
        pad_token_id=None,
        **cast("Any", SHAPES[shape]),
    )


def random_llama(shape: str, vocabulary_size: int, device: str) -> LlamaForCausalLM:
    """A Llama with random weights in bf16."""
    torch.manual_seed(0)
    config = llama_config(shape, vocabulary_size)
    with torch.device(device):
        previous = torch.get_default_dtype()
        torch.set_default_dtype(torch.bfloat16)
        try:
            return cast("LlamaForCausalLM", LlamaForCausalLM(config).eval())
        finally:
            torch.set_default_dtype(previous)


def forced_tasks(tokenizer: PreTrainedTokenizerBase, count: int, seed: int) -> list[Task]:
    """Tasks whose answers alternately quote documents and edit earlier answers."""
    rng, tasks = random.Random(seed), []
    for number in range(count):
        texts, answer = (edited_answer if number % 2 else quoting_answer)(rng)
        request = "Now with these changes:" if number % 2 else "What do the documents say?"
        prompt = tuple(tokenizer.encode("\n\n".join([*texts, request]), add_special_tokens=False))
        target = tuple(tokenizer.encode(f" {answer}", add_special_tokens=False))
        tasks.append(Task(prompt, tuple(texts), target, len(target)))
    return tasks


def noise_tasks(vocabulary_size: int, count: int, num_tokens: int) -> list[Task]:
    """Tasks of random tokens, in which there is nothing to copy."""
    rng = random.Random(3)
    tasks = []
    for _ in range(count):
        ids = [rng.randrange(8, vocabulary_size) for _ in range(256 + num_tokens)]
        tasks.append(Task(tuple(ids[:256]), (), tuple(ids[256:]), num_tokens))
    return tasks


def quoting_prompts(chat: ChatLocal, count: int, num_tokens: int) -> list[Task]:
    """Prompts that cycle through ``QUOTING_REQUESTS``."""
    kinds, tasks = list(QUOTING_REQUESTS), []
    for number in range(count):
        turns = QUOTING_REQUESTS[kinds[number % len(kinds)]](random.Random(f"copy_speed {number}"))
        ids = chat.engine.tokenizer.apply_chat_template(
            turns, tokenize=True, return_dict=False, add_generation_prompt=True
        )
        tasks.append(Task(tuple(map(int, cast("Any", ids))), (), None, num_tokens))
    return tasks


def given_tasks(data: Path, tokenizer: Path, count: int) -> list[Task]:
    """Tasks from the cases of a file, with the documents before the query.

    No references are passed: they are text, which the engine's own tokenizer would split differently. The
    documents are in the prompt anyway, so answers are copied from there.
    """
    tasks = []
    for case in load_cases(data, tokenizer_of(tokenizer))[:count]:
        prompt = (*(token for document in case.references for token in document), *case.prompt)
        tasks.append(Task(prompt, (), case.answer, len(case.answer)))
    return tasks
