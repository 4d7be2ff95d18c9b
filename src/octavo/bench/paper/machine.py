"""What the figures that need times assume of OPT-13B on an A100 of 40 GB (`octavo.simulate.gpus`).

All managers have the same steps.
"""

from __future__ import annotations

from octavo.bench.paper.report import PaperOptions
from octavo.simulate.gpus import A100, OPT_13B, paper_opt13b_a100

__all__ = ["A100", "ASSUMED", "OPT_13B", "assumed", "paper_opt13b_a100"]

ASSUMED = (
    "Step times: 26 GB of weights, keys and values at 80 % of 1.555 TB/s, products at 60 % of 312 "
    "TFLOP/s, attention of prompts at 40 %, 25 µs a layer, swaps at 25 GB/s."
)


def assumed(options: PaperOptions) -> str:
    """`ASSUMED` where it is; a real engine's times are measured."""
    return f" {ASSUMED}" if options.model is None else ""
