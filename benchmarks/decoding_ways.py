"""Decoding methods, run and timed one prompt at a time. Knows no task and no model by name."""

from __future__ import annotations

import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field, replace
from typing import Any

import torch
from rich.console import Console
from rich.progress import track

from local_backend import Engine, Jacobi, Lookahead, SamplingParams
from local_backend.drafting import Combined, Drafter, ReferenceCopy, RowView
from local_backend.drafting.draft import Draft, Outcome
from local_backend.drafting.drafter import PerRow
from local_backend.engine.worker import ThreadMailbox
from local_backend.models.forward_cost import ForwardCost
from local_backend.sequences.outputs import Completion

WAYS = ("jacobi_plain", "jacobi_tuned", "lookahead_tuned", "combined_tuned")
BASELINE = "autoregressive"
_WIDEST = 64  # columns of a forward; no draft of these models is wider


@dataclass(frozen=True)
class Prompt:
    """One prompt to decode.

    Attributes:
        token_ids: Token ids of the prompt.
        references: Text that may be copied.
    """

    token_ids: list[int]
    references: list[str] | None = None


@dataclass(frozen=True)
class Decoded:
    """The answer to one prompt, and its cost.

    Attributes:
        token_ids: Token ids of the answer.
        text: Text of the answer.
        num_forwards: Decode forwards.
        seconds: Total time, prefill included.
        decode_seconds: Time after the answer's first forward, so without prefill.
        num_decoded: Tokens generated in that time.
    """

    token_ids: list[int]
    text: str
    num_forwards: int
    seconds: float = 0.0
    decode_seconds: float = 0.0
    num_decoded: int = 0


@dataclass
class Way:
    """A decoding method and its answers so far."""

    decode: Callable[[Prompt], Decoded]
    decoded: list[Decoded] = field(default_factory=list)

    def run(self, prompt: Prompt) -> None:
        """Decode one prompt and record the answer and its time."""
        started = time.perf_counter()
        one = self.decode(prompt)
        self.decoded.append(replace(one, seconds=time.perf_counter() - started))

    def last(self, count: int) -> Way:
        """The same method with only its last ``count`` answers."""
        return Way(self.decode, self.decoded[len(self.decoded) - count :])

    @property
    def texts(self) -> list[str]:
        """Texts of the answers."""
        return [one.text for one in self.decoded]

    @property
    def num_tokens(self) -> int:
        """Tokens of all answers."""
        return sum(len(one.token_ids) for one in self.decoded)

    @property
    def tokens_per_forward(self) -> float:
        """Emitted tokens per decode forward."""
        return self.num_tokens / max(1, sum(one.num_forwards for one in self.decoded))

    @property
    def tokens_per_second(self) -> float:
        """Emitted tokens per second, prefill included."""
        return self.num_tokens / sum(one.seconds for one in self.decoded)

    @property
    def decode_rate(self) -> float:
        """Tokens per second after each answer's first forward; 0 if no time was recorded after it."""
        seconds = sum(one.decode_seconds for one in self.decoded)
        return sum(one.num_decoded for one in self.decoded) / seconds if seconds else 0.0


def engine_way(
    model: Any,
    tokenizer: Any,
    drafter: str | Drafter,
    max_tokens: int,
    *,
    with_references: bool = False,
    whole_drafts: bool = False,
) -> tuple[Way, Engine]:
    """A method that runs on a new engine with a prefix cache, one prompt at a time.

    With ``whole_drafts`` forwards are as wide as the drafter asks, not cut to what pays off on this machine.
    """
    width_costs = ForwardCost.flat(_WIDEST) if whole_drafts else None
    engine = Engine(model, tokenizer, drafter, max_rows=1, width_costs=width_costs)
    params = SamplingParams(max_tokens=max_tokens, temperature=0.0)

    def decode(prompt: Prompt) -> Decoded:
        references = [prompt.references] if with_references and prompt.references else None
        (completion,) = engine.generate([prompt.token_ids], params, references=references)
        stats = completion.stats
        decoded = Decoded(completion.token_ids, completion.text, stats.num_forwards)
        if stats.first_token_seconds is None or stats.finished_seconds is None:
            return decoded
        return replace(
            decoded,
            decode_seconds=stats.finished_seconds - stats.first_token_seconds,
            num_decoded=stats.num_tokens - stats.tokens_by_forward[0],
        )

    return Way(decode), engine


def assisted_way(model: Any, draft: Any, tokenizer: Any, max_tokens: int) -> Way:
    """``transformers``' assisted decoding; counts the forwards of the large model."""
    forwards = 0

    def count(*_: Any) -> None:
        nonlocal forwards
        forwards += 1

    model.register_forward_hook(count)

    def decode(prompt: Prompt) -> Decoded:
        nonlocal forwards
        forwards = 0
        input_ids = torch.tensor([prompt.token_ids])
        output = model.generate(
            input_ids,
            attention_mask=torch.ones_like(input_ids),
            assistant_model=draft,
            do_sample=False,
            max_new_tokens=max_tokens,
        )
        token_ids = output[0, len(prompt.token_ids) :].tolist()
        # The first forward reads the prompt and verifies the first draft, so it counts as a decode forward.
        return Decoded(token_ids, tokenizer.decode(token_ids, skip_special_tokens=True), forwards)

    return Way(decode)


def tuned_and_plain_ways(
    plain: Any | None, tuned: Any, tokenizer: Any, block_size: int, max_tokens: int, *, num_recycled: int = 0
) -> tuple[dict[str, Way], list[Engine]]:
    """The compared methods, the baseline first, and the engines to close afterwards.

    Recycled n-grams help if answers quote their prompts; otherwise they only make forwards wider. Without a
    plain model its method is omitted. Jacobi verifies whole drafts, so its tokens per forward are a property
    of the model and comparable; combined drafts are cut, as by default, to what pays off on this machine.
    """
    drafters: dict[str, tuple[Any, str | Drafter]] = {
        BASELINE: (tuned, "autoregressive"),
        **({} if plain is None else {"jacobi_plain": (plain, Jacobi(block_size, num_recycled))}),
        "jacobi_tuned": (tuned, Jacobi(block_size, num_recycled)),
        "lookahead_tuned": (tuned, Lookahead()),
        "combined_tuned": (
            tuned,
            Combined([ReferenceCopy(), Jacobi(block_size, num_recycled), Lookahead()]),
        ),
    }
    ways: dict[str, Way] = {}
    engines: list[Engine] = []
    for name, (model, drafter) in drafters.items():
        is_whole = name.startswith("jacobi")
        ways[name], engine = engine_way(model, tokenizer, drafter, max_tokens, whole_drafts=is_whole)
        engines.append(engine)
    return ways, engines


def run_alternating(name: str, ways: Mapping[str, Way], prompts: Sequence[Prompt]) -> None:
    """Run every method on each prompt in turn, so that other load on the machine affects all of them."""
    for way in ways.values():
        way.decode(prompts[0])  # warm-up
    for prompt in track(prompts, name, console=Console(stderr=True)):
        for way in ways.values():
            way.run(prompt)


def figures_of(ways: Mapping[str, Way]) -> dict[str, Any]:
    """Tokens per forward, speed over the baseline, and the share of answers that drafts left unchanged."""
    baseline = ways[BASELINE]
    drafted = ("jacobi_tuned", "lookahead_tuned", "combined_tuned")
    measured = [kind for kind in WAYS if kind in ways]
    return {
        "tokens_per_forward": {kind: round(ways[kind].tokens_per_forward, 3) for kind in measured},
        "speedup": {
            kind: round(ways[kind].tokens_per_second / baseline.tokens_per_second, 3) for kind in measured
        },
        "decode_speedup": {
            kind: round(ways[kind].decode_rate / (baseline.decode_rate or 1.0), 3) for kind in measured
        },
        "num_cases": len(baseline.decoded),
        "tokens_per_answer": round(baseline.num_tokens / len(baseline.decoded), 1),
        "same_as_autoregressive": share_the_same([ways[kind] for kind in drafted], baseline),
    }


def share_the_same(ways: Sequence[Way], baseline: Way) -> float:
    """The share of answers that equal the baseline's token by token."""
    same = [
        one.token_ids == other.token_ids
        for way in ways
        for one, other in zip(way.decoded, baseline.decoded, strict=True)
    ]
    return round(sum(same) / len(same), 4)


@dataclass(frozen=True, slots=True)
class Trajectory:
    """One answer and the Jacobi iterates it was decoded from.

    Attributes:
        answer_ids: The fixed point, including its end token if it has one.
        starts: For each iterate, the index of its first token in the answer.
        iterates: The guesses of each forward, in the order of decoding.
    """

    prompt_ids: tuple[int, ...]
    answer_ids: tuple[int, ...]
    starts: tuple[int, ...] = ()
    iterates: tuple[tuple[int, ...], ...] = ()


def trajectory_counts(
    model: Any, tokenizer: Any, prompts: Sequence[Prompt], block_size: int, max_tokens: int
) -> dict[str, float]:
    """Fast-forwarded and stationary tokens per forward."""
    params = SamplingParams(max_tokens=max_tokens, temperature=0.0)
    with Engine(model, tokenizer, Recorder(Jacobi(block_size, num_recycled=0))) as engine:
        recorded: list[Trajectory] = []
        num_accepted = 0
        for completion, trajectory in decode_recorded(engine, [p.token_ids for p in prompts], params):
            recorded.append(trajectory)
            num_accepted += completion.stats.num_accepted
    num_forwards = sum(len(trajectory.iterates) for trajectory in recorded)
    return {
        "fast_forwarded": round(num_accepted / num_forwards, 3),
        "stationary": round(sum(map(num_stationary, recorded)) / num_forwards, 3),
    }


class Recorder:
    """Records each row's guesses before each forward, of a drafter that proposes chains, such as Jacobi.

    ``iterates`` are, for each row, the position in the answer and the guesses before each forward.
    """

    def __init__(self, drafter: Drafter) -> None:
        self.drafter = drafter
        self.iterates: PerRow[list[tuple[int, tuple[int, ...]]]] = PerRow(lambda _: [])

    def propose(self, rows: Sequence[RowView]) -> Sequence[Draft]:
        """The recorded drafter's drafts."""
        drafts = self.drafter.propose(rows)
        for row, draft in zip(rows, drafts, strict=True):
            start = len(row.token_ids) - row.num_prompt_tokens
            self.iterates[row].append((start, draft.token_ids))
        return drafts

    def observe(self, rows: Sequence[RowView], outcomes: Sequence[Outcome]) -> None:
        """Passed on to the recorded drafter."""
        self.drafter.observe(rows, outcomes)


def decode_recorded(
    engine: Engine, prompts: Sequence[Sequence[int]], params: SamplingParams
) -> Iterator[tuple[Completion, Trajectory]]:
    """Decode prompts with an engine whose drafter is a :class:`Recorder`; yields in the prompts' order.

    Raises:
        TypeError: The engine's drafter is no :class:`Recorder`.
        ValueError: A prompt is empty or too long; nothing was run then.
    """
    recorder = engine.drafter
    if not isinstance(recorder, Recorder):
        raise TypeError(f"the engine's drafter must be a Recorder, got {type(recorder).__name__}")
    mailboxes = [ThreadMailbox() for _ in prompts]
    rows = [
        engine.make_row(prompt, mailbox.put, params=params)
        for prompt, mailbox in zip(prompts, mailboxes, strict=True)
    ]
    try:
        engine.submit(rows)
        for prompt, row, mailbox in zip(prompts, rows, mailboxes, strict=True):
            completion = mailbox.completion()
            starts, guesses = zip(*recorder.iterates[row], strict=True)
            yield completion, Trajectory(tuple(prompt), tuple(completion.token_ids), starts, guesses)
    finally:
        engine.cancel(rows)


def num_stationary(trajectory: Trajectory) -> int:
    """Guesses after a wrong one that were right and stayed right, summed over the forwards.

    Each position of the answer counts at most once: if an earlier guess was wrong in the forward from which
    on the position stayed right.
    """
    answer = trajectory.answer_ids
    came_early: dict[int, bool] = {}  # by position that is right so far: whether behind a wrong guess
    for start, guess in zip(trajectory.starts, trajectory.iterates, strict=True):
        wrong_before = False
        for position, (token, right) in enumerate(zip(guess, answer[start:], strict=False), start):
            if token == right:
                came_early.setdefault(position, wrong_before)
            else:
                came_early.pop(position, None)
                wrong_before = True
    return sum(came_early.values())
