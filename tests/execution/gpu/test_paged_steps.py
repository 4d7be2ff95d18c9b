"""Attention of whole steps, as the engine runs them."""

from __future__ import annotations

import torch

from execution.gpu.references import attend_in_order, ints
from octavo.core.layout import KVLayout
from octavo.execution.attention.paged import PagedAttention, PagedStep
from octavo.execution.device import CUDADevice, PlainDevice
from octavo.execution.device_arena import DeviceArena
from octavo.execution.models.rope import RopeTable

ON_GPU = torch.cuda.is_available()


def test_room_for_a_step_padded_beyond_all_rows(device: torch.device) -> None:
    num_rows, size, head_dim = 17, 32, 16
    arena = DeviceArena(
        KVLayout(1, 1, head_dim, 4, 16), num_rows + 1, torch.float32,
        CUDADevice() if ON_GPU else PlainDevice(),
    )  # fmt: skip
    empty = torch.zeros(16, 0, device=device)
    attention = PagedAttention(
        arena, 2, RopeTable(empty, empty), torch.float32, max_decode=num_rows, max_length=16
    )
    step = PagedStep(
        ints([*range(num_rows), *[num_rows] * (size - num_rows)], device), ints([0] * size, device),
        ints([[row + 1] for row in range(num_rows)] + [[0]], device), ints([size], device),
        max_decode=size,
    )  # fmt: skip
    qkv = torch.randn(size, 4 * head_dim, device=device)
    out = attend_in_order(attention, step, 0, qkv)
    # The only key is the row's own.
    values = qkv.view(size, 4, head_dim)[:num_rows, 3:].expand(-1, 2, -1)
    assert torch.equal(out[:num_rows], values.flatten(1))
