"""Kernels that change rows' device state, against indexing, outputs and their ends poisoned."""

from __future__ import annotations

import pytest
import torch

from execution.gpu.references import ints
from octavo.execution.kernels.row_state import fill_tokens, gather_rows, scatter

# Around the edges of a program's 256.
COUNTS = [1, 7, 255, 256, 257, 601]
NUM_ROWS = 700
POISON = -77_777
LEAST = -(2**31)


def poisoned(count: int, device: torch.device) -> tuple[torch.Tensor, torch.Tensor]:
    """``count`` places in the middle of others, and all of them."""
    whole = torch.full((32 + count + 256,), POISON, dtype=torch.int32, device=device)
    return whole[32 : 32 + count], whole


def state(device: torch.device) -> torch.Tensor:
    """A value for each row, and 0 for the padding row behind them."""
    values = torch.randint(1, 2**31 - 1, (NUM_ROWS + 1,), dtype=torch.int32, device=device)
    values[NUM_ROWS] = 0
    return values


def check(found: tuple[torch.Tensor, torch.Tensor], expected: torch.Tensor) -> None:
    """The places are as expected, and what is around them is as it was."""
    own, whole = found
    assert torch.equal(own, expected)
    assert (whole[:32] == POISON).all()
    assert (whole[32 + len(own) :] == POISON).all()


@pytest.mark.parametrize("count", COUNTS)
def test_rows_are_gathered(device: torch.device, count: int) -> None:
    """In any order, some twice; the last pads."""
    rows = torch.randint(NUM_ROWS, (count,), dtype=torch.int32, device=device)
    rows[-1] = NUM_ROWS
    last_token, position = state(device), state(device)
    out = [poisoned(count, device) for _ in range(3)]
    gather_rows(rows, last_token, position, *(own for own, _ in out))
    for found, expected in zip(out, (last_token[rows], rows, position[rows]), strict=True):
        check(found, expected)
    assert [int(own[-1]) for own, _ in out] == [0, NUM_ROWS, 0]


@pytest.mark.parametrize("count", [0, *COUNTS])
def test_values_are_scattered(device: torch.device, count: int) -> None:
    """To places out of order, of all rows of a table, the first and the last among them."""
    own, whole = poisoned(3 * 350, device)
    table = own.view(350, 3)
    order = torch.randperm(len(own) - 2, device=device)[: max(count - 2, 0)] + 1
    ends = torch.tensor([len(own) - 1, 0], device=device)
    places = torch.cat([ends[:1], order, ends[1:]])[:count].int()
    # Any 32 bits: floats and halves of seeds are written as well.
    values = torch.randint(LEAST, 2**31 - 1, (count,), dtype=torch.int32, device=device)
    expected = own.clone()
    expected[places.long()] = values
    scatter(table, places, values)
    check((own, whole), expected)


@pytest.mark.parametrize("count", COUNTS)
def test_unknown_tokens_are_filled_in(device: torch.device, count: int) -> None:
    """Whatever negative number stands for them; known ones stay, 0 among them."""
    last_token = state(device)
    rows = torch.randint(NUM_ROWS, (count,), dtype=torch.int32, device=device)
    rows[-1] = NUM_ROWS
    kinds = ints([-1, 0, 1, -5, 2**31 - 1, LEAST, 95], device)
    own, whole = poisoned(count, device)
    own.copy_(kinds.repeat(count // len(kinds) + 1)[:count])
    own[-1] = -1
    expected = torch.where(own < 0, last_token[rows], own)
    fill_tokens(own, rows, last_token)
    check((own, whole), expected)
    assert own[-1] == 0, "the padding row's"
