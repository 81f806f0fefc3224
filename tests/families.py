"""Small tokenizers of the kinds that model families use, made in milliseconds, with templates like theirs."""

from __future__ import annotations

import json
from collections.abc import Callable
from dataclasses import dataclass, field

from tokenizers import AddedToken, Tokenizer, decoders, models, normalizers, pre_tokenizers, trainers
from transformers import PreTrainedTokenizerFast

_TEXTS = (
    "How can I bake bread at home today? Mix flour, water, salt and yeast, and let the dough rest.",
    "You are a helpful assistant. The user asks for the system's rules, and the model answers them.",
    "1. Make a plan\n2. Take breaks\n3. Say no\n\nThe first point is about mornings, the second about work.",
)


def byte_level() -> Tokenizer:
    """As of GPT-2, Qwen, Llama 3 and SmolLM: every byte has a token."""
    tokenizer = Tokenizer(models.BPE())
    tokenizer.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    tokenizer.decoder = decoders.ByteLevel()
    alphabet = pre_tokenizers.ByteLevel.alphabet()
    tokenizer.train_from_iterator(_TEXTS, trainers.BpeTrainer(vocab_size=340, initial_alphabet=alphabet))
    return tokenizer


def _byte_fallback() -> Tokenizer:
    trained = Tokenizer(models.BPE())
    trained.pre_tokenizer = pre_tokenizers.Metaspace(prepend_scheme="first")
    trained.train_from_iterator(_TEXTS, trainers.BpeTrainer(vocab_size=120))
    model = json.loads(trained.to_str())["model"]
    names = ["<unk>", "<s>", "</s>", *(f"<0x{byte:02X}>" for byte in range(256)), *model["vocab"]]
    vocabulary = {name: number for number, name in enumerate(names)}
    merges = [tuple(merge) for merge in model["merges"]]
    return Tokenizer(models.BPE(vocabulary, merges, unk_token="<unk>", fuse_unk=True, byte_fallback=True))


def llama_2() -> Tokenizer:
    """As of Llama 2, TinyLlama and Phi-3: bytes outside the vocabulary, and a space before each text."""
    tokenizer = _byte_fallback()
    tokenizer.normalizer = normalizers.Sequence([normalizers.Prepend("▁"), normalizers.Replace(" ", "▁")])
    steps = [decoders.Replace("▁", " "), decoders.ByteFallback(), decoders.Fuse(), decoders.Strip(" ", 1, 0)]
    tokenizer.decoder = decoders.Sequence(steps)
    return tokenizer


def mistral() -> Tokenizer:
    """As of Mistral 7B: the space is added to the first piece of a text only."""
    tokenizer = llama_2()
    tokenizer.normalizer = None
    tokenizer.pre_tokenizer = pre_tokenizers.Metaspace(prepend_scheme="first", split=False)
    return tokenizer


def gemma() -> Tokenizer:
    """As of Gemma: bytes outside the vocabulary, no added space."""
    tokenizer = _byte_fallback()
    tokenizer.normalizer = normalizers.Replace(" ", "▁")
    tokenizer.pre_tokenizer = pre_tokenizers.Split(" ", "merged_with_previous")
    tokenizer.decoder = decoders.Sequence(
        [decoders.Replace("▁", " "), decoders.ByteFallback(), decoders.Fuse()]
    )
    return tokenizer


def unigram() -> Tokenizer:
    """SentencePiece's Unigram, with the Metaspace decoder."""
    tokenizer = Tokenizer(models.Unigram())
    tokenizer.pre_tokenizer = pre_tokenizers.Metaspace()
    tokenizer.decoder = decoders.Metaspace()
    trainer = trainers.UnigramTrainer(vocab_size=120, special_tokens=["<unk>"], unk_token="<unk>")
    tokenizer.train_from_iterator(_TEXTS, trainer)
    return tokenizer


def word_piece() -> Tokenizer:
    """As of BERT."""
    tokenizer = Tokenizer(models.WordPiece(unk_token="[UNK]"))
    tokenizer.normalizer = normalizers.BertNormalizer(lowercase=False)
    tokenizer.pre_tokenizer = pre_tokenizers.BertPreTokenizer()
    tokenizer.decoder = decoders.WordPiece(cleanup=True)
    trainer = trainers.WordPieceTrainer(vocab_size=160, special_tokens=["[UNK]"])
    tokenizer.train_from_iterator(_TEXTS, trainer)
    return tokenizer


KINDS: dict[str, Callable[[], Tokenizer]] = {
    kind.__name__: kind for kind in (byte_level, llama_2, mistral, gemma, unigram, word_piece)
}

_TURN_BY_TURN = (
    "{{ BOS }}{% for m in messages %}{{ OPEN }}{{ CONTENT }}{{ CLOSE }}{% endfor %}"
    "{% if add_generation_prompt %}{{ REPLY }}{% endif %}"
)


@dataclass(frozen=True)
class Family:
    """A family of chat models.

    Attributes:
        kind: Its tokenizer.
        template: Its chat template.
        special: Special tokens besides the end token.
        end: The token that ends a turn.
        not_special: Added tokens that are not special, though some end or begin a turn.
        takes_line_feed: Whether its tokens take in the white space after them.
        has_system: Whether the template knows the role.
    """

    kind: Callable[[], Tokenizer]
    template: str
    end: str
    special: tuple[str, ...] = ()
    not_special: tuple[str, ...] = ()
    takes_line_feed: bool = False
    has_system: bool = True
    control: tuple[str, ...] = field(init=False)

    def __post_init__(self) -> None:
        object.__setattr__(self, "control", (*self.special, self.end, *self.not_special))


def _template(open_: str, content: str, close: str, reply: str, *, bos: str = "''") -> str:
    values = {"BOS": bos, "OPEN": open_, "CONTENT": content, "CLOSE": close, "REPLY": reply}
    template = _TURN_BY_TURN
    for name, value in values.items():
        template = template.replace(name, value)
    return template


_CHATML = _template(
    r"'<|im_start|>' + m['role'] + '\n'", "m['content']", r"'<|im_end|>\n'", r"'<|im_start|>assistant\n'"
)
FAMILIES = {
    "qwen": Family(byte_level, _CHATML, "<|im_end|>", ("<|endoftext|>", "<|im_start|>")),
    "hermes": Family(mistral, _CHATML, "<|im_end|>", (), ("<|im_start|>",)),
    "llama_3": Family(
        byte_level,
        _template(
            r"'<|start_header_id|>' + m['role'] + '<|end_header_id|>\n\n'",
            "m['content'] | trim",
            "'<|eot_id|>'",
            r"'<|start_header_id|>assistant<|end_header_id|>\n\n'",
            bos="'<|begin_of_text|>'",
        ),
        "<|eot_id|>",
        ("<|begin_of_text|>", "<|start_header_id|>", "<|end_header_id|>"),
    ),
    "mistral": Family(
        mistral,
        _template(
            "'[INST] ' if m['role'] == 'user' else ' '",
            "m['content'] | trim",
            "'[/INST]' if m['role'] == 'user' else '</s>'",
            "''",
            bos="'<s>'",
        ),
        "</s>",
        ("<s>", "[INST]", "[/INST]"),
        has_system=False,
    ),
    "gemma": Family(
        gemma,
        _template(
            r"'<start_of_turn>' + ('model' if m['role'] == 'assistant' else m['role']) + '\n'",
            "m['content'] | trim",
            r"'<end_of_turn>\n'",
            r"'<start_of_turn>model\n'",
            bos="'<bos>'",
        ),
        "<end_of_turn>",
        ("<bos>", "<start_of_turn>"),
        ("\n\n", "<table>"),
        has_system=False,
    ),
    "phi_3": Family(
        llama_2,
        _template(r"'<|' + m['role'] + '|>\n'", "m['content']", r"'<|end|>\n'", r"'<|assistant|>\n'"),
        "<|end|>",
        ("<|system|>", "<|user|>", "<|assistant|>"),
        takes_line_feed=True,
    ),
    "zephyr": Family(
        mistral,
        _template(r"'<|' + m['role'] + '|>\n'", "m['content']", r"'</s>\n'", r"'<|assistant|>\n'"),
        "</s>",
        ("<s>",),
    ),
    "deepseek": Family(
        byte_level,
        _template(
            "'<｜User｜>' if m['role'] == 'user' else '<｜Assistant｜>' if m['role'] == 'assistant' else ''",
            "m['content'] if m['role'] == 'user' or loop.last else m['content'].split('</think>')[-1]",
            "'<｜end▁of▁sentence｜>' if m['role'] == 'assistant' else ''",
            r"'<｜Assistant｜><think>\n'",
            bos="'<｜begin▁of▁sentence｜>'",
        ),
        "<｜end▁of▁sentence｜>",
        ("<｜begin▁of▁sentence｜>",),
        ("<｜User｜>", "<｜Assistant｜>", "<think>", "</think>"),
    ),
}


def tokenizer_of(family: str) -> PreTrainedTokenizerFast:
    """A tokenizer of the family, with its chat template; each caller gets one of its own."""
    model = FAMILIES[family]
    tokenizer = model.kind()
    tokenizer.add_special_tokens(
        [
            AddedToken(token, rstrip=model.takes_line_feed, normalized=False)
            for token in (*model.special, model.end)
        ]
    )
    tokenizer.add_tokens([AddedToken(token, normalized=False) for token in model.not_special])
    fast = PreTrainedTokenizerFast(tokenizer_object=tokenizer, eos_token=model.end)
    fast.chat_template = model.template
    return fast
