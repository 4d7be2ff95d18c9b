from __future__ import annotations

import pytest
from hypothesis import given
from hypothesis import strategies as st

from octavo.core.layout import (
    BlockSizeError,
    KVLayout,
    SeparatePages,
    block_candidates,
    choose_block,
    format_bytes,
    mappable_block,
    mappable_block_sizes,
    smallest_mappable_block_size,
)

KIB, MIB = 2**10, 2**20
LLAMA_8B = KVLayout(32, 8, 128, 2, 1)
LLAMA_1B = KVLayout(16, 8, 64, 2, 1)
LLAMA_70B_TP8 = KVLayout(80, 1, 128, 2, 1)
YI_6B = KVLayout(32, 4, 128, 2, 1)
YI_34B = KVLayout(60, 8, 128, 2, 1)
YI_34B_TP2 = KVLayout(60, 4, 128, 2, 1)
QWEN3_8B = KVLayout(36, 8, 128, 2, 1)
SMOLLM2_135M = KVLayout(30, 3, 64, 2, 1)

LAYOUTS = st.builds(
    KVLayout,
    num_layers=st.integers(1, 130),
    num_kv_heads=st.integers(1, 40),
    head_dim=st.sampled_from([32, 64, 80, 96, 112, 128, 192, 256]),
    dtype_bytes=st.sampled_from([1, 2, 4]),
    block_size=st.integers(1, 64),
)
PAGES = st.sampled_from([4 * KIB, 16 * KIB, 64 * KIB, 256 * KIB, 2 * MIB])


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
    with pytest.raises(ValueError, match="page_bytes must be at least 1"):
        smallest_mappable_block_size(LLAMA_8B, 0)
    with pytest.raises(ValueError, match="expected_length must be at least 1"):
        choose_block(LLAMA_8B, 2 * MIB, 0)


@pytest.mark.parametrize(
    ("layout", "page_bytes", "expected"),
    [
        (YI_6B, 2 * MIB, [(32, 2 * MIB, 0)]),
        (LLAMA_8B, 2 * MIB, [(16, 2 * MIB, 0)]),
        (LLAMA_1B, 2 * MIB, [(64, 2 * MIB, 0)]),
        (YI_34B, 2 * MIB, [(128, 30 * MIB, 0), (8, 2 * MIB, 4)]),
        (YI_34B_TP2, 2 * MIB, [(256, 30 * MIB, 0), (16, 2 * MIB, 4)]),
        (LLAMA_70B_TP8, 2 * MIB, [(256, 10 * MIB, 0), (128, 6 * MIB, 16), (32, 2 * MIB, 48)]),
        (
            QWEN3_8B,
            256 * KIB,
            [(16, 2304 * KIB, 0), (8, 1280 * KIB, 4), (4, 768 * KIB, 12), (1, 256 * KIB, 28)],
        ),
        (SMOLLM2_135M, 4 * KIB, [(8, 180 * KIB, 0), (1, 24 * KIB, 2)]),
    ],
)
def test_blocks_that_can_be_mapped(
    layout: KVLayout, page_bytes: int, expected: list[tuple[int, int, int]]
) -> None:
    blocks = block_candidates(layout, page_bytes)
    found = [(block.block_size, block.block_bytes, block.num_padding_layers) for block in blocks]
    assert found == expected


def test_the_expected_length_decides_between_a_big_block_and_padding() -> None:
    short, long = choose_block(YI_34B, 2 * MIB, 500), choose_block(YI_34B, 2 * MIB, 2048)
    assert (short.block_size, short.num_padding_layers, short.num_pages) == (8, 4, 1)
    assert (long.block_size, long.num_padding_layers, long.num_pages) == (128, 0, 15)
    assert short.padding_share == 0.0625
    assert choose_block(YI_34B, 2 * MIB, 890).num_padding_layers == 4
    assert choose_block(YI_34B, 2 * MIB, 900).num_padding_layers == 0


def test_a_block_is_at_least_as_big_as_asked() -> None:
    on_a_host = choose_block(KVLayout(30, 3, 64, 2, 16), 4 * KIB, 512)
    assert (on_a_host.block_size, on_a_host.num_padding_layers) == (16, 0)
    assert choose_block(KVLayout(32, 8, 128, 2, 16), 4 * KIB, 512).block_bytes == 2 * MIB
    assert choose_block(KVLayout(32, 8, 128, 2, 17), 2 * MIB, 512).block_size == 32


def test_waste_is_half_a_block_or_what_a_short_sequence_leaves_of_one() -> None:
    (block,) = block_candidates(LLAMA_8B, 2 * MIB)
    assert block.expected_waste_bytes(1000) == 7.5 * LLAMA_8B.token_bytes
    assert block.expected_waste_bytes(1) == 15 * LLAMA_8B.token_bytes
    padded = block_candidates(YI_34B, 2 * MIB)[1]
    assert padded.expected_waste_bytes(100) == 3.5 * 256 * KIB + 100 * 16 * KIB


@given(LAYOUTS, PAGES, st.integers(1, 10_000))
def test_every_candidate_is_whole_pages_and_none_wastes_less(
    layout: KVLayout, page_bytes: int, expected_length: int
) -> None:
    chosen = choose_block(layout, page_bytes, expected_length)
    blocks = block_candidates(layout, page_bytes)
    assert chosen in blocks
    assert blocks[0].num_padding_layers == 0
    for block in blocks:
        assert block.block_bytes == block.num_pages * page_bytes
        assert block.block_size >= layout.block_size
        assert block.layout.num_layers == layout.num_layers + block.num_padding_layers
        assert chosen.expected_waste_bytes(expected_length) <= block.expected_waste_bytes(
            expected_length
        )


@given(LAYOUTS, PAGES)
def test_mappable_sizes_are_all_that_there_are(layout: KVLayout, page_bytes: int) -> None:
    sizes = mappable_block_sizes(layout, page_bytes, 64)
    assert list(sizes) == [n for n in range(1, 65) if layout.token_bytes * n % page_bytes == 0]


@given(LAYOUTS, PAGES)
def test_an_explicit_size_is_kept_or_refused(layout: KVLayout, page_bytes: int) -> None:
    try:
        block = mappable_block(layout, page_bytes)
    except BlockSizeError:
        assert layout.block_bytes % page_bytes
        return
    assert block.block_size == layout.block_size
    assert block.block_bytes % page_bytes == 0
    assert block.padding_share <= 1 / 8
    assert block.num_padding_layers == 0 or layout.block_bytes % page_bytes


def test_an_explicit_size_that_cannot_be_mapped_is_refused_with_those_that_can() -> None:
    assert mappable_block(KVLayout(32, 8, 128, 2, 48), 2 * MIB).num_pages == 3
    assert mappable_block(KVLayout(60, 8, 128, 2, 16), 2 * MIB).num_padding_layers == 4
    with pytest.raises(BlockSizeError) as caught:
        mappable_block(KVLayout(32, 8, 128, 2, 24), 2 * MIB)
    assert str(caught.value) == (
        "block_size 24 cannot be mapped: its 3 MiB are 1.5 pages of 2 MiB; sizes that can: 16, 32, "
        "48, 64 (any multiple of 16)"
    )
    with pytest.raises(BlockSizeError, match=r"128, 256, .*, or multiples of 8 with 4 padding"):
        mappable_block(KVLayout(60, 8, 128, 2, 100), 2 * MIB)


@pytest.mark.parametrize(
    ("layout", "tokens_at_64_kib", "tokens_at_2_mib"),
    [(YI_6B, 64, 2048), (LLAMA_8B, 32, 1024)],
)
def test_tokens_a_page_of_separate_tensors_are_the_papers(
    layout: KVLayout, tokens_at_64_kib: int, tokens_at_2_mib: int
) -> None:
    assert SeparatePages(layout, 64 * KIB).num_tokens == tokens_at_64_kib
    pages = SeparatePages(layout, 2 * MIB)
    assert pages.num_tokens == tokens_at_2_mib
    assert pages.num_pages == 2 * layout.num_layers


@pytest.mark.parametrize("page_bytes", [256, 384, 4 * KIB, 64 * KIB])
@pytest.mark.parametrize(("num_kv_heads", "head_dim"), [(1, 64), (3, 64), (5, 80)])
def test_separate_tensors_waste_what_their_last_pages_do(
    page_bytes: int, num_kv_heads: int, head_dim: int
) -> None:
    """Also where a page is no whole number of tokens, or a token no whole number of pages."""
    pages = SeparatePages(KVLayout(7, num_kv_heads, head_dim, 2, 1), page_bytes)
    token = num_kv_heads * head_dim * 2
    assert pages.block_bytes == 14 * page_bytes
    # All lengths of a period that begins where a page is full.
    first, period = page_bytes, page_bytes
    waste = [
        -(-n * token // page_bytes) * page_bytes - n * token for n in range(first, first + period)
    ]
    expected = 14 * sum(waste) / period
    assert pages.expected_waste_bytes(first) == pytest.approx(expected)
    assert pages.expected_waste_bytes(1) == pytest.approx(max(expected, 14 * (page_bytes - token)))


@pytest.mark.parametrize(
    ("num_bytes", "text"),
    [
        (0, "0 B"),
        (1023, "1023 B"),
        (22.5 * KIB, "22.5 KiB"),
        (30 * MIB, "30 MiB"),
        (2**41, "2 TiB"),
    ],
)
def test_sizes_are_written_for_people(num_bytes: float, text: str) -> None:
    assert format_bytes(num_bytes) == text
