"""Tokens, offsets and values as answers spell them. No server needed."""

from __future__ import annotations

import math

import pytest

from octavo.engine.logprobs import TokenLogprobs
from octavo.server.logprobs import (
    Offsets,
    Spelling,
    chat_logprobs,
    completion_logprobs,
    prompt_logprobs,
)
from text.tiny_tokenizers import tiny_tokenizer


def test_what_has_no_text_or_is_impossible_is_told_all_the_same() -> None:
    nothing = Spelling(None)
    assert (nothing.text(7), nothing.bytes(7)) == ("token_id:7", None)
    assert [Offsets(None, start=3).add(5) for _ in range(2)] == [3, 3]
    values = [TokenLogprobs(7, -math.inf, 9, ((5, -0.5), (6, -math.inf)))]
    found = completion_logprobs([7], values, 2, nothing, Offsets(None))
    assert found.token_logprobs == [-9999.0]
    assert found.top_logprobs == [
        {"token_id:5": -0.5, "token_id:6": -9999.0, "token_id:7": -9999.0}
    ]
    (token,) = chat_logprobs(values, nothing).content
    assert (token.logprob, token.bytes) == (-9999.0, None)
    (entry,) = prompt_logprobs(values, 1, nothing)
    assert entry is not None
    assert [(i, token.rank) for i, token in entry.items()] == [(7, 9), (5, 1)]


@pytest.mark.parametrize("kind", ["byte_level", "sentencepiece"])
@pytest.mark.parametrize("text", ["Hello world, né! 😀 ", " two  spaces", "漢字"])
def test_tokens_alone_join_to_the_text_and_offsets_are_places_in_it(kind: str, text: str) -> None:
    tokenizer = tiny_tokenizer(kind)
    ids = tokenizer.encode(text, add_special_tokens=False)
    whole, spelling, offsets = tokenizer.decode(ids), Spelling(tokenizer), Offsets(tokenizer)
    data = b"".join(bytes(spelling.bytes(token_id) or ()) for token_id in ids)
    assert data.decode("utf-8", "replace").strip() == whole.strip()
    places = [offsets.add(token_id) for token_id in ids]
    assert places == sorted(places)
    assert places[0] == 0
    assert places[-1] <= len(whole)
    for token_id, place in zip(ids, places, strict=True):
        alone = spelling.text(token_id)
        if "\ufffd" not in alone and len(alone.strip()) > 1:
            assert whole[place:].lstrip().startswith(alone.lstrip())
