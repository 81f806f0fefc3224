"""The second stage of the build: the model is tuned to land many tokens a forward under Jacobi decoding.

Guesses at parts of a reply are packed behind the clean text in one forward, and the model is to say on each
guess what it says on the clean text (Jacobi Forcing, arXiv 2512.14681; CLLM, arXiv 2403.00835). Half of the
guesses are drawn, as decoding begins with them; the others are the model's own next iterates of such guesses,
as decoding goes on with them. The clean text is the corpus's: what the plain model was taught to say.

The packing, the noise and the losses are those of :mod:`local_backend.training`; what is decided here is
which replies are learned from and how much is guessed at.
"""

from __future__ import annotations

import random
from collections.abc import Mapping, Sequence

import torch
from torch import Tensor
from torch.nn import functional
from transformers import LlamaForCausalLM, PreTrainedTokenizerFast

from local_backend.embedded.batches import fast_precision, prompt_ids
from local_backend.embedded.corpus import Topic
from local_backend.embedded.tasks import make_example
from local_backend.embedded.tokenization import END
from local_backend.training.losses import forward_kl
from local_backend.training.noise import NoiseOptions, drawn_copies
from local_backend.training.packing import Copy, Example, PackedBatch, num_packed_tokens, pack

# The kinds of replies that a step's batches of guesses are about.
STREAMS: Sequence[Mapping[str, float]] = (
    {"plain": 0.45, "expansion": 0.16, "skeleton": 0.2, "several": 0.07, "beginning": 0.12},
    {"short documents": 0.2, "documents": 0.35, "edit": 0.25, "condense": 0.2},
)
# What is more than a few wrong guesses away is not to be known: short copies, most of them all wrong.
NOISE = NoiseOptions(block_size=8, num_passes=2, window=3, lowest=0.6, highest=1.0)
_MAX_COPIED_TOKENS = 256  # of a reply that is covered with copies; longer replies are cut at random
_AUTOREGRESSIVE_WEIGHT = 2.0


def draw_examples(
    seed: str,
    shares: Mapping[str, float],
    num_tokens: int,
    topics: Sequence[Topic],
    tokenizer: PreTrainedTokenizerFast,
) -> tuple[str, list[Example]]:
    """Replies of one kind, drawn by ``shares``, with drawn guesses; about ``num_tokens`` padded tokens.

    Returns:
        The kind and the examples; the same for the same seed.
    """
    rng = random.Random(seed)
    kind = rng.choices(list(shares), weights=list(shares.values()))[0]
    examples: list[Example] = []
    widest = 0
    while True:
        drawn = make_example(kind, rng, topics)
        request, start, rest = rng.choice(drawn.branches)
        prompt = prompt_ids(drawn, request, start, tokenizer)
        reply = tokenizer.encode(rest + (END if drawn.ends else ""), add_special_tokens=False)
        if len(reply) > _MAX_COPIED_TOKENS:  # a part of it, the rest before it as prompt
            first = rng.choice((0, rng.randrange(len(reply) - _MAX_COPIED_TOKENS)))
            prompt = prompt + reply[:first]
            reply = reply[first : first + _MAX_COPIED_TOKENS]
        copies = drawn_copies(prompt, reply, NOISE, rng)
        example = Example(tuple(prompt), tuple(reply), tuple(copies))
        widest = max(widest, num_packed_tokens(example))
        if examples and widest * (len(examples) + 1) > num_tokens:
            return kind, examples
        examples.append(example)


def next_iterates(examples: Sequence[Example], batch: PackedBatch, predicted: Tensor) -> list[Example]:
    """The examples with each guess as the model left it, from its first wrong place on.

    Args:
        examples: With guesses.
        batch: The same, packed.
        predicted: Likeliest token behind each column, ``[rows, width]``.
    """
    iterated = []
    for row, example in enumerate(examples):
        column = len(example.prompt_ids) + len(example.answer_ids)
        copies = []
        for copy in example.copies:
            used = max(0, min(len(copy.token_ids), len(example.answer_ids) - 1 - copy.start))
            said = predicted[row, column : column + used].tolist()
            column += used
            right = example.answer_ids[copy.start : copy.start + used]
            accepted = next((place for place in range(used) if copy.token_ids[place] != right[place]), used)
            guess = said[accepted:]
            if guess:
                guess += [guess[-1]] * (len(copy.token_ids) - len(guess))
                copies.append(Copy(copy.start + accepted + 1, tuple(guess)))
        iterated.append(Example(example.prompt_ids, example.answer_ids, tuple(copies)))
    return iterated


def are_iterated(seed: str) -> bool:
    """Whether the guesses drawn with this seed are iterated: half are."""
    return random.Random(f"{seed}:iterated").random() < 0.5


def batch_of(
    model: LlamaForCausalLM,
    examples: Sequence[Example],
    tokenizer: PreTrainedTokenizerFast,
    *,
    are_iterated: bool,
) -> PackedBatch:
    """The batch of examples as drawn, or with the model's next iterates of their guesses."""
    batch = pack(examples, tokenizer.pad_token_id)
    if are_iterated:
        noisy = batch.fixed_point_column >= 0
        with torch.no_grad(), fast_precision():
            said = model.lm_head(_hidden(model, batch)[noisy]).argmax(-1)
        predicted = torch.zeros_like(batch.input_ids)
        predicted[noisy] = said
        batch = pack(next_iterates(examples, batch, predicted), tokenizer.pad_token_id)
    return batch


def _hidden(model: LlamaForCausalLM, batch: PackedBatch) -> Tensor:
    mask = torch.zeros(batch.sees.shape).masked_fill_(~batch.sees, torch.finfo(torch.float32).min)
    hidden: Tensor = model.model(
        input_ids=batch.input_ids,
        position_ids=batch.position_ids,
        attention_mask=mask[:, None],
        use_cache=False,
    ).last_hidden_state
    return hidden


def consistency_loss(model: LlamaForCausalLM, batch: PackedBatch) -> tuple[Tensor, Tensor]:
    """The global consistency loss on the guesses, and the AR loss on the clean replies.

    Only the columns that learn or teach get logits, which saves half of the forward of so small a model.

    Returns:
        What to minimize, their weighted sum; and of that the consistency loss alone.
    """
    with fast_precision():
        hidden = _hidden(model, batch)
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
    return consistency + _AUTOREGRESSIVE_WEIGHT * autoregressive, consistency.detach()


__all__ = [
    "NOISE",
    "STREAMS",
    "are_iterated",
    "batch_of",
    "consistency_loss",
    "draw_examples",
    "next_iterates",
]
