"""Layers for inference: plain tensors, no autograd. Each names its tensor-parallel split axis.

::

    split        weight [out, in]    this rank holds       output
    column       rows (out)          its rows of each part its part of the features
    row          columns (in)        its columns           summed over ranks
    replicated   not split           all                   all

A merged projection (qkv, gate and up) is one weight of several parts; each part is split on its
own, so a rank's output is its q, then its k, then its v.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, Literal, Protocol

import torch
import torch.nn.functional as F

from octavo.execution.models.fp8 import Fp8Quantization, dequantize
from octavo.execution.models.parallel import TensorParallel
from octavo.execution.models.weights import Weights

if TYPE_CHECKING:
    from octavo.execution.models.quantized import PackedWeight, QuantizedInputs

Split = Literal["column", "row", "replicated"]


@dataclass(frozen=True, slots=True)
class Shard:
    """One rank's slice of a weight: from ``start`` on along ``axis``."""

    name: str
    shape: tuple[int, int]
    axis: int
    start: int
    num_rows: int
    num_columns: int


class Quantization(Protocol):
    """How a layer's weights are narrowed at loading (see `quantization`)."""

    def load(self, layer: Linear, weights: Weights) -> list[PackedWeight]:
        """The layer's weights in 4 or 8 bits; empty to keep them as they are."""
        ...

    def quantize_inputs(self, x: torch.Tensor) -> QuantizedInputs: ...

    def rms_norm(self, x: torch.Tensor, weight: torch.Tensor, eps: float) -> QuantizedInputs: ...

    def silu_and_mul(self, gate_up: torch.Tensor) -> QuantizedInputs: ...


# oneDNN streams a packed weight that is not in cache more slowly at 1 or 2 rows than at 4, so
# larger weights than this get their rows repeated to 4: all products of SmolLM2-135M take 6 %
# less at 1 row and 14 % less at 2. Smaller weights gain nothing.
REPEAT_NUMEL = 750_000


class Linear:
    """``x @ weight.T + bias`` for one or several stacked parts.

    ``parts`` are ``(name, out_features)`` pairs; tensors are ``name.weight`` and ``name.bias``.
    ``x`` is ``[rows, in]``, of this rank's share of the input where ``split`` is ``row``.
    Call ``load`` and then ``prepare`` before use. A ``weight`` of float8_e4m3fn has ``scales``,
    float32 ``[out]``.
    """

    def __init__(
        self,
        parts: Sequence[tuple[str, int]],
        in_features: int,
        *,
        split: Split,
        bias: bool,
        parallel: TensorParallel,
    ) -> None:
        self.parts = tuple(parts)
        self.in_features = in_features
        self.split = split
        self.parallel = parallel
        # A row split's outputs are summed, so one rank alone adds the bias.
        self.has_bias = bias and (split != "row" or parallel.rank == 0)
        self.skips_bias = bias and not self.has_bias
        self.sums = split == "row" and parallel.size > 1
        self.local_in = in_features
        self.local_outs = [out for _, out in self.parts]
        if split == "column":
            self.local_outs = [parallel.share(out, f"the rows of {n}") for n, out in self.parts]
        elif split == "row":
            self.local_in = parallel.share(in_features, f"the columns of {self.parts[0][0]}")
        self.weight: torch.Tensor | None = None
        self.scales: torch.Tensor | None = None
        self.bias: torch.Tensor | None = None
        self.num_bytes = 0
        self._packed: torch.Tensor | None = None
        self._repeats = False
        self.dtype = torch.float32
        self._quantized: list[PackedWeight] = []
        self._quantize: Callable[[torch.Tensor], QuantizedInputs] | None = None

    @property
    def is_quantized(self) -> bool:
        """Whether inputs are quantized too: callers may pass `QuantizedInputs`."""
        return bool(self._quantized)

    def kinds(self) -> set[str]:
        """Widths of the quantized parts: ``int4``, ``int8``, ``fp8``; empty for wider floats."""
        if self.scales is not None:
            return {"fp8"}
        return {f"int{part.bits}" for part in self._quantized}

    def load(
        self,
        weights: Weights,
        dtype: torch.dtype,
        device: torch.device,
        quantization: Quantization | Fp8Quantization | None = None,
    ) -> None:
        """Read this rank's shard of every part."""
        for name, out in self.parts:
            weights.check(f"{name}.weight", (out, self.in_features))
            if self.has_bias:
                weights.check(f"{name}.bias", (out,))
        found = None
        if isinstance(quantization, Fp8Quantization):
            found = quantization.load(self, weights, dtype, device)
        elif quantization is not None:
            self._quantized = quantization.load(self, weights)
            self._quantize = quantization.quantize_inputs
        num_rows = sum(self.local_outs)
        wide = torch.float32 if self._quantized else dtype
        self.bias = torch.empty(num_rows, dtype=wide, device=device) if self.has_bias else None
        if self._quantized:
            self._load_biases(weights)
            self.num_bytes = sum(part.num_bytes for part in self._quantized)
            return
        if found is not None:
            self.weight, self.scales = found
        else:
            self.weight = self._load_plain(weights, num_rows, dtype, device)
        self._load_biases(weights)
        self.num_bytes = sum(
            part.nbytes for part in (self.weight, self.scales, self.bias) if part is not None
        )

    def _load_plain(
        self, weights: Weights, num_rows: int, dtype: torch.dtype, device: torch.device
    ) -> torch.Tensor:
        weight = torch.empty(num_rows, self.local_in, dtype=dtype, device=device)
        row = 0
        for shard in self.shards():
            rows = slice(row, row + shard.num_rows)
            weights.copy(shard.name, shard.shape, weight[rows], shard.axis, shard.start)
            row += shard.num_rows
        return weight

    def shards(self) -> list[Shard]:
        """This rank's slice of every part's weight."""
        axis = 1 if self.split == "row" else 0
        rank = self.parallel.rank if self.split != "replicated" else 0
        return [
            Shard(
                name=f"{name}.weight",
                shape=(out, self.in_features),
                axis=axis,
                start=rank * (self.local_in if axis == 1 else local_out),
                num_rows=local_out,
                num_columns=self.local_in,
            )
            for (name, out), local_out in zip(self.parts, self.local_outs, strict=True)
        ]

    def _load_biases(self, weights: Weights) -> None:
        if self.bias is None:
            return
        row = 0
        for (name, out), shard in zip(self.parts, self.shards(), strict=True):
            start = 0 if shard.axis == 1 else shard.start
            weights.copy(f"{name}.bias", (out,), self.bias[row : row + shard.num_rows], 0, start)
            row += shard.num_rows

    def share_weight(self, weight: torch.Tensor) -> None:
        """Use another layer's ``[out, in]`` weight (tied embeddings) instead of ``load``."""
        self.weight = weight

    def prepare(self) -> None:
        """Make the weight ready for use: pack it where that is faster, and drop the plain copy.

        oneDNN's packed bfloat16 product beats ``F.linear`` at every row count measured
        (SmolLM2-135M's layers, one thread: 1.5x at 1 row, 1.5 to 1.8x at 16, 1.03x at 512); the
        hint of a batch size made no difference. Other dtypes and devices use ``F.linear``.
        """
        if self._quantized:
            return
        if self.weight is None:
            raise RuntimeError(f"{self.parts[0][0]} was prepared before it was loaded")
        if self.scales is not None:
            return
        self.dtype = self.weight.dtype
        if packs(self.weight.dtype, self.weight.device):
            self._packed = torch.ops.mkldnn._reorder_linear_weight(self.weight)
            if self.num_bytes == 0:  # shared with the embedding: the packed copy is its own
                self.num_bytes = self.weight.nbytes
            self._repeats = self.weight.numel() >= REPEAT_NUMEL
            self.weight = None

    def __call__(self, x: torch.Tensor | QuantizedInputs) -> torch.Tensor:
        y: torch.Tensor
        if self._quantized:
            y = self._multiply_quantized(x)
            return self.parallel.all_reduce(y) if self.sums else y
        assert isinstance(x, torch.Tensor)
        if self.scales is not None:
            # By no kernel of its own: the families that run on a GPU multiply in `FusedDecoder`.
            assert self.weight is not None
            plain = torch.empty_like(self.weight, dtype=x.dtype)
            dequantize(self.weight, self.scales, plain)
            y = F.linear(x, plain, self.bias)
            return self.parallel.all_reduce(y) if self.sums else y
        if x.dtype != self.dtype:  # beside quantized layers, whose outputs are fp32
            x = x.to(self.dtype)
        if self._packed is not None:
            if self._repeats and 0 < (rows := x.shape[0]) < 3:
                x = x.repeat(4 // rows, 1)
                y = _packed_linear(x, self._packed, self.bias, "none", [], "")[:rows]
            else:
                y = _packed_linear(x, self._packed, self.bias, "none", [], "")
        else:
            y = F.linear(x, self.weight, self.bias)
        return self.parallel.all_reduce(y) if self.sums else y

    def _multiply_quantized(self, x: torch.Tensor | QuantizedInputs) -> torch.Tensor:
        """Float32 ``[rows, out]``."""
        assert self._quantize is not None
        inputs = self._quantize(x) if isinstance(x, torch.Tensor) else x
        y = torch.empty(inputs.num_rows, sum(self.local_outs))
        out, column = y.numpy(), 0
        for part in self._quantized:
            part.multiply(inputs, out[:, column : column + part.num_outputs])
            column += part.num_outputs
        return y if self.bias is None else y.add_(self.bias)


class Embedding:
    """Rows of a ``[vocab, hidden]`` table, split by vocabulary over ranks."""

    def __init__(
        self, name: str, vocab_size: int, hidden_size: int, *, parallel: TensorParallel
    ) -> None:
        self.name = name
        self.shape = (vocab_size, hidden_size)
        self.parallel = parallel
        self.local_vocab = parallel.share(vocab_size, f"the rows of {name}")
        self.first = parallel.rank * self.local_vocab
        self.weight: torch.Tensor | None = None
        self.num_bytes = 0

    def load(self, weights: Weights, dtype: torch.dtype, device: torch.device) -> None:
        """Read this rank's rows."""
        weights.check(f"{self.name}.weight", self.shape)
        self.weight = torch.empty(self.local_vocab, self.shape[1], dtype=dtype, device=device)
        weights.copy(f"{self.name}.weight", self.shape, self.weight, 0, self.first)
        self.num_bytes = self.weight.nbytes

    def __call__(self, token_ids: torch.Tensor) -> torch.Tensor:
        """``token_ids``: int64 ``[num_tokens]``. Returns ``[num_tokens, hidden]``, a new tensor."""
        assert self.weight is not None, f"{self.name} was not loaded"
        if self.parallel.size == 1:
            return self.weight.index_select(0, token_ids)
        local = token_ids - self.first
        is_elsewhere = (local < 0) | (local >= self.local_vocab)
        rows = self.weight.index_select(0, local.masked_fill_(is_elsewhere, 0))
        return self.parallel.all_reduce(rows.masked_fill_(is_elsewhere[:, None], 0))


class LearnedPositions:
    """A vector for each position: rows of a table whose first ``offset`` rows are not used;
    replicated over ranks."""

    def __init__(self, name: str, num_positions: int, hidden_size: int, *, offset: int) -> None:
        self.name = name
        self.shape = (num_positions, hidden_size)
        self.offset = offset
        self.weight: torch.Tensor | None = None
        self.num_bytes = 0

    def load(self, weights: Weights, dtype: torch.dtype, device: torch.device) -> None:
        """Read the used rows."""
        stored = (self.shape[0] + self.offset, self.shape[1])
        weights.check(f"{self.name}.weight", stored)
        self.weight = torch.empty(self.shape, dtype=dtype, device=device)
        weights.copy(f"{self.name}.weight", stored, self.weight, 0, self.offset)
        self.num_bytes = self.weight.nbytes

    def __call__(self, positions: torch.Tensor) -> torch.Tensor:
        """``positions``: int32 or int64 ``[num_tokens]``. Returns ``[num_tokens, hidden]``."""
        assert self.weight is not None, f"{self.name} was not loaded"
        return self.weight.index_select(0, positions)


def packs(dtype: torch.dtype, device: torch.device) -> bool:
    """Whether ``Linear`` packs weights of this dtype on this device."""
    return bool(
        device.type == "cpu"
        and dtype == torch.bfloat16
        and torch.backends.mkldnn.is_available()
        and torch.ops.mkldnn._is_mkldnn_bf16_supported()
    )


_packed_linear: Any = (
    torch.ops.mkldnn._linear_pointwise.default if torch.backends.mkldnn.is_available() else None
)
