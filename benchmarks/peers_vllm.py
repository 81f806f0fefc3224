"""Reference copy inside vLLM, beside vLLM's own ``ngram`` and ``suffix``: tokens a forward and a second.

The default model answers questions on the documents of the reference-copy paper, greedily and freely, in one
process of vLLM for each method, all with the same threads. Methods alternate; of several rounds each method's
fastest counts. Runs in this project's environment; vLLM has its own (``make test-vllm``).

``python -m benchmarks.peers_vllm --save``
"""

from __future__ import annotations

import argparse
import json
import os
import subprocess
import tempfile
import time
from functools import partial
from pathlib import Path
from typing import Any

from benchmarks.results import save
from local_backend.vllm.proposer import ReferenceCopyProposer

ROOT = Path(__file__).parents[1]
DATA = ROOT.parent / "shared" / "data" / "reference"
METHODS: dict[str, dict[str, Any]] = {
    "none": {},
    "ngram": {
        "method": "ngram",
        "num_speculative_tokens": 8,
        "prompt_lookup_min": 2,
        "prompt_lookup_max": 5,
    },
    "ngram_24": {
        "method": "ngram",
        "num_speculative_tokens": 24,
        "prompt_lookup_min": 2,
        "prompt_lookup_max": 5,
    },
    "suffix": {"method": "suffix", "num_speculative_tokens": 24},
    "ours": {
        "method": "custom_class",
        "model": "local_backend.vllm.proposer.ReferenceCopyProposer",
        "num_speculative_tokens": 32,
    },
    "ours_long": {
        "method": "custom_class",
        "model": "benchmarks.peers_vllm.LongDrafts",
        "num_speculative_tokens": 32,
    },
}
"""``speculative_config`` of each method: ``ngram`` with short and long drafts, ``suffix`` as vLLM sets it.

``ours`` drafts as long as the time of steps allows; ``ours_long`` as on a GPU, where few tokens cost nothing.
"""


class LongDrafts(ReferenceCopyProposer):
    """Drafts without regard to what the steps cost."""

    def min_probability(self, num_requests: int) -> float:
        """A low one."""
        return 0.05


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawTextHelpFormatter)
    parser.add_argument("--python", default=str(ROOT / ".vllm" / "bin" / "python"), help="vLLM's environment")
    parser.add_argument("--methods", nargs="+", choices=METHODS, default=list(METHODS))
    parser.add_argument("--cases", type=int, default=24, help="prompts (%(default)s)")
    parser.add_argument("--alone", type=int, default=8, help="of these, one at a time (%(default)s)")
    parser.add_argument("--characters", type=int, default=2500, help="of documents, at most (%(default)s)")
    parser.add_argument("--max-tokens", type=int, default=64)
    parser.add_argument("--rounds", type=int, default=1, help="alternating (%(default)s)")
    parser.add_argument("--save", action="store_true", help="keep the result")
    parser.add_argument("--child", help=argparse.SUPPRESS)
    options = parser.parse_args()
    if options.child:
        print(json.dumps(_run_vllm(json.loads(Path(options.child).read_text("utf-8")))))
        return
    summary, cases = compare(options)
    print(json.dumps(summary))
    if options.save:
        print(save("peers_vllm", summary, cases))


def prompts(num_cases: int, max_characters: int = 2500) -> list[str]:
    """Questions on the beginning of documents, half of them summaries of news, as the user's turn."""
    files = [(DATA / f"{name}.jsonl").read_text("utf-8").splitlines() for name in ("rag_dev", "cnndm_dev")]
    found: list[str] = []
    for lines in zip(*files, strict=False):
        for case in map(json.loads, lines):
            documents = "\n\n".join(case["documents"])[:max_characters]
            found.append(f"{documents}\n\n{case['query']}\nAnswer with sentences from the text above.")
    return found[:num_cases]


def compare(options: argparse.Namespace) -> tuple[dict[str, Any], list[dict[str, Any]]]:
    """Run every method on the same prompts."""
    import torch

    from local_backend.models.default_model import default_model_folder

    rounds: list[dict[str, dict[str, Any]]] = []
    for _ in range(options.rounds):
        rounds.append({})
        for method in options.methods:
            work = {
                "model": str(default_model_folder(torch.float32)),
                "speculative": METHODS[method],
                "prompts": prompts(options.cases, options.characters),
                "num_alone": options.alone,
                "max_tokens": options.max_tokens,
            }
            measured = in_child(options.python, "benchmarks.peers_vllm", work)
            print(method, {key: value for key, value in measured.items() if key != "answers"}, flush=True)
            rounds[-1][method] = measured
    found = {
        method: {
            **rounds[0][method],
            **{
                at: max((each[method][at] for each in rounds), key=lambda one: one["tokens_per_second"])
                for at in ("at_1", "at_16")
            },
        }
        for method in options.methods
    }
    plain = found.get("none", {}).get("answers")
    for measured in found.values():
        answers = measured.pop("answers")
        measured["num_equal"] = None if plain is None else sum(map(list.__eq__, answers, plain))
    summary: dict[str, Any] = {
        **{f"num_{name}": getattr(options, name) for name in ("cases", "alone", "characters", "rounds")},
        "max_tokens": options.max_tokens,
        **found,
    }
    peers = [name for name in ("ngram", "ngram_24", "suffix") if name in found]
    for ours in found.keys() & {"ours", "ours_long"} if peers else ():
        for at in ("at_1", "at_16"):
            for figure in ("tokens_per_forward", "tokens_per_second", "tokens_per_cpu_second"):
                best = max(found[name][at][figure] for name in peers)
                summary[f"{ours}_{figure}_{at}_over_the_better"] = round(found[ours][at][figure] / best, 3)
    return summary, [
        {"round": number, "method": method, **{at: each[at] for at in ("at_1", "at_16")}}
        for number, of_round in enumerate(rounds)
        for method, each in of_round.items()
    ]


def in_child(python: str, module: str, work: dict[str, Any]) -> dict[str, Any]:
    """What ``module``, run with ``--child`` in vLLM's environment, prints in its last line for ``work``."""
    with tempfile.TemporaryDirectory() as folder:
        file = Path(folder) / "work.json"
        file.write_text(json.dumps(work), "utf-8")
        done = subprocess.run(
            [python, "-m", module, "--child", str(file)],
            cwd=ROOT,
            env={
                **os.environ,
                "PYTHONPATH": str(ROOT),
                "HF_HUB_OFFLINE": "1",
                "VLLM_NO_USAGE_STATS": "1",
                "VLLM_CPU_KVCACHE_SPACE": "2",
                "VLLM_ENABLE_V1_MULTIPROCESSING": "0",
                "VLLM_LOGGING_LEVEL": "ERROR",
            },
            capture_output=True,
            text=True,
            check=False,
        )
    if done.returncode:
        raise RuntimeError(f"vLLM failed in {module}:\n{done.stderr[-3000:]}")
    return dict(json.loads(done.stdout.splitlines()[-1]))


def _run_vllm(work: dict[str, Any]) -> dict[str, Any]:
    """Answer prompts with vLLM in this process: the first ones one at a time, the others 16 at once.

    No prompt is answered twice, as what is answered again is copied whole. All are read before the clock
    starts: what is compared is decoding.
    """
    from vllm import LLM

    llm = LLM(
        work["model"],
        dtype="float32",
        enforce_eager=True,
        max_model_len=2048,
        max_num_seqs=16,
        enable_prefix_caching=True,
        speculative_config=work["speculative"] or None,
    )
    encode = partial(llm.get_tokenizer().apply_chat_template, add_generation_prompt=True, return_dict=False)
    prompts = [list(encode([{"role": "user", "content": text}])) for text in work["prompts"]]
    _answer(llm.llm_engine, prompts, 1)
    answers: list[list[int]] = []
    found: dict[str, Any] = {}
    alone, together = prompts[: work["num_alone"]], prompts[work["num_alone"] :]
    for name, batches in (("at_1", [[prompt] for prompt in alone]), ("at_16", [together])):
        num_tokens = num_forwards = 0
        started, started_cpu = time.perf_counter(), time.process_time()
        for batch in batches:
            written, forwards = _answer(llm.llm_engine, batch, work["max_tokens"])
            answers.extend(written)
            num_tokens += sum(map(len, written))
            num_forwards += forwards
        seconds, cpu_seconds = time.perf_counter() - started, time.process_time() - started_cpu
        found[name] = {
            "tokens_per_forward": round(num_tokens / num_forwards, 3),
            "tokens_per_second": round(num_tokens / seconds, 2),
            # Of all threads: with OMP_NUM_THREADS=1 it says what others on the machine do not change.
            "tokens_per_cpu_second": round(num_tokens / cpu_seconds, 2),
            "num_tokens": num_tokens,
        }
    return {**found, "answers": answers}


def _answer(engine: Any, prompts: list[list[int]], max_tokens: int) -> tuple[list[list[int]], int]:
    """The answers, and the forwards of all requests together."""
    from vllm import SamplingParams
    from vllm.sampling_params import RequestOutputKind

    params = SamplingParams(temperature=0.0, max_tokens=max_tokens, output_kind=RequestOutputKind.DELTA)
    for number, prompt in enumerate(prompts):
        engine.add_request(f"{max_tokens} {id(prompt)} {number}", {"prompt_token_ids": prompt}, params)
    answers: list[list[int]] = [[] for _ in prompts]
    num_forwards = -len(prompts)  # reading a prompt is none
    while engine.has_unfinished_requests():
        for output in engine.step():
            num_forwards += 1
            answers[int(output.request_id.split()[-1])].extend(output.outputs[0].token_ids)
    return answers, num_forwards


if __name__ == "__main__":
    main()
