"""What a step puts together arrives in one copy, where it was, whatever else is sent."""

from __future__ import annotations

from functools import partial

import numpy as np
import pytest
import torch

from octavo.core.plan import int_array
from octavo.execution.device import PlainDevice
from octavo.execution.staging import Staging


class Events(PlainDevice):
    """Copies in their order, and whose memory is waited for."""

    def __init__(self) -> None:
        self.log: list[str] = []

    def event(self) -> Events.Event:  # type: ignore[override]
        return self.Event(self.log, number=sum(line.startswith("made") for line in self.log))

    class Event:
        def __init__(self, log: list[str], number: int) -> None:
            self.log, self.number = log, number
            log.append(f"made {number}")

        def record(self) -> None:
            self.log.append(f"sent {self.number}")

        def synchronize(self) -> None:
            self.log.append(f"await {self.number}")

        def query(self) -> bool:
            return True


def write(target: torch.Tensor, places: torch.Tensor, values: torch.Tensor) -> None:
    """As the kernel does; both are where kernels want them."""
    assert (values.data_ptr() - places.data_ptr()) % 128 == 0
    target[places.long()] = values


def made(device: PlainDevice) -> Staging:
    staging = Staging(device, depth=1, room=128)
    staging.reserve(40)
    staging.keep(33)
    staging.reserve(64)
    return staging


def test_all_of_a_step_is_one_copy() -> None:
    """In turns, each behind the copy that read its memory last; a step without numbers sends none,
    but does what waits."""
    device = Events()
    staging = made(device)
    done: list[list[int]] = []
    for step in range(3):
        one, first = staging.take(3)
        staging.then(
            lambda *found: done.append([len(found), *found[0].tolist()]), int_array([step])
        )
        two, second = staging.take(5)
        staging.then(lambda: done.append([]))
        staging.then(pytest.fail, int_array([]), int_array([]))
        one[:], two[:] = step, 10 + step
        staging.send()
        assert (first.tolist(), second.tolist()) == ([step] * 3, [10 + step] * 5)
        assert (first.data_ptr() - staging.device.data_ptr()) // 4 == 64
        assert (second.data_ptr() - first.data_ptr()) // 4 == 32
    staging.then(lambda: done.append([-1]))
    staging.send()
    staging.send()
    assert done == [[1, 0], [], [1, 1], [], [1, 2], [], [-1]]
    assert device.log[2:] == [f"{what} {turn}" for turn in (1, 0, 1) for what in ("await", "sent")]


def test_what_is_kept_stays() -> None:
    """While others are sent; what is taken beside it goes in the same copy."""
    device = Events()
    staging = made(device)
    staging.take_kept(33)[:] = range(33)
    host, sent = staging.take(2)
    host[:] = 7
    staging.send()
    assert (staging.device[:33].tolist(), sent.tolist()) == (list(range(33)), [7, 7])
    for value in range(4):
        host, sent = staging.take(104)
        host[:] = value
        staging.send()
        assert (staging.device[:33].tolist(), sent.tolist()) == (list(range(33)), [value] * 104)
    assert sum(line.startswith("sent") for line in device.log) == 5
    with pytest.raises(AssertionError, match="before"):
        staging.take(1), staging.take_kept(1)


@pytest.mark.parametrize(("count", "num_copies"), [(40, 1), (64, 1), (65, 2), (130, 3), (500, 8)])
def test_what_finds_no_room_follows(count: int, num_copies: int) -> None:
    """In order, and it leaves what was taken as it is."""
    device = Events()
    staging = made(device)
    target = torch.zeros(512, dtype=torch.int32)
    taken, landed = staging.take(104)
    taken[:] = range(104)
    places = np.random.default_rng(0).permutation(512)[:count]
    staging.then(partial(write, target), places, int_array(places + 1))
    staging.send()
    expected = np.zeros(512, dtype=np.int32)
    expected[places] = places + 1
    assert target.tolist() == expected.tolist()
    assert landed.tolist() == list(range(104))
    assert sum(line.startswith("sent") for line in device.log) == num_copies


def test_work_that_fits_into_a_copy_is_done_at_once() -> None:
    """Behind another, where it does not fit into what the others leave of this one."""
    device = Events()
    staging = made(device)
    found: list[list[int]] = []
    staging.take(104)
    for count in (20, 60, 3):
        staging.then(
            lambda *parts: found.append([len(part) for part in parts]), *[np.arange(count)] * 2
        )
    staging.send()
    assert found == [[20, 20], [60, 60], [3, 3]]
    assert sum(line.startswith("sent") for line in device.log) == 3


def test_a_step_that_fails_moves_nothing() -> None:
    """Neither the one whose work fails, nor the one that took more than it then filled."""
    staging = made(PlainDevice())
    _, before = staging.take(4)
    staging.send()

    def failing(values: torch.Tensor) -> None:
        raise ZeroDivisionError

    staging.take_kept(5)
    staging.then(failing, np.arange(300))
    staging.then(pytest.fail, np.arange(3))
    with pytest.raises(ZeroDivisionError):
        staging.send()
    host, after = staging.take(4)
    host[:] = 5
    staging.send()
    assert after.data_ptr() == before.data_ptr()
    assert after.tolist() == [5] * 4
