"""What the embedded model is worth: held-out phrasings, documents it never saw, perplexity, Jacobi decoding.

Everything is greedy and computed in float32, with the prompts other packages send. Given ``--plain`` (a
folder that `python -m local_backend.embedded.build --without-consistency --output` wrote) the two are
measured side by side. Prints a table, then one JSON line; nothing here depends on time.
"""

from __future__ import annotations

import argparse
import json
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from transformers import AutoModelForCausalLM, AutoTokenizer, PreTrainedModel, PreTrainedTokenizerBase

from benchmarks.results import save
from local_backend import Engine, SamplingParams
from local_backend.embedded import WEIGHTS
from local_backend.embedded.corpus import load_topics
from local_backend.embedded.evaluation import (
    NUM_FOLLOW_UPS,
    edit_prompts,
    follow_up_prompts,
    held_out_pairs,
    held_out_phrasings,
    longest_quotation,
    perplexity,
    point_prompts,
    quotes_the_fact,
    render,
    repeats_ngram,
    unseen_documents,
)
from local_backend.embedded.tasks import EDITS
from local_backend.width_costs import WidthCosts
from sot_chains import parse_skeleton
from sot_chains.prompts import ENGLISH

_SKELETON, _ANSWER, _QUOTATION = (SamplingParams(max_tokens=count) for count in (160, 640, 192))


def _texts(engine: Engine, prompts: Sequence[Sequence[int]], params: SamplingParams) -> list[str]:
    return [completion.text for completion in engine.generate(prompts, params)]


def _share(marks: Sequence[bool]) -> float:
    return round(sum(marks) / len(marks), 4)


Cases = list[dict[str, Any]]


def measure_phrasings(
    engine: Engine, tokenizer: PreTrainedTokenizerBase, count: int
) -> tuple[dict[str, float], Cases]:
    """Skeletons and plain answers to questions in words that were not taught."""
    phrasings = held_out_phrasings(load_topics(), count)
    start = ENGLISH.skeleton_prefill
    requests = [ENGLISH.skeleton_request(question, prefill=True) for _, question in phrasings]
    skeletons = [
        start + text
        for text in _texts(
            engine, [render(tokenizer, [("user", request)], start) for request in requests], _SKELETON
        )
    ]
    answers = _texts(engine, [render(tokenizer, [("user", question)]) for _, question in phrasings], _ANSWER)
    topics = [topic for topic, _ in phrasings]
    cases = [
        {"question": question, "topic": topic.name, "skeleton": skeleton, "answer": answer}
        for (topic, question), skeleton, answer in zip(phrasings, skeletons, answers, strict=True)
    ]
    return {
        "skeletons_parsed": _share([len(parse_skeleton(text)) >= 3 for text in skeletons]),
        "skeletons_right": _share(
            [text == topic.skeleton for text, topic in zip(skeletons, topics, strict=True)]
        ),
        "answers_right": _share([text == topic.answer for text, topic in zip(answers, topics, strict=True)]),
        "answers_on_topic": _share(
            [f"**{topic.points[0].heading}**" in text for text, topic in zip(answers, topics, strict=True)]
        ),
        "answers_repeating": _share([repeats_ngram(text) for text in answers]),
    }, cases


def measure_documents(
    engine: Engine, tokenizer: PreTrainedTokenizerBase, count: int
) -> tuple[dict[str, float], Cases]:
    """Questions on unseen documents: the first half written by hand, the second made up."""
    prompts = unseen_documents(count)
    answers = _texts(engine, [render(tokenizer, prompt.messages) for prompt in prompts], _QUOTATION)
    good = [
        quotes_the_fact(tokenizer, answer, prompt) for answer, prompt in zip(answers, prompts, strict=True)
    ]
    quoted = [
        longest_quotation(tokenizer, answer, prompt.text) >= 8
        for answer, prompt in zip(answers, prompts, strict=True)
    ]
    half = count // 2
    cases = [
        {
            "prompt": prompt.messages[-1][1],
            "facts": [quotation.fact for quotation in prompt.case.quotations],
            "answer": answer,
            "is_good": is_good,
        }
        for prompt, answer, is_good in zip(prompts, answers, good, strict=True)
    ]
    return {
        "documents_quoted_with_fact": _share(good),
        "documents_quoted": _share(quoted),
        "documents_by_hand": _share(good[:half]),
        "documents_made_up": _share(good[half:]),
    }, cases


def measure_known_replies(
    engine: Engine, tokenizer: PreTrainedTokenizerBase
) -> tuple[dict[str, float], Cases]:
    """Replies that are right word for word: points, changes of an answer, questions made to stand alone."""
    topics = load_topics()
    prompts = [
        *point_prompts(topics),
        *edit_prompts(topics),
        *follow_up_prompts(NUM_FOLLOW_UPS, topics),
    ]
    rendered = [render(tokenizer, prompt.messages, prompt.start) for prompt in prompts]
    answers = [text.strip() for text in _texts(engine, rendered, _ANSWER)]
    cases = [
        {"kind": prompt.kind, "request": prompt.messages[-1][1], "answer": answer, "wanted": prompt.reply}
        for prompt, answer in zip(prompts, answers, strict=True)
    ]
    return {
        f"right_{kind}": _share([case["answer"] == case["wanted"] for case in cases if case["kind"] == kind])
        for kind in ("point", *EDITS, "condense")
    }, cases


def measure_jacobi(
    model: PreTrainedModel, tokenizer: PreTrainedTokenizerBase, drafter: str, count: int
) -> dict[str, float]:
    """Tokens per forward over plain answers and over document questions, each half of ``count``.

    As on a device with arithmetic to spare, so that the figure is the model's and not the machine's: on a CPU
    the engine leaves out what would land tokens, but not fast enough.
    """
    phrasings = held_out_phrasings(load_topics(), count // 2)
    groups = {
        "answers": [render(tokenizer, [("user", question)]) for _, question in phrasings],
        "documents": [render(tokenizer, prompt.messages) for prompt in unseen_documents(count // 2)],
    }
    numbers = {}
    tokens = forwards = 0
    with Engine(model, tokenizer, drafter, max_rows=1, width_costs=WidthCosts.flat(64)) as engine:
        for name, prompts in groups.items():
            completions = engine.generate(prompts, _ANSWER)
            emitted = sum(len(completion.token_ids) for completion in completions)
            needed = sum(completion.stats.num_forwards for completion in completions)
            numbers[f"tokens_per_forward_{drafter}_{name}"] = round(emitted / needed, 3)
            tokens, forwards = tokens + emitted, forwards + needed
    return {f"tokens_per_forward_{drafter}": round(tokens / forwards, 3), **numbers}


def measure(
    folder: Path, *, num_phrasings: int, num_documents: int, num_decoded: int
) -> tuple[dict[str, float], Cases]:
    """Every number of the model in ``folder``."""
    model = AutoModelForCausalLM.from_pretrained(folder, dtype="float32").eval()
    tokenizer = AutoTokenizer.from_pretrained(folder)
    with Engine(model, tokenizer, drafter="autoregressive", max_rows=16) as engine:
        about_topics, cases = measure_phrasings(engine, tokenizer, num_phrasings)
        about_documents, document_cases = measure_documents(engine, tokenizer, num_documents)
        about_replies, reply_cases = measure_known_replies(engine, tokenizer)
    numbers = about_topics | about_documents | about_replies
    numbers |= measure_jacobi(model, tokenizer, "jacobi", num_decoded)
    pairs = held_out_pairs(tokenizer, load_topics())
    return {
        **numbers,
        "perplexity": round(perplexity(model, tokenizer, pairs), 4),
    }, cases + document_cases + reply_cases


def main(arguments: Sequence[str] | None = None) -> None:
    """Command line."""
    parser = argparse.ArgumentParser(prog="python -m benchmarks.embedded_quality", description=__doc__)
    parser.add_argument("--model", type=Path, default=WEIGHTS)
    parser.add_argument("--plain", type=Path, help="the same model before consistency training")
    parser.add_argument("--phrasings", type=int, default=200)
    parser.add_argument("--documents", type=int, default=200)
    parser.add_argument("--decoded", type=int, default=60, help="prompts of the Jacobi measurement")
    parser.add_argument("--save", action="store_true", help="keep the result in benchmarks/results")
    given = parser.parse_args(arguments)
    folders = {"shipped": given.model} | ({"plain": given.plain} if given.plain else {})
    results: dict[str, dict[str, float]] = {}
    cases: Cases = []
    for name, folder in folders.items():
        results[name], measured = measure(
            folder,
            num_phrasings=given.phrasings,
            num_documents=given.documents,
            num_decoded=given.decoded,
        )
        cases += [{"model": name, **case} for case in measured]
    print(f"{'':34}" + "".join(f"{name:>10}" for name in results))
    for number in next(iter(results.values())):
        print(f"{number:34}" + "".join(f"{result[number]:10.3f}" for result in results.values()))
    summary: dict[str, Any] = {"phrasings": given.phrasings, "documents": given.documents, **results}
    if "plain" in results:
        ratio = results["shipped"]["perplexity"] / results["plain"]["perplexity"]
        summary["perplexity_ratio"] = round(ratio, 4)
    if given.save:
        save("embedded_quality" if given.plain else "embedded_quality_without_plain", summary, cases)
    print(json.dumps(summary))


if __name__ == "__main__":
    main()
