"""FlashInfer's wrappers as far as Octavo calls them, in PyTorch and float32: the same arguments,
the same split between what a plan says on the host and what a run reads from device memory, and
checks of what the package takes for granted."""

from __future__ import annotations

from typing import Any

import torch

Pair = tuple[torch.Tensor, torch.Tensor]


def _check_host(tensor: torch.Tensor, length: int) -> None:
    # Tensors of the device would be waited for.
    assert tensor.device.type == "cpu"
    assert tensor.dtype == torch.int32
    assert tensor.is_contiguous()
    assert tensor.shape == (length,)


class Wrapper:
    """What both have in common. ``plan_info`` is what a captured run would be tied to."""

    made: list[Wrapper]

    def __init__(self, floats: torch.Tensor, **buffers: Any) -> None:
        self.floats = floats
        self.__dict__.update(buffers)
        self.num_plans = 0
        self.made.append(self)

    def reset_workspace_buffer(self, floats: torch.Tensor, ints: torch.Tensor) -> None:
        assert floats.dtype == ints.dtype == torch.uint8
        assert floats.numel() >= 128 << 20
        self.floats, self.ints = floats, ints

    def _planned(
        self, starts: torch.Tensor, indices: torch.Tensor, last: torch.Tensor, *sizes: int,
        window_left: int, q_data_type: torch.dtype, kv_data_type: torch.dtype, sm_scale: float,
    ) -> None:  # fmt: skip
        _check_host(starts, len(last) + 1)
        _check_host(last, len(last))
        assert starts[0] == 0
        assert (starts.diff() >= 1).all()
        assert len(indices) == starts[-1]
        self.heads, self.kv_heads, self.head_dim, self.page_size = sizes
        assert ((last >= 1) & (last <= self.page_size)).all()
        assert q_data_type == kv_data_type
        self.dtype, self.window_left, self.scale = q_data_type, window_left, sm_scale
        self.num_plans += 1

    def _attend(
        self, q: torch.Tensor, pair: Pair, out: torch.Tensor, lists: tuple[torch.Tensor, ...],
        is_causal: bool,
    ) -> None:  # fmt: skip
        first, starts, indices, last = (part.tolist() for part in lists)
        keys, values = pair
        assert q.shape == out.shape == (first[-1], self.heads, self.head_dim)
        assert q.is_contiguous()
        assert out.is_contiguous()
        assert q.dtype == keys.dtype == values.dtype == self.dtype
        assert keys.shape[1:] == (self.page_size, self.kv_heads, self.head_dim)
        assert keys.stride() == values.stride()
        assert max(keys.stride()) < 2**32
        for i, used in enumerate(last):
            pages = indices[starts[i] : starts[i + 1]]
            length = (len(pages) - 1) * self.page_size + used
            own = slice(first[i], first[i + 1])
            k, v = (
                part[pages].flatten(0, 1)[:length].float().repeat_interleave(
                    self.heads // self.kv_heads, dim=1
                )
                for part in (keys, values)
            )  # fmt: skip
            scores = torch.einsum("qhd,khd->hqk", q[own].float(), k) * self.scale
            place = torch.arange(length, device=q.device)
            query = place[length - (first[i + 1] - first[i]) :, None]
            seen = place[None] <= (query if is_causal else length)
            if self.window_left >= 0:
                seen &= place[None] >= query - self.window_left
            weights = scores.masked_fill(~seen, float("-inf")).softmax(dim=-1)
            out[own] = torch.einsum("hqk,khd->qhd", weights, v).to(out.dtype)


class Decode(Wrapper):
    use_cuda_graph: bool
    use_tensor_cores: bool
    paged_kv_indptr_buffer: torch.Tensor
    paged_kv_indices_buffer: torch.Tensor
    paged_kv_last_page_len_buffer: torch.Tensor

    def plan(self, starts: torch.Tensor, *sizes: Any, **options: Any) -> None:
        indices, last, *_ = sizes
        self._planned(starts, *sizes, **options)
        self.paged_kv_indptr_buffer.copy_(starts)
        self.paged_kv_last_page_len_buffer.copy_(last)
        self.paged_kv_indices_buffer[: len(indices)].copy_(indices)

    def run(self, q: torch.Tensor, pair: Pair, *, out: torch.Tensor) -> None:
        assert self.num_plans
        assert self.use_cuda_graph
        assert self.use_tensor_cores
        lists = (
            torch.arange(len(q) + 1),
            self.paged_kv_indptr_buffer,
            self.paged_kv_indices_buffer,
            self.paged_kv_last_page_len_buffer,
        )
        self._attend(q, pair, out, lists, is_causal=False)


class Prefill(Wrapper):
    def plan(
        self, first: torch.Tensor, *sizes: Any, causal: bool, max_token_per_sequence: int,
        **options: Any,
    ) -> None:  # fmt: skip
        starts, indices, last, *_ = sizes
        _check_host(first, len(last) + 1)
        assert causal
        assert max_token_per_sequence == first.diff().max()
        self._planned(*sizes, **options)
        device = self.floats.device
        # The list of pages is read as it is when attention runs.
        self.lists = (first.to(device), starts.to(device), indices, last.to(device))

    def run(self, q: torch.Tensor, pair: Pair, *, out: torch.Tensor) -> None:
        self._attend(q, pair, out, self.lists, is_causal=True)


class FakeFlashInfer:
    """The package. ``made`` are the wrappers that it made."""

    def __init__(self) -> None:
        self.made: list[Any] = []
        # Of its own, so that tests do not see each other's.
        names = {"made": self.made}
        self.BatchDecodeWithPagedKVCacheWrapper = type("Decode", (Decode,), names)
        self.BatchPrefillWithPagedKVCacheWrapper = type("Prefill", (Prefill,), names)

    @staticmethod
    def fast_decode_plan(wrapper: Decode, *sizes: Any, **options: Any) -> None:
        """Copies nothing: buffers were filled before."""
        assert wrapper.num_plans
        wrapper._planned(*sizes, **options)
