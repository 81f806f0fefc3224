"""The second stage of the build: the model is tuned on its own answers to land many tokens a forward.

The plain model's greedy answers are the fixed points of Jacobi decoding. Noisy copies of their blocks are
packed behind the clean text in one forward, with the noise rising from block to block, and the model is
to say on each copy what it says on the clean text (Jacobi Forcing, arXiv 2512.14681; CLLM, arXiv
2403.00835). The noise and the losses are those of :mod:`local_backend.training`; what is decided here is
which prompts are answered and how much is trained on what.
"""

from __future__ import annotations

import json
import random
from collections.abc import Sequence
from pathlib import Path

import torch
from torch import Tensor
from torch.nn import functional
from transformers import LlamaForCausalLM, PreTrainedTokenizerFast

from local_backend.embedded.batches import fast_precision, prompt_ids
from local_backend.embedded.corpus import Topic
from local_backend.embedded.tasks import make_example
from local_backend.engine import Engine
from local_backend.sampling import SamplingParams
from local_backend.training.losses import forward_kl
from local_backend.training.noise import NoiseOptions, drawn_copies
from local_backend.training.packing import Example, PackedBatch, num_packed_tokens, pack

# Of the prompts that the plain model answers.
SHARES = {
    "plain": 0.24,
    "skeleton": 0.12,
    "expansion": 0.14,
    "several": 0.08,
    "short documents": 0.1,
    "documents": 0.2,
    "edit": 0.08,
    "condense": 0.04,
}
NOISE = NoiseOptions(block_size=16, num_passes=2, window=4, lowest=0.25, highest=1.0)
_MAX_TOKENS, _MAX_ROWS = 448, 24
_MAX_COPIED_TOKENS = 256  # of an answer that is covered with copies; longer answers are cut at random
_AUTOREGRESSIVE_WEIGHT = 0.5

Answer = tuple[list[int], list[int]]  # token ids of the prompt, and of the answer with its end


def collect_answers(
    model: LlamaForCausalLM,
    tokenizer: PreTrainedTokenizerFast,
    topics: Sequence[Topic],
    count: int,
    path: Path,
) -> None:
    """Write the model's own greedy answers to ``count`` prompts to ``path``.

    One cut off at the bound is a fixed point as well.
    """
    rng = random.Random("answers")
    prompts = []
    for kind in rng.choices(list(SHARES), weights=list(SHARES.values()), k=count):
        example = make_example(kind, rng, topics)
        request, start, _ = rng.choice(example.branches)
        prompts.append(prompt_ids(example, request, start, tokenizer))
    prompts.sort(key=len)
    model.eval()
    params = SamplingParams(max_tokens=_MAX_TOKENS, temperature=0.0)
    with Engine(model, tokenizer, drafter="autoregressive", max_rows=_MAX_ROWS) as engine:
        completions = engine.generate(prompts, params)
    lines = [
        json.dumps([prompt, list(completion.token_ids)]) + "\n"
        for prompt, completion in zip(prompts, completions, strict=True)
    ]
    path.parent.mkdir(parents=True, exist_ok=True)
    partial = path.with_suffix(".partial")
    partial.write_text("".join(lines), encoding="utf-8")
    partial.replace(path)


def read_answers(path: Path) -> list[Answer]:
    """What :func:`collect_answers` wrote.

    Raises:
        FileNotFoundError: It is not there any more.
    """
    if not path.exists():
        raise FileNotFoundError(
            f"{path} is missing, the plain model's answers: delete the checkpoint beside it"
        )
    return [tuple(json.loads(line)) for line in path.read_text("utf-8").splitlines()]


def draw_noisy(
    seed: str, answers: Sequence[Answer], num_tokens: int, tokenizer: PreTrainedTokenizerFast
) -> PackedBatch:
    """Answers of like length with noisy copies, about ``num_tokens`` padded tokens; the same for a seed."""
    rng = random.Random(seed)
    order = sorted(range(len(answers)), key=lambda place: sum(map(len, answers[place])))
    center = rng.randrange(len(order))
    nearby = order[max(0, center - 20) : center + 20]
    examples: list[Example] = []
    widest = 0
    while True:
        prompt, answer = answers[rng.choice(nearby)]
        if len(answer) > _MAX_COPIED_TOKENS:  # a part of it, the rest before it as prompt
            first = rng.choice((0, rng.randrange(len(answer) - _MAX_COPIED_TOKENS)))
            prompt = prompt + answer[:first]
            answer = answer[first : first + _MAX_COPIED_TOKENS]
        copies = drawn_copies(prompt, answer, NOISE, rng)
        example = Example(tuple(prompt), tuple(answer), tuple(copies))
        widest = max(widest, num_packed_tokens(example))
        if examples and widest * (len(examples) + 1) > num_tokens:
            return pack(examples, tokenizer.pad_token_id)
        examples.append(example)


def consistency_loss(model: LlamaForCausalLM, batch: PackedBatch) -> dict[str, Tensor]:
    """The global consistency loss on the copies plus the AR loss on the clean answers.

    Only the columns that learn or teach get logits, which saves half of the forward of so small a model.
    """
    mask = torch.zeros(batch.sees.shape).masked_fill_(~batch.sees, torch.finfo(torch.float32).min)
    with fast_precision():
        hidden = model.model(
            input_ids=batch.input_ids,
            position_ids=batch.position_ids,
            attention_mask=mask[:, None],
            use_cache=False,
        ).last_hidden_state
        clean = batch.labels != -100
        noisy = batch.fixed_point_column >= 0
        clean_logits = model.lm_head(hidden[clean]).float()  # [clean columns, vocabulary]
        noisy_logits = model.lm_head(hidden[noisy]).float()
    place = torch.full(clean.shape, -1)
    place[clean] = torch.arange(len(clean_logits))
    row, column = noisy.nonzero(as_tuple=True)
    teachers = place[row, batch.fixed_point_column[row, column]]
    consistency = forward_kl(noisy_logits, clean_logits[teachers].detach()).mean()
    autoregressive = functional.cross_entropy(clean_logits, batch.labels[clean])
    return {"noisy": consistency + _AUTOREGRESSIVE_WEIGHT * autoregressive}


__all__ = ["NOISE", "collect_answers", "consistency_loss", "draw_noisy", "read_answers"]
