"""An HTTP server that any OpenAI client can ask, and the page that shows how answers are written.

``app`` and what it imports need the extra ``web`` (FastAPI, uvicorn, prometheus-client).
"""

from sot_chains.serving.loading import Copying, Extras, find_model

__all__ = ["Copying", "Extras", "find_model"]
