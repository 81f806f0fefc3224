"""Decodes with llama.cpp in an environment of its own: one JSON line in, one out, for each request.

Run by :mod:`benchmarks.peers_cpu` as ``python llama_cpp_worker.py MODEL THREADS IS_LOOKUP``; knows no
other decoding methods. Needs the package ``xllamacpp``, which has llama.cpp in it.
"""

import importlib
import json
import sys
from pathlib import Path
from typing import Any

xllamacpp: Any = importlib.import_module("xllamacpp")  # not installed where types are checked

_CONTEXT_TOKENS = 4096


def server_of(model: str, num_threads: int, *, is_lookup: bool) -> Any:
    """llama.cpp's server, in this process."""
    parameters = xllamacpp.CommonParams()
    parameters.model.path = model
    parameters.n_ctx = _CONTEXT_TOKENS
    parameters.n_parallel = 1
    parameters.cpuparams.n_threads = parameters.cpuparams_batch.n_threads = num_threads
    parameters.cache_prompt = False
    parameters.verbosity = -1
    if is_lookup:
        kinds = xllamacpp.common_speculative_type
        parameters.speculative.types = [kinds.COMMON_SPECULATIVE_TYPE_NGRAM_SIMPLE]
        parameters.speculative.ngram_simple.size_n = 2  # as transformers' prompt lookup
        parameters.speculative.ngram_simple.size_m = 10
    return xllamacpp.Server(parameters)


def decoded(server: Any, request: dict[str, Any]) -> dict[str, Any]:
    """Greedy decoding of one request, with llama.cpp's own timings."""
    answer = server.handle_completions(
        {
            "prompt": request["prompt"],
            "n_predict": request["num_tokens"],
            "temperature": 0.0,
            "top_k": 1,
            "cache_prompt": False,
            "return_tokens": True,
        }
    )
    timings = answer["timings"]
    pages = int(Path("/proc/self/statm").read_text().split()[1])
    return {
        "token_ids": answer["tokens"],
        "prompt_seconds": timings["prompt_ms"] / 1000,
        "decode_seconds": timings["predicted_ms"] / 1000,
        "num_tokens": timings["predicted_n"],
        "resident_bytes": pages * 4096,
    }


def main() -> None:
    model, num_threads, is_lookup = sys.argv[1:4]
    server = server_of(model, int(num_threads), is_lookup=is_lookup == "1")
    print(json.dumps({"is_ready": True}), flush=True)
    for line in sys.stdin:
        print(json.dumps(decoded(server, json.loads(line))), flush=True)


if __name__ == "__main__":
    main()
