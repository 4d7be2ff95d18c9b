from __future__ import annotations

import json
import threading
from collections.abc import Iterator
from http.server import BaseHTTPRequestHandler, HTTPServer
from typing import Any

import pytest
from typer.testing import CliRunner

from octavo.chat import Conversation, Message, run, sse_texts
from octavo.cli import app


class Script:
    """A terminal that types the lines given and keeps what is written."""

    def __init__(self, *lines: str) -> None:
        self.lines = list(lines)
        self.written = ""

    def read(self) -> str:
        if not self.lines:
            raise EOFError
        return self.lines.pop(0)

    def write(self, text: str) -> None:
        self.written += text


def echo(messages: list[Message]) -> Iterator[str]:
    yield f"{len(messages)}:"
    yield messages[-1]["content"].upper()


def talk(*lines: str, answer=echo, system: str | None = None) -> tuple[Script, Conversation]:  # type: ignore[no-untyped-def]
    script, conversation = Script(*lines), Conversation(answer, system)
    run(conversation, script.read, script.write)
    return script, conversation


def test_the_history_grows() -> None:
    script, conversation = talk("one", "", "two")
    assert run(conversation, Script("three").read, Script().write) == 0
    del conversation.messages[-2:]
    assert script.written == "1:ONE\n3:TWO\n\n"
    assert [m["role"] for m in conversation.messages] == ["user", "assistant"] * 2
    assert conversation.messages[1]["content"] == "1:ONE"


def test_reset_keeps_the_systems_message() -> None:
    script, conversation = talk("one", "/reset", "two", system="be brief")
    assert script.written == "2:ONE\n(forgotten)\n2:TWO\n\n"
    assert conversation.messages[0] == {"role": "system", "content": "be brief"}


def test_commands() -> None:
    script, conversation = talk("one", "/system new", "/help", "/nope", "two", "/exit", "never")
    assert "/reset" in script.written
    assert "unknown command /nope" in script.written
    assert conversation.messages[0]["content"] == "new"
    assert "NEVER" not in script.written


def test_a_refused_question_is_taken_back() -> None:
    def refuse(messages: list[Message]) -> Iterator[str]:
        raise ValueError("too long")
        yield

    script, conversation = Script("one", "/help"), Conversation(refuse)
    assert run(conversation, script.read, script.write) == 1
    assert "(refused: too long)" in script.written
    assert conversation.messages == []


def test_an_interrupted_answer_is_kept_as_far_as_it_came() -> None:
    closed = []

    def slow(messages: list[Message]) -> Iterator[str]:
        try:
            yield "half"
            yield "interrupt"
        finally:
            closed.append(True)

    script, conversation = Script("one"), Conversation(slow)

    def write(text: str) -> None:
        if text == "interrupt":
            raise KeyboardInterrupt
        script.write(text)

    run(conversation, script.read, write)
    assert "half …(stopped)" in script.written
    assert conversation.messages[-1] == {"role": "assistant", "content": "halfinterrupt"}
    assert closed == [True]


def test_the_texts_of_an_event_stream() -> None:
    lines = [
        'data: {"choices": [{"delta": {"role": "assistant"}}]}',
        "",
        'data: {"choices": [{"delta": {"content": "Hel"}}]}',
        'data:{"choices": [{"delta": {"content": "lo"}}]}',
        'data: {"choices": [], "usage": {}}',
        "data: [DONE]",
    ]
    assert list(sse_texts(lines)) == ["Hel", "lo"]
    with pytest.raises(ValueError, match="it broke"):
        list(sse_texts(['data: {"error": {"message": "it broke"}}']))


@pytest.fixture
def other_server() -> Iterator[tuple[str, list[Any]]]:
    """Somebody's server that has the model ``theirs``, and wants a key; and what it was asked."""
    bodies: list[Any] = []

    class Handler(BaseHTTPRequestHandler):
        def _send(self, text: str) -> None:
            is_known = self.headers["Authorization"] == "Bearer secret"
            self.send_response(200 if is_known else 401)
            self.end_headers()
            self.wfile.write(text.encode() if is_known else b"{}")

        def do_GET(self) -> None:
            self._send(json.dumps({"data": [{"id": "theirs"}, {"id": "another"}]}))

        def do_POST(self) -> None:
            bodies.append(json.loads(self.rfile.read(int(self.headers["Content-Length"]))))
            event = {"choices": [{"delta": {"content": "hello"}}]}
            self._send(f"data: {json.dumps(event)}\n\ndata: [DONE]\n\n")

        def log_message(self, *_: Any) -> None:
            pass

    server = HTTPServer(("127.0.0.1", 0), Handler)
    thread = threading.Thread(target=server.serve_forever)
    thread.start()
    yield f"http://127.0.0.1:{server.server_port}", bodies
    server.shutdown()
    thread.join()
    server.server_close()


@pytest.mark.parametrize(
    ("named", "model"), [([], "theirs"), (["smollm2-135m"], "smollm2-135m"), (["x"], "x")]
)
def test_a_server_is_asked_for_its_own_model_unless_one_is_named(
    other_server: tuple[str, list[Any]], named: list[str], model: str
) -> None:
    url, bodies = other_server
    arguments = ["chat", *named, "--url", url, "--api-key", "secret"]
    result = CliRunner().invoke(app, arguments, input="hi\n")
    assert result.output.strip() == "hello"
    assert [body["model"] for body in bodies] == [model]
