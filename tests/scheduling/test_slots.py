"""What the scheduler adds for slots: which row a request gets, and room to map it."""

from __future__ import annotations

import pytest

from octavo.core.plan import MapBlocks
from octavo.core.request import ContextLengthError
from scheduling.harness import Harness, beam_request, request
from toy_executor import expected_tokens


def num_mapped(harness: Harness, first_plan: int = 0) -> list[int]:
    """Places that each plan maps."""
    return [
        sum(len(command) for command in plan.commands if isinstance(command, MapBlocks))
        for plan in harness.executor.plans[first_plan:]
    ]


@pytest.mark.parametrize("depth", [1, 2])
def test_a_decode_batch_maps_only_at_block_ends(depth: int) -> None:
    harness = Harness(kv="virtual", depth=depth)
    harness.add(*(request(i, [i] * 8, 9, seed=i) for i in range(3)))
    harness.run()
    counts = num_mapped(harness)
    assert counts[0] == 3 * 2
    assert sorted(set(counts[1:])) == [0, 3]
    assert sum(counts) == 3 * 4


@pytest.mark.parametrize("depth", [1, 2])
@pytest.mark.parametrize("caching", [False, True])
def test_the_same_requests_again_cost_no_mapping(depth: int, caching: bool) -> None:
    """Each finds the slot that shows its own prompt, whichever comes first."""
    harness = Harness(kv="virtual", depth=depth, prefix_caching=caching)
    prompts = [[i] * (5 + 4 * i) for i in range(3)]
    for number, prompt in enumerate(prompts):
        harness.add(request(number, prompt, 6, seed=number))
        harness.run()
    before = len(harness.executor.plans)
    for number in (2, 0, 1):
        harness.add(request(10 + number, prompts[number], 6, seed=number))
        harness.run()
        assert harness.tokens[10 + number] == expected_tokens(prompts[number], 6, seed=number)
    if caching:
        # Of each the block that it shared with its answer: that one is cached, not evicted.
        assert sum(num_mapped(harness, before)) <= 3
    else:
        assert sum(num_mapped(harness, before)) == 0


@pytest.mark.parametrize("depth", [1, 2])
@pytest.mark.parametrize("num_blocks", [17, 60])
@pytest.mark.parametrize("preemption", ["recompute", "swap"])
def test_within_a_limit_everything_comes_out(depth: int, num_blocks: int, preemption: str) -> None:
    """The toy MMU refuses a mapping too many; whoever could need one waits."""
    harness = Harness(
        kv="virtual",
        depth=depth,
        num_blocks=num_blocks,
        max_num_seqs=8,
        max_mapped_blocks=24,
        prefix_caching=True,
        num_host_blocks=20,
        preemption=preemption,
        eager=False,
    )
    for i in range(12):
        n = 1 + i % 3
        harness.add(request(10 * i, list(range(6 + i)), 8, seed=i, n=n))
    harness.add(beam_request(500, list(range(9)), 8, 3))
    harness.run()
    for i in range(12):
        for k in range(1 + i % 3):
            assert harness.tokens[10 * i + k] == expected_tokens(list(range(6 + i)), 8, seed=i + k)
    assert harness.mmu is not None
    assert harness.mmu.num_mapped == 24, "what is stale stays as far as it may"


def test_what_can_never_be_mapped_is_refused() -> None:
    harness = Harness(kv="virtual", max_mapped_blocks=12)
    with pytest.raises(ContextLengthError, match="4 sequences of up to 16 tokens need 16 mapped"):
        harness.add(request(0, list(range(8)), 8, n=4))
    harness.add(request(10, list(range(8)), 8, n=3))
    harness.run()


def test_beams_remap_only_where_one_dies() -> None:
    harness = Harness(kv="virtual", num_blocks=60)
    harness.add(beam_request(0, list(range(16)), 12, 4))
    harness.run()
    counts = num_mapped(harness)
    # Four slots of the prompt's four blocks; later a tail, or what follows a common ancestor.
    assert sum(counts[:2]) <= 4 * 4 + 4
    assert max(counts[2:]) <= 4 * 3


@pytest.mark.parametrize("depth", [1, 2])
def test_after_a_failed_step_slots_go_on(depth: int) -> None:
    harness = Harness(kv="virtual", depth=depth, prefix_caching=True)
    harness.executor.fail_steps = {1}
    for number in range(8):
        harness.add(request(number, [1, 2, 3, 4, number, 6], 7, seed=number))
    harness.run()
    assert sum(finished.error is None for finished in harness.finished.values()) >= 4
