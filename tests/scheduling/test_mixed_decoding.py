"""Greedy rows, samples and beams in the same steps, with and without sharing: the same tokens."""

from __future__ import annotations

import pytest
from hypothesis import given
from hypothesis import strategies as st

from octavo.core.request import ContextLengthError, FinishReason
from scheduling.harness import Harness, beam_request, request
from scheduling.test_beam_search import plain_search
from scheduling.test_beams import PROMPT, STOPS, check, num_copies
from toy_executor import expected_tokens

pytestmark = pytest.mark.usefixtures("translation")


@pytest.mark.parametrize("depth", [1, 2])
def test_without_sharing_everything_is_copied_and_nothing_cached(depth: int) -> None:
    harness = Harness(
        num_blocks=60, depth=depth, sharing=False, prefix_caching=True, max_num_seqs=6
    )
    harness.add(request(0, PROMPT, 9, n=3), beam_request(10, PROMPT, 9, 3))
    while harness.core.has_work:
        harness.step()
        if depth == 1 and harness.executor.plans[-1].step_id > 1:
            samples = [s for s in harness.scheduler.state.sequences.values() if s.number < 10]
            owned = [harness.manager.block_ids(s.row).tolist() for s in samples]
            assert len({b for t in owned for b in t}) == sum(map(len, owned))
    for index in range(3):
        assert harness.tokens[index] == expected_tokens(PROMPT, 9, index)
    check(harness, 10, plain_search(PROMPT, 3, 9))
    assert num_copies(harness.executor.plans[1]) >= 2 * 3
    assert harness.manager.num_free_blocks == harness.manager.num_usable_blocks
    assert not harness.manager.prefix_caching


def test_without_sharing_more_has_to_fit() -> None:
    harness = Harness(num_blocks=12, sharing=False)
    harness.add(request(0, PROMPT, 3, n=3))
    with pytest.raises(ContextLengthError, match="12 blocks"):
        harness.add(request(10, PROMPT, 7, n=3))
    harness.run()


shapes = st.lists(
    st.tuples(
        st.sampled_from(["greedy", "samples", "beams"]),
        st.integers(1, 18),
        st.integers(1, 12),
        st.integers(2, 4),
    ),
    min_size=1,
    max_size=6,
)


@given(
    shapes=shapes,
    num_blocks=st.integers(33, 48),
    num_host_blocks=st.integers(0, 40),
    budget=st.integers(6, 40),
    depth=st.sampled_from([1, 2]),
    preemption=st.sampled_from(["recompute", "swap"]),
    caching=st.booleans(),
    sharing=st.booleans(),
    data=st.data(),
)
def test_any_mix_gives_the_same_tokens_and_beams(
    shapes: list[tuple[str, int, int, int]],
    num_blocks: int,
    num_host_blocks: int,
    budget: int,
    depth: int,
    preemption: str,
    caching: bool,
    sharing: bool,
    data: st.DataObject,
) -> None:
    harness = Harness(
        num_blocks=num_blocks,
        num_host_blocks=num_host_blocks,
        preemption=preemption,
        max_num_seqs=6,
        max_num_batched_tokens=budget,
        depth=depth,
        prefix_caching=caching,
        sharing=sharing,
        eager=data.draw(st.booleans()),
    )
    if data.draw(st.integers(0, 3)) == 0:
        harness.executor.fail_steps = {data.draw(st.integers(1, 20))}
    expected: dict[int, list[int]] = {}
    aborted = set()
    for index, (kind, length, count, width) in enumerate(shapes):
        first, prompt = 10 * index, [*range(length - 1), index % 2]
        n = 1 if kind == "greedy" else width
        if kind == "beams":
            n = data.draw(st.integers(1, width))
            harness.add(beam_request(first, prompt, count, width, n=n, stops=STOPS))
            beams = plain_search(prompt, width, count, stops=STOPS)
            expected |= {first + i: beams[i][0] for i in range(n)}
        else:
            harness.add(request(first, prompt, count, seed=first, n=n, stops=STOPS))
            expected |= {
                first + i: expected_tokens(prompt, count, first + i, STOPS) for i in range(n)
            }
        for _ in range(data.draw(st.integers(0, 3))):
            harness.step()
        if data.draw(st.integers(0, 3)) == 0:
            victim = 10 * data.draw(st.integers(0, index)) + data.draw(st.integers(0, 2))
            if harness.scheduler.abort(victim):
                aborted.add(victim)
            harness.scheduler.check()
    harness.run()
    for number, tokens in expected.items():
        end = harness.finished.get(number)
        if number in aborted or (end and end.reason is FinishReason.ERROR):
            found = harness.tokens[number]
            assert found == tokens[: len(found)]
        else:
            assert harness.tokens[number] == tokens
