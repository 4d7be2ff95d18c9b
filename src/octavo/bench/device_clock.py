"""When steps end on a GPU, by its own events.

The host learns of an end when it next looks, after it has launched the step behind: where that took
long, a step would be given the seconds of its neighbour.
"""

from __future__ import annotations

import torch

from octavo.execution.device import CUDADevice


class DeviceClock:
    """Implements `octavo.simulate.recording.StepClock`; everything a step does on the device's main
    queue comes before its mark."""

    def __init__(self, device: CUDADevice) -> None:
        self._stream = device.stream

    def launched(self) -> torch.cuda.Event:
        event = torch.cuda.Event(enable_timing=True)
        event.record(self._stream)
        return event

    now = launched

    def ended(self, mark: torch.cuda.Event) -> torch.cuda.Event:
        mark.synchronize()
        return mark

    def seconds(self, first: torch.cuda.Event, last: torch.cuda.Event) -> float:
        last.synchronize()
        return first.elapsed_time(last) / 1e3
