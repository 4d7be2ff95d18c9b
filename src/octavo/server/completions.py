"""``/v1/completions``: what it takes and how its answers are spelled."""

from __future__ import annotations

import time
from collections.abc import Sequence
from dataclasses import dataclass

from octavo.engine.client import AsyncEngine
from octavo.engine.logprobs import TokenLogprobs
from octavo.engine.output import OutputDelta
from octavo.server.answers import (
    Answer,
    CompletionChoice,
    CompletionLogprobs,
    PromptToken,
    Usage,
)
from octavo.server.errors import APIError
from octavo.server.generation import BestOf, EchoedPrompts, Generation, Result, ScoredPrompts
from octavo.server.logprobs import (
    Offsets,
    Spelling,
    completion_logprobs,
    joined,
    prompt_logprobs,
    spelled_score,
)
from octavo.server.prompts import completion_prompts, prompt_texts, with_bad_words
from octavo.server.protocol import CompletionRequest
from octavo.text.tokenizer import Tokenizer

DEFAULT_MAX_TOKENS = 16
# Log probabilities of prompt tokens in one answer: some 60 bytes of JSON each, in each choice.
MAX_PROMPT_ENTRIES = 2**22


@dataclass(frozen=True, slots=True)
class Prompts:
    """``echoes`` come before each prompt's choices: nothing without ``echo``."""

    token_ids: Sequence[Sequence[int]]
    echoes: Sequence[str]


async def start_completion(
    engine: AsyncEngine, body: CompletionRequest
) -> tuple[Generation, Prompts]:
    """Raises as `completion_prompts`, `prompt_texts`, `with_bad_words` and `Generation`; `APIError`
    too where more is asked of the prompts than an answer should hold."""
    max_tokens = DEFAULT_MAX_TOKENS if body.max_tokens is None else body.max_tokens
    is_echo_only = bool(body.echo) and max_tokens == 0
    params = body.sampling_params(1 if is_echo_only else max_tokens)
    params = await with_bad_words(params, engine.tokenizer)
    prompts = await completion_prompts(body.prompt, engine.tokenizer, engine.limits.max_length)
    _check_entries(body, prompts)
    echoes = [""] * len(prompts)
    if body.echo:
        echoes = await prompt_texts(body.prompt, engine.tokenizer)
    n, salt = body.num_choices, body.cache_salt or ""
    if is_echo_only:
        kind = EchoedPrompts if params.prompt_logprobs is None else ScoredPrompts
        return kind(engine, prompts, params, n, salt), Prompts(prompts, echoes)
    if body.num_samples > n:
        best = BestOf(engine, prompts, params, n, salt, best_of=body.num_samples)
        return best, Prompts(prompts, echoes)
    return Generation(engine, prompts, params, n, salt), Prompts(prompts, echoes)


def _check_entries(body: CompletionRequest, prompts: Sequence[Sequence[int]]) -> None:
    if body.num_prompt_logprobs is None:
        return
    num_entries = sum(map(len, prompts)) * (body.num_prompt_logprobs + 1) * body.num_choices
    if num_entries > MAX_PROMPT_ENTRIES:
        name = "logprobs" if body.prompt_logprobs is None else "prompt_logprobs"
        raise APIError(
            f"{name}: the answer would hold {num_entries} log probabilities of prompt tokens, at "
            f"most {MAX_PROMPT_ENTRIES} are possible; ask for fewer, for fewer choices (n) or with "
            "less prompt",
            param=name,
        )


class CompletionShape:
    """Implements `octavo.server.streaming.Shape`."""

    def __init__(
        self,
        model: str,
        request_id: str,
        body: CompletionRequest,
        generation: Generation,
        prompts: Prompts,
        tokenizer: Tokenizer | None,
    ) -> None:
        self._id = f"cmpl-{request_id}"
        self._created = int(time.time())
        self._model = model
        self._n = body.num_choices
        self._echoes = prompts.echoes
        self._scores = _Scores(body, generation, prompts, tokenizer)

    def answer(self, results: Sequence[Result], usage: Usage) -> Answer[CompletionChoice]:
        answer = self._answer(
            [
                self._choice(
                    index, result.text, result.logprobs, result.finish_reason, result.score, True
                )
                for index, result in enumerate(results)
            ]
        )
        answer.usage = usage
        return answer

    def chunks(
        self, index: int, delta: OutputDelta, *, is_first: bool
    ) -> list[Answer[CompletionChoice]]:
        is_empty = not delta.text and not delta.logprobs and delta.finish_reason is None
        if is_empty and not is_first:
            return []
        choice = self._choice(
            index, delta.text, delta.logprobs, delta.finish_reason, delta.score, is_first
        )
        return [self._answer([choice])]

    def usage_chunk(self, usage: Usage) -> Answer[CompletionChoice]:
        answer = self._answer([])
        answer.usage = usage
        return answer

    def _choice(
        self,
        index: int,
        text: str,
        values: Sequence[TokenLogprobs],
        reason: str | None,
        score: float | None,
        is_first: bool,
    ) -> CompletionChoice:
        prompt = index // self._n
        logprobs = self._scores.of(index, prompt, values, is_first)
        choice = CompletionChoice(index, text, logprobs, reason, score=spelled_score(score))
        if is_first:
            choice.text = self._echoes[prompt] + text
            self._scores.add_prompt(choice, prompt)
        return choice

    def _answer(self, choices: list[CompletionChoice]) -> Answer[CompletionChoice]:
        return Answer(self._id, "text_completion", self._created, self._model, choices)


class _Scores:
    """What a request's choices tell of log probabilities, piece by piece. A prompt's are spelled
    once for all its choices."""

    def __init__(
        self,
        body: CompletionRequest,
        generation: Generation,
        prompts: Prompts,
        tokenizer: Tokenizer | None,
    ) -> None:
        self._num_top = body.logprobs
        self._num_prompt_top = body.prompt_logprobs
        self._is_echoed = bool(body.echo)
        self._generation = generation
        self._prompts = prompts
        self._tokenizer = tokenizer
        self._spelling = Spelling(tokenizer)
        self._offsets: dict[int, Offsets] = {}
        self._echoes: dict[int, CompletionLogprobs] = {}
        self._of_prompts: dict[int, list[dict[int, PromptToken] | None]] = {}

    def of(
        self, index: int, prompt: int, values: Sequence[TokenLogprobs], is_first: bool
    ) -> CompletionLogprobs | None:
        """The next tokens of a choice, after the echoed prompt's when they are its first."""
        if self._num_top is None or not (values or is_first):
            return None
        if index not in self._offsets:
            self._offsets[index] = Offsets(
                self._tokenizer,
                self._prompts.token_ids[prompt],
                start=len(self._prompts.echoes[prompt]),
            )
        ids = [value.token_id for value in values]
        offsets = self._offsets[index]
        found = completion_logprobs(ids, values, self._num_top, self._spelling, offsets)
        if not (is_first and self._is_echoed):
            return found
        return joined(self._echo(prompt, self._num_top), found)

    def add_prompt(self, choice: CompletionChoice, prompt: int) -> None:
        """Write ``prompt_logprobs`` where they were asked for."""
        if self._num_prompt_top is None:
            return
        if prompt not in self._of_prompts:
            self._of_prompts[prompt] = prompt_logprobs(
                self._generation.prompt_logprobs(prompt), self._num_prompt_top, self._spelling
            )
        choice.prompt_logprobs = self._of_prompts[prompt]

    def _echo(self, prompt: int, num_top: int) -> CompletionLogprobs:
        if prompt not in self._echoes:
            self._echoes[prompt] = completion_logprobs(
                self._prompts.token_ids[prompt],
                self._generation.prompt_logprobs(prompt),
                num_top,
                self._spelling,
                Offsets(self._tokenizer, end=len(self._prompts.echoes[prompt])),
            )
        return self._echoes[prompt]
