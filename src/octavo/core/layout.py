"""Arithmetic of the one KV layout. Knows shapes and bytes; knows nothing of tensors or devices.

Inside a block (one contiguous piece of memory)::

    token 0                                  token 1 ...
    ┌ layer 0 ───────┬ layer 1 ───────┬ … ┐ ┌ layer 0 ───
    │ K heads│V heads│ K heads│V heads│   │ │ K heads│V …
    └────────┴───────┴────────┴───────┴───┘ └────────────
    └──────────── token_bytes ────────────┘

The stride between tokens is constant, so one layer's keys look like ``[token, kv_head, head_dim]``
with a token stride to a contiguous kernel and ``[block, token, kv_head, head_dim]`` to a paged one.
"""

from __future__ import annotations

from dataclasses import dataclass


@dataclass(frozen=True, slots=True)
class KVLayout:
    """Shape of the KV cache of one rank.

    ``num_kv_heads`` counts the heads that this rank holds; ``dtype_bytes`` is the size of one
    element.
    """

    num_layers: int
    num_kv_heads: int
    head_dim: int
    dtype_bytes: int
    block_size: int

    def __post_init__(self) -> None:
        for name in self.__slots__:
            if getattr(self, name) < 1:
                raise ValueError(f"{name} must be at least 1, got {getattr(self, name)}")

    @property
    def token_elements(self) -> int:
        """Elements that one token's keys and values take over all layers."""
        return self.num_layers * 2 * self.num_kv_heads * self.head_dim

    @property
    def token_bytes(self) -> int:
        return self.token_elements * self.dtype_bytes

    @property
    def block_bytes(self) -> int:
        return self.token_bytes * self.block_size

    def block_shape(self) -> tuple[int, int, int, int, int]:
        """``[token, layer, K|V, kv_head, head_dim]``."""
        return (self.block_size, self.num_layers, 2, self.num_kv_heads, self.head_dim)

    def num_blocks(self, num_tokens: int) -> int:
        """Blocks that hold ``num_tokens`` tokens of one sequence."""
        return -(-num_tokens // self.block_size)


def num_blocks_for(num_tokens: int, block_size: int) -> int:
    """Blocks of ``block_size`` tokens that hold ``num_tokens`` tokens of one sequence."""
    return -(-num_tokens // block_size)
