"""A tiny tokenizer and random-weight models: real components, made in milliseconds.

They write noise, so only invariants can be asserted: that two decoding methods agree, that streams add up,
that everything ends.
"""

from __future__ import annotations

import functools
from typing import Any

import torch
from transformers import LlamaConfig, LlamaForCausalLM, PreTrainedTokenizerFast

from local_backend import ChatLocal, Engine
from local_backend.drafting import Drafter

VOCABULARY = 500
PAD, END = "<|pad|>", "<|im_end|>"
_CHAT_TEMPLATE = (
    "{%- for message in messages -%}"
    "{{ '<|im_start|>' + message['role'] + '\n' + message['content'] + '<|im_end|>\n' }}"
    "{%- endfor -%}"
    "{%- if add_generation_prompt -%}{{ '<|im_start|>assistant\n' }}{%- endif -%}"
)
# Enough words for some merges; everything else is written byte by byte.
_TEXTS = (
    "How can I bake bread at home today? Mix flour, water, salt and yeast, and let the dough rest.",
    "What helps against stress? Sleep enough, walk outside, and talk with people you trust.",
    "1. Make a plan\n2. Take breaks\n3. Say no\n\nThe first point is about mornings, the second about work.",
    "The answer may copy from a document. The document says where the water comes from, and when.",
    "Who may open the kiln? Only the members who were taught, and only when it has cooled down.",
    "Write the number of loaves, then the price of each, and add both columns before the shop closes.",
    "In spring the garden wants compost, seeds and patience; in autumn it gives beans, onions and apples.",
    "Every train between these cities stops twice, once at the border and once where the river bends.",
)


def tiny_tokenizer(vocabulary_size: int = VOCABULARY) -> PreTrainedTokenizerFast:
    """Byte-level BPE with a chat template: every string has a code, and decoding gives it back.

    Each caller gets one of its own, which a test may change.
    """
    from tokenizers import Tokenizer, decoders, models, pre_tokenizers, trainers

    tokenizer = Tokenizer(models.BPE())
    tokenizer.pre_tokenizer = pre_tokenizers.Sequence(
        [pre_tokenizers.Digits(individual_digits=True), pre_tokenizers.ByteLevel(add_prefix_space=False)]
    )
    tokenizer.decoder = decoders.ByteLevel()
    trainer = trainers.BpeTrainer(
        vocab_size=vocabulary_size,
        special_tokens=[PAD, END, "<|im_start|>"],
        initial_alphabet=pre_tokenizers.ByteLevel.alphabet(),
        show_progress=False,
    )
    tokenizer.train_from_iterator(_TEXTS, trainer)
    fast = PreTrainedTokenizerFast(
        tokenizer_object=tokenizer,
        pad_token=PAD,
        eos_token=END,
        additional_special_tokens=["<|im_start|>"],
        model_max_length=2048,
        clean_up_tokenization_spaces=False,
        padding_side="left",
    )
    fast.chat_template = _CHAT_TEMPLATE
    return fast


def random_llama(**changes: object) -> LlamaForCausalLM:
    """A model whose answers wander, so that a wrong position or mask shows."""
    torch.manual_seed(0)
    config = LlamaConfig(
        **{
            "vocab_size": VOCABULARY,
            "hidden_size": 48,
            "intermediate_size": 96,
            "num_hidden_layers": 3,
            "num_attention_heads": 4,
            "num_key_value_heads": 2,
            "max_position_embeddings": 256,
            "initializer_range": 0.3,
            "bos_token_id": None,
            "eos_token_id": 7,
            "pad_token_id": 0,
            **changes,
        }
    )
    return LlamaForCausalLM(config).eval()


@functools.cache
def tiny_chat_model() -> LlamaForCausalLM:
    """A model for :func:`tiny_tokenizer` that never ends an answer by itself."""
    tokenizer = tiny_tokenizer()
    model = random_llama(
        max_position_embeddings=2048, eos_token_id=tokenizer.eos_token_id, tie_word_embeddings=False
    )
    with torch.no_grad():
        model.lm_head.weight[tokenizer.eos_token_id] = 0.0
    model.name_or_path = model.config._name_or_path = "tests/tiny"
    return model


def tiny_chat(drafter: str | Drafter = "autoregressive", **options: Any) -> ChatLocal:
    """A :class:`ChatLocal` on :func:`tiny_chat_model`.

    Args:
        drafter: How it decodes.
        options: Of the engine (``max_rows``, ``scheduling``) and of the chat model.
    """
    engine_options = {name: options.pop(name) for name in ("max_rows", "scheduling") if name in options}
    engine_options = {"scheduling": "longest_first", **engine_options}
    engine = Engine(tiny_chat_model(), tiny_tokenizer(), drafter, **engine_options)
    return ChatLocal(engine=engine, **{"model_name": "tiny", "max_tokens": 40, **options})
