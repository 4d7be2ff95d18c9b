"""Blocks that the paged manager keeps for prompts that begin alike, and those that are pinned."""

from __future__ import annotations

import pytest

from octavo.core.plan import IntArray
from octavo.memory import prefix_cache
from octavo.memory.paged import PagedManager
from toy_executor import as_ids

SIZE = 4


def commit(paged: PagedManager, row: int, count: int) -> None:
    paged.commit(as_ids([row]), as_ids([count]))


def caching(num_blocks: int = 9, rows: int = 4) -> PagedManager:
    return PagedManager(num_blocks, SIZE, rows, prefix_caching=True)


def run(paged: PagedManager, row: int, tokens: list[int], salt: bytes = b"") -> int:
    """Admit, publish and free; the number of cached tokens."""
    admission = paged.admit(row, as_ids(tokens), salt=salt)
    assert admission is not None
    paged.publish(row, as_ids(tokens))
    commit(paged, row, len(tokens) - admission.num_cached_tokens)
    paged.check()
    paged.free(row)
    return admission.num_cached_tokens


def test_a_prefix_is_hit_in_whole_blocks_and_never_wholly() -> None:
    paged = caching()
    tokens = list(range(10))
    assert run(paged, 0, tokens) == 0
    assert paged.usage().cached == 8
    assert run(paged, 0, tokens) == 8
    assert run(paged, 0, tokens[:8]) == 4, "at least one token is computed"
    assert run(paged, 0, [*tokens[:6], 99, 98, 97]) == 4
    assert run(paged, 0, [99, *tokens]) == 0


def test_tenants_do_not_see_each_others_blocks() -> None:
    paged = caching()
    tokens = list(range(9))
    assert run(paged, 0, tokens, b"a") == 0
    assert run(paged, 0, tokens, b"b") == 0
    assert run(paged, 0, tokens, b"a") == 8


def test_a_running_sequence_shares_its_published_blocks() -> None:
    paged = caching()
    tokens = list(range(9))
    paged.admit(0, as_ids(tokens))
    paged.publish(0, as_ids(tokens))
    assert paged.admit(1, as_ids(tokens)) is not None
    assert paged.block_ids(0)[:2].tolist() == paged.block_ids(1)[:2].tolist()
    assert paged.pool.references[paged.block_ids(0)[0]] == 2
    assert paged.block_ids(0)[2] != paged.block_ids(1)[2]
    paged.check()


def test_the_tail_of_the_oldest_chain_is_evicted_first() -> None:
    paged = caching(num_blocks=7)
    old, new = list(range(12)), list(range(100, 108))
    run(paged, 0, old)
    run(paged, 0, new)
    paged.admit(1, as_ids(range(200, 208)))
    assert run(paged, 0, [*old, 1]) == 8, "one of the old chain's three blocks went, its last"
    paged.free(1)


def test_a_hit_makes_a_chain_young_again() -> None:
    paged = caching(num_blocks=5)
    first, second = list(range(8)), list(range(100, 108))
    run(paged, 0, first)
    run(paged, 0, second)
    run(paged, 0, first)
    paged.admit(1, as_ids([7]))
    paged.free(1)
    paged.admit(1, as_ids(range(200, 204)))
    paged.free(1)
    assert paged.pool.num_cached == 3
    assert run(paged, 0, [*first, 1]) == 8


def test_cached_blocks_count_as_free_until_they_are_shared() -> None:
    paged = caching(num_blocks=5)
    run(paged, 0, list(range(8)))
    assert paged.num_free_blocks == 4
    assert paged.admit(0, as_ids(range(12)), reserve=2) is None
    assert paged.pool.num_cached == 2, "a call that fails changes nothing"
    admission = paged.admit(0, as_ids(range(12)), reserve=1)
    assert admission is not None
    assert admission.num_cached_tokens == 8


def test_what_was_never_computed_is_taken_back() -> None:
    paged = caching()
    tokens = list(range(9))
    paged.admit(0, as_ids(tokens))
    published = paged.publish(0, as_ids(tokens))
    assert published == paged.block_ids(0)[:2].tolist()
    paged.unpublish(published)
    paged.free(0)
    assert run(paged, 0, tokens) == 0
    paged.check()


def test_generated_blocks_are_published_as_they_fill() -> None:
    paged = caching()
    tokens = list(range(10))
    paged.admit(0, as_ids(tokens[:5]))
    assert len(paged.publish(0, as_ids(tokens[:5]))) == 1
    assert paged.grow(0, 10)
    assert len(paged.publish(0, as_ids(tokens[:7]))) == 0
    assert len(paged.publish(0, as_ids(tokens))) == 1
    paged.free(0)
    assert run(paged, 1, tokens) == 8


def test_a_fork_publishes_its_own_continuation() -> None:
    paged = caching()
    tokens = list(range(6))
    paged.admit(0, as_ids(tokens))
    paged.publish(0, as_ids(tokens))
    paged.fork(0, 1, 6)
    for row, tail in ((0, [50, 51]), (1, [60, 61])):
        assert paged.grow(row, 8)
        assert len(paged.publish(row, as_ids(tokens + tail))) == 1
    paged.retire(paged.drain().commands)
    paged.free(0)
    paged.free(1)
    assert run(paged, 0, [*tokens, 50, 51, 1]) == 8
    assert run(paged, 0, [*tokens, 60, 61, 1]) == 8


def test_resetting_forgets_everything_that_is_cached() -> None:
    paged = caching()
    tokens = list(range(9))
    paged.admit(0, as_ids(tokens))
    paged.publish(0, as_ids(tokens))
    paged.reset_prefix_cache()
    paged.check()
    paged.free(0)
    assert paged.usage().cached == 0
    assert run(paged, 0, tokens) == 0


def test_pinned_blocks_outlive_pressure_and_resets() -> None:
    paged = caching(num_blocks=7)
    tokens = list(range(10))
    assert paged.pin(as_ids(tokens)) is None, "nothing is cached yet"
    run(paged, 0, tokens)
    assert paged.num_to_pin(as_ids(tokens)) == 2
    pinned = paged.pin(as_ids(tokens))
    assert pinned is not None
    assert len(pinned) == paged.num_pinned_blocks == 2
    assert paged.num_to_pin(as_ids(tokens)) == 0
    usage = paged.usage()
    assert (usage.live, usage.cached, usage.free) == (0, 8, 16)
    assert not paged.can_never_fit(4)
    assert paged.can_never_fit(5)
    assert paged.admit(1, as_ids(range(100, 120))) is None
    assert paged.admit(1, as_ids(range(100, 116))) is not None, "all that is left"
    paged.check()
    paged.free(1)
    paged.reset_prefix_cache()
    assert run(paged, 0, tokens) == 8
    paged.unpin(pinned)
    assert paged.num_free_blocks == 6
    assert run(paged, 0, tokens) == 8, "cached like any other"
    paged.admit(1, as_ids(range(100, 124)))
    paged.free(1)
    assert run(paged, 0, tokens) == 0, "and evicted like any other"


def test_prefixes_that_begin_alike_share_pinned_blocks() -> None:
    paged = caching()
    story, other = list(range(8)), [*range(4), 90, 91, 92, 93]
    run(paged, 0, story)
    run(paged, 0, other)
    first, second = paged.pin(as_ids(story)), paged.pin(as_ids(other))
    assert first is not None
    assert second is not None
    assert first[0] == second[0]
    assert paged.num_pinned_blocks == 3
    assert paged.usage().cached == 12
    paged.unpin(first)
    assert paged.num_pinned_blocks == 2
    paged.check()
    paged.unpin(second)
    assert paged.num_pinned_blocks == 0
    paged.check()


def test_pins_keep_tenants_apart_and_need_a_cache() -> None:
    paged = caching()
    run(paged, 0, list(range(9)), b"a")
    assert paged.pin(as_ids(range(9)), salt=b"b") is None
    assert paged.pin(as_ids(range(9)), salt=b"a") is not None
    plain = PagedManager(9, SIZE, 4)
    plain.admit(0, as_ids(range(9)))
    plain.publish(0, as_ids(range(9)))
    assert plain.pin(as_ids(range(9))) is None
    assert plain.pin(as_ids([1])) is None


def test_without_use_cache_nothing_is_hit_or_published() -> None:
    paged = caching()
    tokens = list(range(9))
    run(paged, 0, tokens)
    admission = paged.admit(1, as_ids(tokens), use_cache=False)
    assert admission is not None
    assert admission.num_cached_tokens == 0
    assert paged.publish(1, as_ids(tokens)) == []
    paged.check()


def test_who_waits_is_hashed_once(monkeypatch: pytest.MonkeyPatch) -> None:
    """A prompt that finds no room is asked for at every step."""
    made: list[int] = []
    block_key = prefix_cache.block_key

    def counted(parent: bytes, token_ids: IntArray) -> bytes:
        made.append(len(token_ids))
        return block_key(parent, token_ids)

    monkeypatch.setattr(prefix_cache, "block_key", counted)
    paged = PagedManager(9, SIZE, 4, prefix_caching=True)
    assert paged.admit(0, as_ids(range(5 * SIZE)))
    made.clear()
    waiting = as_ids(range(100, 100 + 4 * SIZE))
    for _ in range(5):
        assert paged.admit(1, waiting) is None
    assert len(made) == 4
    paged.free(0)
    assert paged.admit(1, waiting)
    assert len(paged.publish(1, waiting)) == 4
    assert len(made) == 4
    # Others, of equal tokens or another tenant, have keys of their own.
    equal = as_ids(waiting.tolist())
    for row, salt, cached in ((2, b"tenant", 0), (3, b"", 3 * SIZE)):
        admission = paged.admit(row, equal, salt=salt)
        assert admission is not None
        assert admission.num_cached_tokens == cached
        paged.free(row)
    paged.check()
