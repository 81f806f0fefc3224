"""An HTTP server that any OpenAI client can ask, and the page that shows how answers are written.

Needs the ``web`` extra (FastAPI, uvicorn, prometheus-client); ``command`` alone is imported without it.
"""
