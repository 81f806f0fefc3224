"""The requests a retrieval chain sends: one answers from documents, one makes a follow-up stand alone.

They are LangChain prompt templates and can be replaced by any others.
"""

from __future__ import annotations

from langchain_core.prompts import ChatPromptTemplate, PromptTemplate

ANSWER_PROMPT = ChatPromptTemplate.from_messages(
    [
        ("placeholder", "{history}"),
        (
            "human",
            "Answer the question from the documents, and quote them word for word.\n\n"
            "{documents}\n\n"
            "Question: {question}",
        ),
    ]
)
"""Asks for the answer. Fields: ``documents``, ``question`` (which stands alone), ``asked`` (as the user put
it), ``history`` (earlier turns, as messages). A template without ``history`` leaves the earlier turns out."""

DOCUMENT_PROMPT = PromptTemplate.from_template("[{number}] {page_content}")
"""Lays out one document. Fields: ``page_content``, ``number`` (from 1), and all of the document's
metadata."""

CONDENSE_PROMPT = ChatPromptTemplate.from_messages(
    [
        (
            "human",
            "Conversation so far:\n{conversation}\n\n"
            "Follow-up question: {question}\n\n"
            "Write the follow-up question so that it can be understood without the conversation.",
        )
    ]
)
"""Asks for a follow-up question that stands alone. Fields: ``conversation``, ``question``, ``history``."""
