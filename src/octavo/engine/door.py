"""What a client's request becomes before it is sent: a checked `Request`, and a state for each of
its samples. Knows tokenizers; knows no sockets and no queue.
"""

from __future__ import annotations

import secrets
import time
from collections.abc import Sequence

from octavo.core.request import Request, RequestError
from octavo.core.sampling_params import SamplingParams
from octavo.engine.logprobs import PromptScores
from octavo.engine.output import OutputText
from octavo.engine.stream import Observer, RequestState
from octavo.scheduling.admission import Limits, resolve_request
from octavo.text.bad_words import with_bad_word_tokens
from octavo.text.tokenizer import Tokenizer, TokenizerError


def checked_request(
    number: int,
    prompt_token_ids: Sequence[int],
    params: SamplingParams,
    limits: Limits,
    tokenizer: Tokenizer | None,
    n: int = 1,
    cache_salt: str = "",
) -> Request:
    """Raises as `octavo.scheduling.admission.resolve_request`; `RequestError` too for text that
    needs a tokenizer where there is none, and for ``bad_words`` that cannot be forbidden."""
    if params.stop and tokenizer is None:
        raise RequestError("stop needs a tokenizer, which this model has not")
    if params.bad_words and tokenizer is not None:
        try:
            params = with_bad_word_tokens(params, tokenizer)
        except TokenizerError as error:
            raise RequestError(str(error)) from error
    return resolve_request(
        number,
        prompt_token_ids,
        params,
        limits,
        random_seed=secrets.randbits(63),
        n=n,
        cache_salt=cache_salt,
    )


def states_of(
    request: Request, tokenizer: Tokenizer | None, observer: Observer | None
) -> list[RequestState]:
    """One for each sample; they share what is found out about their prompt."""
    prompt = request.prompt_token_ids.tolist()
    scores = PromptScores() if request.needs_prompt_logits else None
    return [
        RequestState(
            request.number + index,
            len(prompt),
            None if tokenizer is None else OutputText(tokenizer, prompt, request.params),
            time.monotonic(),
            observer,
            request.max_tokens,
            runs_prompt=index == 0,
            prompt_scores=scores,
        )
        for index in range(request.n)
    ]
