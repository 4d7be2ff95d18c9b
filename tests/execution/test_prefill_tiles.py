"""Tiles of prompts, and their parts: every token once, every key of it once."""

from __future__ import annotations

import numpy as np
import pytest

from octavo.execution.prefill_tiles import KEY_TILE, TileCutter


def arrays(*values: list[int]) -> list[np.ndarray]:
    return [np.array(each, dtype=np.int32) for each in values]


@pytest.mark.parametrize("num_kv_heads", [1, 8, 64, 300])
def test_tiles_cover_every_token_and_key_once(num_kv_heads: int) -> None:
    random = np.random.default_rng(num_kv_heads)
    for _ in range(50):
        count = int(random.integers(1, 6))
        rows, counts, starts, done = arrays(
            random.permutation(8)[:count].tolist(),
            random.integers(1, 300, count).tolist(),
            random.choice([0, 5, 700, 9000, 70_000], count).tolist(),
            [0] * count,
        )
        done[-1] = random.integers(0, counts[-1] + 1)
        first = int(random.integers(0, count))
        cutter = TileCutter(32, num_kv_heads)
        found = cutter.tiles(rows, counts, starts, done, first).T.tolist()
        covered: dict[int, list[list[int]]] = {}
        for tile in found:
            covered.setdefault(tile[0], []).append(tile)
        offset = 0
        each = zip(rows, counts, starts, done, strict=True)
        for index, (row, tokens, start, skipped) in enumerate(each):
            if index >= first:
                for within in range(int(skipped), int(tokens), 32):
                    parts = covered.pop(offset + within)
                    size = min(32, int(tokens) - within)
                    position = int(start) + within
                    assert all(p[1:4] == [size, row, position] for p in parts)
                    assert [parts[0][4], *(p[5] for p in parts)] == [
                        *(p[4] for p in parts), position + size,
                    ]  # fmt: skip
                    assert parts[0][4] == 0
                    assert [p[7] for p in parts] == list(range(len(parts)))
                    assert {p[8] for p in parts} == {len(parts)}
                    slots = [p[6] for p in parts]
                    whole = len(parts) == 1
                    assert slots == (
                        [-1] if whole else list(range(slots[0], slots[0] + len(parts)))
                    )
                    assert all(p[4] % KEY_TILE == 0 for p in parts)
            offset += int(tokens)
        assert not covered
        used = [tile[6] for tile in found if tile[6] >= 0]
        assert used == list(range(len(used)))
        assert len(used) <= cutter.max_parts


def test_a_few_tokens_behind_a_long_prefix_are_cut() -> None:
    rows, counts, starts, done = arrays([0], [22], [8192], [0])
    found = TileCutter(32, 8).tiles(rows, counts, starts, done, 0)
    assert found.shape[1] == 13
    assert TileCutter(32, 8, cuts=False).tiles(rows, counts, starts, done, 0).shape[1] == 1


def test_many_tiles_stay_whole() -> None:
    rows, counts, starts, done = arrays([0], [4096], [0], [0])
    found = TileCutter(32, 8).tiles(rows, counts, starts, done, 0)
    assert found.shape[1] == 128
    assert (found[6] == -1).all()
    assert (np.diff(found[3]) < 0).all(), "those with most keys come first"
