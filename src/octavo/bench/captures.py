"""What captured steps take of a GPU's memory, beside what an engine keeps for them."""

from __future__ import annotations

from typing import TYPE_CHECKING

from octavo.bench import works

if TYPE_CHECKING:
    from octavo.bench.works import Figure
    from octavo.engine.llm import LLM

_PROMPT, _STEPS_A_SIZE = 16, 3


def capture_all(llm: LLM) -> None:
    """Meet every size to which steps are padded often enough to be captured: rows that decode, a
    prompt alone, and one beside a row that decodes."""
    longest = llm.report.max_model_len - 1
    # Rows end one after the other.
    lengths = [
        (_PROMPT, min(_STEPS_A_SIZE * (row + 1), longest - _PROMPT))
        for row in range(llm.report.max_num_seqs)
    ]
    works.generate(llm, lengths, 10)
    step = llm.report.max_num_batched_tokens
    graphs = llm._core.executor.runner.graphs  # type: ignore[attr-defined]
    for size in graphs.padded_sizes:
        for seed in range(11, 11 + _STEPS_A_SIZE if 16 < size <= min(step, longest) else 0):
            works.generate(llm, [(size, 1)], seed)
            if size < longest - step:
                # The first fills a step, and decodes in the next beside the second.
                works.generate(llm, [(step, 4), (size - 1, 2)], seed)


def captured_bytes(llm: LLM) -> dict[str, int]:
    """Of all that ``llm`` has run: bytes taken, bytes kept for them, and how many there are."""
    graphs = llm._core.executor.runner.graphs  # type: ignore[attr-defined]
    return {
        "captured_bytes": graphs.captured_bytes,
        "kept_bytes": 0 if llm.report.memory is None else llm.report.memory.graph_bytes,
        "num_captured": graphs.num_captured,
    }


def figure(found: dict[str, int]) -> Figure:
    """`captured_bytes` as a figure."""
    return works.Figure(
        work="graphs",
        unit="MiB",
        figure=found["captured_bytes"] / 2**20,
        notes=f"{found['num_captured']} captured steps; {found['kept_bytes'] / 2**20:.0f} MiB are "
        "kept for them",
    )
