"""A small server that speaks OpenAI's chat wire and Anthropic's, on loopback and in threads."""

import json
import socket
import threading
import time
from collections.abc import Iterator
from contextlib import contextmanager
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from typing import Any

from langchain_core.messages import convert_to_messages

from tests.sot_chains.fakes import answer_to, words

MODEL = "small-1"


class ChatServer(ThreadingHTTPServer):
    """Answers like the fakes, word by word. Refuses other models than ``model``, other keys than ``key``."""

    daemon_threads = True

    def __init__(self) -> None:
        super().__init__(("127.0.0.1", 0), _Handler)
        self.model = MODEL
        self.pause_seconds = 0.0
        self.key: str | None = None
        self.break_off = False
        self.cuts_bytes = False  # whether every byte is a chunk of its own
        self.answer = answer_to
        self.requests: list[dict[str, Any]] = []
        self.keys: list[str | None] = []
        self.num_open = 0
        self.num_connections = 0
        self.lock = threading.Lock()

    @property
    def url(self) -> str:
        return f"{self.anthropic_url}/v1"

    @property
    def anthropic_url(self) -> str:
        return f"http://127.0.0.1:{self.server_address[1]}"

    def all_closed(self, within_seconds: float = 5.0) -> bool:
        deadline = time.monotonic() + within_seconds
        while self.num_open and time.monotonic() < deadline:
            time.sleep(0.005)
        return self.num_open == 0

    def process_request(self, request: Any, client_address: Any) -> None:
        self.num_connections += 1
        super().process_request(request, client_address)


class _Handler(BaseHTTPRequestHandler):
    protocol_version = "HTTP/1.1"
    server: ChatServer

    def log_message(self, *args: Any) -> None: ...

    def do_POST(self) -> None:
        request = json.loads(self.rfile.read(int(self.headers["Content-Length"])))
        key = (self.headers.get("Authorization") or self.headers.get("X-Api-Key") or "").removeprefix(
            "Bearer "
        )
        with self.server.lock:
            self.server.requests.append(request)
            self.server.keys.append(key)
            self.server.num_open += 1
        try:
            if self.server.key not in (None, key):
                self._refuse(401, "wrong key")
            elif request["model"] != self.server.model:
                self._refuse(404, f"The model `{request['model']}` does not exist")
            elif self.path.endswith("/messages"):
                self._stream_events(request)
            else:
                self._stream(request)
        except (BrokenPipeError, ConnectionResetError):
            self.close_connection = True
        finally:
            with self.server.lock:
                self.server.num_open -= 1

    def _refuse(self, status: int, words_: str) -> None:
        body = json.dumps({"error": {"message": words_, "type": "invalid_request_error"}}).encode()
        self.send_response(status)
        self.send_header("Content-Type", "application/json")
        self.send_header("Content-Length", str(len(body)))
        self.end_headers()
        self.wfile.write(body)

    def _begin(self, request: dict[str, Any]) -> list[str]:
        """Begins a stream of events; the pieces of its text."""
        self.send_response(200)
        self.send_header("Content-Type", "text/event-stream")
        self.send_header("Transfer-Encoding", "chunked")
        self.end_headers()
        return words(self.server.answer(convert_to_messages(request["messages"])))

    def _stream(self, request: dict[str, Any]) -> None:
        pieces = self._begin(request)
        for piece in pieces:
            time.sleep(self.server.pause_seconds)  # the pace of a model
            self._send(request, choices=[{"index": 0, "delta": {"content": piece}, "finish_reason": None}])
            if self.server.break_off:
                self.connection.shutdown(socket.SHUT_RDWR)
                raise ConnectionResetError
        self._send(request, choices=[{"index": 0, "delta": {}, "finish_reason": "stop"}])
        if request.get("stream_options", {}).get("include_usage"):
            num_in = len(request["messages"])
            usage = {
                "prompt_tokens": num_in,
                "completion_tokens": len(pieces),
                "total_tokens": num_in + len(pieces),
                "prompt_tokens_details": {"cached_tokens": 1},
            }
            self._send(request, choices=[], usage=usage)
        self._write(b"data: [DONE]\n\n")
        self.wfile.write(b"0\r\n\r\n")

    def _stream_events(self, request: dict[str, Any]) -> None:
        """Anthropic's wire."""
        pieces = self._begin(request)
        usage = {"input_tokens": len(request["messages"]), "output_tokens": 1}
        message: dict[str, Any] = {"id": "m", "type": "message", "role": "assistant", "content": []}
        message["model"] = request["model"]
        self._event("message_start", message={**message, "usage": usage})
        self._event("content_block_start", index=0, content_block={"type": "text", "text": ""})
        for piece in pieces:
            time.sleep(self.server.pause_seconds)  # the pace of a model
            self._event("content_block_delta", index=0, delta={"type": "text_delta", "text": piece})
        self._event("content_block_stop", index=0)
        self._event("message_delta", delta={"stop_reason": "end_turn"}, usage={"output_tokens": len(pieces)})
        self._event("message_stop")
        self.wfile.write(b"0\r\n\r\n")

    def _event(self, kind: str, **fields: Any) -> None:
        self._write(f"event: {kind}\ndata: {json.dumps({'type': kind, **fields})}\n\n".encode())

    def _send(self, request: dict[str, Any], **fields: Any) -> None:
        chunk = {
            "id": "c",
            "object": "chat.completion.chunk",
            "created": 1,
            "model": request["model"],
            **fields,
        }
        self._write(b"data: " + json.dumps(chunk).encode() + b"\n\n")

    def _write(self, data: bytes) -> None:
        for piece in (bytes([byte]) for byte in data) if self.server.cuts_bytes else (data,):
            self.wfile.write(f"{len(piece):x}\r\n".encode() + piece + b"\r\n")
            self.wfile.flush()


@contextmanager
def chat_server() -> Iterator[ChatServer]:
    server = ChatServer()
    thread = threading.Thread(target=server.serve_forever, kwargs={"poll_interval": 0.01}, daemon=True)
    thread.start()
    try:
        yield server
    finally:
        server.shutdown()
        server.server_close()
        thread.join()


def unused_url() -> str:
    """Where no server is."""
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        return f"http://127.0.0.1:{probe.getsockname()[1]}/v1"
