"""What a call of the chat model may be given, and the sampling parameters it comes to.

Nothing is passed over in silence: what is not known is named. Knows names and values, not messages.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

from local_backend.sampling import SamplingParams

PARAMETERS = ("max_tokens", "temperature", "top_p", "top_k", "min_p", "seed")
"""Of :class:`~local_backend.sampling.SamplingParams`, as attributes of the chat model or per call."""

# LangChain adds `stream`.
_KNOWN = frozenset({*PARAMETERS, "max_new_tokens", "references", "logprobs", "top_logprobs", "stream"})
_BEYOND_TEXT = frozenset({"tools", "tool_choice", "functions", "response_format"})


def sampling_params(model: Any, stop: Sequence[str] | None, arguments: Mapping[str, Any]) -> SamplingParams:
    """The arguments of one call over the attributes of ``model``.

    Args:
        model: Has :data:`PARAMETERS`, ``stop``, ``logprobs``, ``top_logprobs`` and ``model_name``.
        stop: Strings before which the answer ends.
        arguments: Further arguments of the call; ``None`` stands for not given.

    Raises:
        ValueError: One of them is not known, needs more than a model that writes text, asks for another
            model, or is out of range.
    """
    given = {name: value for name, value in arguments.items() if value is not None}
    if "max_new_tokens" in given:
        bound = given.pop("max_new_tokens")
        if given.setdefault("max_tokens", bound) != bound:
            raise ValueError(
                f"max_tokens={given['max_tokens']} and max_new_tokens={bound} name one bound: give one"
            )
    if beyond := _BEYOND_TEXT & given.keys():
        raise ValueError(
            f"this model writes text only, it calls no tools and fills no schema, but got {sorted(beyond)}: "
            "ask for a format in the prompt and parse the answer"
        )
    if given.pop("model", model.model_name) != model.model_name:
        raise ValueError(
            f"this runs {model.model_name!r} and cannot switch to {arguments['model']!r}: load a second one"
        )
    if unknown := given.keys() - _KNOWN:
        raise ValueError(f"unknown arguments {sorted(unknown)}; there are {sorted(_KNOWN)} and stop")
    stop = stop or model.stop or ()
    num_top = given.get("top_logprobs", model.top_logprobs)
    return SamplingParams(
        **{name: given.get(name, getattr(model, name)) for name in PARAMETERS},
        stop=(stop,) if isinstance(stop, str) else tuple(stop),
        logprobs=num_top if num_top or given.get("logprobs", model.logprobs) else None,
    )
