"""A step's seconds from what it asks of a machine: physically shaped, a dozen coefficients.

::

    weights     bytes of the weights against products with them, for the tokens (layers) and for the
                sampled rows (head): (memory ** blend + arithmetic ** blend) ** (1 / blend); a large
                ``blend`` is the roofline's longer of the two, 1 is one after the other
    kv          keys and values that rows of one token read, a shared prefix once
    attention   4 · pairs · attention width operations of longer chunks
    fixed       a step's own, each layer's, each row's, each chunk's, that of having chunks
    moves       blocks copied and mapped, then swapped: behind the step, or beside it
    ranks       two all-reduces a layer, where several share a model

Rates are those of one machine. Shapes scale: weights, keys, operations and layers are counted from
the model (`shape`), so that one fit serves other models of the same machine.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, field, fields, replace

from octavo.core.plan import StepPlan
from octavo.simulate.load import LoadMeter, StepLoad
from octavo.simulate.shape import ModelShape

INFINITE = float("inf")


@dataclass(frozen=True, slots=True, kw_only=True)
class Coefficients:
    """What a machine does: rates a second, in bytes and operations; overheads in seconds.

    ``link_rate`` (bytes a second between ranks, each way) and ``link_s`` (an all-reduce of nothing)
    are needed for more than one rank only. ``swaps_beside``: swaps run beside the steps.
    ``mixed_s`` is what a step with chunks takes more, however many: a GPU's decode steps are
    captured in one piece, and their launches are hidden.
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
    map_s: float = 0.0
    swaps_beside: bool = False
    link_rate: float = INFINITE
    link_s: float = 0.0

    def __post_init__(self) -> None:
        for each in fields(self):
            value = getattr(self, each.name)
            if each.name == "swaps_beside":
                continue
            lowest = 1.0 if each.name == "blend" else 0.0
            is_rate = each.name.endswith("_rate")
            if not (value >= lowest and (not is_rate or value > 0)) or (
                not is_rate and value == INFINITE
            ):
                raise ValueError(f"{each.name} must be above {lowest:g} and finite, got {value}")


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
        """How long one step takes."""
        layers_b, layers_f, head_b, head_f, kv, pairs, fixed, reduce_s, reduce_token = (
            self._constants
        )
        at = self.at
        total = 0.0
        if load.num_tokens:
            blend = at.blend
            total = fixed + reduce_s
            total += (layers_b**blend + (layers_f * load.num_tokens) ** blend) ** (1 / blend)
            if load.num_sampled:
                total += (head_b**blend + (head_f * load.num_sampled) ** blend) ** (1 / blend)
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
        total += load.mapped_blocks * at.map_s + load.copied_blocks * block_bytes / at.copy_rate
        swaps_s = load.swapped_blocks * block_bytes / at.swap_rate
        return max(total, swaps_s) if at.swaps_beside else total + swaps_s

    def stepper(self) -> Callable[[StepPlan], float]:
        """Seconds of plans, given in the order of their launch, for one executor."""
        meter = LoadMeter()

        def step_seconds(plan: StepPlan) -> float:
            return self.seconds(meter.measure(plan))

        return step_seconds
