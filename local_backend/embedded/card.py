"""The card of the embedded model: what it is, measured on the weights it describes."""

from __future__ import annotations

from collections import Counter
from itertools import islice
from pathlib import Path

from transformers import AutoModelForCausalLM, AutoTokenizer, PreTrainedModel, PreTrainedTokenizerBase

from local_backend.embedded.corpus import Topic, load_requests
from local_backend.embedded.evaluation import (
    NUM_FOLLOW_UPS,
    edit_prompts,
    follow_up_prompts,
    point_prompts,
    quotes_the_fact,
    render,
    unseen_documents,
)
from local_backend.embedded.tasks import EDITS
from local_backend.engine import Engine
from local_backend.sampling import SamplingParams

_NUM_DOCUMENTS = 200
_CARD = """\
---
license: mit
language: en
---

# The embedded model of langchain-parallel-decoding

A very small language model that ships inside a Python package, so that its examples, tests and benchmarks run on a
real model without a download. It is not an assistant.

| | |
|---|---|
| architecture | Llama, {num_layers} layers, hidden size {hidden_size}, {num_heads} heads, context {context} tokens |
| parameters | {parameters:.1f} million, stored in bfloat16; computed in float32 on CPU unless asked otherwise |
| size | {megabytes:.1f} MB with its tokenizer (byte-level BPE, {vocabulary} entries) |
| data | {num_topics} topics, {num_points} points, {num_words:,} words of prose and {num_questions} questions, and made-up documents without end, all written for this project: `local_backend/embedded/corpus` |
| training | from random weights, {num_steps} steps; {tuning} |

## What it does

- Asked a question about one of its topics, it answers with a numbered list of points, each with two sentences.
- Asked for the outline of an answer, as `sot_chains` asks, it writes the headings of these points.
- Asked to expand one point of an outline, or several in one reply, it writes these points' two sentences.
- Given documents and a question, it quotes the sentence that answers it, also from documents it never saw.
- Asked, behind an answer of numbered points, to make it shorter, it keeps the first two.

One phrasing of each topic's question was left out of training. On these it writes the right topic's outline, word for
word, for {outlines_right} of {num_topics}, and begins a plain answer with the right topic's first heading for {answers_right} of {num_topics}. Of {num_documents} questions on
documents it never saw, half of them written by hand, it answers {quoted} with a quotation of eight tokens or more that holds
the fact asked for. Asked in the words of training for points one by one, it writes {point} of {num_points} word for word, and of no
topic fewer than {fewest_points}; of {num_topics} answers each it shortens {shorter} word for word as it was taught.

## What it cannot do

- Know anything else. It has learned its topics nearly by heart; asked about another subject it answers about one of
  its own, fluently and wrongly. `local_backend.embedded.closest_topic` tells whether a question is about one of them.
- Read documents as a person would: it finds the sentence that shares words with the question. Where the answer stands
  in other words than the question, or is not there, it quotes a wrong sentence.
- Add a point to an answer reliably: {add} of {num_topics} come out word for word; many others go on behind the point that was asked for, or end before it.
- Replace words, or write a follow-up question so that it stands alone. It was taught both, and does word for word what was
  asked for {replace} of {num_topics} and {condense} of {num_follow_ups}.
  Nor does it tell the last request to change an answer from those before it in a conversation.
- Reason, calculate, translate, write code, hold a conversation, or follow other instructions.
- Write any language but English.

## Use in measurements

Among the topics are those of the Vicuna questions in the categories generic, knowledge and common-sense, in other words than
theirs. So on these questions it is no measure of quality that its answers are to the point. Benchmarks with it measure time, tokens and
forwards, and say which questions lie within its topics.
"""


def write_card(
    folder: Path,
    topics: tuple[Topic, ...],
    *,
    num_steps: int,
    num_consistency_steps: int,
    num_last_steps: int,
    num_editing_steps: int,
    num_following_up_steps: int,
) -> None:
    """Measure the model in ``folder``, mostly on what was left out of training, and write its card there."""
    model = AutoModelForCausalLM.from_pretrained(folder, dtype="float32").eval()
    tokenizer = AutoTokenizer.from_pretrained(folder)
    config = model.config
    measured = _measured(model, tokenizer, topics)
    files = [folder / name for name in ("model.safetensors", "tokenizer.json")]
    texts = [point.text for topic in topics for point in topic.points]
    tuning = (
        f"then {num_consistency_steps + num_last_steps} in which it learns guess tokens as well "
        f"(consistency training), {num_editing_steps} in which it learns to change answers, and "
        f"{num_following_up_steps} in which it learns follow-ups as well; "
        "rebuilt by `python -m local_backend.embedded.build`"
        if num_consistency_steps
        else f"then {num_editing_steps} in which it learns to change answers, and {num_following_up_steps} "
        "in which it learns follow-ups as well; not tuned for Jacobi decoding; "
        "rebuilt by `python -m local_backend.embedded.build --without-consistency`"
    )
    card = _CARD.format(
        num_layers=config.num_hidden_layers,
        hidden_size=config.hidden_size,
        num_heads=config.num_attention_heads,
        context=config.max_position_embeddings,
        parameters=sum(parameter.numel() for parameter in model.parameters()) / 1e6,
        megabytes=sum(file.stat().st_size for file in files) / 1e6,
        vocabulary=len(tokenizer),
        num_topics=len(topics),
        num_points=len(texts),
        num_words=sum(len(text.split()) for text in texts),
        num_questions=sum(len(topic.questions) for topic in topics),
        num_steps=num_steps if num_consistency_steps else num_steps + num_last_steps,
        tuning=tuning,
        num_documents=_NUM_DOCUMENTS,
        num_follow_ups=NUM_FOLLOW_UPS,
        **measured,
    )
    (folder / "README.md").write_text(card, encoding="utf-8")


def _measured(
    model: PreTrainedModel, tokenizer: PreTrainedTokenizerBase, topics: tuple[Topic, ...]
) -> dict[str, int]:
    request = load_requests()["skeleton"]
    start = request.reply_start

    def prompt(text: str, start: str = "") -> list[int]:
        return render(tokenizer, [("user", text)], start)

    outline_prompts = [
        prompt(request.requests[0].format(question=topic.held_out_question), start) for topic in topics
    ]
    documents = unseen_documents(_NUM_DOCUMENTS)
    known = [
        *point_prompts(topics),
        *edit_prompts(topics),
        *follow_up_prompts(NUM_FOLLOW_UPS, topics),
    ]
    with Engine(model, tokenizer, max_rows=16) as engine:
        outlines = engine.generate(outline_prompts, SamplingParams(max_tokens=192))
        answers = engine.generate(
            [prompt(topic.held_out_question) for topic in topics], SamplingParams(max_tokens=16)
        )
        quotations = engine.generate(
            [render(tokenizer, document.messages) for document in documents], SamplingParams(max_tokens=160)
        )
        replies = engine.generate(
            [render(tokenizer, one.messages, one.start) for one in known], SamplingParams(max_tokens=480)
        )
    outlines_right = sum(
        start + outline.text == topic.skeleton for outline, topic in zip(outlines, topics, strict=True)
    )
    answers_right = sum(
        answer.text.startswith(f"1. **{topic.points[0].heading}")
        for answer, topic in zip(answers, topics, strict=True)
    )
    quoted = sum(
        quotes_the_fact(tokenizer, quotation.text, document)
        for quotation, document in zip(quotations, documents, strict=True)
    )
    is_right = [reply.text.strip() == one.reply for one, reply in zip(known, replies, strict=True)]
    right = Counter(one.kind for one, is_it in zip(known, is_right, strict=True) if is_it)
    of_points = iter(is_right)  # which come first, topic by topic
    return {
        "outlines_right": outlines_right,
        "answers_right": answers_right,
        "quoted": quoted,
        "fewest_points": min(sum(islice(of_points, len(topic.points))) for topic in topics),
        **{kind: right[kind] for kind in ("point", *EDITS, "condense")},
    }
