"""FlashAttention-3 for long chunks, where it is installed: one call for a chunk and its prefix.

It is found as the package ``flash_attn_interface``, or as an operator that a library registered
that was loaded before (vLLM's build of the same kernels). It loads tiles of keys by its tensor's
shape, so it gets a slice that ends where a sequence does (`dense`).
"""

from __future__ import annotations

import importlib
import importlib.util
import logging
from functools import cache
from typing import Any

import torch

logger = logging.getLogger(__name__)
_PACKAGE = "flash_attn_interface"
# What the kernels are told beside their tensors. Names that a build does not have are left out.
_FIXED = {
    "is_causal": True,
    "window_size_left": -1,
    "window_size_right": -1,
    "attention_chunk": 0,
    "softcap": 0.0,
    "is_rotary_interleaved": False,
    "num_splits": 1,
    "pack_gqa": None,
    "sm_margin": 0,
    "cp_world_size": 1,
    "cp_rank": 0,
}


class Flash3:
    """A build's forward operator, called by the names of its own schema."""

    def __init__(self, operator: Any) -> None:
        names = [argument.name for argument in operator._schema.arguments]
        if not {"q", "k", "v", "cu_seqlens_q", "seqused_k", "softmax_scale"} <= set(names):
            raise RuntimeError(f"{operator} is no forward pass of FlashAttention-3")
        self._operator = operator
        self._sizes = (0, 0)
        self._lengths: tuple[torch.Tensor, ...] = ()
        self._arguments: dict[str, Any] = dict.fromkeys(names)
        self._arguments |= {name: value for name, value in _FIXED.items() if name in names}

    def __call__(self, queries: torch.Tensor, kv: torch.Tensor) -> torch.Tensor:
        """Causal attention of the last tokens of a sequence: ``queries [count, num_heads,
        head_dim]`` over ``kv [length, K|V, kv_head, head_dim]``, in any strides."""
        count, length = len(queries), len(kv)
        if (count, length) != self._sizes:
            # The same for all layers of a step. Builds differ in what they allow; as a batch of
            # one of any lengths all do.
            ints = torch.tensor([0, count, length], dtype=torch.int32).to(
                queries.device, non_blocking=True
            )
            self._sizes, self._lengths = (count, length), (ints[:2], ints[2:])
        arguments = self._arguments | {
            "q": queries,
            "k": kv[:, 0].unsqueeze(0),
            "v": kv[:, 1].unsqueeze(0),
            "cu_seqlens_q": self._lengths[0],
            "seqused_k": self._lengths[1],
            "max_seqlen_q": count,
            "softmax_scale": queries.shape[-1] ** -0.5,
        }
        found: torch.Tensor = self._operator(**arguments)[0]
        return found


@cache
def find_flash3() -> Flash3 | None:
    """What is installed; None: nothing, or a package that cannot be imported, which is logged."""
    if importlib.util.find_spec(_PACKAGE) is not None:
        try:
            importlib.import_module(_PACKAGE)
        except Exception as error:
            # Extensions fail in many ways when they were built for another PyTorch.
            logger.warning("%s is installed but cannot be imported: %s", _PACKAGE, error)
    for library in ("flash_attn_3", "_vllm_fa3_C"):
        operator = getattr(getattr(torch.ops, library), "fwd", None)
        if operator is not None:
            return Flash3(operator.default)
    return None
