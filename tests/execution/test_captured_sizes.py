"""What the simulator takes a captured step's rows to be padded to is what they are padded to."""

from __future__ import annotations

from bisect import bisect_left

import pytest

pytest.importorskip("triton")

from octavo.execution.captured_sizes import batch_bucket, captured_sizes, token_bucket


def test_every_number_of_rows_has_its_size() -> None:
    sizes = captured_sizes()
    assert sizes[-1] == 2048
    assert list(sizes) == sorted(set(sizes))
    for count in range(1, sizes[-1] + 1):
        padded = sizes[bisect_left(sizes, count)]
        assert padded == batch_bucket(count)
        assert count <= 224 or padded == token_bucket(count)
