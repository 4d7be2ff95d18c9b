"""What a figure is asked for, and what it answers: the same numbers in several shapes."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from importlib.resources import files
from typing import TYPE_CHECKING, Any

from octavo.workload.items import WorkItem, WorkloadError
from octavo.workload.traces import load_trace
from octavo.workload.workload import make_workload

if TYPE_CHECKING:
    from matplotlib.figure import Figure

SHAREGPT = "ShareGPT"
_LENGTHS = "sharegpt_lengths_1000.csv"


@dataclass(frozen=True, slots=True, kw_only=True)
class PaperOptions:
    """``trace`` None: 1000 lengths of ShareGPT that ship with Octavo; ``num_requests`` None: 1000,
    or all if there are fewer; ``num_blocks`` and ``block_size`` None: those of ``scale``."""

    scale: str = "opt-13b"
    trace: str | None = None
    num_requests: int | None = None
    num_blocks: int | None = None
    block_size: int | None = None
    seed: int = 0


@dataclass(frozen=True, slots=True, kw_only=True)
class PaperReport:
    """``values`` are ready for JSON, ``rows`` are those of the CSV, by column; ``text`` is for a
    terminal; ``conditions`` say in a line what was measured; ``draw`` plots it."""

    title: str
    conditions: str
    values: dict[str, Any]
    rows: list[dict[str, Any]]
    text: str
    draw: Callable[[Figure], None]


def lengths(options: PaperOptions, max_total_len: int, default_count: int = 1000) -> list[WorkItem]:
    """The trace's requests of at most ``max_total_len`` tokens, prompt and output together;
    ``default_count`` of them where nobody asked for a number.

    Raises:
        WorkloadError: there are none, or fewer than asked for.
    """
    path = options.trace or str(files("octavo.bench") / "data" / _LENGTHS)
    count = options.num_requests
    if count is None:
        items = load_trace(path)
        fitting = sum(i.num_prompt_tokens + i.num_output_tokens <= max_total_len for i in items)
        count = min(default_count, fitting)
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


def trace_name(options: PaperOptions) -> str:
    return options.trace or SHAREGPT
