"""Words that must not come out, as token sequences."""

from __future__ import annotations

import pytest

from octavo.core.sampling_params import SamplingParams
from octavo.text.bad_words import with_bad_word_tokens
from octavo.text.tokenizer import TokenizerError
from text.tiny_tokenizers import tiny_tokenizer


def convert(*words: str, family: str = "byte_level") -> tuple[tuple[int, ...], ...]:
    params = with_bad_word_tokens(SamplingParams(bad_words=words), tiny_tokenizer(family))
    assert params.bad_words == (), "nothing is left to convert"
    return params.bad_words_token_ids


@pytest.mark.parametrize("family", ["byte_level", "sentencepiece"])
@pytest.mark.parametrize("word", ["hello", " hello", "   hello"])
def test_with_and_without_a_space(family: str, word: str) -> None:
    tokenizer = tiny_tokenizer(family)
    encoded = [tokenizer.encode(text, add_special_tokens=False) for text in ("hello", " hello")]
    assert convert(word, family=family) == tuple(tuple(token_ids) for token_ids in encoded)


def test_a_word_of_spaces_is_itself() -> None:
    ids = tiny_tokenizer("byte_level").encode("  ", add_special_tokens=False)
    assert convert("  ") == (tuple(ids),)


def test_equal_sequences_come_once() -> None:
    assert convert("hello", " hello", "hello") == convert("hello")


def test_special_tokens_are_words() -> None:
    assert (0,) in convert("<|end|>")


def test_sequences_given_as_tokens_stay() -> None:
    params = SamplingParams(bad_words=("1",), bad_words_token_ids=((7, 8),))
    found = with_bad_word_tokens(params, tiny_tokenizer("byte_level")).bad_words_token_ids
    assert found == ((7, 8), *convert("1"))
    plain = SamplingParams(bad_words_token_ids=((7, 8),))
    assert with_bad_word_tokens(plain, tiny_tokenizer("byte_level")) is plain


@pytest.mark.parametrize(
    ("word", "message"),
    [("half \ud800 a pair", "bad_words: .* not valid Unicode"), ("日" * 30, "at most 64")],
)
def test_errors_name_the_field(word: str, message: str) -> None:
    with pytest.raises(TokenizerError, match=message):
        convert(word)
