"""The local model keeps to the protocol by which Skeleton-of-Thought knows it."""

from sot_chains.providers import LocalChatModel
from sot_chains.providers.langchain import LangChainProvider
from tests.tiny import tiny_chat


def test_chat_local_offers_what_the_protocol_declares() -> None:
    with tiny_chat(min_tokens=3) as chat:
        declared: LocalChatModel = chat  # for mypy
        assert isinstance(chat, LocalChatModel)
        wrapped = LangChainProvider(chat.bind(temperature=0.5).with_retry())
        assert wrapped.local is declared
        assert wrapped.local.min_tokens == 3
        assert wrapped.bound == {"temperature": 0.5}
        assert LangChainProvider(chat.with_fallbacks([chat])).local is chat
