"""LangChain's own acceptance tests of a chat model, on the default model."""

from __future__ import annotations

from typing import Any

import pytest
from langchain_core.language_models import BaseChatModel
from langchain_tests.integration_tests import ChatModelIntegrationTests
from langchain_tests.unit_tests import ChatModelUnitTests

from local_backend import ChatLocal


class _WhatChatLocalIs:
    """The suites' own switches, all in one place.

    The model reads and writes text: images, PDFs, audio and video stay off, as is the suites' default. Nor is
    it trained to call tools or to fill a schema: ``bind_tools`` is not overridden, from which the suites
    conclude that there are no tools, no tool choice and no structured output. JSON mode is off by default.
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


class TestUnit(_WhatChatLocalIs, ChatModelUnitTests):
    # `test_serdes` skips itself: weights in memory cannot be written into a JSON document.
    # `test_init_from_env` skips itself: nothing is read from the environment.
    pass


class TestIntegration(_WhatChatLocalIs, ChatModelIntegrationTests):
    # `test_stream_time` skips itself: it replays recorded HTTP, of which there is none.

    @property
    def standard_chat_model_params(self) -> dict[str, Any]:
        return {"max_tokens": 40}  # the suite asks nothing that a longer answer would show
