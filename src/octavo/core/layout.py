"""Arithmetic of the one KV layout. Knows shapes and bytes; knows nothing of tensors or devices.

Inside a block (one contiguous piece of memory)::

    token 0                                  token 1 ...
    ┌ layer 0 ───────┬ layer 1 ───────┬ … ┐ ┌ layer 0 ───
    │ K heads│V heads│ K heads│V heads│   │ │ K heads│V …
    └────────┴───────┴────────┴───────┴───┘ └────────────
    └──────────── token_bytes ────────────┘

The stride between tokens is constant, so one layer's keys look like ``[token, kv_head, head_dim]``
with a token stride to a contiguous kernel and ``[block, token, kv_head, head_dim]`` to a paged one.

A driver maps whole pages, so a block that it is to map has to be a whole number of them: what such
blocks there are, and which wastes least, is decided here too (``choose_block``).
"""

from __future__ import annotations

from dataclasses import dataclass, replace
from fractions import Fraction
from math import gcd

# Padding that an explicit block size may cost: beyond this it is refused, not quietly paid for.
MAX_PADDING_SHARE = 1 / 8


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


class BlockSizeError(ValueError):
    """No block of that many tokens is a whole number of pages; the message lists those that are."""


@dataclass(frozen=True, slots=True)
class MappableBlock:
    """A block that is a whole number of pages, so that a driver can map it anywhere.

    ``layout.num_layers`` includes ``num_padding_layers`` that no model layer uses. Padding sits
    inside each token, not behind the block: the stride between tokens must not change where one
    block of a sequence ends and the next begins.
    """

    layout: KVLayout
    num_padding_layers: int
    page_bytes: int

    @property
    def block_size(self) -> int:
        """Tokens in a block."""
        return self.layout.block_size

    @property
    def block_bytes(self) -> int:
        return self.layout.block_bytes

    @property
    def num_pages(self) -> int:
        return self.layout.block_bytes // self.page_bytes

    @property
    def padding_share(self) -> float:
        """Part of the memory that padding layers take, in [0, 1)."""
        return self.num_padding_layers / self.layout.num_layers

    def expected_waste_bytes(self, expected_length: int) -> float:
        """Bytes that a sequence of about ``expected_length`` tokens takes and does not use.

        Its last block is half empty on average; where sequences are shorter than a block, the
        whole rest of it is. To this come the padding layers of the tokens that are there.
        """
        empty = max((self.block_size - 1) / 2, self.block_size - expected_length)
        padding = expected_length * self.padding_share
        return (empty + padding) * self.layout.token_bytes


def smallest_mappable_block_size(layout: KVLayout, page_bytes: int) -> int:
    """Tokens of the smallest whole number of pages, whatever ``layout.block_size`` says."""
    if page_bytes < 1:
        raise ValueError(f"page_bytes must be at least 1, got {page_bytes}")
    return page_bytes // gcd(layout.token_bytes, page_bytes)


def mappable_block_sizes(layout: KVLayout, page_bytes: int, limit: int) -> range:
    """The sizes, in tokens and up to ``limit``, at which a block is a whole number of pages."""
    step = smallest_mappable_block_size(layout, page_bytes)
    return range(step, limit + 1, step)


def block_candidates(layout: KVLayout, page_bytes: int) -> tuple[MappableBlock, ...]:
    """Blocks of at least ``layout.block_size`` tokens among which the expected length decides.

    First the smallest without padding; then each number of padding layers that makes the block
    smaller, in tokens and in bytes, than all numbers below it do. Twice the layers always reach
    the next power of two, beyond which there is nothing to gain.
    """
    candidates: list[MappableBlock] = []
    for num_layers in range(layout.num_layers, 2 * layout.num_layers + 1):
        padded = replace(layout, num_layers=num_layers)
        step = smallest_mappable_block_size(padded, page_bytes)
        block_size = num_blocks_for(layout.block_size, step) * step
        padded = replace(padded, block_size=block_size)
        if not candidates or (
            block_size < candidates[-1].block_size
            and padded.block_bytes < candidates[-1].block_bytes
        ):
            candidates.append(MappableBlock(padded, num_layers - layout.num_layers, page_bytes))
    return tuple(candidates)


def choose_block(layout: KVLayout, page_bytes: int, expected_length: int) -> MappableBlock:
    """The block of at least ``layout.block_size`` tokens that wastes least.

    ``expected_length`` is the tokens of a typical sequence when it ends: padding costs every
    token, a big block only the last one of a sequence.

    Raises:
        ValueError: ``expected_length`` or ``page_bytes`` is below 1.
    """
    if expected_length < 1:
        raise ValueError(f"expected_length must be at least 1, got {expected_length}")
    return min(
        block_candidates(layout, page_bytes),
        key=lambda block: (block.expected_waste_bytes(expected_length), block.num_padding_layers),
    )


def mappable_block(layout: KVLayout, page_bytes: int) -> MappableBlock:
    """A block of exactly ``layout.block_size`` tokens, padded only where it must be.

    Raises:
        BlockSizeError: it is not a whole number of pages, even with ``MAX_PADDING_SHARE`` padding.
    """
    for num_layers in range(layout.num_layers, 2 * layout.num_layers + 1):
        padded = replace(layout, num_layers=num_layers)
        block = MappableBlock(padded, num_layers - layout.num_layers, page_bytes)
        if block.padding_share > MAX_PADDING_SHARE:
            break
        if padded.block_bytes % page_bytes == 0:
            return block
    step = smallest_mappable_block_size(layout, page_bytes)
    first = max(layout.block_size // step - 1, 0) * step + step
    sizes = ", ".join(str(size) for size in range(first, first + 4 * step, step))
    others = [
        f"{block.block_size} with {block.num_padding_layers} padding layers"
        for block in block_candidates(replace(layout, block_size=1), page_bytes)[1:]
        if block.padding_share <= MAX_PADDING_SHARE
    ]
    raise BlockSizeError(
        f"block_size {layout.block_size} cannot be mapped: its {format_bytes(layout.block_bytes)} "
        f"are {layout.block_bytes / page_bytes:.4g} pages of {format_bytes(page_bytes)}; sizes "
        f"that can: {sizes} (any multiple of {step})"
        + "".join(f", or multiples of {other}" for other in others)
    )


@dataclass(frozen=True, slots=True)
class SeparatePages:
    """What vAttention maps at a time (Prabhu et al. 2025), to compare with: a page in each layer's
    K and V tensor, for the KV heads of one rank. A token may lie across two pages."""

    layout: KVLayout
    page_bytes: int

    @property
    def num_pages(self) -> int:
        return 2 * self.layout.num_layers

    @property
    def block_bytes(self) -> int:
        return self.num_pages * self.page_bytes

    @property
    def num_tokens(self) -> Fraction:
        """The paper's tokens a page, which need not be whole."""
        return Fraction(self.page_bytes, self._tensor_token_bytes)

    def expected_waste_bytes(self, expected_length: int) -> float:
        """As `MappableBlock.expected_waste_bytes`. Over all lengths the last page of a tensor is
        empty by a mean of half of it, less half of the greatest piece that tokens and pages are
        both made of."""
        piece = gcd(self._tensor_token_bytes, self.page_bytes)
        rest = self.page_bytes - expected_length * self._tensor_token_bytes
        return self.num_pages * max((self.page_bytes - piece) / 2, rest)

    @property
    def _tensor_token_bytes(self) -> int:
        return self.layout.num_kv_heads * self.layout.head_dim * self.layout.dtype_bytes


def format_bytes(num_bytes: float) -> str:
    """``num_bytes`` in the largest unit that keeps it at 1 or above: ``30 MiB``, ``22.5 KiB``."""
    for unit in ("B", "KiB", "MiB", "GiB"):
        if num_bytes < 1024:
            return f"{num_bytes:.4g} {unit}"
        num_bytes /= 1024
    return f"{num_bytes:.4g} TiB"
