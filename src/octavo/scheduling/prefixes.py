"""Registered prefixes: prompts whose full blocks stay in the cache until they are dropped.

A prefix comes in as an ordinary request for one token, which computes and publishes its blocks;
they are pinned in the very update that ends it, before anybody can take them. What is pinned must
leave room for whatever the engine promised to serve. Decides nothing about blocks (`memory`).
"""

from __future__ import annotations

from collections.abc import Iterable

from octavo.core.layout import num_blocks_for
from octavo.core.request import (
    Finished,
    FinishReason,
    PoolSizeError,
    RegisteredPrefix,
    Request,
    RequestError,
)
from octavo.scheduling.state import SchedulerState

MAX_PREFIXES = 1024


class PrefixRegistry:
    """Prefixes by the number of the request that brought them, on a `SchedulerState`."""

    def __init__(self, state: SchedulerState) -> None:
        self._state = state
        # On their way, and there.
        self._coming: dict[int, Request] = {}
        self._pinned: dict[int, tuple[int, ...]] = {}

    def expect(self, request: Request) -> None:
        """Take note of a request that pins its prompt.

        Raises:
            RequestError: it cannot be pinned; the message says what to change.
        """
        size = self._state.manager.block_size
        num_tokens = len(request.prompt_token_ids)
        if not self._state.manager.prefix_caching:
            raise RequestError(
                "prefixes cannot be registered without prefix caching; start the engine without "
                "--no-prefix-caching and --no-sharing"
            )
        if num_tokens < size:
            raise RequestError(
                f"the prefix has {num_tokens} tokens, less than a block of {size}: there is "
                "nothing to keep; register a longer one"
            )
        if len(self._coming) + len(self._pinned) >= MAX_PREFIXES:
            raise RequestError(
                f"{MAX_PREFIXES} prefixes are registered, the most there can be; drop one first"
            )
        self._check_room(request)
        self._coming[request.number] = request

    def forget(self, number: int) -> None:
        """The request was given up."""
        self._coming.pop(number, None)

    def settle(self, finished: Iterable[Finished]) -> tuple[RegisteredPrefix, ...]:
        """Pin the prefixes of those that ended."""
        if not self._coming:
            return ()
        return tuple(
            self._pin(self._coming.pop(end.number), end)
            for end in finished
            if end.number in self._coming
        )

    def drop(self, number: int) -> bool:
        """Whether there was such a prefix; its blocks stay cached like others, until evicted."""
        block_ids = self._pinned.pop(number, None)
        if block_ids is not None:
            self._state.manager.unpin(block_ids)
        return block_ids is not None

    def drop_all(self) -> None:
        """Stop keeping any, and forget what is cached."""
        for number in list(self._pinned):
            self.drop(number)
        self._state.manager.reset_prefix_cache()

    def check_pool(self, num_blocks: int) -> None:
        """Raises `PoolSizeError` where a pool of ``num_blocks`` would not leave what it should
        beside the prefixes."""
        num_pinned = self._state.manager.num_pinned_blocks
        needed = self._num_to_leave(num_blocks)
        if num_pinned and num_blocks - num_pinned < needed:
            raise PoolSizeError(
                f"registered prefixes keep {num_pinned} blocks, which would leave "
                f"{max(num_blocks - num_pinned, 0)} of {num_blocks}, but {needed} must remain for "
                "requests; drop a prefix, or ask for more"
            )

    def _num_to_leave(self, num_blocks: int) -> int:
        """Blocks of ``num_blocks`` that must not be pinned."""
        size = self._state.manager.block_size
        needed = num_blocks_for(self._state.config.max_model_len - 1, size)
        return needed if needed <= num_blocks else -(-num_blocks // 2)

    def _pin(self, request: Request, end: Finished) -> RegisteredPrefix:
        manager, token_ids = self._state.manager, request.prompt_token_ids
        number, count = request.number, len(token_ids)
        if end.reason is FinishReason.ERROR:
            return RegisteredPrefix(number, count, error=end.error or "the step failed")
        try:
            # What was promised may have changed since the door.
            self._check_room(request)
        except RequestError as error:
            return RegisteredPrefix(number, count, error=str(error))
        block_ids = manager.pin(token_ids, salt=request.cache_salt)
        if block_ids is not None and not self._in_flight().isdisjoint(block_ids):
            # Computed by a step that may still fail.
            manager.unpin(block_ids)
            block_ids = None
        if block_ids is None:
            why = "the prefix left the cache while it was registered (a reset?); register it again"
            return RegisteredPrefix(number, count, error=why)
        self._pinned[number] = block_ids
        return RegisteredPrefix(number, count, len(block_ids) * manager.block_size)

    def _in_flight(self) -> set[int]:
        return {block_id for step in self._state.launched for _, block_id in step.published}

    def _check_room(self, request: Request) -> None:
        """Pinned blocks leave room for one sequence of the model's whole length, so that what fits
        without them fits with them, or for half of a pool that is too small for one; and for each
        request that was taken in."""
        manager = self._state.manager
        num_new = manager.num_to_pin(request.prompt_token_ids, salt=request.cache_salt)
        num_blocks = self._state.num_lasting_blocks
        left = num_blocks - manager.num_pinned_blocks - num_new
        needed = self._num_to_leave(num_blocks)
        if left < needed:
            more = "raise --kv-memory"
            if self._state.config.max_blocks is not None:
                more = "grow the KV cache (POST /kv/resize or LLM.resize_kv)"
            raise RequestError(
                f"the prefix does not fit: its {num_new} blocks would leave {max(left, 0)} of "
                f"{num_blocks}, but {needed} must remain for other requests; "
                f"register less, drop a prefix, {more} or lower --max-model-len"
            )
        need = self._state.most_blocks_needed()
        if num_new and left < need:
            raise RequestError(
                f"the prefix does not fit now: its {num_new} blocks would leave {left}, but a "
                f"request under way may need {need}; register it again when that has ended"
            )

    def check(self) -> None:
        """Raise AssertionError when pins and prefixes disagree. For tests and debug runs."""
        pinned = {block_id for block_ids in self._pinned.values() for block_id in block_ids}
        assert len(pinned) == self._state.manager.num_pinned_blocks, "a pin belongs to no prefix"
        assert all(number in self._state.sequences for number in self._coming), "a prefix is lost"
