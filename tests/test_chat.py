from __future__ import annotations

from collections.abc import Iterator

import pytest

from octavo.chat import Conversation, Message, run, sse_texts


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
