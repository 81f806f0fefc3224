"""Priority by predicted length in vLLM, against first come: a paced replay, in steps of vLLM.

Requests arrive at random (Poisson) and keep vLLM's slots busy for a share of the time. Their lengths are
those of Vicuna-7B's answers to Alpaca prompts, divided by ``--scale``; the model must write exactly so many
tokens. What it writes does not matter, so no forward is computed: what is measured is vLLM's scheduler. All
policies replay the same arrivals in one process of vLLM. Priority is the deadline of
:class:`~benchmarks.length_priority.LengthPriority`; predictions are the mean of answers to
the same prompt at other temperatures, as in :mod:`benchmarks.replicas`, which simulates this. The bound is
the shortest first with lengths that are known.

A step is a forward of all running requests. Counted in steps, the result depends neither on the model nor on
what else the machine does. Runs in this environment; vLLM has its own.

``python -m benchmarks.priority_vllm --save``
"""

from __future__ import annotations

import argparse
import json
import math
import random
import statistics
import tempfile
from collections.abc import Sequence
from concurrent.futures import Future
from pathlib import Path
from typing import Any

from benchmarks.peers_vllm import ROOT, in_child
from benchmarks.replicas import DATA
from benchmarks.results import save
from benchmarks.scheduling import predict_from_siblings, read_answers

# vLLM's kernels for CPUs take heads of at least 32.
TINY_MODEL = {
    "architectures": ["LlamaForCausalLM"],
    "model_type": "llama",
    "hidden_size": 32,
    "intermediate_size": 32,
    "num_hidden_layers": 1,
    "num_attention_heads": 1,
    "num_key_value_heads": 1,
    "vocab_size": 64,
    "max_position_embeddings": 1024,
}
NUM_PROMPT_TOKENS = 8


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawTextHelpFormatter)
    parser.add_argument("--python", default=str(ROOT / ".vllm" / "bin" / "python"), help="vLLM's environment")
    parser.add_argument("--slots", type=int, default=4, help="vLLM's max_num_seqs (%(default)s)")
    parser.add_argument("--load", type=float, default=0.9)
    parser.add_argument("--requests", type=int, default=20_000)
    parser.add_argument("--scale", type=float, default=4, help="lengths are divided by it (%(default)s)")
    parser.add_argument("--stretches", type=float, nargs="+", default=[4, 16])
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--save", action="store_true", help="keep the result")
    parser.add_argument("--child", help=argparse.SUPPRESS)
    options = parser.parse_args()
    if options.child:
        print(json.dumps(_run_vllm(json.loads(Path(options.child).read_text("utf-8")))))
        return
    summary = compare(options)
    print(json.dumps(summary, indent=1))
    if options.save:
        print(save("priority_vllm", summary, []))


def compare(options: argparse.Namespace) -> dict[str, Any]:
    """All policies on the same arrivals."""
    rng = random.Random(options.seed)
    lengths, siblings = read_answers(DATA)
    predictions = predict_from_siblings(siblings)
    drawn = [rng.randrange(len(lengths)) for _ in range(options.requests)]
    num_tokens = [math.ceil(lengths[each] / options.scale) for each in drawn]
    predicted = [predictions[each].num_tokens / options.scale for each in drawn]
    rate = options.load * options.slots / statistics.mean(num_tokens)  # of requests, each step
    arrivals: list[float] = []
    for _ in drawn:
        arrivals.append((arrivals[-1] if arrivals else 0.0) + rng.expovariate(rate))
    policies = {"first_come": arrivals, "bound": num_tokens} | {
        f"stretch_{stretch:g}": [
            arrival + stretch * each for arrival, each in zip(arrivals, predicted, strict=True)
        ]
        for stretch in options.stretches
    }
    work = {
        "slots": options.slots,
        "num_tokens": num_tokens,
        "arrivals": arrivals,
        "priorities": {
            policy: [round(1000 * each) for each in deadlines] for policy, deadlines in policies.items()
        },
    }
    with tempfile.TemporaryDirectory() as folder:
        (Path(folder) / "config.json").write_text(json.dumps(TINY_MODEL), "utf-8")
        found = in_child(options.python, "benchmarks.priority_vllm", {**work, "model": folder})
    summary: dict[str, Any] = {
        name: getattr(options, name) for name in ("slots", "load", "requests", "scale", "seed")
    }
    summary |= {policy: _summarize(times, arrivals, num_tokens) for policy, times in found.items()}
    for policy in policies:
        gain = 1 - summary[policy]["mean_steps"] / summary["first_come"]["mean_steps"]
        summary[policy]["mean_under_first_come"] = round(gain, 3)
    return summary


def _summarize(
    times: Sequence[tuple[int, int]], arrivals: Sequence[float], num_tokens: Sequence[int]
) -> dict[str, float]:
    """What requests experienced, from the steps after which each had its first token and its last."""
    totals = sorted(last - arrived for arrived, (_, last) in zip(arrivals, times, strict=True))
    waits = [  # as multiples of the time alone; a step writes a token
        (first - 1 - arrived) / alone
        for arrived, alone, (first, _) in zip(arrivals, num_tokens, times, strict=True)
    ]
    return {
        "mean_steps": round(statistics.mean(totals), 1),
        "p99_steps": round(totals[len(totals) * 99 // 100], 1),
        "tokens_per_step": round(sum(num_tokens) / max(last for _, last in times), 2),
        "share_above_5": round(sum(wait > 5 for wait in waits) / len(waits), 4),
        "worst_wait": round(max(waits), 1),
    }


def _run_vllm(work: dict[str, Any]) -> dict[str, list[tuple[int, int]]]:
    """For each policy, the steps after which each request had its first token and its last."""
    from vllm import LLM, SamplingParams

    llm = LLM(
        work["model"],
        load_format="dummy",
        skip_tokenizer_init=True,
        dtype="float32",
        enforce_eager=True,
        max_model_len=max(work["num_tokens"]) + NUM_PROMPT_TOKENS + 1,
        max_num_seqs=work["slots"],
        scheduling_policy="priority",
        async_scheduling=False,
    )
    engine = llm.llm_engine
    engine.engine_core.engine_core.model_executor.execute_model = _compute_nothing
    found: dict[str, list[tuple[int, int]]] = {}
    for policy, priorities in work["priorities"].items():
        firsts: dict[int, int] = {}
        lasts: dict[int, int] = {}
        step = num_arrived = 0
        while len(lasts) < len(priorities):
            if not engine.has_unfinished_requests():  # nothing happens until somebody comes
                step = max(step, math.ceil(work["arrivals"][num_arrived]))
            while num_arrived < len(priorities) and work["arrivals"][num_arrived] <= step:
                params = SamplingParams(
                    temperature=0.0,
                    max_tokens=work["num_tokens"][num_arrived],
                    ignore_eos=True,
                    detokenize=False,
                )
                engine.add_request(
                    f"{policy} {num_arrived}",
                    {"prompt_token_ids": [1] * NUM_PROMPT_TOKENS},
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
        found[policy] = [(firsts[number], lasts[number]) for number in range(len(priorities))]
    return found


def _compute_nothing(scheduled: Any, non_block: bool = False) -> Any:
    """What vLLM's executor returns for the requests of a step, each of which has written token 0."""
    from vllm.v1.outputs import ModelRunnerOutput

    names = list(scheduled.num_scheduled_tokens)
    output = ModelRunnerOutput(
        names, {name: index for index, name in enumerate(names)}, sampled_token_ids=[[0] for _ in names]
    )
    if not non_block:
        return output
    done: Future[ModelRunnerOutput] = Future()
    done.set_result(output)
    return done


if __name__ == "__main__":
    main()
