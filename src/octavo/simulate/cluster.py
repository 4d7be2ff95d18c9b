"""Replicas behind a router, on one virtual clock.

One heap of events. Those of one moment are handled in this order, whatever order they came in:

1. **results** of steps that end then, by replica: what has ended no longer counts as outstanding;
2. **arrivals**, in the order of the workload: the router sees all results of the moment;
3. **steps**, by replica: a plan that is made then takes all arrivals of the moment into account.

So a run depends on nothing but its workload, its replicas and its router.
"""

from __future__ import annotations

import heapq
from collections.abc import Callable, Sequence

import numpy as np
from numpy.typing import NDArray

from octavo.core.plan import IntArray, int_array
from octavo.core.request import Request, StepOutputs
from octavo.core.sampling_params import SamplingParams
from octavo.simulate.executor import Latency
from octavo.simulate.outcome import TokenTimes
from octavo.simulate.replica import Replica, ReplicaConfig
from octavo.simulate.routing import LeastLoaded, Router
from octavo.workload.items import WorkItem, WorkloadError
from octavo.workload.prompts import prompt_token_ids

RESULT, ARRIVAL, STEP = range(3)
_GREEDY = SamplingParams(temperature=0.0, ignore_eos=True)
_VOCAB_SIZE = 32000
Note = Callable[[float, int, int], None]
"""Told the time, the kind and the replica or request of every event."""


class Cluster:
    """``num_replicas`` equal engines. ``latency`` makes the steps of each take its time."""

    def __init__(
        self,
        config: ReplicaConfig,
        latency: Latency,
        num_replicas: int = 1,
        router: Router | None = None,
        *,
        seed: int = 0,
    ) -> None:
        if num_replicas < 1:
            raise ValueError(f"num_replicas must be at least 1, got {num_replicas}")
        self.config = config
        self.replicas = [Replica(config, latency) for _ in range(num_replicas)]
        self.outstanding: IntArray = np.zeros(num_replicas, dtype=np.int32)
        self.num_requests = np.zeros(num_replicas, dtype=np.int64)
        self.num_steps = 0
        self._router = router or LeastLoaded()
        self._seed = seed

    @property
    def num_preemptions(self) -> int:
        return sum(replica.scheduler.num_preemptions for replica in self.replicas)

    def run(self, items: Sequence[WorkItem], note: Note | None = None) -> TokenTimes:
        """Serve ``items``, whose outputs have the lengths they say, to the end.

        Raises:
            WorkloadError: one can never be served; the message says which and why.
        """
        self._check(items)
        times = TokenTimes(items)
        # (moment, kind, request or replica): kinds are in the order in which they are handled.
        events = [(item.arrival_s, ARRIVAL, index) for index, item in enumerate(items)]
        heapq.heapify(events)
        ready: list[StepOutputs | None] = [None] * len(self.replicas)
        is_stepping: NDArray[np.bool_] = np.zeros(len(self.replicas), dtype=np.bool_)
        request_of = self._requests(items)
        pop, push = heapq.heappop, heapq.heappush
        while events:
            now_s, kind, index = pop(events)
            if note is not None:
                note(now_s, kind, index)
            if kind == ARRIVAL:
                chosen = self._router.choose(items[index], self.outstanding)
                self.replicas[chosen].add(request_of(index))
                self.outstanding[chosen] += 1
                self.num_requests[chosen] += 1
                if not is_stepping[chosen]:
                    is_stepping[chosen] = True
                    push(events, (now_s, STEP, chosen))
            elif kind == STEP:
                ends_s, ready[index] = self.replicas[index].step(now_s)
                self.num_steps += 1
                push(events, (ends_s, RESULT, index))
            else:
                outputs = ready[index]
                assert outputs is not None
                times.note(now_s, outputs)
                if outputs.finished:
                    self.outstanding[index] -= len(outputs.finished)
                if self.replicas[index].has_work:
                    push(events, (now_s, STEP, index))
                else:
                    is_stepping[index] = False
        return times

    def _check(self, items: Sequence[WorkItem]) -> None:
        longest = self.config.num_usable_tokens
        for index, item in enumerate(items):
            if item.num_prompt_tokens + item.num_output_tokens > longest:
                raise WorkloadError(
                    f"request {index} has {item.num_prompt_tokens} prompt and "
                    f"{item.num_output_tokens} output tokens, and a replica holds {longest}; "
                    "leave out longer ones (--max-total-len), or give more KV memory"
                )

    def _requests(self, items: Sequence[WorkItem]) -> Callable[[int], Request]:
        """Makes requests when they come. Without a prefix cache nobody looks at a token, so all
        prompts are pieces of one array."""
        if self.config.prefix_caching:

            def tokens(index: int) -> IntArray:
                ids = prompt_token_ids(
                    items[index], index, lowest=0, highest=_VOCAB_SIZE, seed=self._seed
                )
                return int_array(ids)
        else:
            longest = max((item.num_prompt_tokens for item in items), default=0)
            zeros = np.zeros(longest, dtype=np.int32)

            def tokens(index: int) -> IntArray:
                return zeros[: items[index].num_prompt_tokens]

        def make(index: int) -> Request:
            num_output = items[index].num_output_tokens
            return Request(index, tokens(index), _GREEDY, num_output, seed=0)

        return make
