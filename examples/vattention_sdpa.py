"""Stock attention on virtually contiguous keys and values, outside the engine.

A tiny "engine" in which requests come, grow by a token a step and go. Each step tells
`octavo.vattention.VirtualKVCache` how long its requests are and runs PyTorch's own attention on
slices of ordinary tensors (FlashAttention on a GPU): no block tables, no gathering. The results are
compared with attention over dense copies.

    python examples/vattention_sdpa.py --device cpu
    python examples/vattention_sdpa.py --device cuda --page-size-kb 2048
"""

from __future__ import annotations

import argparse

import torch
from torch.nn.functional import scaled_dot_product_attention

from octavo.vattention import VirtualKVCache

LAYERS, BATCH, CONTEXT, HEADS, KV_HEADS, DIM = 2, 4, 2048, 8, 2, 64


def attend(query: torch.Tensor, keys: torch.Tensor, values: torch.Tensor) -> torch.Tensor:
    """``query [heads, dim]`` over ``keys`` and ``values [tokens, kv_heads, dim]``, in place."""
    q = query[None, :, None, :]
    k, v = keys.transpose(0, 1)[None], values.transpose(0, 1)[None]
    return scaled_dot_product_attention(q, k, v, enable_gqa=True)[0, :, 0]


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--device", default="cuda" if torch.cuda.is_available() else "cpu")
    parser.add_argument("--page-size-kb", type=int, default=None)
    parser.add_argument("--steps", type=int, default=200)
    options = parser.parse_args()
    is_gpu = options.device.startswith("cuda")
    dtype = torch.bfloat16 if is_gpu else torch.float32
    page_size_kb = options.page_size_kb or (2048 if is_gpu else 64)
    cache = VirtualKVCache.init(
        LAYERS, BATCH, CONTEXT, KV_HEADS, DIM, page_size_kb, dtype=dtype, device=options.device,
        memory_limit=256 << 20,
    )  # fmt: skip
    torch.manual_seed(0)
    dense: dict[int, list[tuple[torch.Tensor, torch.Tensor]]] = {}
    worst, num_tokens, num_requests = 0.0, 0, 0
    with cache:
        for step in range(options.steps):
            # A request every five steps; the oldest goes when there is no room.
            if step % 5 == 0:
                if not cache.num_free_reqids:
                    oldest = next(iter(dense))
                    cache.free_reqid(oldest)
                    del dense[oldest]
                dense[cache.alloc_reqid()] = []
                num_requests += 1
            starts = {req_id: len(rows[0][0]) if rows else 0 for req_id, rows in dense.items()}
            lengths = [0] * BATCH
            for req_id, start in starts.items():
                # The first step of a request is its prompt.
                lengths[req_id] = start + (1 if start else 100 + 37 * (num_requests % 7))
            cache.step(lengths)
            for req_id, start in starts.items():
                end = lengths[req_id]
                copies = []
                for layer in range(LAYERS):
                    new = torch.randn(
                        2, end - start, KV_HEADS, DIM, dtype=dtype, device=options.device
                    )
                    keys, values = cache.keys[layer][req_id], cache.values[layer][req_id]
                    keys[start:end], values[start:end] = new[0], new[1]
                    before = dense[req_id][layer] if start else (new[0, :0], new[1, :0])
                    copies.append(tuple(torch.cat(pair) for pair in zip(before, new, strict=True)))
                    query = torch.randn(HEADS, DIM, dtype=dtype, device=options.device)
                    found = attend(query, keys[:end], values[:end])
                    expected = attend(query, *copies[layer])
                    worst = max(worst, float((found - expected).abs().max()))
                dense[req_id] = copies
                num_tokens += end - start
        mapped = cache.mapped_bytes / 2**20
    limit = 2e-2 if is_gpu else 1e-5
    if worst > limit:
        raise SystemExit(f"differs from dense attention by {worst:.2g}")
    print(
        f"{num_requests} requests, {num_tokens} tokens in {options.steps} steps on "
        f"{options.device}: agrees with dense attention (largest difference {worst:.1e}); "
        f"{mapped:.1f} MiB mapped at the end"
    )


if __name__ == "__main__":
    main()
