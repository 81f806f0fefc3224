"""Chat templates that take tools, as those of families of models do, and replies with calls."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

from transformers import AddedToken, PreTrainedTokenizerFast

from tests.families import byte_level, mistral


def _turns(open_: str, calls: str, close: str, tools: str, reply: str) -> str:
    return (
        tools + "{% for m in messages %}" + open_ + "{{ m['content'] | trim }}"
        "{% for c in m['tool_calls'] or [] %}" + calls + "{% endfor %}" + close + "{% endfor %}"
        "{% if add_generation_prompt %}" + reply + "{% endif %}"
    )


_CHATML = r"{{ '<|im_start|>' + m['role'] + '\n' }}"
_NAMED = r"""{"name": {{ c.function.name | tojson }}, "%s": {{ c.function.arguments | tojson }}}"""
_TOOLS = "{%% if tools %%}%s{%% for t in tools %%}{{ t | tojson }}{%% endfor %%}%s{%% endif %%}"


@dataclass(frozen=True)
class Format:
    """A chat template that takes tools, as those of a family of models do.

    Attributes:
        template: Of the chat.
        tokens: Its control tokens, and whether each is special.
        end: The token that ends a turn.
        call: A reply with text, if the format has it, and one call.
        calls: A reply with two.
        history: How the call is written in an earlier turn.
    """

    template: str
    tokens: dict[str, bool]
    end: str
    call: str
    calls: str
    history: str
    text: str = ""
    kind: Callable[[], Any] = byte_level


_ARGUMENTS = '{"city": "Oslo", "days": 2}'
_HERMES_CALL = f'<tool_call>\n{{"name": "weather", "arguments": {_ARGUMENTS}}}\n</tool_call>'
_LLAMA_CALL = f'{{"name": "weather", "parameters": {_ARGUMENTS}}}'
_MISTRAL_CALL = f'{{"name": "weather", "arguments": {_ARGUMENTS}}}'
_XML_CALL = (
    "<tool_call>\n<function=weather>\n<parameter=city>\nOslo\n</parameter>\n<parameter=days>\n2\n</parameter>\n"
    "</function>\n</tool_call>"
)
FORMATS = {
    "hermes": Format(
        _turns(
            _CHATML,
            "<tool_call>\n" + _NAMED % "arguments" + "\n</tool_call>",
            "{{ '<|im_end|>\n' }}",
            _TOOLS % ("Return calls in <tool_call></tool_call> tags: ", "\n"),
            r"{{ '<|im_start|>assistant\n' }}"
            r"{% if enable_thinking is false %}{{ '<think>\n\n</think>\n\n' }}{% endif %}",
        ),
        {"<|im_start|>": True, "<|im_end|>": True, "<tool_call>": False, "</tool_call>": False},
        "<|im_end|>",
        f"I look.\n{_HERMES_CALL}",
        f"I look.\n{_HERMES_CALL}\n{_HERMES_CALL}",
        _HERMES_CALL,
        "I look.",
    ),
    "qwen_coder": Format(
        _turns(
            _CHATML,
            "<tool_call>\n<function={{ c.function.name }}>\n{% for k, v in c.function.arguments.items() %}"
            "<parameter={{ k }}>\n{{ v }}\n</parameter>\n{% endfor %}</function>\n</tool_call>",
            "{{ '<|im_end|>\n' }}",
            _TOOLS % ("Call with <tool_call>\n<function=name>: ", "\n"),
            r"{{ '<|im_start|>assistant\n' }}",
        ),
        {"<|im_start|>": True, "<|im_end|>": True, "<tool_call>": False, "</tool_call>": False},
        "<|im_end|>",
        f"I look.\n{_XML_CALL}",
        f"I look.\n{_XML_CALL}\n{_XML_CALL}",
        _XML_CALL,
        "I look.",
    ),
    "llama_3": Format(
        _turns(
            r"{{ '<|start_header_id|>' + m['role'] + '<|end_header_id|>\n\n' }}",
            _NAMED % "parameters",
            "{{ '<|eot_id|>' }}",
            _TOOLS
            % ('Respond in the format {"name": function name, "parameters": dictionary of arguments}.', ""),
            r"{{ '<|start_header_id|>assistant<|end_header_id|>\n\n' }}",
        ),
        {"<|start_header_id|>": True, "<|end_header_id|>": True, "<|eot_id|>": True, "<|python_tag|>": True},
        "<|eot_id|>",
        f"<|python_tag|>{_LLAMA_CALL}",
        f"{_LLAMA_CALL}; {_LLAMA_CALL}",
        _LLAMA_CALL,
    ),
    "mistral": Format(
        _turns(
            "{% if m['role'] == 'user' %}[INST] {% elif m['role'] == 'tool' %}[TOOL_RESULTS] {% endif %}",
            "{% if c.id | length != 9 %}{{ raise_exception('nine letters') }}{% endif %}[TOOL_CALLS] ["
            + _NAMED % "arguments"
            + "]",
            "{% if m['role'] == 'user' %}[/INST]{% elif m['role'] == 'assistant' %}{{ '</s>' }}{% endif %}",
            "{{ '<s>' }}" + _TOOLS % ("[AVAILABLE_TOOLS] ", "[/AVAILABLE_TOOLS]"),
            "",
        ),
        dict.fromkeys(("[INST]", "[/INST]", "[TOOL_CALLS]", "[TOOL_RESULTS]", "</s>"), True),
        "</s>",
        f"[TOOL_CALLS] [{_MISTRAL_CALL}]",
        f"[TOOL_CALLS] [{_MISTRAL_CALL}, {_MISTRAL_CALL}]",
        f"[TOOL_CALLS] [{_MISTRAL_CALL}]",
        kind=mistral,
    ),
    "mistral_v11": Format(
        _turns(
            "{% if m['role'] == 'user' %}[INST]{% endif %}",
            "[TOOL_CALLS]{{ c.function.name }}[ARGS]{{ c.function.arguments | tojson }}",
            "{% if m['role'] == 'user' %}[/INST]{% elif m['role'] == 'assistant' %}{{ '</s>' }}{% endif %}",
            _TOOLS % ("[AVAILABLE_TOOLS]", "[/AVAILABLE_TOOLS]"),
            "",
        ),
        dict.fromkeys(("[INST]", "[/INST]", "[TOOL_CALLS]", "[ARGS]", "[CALL_ID]", "</s>"), True),
        "</s>",
        f"I look.[TOOL_CALLS]weather[ARGS]{_ARGUMENTS}",
        f"[TOOL_CALLS]weather[ARGS]{_ARGUMENTS}[TOOL_CALLS]weather[CALL_ID]abc[ARGS]{_ARGUMENTS}",
        f"[TOOL_CALLS]weather[ARGS]{_ARGUMENTS}",
        "I look.",
    ),
}


def tool_tokenizer(name: str) -> PreTrainedTokenizerFast:
    """A tokenizer of the format, with its chat template; a new one, as a test may change it."""
    form = FORMATS[name]
    tokenizer = form.kind()
    tokenizer.add_special_tokens(
        [AddedToken(t, normalized=False) for t, special in form.tokens.items() if special]
    )
    tokenizer.add_tokens(
        [AddedToken(t, normalized=False) for t, special in form.tokens.items() if not special]
    )
    fast = PreTrainedTokenizerFast(tokenizer_object=tokenizer, eos_token=form.end, model_max_length=4096)
    fast.chat_template = form.template
    return fast
