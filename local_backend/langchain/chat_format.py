"""Converts chat messages to token ids, call arguments to sampling parameters, completions to messages.

Knows the formats of LangChain and OpenAI. Does not know how rows are run.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from contextlib import suppress
from dataclasses import asdict
from functools import cache
from typing import TYPE_CHECKING, Any

from local_backend.drafting.drafter import drafter_name
from local_backend.sequences.outputs import Completion, TokenLogprob
from local_backend.sequences.request import References
from local_backend.sequences.sampling import SamplingParams
from local_backend.sequences.tokenizing import REFUSALS, cached_by_tokenizer, encode_chat, encode_continuation

if TYPE_CHECKING:
    from transformers import PreTrainedTokenizerBase


def chat_prompt(
    tokenizer: PreTrainedTokenizerBase, turns: Sequence[dict[str, Any]], **options: Any
) -> tuple[list[int], int]:
    """Token ids of rendered turns, and how many of the last ones belong to a reply already begun.

    A final assistant turn is continued; ``options`` go to ``apply_chat_template``.
    """
    last = turns[-1]
    is_reply = last["role"] == "assistant" and "tool_calls" not in last
    begun = last["content"] if is_reply and last["content"].strip() else ""
    token_ids = encode_chat(
        tokenizer,
        turns[:-1] if is_reply and not begun else turns,
        add_generation_prompt=not begun,
        continue_final_message=bool(begun),
        **options,
    )
    return token_ids, len(encode_continuation(tokenizer, begun)) if begun else 0


@cached_by_tokenizer
def turn_ends(tokenizer: PreTrainedTokenizerBase) -> tuple[int, ...]:
    """Tokens that end a reply by the tokenizer or the chat template; a model's config may lack them."""
    ends = {tokenizer.eos_token_id}
    with suppress(*REFUSALS):
        turns = [{"role": "user", "content": "Hello"}, {"role": "assistant", "content": "ZQ"}]
        behind = str(tokenizer.apply_chat_template(turns, tokenize=False)).partition("ZQ")[2].lstrip()
        added = tokenizer.added_tokens_decoder
        ends |= {id for id, token in added.items() if token.special and behind.startswith(token.content)}
    return tuple(sorted(ends - {None}))


REASONING_TAGS = {
    "<think>": "</think>",
    "<thinking>": "</thinking>",
    "[THINK]": "[/THINK]",
    "◁think▷": "◁/think▷",
    "<seed:think>": "</seed:think>",
    "<|START_THINKING|>": "<|END_THINKING|>",
}
"""What opens and closes a block of reasoning, in the formats of chat templates."""

_MOST_TOKENS_OF_A_TAG = 16


def opened_reasoning(tokenizer: PreTrainedTokenizerBase, prompt: Sequence[int]) -> str:
    """The tag with which a prompt ends that opens a block of reasoning, e.g. ``"<think>"``; else ``""``."""
    end = str(tokenizer.decode([*prompt[-_MOST_TOKENS_OF_A_TAG:]])).rstrip()
    return next((tag for tag in REASONING_TAGS if end.endswith(tag)), "")


PARAMETERS = (
    *("max_tokens", "temperature", "top_p", "top_k", "min_p", "seed"),
    *("presence_penalty", "frequency_penalty", "min_tokens"),
)
"""Fields of :class:`~local_backend.sequences.sampling.SamplingParams` set on a chat model or per call."""

# LangChain adds `stream`. The last two are OpenAI's, and hold anyway: schemas are strict, calls are several.
_KNOWN = frozenset(
    {*PARAMETERS, "max_new_tokens", "references", "grammar", "logprobs", "top_logprobs", "stream"}
    | {"drafter", "prediction", "documents"}
    | {"response_format", "tools", "tool_choice", "strict", "parallel_tool_calls"}
)
_SHOWN = ("num_forwards", "tokens_per_forward", "num_prefilled", "num_drafted", "num_accepted", "acceptance")
# Other engines' parameters that are off at 1, or at 0, false or empty.
_OFF_AT_ONE = ("n", "best_of", "repetition_penalty", "repeat_penalty", "typical_p", "tfs_z", "length_penalty")
_OFF_AT_ZERO = ("logit_bias", "functions", "echo", "suffix", "ignore_eos", "use_beam_search", "mirostat")


def sampling_params(model: Any, stop: Sequence[str] | None, arguments: Mapping[str, Any]) -> SamplingParams:
    """Sampling parameters of one call; its arguments, unless ``None``, override attributes of ``model``.

    Raises:
        ValueError: An argument is unknown, out of range, or names another model.
    """
    given = {name: value for name, value in arguments.items() if value is not None}
    if "max_new_tokens" in given:
        bound = given.pop("max_new_tokens")
        if (other := given.setdefault("max_tokens", bound)) != bound:
            raise ValueError(f"max_tokens={other} and max_new_tokens={bound} set the same limit: give one")
    if given.pop("model", model.model_name) != model.model_name:
        raise ValueError(
            f"this runs {model.model_name!r} and cannot switch to {arguments['model']!r}: load a second one"
        )
    off = {name for name in _OFF_AT_ZERO if not given.get(name)}
    off |= {name for name in _OFF_AT_ONE if given.get(name) == 1}
    if unknown := given.keys() - _KNOWN - off:
        raise ValueError(f"unknown arguments {sorted(unknown)}; there are {sorted(_KNOWN)} and stop")
    if given.get("top_k") == -1:  # as vLLM and llama.cpp say it
        given["top_k"] = 0
    stop = stop or model.stop or ()
    num_top = given.get("top_logprobs", model.top_logprobs)
    return SamplingParams(
        **{name: given.get(name, getattr(model, name)) for name in PARAMETERS},
        stop=(stop,) if isinstance(stop, str) else tuple(stop),
        logprobs=num_top if num_top or given.get("logprobs", model.logprobs) else None,
        drafter=given.get("drafter", "reference_copy" if "prediction" in given else None),
    )


def copied_texts(arguments: Mapping[str, Any]) -> References | None:
    """The texts that an answer may copy from: references, documents, and what it is predicted to be.

    Raises:
        TypeError, ValueError: References are a single text, a document has none, or a prediction is no text
            nor OpenAI's object.
    """
    references, prediction = arguments.get("references"), arguments.get("prediction")
    given = None if references is None else References.of(references)
    if documents := arguments.get("documents"):
        if not all(isinstance(one, Mapping) and isinstance(one.get("text"), str) for one in documents):
            raise ValueError(f'documents are objects with a "text", got {documents!r:.200}')
        given = References([*(given.texts if given else ()), *(one["text"] for one in documents)])
    if prediction is None:
        return given
    content = prediction.get("content") if isinstance(prediction, Mapping) else prediction
    parts = content if isinstance(content, list) else [content]
    texts: list[Any] = [part.get("text") if isinstance(part, Mapping) else part for part in parts]
    if not all(isinstance(text, str) for text in texts):
        raise ValueError(f'prediction is a text, or {{"type": "content", ...}}, got {prediction!r:.200}')
    return References([*(given.texts if given else ()), "".join(texts)])


def openai_logprobs(logprobs: Sequence[TokenLogprob], tokenizer: PreTrainedTokenizerBase) -> dict[str, Any]:
    """``{"content": [{"token", "logprob", "bytes", "top_logprobs"}, ...], "refusal": None}``.

    ``bytes`` is ``None`` if a token is not a whole character.
    """
    # A tokenizer drops the space at the start of a text: tokens are decoded after another one.
    before = tokenizer.encode("a", add_special_tokens=False)[-1:]

    @cache
    def decoded(*token_ids: int) -> str:
        return str(tokenizer.decode([*before, *token_ids], clean_up_tokenization_spaces=False))

    def entry(token_id: int, logprob: float) -> dict[str, Any]:
        text = decoded(token_id)[len(decoded()) :]
        whole = "\N{REPLACEMENT CHARACTER}" not in text
        return {"token": text, "logprob": logprob, "bytes": list(text.encode()) if whole else None}

    content = [
        {**entry(one.token_id, one.logprob), "top_logprobs": [entry(*other) for other in one.top]}
        for one in logprobs
    ]
    return {"content": content, "refusal": None}


def answer_metadata(completion: Completion, model: Any, drafter: str | None) -> dict[str, Any]:
    """The ``response_metadata`` of an answer of ``model``: its finish reason and decoding statistics."""
    metadata: dict[str, Any] = {
        "model_name": model.model_name,
        "finish_reason": completion.finish_reason,
        "decoding": {
            "drafter": drafter or drafter_name(model.engine.drafter),
            **{name: getattr(completion.stats, name) for name in _SHOWN},
        },
    }
    if completion.references:
        metadata["decoding"]["copied_spans"] = [asdict(span) for span in completion.copied_spans()]
    if completion.logprobs is not None:
        metadata["logprobs"] = openai_logprobs(completion.logprobs, model.engine.tokenizer)
    return metadata


def with_digest_of_references(kwargs: dict[str, Any]) -> dict[str, Any]:
    """Arguments of a call with the texts to copy from replaced by their number and digest."""
    with suppress(TypeError, ValueError):  # what is no reference is rejected when the call is made
        if (texts := copied_texts(kwargs)) is not None:
            return {**kwargs, "references": repr(texts), "prediction": None}
    return kwargs
