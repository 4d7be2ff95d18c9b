"""`octavo chat`: a conversation on the terminal, with a model in this process or a server.

Knows lines of text and where answers come from; knows nothing of engines.
"""

from __future__ import annotations

import json
from collections.abc import Callable, Iterable, Iterator
from typing import Any, TypeAlias
from urllib.parse import urlsplit

from octavo.config import ConfigError

Message: TypeAlias = dict[str, str]
Answer: TypeAlias = Callable[[list[Message]], Iterator[str]]

HELP = """/reset     forget the conversation
/system T  begin anew with T as the system's message
/help      show this
/exit      leave (or Ctrl-D)
Ctrl-C stops an answer."""


class Conversation:
    """The messages so far, and the commands that change them."""

    def __init__(self, answer: Answer, system: str | None = None) -> None:
        self._answer = answer
        self._system = system
        self.messages: list[Message] = []
        self.reset()

    def reset(self) -> None:
        """Forget everything but the system's message."""
        self.messages = []
        if self._system:
            self.messages.append({"role": "system", "content": self._system})

    def say(self, line: str) -> Iterator[str]:
        """What to print for a line: a command's reply, or the answer piece by piece.

        An answer that fails is taken back with its question; one that is cut short is kept as far
        as it came.
        """
        if line.startswith("/"):
            yield self._command(line)
            return
        self.messages.append({"role": "user", "content": line})
        pieces: list[str] = []
        try:
            for piece in self._answer(list(self.messages)):
                pieces.append(piece)
                yield piece
        except GeneratorExit:
            self._keep(pieces)
            raise
        except BaseException:
            self.messages.pop()
            raise
        self._keep(pieces)

    def _keep(self, pieces: list[str]) -> None:
        self.messages.append({"role": "assistant", "content": "".join(pieces)})

    def _command(self, line: str) -> str:
        name, _, rest = line.partition(" ")
        if name == "/reset":
            self.reset()
            return "(forgotten)"
        if name == "/system":
            self._system = rest.strip() or None
            self.reset()
            return "(forgotten; new system message)" if self._system else "(forgotten)"
        if name == "/help":
            return HELP
        return f"unknown command {name}; /help lists them"


def run(conversation: Conversation, read: Callable[[], str], write: Callable[[str], None]) -> int:
    """Read lines until the end of input or ``/exit``; write what they bring. Returns how many were
    refused."""
    num_refused = 0
    while True:
        try:
            line = read().strip()
        except (EOFError, KeyboardInterrupt):
            write("\n")
            return num_refused
        if line in ("/exit", "/quit"):
            return num_refused
        if not line:
            continue
        reply = conversation.say(line)
        try:
            for piece in reply:
                write(piece)
        except KeyboardInterrupt:
            write(" …(stopped)")
        except ValueError as error:
            write(f"(refused: {error})")
            num_refused += 1
        finally:
            reply.close()  # type: ignore[attr-defined]
        write("\n")


def first_model(url: str, api_key: str | None) -> str | None:
    """What the server at ``url`` lists first, None where it lists nothing; asked before the first
    line is typed, so that a server that cannot be reached is told of then.

    Raises:
        ConnectionError: nobody does.
        ConfigError: it is no address.
    """
    import httpx

    try:
        # Which looks at the port, where httpx lets any number pass.
        _ = urlsplit(url).port
        response = httpx.get(
            f"{_base(url)}/v1/models",
            headers=_headers(api_key),
            timeout=httpx.Timeout(10, connect=5),
        )
    except (httpx.UnsupportedProtocol, httpx.InvalidURL, ValueError) as error:
        raise ConfigError(f"url {url!r} cannot be used: {error}") from error
    except httpx.HTTPError as error:
        raise ConnectionError(f"no server can be reached at {url}: {error}") from error
    try:
        return str(response.json()["data"][0]["id"])
    except (ValueError, KeyError, IndexError, TypeError):
        return None


def _headers(api_key: str | None) -> dict[str, str]:
    return {"Authorization": f"Bearer {api_key}"} if api_key else {}


def _base(url: str) -> str:
    return url.rstrip("/").removesuffix("/v1")


def server_answer(url: str, model: str, api_key: str | None, **options: Any) -> Answer:
    """Answers from any OpenAI-compatible server at ``url``, for example http://127.0.0.1:8000."""
    import httpx

    def answer(messages: list[Message]) -> Iterator[str]:
        body = {"model": model, "messages": messages, "stream": True, **options}
        headers = _headers(api_key)
        endpoint = f"{_base(url)}/v1/chat/completions"
        try:
            with httpx.stream(
                "POST", endpoint, json=body, headers=headers, timeout=httpx.Timeout(600, connect=5)
            ) as response:
                if response.status_code != 200:
                    response.read()
                    raise ValueError(_reason(response.text, response.status_code))
                yield from sse_texts(response.iter_lines())
        except httpx.HTTPError as error:
            raise ValueError(f"{endpoint}: {error}") from error

    return answer


def sse_texts(lines: Iterable[str]) -> Iterator[str]:
    """The texts of a chat completion's event stream.

    Raises:
        ValueError: the server reports an error in mid-stream.
    """
    for line in lines:
        data = line.removeprefix("data:").strip() if line.startswith("data:") else ""
        if not data or data == "[DONE]":
            continue
        event = json.loads(data)
        if "error" in event:
            raise ValueError(event["error"].get("message", "the server failed"))
        for choice in event.get("choices", ()):
            if text := choice.get("delta", {}).get("content"):
                yield text


def _reason(body: str, status: int) -> str:
    try:
        return str(json.loads(body)["error"]["message"])
    except (ValueError, KeyError, TypeError):
        return f"the server answered {status}"
