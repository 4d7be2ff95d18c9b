"""A program: attention kernels over wide heads, compiled for a Hopper GPU on a machine that may
have none. A tile that shared memory cannot hold is an error, as on a GPU. Prints each kernel and
the bytes of shared memory that it takes; of those that go through whole tiles of keys and then
through masked ones also whether both are computed by the same operations, so that a token's bits
are the same in either."""

from __future__ import annotations

import re
from collections import Counter
from concurrent.futures import ThreadPoolExecutor
from typing import Any

import torch
from compile_without_gpu import StandIn
from triton.runtime import driver
from triton.runtime.jit import JITFunction

HEADS, KV_HEADS = 8, 4
# Head dim, what is computed in and what is stored, over slots or tables; and which kernels.
CASES = [
    (128, torch.float32, torch.float32, True, ("few",)),
    (256, torch.float32, torch.float32, True, ("few", "prefill")),
    (256, torch.float32, torch.float32, False, ("many", "prefill", "prefix")),
    (256, torch.bfloat16, torch.float8_e4m3fn, True, ("few", "prefill")),
    (256, torch.bfloat16, torch.bfloat16, False, ("few", "prefix")),
    (128, torch.bfloat16, torch.bfloat16, False, ("shared",)),
    (64, torch.bfloat16, torch.float8_e4m3fn, True, ("shared",)),
]


def launch(
    head_dim: int, dtype: torch.dtype, kv_dtype: torch.dtype, in_slots: bool, kernel: str
) -> None:
    from octavo.execution.kernels import decode_attention, decode_parts
    from octavo.execution.kernels import prefill_attention as prefill
    from octavo.execution.kernels import prefix_attention as prefix
    from octavo.execution.prefill_tiles import FIELDS

    def ints(*shape: int) -> torch.Tensor:
        return torch.zeros(*shape, dtype=torch.int32)

    blocks = (3, 256) if in_slots else (64, 16)
    kv_layer = torch.zeros(*blocks, 2, KV_HEADS, head_dim, dtype=torch.uint8).to(kv_dtype)
    scales = torch.ones(2, KV_HEADS) if kv_dtype == torch.float8_e4m3fn else None
    tables = None if in_slots else ints(64, 128)
    host = torch.device("cpu")
    rows = {"few": 4, "many": 64, "shared": 512}.get(kernel, 128)
    queries = torch.empty(rows, HEADS, head_dim, dtype=dtype)
    out = torch.empty_like(queries)
    if kernel == "prefill":
        tiles = prefill.PrefillTiles(ints(FIELDS, 4), ints(1))
        workspace = prefill.PrefillWorkspace(4, KV_HEADS, head_dim, host)
        prefill.prefill_attention(
            queries, kv_layer, tiles, tables, out, workspace, kv_scales=scales
        )
    elif kernel == "prefix":
        assert tables is not None
        shared = prefix.PrefixTiles(ints(2, 64), ints(2), ints(2), ints(1), ints(rows))
        prefix.prefix_attention(queries, kv_layer, shared, tables, splits=2, kv_scales=scales)
    else:
        tiling = decode_parts.decode_tiling(rows, HEADS, KV_HEADS, head_dim, 100, dtype, kv_dtype)
        shared_parts = None
        if kernel == "shared":
            shared_parts = decode_attention.SharedPrefixParts(
                ints(rows), torch.empty(rows, 2, HEADS, head_dim), torch.empty(rows, 2, HEADS)
            )
        parts = decode_parts.decode_parts(
            ints(rows), ints(rows), ints(1), max_tokens=rows, num_kv_heads=KV_HEADS, programs=396,
            tiling=tiling, prefix_lengths=None if shared_parts is None else shared_parts.lengths,
        )  # fmt: skip
        own = decode_attention.DecodeWorkspace(
            len(parts.table), rows, KV_HEADS, head_dim, HEADS // KV_HEADS, host
        )
        decode_attention.decode_attention(
            queries, kv_layer, parts, tables, out, own, tiling, kv_scales=scales,
            prefix=shared_parts,
        )  # fmt: skip


def loops(ptx: str) -> list[Counter[str]]:
    """How many of each operation on floats the parts of a kernel have that weigh keys. A product
    and a difference that the compiler makes one are rounded once, not twice."""
    found = []
    for block in re.split(r"^\$L__BB.*$", ptx, flags=re.MULTILINE):
        counts = Counter(re.findall(r"\b(fma|mul|add|sub|ex2)\.[a-z.]*f32", block))
        if counts["ex2"] >= 4:
            found.append(counts)
    return found


def main() -> None:
    driver.set_active(StandIn())
    run, found = JITFunction.run, []

    def told(self: Any, *args: Any, **options: Any) -> Any:
        compiled = run(self, *args, **options)
        words = [self.__name__, str(compiled.metadata.shared)]
        if self.__name__ in ("_prefill", "_prefix"):
            whole, masked = loops(compiled.asm["ptx"])[:2]
            words.append("alike" if whole == masked else f"{whole} {masked}")
        found.append(" ".join(words))
        return compiled

    JITFunction.run = told
    with ThreadPoolExecutor(2) as pool:
        cases = [(*case[:4], kernel) for case in CASES for kernel in case[4]]
        for done in [pool.submit(launch, *case) for case in cases]:
            done.result()
    print("\n".join(found))


if __name__ == "__main__":
    main()
