"""How long steps take at the papers' scale: OPT-13B on an A100 of 40 GB (Kwon et al., 2023).

From the chip's data sheet, with the shares of its rates that engines reach: 1.555 TB/s of memory
and 312 TFLOP/s of fp16 products. All managers have the same.
"""

from __future__ import annotations

from octavo.simulate.latency import Coefficients, LatencyModel
from octavo.simulate.shape import ModelShape

_HIDDEN, _LAYERS, _VOCAB = 5120, 40, 50272

OPT_13B = ModelShape(
    name="opt-13b",
    num_layers=_LAYERS,
    hidden_size=_HIDDEN,
    num_kv_heads=40,
    # Four projections, and two of four times the width: 26 GB of weights.
    layer_weights=float(_LAYERS * 12 * _HIDDEN**2),
    head_weights=float(_VOCAB * _HIDDEN),
    weight_bytes=2.0,
    token_bytes=float(_LAYERS * 2 * _HIDDEN * 2),
    attention_width=float(_LAYERS * _HIDDEN),
    max_position_embeddings=2048,
)
A100 = Coefficients(
    byte_rate=0.85 * 1.555e12,
    flop_rate=0.6 * 312e12,
    blend=4.0,
    kv_rate=0.7 * 1.555e12,
    attention_rate=0.4 * 312e12,
    step_s=0.002,
    copy_rate=0.4 * 1.555e12,
    # PCIe 4, pinned memory; beside the steps as in our engine.
    swap_rate=24e9,
    swaps_beside=True,
)
ASSUMED = (
    "Step times: 26 GB of weights at 85 % of 1.555 TB/s, keys and values at 70 %, products at 60 % "
    "of 312 TFLOP/s, 2 ms a step for the host, swaps at 24 GB/s."
)


def a100_opt_13b(block_size: int) -> LatencyModel:
    return LatencyModel(OPT_13B, A100, block_size)
