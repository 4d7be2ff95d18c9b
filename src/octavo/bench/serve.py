"""An open-loop load generator against any OpenAI-compatible server.

Open loop: a request is sent when the workload says, whatever the server is doing, and its latency
counts from that moment, so that a server (or this client) that falls behind cannot hide it.
"""

from __future__ import annotations

import asyncio
import json
import time
from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Any

import httpx

from octavo.bench.percentiles import summary
from octavo.config import ConfigError
from octavo.workload.items import WorkItem
from octavo.workload.prompts import prompt_token_ids

_SLO_NAMES = ("ttft", "itl", "tpot", "e2e")
_UNITS = {"ms": 1e-3, "s": 1.0}
_FIRST_TOKEN_ID = 100


@dataclass(slots=True)
class Sample:
    """One request as the client saw it; times are seconds from the intended send time."""

    intended_s: float
    first_token_s: float | None = None
    last_token_s: float = 0.0
    end_s: float = 0.0
    gaps_s: list[float] = field(default_factory=list)
    num_output_tokens: int = 0
    num_prompt_tokens: int = 0
    error: str | None = None

    def values(self) -> dict[str, float]:
        """The request's own figures, by the names that objectives use."""
        assert self.first_token_s is not None
        rest = max(self.num_output_tokens - 1, 1)
        return {
            "ttft": self.first_token_s,
            "itl": max(self.gaps_s, default=0.0),
            "tpot": (self.last_token_s - self.first_token_s) / rest,
            "e2e": self.end_s,
        }


def parse_slo(text: str) -> dict[str, float]:
    """``ttft=200ms,itl=50ms`` to seconds. ``itl`` bounds a request's longest gap, ``tpot`` its
    mean time a token after the first.

    Raises:
        ConfigError: an unknown name or a time without unit.
    """
    objectives = {}
    for part in filter(None, text.split(",")):
        name, _, value = part.strip().partition("=")
        unit = "ms" if value.endswith("ms") else "s"
        number = value.removesuffix(unit)
        try:
            seconds = float(number) * _UNITS[unit]
        except ValueError:
            seconds = -1.0
        if name not in _SLO_NAMES or not value.endswith("s") or not seconds > 0:
            raise ConfigError(
                f"an objective is one of {', '.join(_SLO_NAMES)} and a time, such as "
                f"ttft=200ms; got {part!r}"
            )
        objectives[name] = seconds
    return objectives


async def run(
    url: str,
    items: Sequence[WorkItem],
    *,
    model: str | None = None,
    api_key: str | None = None,
    highest_token_id: int = 1000,
    slo: dict[str, float] | None = None,
    seed: int = 0,
    timeout_s: float = 600.0,
) -> dict[str, Any]:
    """Send ``items`` as streamed completions of token-id prompts and sum up what came back.

    Raises:
        ConfigError: the server cannot be reached, or serves no model.
    """
    headers = {"Authorization": f"Bearer {api_key}"} if api_key else {}
    limits = httpx.Limits(max_connections=None, max_keepalive_connections=None)
    base = url.rstrip("/").removesuffix("/v1")
    timeout = httpx.Timeout(timeout_s, connect=10.0)
    async with httpx.AsyncClient(
        base_url=base, headers=headers, limits=limits, timeout=timeout
    ) as client:
        model = model or await _first_model(client, base)
        # Prompts are made before the clock starts.
        bodies = [
            _body(model, item, index, highest_token_id, seed) for index, item in enumerate(items)
        ]
        start = time.perf_counter() + 0.1
        samples = await asyncio.gather(
            *(
                _send(client, body, start + item.arrival_s)
                for body, item in zip(bodies, items, strict=True)
            )
        )
        seconds = time.perf_counter() - start
    return _report(model, samples, seconds, slo or {})


async def _first_model(client: httpx.AsyncClient, base: str) -> str:
    try:
        response = await client.get("/v1/models")
        response.raise_for_status()
        return str(response.json()["data"][0]["id"])
    except (httpx.HTTPError, ValueError, KeyError, IndexError) as error:
        raise ConfigError(f"{base} does not list a model at /v1/models: {error!r}") from error


def _body(model: str, item: WorkItem, index: int, highest: int, seed: int) -> bytes:
    prompt = prompt_token_ids(item, index, lowest=_FIRST_TOKEN_ID, highest=highest, seed=seed)
    body = {
        "model": model,
        "prompt": prompt.tolist(),
        "max_tokens": item.num_output_tokens,
        "temperature": 0,
        "ignore_eos": True,
        "stream": True,
        "stream_options": {"include_usage": True},
    }
    return json.dumps(body).encode()


async def _send(client: httpx.AsyncClient, body: bytes, intended: float) -> Sample:
    await asyncio.sleep(max(intended - time.perf_counter(), 0.0))
    sample = Sample(intended_s=intended)
    headers = {"Content-Type": "application/json"}
    try:
        async with client.stream(
            "POST", "/v1/completions", content=body, headers=headers
        ) as response:
            if response.status_code != 200:
                text = (await response.aread()).decode(errors="replace")
                sample.error = f"{response.status_code}: {text[:200]}"
                return sample
            async for line in response.aiter_lines():
                _digest(sample, line, time.perf_counter() - intended)
    except httpx.HTTPError as error:
        sample.error = repr(error)
    sample.end_s = time.perf_counter() - intended
    if sample.error is None and sample.first_token_s is None:
        sample.error = "the stream ended without a token"
    return sample


def _digest(sample: Sample, line: str, now: float) -> None:
    data = line.removeprefix("data:").strip() if line.startswith("data:") else ""
    if not data or data == "[DONE]":
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


def _report(
    model: str, samples: Sequence[Sample], seconds: float, slo: dict[str, float]
) -> dict[str, Any]:
    done = [sample for sample in samples if sample.error is None]
    values = [sample.values() for sample in done]
    num_output = sum(sample.num_output_tokens for sample in done)
    report: dict[str, Any] = {
        "model": model,
        "num_requests": len(samples),
        "num_completed": len(done),
        "num_failed": len(samples) - len(done),
        "errors": sorted({sample.error for sample in samples if sample.error is not None})[:5],
        "seconds": seconds,
        "requests_per_second": len(done) / seconds,
        "output_tokens_per_second": num_output / seconds,
        "prompt_tokens": sum(sample.num_prompt_tokens for sample in done),
        "output_tokens": num_output,
        "ttft_ms": summary([value["ttft"] * 1e3 for value in values]),
        "itl_ms": summary([gap * 1e3 for sample in done for gap in sample.gaps_s]),
        "tpot_ms": summary([value["tpot"] * 1e3 for value in values]),
        "e2e_ms": summary([value["e2e"] * 1e3 for value in values]),
    }
    if slo:
        good = sum(all(value[name] <= bound for name, bound in slo.items()) for value in values)
        report["slo_s"] = slo
        report["goodput_requests_per_second"] = good / seconds
        report["goodput_share"] = good / len(samples)
    return report


def table(report: dict[str, Any]) -> str:
    """The report as text."""
    lines = [
        f"{report['num_completed']} of {report['num_requests']} requests in "
        f"{report['seconds']:.1f} s: {report['requests_per_second']:.2f} requests/s, "
        f"{report['output_tokens_per_second']:.1f} output tokens/s",
        f"{'ms':<6}{'mean':>10}{'p50':>10}{'p90':>10}{'p95':>10}{'p99':>10}{'max':>10}",
    ]
    for name in ("ttft", "itl", "tpot", "e2e"):
        values = report[f"{name}_ms"]
        columns = ("mean", "p50", "p90", "p95", "p99", "max")
        lines.append(f"{name:<6}" + "".join(f"{values.get(c, 0.0):>10.1f}" for c in columns))
    if "goodput_share" in report:
        lines.append(
            f"goodput {report['goodput_requests_per_second']:.2f} requests/s "
            f"({report['goodput_share']:.1%} within {report['slo_s']})"
        )
    lines += [f"failed: {error}" for error in report["errors"]]
    return "\n".join(lines)
