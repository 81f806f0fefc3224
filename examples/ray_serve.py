r"""A model, plainly and point by point, served by Ray Serve: replicas that grow and shrink with the load.

Needs the ``ray`` extra. ``python examples/ray_serve.py`` serves the default model on this machine, and
``serve deploy`` the same application on a cluster. Ask it as any OpenAI server, streamed or not; the model
``NAME`` answers plainly, ``NAME:sot`` point by point::

    curl http://127.0.0.1:8000/v1/chat/completions -H "Content-Type: application/json" -d \
        '{"model": "model:sot", "stream": true, "messages": [{"role": "user", "content": "Why sleep?"}]}'
"""

from __future__ import annotations

import os

# The first import of Ray takes longer than the 5 seconds after which its proxy is given up.
os.environ.setdefault("RAY_SERVE_PROXY_READY_CHECK_TIMEOUT_S", "60")

from ray import serve
from starlette.applications import Starlette

from local_backend import ChatLocal
from sot_chains.serving.app import create_app

MODEL = os.environ.get("MODEL")  # folder, GGUF file or hub name; the default model if not set
HOST, PORT = os.environ.get("HOST", "127.0.0.1"), int(os.environ.get("PORT", "8000"))
API_KEY = os.environ.get("SOT_API_KEY")
NUM_GPUS = float(os.environ.get("NUM_GPUS", "0"))  # of a replica
MAX_REPLICAS = int(os.environ.get("MAX_REPLICAS", "1"))


def build() -> Starlette:
    """The application of one replica, with a model of its own."""
    device = "cuda" if NUM_GPUS else None
    chat = ChatLocal.from_pretrained(MODEL, drafter="reference_copy", device=device, max_tokens=512)
    return create_app(chat, name="model", api_key=API_KEY, host=HOST)


replicas = serve.deployment(
    serve.ingress(build)(),
    name="model",
    max_ongoing_requests=64,  # rows of a forward; further requests wait in Ray's queue
    ray_actor_options={"num_cpus": 1, "num_gpus": NUM_GPUS},
    autoscaling_config={
        "min_replicas": 1,
        "max_replicas": MAX_REPLICAS,
        "target_ongoing_requests": 16,
        "downscale_delay_s": 300,  # loading a model is dear
    },
)
application = replicas.bind()


if __name__ == "__main__":
    serve.start(http_options={"host": HOST, "port": PORT})
    serve.run(application, route_prefix="/", blocking=True)
