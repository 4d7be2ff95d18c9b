from __future__ import annotations

import pytest

from octavo.core.layout import KVLayout


def test_sixteen_tokens_of_an_8b_llama_are_a_stock_driver_page() -> None:
    layout = KVLayout(num_layers=32, num_kv_heads=8, head_dim=128, dtype_bytes=2, block_size=16)
    assert layout.token_bytes == 128 * 1024
    assert layout.block_bytes == 2 * 2**20
    assert layout.block_shape() == (16, 32, 2, 8, 128)


@pytest.mark.parametrize(("tokens", "blocks"), [(0, 0), (1, 1), (16, 1), (17, 2)])
def test_a_sequence_wastes_less_than_a_block(tokens: int, blocks: int) -> None:
    assert KVLayout(1, 1, 1, 1, 16).num_blocks(tokens) == blocks


def test_sizes_are_positive() -> None:
    with pytest.raises(ValueError, match="head_dim must be at least 1"):
        KVLayout(1, 1, 0, 2, 16)
