"""A program: an engine on a GPU of whose captured steps one fails, in one of two ways."""

from __future__ import annotations

import sys
from pathlib import Path

sys.path.insert(0, str(Path(__file__).parents[2]))

import torch

from engine.tiny_engine import run
from execution.gpu.test_gpu_engine import gpu_engine, requests


def main(model: Path, fault: str) -> None:
    core = gpu_engine(model, num_blocks=60, depth=2, chunk=32)
    expected = run(core, requests(), beams={})
    graphs = core.executor.runner.graphs  # type: ignore[attr-defined]
    states, num_runs = torch.ones(8, device="cuda"), 0

    def work() -> torch.Tensor:
        nonlocal num_runs
        num_runs += 1
        if num_runs == 2:  # a capture
            if fault == "waits":
                (states * 2).sum().item()
            raise ZeroDivisionError
        return states * 3

    with graphs._device.context():
        for number in range(8):
            try:
                tripled = graphs._run("key", work)
            except (RuntimeError, ZeroDivisionError) as error:
                assert number == 1, number
                if isinstance(error, RuntimeError) != (fault == "waits"):
                    raise
                continue
            assert number != 1
            assert tripled.tolist() == [3.0] * 8
    assert num_runs == 8, "it runs plainly from then on"
    for _ in range(3):
        assert run(core, requests(), beams={}) == expected
    assert graphs.num_captured > 3
    core.close()
    # It fails while a capture is taken to be under way.
    torch.cuda.empty_cache()


if __name__ == "__main__":
    main(Path(sys.argv[1]), sys.argv[2])
