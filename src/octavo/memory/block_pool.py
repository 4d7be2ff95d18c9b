"""The pool: which block ids are free, which are cached, and how often each is referenced.

Knows no sequences and no tokens. A block is in one of four states::

    referenced   references > 0                       a table, a pin or a copy in flight names it
    cached       references = 0, its content has a key   may be shared again, or evicted
    free         references = 0, no key
    absent       has no memory: the pool was shrunk, and may grow again

Free blocks are handed out last-released-first, so that the memory touched last is touched again,
or ``oldest_first``, so that one stays free for whoever wants just that one; when none is left, the
cached block that was released longest ago is evicted.
"""

from __future__ import annotations

import heapq
from collections import OrderedDict
from collections.abc import Callable, Container, Iterable, Sequence
from functools import partial

from octavo.core.plan import NULL_BLOCK


class BlockPool:
    """Ids ``1 .. num_blocks - 1`` with reference counts; id 0 is the null block. Ids are stable:
    what `remove_idle` takes out leaves holes, which `add` fills or goes beyond.

    Raises:
        ValueError: fewer than two blocks (the null block and one to use).
    """

    def __init__(self, num_blocks: int, *, oldest_first: bool = False) -> None:
        if num_blocks < 2:
            raise ValueError(
                f"a pool needs at least 2 blocks (one is the null block), got {num_blocks}"
            )
        self.num_blocks = num_blocks
        self.references = [0] * num_blocks
        # In order of release; one that is wanted is taken out of the middle. Only an ordered
        # dictionary can be emptied from its front, which a plain one does three times as fast from
        # its end.
        ids = range(NULL_BLOCK + 1, num_blocks)
        self._free: dict[int, None] = dict.fromkeys(reversed(ids))
        self._pop_free: Callable[[], tuple[int, None]] = self._free.popitem
        if oldest_first:
            queue = OrderedDict(dict.fromkeys(ids))
            self._free, self._pop_free = queue, partial(queue.popitem, last=False)
        # Insertion order is the order of eviction: oldest first.
        self._cached: dict[int, None] = {}
        self._key_of: dict[int, bytes] = {}
        self._absent: set[int] = set()
        self._block_of: dict[bytes, int] = {}

    @property
    def num_usable(self) -> int:
        """Blocks that sequences can own: all that are there but the null block."""
        return self.num_blocks - 1 - len(self._absent)

    @property
    def num_free(self) -> int:
        """Blocks that can be allocated: free ones, and cached ones that can be evicted."""
        return len(self._free) + len(self._cached)

    @property
    def num_cached(self) -> int:
        return len(self._cached)

    def is_free(self, block_id: int) -> bool:
        """Whether nobody needs the block, nor what is in it."""
        return block_id in self._free

    def try_allocate(self, count: int, wanted: Sequence[int] = ()) -> list[int] | None:
        """``count`` blocks with one reference each, or None and no change.

        The i-th is ``wanted[i]`` where that one is free; nothing cached is evicted for it.
        """
        free = self._free
        if count > len(free):
            if count > self.num_free:
                return None
            self._evict(count - len(free))
        if not count:
            return []
        pop = self._pop_free
        if wanted:
            found: dict[int, int] = {}
            for index, block_id in enumerate(wanted[:count]):
                if block_id in free:
                    del free[block_id]
                    found[index] = block_id
            block_ids = [found[i] if i in found else pop()[0] for i in range(count)]
        else:
            block_ids = [pop()[0] for _ in range(count)] if count > 1 else [pop()[0]]
        for block_id in block_ids:
            self.references[block_id] = 1
        return block_ids

    def try_set_aside(self) -> int | None:
        """A free block, still free but now the last to be handed out to those who want another.
        Only of a pool that is ``oldest_first``. None when no block is free."""
        free = self._free
        assert isinstance(free, OrderedDict), "this pool hands out the youngest first"
        if not free:
            return None
        block_id: int = next(iter(free))
        free.move_to_end(block_id)
        return block_id

    def share(self, block_ids: Iterable[int]) -> None:
        """One more reference to each block, referenced or cached."""
        for block_id in block_ids:
            if self.references[block_id] == 0:
                assert block_id in self._cached, f"block {block_id} is not allocated"
                del self._cached[block_id]
            self.references[block_id] += 1

    def release(self, block_ids: Sequence[int]) -> None:
        """One reference less. Blocks without any are cached or free again; of a sequence's blocks
        the tail is evicted first and the first is reused first."""
        for block_id in reversed(block_ids):
            self.references[block_id] -= 1
            count = self.references[block_id]
            assert count >= 0, f"block {block_id} released too often"
            if count == 0:
                if block_id in self._key_of:
                    self._cached[block_id] = None
                else:
                    self._free[block_id] = None

    # ── resizing ─────────────────────────────────────────────────────────────────────────────

    def remove_idle(self, count: int) -> list[int]:
        """Take up to ``count`` blocks that nobody references out of the pool: free ones first, the
        highest ids, so that few holes are left; then cached ones, the longest unused first."""
        removed = heapq.nlargest(count, self._free)
        for block_id in list(self._cached)[: count - len(removed)]:
            self.unpublish(block_id)
            removed.append(block_id)
        for block_id in removed:
            del self._free[block_id]
        self._absent.update(removed)
        return removed

    def missing(self, count: int) -> list[int]:
        """The ids that `add` should bring next: the lowest that are absent, then new ones."""
        found = heapq.nsmallest(count, self._absent)
        return found + list(range(self.num_blocks, self.num_blocks + count - len(found)))

    def add(self, block_ids: Iterable[int]) -> None:
        """Blocks that have memory now are free."""
        for block_id in block_ids:
            if block_id == self.num_blocks:
                self.references.append(0)
                self.num_blocks += 1
            else:
                self._absent.remove(block_id)
            self._free[block_id] = None

    # ── content keys ─────────────────────────────────────────────────────────────────────────

    def publish(self, block_id: int, key: bytes) -> bool:
        """Let ``key`` find this referenced block. False when another block has the key already,
        or the block has one."""
        assert self.references[block_id] > 0, f"block {block_id} is published but not owned"
        if key in self._block_of or block_id in self._key_of:
            return False
        self._block_of[key] = block_id
        self._key_of[block_id] = key
        return True

    def unpublish(self, block_id: int) -> None:
        """Forget the block's key, if it has one."""
        key = self._key_of.pop(block_id, None)
        if key is None:
            return
        del self._block_of[key]
        if block_id in self._cached:
            del self._cached[block_id]
            self._free[block_id] = None

    def find(self, key: bytes) -> int | None:
        """The block whose content has this key."""
        return self._block_of.get(key)

    def forget_all(self, kept: Container[int] = ()) -> None:
        """Forget every key but those of ``kept`` blocks; cached blocks are free."""
        for block_id in list(self._key_of):
            if block_id not in kept:
                self.unpublish(block_id)

    def has_key(self, block_id: int) -> bool:
        return block_id in self._key_of

    def is_cached(self, block_id: int) -> bool:
        return block_id in self._cached

    def _evict(self, count: int) -> None:
        for block_id in list(self._cached)[:count] if count > 1 else [next(iter(self._cached))]:
            self.unpublish(block_id)

    def check(self) -> None:
        """Raise AssertionError when the lists, the keys and the reference counts disagree."""
        free = self._free.keys()
        assert not free & self._cached.keys(), "a block is both free and cached"
        assert NULL_BLOCK not in free | self._cached.keys(), "the null block is free"
        assert self.references[NULL_BLOCK] == 0, "the null block is referenced"
        assert self._cached.keys() <= self._key_of.keys(), "a cached block has no key"
        assert {k: b for b, k in self._key_of.items()} == self._block_of, "the keys disagree"
        assert self._absent.isdisjoint(free | self._cached.keys()), "an absent block is idle"
        for block_id in range(1, self.num_blocks):
            if block_id in self._absent:
                assert self.references[block_id] == 0, f"block {block_id} is absent but referenced"
                assert block_id not in self._key_of, f"block {block_id} is absent but has a key"
                continue
            is_idle = block_id in free or block_id in self._cached
            assert is_idle == (self.references[block_id] == 0), (
                f"block {block_id}: idle={is_idle}, references={self.references[block_id]}"
            )
