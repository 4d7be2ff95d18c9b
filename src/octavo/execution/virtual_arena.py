"""The pool in driver pages: a view with every block in order, and a slot of addresses for each row.

Knows places and blocks; knows no sequences. The same memory is seen twice::

    pool view   [ 0 ][ 1 ][ 2 ][ 3 ][ 4 ][ 5 ] …     by copies, swaps and paged kernels
    slot 0      [ 4 ][ 1 ][ · ][ · ]                 by contiguous kernels: tokens in order
    slot 1      [ 4 ][ 2 ][ 5 ][ · ]                 the first block is shared with slot 0

Mappings change between two steps, on the thread that runs both: a plan's are made when the step
before it has ended, so none is changed while something reads through it, however deep the pipeline.
"""

from __future__ import annotations

import weakref
from collections import defaultdict
from collections.abc import Iterable

import torch

from octavo.core.layout import KVLayout, num_blocks_for
from octavo.core.plan import NULL_BLOCK, KVCommand, MapBlocks
from octavo.execution.arena import Arena
from octavo.execution.pages.interface import PageError, Pages
from octavo.execution.pages.ledger import runs
from octavo.execution.pages.memfd import MemfdPages


class VirtualArena(Arena):
    """An arena whose blocks can be mapped in ``num_slots`` slots of ``max_model_len`` tokens.

    ``slots [num_slots, max_tokens, num_layers, 2, num_kv_heads, head_dim]`` are the addresses of
    all slots; only tokens of mapped places may be touched. ``max_mapped_blocks`` places may be
    mapped at once. ``layout.block_bytes`` is a whole number of the pages' granularity; ``pages``
    are by default the host's.

    Raises:
        PageError: the host refuses memory or addresses.
    """

    def __init__(
        self,
        layout: KVLayout,
        num_blocks: int,
        dtype: torch.dtype,
        num_host_blocks: int = 0,
        *,
        num_slots: int,
        max_model_len: int,
        pages: Pages | None = None,
    ) -> None:
        self.pages = pages or MemfdPages(layout.block_bytes)
        # The tensors are views of memory that is not theirs: it goes with the arena, and stays at
        # the interpreter's end, when a thread may be running still.
        weakref.finalize(self, self.pages.close).atexit = False
        super().__init__(layout, num_blocks, dtype, num_host_blocks)
        self._num_places = num_blocks_for(max_model_len, layout.block_size)
        self._range = self.pages.reserve(num_slots * self._num_places)
        # What could not be mapped, by slot: place → block. It is tried again before it is read.
        self._missing: defaultdict[int, dict[int, int]] = defaultdict(dict)
        memory = self.pages.tensor(self._range).view(dtype)
        max_tokens = self._num_places * layout.block_size
        self.slots = memory.view(num_slots, max_tokens, *layout.block_shape()[1:])
        # Places of a slot are mapped from its start on, so that each is at most one mapping to the
        # host, whatever blocks it shows, and each slot ends in at most one hole.
        self.max_mapped_blocks = num_slots * self._num_places
        if self.pages.max_mappings is not None:
            free = self.pages.max_mappings - self.pages.num_mappings - num_slots
            self.max_mapped_blocks = max(min(self.max_mapped_blocks, free), 0)

    def _allocate_pool(self, num_blocks: int, dtype: torch.dtype) -> torch.Tensor:
        # The first handles are numbered from 0 on: block i is handle i.
        view = self.pages.reserve(num_blocks)
        self.pages.map(view, 0, self.pages.create(num_blocks))
        self.pages.set_access(view, 0, num_blocks)
        return self._shaped(self.pages.tensor(view), num_blocks, dtype)

    @property
    def num_mapped_blocks(self) -> int:
        """Places of slots with a block behind them."""
        return len(self._range.handles)

    def obey(self, commands: tuple[KVCommand, ...]) -> tuple[int, ...]:
        """See `Arena.obey`. A place that cannot be mapped fails the step that reads it (`require`),
        not the one that ordered it: others may go on."""
        others = []
        for command in commands:
            if isinstance(command, MapBlocks):
                self._map(command)
            else:
                others.append(command)
        return super().obey(tuple(others))

    def require(self, rows: Iterable[int], lengths: Iterable[int]) -> None:
        """See to it that the slots of ``rows`` show what they were told to, and ``lengths`` tokens.

        Raises:
            PageError: the host refuses a mapping, which will be tried again, or was never told of
                one: touching it would end the process.
        """
        for slot, length in zip(rows, lengths, strict=True):
            wanted = self._missing.pop(slot, None)
            if wanted is not None:
                self._try_map(slot, wanted)
            last = (length - 1) // self.layout.block_size
            if slot * self._num_places + last not in self._range.handles:
                raise PageError(f"slot {slot} shows nothing at place {last}")

    def _map(self, command: MapBlocks) -> None:
        by_slot: defaultdict[int, dict[int, int]] = defaultdict(dict)
        for slot, place, block_id in zip(
            command.slots.tolist(), command.places.tolist(), command.block_ids.tolist(), strict=True
        ):
            by_slot[slot][place] = block_id
        for slot, wanted in by_slot.items():
            wanted = self._missing.pop(slot, {}) | wanted
            try:
                self._try_map(slot, wanted)
            except PageError:
                # Told by `require`, if anybody reads it before it can be mapped.
                continue

    def _try_map(self, slot: int, wanted: dict[int, int]) -> None:
        """Show ``wanted`` in a slot; what fails is noted as missing."""
        base = slot * self._num_places
        places = sorted(wanted)
        mapped = [p for p in places if base + p in self._range.handles]
        new = [p for p in places if wanted[p] != NULL_BLOCK]
        try:
            for _, first, count in runs(mapped):
                self.pages.unmap(self._range, base + first, count)
            for _, first, count in runs(new):
                blocks = [wanted[place] for place in range(first, first + count)]
                self.pages.map(self._range, base + first, blocks)
                self.pages.set_access(self._range, base + first, count)
        except PageError as error:
            self._missing[slot] = wanted
            raise PageError(f"slot {slot} cannot be mapped: {error}") from error
