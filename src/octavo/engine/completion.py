"""What `octavo.engine.llm` hands out, and how a request's tokens become it. Knows no engine."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import TYPE_CHECKING

from octavo.core.request import BeamResult, FinishReason, Request
from octavo.engine.logprobs import PromptScores, TokenLogprobs, beam_logprobs
from octavo.engine.output import OutputText

if TYPE_CHECKING:
    from octavo.text.tokenizer import Tokenizer


@dataclass(frozen=True, slots=True)
class Beam:
    """A sequence that a beam search found. ``score``, by which beams are ranked, is
    ``cumulative_logprob`` over the number of tokens to the power ``length_penalty``."""

    text: str
    token_ids: tuple[int, ...]
    finish_reason: FinishReason
    score: float
    cumulative_logprob: float
    logprobs: tuple[TokenLogprobs, ...] | None = None


@dataclass(frozen=True, slots=True)
class Completion:
    """One request's result. ``error`` is set when ``finish_reason`` is ``error``;
    ``num_cached_tokens`` of the prompt came from the prefix cache.

    ``logprobs`` has an entry for each of ``token_ids``, ``prompt_logprobs`` for each token of the
    prompt, None for its first; both are None unless `SamplingParams` asked for them. ``beams`` are
    those of a beam search, best first; the first is the completion itself.
    """

    text: str
    token_ids: tuple[int, ...]
    finish_reason: FinishReason
    num_prompt_tokens: int
    error: str | None = None
    num_cached_tokens: int = field(default=0, compare=False)
    logprobs: tuple[TokenLogprobs, ...] | None = None
    prompt_logprobs: tuple[TokenLogprobs | None, ...] | None = None
    beams: tuple[Beam, ...] = ()


class RequestOutput:
    """Collects one result of a request."""

    def __init__(self, tokenizer: Tokenizer | None, request: Request) -> None:
        self._request = request
        self._token_ids: list[int] = []
        self._text: list[str] = []
        self._reason: FinishReason | None = None
        self.num_cached_tokens = 0
        self.logprobs: list[TokenLogprobs] = []
        self.prompt_scores = PromptScores()
        self._beam: BeamResult | None = None
        self._error: str | None = None
        self._output: OutputText | None = None
        if tokenizer is not None:
            prompt = request.prompt_token_ids.tolist()
            self._output = OutputText(tokenizer, prompt, request.params)

    @property
    def is_done(self) -> bool:
        return self._reason is not None

    @property
    def error(self) -> str | None:
        return self._error

    def take_text(self) -> str:
        """The text since the last call."""
        text = "".join(self._text)
        self._text.clear()
        return text

    def add(
        self,
        token_ids: tuple[int, ...],
        reason: FinishReason | None,
        error: str | None = None,
    ) -> None:
        if self._output is None:
            self._token_ids += token_ids
            self._reason = reason
        else:
            delta = self._output.add(token_ids, reason, error)
            self._text.append(delta.text)
            self._token_ids += delta.token_ids
            self._reason = delta.finish_reason
        self._error = error

    def add_beam(self, beam: BeamResult, reason: FinishReason) -> None:
        """All of it, at its end."""
        self._beam = beam
        self.logprobs += beam_logprobs(beam)
        self.add(tuple(beam.token_ids.tolist()), reason)

    def completion(self, results: Sequence[RequestOutput]) -> Completion:
        """``results`` are all of the request, this one first."""
        assert self._reason is not None
        params = self._request.params
        return Completion(
            text="".join(self._text),
            token_ids=tuple(self._token_ids),
            finish_reason=self._reason,
            num_prompt_tokens=len(self._request.prompt_token_ids),
            error=self._error,
            num_cached_tokens=self.num_cached_tokens,
            logprobs=self._logprobs(),
            prompt_logprobs=(
                None if params.prompt_logprobs is None else self.prompt_scores.values()
            ),
            beams=tuple([b for result in results if (b := result._as_beam()) is not None]),
        )

    def _logprobs(self) -> tuple[TokenLogprobs, ...] | None:
        return None if self._request.params.logprobs is None else tuple(self.logprobs)

    def _as_beam(self) -> Beam | None:
        beam, reason = self._beam, self._reason
        if beam is None or reason is None:
            return None
        return Beam(
            text="".join(self._text),
            token_ids=tuple(self._token_ids),
            finish_reason=reason,
            score=beam.score,
            cumulative_logprob=beam.cumulative_logprob,
            logprobs=self._logprobs(),
        )
