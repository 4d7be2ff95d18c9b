"""What a figure is asked for, and what it answers: the same numbers in several shapes."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace
from importlib.resources import files
from typing import TYPE_CHECKING, Any

from octavo.bench.paper.managers import MAX_MODEL_LEN
from octavo.workload.items import WorkItem, WorkloadError
from octavo.workload.workload import make_workload, num_fitting

if TYPE_CHECKING:
    from octavo.bench.paper.engines import Engines

SHAREGPT = "ShareGPT"
_LENGTHS = "sharegpt_lengths_1000.csv"


@dataclass(frozen=True, slots=True, kw_only=True)
class PaperOptions:
    """``model`` None: the simulator, at ``scale``. ``trace`` None: 1000 lengths of ShareGPT that
    ship with Octavo. Whatever else is None or empty is chosen: ``num_requests`` and
    ``duration_s``, in which requests arrive at each of ``rates`` a second, by the figure, which
    also says what ``managers`` and ``widths`` (samples or beams) it has; ``num_blocks`` and
    ``block_size`` by scale or model, ``max_model_len`` by model."""

    model: str | None = None
    device: str = "auto"
    threads: int | None = None
    max_model_len: int | None = None
    scale: str = "opt-13b"
    trace: str | None = None
    num_requests: int | None = None
    num_blocks: int | None = None
    block_size: int | None = None
    rates: tuple[float, ...] = ()
    duration_s: float | None = None
    managers: tuple[str, ...] = ()
    widths: tuple[int, ...] = ()
    seed: int = 0


Row = dict[str, Any]


@dataclass(frozen=True, slots=True, kw_only=True)
class PaperReport:
    """``values`` are ready for JSON, ``rows`` are those of the CSV, by column, from which the plot
    is drawn; ``text`` is for a terminal; ``conditions`` say in a line what was measured.
    ``is_cut``: an interrupt ended it, and what was not whole by then is missing."""

    title: str
    conditions: str
    values: dict[str, Any]
    rows: list[Row]
    text: str
    is_cut: bool = False


def managers_of(
    options: PaperOptions, default: Sequence[str], possible: Sequence[str]
) -> tuple[str, ...]:
    """Those asked for, else ``default``.

    Raises:
        WorkloadError: one is not ``possible``.
    """
    for name in options.managers:
        if name not in possible:
            raise WorkloadError(
                f"managers must be among {', '.join(possible)} in this figure, got {name!r}"
            )
    return tuple(dict.fromkeys(options.managers)) or tuple(default)


def work_of(options: PaperOptions, engines: Engines, default_count: int = 1000) -> list[WorkItem]:
    """`lengths` for ``engines``, scaled to the longest sequence that they take."""
    scale = engines.length_scale
    longest = engines.pool.max_model_len
    items = lengths(options, longest if scale == 1.0 else MAX_MODEL_LEN, default_count)
    if scale == 1.0:
        return items
    scaled = []
    for item in items:
        prompt = max(int(item.num_prompt_tokens * scale), 1)
        output = min(max(int(item.num_output_tokens * scale), 1), longest - prompt)
        scaled.append(replace(item, num_prompt_tokens=prompt, num_output_tokens=output))
    return scaled


def lengths(options: PaperOptions, max_total_len: int, default_count: int = 1000) -> list[WorkItem]:
    """The trace's requests of at most ``max_total_len`` tokens, prompt and output together;
    ``default_count`` of them where nobody asked for a number.

    Raises:
        WorkloadError: there are none, or fewer than asked for.
    """
    path = options.trace or str(files("octavo.bench") / "data" / _LENGTHS)
    count = options.num_requests
    if count is None:
        count = min(default_count, num_fitting(path, max_total_len))
        if not count:
            raise WorkloadError(f"{path} has no request of at most {max_total_len} tokens")
    return make_workload(
        trace=path,
        num_requests=count,
        input_len=1,
        output_len=1,
        max_total_len=max_total_len,
        seed=options.seed,
    )


def trace_name(options: PaperOptions, engines: Engines) -> str:
    """Where the lengths of `work_of` come from."""
    name = options.trace or SHAREGPT
    return f"{name} lengths" + (
        "" if engines.length_scale == 1.0 else f" (times {engines.length_scale:g})"
    )
