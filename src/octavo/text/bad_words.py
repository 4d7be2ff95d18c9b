"""The token sequences of words that must not come out. Knows a tokenizer; knows no requests."""

from __future__ import annotations

from dataclasses import replace

from octavo.core.sampling_params import MAX_BAD_WORD_TOKENS, SamplingParams
from octavo.text.tokenizer import Tokenizer, TokenizerError


def with_bad_word_tokens(params: SamplingParams, tokenizer: Tokenizer) -> SamplingParams:
    """``params`` with the tokens of its ``bad_words``, each as a word begins a text and as it
    follows a space. A word spelled with other tokens than the tokenizer's own may still come out.

    Raises:
        TokenizerError: a word is no valid text or has too many tokens.
    """
    if not params.bad_words:
        return params
    sequences = dict.fromkeys(params.bad_words_token_ids)
    for word in params.bad_words:
        stem = word.lstrip(" ")
        for text in (stem, " " + stem) if stem else (word,):
            try:
                token_ids = tuple(tokenizer.encode(text, add_special_tokens=False))
            except TokenizerError as error:
                raise TokenizerError(f"bad_words: {error}") from error
            if len(token_ids) > MAX_BAD_WORD_TOKENS:
                raise TokenizerError(
                    f"bad_words: {word!r} has {len(token_ids)} tokens, "
                    f"at most {MAX_BAD_WORD_TOKENS} are possible"
                )
            if token_ids:
                sequences[token_ids] = None
    try:
        return replace(params, bad_words=(), bad_words_token_ids=tuple(sequences))
    except ValueError as error:
        raise TokenizerError(str(error)) from error
