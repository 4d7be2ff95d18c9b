"""GPUs that plans can be made for: memory, links, a price, and whose coefficients their steps have.

Facts of the makers and assumptions are marked as such; coefficients come from calibrations, or for
the paper's A100, which was not measured, from its data sheet and stated efficiencies.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, replace

from octavo.simulate.calibration import load_calibration
from octavo.simulate.latency import Coefficients, LatencyModel
from octavo.simulate.shape import ModelShape


class GPUError(ValueError):
    """No such GPU; the message lists those there are."""


@dataclass(frozen=True, slots=True, kw_only=True)
class GPU:
    """``memory_bytes`` as the driver reports them; of these ``reserved_bytes`` go to workspaces,
    graphs and the driver. ``price_per_hour`` is in dollars, an assumption to be replaced by one's
    own. ``max_ranks`` share a model over the links of one host."""

    name: str
    memory_bytes: float
    reserved_bytes: float
    price_per_hour: float
    max_ranks: int
    coefficients: Callable[[], Coefficients]

    def latency(self, shape: ModelShape, block_size: int = 16) -> LatencyModel:
        """Of a model on it, or of one rank of it."""
        return LatencyModel(shape, self.coefficients(), block_size)


# Efficiencies are assumed: 80 % of the memory's rate for weights and keys, 60 % of the peak for
# products and 40 % for attention; 25 GB/s over PCIe 4; 250 of NVLink 3's 300 GB/s each way.
A100 = Coefficients(
    byte_rate=0.8 * 1.555e12,
    flop_rate=0.6 * 312e12,
    blend=3.0,
    kv_rate=0.8 * 1.555e12,
    attention_rate=0.4 * 312e12,
    layer_s=25e-6,
    row_s=2e-6,
    copy_rate=0.4 * 1.555e12,
    swap_rate=25e9,
    map_s=36e-6,
    swaps_beside=True,
    link_rate=250e9,
    link_s=10e-6,
)

GPUS = {
    gpu.name: gpu
    for gpu in (
        GPU(
            name="h200",
            memory_bytes=139.8 * 2**30,
            reserved_bytes=6 * 2**30,
            price_per_hour=3.5,
            max_ranks=8,
            coefficients=lambda: load_calibration("h200-llama-3.1-8b").coefficients,
        ),
        GPU(
            name="a100-40gb",
            memory_bytes=39.4 * 2**30,
            reserved_bytes=2 * 2**30,
            price_per_hour=1.3,
            max_ranks=8,
            coefficients=lambda: A100,
        ),
    )
}


def gpu_named(name: str) -> GPU:
    """One of ``GPUS``.

    Raises:
        GPUError: there is none of that name.
    """
    if name not in GPUS:
        raise GPUError(
            f"gpu must be one of {', '.join(GPUS)}, got {name!r}; for another machine give a "
            "calibration that octavo calibrate made on it (--calibration FILE) beside the nearest"
        )
    return GPUS[name]


OPT_13B = ModelShape(
    name="opt-13b",
    num_layers=40,
    hidden_size=5120,
    num_kv_heads=40,
    layer_weights=40.0 * (4 * 5120 * 5120 + 2 * 5120 * 20480),
    head_weights=50272.0 * 5120,
    weight_bytes=2.0,
    token_bytes=40.0 * 2 * 5120 * 2,
    attention_width=40.0 * 5120,
    max_position_embeddings=2048,
)
PAPER_KV_BYTES = 12e9
"""What PagedAttention's paper leaves to the KV cache of OPT-13B on an A100-40GB (its table 1)."""


def paper_opt13b_a100(block_size: int = 16) -> LatencyModel:
    """OPT-13B on an A100-40GB: 26 GB of weights, 1.555 TB/s, 312 TFLOP/s (Kwon et al. 2023), at the
    efficiencies above. Nobody measured it here."""
    return LatencyModel(OPT_13B, A100, block_size)


def with_price(gpu: GPU, price_per_hour: float | None) -> GPU:
    """The GPU at one's own price.

    Raises:
        GPUError: it is not above 0.
    """
    if price_per_hour is None:
        return gpu
    if not 0 < price_per_hour < float("inf"):
        raise GPUError(f"price must be above 0 dollars an hour, got {price_per_hour}")
    return replace(gpu, price_per_hour=price_per_hour)
