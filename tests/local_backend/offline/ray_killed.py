"""Two nodes answer prompts and one of them is killed in the middle; prints what came out, as JSON.

A script, so that Ray's threads and warnings are not those of pytest. Arguments: prompts, tokens of an answer.
"""

from __future__ import annotations

import json
import os
import signal
import sys
from typing import Any


def main(num_prompts: int, max_tokens: int) -> None:
    import ray
    from ray.cluster_utils import Cluster

    from local_backend import SamplingParams
    from local_backend.offline.ray import BatchSettings, parallel_batch

    node = {"num_cpus": 1, "object_store_memory": 100 * 2**20, "include_dashboard": False}
    cluster = Cluster(initialize_head=True, head_node_args=node)
    doomed = cluster.add_node(num_cpus=1, object_store_memory=100 * 2**20)
    ray.init(address=cluster.address, log_to_driver=False)
    cluster.wait_for_nodes()
    settings = BatchSettings(params=SamplingParams(max_tokens=max_tokens, temperature=0.0))
    records = [
        {"prompt": f"Number {number} plus {number % 7} is", "id": number} for number in range(num_prompts)
    ]
    answers = parallel_batch(records, settings, block_rows=25)
    rows: list[dict[str, Any]] = []
    num_at_kill = 0
    for row in answers.iter_rows():
        rows.append(row)
        if not num_at_kill and len(rows) >= num_prompts // 10:
            num_at_kill = len(rows)
            raylet = next(
                process.process
                for kind, processes in doomed.all_processes.items()
                for process in processes
                if kind == "raylet"
            )
            os.kill(raylet.pid, signal.SIGKILL)
    print(
        json.dumps(
            {
                "num_at_kill": num_at_kill,
                "num_nodes": sum(each["Alive"] for each in ray.nodes()),
                "ids": [json.loads(row["record"])["id"] for row in rows],
                "texts": [row["text"] for row in rows],
                "errors": [row["error"] for row in rows if row["error"] is not None],
            }
        )
    )
    ray.shutdown()
    cluster.shutdown()


if __name__ == "__main__":
    main(int(sys.argv[1]), int(sys.argv[2]))
