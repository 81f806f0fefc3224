"""Answers from documents on a real model, and what can be said of them without a judge.

Each case is a question with its passages and the answer that the LLM Accelerator's authors had for it (arXiv
2304.04487). It is answered by ``RetrievalCopyChain`` and by a plain LCEL chain over ``ChatHuggingFace`` with
the same weights, alternating which goes first. Counted are answers that repeat the same eight words three
times, citations that do not stand where they say, the share of the answer's tokens that is cited, ROUGE-L
against the case's answer, and answers marked as unsupported: with the right passages, and with those of
another question. Seconds run from question to answer. A table, then one JSON line.
"""

from __future__ import annotations

import argparse
import json
import statistics
import time
import warnings
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, cast

from langchain_core.documents import Document
from langchain_core.messages import AIMessage
from langchain_core.output_parsers import StrOutputParser
from langchain_core.prompts import ChatPromptTemplate
from langchain_core.runnables import Runnable, RunnableLambda
from rich.console import Console
from rich.progress import track
from rich.table import Table
from rouge_score.rouge_scorer import RougeScorer
from transformers import pipeline
from transformers.utils import logging

from benchmarks.mistakes import is_looped
from benchmarks.peers import aside
from benchmarks.results import save
from benchmarks.workloads import add_model_argument
from local_backend import ChatLocal
from local_backend.offline.jsonl import read_lines
from retrieval_copy import RetrievalCopyChain
from retrieval_copy.citations.words import readings
from retrieval_copy.display import find_citations, segments
from retrieval_copy.prompting import BOUNDS

DATA = Path(__file__).parents[2] / "shared" / "data" / "reference" / "rag_dev.jsonl"
"""Half of the paper's cases, if available."""

# What LangChain's documentation asks.
_PLAIN_PROMPT = ChatPromptTemplate.from_template(
    "You are an assistant for question-answering tasks. Use the following pieces of retrieved context to "
    "answer the question. If you don't know the answer, just say that you don't know. Use three sentences "
    "maximum and keep the answer concise.\nQuestion: {question} \nContext: {context} \nAnswer:"
)
_KEYS = (
    *("answers", "wrong_citations", "loops", "cited_share", "rouge_l", "chain_rouge_l", "speedup"),
    *("unsupported_right", "unsupported_swapped"),
)


@dataclass(frozen=True)
class Case:
    """A question, its passages, those of another question, and an answer from the passages."""

    question: str
    documents: list[Document]
    swapped: list[Document]
    target: str


def read(path: Path, count: int | None) -> list[Case]:
    """Cases from JSON lines with ``query``, ``documents`` and ``target``.

    Raises:
        ValueError: There are fewer than two, or ``count`` is below 1.
    """
    records = [line.record() for line in read_lines(path)]
    if len(records) < 2 or (count is not None and count < 1):
        raise ValueError(f"{path} has {len(records)} cases, of which {count} are wanted: need 2 and 1")
    found = [[Document(text) for text in record["documents"]] for record in records]
    return [
        Case(
            record["query"],
            documents,
            found[(number + len(found) // 2) % len(found)],
            record["target"].strip(),
        )
        for number, (record, documents) in enumerate(zip(records, found, strict=True))
    ][:count]


def plain_chain(chat: ChatLocal) -> Runnable[dict[str, str], str]:
    """The chain that LangChain's documentation shows, over ``transformers`` with the weights of ``chat``."""
    from langchain_huggingface import ChatHuggingFace, HuggingFacePipeline

    engine = chat.engine
    generate = pipeline(
        "text-generation",
        model=cast("Any", engine.model),
        tokenizer=cast("Any", engine.tokenizer),
        max_new_tokens=BOUNDS["max_tokens"],  # here, since HuggingFacePipeline passes on none of its own
        do_sample=False,
        return_full_text=False,
    )
    llm = HuggingFacePipeline(pipeline=generate)
    with warnings.catch_warnings():  # it looks for a class of langchain-community, which is being sunset
        warnings.filterwarnings("ignore", message=".*langchain-community", category=DeprecationWarning)
        chat_model = ChatHuggingFace(llm=llm, tokenizer=engine.tokenizer)
    return _PLAIN_PROMPT | chat_model | StrOutputParser()


def ask(chat: ChatLocal, question: str, documents: Sequence[Document]) -> AIMessage:
    """The answer of a fresh chain, which knows no earlier answers."""
    found: RunnableLambda[str, list[Document]] = RunnableLambda(lambda query: list(documents))
    return RetrievalCopyChain(found, chat).invoke(question)


def num_wrong(message: AIMessage, documents: Sequence[Document]) -> int:
    """Citations whose words do not stand where they say, in the answer or in the document."""
    return sum(
        message.text[one["start"] : one["end"]] != one["text"]
        or documents[one["document"]].page_content[one["document_start"] : one["document_end"]]
        != one["document_text"]
        or (texts := readings([one["text"], one["document_text"]]))[0].symbols != texts[1].symbols
        for one in find_citations(message)
    )


def measure(
    chat: ChatLocal, plain: Runnable[dict[str, str], str], case: Case, *, plain_first: bool
) -> dict[str, Any]:
    """Answers one case by both chains, and by ours with the other question's passages."""
    scorer = RougeScorer(["rougeL"], use_stemmer=True)
    seconds: dict[str, float] = {}
    context = "\n\n".join(document.page_content for document in case.documents)
    for way in ("plain", "ours") if plain_first else ("ours", "plain"):
        begin = time.perf_counter()
        if way == "ours":
            answer = ask(chat, case.question, case.documents)
        else:
            said = aside(lambda: plain.invoke({"question": case.question, "context": context}))
        seconds[way] = time.perf_counter() - begin
    swapped = ask(chat, case.question, case.swapped)
    parts = segments(str(answer.text), find_citations(answer))
    counts = [(chat.get_num_tokens(part.text), part.citation is not None) for part in parts]
    decoding = answer.response_metadata["decoding"]
    return {
        "question": case.question,
        "answer": answer.text,
        "chain_answer": said,
        "swapped_answer": swapped.text,
        "wrong_citations": num_wrong(answer, case.documents) + num_wrong(swapped, case.swapped),
        "looped": is_looped(str(answer.text)) or is_looped(str(swapped.text)),
        "chain_looped": is_looped(said),
        "num_tokens": sum(count for count, _ in counts),
        "num_cited": sum(count for count, is_cited in counts if is_cited),
        "rouge_l": scorer.score(case.target, str(answer.text))["rougeL"].fmeasure,
        "chain_rouge_l": scorer.score(case.target, said)["rougeL"].fmeasure,
        "seconds": seconds["ours"],
        "chain_seconds": seconds["plain"],
        "num_written": answer.usage_metadata["output_tokens"] if answer.usage_metadata else 0,
        "num_forwards": decoding["num_forwards"],
        "unsupported": not answer.response_metadata["retrieval"]["supported"],
        "unsupported_swapped": not swapped.response_metadata["retrieval"]["supported"],
    }


def summarize(cases: Sequence[dict[str, Any]]) -> dict[str, Any]:
    """The figures of the table; :data:`_KEYS` are those of the JSON line."""

    def mean(name: str) -> float:
        return round(float(statistics.mean(case[name] for case in cases)), 3)

    return {
        "answers": len(cases),
        "wrong_citations": sum(case["wrong_citations"] for case in cases),
        "loops": sum(case["looped"] for case in cases),
        "cited_share": round(
            sum(case["num_cited"] for case in cases) / max(1, sum(case["num_tokens"] for case in cases)), 3
        ),
        "rouge_l": mean("rouge_l"),
        "chain_rouge_l": mean("chain_rouge_l"),
        "speedup": round(statistics.median(case["chain_seconds"] / case["seconds"] for case in cases), 3),
        "unsupported_right": mean("unsupported"),
        "unsupported_swapped": mean("unsupported_swapped"),
        "chain_loops": sum(case["chain_looped"] for case in cases),
        "seconds": round(statistics.median(case["seconds"] for case in cases), 3),
        "chain_seconds": round(statistics.median(case["chain_seconds"] for case in cases), 3),
        "tokens": statistics.median(case["num_tokens"] for case in cases),
        "tokens_per_forward": round(
            sum(case["num_written"] for case in cases) / max(1, sum(case["num_forwards"] for case in cases)),
            3,
        ),
    }


def print_table(row: dict[str, Any]) -> None:
    table = Table("", "RetrievalCopyChain", "LCEL chain")
    table.add_row("ROUGE-L", f"{row['rouge_l']:.3f}", f"{row['chain_rouge_l']:.3f}")
    table.add_row("loops", str(row["loops"]), str(row["chain_loops"]))
    table.add_row("seconds, median", f"{row['seconds']:.2f}", f"{row['chain_seconds']:.2f}")
    table.add_row("tokens per forward", f"{row['tokens_per_forward']:.2f}", "1")
    table.add_row("tokens cited", f"{row['cited_share']:.0%}", "")
    table.add_row("wrong citations", str(row["wrong_citations"]), "")
    table.add_row("marked unsupported", f"{row['unsupported_right']:.0%}", "")
    table.add_row("the same, other passages", f"{row['unsupported_swapped']:.0%}", "")
    Console(width=100).print(table)


def main(arguments: Sequence[str] | None = None) -> None:
    parser = argparse.ArgumentParser(prog="python -m benchmarks.rag_quality", description=__doc__)
    add_model_argument(parser)
    parser.add_argument("--data", type=Path, default=DATA, help="JSON lines: query, documents, target")
    parser.add_argument("--cases", type=int, help="use this many (all)")
    parser.add_argument("--dtype", default="auto", help="number format of the model (%(default)s)")
    parser.add_argument("--save", action="store_true", help="keep a dated file under benchmarks/results")
    parser.add_argument("--texts", type=Path, help="write the answers to this file as they come, to be read")
    options = parser.parse_args(arguments)
    try:
        cases = read(options.data, options.cases)
    except (OSError, ValueError) as error:
        parser.error(str(error))
    logging.set_verbosity_error()
    logging.disable_progress_bar()
    measured = []
    with ChatLocal.from_pretrained(options.model, drafter="reference_copy", dtype=options.dtype) as chat:
        plain = plain_chain(chat)
        measure(chat, plain, cases[0], plain_first=False)  # warm-up: the first calls are slow
        for number, case in enumerate(track(cases, chat.model_name, console=Console(stderr=True))):
            measured.append(measure(chat, plain, case, plain_first=bool(number % 2)))
            if options.texts:
                with options.texts.open("a", encoding="utf-8") as file:
                    file.write(json.dumps(measured[-1], ensure_ascii=False) + "\n")
    row = summarize(measured)
    if options.save:
        name = Path(options.model).stem if options.model else "default"
        # Without the texts, which are the paper's.
        figures = [{k: v for k, v in case.items() if not isinstance(v, str)} for case in measured]
        save(f"rag_quality_{name}", {"model": name, **row}, figures)
    print_table(row)
    print(json.dumps({key: row[key] for key in _KEYS}))


if __name__ == "__main__":
    main()
