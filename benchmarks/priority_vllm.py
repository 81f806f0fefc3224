"""Priority by predicted length in vLLM, against first come: a paced replay, in steps of vLLM.

Requests arrive at random (Poisson) and keep vLLM's slots busy for a share of the time. Their lengths are
those of Vicuna-7B's answers to Alpaca prompts, divided by ``--scale``; the model must write exactly so many
tokens. Both ways replay the same arrivals in one process of vLLM. Priority is the deadline of
:class:`~local_backend.integrations.length_priority.LengthPriority`; predictions are the mean of answers to
the same prompt at other temperatures, as in :mod:`benchmarks.replicas`, which simulates this.

A step is a forward of all running requests, and all steps here take about the same time. Counted in steps,
the result does not depend on what else the machine does. Runs in this environment; vLLM has its own.

``python -m benchmarks.priority_vllm --save``
"""

from __future__ import annotations

import argparse
import json
import math
import random
import statistics
from pathlib import Path
from typing import Any

from benchmarks.peers_vllm import ROOT, in_child
from benchmarks.replicas import DATA
from benchmarks.results import save
from benchmarks.scheduling import predict_from_siblings, read_answers


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawTextHelpFormatter)
    parser.add_argument("--python", default=str(ROOT / ".vllm" / "bin" / "python"), help="vLLM's environment")
    parser.add_argument("--slots", type=int, default=4, help="vLLM's max_num_seqs (%(default)s)")
    parser.add_argument("--load", type=float, default=0.9)
    parser.add_argument("--requests", type=int, default=300)
    parser.add_argument("--scale", type=float, default=8, help="lengths are divided by it (%(default)s)")
    parser.add_argument("--stretch", type=float, default=16)
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--save", action="store_true", help="keep the result")
    parser.add_argument("--child", help=argparse.SUPPRESS)
    options = parser.parse_args()
    if options.child:
        print(json.dumps(_run_vllm(json.loads(Path(options.child).read_text("utf-8")))))
        return
    summary = compare(options)
    print(json.dumps(summary))
    if options.save:
        print(save("priority_vllm", summary, []))


def compare(options: argparse.Namespace) -> dict[str, Any]:
    """Both ways on the same arrivals."""
    import torch

    from local_backend.models.default_model import default_model_folder

    rng = random.Random(options.seed)
    lengths, siblings = read_answers(DATA)
    predictions = predict_from_siblings(siblings)
    drawn = [rng.randrange(len(lengths)) for _ in range(options.requests)]
    num_tokens = [math.ceil(lengths[each] / options.scale) for each in drawn]
    rate = options.load * options.slots / statistics.mean(num_tokens)  # of requests, each step
    arrivals: list[float] = []
    for _ in drawn:
        arrivals.append((arrivals[-1] if arrivals else 0.0) + rng.expovariate(rate))
    stretches = {"first_come": 0.0, "priority": options.stretch}
    work = {
        "model": str(default_model_folder(torch.float32)),
        "slots": options.slots,
        "num_tokens": num_tokens,
        "arrivals": arrivals,
        "priorities": {
            way: [
                round(1000 * (arrival + stretch * predictions[each].num_tokens / options.scale))
                for arrival, each in zip(arrivals, drawn, strict=True)
            ]
            for way, stretch in stretches.items()
        },
    }
    summary: dict[str, Any] = {
        name: getattr(options, name) for name in ("slots", "load", "requests", "scale", "stretch", "seed")
    }
    for way, times in in_child(options.python, "benchmarks.priority_vllm", work).items():
        totals = sorted(last - arrived for arrived, (_, last) in zip(arrivals, times, strict=True))
        waits = [  # as multiples of the time alone; a step writes a token
            (first - 1 - arrived) / alone
            for arrived, alone, (first, _) in zip(arrivals, num_tokens, times, strict=True)
        ]
        summary[way] = {
            "mean_steps": round(statistics.mean(totals), 1),
            "p99_steps": round(totals[len(totals) * 99 // 100], 1),
            "tokens_per_step": round(sum(num_tokens) / max(last for _, last in times), 2),
            "share_above_5": round(sum(wait > 5 for wait in waits) / len(waits), 4),
            "worst_wait": round(max(waits), 1),
        }
    gain = 1 - summary["priority"]["mean_steps"] / summary["first_come"]["mean_steps"]
    return {**summary, "mean_under_first_come": round(gain, 3)}


def _run_vllm(work: dict[str, Any]) -> dict[str, list[tuple[int, int]]]:
    """For each way, the steps after which each request had its first token and its last."""
    from vllm import LLM, SamplingParams

    llm = LLM(
        work["model"],
        dtype="float32",
        enforce_eager=True,
        max_model_len=256,
        max_num_seqs=work["slots"],
        scheduling_policy="priority",
    )
    engine, prompt = llm.llm_engine, llm.get_tokenizer().encode("Write about the number seven.")
    found: dict[str, list[tuple[int, int]]] = {}
    for way, priorities in work["priorities"].items():
        firsts: dict[int, int] = {}
        lasts: dict[int, int] = {}
        step = num_arrived = 0
        while len(lasts) < len(priorities):
            if not engine.has_unfinished_requests():  # nothing happens until somebody comes
                step = max(step, math.ceil(work["arrivals"][num_arrived]))
            while num_arrived < len(priorities) and work["arrivals"][num_arrived] <= step:
                params = SamplingParams(
                    temperature=0.0, max_tokens=work["num_tokens"][num_arrived], ignore_eos=True
                )
                engine.add_request(
                    f"{way} {num_arrived}",
                    {"prompt_token_ids": prompt},
                    params,
                    priority=priorities[num_arrived],
                )
                num_arrived += 1
            step += 1
            for output in engine.step():
                number = int(output.request_id.split()[-1])
                firsts.setdefault(number, step)
                if output.finished:
                    lasts[number] = step
        found[way] = [(firsts[number], lasts[number]) for number in range(len(priorities))]
    return found


if __name__ == "__main__":
    main()
