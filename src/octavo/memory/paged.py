"""PagedAttention's manager (Kwon et al., SOSP 2023, section 4): block tables over one pool.

It owns the block tables of all rows and decides when a block is taken, shared, copied or given
back. It does not know which sequence a row serves, nor where the memory is.

A row's table, for a block size of 4 and 10 tokens of which 9 are computed::

    table      [ 7 ][ 3 ][ 12 ]
    positions  0..3 4..7 8 9 . .      writable = 12: the row may write below it without asking
                         ↑ known, not computed: reserved; the last two: internal waste
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence

import numpy as np

from octavo.core.layout import num_blocks_for
from octavo.core.plan import (
    NOTHING_DRAINED,
    NULL_BLOCK,
    Admission,
    CopyBlocks,
    Drained,
    IntArray,
    KVCommand,
    KVUsage,
    PrefixGroup,
    ReleaseBlocks,
    SwapIn,
    SwapOut,
    TableDeltas,
    int_array,
)
from octavo.core.request import Request
from octavo.memory.block_pool import BlockPool
from octavo.memory.checks import check_references, check_tables
from octavo.memory.copies import Copies
from octavo.memory.pins import Pins
from octavo.memory.prefix_cache import SequenceKeys
from octavo.memory.prefix_groups import prefix_groups
from octavo.memory.swap import SwappedTable, SwapSpace
from octavo.memory.usage import check_usage, split_pool


class PagedManager:
    """Implements `octavo.core.protocols.KVManager`.

    ``num_blocks`` counts the null block; ``max_num_seqs`` is the number of rows. Without
    ``sharing`` every sequence owns all its blocks alone, from its first step after a fork on, and
    nothing is cached: what sharing saves is measured against that.
    """

    _takes_oldest = False
    reserves_ahead = False

    def __init__(
        self,
        num_blocks: int,
        block_size: int,
        max_num_seqs: int,
        *,
        prefix_caching: bool = False,
        num_host_blocks: int = 0,
        sharing: bool = True,
    ) -> None:
        self.pool = BlockPool(num_blocks, oldest_first=self._takes_oldest)
        self.swap_space = SwapSpace(num_host_blocks)
        self.sharing = sharing
        self.prefix_caching = prefix_caching and sharing
        self.block_size = block_size
        self.writable: IntArray = np.zeros(max_num_seqs, dtype=np.int32)
        self._num_known: IntArray = np.zeros(max_num_seqs, dtype=np.int32)
        self._num_computed: IntArray = np.zeros(max_num_seqs, dtype=np.int32)
        self._tables: list[list[int]] = [[] for _ in range(max_num_seqs)]
        self._copies = Copies(self.pool)
        self._swaps: list[SwapOut | SwapIn] = []
        self._deltas: list[tuple[int, int, int]] = []
        self._keys: list[SequenceKeys | None] = [None] * max_num_seqs
        self._pins = Pins(self.pool)
        # Tokens that were last looked for, by identity: nobody changes an array of them.
        self._asked: tuple[IntArray, bytes, SequenceKeys] | None = None

    @property
    def num_free_blocks(self) -> int:
        return self.pool.num_free

    @property
    def num_usable_blocks(self) -> int:
        return self.pool.num_usable

    @property
    def num_pinned_blocks(self) -> int:
        return len(self._pins)

    @property
    def max_mapped_blocks(self) -> int | None:
        return None

    def choose_rows(
        self,
        free_rows: Sequence[int],
        count: int,
        token_ids: IntArray,
        *,
        reserve: int | None = None,
        salt: bytes = b"",
        use_cache: bool = True,
    ) -> list[int]:
        return list(free_rows[:count])

    def _mapped(self, row: int, first: int, count: int) -> Sequence[int]:
        """Blocks that new ones of ``count`` places from ``first`` on had best be, as far as there
        are any: to a block table all are alike."""
        return ()

    def num_blocks_needed(self, request: Request) -> int:
        return request.num_blocks(self.block_size, sharing=self.sharing)

    def can_never_fit(self, num_blocks: int) -> bool:
        return num_blocks > self.pool.num_usable - len(self._pins)

    def admit(
        self,
        row: int,
        token_ids: IntArray,
        *,
        max_length: int | None = None,
        reserve: int = 0,
        salt: bytes = b"",
        use_cache: bool = True,
    ) -> Admission | None:
        assert not self._tables[row], f"row {row} still owns blocks"
        num_tokens = len(token_ids)
        keys, hits = self._look_up(token_ids, salt) if use_cache else (None, [])
        if not self._has_room(num_tokens, hits, reserve):
            return None
        count = num_blocks_for(num_tokens, self.block_size) - len(hits)
        self.pool.share(hits)
        block_ids = self.pool.try_allocate(count, self._mapped(row, len(hits), count))
        assert block_ids is not None
        self._tables[row] = hits + block_ids
        self._keys[row] = keys
        self.writable[row] = len(self._tables[row]) * self.block_size
        self._num_known[row] = num_tokens
        self._num_computed[row] = len(hits) * self.block_size
        return Admission(num_cached_tokens=len(hits) * self.block_size)

    def _has_room(self, num_tokens: int, hits: list[int], reserve: int) -> bool:
        """Whether there are blocks for what is not hit. Hits that nobody references count as free
        until they are shared."""
        count = num_blocks_for(num_tokens, self.block_size) - len(hits)
        idle = sum(self.pool.is_cached(block_id) for block_id in hits)
        return count + reserve <= self.pool.num_free - idle

    def _look_up(self, token_ids: IntArray, salt: bytes) -> tuple[SequenceKeys | None, list[int]]:
        """The sequence's keys and the cached blocks it begins with; the last token is never among
        them, since something has to be computed to go on from."""
        if not self.prefix_caching:
            return None, []
        keys = self._keys_of(token_ids, salt)
        hits = self._find(keys, (len(token_ids) - 1) // self.block_size)
        keys.num_published = len(hits)
        return keys, hits

    def _keys_of(self, token_ids: IntArray, salt: bytes) -> SequenceKeys:
        """The sequence's keys, to be kept. Whoever waits first is asked for at every step: its keys
        are not made again."""
        if self._asked is None or self._asked[0] is not token_ids or self._asked[1] != salt:
            keys = SequenceKeys(self.block_size, salt)
            keys.extend(token_ids)
            self._asked = (token_ids, salt, keys)
        keys = self._asked[2]
        return keys.fork(len(keys))

    def _find(self, keys: SequenceKeys, num_blocks: int) -> list[int]:
        """The cached blocks of the first ``num_blocks`` keys, up to the first that is missing."""
        found = []
        for index in range(num_blocks):
            block_id = self.pool.find(keys[index])
            if block_id is None:
                break
            found.append(block_id)
        return found

    def publish(self, row: int, token_ids: IntArray) -> list[int]:
        keys = self._keys[row]
        if keys is None:
            return []
        published = []
        keys.extend(token_ids)
        table = self._tables[row]
        for index in range(keys.num_published, len(token_ids) // self.block_size):
            if self.pool.publish(table[index], keys[index]):
                published.append(table[index])
        keys.num_published = max(keys.num_published, len(token_ids) // self.block_size)
        return published

    def unpublish(self, block_ids: Iterable[int]) -> None:
        for block_id in block_ids:
            assert block_id not in self._pins, f"block {block_id} is pinned but was not computed"
            self.pool.unpublish(block_id)

    def reset_prefix_cache(self) -> None:
        self.pool.forget_all(kept=self._pins)

    # ── pinned prefixes ──────────────────────────────────────────────────────────────────────

    def pin(self, token_ids: IntArray, *, salt: bytes = b"") -> tuple[int, ...] | None:
        found = self._full_blocks(token_ids, salt)
        if len(found) < len(token_ids) // self.block_size or not self.prefix_caching:
            return None
        return self._pins.add(found)

    def unpin(self, block_ids: Iterable[int]) -> None:
        self._pins.drop(block_ids)

    def num_to_pin(self, token_ids: IntArray, *, salt: bytes = b"") -> int:
        found = self._full_blocks(token_ids, salt)
        num_pinned = sum(block_id in self._pins for block_id in found)
        return len(token_ids) // self.block_size - num_pinned

    def _full_blocks(self, token_ids: IntArray, salt: bytes) -> list[int]:
        keys = SequenceKeys(self.block_size, salt)
        keys.extend(token_ids)
        return self._find(keys, len(keys))

    # ── resizing the pool ────────────────────────────────────────────────────────────────────

    def remove_idle(self, count: int) -> tuple[KVCommand, ...]:
        removed = sorted(self.pool.remove_idle(count))
        return (ReleaseBlocks(int_array(removed)),) if removed else ()

    def missing_blocks(self, count: int) -> IntArray:
        return int_array(self.pool.missing(count))

    def add_blocks(self, block_ids: IntArray) -> None:
        self.pool.add(block_ids.tolist())

    # ── growing and forking ──────────────────────────────────────────────────────────────────

    def grow(self, row: int, num_tokens: int, *, reserve: int = 0) -> bool:
        writable = int(self.writable[row])
        if num_tokens <= writable:
            return True
        table = self._tables[row]
        # Copy-on-write: the block that holds position `writable` exists and somebody else reads
        # it too. The last one left writes in place. Without sharing all blocks are copied.
        first = writable // self.block_size
        copied: Sequence[int] = ()
        if first < len(table):
            end = first + 1 if self.sharing else len(table)
            copied = [i for i in range(first, end) if self._copies.num_readers(table[i]) > 1]
        new = num_blocks_for(num_tokens, self.block_size) - len(table)
        count = max(new, 0) + len(copied)
        if count + reserve > self.pool.num_free:
            return False
        wanted = self._mapped(row, len(table), new)
        if copied and wanted:
            wanted = [*[NULL_BLOCK] * len(copied), *wanted]
        block_ids = self.pool.try_allocate(count, wanted)
        assert block_ids is not None
        for index in copied:
            # The row's reference to the source stays until the copy is done (see `retire`).
            destination = block_ids.pop(0)
            source = table[index]
            table[index] = destination
            self._copies.add(source, destination)
            self._deltas.append((row, index, destination))
        for block_id in block_ids:
            self._deltas.append((row, len(table), block_id))
            table.append(block_id)
        self.writable[row] = len(table) * self.block_size
        return True

    def fork(self, parent: int, child: int, num_tokens: int) -> None:
        assert not self._tables[child], f"row {child} still owns blocks"
        count = num_blocks_for(num_tokens, self.block_size)
        shared = self._tables[parent][:count]
        assert len(shared) == count, f"row {parent} has fewer than {num_tokens} tokens"
        self.pool.share(shared)
        self._tables[child] = list(shared)
        self.writable[child] = num_tokens if self.sharing else 0
        if num_tokens % self.block_size:
            # The half-full last block is shared now: neither may write it without asking.
            self.writable[parent] = min(int(self.writable[parent]), num_tokens)
        keys = self._keys[parent]
        self._keys[child] = keys and keys.fork(min(num_tokens // self.block_size, len(keys)))
        self._num_known[parent] = max(int(self._num_known[parent]), num_tokens)
        self._num_known[child] = num_tokens
        self.follow(parent, child)

    def follow(self, parent: int, child: int) -> None:
        shared = int(self._num_known[child])
        self._num_computed[child] = min(int(self._num_computed[parent]), shared)

    # ── swapping ─────────────────────────────────────────────────────────────────────────────

    def swap_out(self, rows: Sequence[int], num_tokens: Sequence[int]) -> list[SwappedTable] | None:
        counts = [num_blocks_for(count, self.block_size) for count in num_tokens]
        tables = [self._tables[row][:count] for row, count in zip(rows, counts, strict=True)]
        moved = self.swap_space.try_out(tables)
        if moved is None:
            return None
        command, host_tables = moved
        self._swaps.append(command)
        swapped = []
        for row, count, host_table in zip(rows, num_tokens, host_tables, strict=True):
            keys = self._keys[row]
            full = count // self.block_size
            kept = keys.fork(min(full, len(keys))) if keys is not None else None
            if kept is not None:
                kept.num_published = 0
            swapped.append(SwappedTable(host_table, count, kept))
        return swapped

    def swap_in(
        self, tables: Sequence[SwappedTable], rows: Sequence[int], *, reserve: int = 0
    ) -> int | None:
        host_ids = self.swap_space.distinct(tables)
        # Without blocks to go on with they might be preempted again before they ran.
        reserve += self.swap_space.num_next_blocks(tables, self.block_size, sharing=self.sharing)
        if len(host_ids) + reserve > self.pool.num_free:
            return None
        wanted: dict[int, int] = {}
        for row, table in zip(rows, tables, strict=True):
            mapped = self._mapped(row, 0, len(table.host_block_ids))
            for host_id, block_id in zip(table.host_block_ids, mapped, strict=False):
                wanted.setdefault(host_id, block_id)
        block_ids = self.pool.try_allocate(
            len(host_ids), [wanted.get(host_id, NULL_BLOCK) for host_id in host_ids]
        )
        assert block_ids is not None
        place = dict(zip(host_ids, block_ids, strict=True))
        fresh = set(block_ids)
        for row, table in zip(rows, tables, strict=True):
            assert not self._tables[row], f"row {row} still owns blocks"
            own = [place[host_id] for host_id in table.host_block_ids]
            self.pool.share([block_id for block_id in own if block_id not in fresh])
            fresh.difference_update(own)
            self._tables[row] = own
            self._keys[row] = table.keys
            self._num_known[row] = table.num_computed_tokens
            self._num_computed[row] = table.num_computed_tokens
        for row, table in zip(rows, tables, strict=True):
            count, own = table.num_computed_tokens, self._tables[row]
            self.writable[row] = len(own) * self.block_size
            if count % self.block_size and self._copies.num_readers(own[-1]) > 1:
                self.writable[row] = count
            if not self.sharing and any(self._copies.num_readers(block_id) > 1 for block_id in own):
                self.writable[row] = 0
        command = self.swap_space.bring_in(tables, block_ids)
        self._swaps.append(command)
        return command.transfer_id

    def drop_swapped(self, tables: Iterable[SwappedTable]) -> None:
        for table in tables:
            self.swap_space.drop(table)

    def commit(self, rows: IntArray, num_tokens: IntArray) -> None:
        self._num_computed[rows] += num_tokens

    def free(self, row: int) -> None:
        # Tail first: a block nearer to the sequence's start is reused later.
        self.pool.release(self._tables[row])
        self._tables[row] = []
        self._keys[row] = None
        self.writable[row] = 0
        self._num_known[row] = 0
        self._num_computed[row] = 0
        if self._deltas:
            self._deltas = [delta for delta in self._deltas if delta[0] != row]
        self._copies.cancel_orphans()

    def block_ids(self, row: int) -> IntArray:
        return int_array(self._tables[row])

    def prefix_groups(self, rows: IntArray, num_computed: IntArray) -> tuple[PrefixGroup, ...]:
        """See `octavo.memory.prefix_groups`."""
        return prefix_groups(self._tables, rows, num_computed // self.block_size, self.block_size)

    def is_mapped(self, rows: IntArray) -> bool:
        return True

    def drain(self) -> Drained:
        copies = self._copies.take()
        if not self._deltas and not copies and not self._swaps:
            return NOTHING_DRAINED
        commands: tuple[KVCommand, ...] = tuple(self._swaps)
        self._swaps.clear()
        if copies:
            # First: what is swapped out may just have been copied.
            commands = (copies, *commands)
        deltas = int_array(self._deltas).reshape(-1, 3)
        self._deltas = []
        return Drained(commands, TableDeltas(deltas[:, 0], deltas[:, 1], deltas[:, 2]))

    def retire(self, commands: tuple[KVCommand, ...]) -> None:
        for command in commands:
            if isinstance(command, CopyBlocks):
                self._copies.retire(command)

    def usage(self) -> KVUsage:
        return split_pool(
            self.pool,
            self.block_size,
            self._tables,
            self._num_known,
            self._num_computed,
            self._pins.num_idle(),
        )

    def check(self) -> None:
        self.pool.check()
        self.swap_space.check()
        self._pins.check()
        check_references(self.pool, self._tables, self._copies.retained, self._pins.counts)
        check_tables(
            self.pool,
            self._tables,
            self._copies.retained,
            self.block_size,
            self.writable,
            self._num_known,
            self._num_computed,
        )
        check_usage(self.usage())
