"""Tensors from files to a device: several threads read, nobody waits for the copies.

::

    file ── threads: pread ──▶ pinned buffers ── a stream of its own ──▶ the layer's weight

A tensor is cut into pieces of whole rows. While a piece is copied the next ones are read, so both
run at their own rate and no more host memory is taken than the buffers have. Whoever uses the
weight on the current stream finds it filled.
"""

from __future__ import annotations

import math
import os
from collections import deque
from collections.abc import Iterator
from concurrent.futures import Future, ThreadPoolExecutor
from dataclasses import dataclass
from pathlib import Path

import numpy as np
import torch
from numpy.typing import NDArray

from octavo.core.model_config import ModelLoadError

# One thread copies 4 to 6 GB/s from the page cache; pieces of 4 MiB keep eight busy to the end of
# a tensor, at 0.1 ms of Python each.
_NUM_THREADS = 8
_BUFFER_BYTES = 4 << 20
_NUM_BUFFERS = 32


@dataclass(frozen=True, slots=True)
class StoredTensor:
    """Where a tensor lies: contiguous, from byte ``offset`` of a file on."""

    path: Path
    name: str
    offset: int
    shape: tuple[int, ...]
    dtype: torch.dtype


class _Buffer:
    """Host memory that one piece at a time passes; free again once ``copied`` has passed."""

    def __init__(self, device: torch.device) -> None:
        is_cuda = device.type == "cuda"
        self.tensor = torch.empty(_BUFFER_BYTES, dtype=torch.uint8, pin_memory=is_cuda)
        self.array: NDArray[np.uint8] = self.tensor.numpy()
        self.copied = torch.cuda.Event() if is_cuda else None

    def wait(self) -> None:
        if self.copied is not None:
            self.copied.synchronize()


class WeightReader:
    """Fills tensors of ``device`` from files. Close it when all are read: threads and files end,
    and so do the buffers."""

    def __init__(self, device: torch.device) -> None:
        self._device = device
        self._stream = torch.cuda.Stream(device) if device.type == "cuda" else None
        self._threads = ThreadPoolExecutor(_NUM_THREADS, thread_name_prefix="octavo-weights")
        self._free: deque[_Buffer] = deque()
        self._num_buffers = 0
        self._files: dict[Path, int] = {}

    def __enter__(self) -> WeightReader:
        return self

    def __exit__(self, *_: object) -> None:
        self.close()

    def close(self) -> None:
        """Waits for the last copies."""
        self._threads.shutdown(cancel_futures=True)
        for file in self._files.values():
            os.close(file)
        self._files = {}
        for buffer in self._free:
            buffer.wait()
        self._free.clear()

    def copy(self, stored: StoredTensor, into: torch.Tensor, axis: int, start: int) -> None:
        """Fill ``into``, on the device, with the slice of ``stored`` from ``start`` on along
        ``axis``; values are cast.

        Raises:
            ModelLoadError: the file cannot be read or ends too early.
        """
        if self._stream is not None:
            # What ``into`` lies in may still be read or written by work that was started before.
            self._stream.wait_stream(torch.cuda.current_stream(self._device))
        waiting: deque[tuple[_Buffer, slice, Future[torch.Tensor]]] = deque()
        try:
            file = self._file(stored.path)
            for rows in self._pieces(stored, into):
                buffer = self._buffer() if self._has_room() else None
                if buffer is None:
                    self._land(into, *waiting.popleft())
                    buffer = self._buffer()
                job = self._threads.submit(
                    _read, file, stored, buffer, into.shape, axis, start, rows
                )
                waiting.append((buffer, rows, job))
            while waiting:
                self._land(into, *waiting.popleft())
        except OSError as error:
            raise ModelLoadError(
                f"{stored.path}: tensor {stored.name} cannot be read: {error}"
            ) from error
        finally:
            for buffer, _, job in waiting:
                job.cancel() or job.exception()  # a thread may still be writing into it
                self._free.append(buffer)
        if self._stream is not None:
            torch.cuda.current_stream(self._device).wait_stream(self._stream)

    def fits(self, stored: StoredTensor) -> bool:
        """Whether a row of the tensor fits in a buffer."""
        return _row_bytes(stored) <= _BUFFER_BYTES

    def _pieces(self, stored: StoredTensor, into: torch.Tensor) -> Iterator[slice]:
        most = max(_BUFFER_BYTES // max(_row_bytes(stored), 1), 1)
        for first in range(0, into.shape[0], most):
            yield slice(first, min(first + most, into.shape[0]))

    def _has_room(self) -> bool:
        return bool(self._free) or self._num_buffers < _NUM_BUFFERS

    def _buffer(self) -> _Buffer:
        if not self._free:
            self._num_buffers += 1
            return _Buffer(self._device)
        buffer = self._free.popleft()
        buffer.wait()
        return buffer

    def _land(
        self, into: torch.Tensor, buffer: _Buffer, rows: slice, job: Future[torch.Tensor]
    ) -> None:
        try:
            piece = job.result()
            if self._stream is None:
                into[rows].copy_(piece)
                return
            with torch.cuda.stream(self._stream):
                if piece.dtype != into.dtype:
                    # Cast there: on the host it would take longer than the copy.
                    piece = torch.empty_like(piece, device=self._device).copy_(
                        piece, non_blocking=True
                    )
                into[rows].copy_(piece, non_blocking=True)
                assert buffer.copied is not None
                buffer.copied.record()
        finally:
            self._free.append(buffer)

    def _file(self, path: Path) -> int:
        if path not in self._files:
            self._files[path] = os.open(path, os.O_RDONLY)
        return self._files[path]


def _read(
    file: int,
    stored: StoredTensor,
    buffer: _Buffer,
    shape: torch.Size,
    axis: int,
    start: int,
    rows: slice,
) -> torch.Tensor:
    """The piece in the buffer, in the file's dtype, of the shape it is to be written in."""
    row_bytes, item = _row_bytes(stored), stored.dtype.itemsize
    count = rows.stop - rows.start
    first = rows.start + (start if axis == 0 else 0)
    size = count * row_bytes
    whole = buffer.array[:size]
    _read_into(file, whole, stored.offset + first * row_bytes, stored)
    if axis == 1 and shape[1] * item != row_bytes:
        # Packed to the front of the buffer, by way of a copy: the two overlap.
        kept = whole.reshape(count, row_bytes)[:, start * item : (start + shape[1]) * item]
        size = count * shape[1] * item
        buffer.array[:size] = np.ascontiguousarray(kept).reshape(-1)
    tensor = buffer.tensor[:size].view(stored.dtype)
    return tensor.view(count, *shape[1:])


def _read_into(file: int, memory: NDArray[np.uint8], offset: int, stored: StoredTensor) -> None:
    done = 0
    while done < len(memory):
        count = os.preadv(file, [memory[done:]], offset + done)
        if not count:
            raise ModelLoadError(
                f"{stored.path}: tensor {stored.name} cannot be read: the file ends "
                f"{len(memory) - done} bytes too early"
            )
        done += count


def _row_bytes(stored: StoredTensor) -> int:
    """Of an entry along the first axis."""
    return math.prod(stored.shape[1:]) * stored.dtype.itemsize
