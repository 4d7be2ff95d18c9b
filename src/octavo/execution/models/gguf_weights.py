"""Weights of a GGUF file, dequantized straight into their destination. Names are translated."""

from __future__ import annotations

import re

import numpy as np
import torch

from octavo.core.gguf_file import GGUFFile, TensorInfo
from octavo.core.model_config import ModelConfig, ModelLoadError
from octavo.execution.models.gguf_blocks import GROUP, STORED_TYPES, stored_rows
from octavo.execution.models.gguf_config import ROPE_FACTORS
from octavo.execution.models.weights import QuantizedRows, check_shape, check_unused

_LAYER_NAME = re.compile(r"model\.layers\.(\d+)\.(.+)\.(weight|bias)")
_LAYER_PARTS = {
    "input_layernorm": "attn_norm",
    "self_attn.q_proj": "attn_q",
    "self_attn.k_proj": "attn_k",
    "self_attn.v_proj": "attn_v",
    "self_attn.q_norm": "attn_q_norm",
    "self_attn.k_norm": "attn_k_norm",
    "self_attn.o_proj": "attn_output",
    "post_attention_layernorm": "ffn_norm",
    "mlp.gate_proj": "ffn_gate",
    "mlp.up_proj": "ffn_up",
    "mlp.down_proj": "ffn_down",
}
_TOP_NAMES = {
    "model.embed_tokens.weight": "token_embd.weight",
    "model.norm.weight": "output_norm.weight",
    "lm_head.weight": "output.weight",
}
# Values dequantized at once: 1 MiB of float32, a core's L2 cache. SmolLM2-135M loads in 0.7 s
# against 0.87 s for whole tensors, and a 70B's tensors never exist in float32.
_CHUNK_VALUES = 1 << 18


class GGUFWeights:
    """Tensors of ``file`` under Hugging Face names.

    Of the llama architecture, llama.cpp's converter reorders the rows of q and k for interleaved
    rotation; ``copy`` undoes it.
    """

    def __init__(self, file: GGUFFile, config: ModelConfig) -> None:
        self._file = file
        self._head_dim = config.head_dim
        self._is_interleaved = config.architecture == "llama"
        self._unused = set(file.tensors) - {ROPE_FACTORS}

    def check(self, name: str, shape: tuple[int, ...]) -> None:
        info = self._file.tensors.get(gguf_name(name))
        check_shape(self._file.path, gguf_name(name), None if info is None else info.shape, shape)

    def copy(
        self, name: str, shape: tuple[int, ...], into: torch.Tensor, axis: int, start: int
    ) -> None:
        info = self._file.tensors[gguf_name(name)]
        self._unused.discard(info.name)
        if into.dim() == 1:
            values = self._rows(info, 0, 1)[0, start : start + into.shape[0]]
            into.copy_(self._rotated(name, values[:, None])[:, 0])
            return
        first = start if axis == 0 else 0
        step = max(1, _CHUNK_VALUES // shape[1])
        step = -(-step // self._head_dim) * self._head_dim  # whole heads: _rotated works on them
        for row in range(0, into.shape[0], step):
            count = min(step, into.shape[0] - row)
            values = self._rotated(name, self._rows(info, first + row, count))
            if axis == 1:
                values = values.narrow(1, start, into.shape[1])
            into[row : row + count].copy_(values)

    def stored_rows(
        self, name: str, shape: tuple[int, ...], axis: int, start: int, size: int
    ) -> QuantizedRows | None:
        info = self._file.tensors[gguf_name(name)]
        if info.type_name not in STORED_TYPES or (axis == 1 and (start | size) % GROUP):
            return None
        self._unused.discard(info.name)
        raw = self._file.raw(info.name).reshape(-1, info.row_bytes)
        first, count = (start, size) if axis == 0 else (0, shape[0])
        rows = stored_rows(raw[first : first + count], info.type_name)
        values, scales, minima = (
            self._rotated(name, torch.from_numpy(part)).numpy()
            for part in (rows.values, rows.scales, rows.minima)
        )
        if axis == 1:
            values = values[:, start : start + size]
            groups = slice(start // GROUP, (start + size) // GROUP)
            scales, minima = scales[:, groups], minima[:, groups]
        return QuantizedRows(rows.bits, values, scales, minima)

    def is_quantized(self, name: str) -> bool:
        return self._file.tensors[gguf_name(name)].type_name not in ("F32", "F16", "BF16", "F64")

    def check_all_used(self, ignored: frozenset[str]) -> None:
        check_unused(self._file.path, self._unused - {gguf_name(name) for name in ignored})

    def _rows(self, info: TensorInfo, first: int, count: int) -> torch.Tensor:
        """Float32 ``[count, shape[-1]]``."""
        from gguf import GGMLQuantizationType, dequantize  # only with a GGUF file

        raw = self._file.raw(info.name).reshape(-1, info.row_bytes)[first : first + count]
        try:
            values = dequantize(raw, GGMLQuantizationType(info.ggml_type))
        except NotImplementedError:
            raise ModelLoadError(
                f"{self._file.path}: tensor {info.name} has type {info.type_name}, "
                "which cannot be dequantized"
            ) from None
        # The map is read-only, which torch warns of; F32 is a view of it.
        return torch.from_numpy(values if values.flags.writeable else np.array(values))

    def _rotated(self, name: str, values: torch.Tensor) -> torch.Tensor:
        """Undo the converter's ``reshape(heads, 2, dim // 2).swapaxes(1, 2)`` on rows of q, k."""
        if not self._is_interleaved or not (".q_proj." in name or ".k_proj." in name):
            return values
        heads = values.reshape(-1, self._head_dim // 2, 2, values.shape[-1])
        return heads.transpose(1, 2).reshape(values.shape)


def gguf_name(name: str) -> str:
    """The GGUF name of the tensor that Hugging Face calls ``name``."""
    if (match := _LAYER_NAME.fullmatch(name)) is not None:
        layer, part, kind = match.groups()
        return f"blk.{layer}.{_LAYER_PARTS[part]}.{kind}"
    return _TOP_NAMES[name]
