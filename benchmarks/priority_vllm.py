"""Priority by predicted length on a running vLLM, against first come: a paced replay.

Requests arrive at random (Poisson) at a share of what the server can do with all slots busy, which is
measured first. Their lengths are those of Vicuna-7B's answers to Alpaca prompts, divided by ``--scale`` to
fit in minutes; the model must write exactly so many tokens. Both ways replay the same arrivals. Predicted is
the mean of answers to the same prompt at other temperatures, as in :mod:`benchmarks.replicas`, a simulation.
Start vLLM first::

    vllm serve MODEL --scheduling-policy priority --max-num-seqs 4
    python -m benchmarks.priority_vllm --base-url http://127.0.0.1:8000/v1 --model MODEL --slots 4 --save
"""

from __future__ import annotations

import argparse
import asyncio
import json
import math
import random
import statistics
import time
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

from langchain_openai import ChatOpenAI
from pydantic import SecretStr

from benchmarks.replicas import DATA
from benchmarks.results import save
from benchmarks.scheduling import predict_from_siblings, read_answers
from local_backend.integrations.length_priority import LengthPriority
from local_backend.requests.sampling import SamplingParams
from local_backend.scheduling.lengths import Prediction


@dataclass(frozen=True, slots=True)
class Request:
    """One request of the trace; its prompt is its number."""

    number: int
    num_tokens: int
    predicted_tokens: float


class KnownPredictions:
    """Predicts what the trace says of a prompt."""

    def __init__(self, requests: Sequence[Request]) -> None:
        self._requests = requests

    def predict(
        self, prompts: Sequence[Sequence[int]], params: Sequence[SamplingParams] | None = None
    ) -> list[Prediction | None]:
        """See :class:`~local_backend.scheduling.lengths.LengthPredictor`."""
        texts = [bytes(prompt).decode() for prompt in prompts]
        found = [self._requests[int(text.rpartition(" ")[2])].predicted_tokens for text in texts]
        return [Prediction(each, each) for each in found]


class Server:
    """The server as clients see it: each request is streamed, with the priority of ``stretch``."""

    def __init__(self, options: argparse.Namespace, requests: Sequence[Request]) -> None:
        self._chat = ChatOpenAI(
            model=options.model,
            base_url=options.base_url,
            api_key=SecretStr("none"),
            temperature=0.0,
            timeout=3600,
            max_retries=0,
        )
        self._predictions = KnownPredictions(requests)

    async def ask(self, request: Request, stretch: float, tokens_per_second: float) -> tuple[float, float]:
        """Seconds until the first token, and until the last."""
        model = LengthPriority(
            model=self._chat,
            predictor=self._predictions,
            tokens_per_second=tokens_per_second,
            stretch=stretch,
        )
        # Not as an argument of the call, from which the priority could learn the true length.
        body = {"max_tokens": request.num_tokens, "ignore_eos": True}
        begin, first = time.perf_counter(), 0.0
        async for _ in model.astream(f"Write about the number {request.number}", extra_body=body):
            first = first or time.perf_counter() - begin
        return first, time.perf_counter() - begin


async def measure(options: argparse.Namespace) -> dict[str, Any]:
    """Both ways, one after the other."""
    rng = random.Random(options.seed)
    lengths, siblings = read_answers(DATA)
    predictions = predict_from_siblings(siblings)
    drawn = [rng.randrange(len(lengths)) for _ in range(options.requests)]
    requests = [
        Request(
            number, math.ceil(lengths[each] / options.scale), predictions[each].num_tokens / options.scale
        )
        for number, each in enumerate(drawn)
    ]
    server = Server(options, requests)
    await server.ask(requests[0], 0, 1)
    alone_first, alone_last = await server.ask(Request(0, 64, 64), 0, 1)
    tokens_per_second = 63 / (alone_last - alone_first)
    # Longest first, so that all slots are busy nearly to the end.
    full = sorted(requests[: 12 * options.slots], key=lambda request: -request.num_tokens)
    begin = time.perf_counter()
    await asyncio.gather(*(server.ask(request, 0, 1) for request in full))
    capacity = len(full) / (time.perf_counter() - begin)  # of requests like these, each second
    capacity *= statistics.mean(r.num_tokens for r in full) / statistics.mean(r.num_tokens for r in requests)
    print(f"alone {tokens_per_second:.1f} tokens/s; {capacity:.2f} requests/s at most", flush=True)
    arrivals = [rng.expovariate(options.load * capacity) for _ in requests]
    summary: dict[str, Any] = {
        **{name: getattr(options, name) for name in ("slots", "load", "requests", "scale", "stretch")},
        "tokens_per_second_alone": round(tokens_per_second, 1),
        "requests_per_second": round(capacity, 3),
    }

    async def arrive(request: Request, delay: float, stretch: float) -> tuple[float, float]:
        await asyncio.sleep(delay)
        return await server.ask(request, stretch, tokens_per_second)

    for way, stretch in (("first_come", 0.0), ("priority", options.stretch)):
        begin, now, tasks = time.perf_counter(), 0.0, []
        for request, gap in zip(requests, arrivals, strict=True):
            now += gap
            tasks.append(arrive(request, now, stretch))
        times = await asyncio.gather(*tasks)
        seconds = time.perf_counter() - begin
        totals = sorted(last for _, last in times)
        waits = [  # as multiples of the time alone
            max(0.0, first - alone_first) / (alone_first + request.num_tokens / tokens_per_second)
            for request, (first, _) in zip(requests, times, strict=True)
        ]
        summary[way] = {
            "mean_seconds": round(statistics.mean(totals), 2),
            "p99_seconds": round(totals[len(totals) * 99 // 100], 2),
            "tokens_per_second": round(sum(r.num_tokens for r in requests) / seconds, 1),
            "share_above_5": round(sum(wait > 5 for wait in waits) / len(waits), 4),
            "worst_wait": round(max(waits), 1),
        }
        print(way, summary[way], flush=True)
    gain = 1 - summary["priority"]["mean_seconds"] / summary["first_come"]["mean_seconds"]
    return {**summary, "mean_under_first_come": round(gain, 3)}


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawTextHelpFormatter)
    parser.add_argument("--base-url", default="http://127.0.0.1:8000/v1")
    parser.add_argument("--model", default="default", help="the name that vLLM serves it as (%(default)s)")
    parser.add_argument("--slots", type=int, default=4, help="vLLM's --max-num-seqs (%(default)s)")
    parser.add_argument("--load", type=float, default=0.9)
    parser.add_argument("--requests", type=int, default=240)
    parser.add_argument("--scale", type=float, default=4, help="lengths are divided by it (%(default)s)")
    parser.add_argument("--stretch", type=float, default=16)
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--save", action="store_true", help="keep the result")
    options = parser.parse_args()
    summary = asyncio.run(measure(options))
    print(json.dumps(summary))
    if options.save:
        print(save("priority_vllm", summary, []))


if __name__ == "__main__":
    main()
