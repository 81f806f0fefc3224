"""LangChain's own acceptance tests of a chat model, on the default model."""

from __future__ import annotations

import copy
from collections.abc import Iterator
from typing import Any

import pytest
from langchain_core.language_models import BaseChatModel
from langchain_tests.integration_tests import ChatModelIntegrationTests
from langchain_tests.unit_tests import ChatModelUnitTests

from local_backend import ChatLocal, Engine
from tests.local_backend.langchain.tool_formats import FORMATS


class _WhatChatLocalIs:
    """The suites' own switches, all in one place.

    The model reads and writes text: images, PDFs, audio and video stay off, as is the suites' default.
    """

    @pytest.fixture(autouse=True)
    def _engine(self, default_chat: ChatLocal) -> None:
        self.engine = default_chat.engine

    @property
    def chat_model_class(self) -> type[BaseChatModel]:
        return ChatLocal

    @property
    def chat_model_params(self) -> dict[str, Any]:
        return {"engine": self.engine, "model_name": "SmolLM2-135M-Instruct"}

    @property
    def supports_model_override(self) -> bool:
        # One ChatLocal is one set of weights: another model is another ChatLocal. Asking for it is refused.
        return False


@pytest.fixture(scope="module")
def taking_tools(default_chat: ChatLocal) -> Iterator[Engine]:
    """The default model with a chat template that takes tools, which its own does not."""
    tokenizer = copy.deepcopy(default_chat.engine.tokenizer)
    tokenizer.chat_template = FORMATS["hermes"].template
    with Engine(default_chat.engine.model, tokenizer) as engine:
        yield engine


class _WithTools(_WhatChatLocalIs):
    @pytest.fixture(autouse=True)
    def _engine_with_tools(self, _engine: None, taking_tools: Engine) -> None:
        self.engine = taking_tools


class TestUnit(_WithTools, ChatModelUnitTests):
    # `test_serdes` skips itself: weights in memory cannot be written into a JSON document.
    # `test_init_from_env` skips itself: nothing is read from the environment.
    pass


class TestIntegration(_WhatChatLocalIs, ChatModelIntegrationTests):
    # `test_stream_time` skips itself: it replays recorded HTTP, of which there is none.

    @property
    def standard_chat_model_params(self) -> dict[str, Any]:
        return {"max_tokens": 6}  # the suite asks nothing that a longer answer would show

    @property
    def has_tool_calling(self) -> bool:
        return False  # see below: it takes minutes

    @property
    def has_structured_output(self) -> bool:
        return False  # see below: it takes minutes


@pytest.mark.slow
class TestSchemasAndTools(_WithTools, ChatModelIntegrationTests):
    @property
    def standard_chat_model_params(self) -> dict[str, Any]:
        # So small a model repeats itself inside strings, which no schema of the suite bounds.
        return {"max_tokens": 200, "frequency_penalty": 0.5}

    @property
    def supports_json_mode(self) -> bool:
        return True

    @pytest.mark.xfail(reason="a model that was not trained to call tools does so only if it is forced")
    def test_agent_loop(self, model: BaseChatModel) -> None:
        super().test_agent_loop(model)
