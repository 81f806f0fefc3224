"""What copying gains in retrieval: three scenarios on a local model, float32, free generation.

``documents``: questions about chapters of Python's language reference, found by BM25 among all of them.
``similar_answers``: a question asked before in other words, whose answer is found by its embedding.
``earlier_turns``: a request to edit an answer in the conversation.

Answers are cut at ``--max-tokens``. A model may repeat itself without end, which is easy
to copy and worthless: answers that repeat themselves are counted, but excluded from the speed figures.

Each prompt is decoded in one run, alternating, by the engine with references, by the engine without
(``autoregressive``), by ``transformers`` and by ``transformers`` with prompt lookup. The speed-ups cover
decoding alone: the time of a call minus that of the same call for one token. The end-to-end figures cover the
time from question to answer, with retrieval, prompt and, on our side, citations.
"""

from __future__ import annotations

import argparse
import asyncio
import json
import random
import statistics
import time
from collections.abc import Callable, Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from typing import Any, cast

import torch
from langchain_core.documents import Document
from langchain_core.language_models import LanguageModelInput
from langchain_core.messages import convert_to_messages, convert_to_openai_messages
from langchain_core.runnables import RunnableConfig
from langchain_core.vectorstores import InMemoryVectorStore
from rich.console import Console
from rich.progress import track
from rich.table import Table
from transformers.utils import logging

from benchmarks.results import save
from benchmarks.workloads import (
    add_model_argument,
    chapters,
    edit_request,
    question_pairs,
    repeats_itself,
)
from local_backend import ChatLocal, Engine, References, SamplingParams
from retrieval_copy import BM25Retriever, RetrievalCopyChain, SentenceEmbeddings, SimilarAnswers
from retrieval_copy.answering import Answering, Request

_PASSAGE_SENTENCES, _RETRIEVED = 5, 3
_LOOKUP_TOKENS = 10  # as in transformers' documentation
_MAX_TOKENS = 128
_METHODS = ("reference_copy", "autoregressive", "transformers_greedy", "prompt_lookup")


@dataclass(frozen=True)
class Case:
    """One question to one chain.

    Attributes:
        given: Input of the chain.
        chain: The chain, with references.
        arguments: Keyword arguments of the chain's call.
    """

    given: LanguageModelInput
    chain: RetrievalCopyChain
    arguments: dict[str, Any]


# The scenarios ---------------------------------------------------------------------------------------


def document_cases(chat: ChatLocal, count: int, rng: random.Random) -> Iterator[Case]:
    """Questions about chapters; one index holds the passages of all of them."""
    documents = [
        Document(
            " ".join(chapter.sentences[start : start + _PASSAGE_SENTENCES]), metadata={"title": chapter.title}
        )
        for chapter in chapters()
        for start in range(0, len(chapter.sentences), _PASSAGE_SENTENCES)
    ]
    # Free generation, as by the other ways: by default so small a model may only quote.
    chain = RetrievalCopyChain(BM25Retriever(documents=documents, k=_RETRIEVED), chat, quotes=False)
    chosen = rng.sample(chapters(), min(count, len(chapters())))
    return (Case(f"What does the reference say about {chapter.title}?", chain, {}) for chapter in chosen)


def similar_cases(chat: ChatLocal, count: int, rng: random.Random) -> Iterator[Case]:
    """Questions in one wording, after another wording of each has been answered."""
    answers = SimilarAnswers(InMemoryVectorStore(SentenceEmbeddings()))
    learning = RetrievalCopyChain(None, chat, references=[answers])
    pairs = question_pairs(count)
    learning.batch([before for before, _ in pairs], max_tokens=_MAX_TOKENS)
    answers.remember = False
    return (Case(again, learning, {}) for _, again in pairs)


def edit_cases(chat: ChatLocal, count: int, rng: random.Random) -> Iterator[Case]:
    """Requests to change an answer a little."""
    chain = RetrievalCopyChain(None, chat)
    for _ in range(count):
        yield Case(convert_to_messages(edit_request(rng)), chain, {"retrieve": False})


_SCENARIOS: dict[str, Callable[[ChatLocal, int, random.Random], Iterator[Case]]] = {
    "documents": document_cases,
    "similar_answers": similar_cases,
    "earlier_turns": edit_cases,
}


# Measuring -------------------------------------------------------------------------------------------


class Peers:
    """The four methods of decoding one prompt."""

    def __init__(self, chat: ChatLocal, max_tokens: int = _MAX_TOKENS) -> None:
        self.chat = chat
        self.max_tokens = max_tokens
        engine = chat.engine
        self._plain = Engine(engine.model, engine.tokenizer, "autoregressive")

    def close(self) -> None:
        """Close the engine created here."""
        self._plain.close()

    def decode(
        self, method: str, prompt: list[int], texts: References, max_tokens: int
    ) -> tuple[list[int], float]:
        """Token ids of the answer, and seconds."""
        if method in ("transformers_greedy", "prompt_lookup"):
            # On a short-lived thread, so that torch's helper threads do not slow down the next method.
            with ThreadPoolExecutor(1) as thread:
                return thread.submit(self._transformers, method, prompt, max_tokens).result()
        engine = self.chat.engine if method == "reference_copy" else self._plain
        engine.forget_prefixes()
        params = SamplingParams(max_tokens=max_tokens)
        references = [texts if method == "reference_copy" else None]
        begin = time.perf_counter()
        (completion,) = engine.generate([prompt], params, references=references)
        return list(completion.token_ids), time.perf_counter() - begin

    def num_forwards(self, prompt: list[int], texts: References) -> int:
        """Decode forwards of the engine with these references."""
        params = SamplingParams(max_tokens=self.max_tokens)
        return self.chat.engine.generate([prompt], params, references=[texts])[0].stats.num_forwards

    def _transformers(self, method: str, prompt: list[int], max_tokens: int) -> tuple[list[int], float]:
        lookup = {"prompt_lookup_num_tokens": _LOOKUP_TOKENS} if method == "prompt_lookup" else {}
        ids = torch.tensor([prompt])
        begin = time.perf_counter()
        with torch.inference_mode():
            output = cast("Any", self.chat.engine.model).generate(
                ids, attention_mask=torch.ones_like(ids), do_sample=False, max_new_tokens=max_tokens, **lookup
            )
        return output[0, len(prompt) :].tolist(), time.perf_counter() - begin

    def prompt_of(self, request: Request) -> list[int]:
        """Token ids of a request."""
        turns = convert_to_openai_messages(request.messages)
        ids = self.chat.engine.tokenizer.apply_chat_template(
            turns, tokenize=True, return_dict=False, add_generation_prompt=True
        )
        return cast("list[int]", ids)


def prepare(case: Case) -> tuple[Request, float]:
    """The chain's request to the model, and the seconds it took to prepare."""
    begin = time.perf_counter()
    answering = Answering(case.chain.options, case.chain.model, RunnableConfig(), case.arguments)
    request = asyncio.run(answering.prepare(case.given))
    return request, time.perf_counter() - begin


def measure(peers: Peers, case: Case, number: int, repeats: int) -> dict[str, Any]:
    """Measure one case with all methods; times are medians of ``repeats`` runs."""
    request, prepare_seconds = prepare(case)
    prompt = peers.prompt_of(request)
    texts = request.arguments.get("references", References([]))
    seconds: dict[str, list[float]] = {method: [] for method in _METHODS}
    begin_seconds: dict[str, list[float]] = {method: [] for method in _METHODS}
    chain_seconds: list[float] = []
    answers: dict[str, list[int]] = {}
    for repeat in range(repeats):
        turn = (number + repeat) % len(_METHODS)
        for method in _METHODS[turn:] + _METHODS[:turn]:
            _, one_token = peers.decode(method, prompt, texts, 1)
            answers[method], whole = peers.decode(method, prompt, texts, peers.max_tokens)
            seconds[method].append(whole)
            begin_seconds[method].append(one_token)
        peers.chat.engine.forget_prefixes()
        begin = time.perf_counter()
        message = case.chain.invoke(case.given, max_tokens=peers.max_tokens, **case.arguments)
        chain_seconds.append(time.perf_counter() - begin)
    decoding = message.response_metadata["decoding"]
    is_same = message.text == peers.chat.invoke(request.messages, max_tokens=peers.max_tokens).text
    literal = all(
        message.text[citation["start"] : citation["end"]]
        == request.documents[citation["document"]].page_content[
            citation["document_start"] : citation["document_end"]
        ]
        for citation in message.response_metadata["citations"]
    )
    return {
        "num_tokens": len(answers["reference_copy"]),
        "num_prompt_tokens": len(prompt),
        "repeats_itself": repeats_itself(answers["reference_copy"]),
        "num_forwards": decoding["num_forwards"],
        "num_citations": len(message.response_metadata["citations"]),
        "literal": literal,
        "identical": is_same and answers["reference_copy"] == answers["autoregressive"],
        "identical_to_transformers": len({tuple(answer) for answer in answers.values()}) == 1,
        "decode_seconds": {
            method: max(statistics.median(seconds[method]) - statistics.median(begin_seconds[method]), 0.0)
            for method in _METHODS
        },
        "end_to_end_seconds": {
            **{method: prepare_seconds + statistics.median(seconds[method]) for method in _METHODS},
            "reference_copy": statistics.median(chain_seconds),
        },
        "answer": message.text,
    }


def summarize(cases: Sequence[dict[str, Any]]) -> dict[str, Any]:
    """Figures of one scenario; times and forwards are summed over its cases before taking ratios.

    Raises:
        ValueError: Every answer repeats itself.
    """
    every, cases = cases, [case for case in cases if not case["repeats_itself"]]
    if not cases:
        raise ValueError(f"all of {len(every)} answers repeat themselves: try another model or seed")

    def ratio(kind: str, method: str) -> float:
        ours, theirs = (sum(case[kind][one] for case in cases) for one in ("reference_copy", method))
        return round(float(theirs / ours), 3)

    names = {
        "speedup_vs_transformers_greedy": "transformers_greedy",
        "speedup_vs_prompt_lookup": "prompt_lookup",
        "speedup_vs_own_autoregressive": "autoregressive",
    }
    num_tokens = sum(case["num_tokens"] for case in cases)
    return {
        "cases": len(every),
        "repeat_themselves": len(every) - len(cases),
        "tokens_per_forward": round(num_tokens / sum(case["num_forwards"] for case in cases), 3),
        **{name: ratio("decode_seconds", method) for name, method in names.items()},
        **{f"{name}_end_to_end": ratio("end_to_end_seconds", method) for name, method in names.items()},
        "identical": all(case["identical"] for case in every),
        "identical_to_transformers": sum(case["identical_to_transformers"] for case in every),
        "tokens_median": statistics.median(case["num_tokens"] for case in cases),
        "with_citations": sum(case["num_citations"] > 0 for case in every),
        "citations_literal": all(case["literal"] for case in every),
    }


def print_table(scenarios: dict[str, dict[str, Any]]) -> None:
    columns = ("tokens", "per forward", "over greedy", "over lookup", "over own", "end to end", "identical")
    table = Table("scenario", *columns)
    for name, figures in scenarios.items():
        table.add_row(
            name,
            f"{figures['tokens_median']:.0f}",
            f"{figures['tokens_per_forward']:.2f}",
            f"{figures['speedup_vs_transformers_greedy']:.2f}",
            f"{figures['speedup_vs_prompt_lookup']:.2f}",
            f"{figures['speedup_vs_own_autoregressive']:.2f}",
            f"{figures['speedup_vs_transformers_greedy_end_to_end']:.2f}",
            str(figures["identical"]),
        )
    Console(width=110).print(table)


def main(arguments: Sequence[str] | None = None) -> None:
    parser = argparse.ArgumentParser(prog="python -m benchmarks.retrieval", description=__doc__)
    parser.add_argument("--cases", type=int, default=20, help="cases per scenario")
    parser.add_argument("--repeats", type=int, default=2, help="runs of each case; the median is reported")
    parser.add_argument("--seed", type=int, default=20, help="seed of the cases")
    parser.add_argument("--scenarios", nargs="+", choices=_SCENARIOS, default=list(_SCENARIOS))
    add_model_argument(parser)
    parser.add_argument(
        "--max-tokens", type=int, default=_MAX_TOKENS, help="maximum tokens of an answer (%(default)s)"
    )
    parser.add_argument("--save", action="store_true", help="keep a dated file under benchmarks/results")
    options = parser.parse_args(arguments)
    if options.cases < 1 or options.repeats < 1:
        parser.error("--cases and --repeats must be at least 1")
    logging.disable_progress_bar()
    kept: list[dict[str, Any]] = []
    scenarios: dict[str, dict[str, Any]] = {}
    with ChatLocal.from_pretrained(options.model, drafter="reference_copy", dtype="float32") as chat:
        peers = Peers(chat, options.max_tokens)
        for name in options.scenarios:
            cases = list(_SCENARIOS[name](chat, options.cases, random.Random(options.seed)))
            measure(peers, cases[0], 0, 1)  # warm-up: the first calls are slow
            measured = [
                {"scenario": name, **measure(peers, case, number, options.repeats)}
                for number, case in enumerate(track(cases, name, console=Console(stderr=True)))
            ]
            scenarios[name] = summarize(measured)
            kept.extend(measured)
        peers.close()
    print_table(scenarios)
    summary = {"model": options.model or "default", "scenarios": scenarios}
    if options.save:
        save("retrieval", summary, kept)
    print(json.dumps(summary))


if __name__ == "__main__":
    main()
