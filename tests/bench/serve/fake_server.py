"""A small server that answers as told."""

from __future__ import annotations

import json
import threading
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from typing import Any


class FakeServer(ThreadingHTTPServer):
    """Streams ``max_tokens`` chunks a request. A prompt of 13 tokens is refused, one of 14 brings
    no usage, one of 15 something that is no JSON, and one of 16 waits until four do."""

    daemon_threads = True

    def __init__(self) -> None:
        super().__init__(("127.0.0.1", 0), _Handler)
        self.four = threading.Barrier(4, timeout=30)
        self.lock = threading.Lock()
        self.num_now = 0
        self.most_at_once = 0
        self.bodies: list[dict[str, Any]] = []
        self.keys: set[str | None] = set()
        # Without it nothing is listed.
        self.needs: str | None = None

    @property
    def url(self) -> str:
        return f"http://127.0.0.1:{self.server_address[1]}"


class _Handler(BaseHTTPRequestHandler):
    server: FakeServer

    def do_GET(self) -> None:
        if self.server.needs is not None and self.headers["Authorization"] != self.server.needs:
            self._answer(401, "no")
        else:
            self._answer(200, json.dumps({"data": [{"id": "fake"}]}))

    def do_POST(self) -> None:
        body = json.loads(self.rfile.read(int(self.headers["Content-Length"])))
        self.server.bodies.append(body)
        self.server.keys.add(self.headers["Authorization"])
        with self.server.lock:
            self.server.num_now += 1
            self.server.most_at_once = max(self.server.most_at_once, self.server.num_now)
        status, text = self._answer_to(body)
        with self.server.lock:
            self.server.num_now -= 1
        self._answer(status, text)

    def _answer_to(self, body: dict[str, Any]) -> tuple[int, str]:
        length = len(body["prompt"])
        if length == 13:
            return 400, json.dumps({"error": {"message": "unlucky"}})
        if length == 15:
            return 200, "data: {broken\n\n"
        if length == 16:
            self.server.four.wait()
        events = [{"choices": [{"text": "x"}]}] * body["max_tokens"]
        usage = {"prompt_tokens": length, "completion_tokens": body["max_tokens"]}
        if length != 14:
            events = [*events, {"choices": [], "usage": usage}]
        return 200, "".join(f"data: {json.dumps(e)}\n\n" for e in events) + "data: [DONE]\n\n"

    def _answer(self, status: int, text: str) -> None:
        self.send_response(status)
        self.send_header("Content-Length", str(len(text)))
        self.end_headers()
        self.wfile.write(text.encode())

    def log_message(self, *_: object) -> None:
        pass
