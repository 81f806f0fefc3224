"""Citations as LangChain's standard content blocks.

A message of this package has plain text as its content, as chat models' messages do, and its citations in
``response_metadata``. ``message.content_blocks`` shows both as one standard text block with annotations;
this module is the translator that LangChain asks for them. Importing :mod:`retrieval_copy` registers it.
"""

from __future__ import annotations

from langchain_core.messages import AIMessage
from langchain_core.messages.block_translators import register_translator
from langchain_core.messages.content import Annotation, ContentBlock, TextContentBlock

from retrieval_copy.answering import PROVIDER
from retrieval_copy.provenance import citation_annotations


def content_blocks(message: AIMessage) -> list[ContentBlock]:
    """The text of ``message`` with its citations; no block where there is neither."""
    citations = message.response_metadata.get("citations") or []
    text = str(message.text)
    if not text and not citations:
        return []
    block = TextContentBlock(type="text", text=text)
    if citations:
        block["annotations"] = list[Annotation](citation_annotations(citations))
    return [block]


def register() -> None:
    """Make LangChain use :func:`content_blocks` for messages of this package."""
    register_translator(PROVIDER, content_blocks, content_blocks)
