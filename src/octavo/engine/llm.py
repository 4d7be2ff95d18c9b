"""`LLM`: the engine in this process, for scripts and notebooks. Synchronous, no sockets."""

from __future__ import annotations

import os
import secrets
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import replace
from typing import TYPE_CHECKING, Any, TypeAlias

from octavo.config import EngineConfig
from octavo.core.request import Request, RequestError
from octavo.core.sampling_params import SamplingParams
from octavo.engine.arguments import (
    Prompt,
    check_messages,
    is_single,
    params_for,
    progress_bar,
    token_ids_of,
)
from octavo.engine.completion import Completion, RequestOutput
from octavo.engine.heap import frozen_meanwhile
from octavo.engine.interrupts import interrupts_between_steps
from octavo.engine.logprobs import step_logprobs
from octavo.engine.pool import PoolSize, blocks_in, resized_report, run_resize
from octavo.engine.prefixes import PREFIX_PARAMS, limits_beside, prefix_number, register
from octavo.engine.turn import Turn

if TYPE_CHECKING:
    from octavo.engine.report import EngineReport
    from octavo.text.tokenizer import Tokenizer

Message: TypeAlias = Mapping[str, Any]

__all__ = ["LLM", "Completion"]


class LLM:
    """A model and its engine.

    Keyword options are those of `octavo.config.EngineConfig`, for example ``kv_memory="512MiB"``.
    One call runs at a time: calls of other threads wait, and a call in the middle of a
    `stream_chat` of the same thread is refused.

    While `generate` and `chat` run, Python's garbage collector leaves out what was there before
    (``gc.freeze``), since a full collection makes the device wait; afterwards it takes it up again.
    What a process has frozen itself stays so.

    Example::

        llm = LLM("smollm2-135m")
        print(llm.chat([{"role": "user", "content": "What is a KV cache?"}]).text)

    Raises:
        ConfigError, ModelStoreError, ModelLoadError: the model cannot be served as asked.
        ResourceError, DownloadError: the machine or the network refuses what it takes.
    """

    def __init__(self, model: str | os.PathLike[str] | None = None, **options: Any) -> None:
        from octavo.engine.build import build_engine
        from octavo.model_store import ensure_model
        from octavo.text.tokenizer import load_tokenizer

        named: dict[str, Any] = {} if model is None else {"model": model}
        config = EngineConfig(**named, **options)
        path = ensure_model(config.model)
        self.tokenizer: Tokenizer | None = None
        if config.load_format != "dummy":
            self.tokenizer = load_tokenizer(path)
        self._core, self.report = build_engine(config)
        self._limits = self.report.limits
        if self.tokenizer is not None:
            eos = dict.fromkeys(self._limits.eos_token_ids + self.tokenizer.eos_token_ids)
            self._limits = replace(self._limits, eos_token_ids=tuple(eos))
        self._next_number = 0
        self._turn = Turn()

    report: EngineReport

    def generate(
        self,
        prompts: Prompt | Sequence[Prompt],
        params: SamplingParams | Sequence[SamplingParams] | None = None,
        *,
        progress: bool = False,
    ) -> list[Completion]:
        """Complete each prompt, a text or a list of token ids, all in one batch.

        ``params`` is one for all or one for each. Results come in the order of the prompts; of a
        beam search the best beam, with all of them in `Completion.beams`.

        Raises:
            RequestError: a prompt cannot be served as asked; nothing has been generated then.
        """
        items = [prompts] if is_single(prompts) else list(prompts)
        token_ids = [self._encode(prompt) for prompt in items]
        return self._run(token_ids, params_for(items, params), progress)

    def chat(
        self,
        messages: Sequence[Message] | Sequence[Sequence[Message]],
        params: SamplingParams | Sequence[SamplingParams] | None = None,
        *,
        progress: bool = False,
    ) -> Any:
        """Answer one conversation (returns a `Completion`) or several (returns a list).

        Without ``params`` an answer may take all the room that the context leaves.

        Raises:
            RequestError: there is no chat template, or a conversation cannot be served.
            ChatTemplateError: the template refuses the messages.
        """
        is_list = isinstance(messages, Sequence) and not isinstance(messages, str | bytes)
        # What is no list of anything is refused where a conversation is.
        is_one = not is_list or (len(messages) > 0 and isinstance(messages[0], Mapping))
        conversations: list[Any] = [messages] if is_one else list(messages)
        prompts = [self._render(conversation) for conversation in conversations]
        defaults = SamplingParams(max_tokens=None) if params is None else params
        results = self._run(prompts, params_for(prompts, defaults), progress)
        return results[0] if is_one else results

    def stream_chat(
        self, messages: Sequence[Message], params: SamplingParams | None = None
    ) -> Iterator[str]:
        """Answer one conversation piece by piece. Leaving the iterator early aborts the request.

        Raises:
            RequestError: as `chat`; also where the step failed.
        """
        self._turn.check()
        (checked,) = params_for([messages], params or SamplingParams(max_tokens=None))
        return self._stream(self._resolve(self._render(messages), checked))

    def _stream(self, request: Request) -> Iterator[str]:
        with self._turn.taken():
            output = RequestOutput(self.tokenizer, request)
            self._core.scheduler.add(request)
            try:
                while not output.is_done:
                    self._turn.check()
                    with interrupts_between_steps() as raise_interrupt:
                        self._step({request.number: output})
                        raise_interrupt()
                    if text := output.take_text():
                        yield text
                if output.error is not None:
                    raise RequestError(output.error)
            finally:
                self._core.scheduler.abort(request.number)
                with interrupts_between_steps():
                    while self._core.has_work and not self._turn.is_over:
                        self._core.step()

    def register_prefix(self, prefix: Prompt | Sequence[Message]) -> str:
        """Compute what prompts begin with (a text, token ids, or the first messages of
        conversations) and keep its full blocks in the prefix cache, whatever else runs.

        Returns:
            An id for `drop_prefix`.

        Raises:
            RequestError: it is shorter than a block, the pool has no room to keep it, or the engine
                caches no prefixes.
        """
        if isinstance(prefix, list | tuple) and prefix and isinstance(prefix[0], Mapping):
            token_ids: Sequence[int] = self._render(prefix, is_question=False)  # type: ignore[arg-type]
        else:
            token_ids = self._encode(prefix)  # type: ignore[arg-type]
        with self._turn.taken():
            request = replace(self._resolve(token_ids, PREFIX_PARAMS), pins_prefix=True)
            with interrupts_between_steps() as raise_interrupt:
                registered = register(self._core, request, raise_interrupt)
            self._update_limits()
        return registered.id

    def drop_prefix(self, prefix_id: str) -> bool:
        """Stop keeping a prefix, whose blocks stay cached like others; False: there is none."""
        number = prefix_number(prefix_id)
        with self._turn.taken():
            was_there = number is not None and self._core.scheduler.drop_prefix(number)
            self._update_limits()
        return was_there

    def reset_prefix_cache(self) -> None:
        """Forget cached prefixes but the registered."""
        with self._turn.taken():
            self._core.scheduler.reset_prefix_cache()

    def resize_kv(self, kv_memory: str | int) -> PoolSize:
        """Grow or shrink the KV cache to a size such as ``"2GiB"``, or bytes: memory is taken from
        the system, or given back. Cached prefixes go as far as they must, the longest unused first.
        Needs ``kv="virtual"``.

        Raises:
            PoolSizeError: it cannot have this size; the message says which.
            PoolBusyError: there is no such memory, or the engine sleeps; nothing has changed.
        """
        with self._turn.taken():
            num_blocks = blocks_in(kv_memory, self.report.capacity)
            return self._resize(lambda: self._core.scheduler.resizing.resize(num_blocks))

    def sleep(self, level: int = 1) -> None:
        """Give all memory of the KV cache back, until `wake_up`. Cached and registered prefixes are
        lost; weights stay, which is vLLM's ``level`` 1. Nothing is generated meanwhile. Needs
        ``kv="virtual"``.

        Raises:
            PoolSizeError, PoolBusyError: as `resize_kv`.
            ValueError: another ``level``.
        """
        if level != 1:
            raise ValueError(f"level must be 1 (weights stay), got {level!r}")
        with self._turn.taken():
            self._resize(self._core.scheduler.resizing.sleep)

    def wake_up(self) -> None:
        """Take the memory again that `sleep` gave back.

        Raises:
            PoolBusyError: it is not there any more; the engine still sleeps.
        """
        with self._turn.taken():
            self._resize(self._core.scheduler.resizing.wake_up)

    @property
    def is_sleeping(self) -> bool:
        """Whether the KV cache has no memory."""
        return self._core.scheduler.resizing.is_asleep

    def _resize(self, start: Callable[[], None]) -> PoolSize:
        resizing = self._core.scheduler.resizing
        with interrupts_between_steps() as raise_interrupt:
            try:
                num_blocks = run_resize(self._core, start)
            finally:
                self.report = resized_report(self.report, resizing.num_lasting_blocks)
                self._update_limits()
            raise_interrupt()
        return PoolSize.of(self.report.capacity, num_blocks)

    def _update_limits(self) -> None:
        num_pinned = self._core.scheduler.manager.num_pinned_blocks
        self._limits = limits_beside(self._limits, self.report, num_pinned)

    def close(self) -> None:
        """Stop the engine and release its memory. Safe to call twice."""
        self._turn.end()
        self._core.close()

    def __enter__(self) -> LLM:
        return self

    def __exit__(self, *_: object) -> None:
        self.close()

    def _render(self, messages: Sequence[Message], is_question: bool = True) -> list[int]:
        """A conversation's prompt, ready for the answer where it ``is_question``."""
        if self.tokenizer is None or self.tokenizer.chat_template is None:
            raise RequestError("this model has no chat template; use generate with a plain prompt")
        check_messages(messages)
        text = self.tokenizer.chat_template.render(
            [dict(message) for message in messages], add_generation_prompt=is_question
        )
        return self._encoded(text, add_special_tokens=False)

    def _encode(self, prompt: Prompt) -> Sequence[int]:
        if not isinstance(prompt, str):
            return token_ids_of(prompt)
        if self.tokenizer is None:
            raise RequestError("a model of random weights has no tokenizer; give token ids")
        return self._encoded(prompt)

    def _encoded(self, text: str, add_special_tokens: bool = True) -> list[int]:
        from octavo.text.tokenizer import TokenizerError

        assert self.tokenizer is not None
        try:
            return self.tokenizer.encode(text, add_special_tokens=add_special_tokens)
        except TokenizerError as error:
            raise RequestError(str(error)) from error

    def _run(
        self,
        prompts: Sequence[Sequence[int]],
        params: Sequence[SamplingParams],
        progress: bool,
    ) -> list[Completion]:
        with self._turn.taken(), frozen_meanwhile():
            return self._run_alone(prompts, params, progress)

    def _run_alone(
        self,
        prompts: Sequence[Sequence[int]],
        params: Sequence[SamplingParams],
        progress: bool,
    ) -> list[Completion]:
        requests = [
            self._resolve(ids, item, item.beam_width or 1)
            for ids, item in zip(prompts, params, strict=True)
        ]
        outputs = {
            request.number + index: RequestOutput(self.tokenizer, request)
            for request in requests
            for index in range(request.n)
        }
        pending = iter(requests)
        backlog = next(pending, None)
        scheduler = self._core.scheduler
        with (
            progress_bar(len(outputs), progress) as advance,
            interrupts_between_steps() as raise_interrupt,
        ):
            try:
                while backlog is not None or self._core.has_work:
                    while backlog is not None and scheduler.has_room:
                        scheduler.add(backlog)
                        backlog = next(pending, None)
                    self._turn.check()
                    advance(self._step(outputs))
                    raise_interrupt()
            except BaseException:
                # An interrupt or a bug: leave the engine as if the call had not been made.
                for number in outputs:
                    scheduler.abort(number)
                raise
        return [
            outputs[r.number].completion([outputs[r.number + i] for i in range(r.n)])
            for r in requests
        ]

    def _resolve(self, token_ids: Sequence[int], params: SamplingParams, n: int = 1) -> Request:
        """``n`` is the number of results: more than one with beam search only."""
        from octavo.scheduling.admission import resolve_request

        if self.tokenizer is not None and params.bad_words:
            from octavo.text.bad_words import with_bad_word_tokens
            from octavo.text.tokenizer import TokenizerError

            try:
                params = with_bad_word_tokens(params, self.tokenizer)
            except TokenizerError as error:
                raise RequestError(str(error)) from error
        request = resolve_request(
            self._next_number,
            token_ids,
            params,
            self._limits,
            random_seed=secrets.randbits(63),
            n=n,
        )
        self._next_number += request.num_sequences
        return request

    def _step(self, outputs: dict[int, RequestOutput]) -> int:
        """One engine step; the number of requests that ended with it."""
        step = self._core.step()
        ended = {finished.number: finished for finished in step.finished}
        logprobs = step_logprobs(step)
        for piece in step.prompt_logprobs:
            if (output := outputs.get(piece.owner)) is not None:
                output.prompt_scores.add(piece)
        num_done = 0
        for number, token_id in zip(step.numbers.tolist(), step.token_ids.tolist(), strict=True):
            output = outputs.get(number)
            if output is None or output.is_done:
                continue
            finished = ended.pop(number, None)
            if number in logprobs:
                output.logprobs.append(logprobs[number])
            output.add((token_id,), finished.reason if finished else None)
            if finished is not None:
                output.num_cached_tokens = finished.num_cached_tokens
            if output.is_done:
                num_done += 1
                if finished is None:
                    scheduler = self._core.scheduler
                    output.num_cached_tokens = scheduler.num_cached_tokens(number)
                    scheduler.abort(number)
        beams = {beam.number: beam for beam in step.beams}
        for finished in ended.values():
            output = outputs.get(finished.number)
            if output is not None and not output.is_done:
                output.num_cached_tokens = finished.num_cached_tokens
                if (beam := beams.get(finished.number)) is not None:
                    output.add_beam(beam, finished.reason)
                else:
                    output.add((), finished.reason, finished.error)
                num_done += 1
        return num_done
