"""The KV managers that the papers compare, over one pool of the papers' scale.

Default: OPT-13B on an A100 of 40 GB (Kwon et al., SOSP 2023, section 6.1): 12 GiB for keys and
values of 800 KiB a token, in blocks of 16 tokens, sequences of at most 2048.
"""

from __future__ import annotations

from dataclasses import dataclass, replace

from octavo.core.layout import KVLayout, mappable_block_sizes, num_blocks_for
from octavo.core.protocols import KVManager
from octavo.memory.contiguous import ContiguousManager
from octavo.memory.paged import PagedManager
from octavo.memory.reservation import Reservation
from octavo.memory.virtual import VirtualManager
from octavo.workload.items import WorkloadError

MANAGERS = ("orca-max", "orca-pow2", "orca-oracle", "paged", "virtual")
OPT_13B = KVLayout(num_layers=40, num_kv_heads=40, head_dim=128, dtype_bytes=2, block_size=16)
LLAMA_8B = KVLayout(num_layers=32, num_kv_heads=8, head_dim=128, dtype_bytes=2, block_size=16)
DRIVER_PAGE_BYTES = 2 * 2**20
KV_BYTES = 12 * 2**30
MAX_MODEL_LEN = 2048
MAX_BATCHED_TOKENS = 2560
_NUM_AHEAD = 4


@dataclass(frozen=True, slots=True)
class Pool:
    """``num_blocks`` blocks of ``block_size`` tokens for sequences of ``max_model_len`` tokens at
    most; ``token_bytes`` is what one token's keys and values take.

    Raises:
        WorkloadError: the longest sequence does not fit in a run of the pool.
    """

    num_blocks: int = KV_BYTES // OPT_13B.block_bytes
    block_size: int = OPT_13B.block_size
    max_model_len: int = MAX_MODEL_LEN
    token_bytes: int = OPT_13B.token_bytes

    def __post_init__(self) -> None:
        if min(self.num_blocks, self.block_size, self.max_model_len - 1) < 1:
            raise WorkloadError(
                f"a pool of {self.num_blocks} blocks of {self.block_size} tokens, for sequences of "
                f"{self.max_model_len}, holds nothing; it takes a block of a token at least, for "
                "sequences of two: give smaller blocks, or more of them"
            )
        needed = Reservation("max", self.max_model_len).num_blocks(
            1, self.max_model_len, self.block_size
        )
        if needed > self.num_blocks:
            raise WorkloadError(
                f"a pool of {self.num_blocks} blocks has no run of {needed}, which "
                f"{self.max_model_len} tokens need; give more blocks, or a shorter longest sequence"
            )

    @property
    def num_tokens(self) -> int:
        return self.num_blocks * self.block_size

    @property
    def num_bytes(self) -> int:
        return self.num_tokens * self.token_bytes

    @property
    def max_num_seqs(self) -> int:
        """Rows that never run out before blocks do: a sequence has 500 tokens on average."""
        return max(64, self.num_tokens // 128)


def driver_block(layout: KVLayout) -> int:
    """Tokens of the smallest block that is a whole number of a driver's pages, without padding."""
    return mappable_block_sizes(layout, DRIVER_PAGE_BYTES, MAX_MODEL_LEN)[0]


SCALES = {
    "opt-13b": Pool(),
    # 16 tokens are exactly a driver's page.
    "llama-3.1-8b": Pool(
        num_blocks=KV_BYTES // LLAMA_8B.block_bytes, token_bytes=LLAMA_8B.token_bytes
    ),
}


def pool_of(scale: str, num_blocks: int | None = None, block_size: int | None = None) -> Pool:
    """The pool of a scale, as large in tokens where only ``block_size`` differs.

    Raises:
        WorkloadError: there is no such scale, or the pool is too small.
    """
    if scale not in SCALES:
        raise WorkloadError(f"scale must be one of {', '.join(SCALES)}, got {scale!r}")
    pool = SCALES[scale]
    size = block_size or pool.block_size
    count = num_blocks or pool.num_tokens // size
    return replace(pool, num_blocks=count, block_size=size)


def build_manager(
    name: str, pool: Pool, *, prefix_caching: bool = False, num_host_blocks: int = 0
) -> KVManager:
    """One of ``MANAGERS`` over the pool; only ``paged`` and ``virtual`` cache and swap. Under
    ``virtual`` a block is mapped as it is: what a driver's pages make of a model's blocks is the
    business of ``block_size``."""
    sizes = (pool.num_blocks + 1, pool.block_size, pool.max_num_seqs)
    if name == "paged":
        return PagedManager(*sizes, prefix_caching=prefix_caching, num_host_blocks=num_host_blocks)
    if name == "virtual":
        num_places = num_blocks_for(pool.max_model_len, pool.block_size)
        return VirtualManager(
            *sizes,
            max_mapped_blocks=pool.max_num_seqs * num_places,
            num_places=num_places,
            num_ahead=_NUM_AHEAD,
            prefix_caching=prefix_caching,
            num_host_blocks=num_host_blocks,
        )
    reserve = name.removeprefix("orca-")
    return ContiguousManager(*sizes, Reservation(reserve, pool.max_model_len))
