"""From a request's tokens to its text, in the front end: detokenizing and stop strings.

Knows tokenizers; knows nothing of steps, rows or sockets.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

from octavo.core.request import FinishReason
from octavo.core.sampling_params import SamplingParams
from octavo.engine.logprobs import TokenLogprobs
from octavo.text.detokenizer import IncrementalDetokenizer
from octavo.text.stop_strings import StopStrings
from octavo.text.tokenizer import Tokenizer


@dataclass(frozen=True, slots=True)
class OutputDelta:
    """What a step added to a request: text that is safe to show, and the tokens behind it.

    ``finish_reason`` is set on the last delta only; ``error`` says why when it is ``error``.
    ``logprobs`` has an entry for each of ``token_ids`` where `SamplingParams` asked for them.
    ``score`` is what a beam search ranked the whole sequence by, which comes in one delta.
    """

    text: str
    token_ids: tuple[int, ...]
    finish_reason: FinishReason | None = None
    error: str | None = None
    logprobs: tuple[TokenLogprobs, ...] = ()
    score: float | None = None


class OutputText:
    """One request's text so far. ``num_tokens`` counts generated tokens up to the end."""

    def __init__(
        self, tokenizer: Tokenizer, prompt_token_ids: Sequence[int], params: SamplingParams
    ) -> None:
        self._detokenizer = IncrementalDetokenizer(tokenizer, prompt_token_ids)
        self._stops: StopStrings | None = None
        if params.stop:
            self._stops = StopStrings(params.stop, params.include_stop_str_in_output)
        # Text of the first tokens is not searched for stop strings.
        self._min_tokens = params.min_tokens
        self._hides_stop_token = not params.include_stop_str_in_output
        self.num_tokens = 0
        self.finish_reason: FinishReason | None = None

    def add(
        self,
        token_ids: Sequence[int],
        finish_reason: FinishReason | None = None,
        error: str | None = None,
    ) -> OutputDelta:
        """Digest the tokens of a step.

        ``finish_reason`` is the engine's. A stop string found in the text sets the delta's reason
        to ``stop`` even where the engine goes on: the caller must then abort the request. Tokens
        after the one that completes a stop string are dropped.
        """
        text = ""
        kept = 0
        # A stop token is counted but is not text, unless asked for.
        is_stop = finish_reason is FinishReason.STOP
        num_visible = len(token_ids) - (is_stop and self._hides_stop_token)
        for index, token_id in enumerate(token_ids):
            kept += 1
            if index >= num_visible:
                continue
            piece, stopped = self._filter(self._detokenizer.add((token_id,)), kept)
            text += piece
            if stopped:
                return self._end(text, token_ids[:kept], FinishReason.STOP)
        if finish_reason is None:
            self.num_tokens += kept
            return OutputDelta(text, tuple(token_ids))
        piece, stopped = self._filter(self._detokenizer.flush(), kept)
        text += piece
        if stopped:
            return self._end(text, token_ids, FinishReason.STOP)
        if self._stops is not None:
            text += self._stops.flush()
        return self._end(text, token_ids, finish_reason, error)

    def _filter(self, piece: str, num_new_tokens: int) -> tuple[str, bool]:
        """The text that is safe to show, and whether a stop string completed with the piece that
        the last of ``num_new_tokens`` brought."""
        if self._stops is None or not piece:
            return piece, False
        if self.num_tokens + num_new_tokens <= self._min_tokens:
            return piece, False
        safe, matched = self._stops.add(piece)
        return safe, matched is not None

    def _end(
        self,
        text: str,
        token_ids: Sequence[int],
        reason: FinishReason,
        error: str | None = None,
    ) -> OutputDelta:
        self.num_tokens += len(token_ids)
        self.finish_reason = reason
        return OutputDelta(text, tuple(token_ids), reason, error)
