"""Chat templates that refuse roles and orders of turns, or leave texts out, as families of models have."""

from __future__ import annotations

from transformers import PreTrainedTokenizerBase

from tests.families import tokenizer_of

_ALTERNATE = (
    "{% if (m['role'] == 'user') != (loop.index0 % 2 == 0) %}"
    "{{ raise_exception('Conversation roles must alternate user/assistant/user/assistant/...') }}{% endif %}"
)
_GEMMA_TURN = (
    r"{{ '<start_of_turn>' + ('model' if m['role'] == 'assistant' else m['role']) + '\n' + START"
    r" + m['content'] | trim + '<end_of_turn>\n' }}"
)
_GEMMA_REPLY = r"{% if add_generation_prompt %}{{ '<start_of_turn>model\n' }}{% endif %}"
_SYSTEM_FIRST = (
    "{% if messages[0]['role'] == 'system' %}{% set system = messages[0]['content'] %}"
    "{% set turns = messages[1:] %}{% else %}{% set system = '' %}{% set turns = messages %}{% endif %}"
)
TEMPLATES = {
    # Strictly user and assistant in turn, no system.
    "mistral": (
        "mistral",
        "{% for m in messages %}" + _ALTERNATE + "{% if m['role'] == 'user' %}"
        "{{ '[INST] ' + m['content'] + ' [/INST]' }}{% elif m['role'] == 'assistant' %}"
        "{{ m['content'] + '</s>' }}{% else %}"
        "{{ raise_exception('Only user and assistant roles are supported!') }}{% endif %}{% endfor %}",
    ),
    "gemma": (
        "gemma",
        "{% if messages[0]['role'] == 'system' %}"
        "{{ raise_exception('System role not supported') }}{% endif %}"
        "{% for m in messages %}"
        + _ALTERNATE
        + _GEMMA_TURN.replace("START", "''")
        + "{% endfor %}"
        + _GEMMA_REPLY,
    ),
    # The system's text in front of the first question, which must be there.
    "gemma_3": (
        "gemma",
        _SYSTEM_FIRST
        + "{% for m in turns %}"
        + _ALTERNATE
        + _GEMMA_TURN.replace("START", r"(system + '\n\n' if loop.first and system else '')")
        + "{% endfor %}"
        + _GEMMA_REPLY,
    ),
    # The system's text in front of the last question, if that is the last turn.
    "mistral_3": (
        "mistral",
        _SYSTEM_FIRST + "{% for m in turns %}" + _ALTERNATE + "{% if m['role'] == 'user' %}"
        r"{{ '[INST] ' + (system + '\n\n' if loop.last and system else '') + m['content'] + '[/INST]' }}"
        "{% elif m['role'] == 'assistant' %}{{ ' ' + m['content'] | trim + '</s>' }}{% else %}"
        "{{ raise_exception('Only user and assistant roles are supported') }}{% endif %}{% endfor %}",
    ),
    # Texts are lists of blocks, as beside images; a string has none.
    "blocks": (
        "qwen",
        r"{% for m in messages %}{{ '<|im_start|>' + m['role'] + '\n' }}{% for block in m['content'] %}"
        r"{% if block['type'] == 'text' %}{{ block['text'] }}{% endif %}{% endfor %}{{ '<|im_end|>\n' }}"
        r"{% endfor %}{% if add_generation_prompt %}{{ '<|im_start|>assistant\n' }}{% endif %}",
    ),
    # A system's text is left out without a word.
    "phi_3": (
        "phi_3",
        r"{% for m in messages %}{% if m['role'] == 'user' %}{{ '<|user|>\n' + m['content'] + '<|end|>\n' }}"
        r"{% elif m['role'] == 'assistant' %}{{ '<|assistant|>\n' + m['content'] + '<|end|>\n' }}{% endif %}"
        r"{% endfor %}{% if add_generation_prompt %}{{ '<|assistant|>\n' }}{% endif %}",
    ),
}


def strict_tokenizer(name: str) -> PreTrainedTokenizerBase:
    """A tokenizer of the family with a template of :data:`TEMPLATES`."""
    family, template = TEMPLATES[name]
    tokenizer: PreTrainedTokenizerBase = tokenizer_of(family)
    tokenizer.chat_template = template
    return tokenizer
