"""Sends a workload to an OpenAI-compatible server and times what streams back.

Open loop: a request is sent when the workload says, whatever the server is doing, and its latency
counts from that moment, so that a server (or this client) that falls behind cannot hide it. With a
bound on requests at once the loop is closed: one that waits for its turn starts at its turn.
"""

from __future__ import annotations

import asyncio
import contextlib
import json
import re
import time
from collections.abc import AsyncIterator, Sequence
from typing import TYPE_CHECKING, Any

from octavo.bench.serve.metrics import Load, Sample
from octavo.config import ConfigError
from octavo.workload.items import WorkItem
from octavo.workload.prompts import prompt_token_ids

if TYPE_CHECKING:
    from aiohttp import ClientSession

_FIRST_TOKEN_ID = 100
_LEAD_S = 0.1
_LISTING_S = 10.0


class Client:
    """A connection to one server's model. Make one with `connected`."""

    def __init__(self, http: ClientSession, base: str, model: str, highest_token_id: int) -> None:
        """Use `connected`."""
        self.model = model
        self._http = http
        self._url = f"{base}/v1/completions"
        self._highest_token_id = highest_token_id

    async def run(
        self, items: Sequence[WorkItem], *, seed: int = 0, max_concurrency: int | None = None
    ) -> Load:
        """Send ``items``, in order of arrival, as streamed completions of random token ids, and
        wait for all of them.

        ``seed`` makes the prompts; lengths are the items'. At most ``max_concurrency`` requests
        run at once.
        """
        # Prompts are made before the clock starts.
        bodies = [
            json.dumps(body).encode()
            for body in completion_bodies(
                self.model, items, highest_token_id=self._highest_token_id, seed=seed
            )
        ]
        places = None if max_concurrency is None else asyncio.Semaphore(max_concurrency)
        start = time.perf_counter() + _LEAD_S
        tasks = []
        async with asyncio.TaskGroup() as group:
            for body, item in zip(bodies, items, strict=True):
                due = start + item.arrival_s
                if (wait := due - time.perf_counter()) > 0:
                    await asyncio.sleep(wait)
                if places is not None:
                    await places.acquire()
                    due = max(due, time.perf_counter())
                task = group.create_task(self._send(body, due, start))
                if places is not None:
                    task.add_done_callback(lambda _: places.release())
                tasks.append(task)
        samples = [task.result() for task in tasks]
        return Load(self.model, samples, time.perf_counter() - start)

    async def _send(self, body: bytes, due: float, start: float) -> Sample:
        from aiohttp import ClientError

        sample = Sample(start_s=due - start)
        rest = b""
        try:
            async with self._http.post(self._url, data=body) as response:
                async for piece in response.content.iter_any():
                    now = time.perf_counter() - due
                    rest += piece
                    if response.status == 200:
                        *lines, rest = rest.split(b"\n")
                        for line in lines:
                            _digest(sample, line, now)
                if response.status != 200:
                    sample.error = f"{response.status}: {rest.decode(errors='replace')[:200]}"
        except TimeoutError:
            sample.error = "the server took too long"
        except (ClientError, OSError) as error:
            sample.error = str(error) or repr(error)
        except (ValueError, TypeError, KeyError) as error:
            sample.error = f"the stream is not OpenAI's: {error!r}"
        sample.end_s = time.perf_counter() - due
        if sample.error is None and sample.first_token_s is None:
            sample.error = "the stream ended without a token"
        if sample.error is None and not sample.num_output_tokens:
            sample.error = "the stream told no usage; token counts would be guesses"
        return sample


def completion_bodies(
    model: str, items: Sequence[WorkItem], *, highest_token_id: int = 1000, seed: int = 0
) -> list[dict[str, Any]]:
    """What `Client.run` posts to ``/v1/completions``, in the order of ``items``."""
    return [
        {
            "model": model,
            "prompt": prompt_token_ids(
                item, index, lowest=_FIRST_TOKEN_ID, highest=highest_token_id, seed=seed
            ).tolist(),
            "max_tokens": item.num_output_tokens,
            "temperature": 0,
            "ignore_eos": True,
            "stream": True,
            "stream_options": {"include_usage": True},
        }
        for index, item in enumerate(items)
    ]


@contextlib.asynccontextmanager
async def connected(
    url: str,
    *,
    model: str | None = None,
    api_key: str | None = None,
    highest_token_id: int = 1000,
    timeout_s: float = 600.0,
) -> AsyncIterator[Client]:
    """A client for the server at ``url``, with or without ``/v1``. Without ``model`` it asks for
    the first that the server lists. Prompts are ids from 100 to ``highest_token_id - 1``.

    Raises:
        ConfigError: the server cannot be reached, or lists no model.
    """
    if highest_token_id <= _FIRST_TOKEN_ID:
        raise ConfigError(
            f"highest_token_id must be above {_FIRST_TOKEN_ID}, got {highest_token_id}"
        )
    base = url.rstrip("/").removesuffix("/v1")
    if not re.match(r"https?://[^/]", base):
        raise ConfigError(
            f"url must begin with http:// or https:// and a host, such as http://127.0.0.1:8000, "
            f"got {url!r}"
        )
    headers = {"Content-Type": "application/json"}
    if api_key:
        headers["Authorization"] = f"Bearer {api_key}"
    # Half of what httpx costs for each token that arrives, on a machine that is measured, too.
    import aiohttp

    async with aiohttp.ClientSession(
        headers=headers,
        timeout=aiohttp.ClientTimeout(total=None, sock_connect=10.0, sock_read=timeout_s),
        connector=aiohttp.TCPConnector(limit=0),
    ) as http:
        yield Client(http, base, model or await _first_model(http, base), highest_token_id)


async def _first_model(http: ClientSession, base: str) -> str:
    from aiohttp import ClientError, ClientResponseError, ClientTimeout, InvalidURL

    try:
        timeout = ClientTimeout(total=_LISTING_S)
        async with http.get(f"{base}/v1/models", timeout=timeout) as response:
            response.raise_for_status()
            listed = await response.json(content_type=None)
        return str(listed["data"][0]["id"])
    except TimeoutError as error:
        raise ConnectionError(
            f"{base} does not answer within {_LISTING_S:g} s at /v1/models"
        ) from error
    except InvalidURL as error:
        raise ConfigError(f"url {base!r} cannot be used: {error}") from error
    except (ClientError, OSError) as error:
        why = str(error) or type(error).__name__
        if isinstance(error, ClientResponseError):
            why = f"{error.status} {error.message}"
            if error.status in (401, 403):
                why += "; give its key with --api-key, or in $OCTAVO_API_KEY"
        raise ConnectionError(f"{base} does not list a model at /v1/models: {why}") from error
    except (ValueError, KeyError, IndexError, TypeError) as error:
        raise ConfigError(
            f"{base} does not list a model at /v1/models: its answer is not OpenAI's"
        ) from error


def _digest(sample: Sample, line: bytes, now: float) -> None:
    data = line.removeprefix(b"data:").strip() if line.startswith(b"data:") else b""
    if not data or data == b"[DONE]":
        return
    event = json.loads(data)
    if "error" in event:
        sample.error = str(event["error"])
        return
    if event.get("choices"):
        if sample.first_token_s is None:
            sample.first_token_s = now
        else:
            sample.gaps_s.append(now - sample.last_token_s)
        sample.last_token_s = now
    if usage := event.get("usage"):
        sample.num_output_tokens = int(usage["completion_tokens"])
        sample.num_prompt_tokens = int(usage["prompt_tokens"])
        details = usage.get("prompt_tokens_details") or {}
        sample.num_cached_tokens = int(details.get("cached_tokens") or 0)
