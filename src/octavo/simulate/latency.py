"""A step's seconds from what it asks of a machine: physically shaped, a dozen coefficients.

::

    weights     bytes of the weights against products with them, for the tokens (layers) and for the
                sampled rows (head): (memory ** blend + arithmetic ** blend) ** (1 / blend); a large
                ``blend`` is the roofline's longer of the two, 1 is one after the other; of at most
                ``few_rows`` the bytes alone
    kv          keys and values that rows of one token read, a shared prefix once: bytes / rate,
                beside chunks some more, and in each layer a ramp that grows with them and
                saturates, since few keys do not fill the memory's pipe and rows that are cut into
                parts are merged
    attention   4 · pairs · attention width operations of longer chunks
    fixed       a step's own, each layer's, each row's, each chunk's, that of having chunks
    moves       blocks copied and mapped, and what either takes however few they are, then swapped:
                behind the step, or beside it
    ranks       two all-reduces a layer, where several share a model
    host        planning and launching, as far as they outlast the step before

A device whose steps are captured multiplies as many rows as the next of its ``padded_sizes``.
Rates are those of one machine. Shapes scale: weights, keys, operations and layers are counted from
the model (`shape`), so that one fit serves other models of the same machine.
"""

from __future__ import annotations

from bisect import bisect_left
from collections.abc import Callable
from dataclasses import dataclass, field, fields, replace

from octavo.core.plan import StepPlan
from octavo.simulate.executor import StepTime
from octavo.simulate.load import LoadMeter, StepLoad
from octavo.simulate.shape import ModelShape

INFINITE = float("inf")


@dataclass(frozen=True, slots=True, kw_only=True)
class Coefficients:
    """What a machine does: rates a second, in bytes and operations; overheads in seconds.

    ``link_rate`` (bytes a second between ranks, each way) and ``link_s`` (an all-reduce of nothing)
    are needed for more than one rank only. ``swaps_beside``: swaps run beside the steps. A step
    that copies or maps takes ``copy_step_s`` or ``map_step_s`` more, however few blocks.
    ``few_rows``: products of so many have kernels of their own, which do nothing but read weights.
    ``mixed_kv_rate`` is of the bytes that a step with chunks reads for its other rows, and counts
    beside ``kv_rate``: a kernel for chunks serves both.
    ``mixed_s`` is what a step with chunks takes more, however many: a GPU's decode steps are
    captured in one piece, and their launches are hidden.

    Reading ``ramp_bytes`` of keys and values in a layer takes half of ``ramp_s`` more than their
    bytes, and many times as much all of it. ``padded_sizes``, ascending, are those that tokens and
    sampled rows are padded to; none: nothing is. What has more tokens than the last is launched
    kernel by kernel while the device computes, other steps at the end of the host's work:
    ``host_s``, each row's, that of having chunks, and each layer's of launching by kernels. A host
    that does not work ahead of its device has its time in ``step_s`` instead.
    """

    byte_rate: float
    flop_rate: float
    blend: float
    kv_rate: float
    attention_rate: float
    step_s: float = 0.0
    layer_s: float = 0.0
    row_s: float = 0.0
    chunk_s: float = 0.0
    mixed_s: float = 0.0
    copy_rate: float = INFINITE
    swap_rate: float = INFINITE
    copy_step_s: float = 0.0
    map_s: float = 0.0
    map_step_s: float = 0.0
    swaps_beside: bool = False
    link_rate: float = INFINITE
    link_s: float = 0.0
    mixed_kv_rate: float = INFINITE
    few_rows: int = 0
    ramp_s: float = 0.0
    ramp_bytes: float = 1.0
    padded_sizes: tuple[int, ...] = ()
    host_s: float = 0.0
    host_row_s: float = 0.0
    host_mixed_s: float = 0.0
    host_layer_s: float = 0.0

    def __post_init__(self) -> None:
        for each in fields(self):
            value = getattr(self, each.name)
            if each.name in ("swaps_beside", "padded_sizes"):
                continue
            lowest = 1.0 if each.name == "blend" else 0.0
            is_rate = each.name.endswith("_rate")
            is_divisor = is_rate or each.name == "ramp_bytes"
            if not (value >= lowest and (not is_divisor or value > 0)) or (
                not is_rate and value == INFINITE
            ):
                raise ValueError(f"{each.name} must be above {lowest:g} and finite, got {value}")
        sizes = self.padded_sizes
        if any(a >= b for a, b in zip((0, *sizes), sizes, strict=False)):
            raise ValueError(f"padded_sizes must be above 0 and ascending, got {sizes}")

    def padded(self, count: float) -> float:
        """How many tokens or rows are multiplied for ``count``."""
        sizes = self.padded_sizes
        if not sizes or count > sizes[-1]:
            return count
        return sizes[bisect_left(sizes, count)]

    def is_captured(self, num_tokens: float) -> bool:
        """Whether a step is launched in one piece."""
        return bool(self.padded_sizes) and num_tokens <= self.padded_sizes[-1]


@dataclass(frozen=True, slots=True)
class LatencyModel:
    """The seconds of a model's steps on a machine. ``block_size`` is for what moves blocks."""

    shape: ModelShape
    at: Coefficients
    block_size: int = 16
    _constants: tuple[float, ...] = field(init=False, repr=False, compare=False)

    def __post_init__(self) -> None:
        shape, at = self.shape, self.at
        constants = (
            shape.layer_weights * shape.weight_bytes / at.byte_rate,
            2 * shape.layer_weights / at.flop_rate,
            shape.head_weights * shape.weight_bytes / at.byte_rate,
            2 * shape.head_weights / at.flop_rate,
            shape.token_bytes / at.kv_rate,
            4 * shape.attention_width / at.attention_rate,
            at.step_s + at.layer_s * shape.num_layers,
            self._reduce_s(),
            self._reduce_token_s(),
            at.ramp_s * shape.num_layers,
            at.ramp_bytes * shape.num_layers / shape.token_bytes,
            shape.token_bytes / at.mixed_kv_rate,
        )
        object.__setattr__(self, "_constants", constants)

    def _reduce_s(self) -> float:
        return 2 * self.shape.num_layers * self.at.link_s if self.shape.num_ranks > 1 else 0.0

    def _reduce_token_s(self) -> float:
        """A ring: each rank sends its part of bf16 activations round twice."""
        ranks = self.shape.num_ranks
        num_bytes = 2 * self.shape.hidden_size * 2 * (ranks - 1) / ranks
        return 2 * self.shape.num_layers * num_bytes / self.at.link_rate

    def for_shape(self, shape: ModelShape) -> LatencyModel:
        """Another model, or a rank of it (`ModelShape.split`), on the same machine."""
        return replace(self, shape=shape)

    def with_block_size(self, block_size: int) -> LatencyModel:
        return replace(self, block_size=block_size)

    def seconds(self, load: StepLoad) -> float:
        """How long the device takes for one step."""
        (
            layers_b, layers_f, head_b, head_f, kv, pairs, fixed, reduce_s, reduce_token, ramp,
            ramp_tokens, mixed_kv,
        ) = self._constants  # fmt: skip
        at = self.at
        total = 0.0
        if load.num_tokens:
            blend = at.blend
            total = fixed + reduce_s
            num_tokens, num_sampled = at.padded(load.num_tokens), load.num_sampled
            if num_tokens <= at.few_rows:
                total += layers_b
            else:
                total += (layers_b**blend + (layers_f * num_tokens) ** blend) ** (1 / blend)
            if num_sampled:
                num_sampled = at.padded(num_sampled)
                if num_sampled <= at.few_rows:
                    total += head_b
                else:
                    total += (head_b**blend + (head_f * num_sampled) ** blend) ** (1 / blend)
            if load.kv_tokens:
                total += ramp * load.kv_tokens / (load.kv_tokens + ramp_tokens)
                if load.num_chunks:
                    total += mixed_kv * load.kv_tokens
            total += (
                kv * load.kv_tokens
                + pairs * load.attention_pairs
                + at.row_s * load.num_rows
                + at.chunk_s * load.num_chunks
                + (at.mixed_s if load.num_chunks else 0.0)
                + reduce_token * load.num_tokens
            )
        if load.copied_blocks or load.swapped_blocks or load.mapped_blocks:
            total = self._with_moves(total, load)
        return total

    def _with_moves(self, total: float, load: StepLoad) -> float:
        at = self.at
        block_bytes = self.shape.token_bytes * self.block_size
        if load.mapped_blocks:
            total += at.map_step_s + load.mapped_blocks * at.map_s
        if load.copied_blocks:
            total += at.copy_step_s + load.copied_blocks * block_bytes / at.copy_rate
        swaps_s = load.swapped_blocks * block_bytes / at.swap_rate
        return max(total, swaps_s) if at.swaps_beside else total + swaps_s

    def host_seconds(self, load: StepLoad) -> float:
        """How long the host takes to plan and launch one step."""
        at = self.at
        total = at.host_s + at.host_row_s * load.num_rows
        if load.num_chunks:
            total += at.host_mixed_s
        if not at.is_captured(load.num_tokens):
            total += at.host_layer_s * self.shape.num_layers
        return total

    def with_host(self, device_s: float, load: StepLoad, hidden_s: float) -> float:
        """A step's seconds from the end of the one before, which has hidden ``hidden_s`` of the
        host's work for it."""
        exposed_s = self.host_seconds(load) - hidden_s
        if exposed_s <= 0:
            return device_s
        if self.at.is_captured(load.num_tokens):
            return device_s + exposed_s
        return max(device_s, exposed_s)

    def stepper(self) -> Callable[[StepPlan], StepTime]:
        """As `octavo.simulate.executor.Latency`."""
        meter, at = LoadMeter(), self.at
        has_host = bool(at.host_s or at.host_row_s or at.host_mixed_s or at.host_layer_s)

        def step_time(plan: StepPlan) -> StepTime:
            load = meter.measure(plan)
            if not has_host:
                return StepTime(self.seconds(load))
            return StepTime(
                self.seconds(load), self.host_seconds(load), at.is_captured(load.num_tokens)
            )

        return step_time
