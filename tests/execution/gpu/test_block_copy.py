"""Copies inside the pool: every byte, of blocks of any size, and nothing beside them."""

from __future__ import annotations

import numpy as np
import pytest
import torch

from octavo.core.layout import KVLayout
from octavo.core.plan import CopyBlocks, int_array
from octavo.execution.device import CUDADevice, Device, PlainDevice
from octavo.execution.device_arena import DeviceArena
from octavo.execution.kernels.block_copy import copy_blocks
from octavo.execution.staging import Staging


@pytest.mark.parametrize(
    ("dtype", "shape"),
    [(torch.bfloat16, (7, 4, 3, 2, 2, 96)), (torch.float32, (5, 1, 1, 2, 1, 1)),
     (torch.uint8, (6, 3, 1, 1, 1, 5)), (torch.bfloat16, (4, 1, 1, 1, 1, 3))],
)  # fmt: skip
def test_copies(device: torch.device, dtype: torch.dtype, shape: tuple[int, ...]) -> None:
    kv = torch.randint(0, 255, (*shape[:-1], shape[-1] * dtype.itemsize), dtype=torch.uint8)
    kv = kv.view(dtype).to(device)
    expected = kv.clone()
    sources = torch.tensor([1, 3, 1], dtype=torch.int32, device=device)[: shape[0] - 3]
    destinations = torch.tensor([2, 0, 4], dtype=torch.int32, device=device)[: shape[0] - 3]
    expected[destinations.long()] = expected[sources.long()]
    copy_blocks(kv, sources, destinations)
    assert torch.equal(kv.view(torch.uint8), expected.view(torch.uint8))


def test_a_plan_of_more_copies_than_one_launch() -> None:
    place: Device = CUDADevice() if torch.cuda.is_available() else PlainDevice()
    layout = KVLayout(num_layers=1, num_kv_heads=1, head_dim=4, dtype_bytes=4, block_size=2)
    arena = DeviceArena(layout, 81, torch.float32, place)
    arena.kv.copy_(torch.randn(arena.kv.shape))
    before = arena.kv.clone()
    pairs = np.random.default_rng(0).permutation(80)[:74].reshape(37, 2) + 1
    if torch.cuda.is_available():
        torch.cuda.synchronize()
    staging = Staging(place, depth=1, room=64)
    with place.context():
        arena.obey((CopyBlocks(int_array(pairs[:, 0]), int_array(pairs[:, 1])),), staging)
        staging.send()
    if torch.cuda.is_available():
        torch.cuda.synchronize()
    before[pairs[:, 1]] = before[pairs[:, 0]]
    assert torch.equal(arena.kv, before)
