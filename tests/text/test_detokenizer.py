from __future__ import annotations

import random

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from tokenizers import Tokenizer as Backend
from tokenizers import decoders, models

from octavo.text.detokenizer import IncrementalDetokenizer
from octavo.text.tokenizer import Tokenizer

from .tiny_tokenizers import tiny_tokenizer

PROPERTY = settings(max_examples=200, deadline=None, derandomize=True, database=None)
families = st.sampled_from(["byte_level", "sentencepiece"])
# Bytes of emoji, of invalid sequences and of whole words, special tokens and ids without a token.
token_ids = st.lists(st.integers(0, 299), max_size=30)


def stream(
    tokenizer: Tokenizer, prompt: list[int], ids: list[int], skip: bool, seed: int = 0
) -> list[str]:
    detokenizer = IncrementalDetokenizer(tokenizer, prompt, skip)
    rng, pieces, start = random.Random(seed), [], 0
    while start < len(ids):
        size = rng.randint(1, 3)
        pieces.append(detokenizer.add(ids[start : start + size]))
        start += size
    return [*pieces, detokenizer.flush()]


@PROPERTY
@given(family=families, ids=token_ids, skip=st.booleans(), seed=st.integers(0, 99))
def test_pieces_concatenate_to_the_decoded_output(
    family: str, ids: list[int], skip: bool, seed: int
) -> None:
    tokenizer = tiny_tokenizer(family)
    assert "".join(stream(tokenizer, [], ids, skip, seed)) == tokenizer.decode(ids, skip)


@PROPERTY
@given(family=families, prompt=st.text(max_size=10), ids=token_ids)
def test_pieces_continue_the_prompt(family: str, prompt: str, ids: list[int]) -> None:
    tokenizer = tiny_tokenizer(family)
    prompt_ids = tokenizer.encode(prompt)
    whole = tokenizer.decode(prompt_ids + ids)
    assert tokenizer.decode(prompt_ids) + "".join(stream(tokenizer, prompt_ids, ids, True)) == whole


@PROPERTY
@given(family=families, text=st.text(max_size=20))
def test_valid_text_never_shows_half_a_character(family: str, text: str) -> None:
    tokenizer = tiny_tokenizer(family)
    ids = tokenizer.encode(text, add_special_tokens=False, allow_special=False)
    detokenizer, emitted = IncrementalDetokenizer(tokenizer, []), ""
    for token_id in ids:
        emitted += detokenizer.add([token_id])
        assert text.startswith(emitted)
    assert emitted == text
    assert detokenizer.flush() == ""


@PROPERTY
@given(ids=token_ids, skip=st.booleans())
def test_byte_level_decoding_equals_the_library(ids: list[int], skip: bool) -> None:
    tokenizer = tiny_tokenizer("byte_level")
    ids = [i for i in ids if i != tokenizer.token_to_id("né")]  # the library spells it in bytes
    assert tokenizer.decode(ids, skip) == tokenizer._backend.decode(ids, skip_special_tokens=skip)


@PROPERTY
@given(text=st.text(max_size=20), skip=st.booleans())
def test_sentencepiece_decoding_equals_the_library_on_text(text: str, skip: bool) -> None:
    tokenizer = tiny_tokenizer("sentencepiece")
    ids = tokenizer.encode(text)
    assert tokenizer.decode(ids, skip) == tokenizer._backend.decode(ids, skip_special_tokens=skip)


@pytest.mark.parametrize("family", ["byte_level", "sentencepiece"])
def test_an_emoji_comes_out_with_its_last_token(family: str) -> None:
    tokenizer = tiny_tokenizer(family)
    first_byte = tokenizer.token_to_id("<0x00>" if family == "sentencepiece" else "Ā")
    assert first_byte is not None
    ids = [first_byte + byte for byte in "😀".encode()]
    detokenizer = IncrementalDetokenizer(tokenizer, [])
    assert [detokenizer.add([i]) for i in ids] == ["", "", "", "😀"]
    # Begun by the prompt, completed by the output.
    assert IncrementalDetokenizer(tokenizer, ids[:2]).add(ids[2:]) == "😀"
    assert IncrementalDetokenizer(tokenizer, ids[:2]).flush() == ""


@pytest.mark.parametrize("family", ["byte_level", "sentencepiece"])
def test_invalid_bytes_come_out(family: str) -> None:
    tokenizer = tiny_tokenizer(family)
    zero = tokenizer.token_to_id("<0x00>" if family == "sentencepiece" else "Ā")
    assert zero is not None
    detokenizer = IncrementalDetokenizer(tokenizer, [])
    assert detokenizer.add([zero + 0xFF]) == "\ufffd"
    assert detokenizer.add([zero + 0xF0]) == ""
    assert detokenizer.add([zero + ord("a")]) == "\ufffda"
    assert detokenizer.add([zero + byte for byte in "\ufffd".encode()]) == "\ufffd"
    assert detokenizer.add([zero + 0xE2]) == ""
    assert detokenizer.flush() == "\ufffd"
    assert detokenizer.flush() == ""


def test_the_leading_space_is_stripped_only_at_the_start_of_a_text() -> None:
    tokenizer = tiny_tokenizer("sentencepiece")
    hello = tokenizer.encode("hello", add_special_tokens=False)
    assert IncrementalDetokenizer(tokenizer, [1]).add(hello) == "hello"
    assert IncrementalDetokenizer(tokenizer, [1, *hello]).add(hello) == " hello"


def test_special_tokens_are_shown_on_request() -> None:
    tokenizer = tiny_tokenizer("byte_level")
    ids = tokenizer.encode("<|im_start|>hello<tool>né<|end|>")
    assert "".join(stream(tokenizer, [], ids, True)) == "hello<tool>né"
    assert "".join(stream(tokenizer, [], ids, False)) == "<|im_start|>hello<tool>né<|end|>"


@PROPERTY
@given(ids=st.lists(st.integers(0, 5), max_size=20), prompt=st.lists(st.integers(1, 4), max_size=6))
def test_decoders_that_look_at_neighbours(ids: list[int], prompt: list[int]) -> None:
    vocab = {"[UNK]": 0, "hello": 1, "##ing": 2, "world": 3, ",": 4, "\ufffd": 5}
    backend = Backend(models.WordPiece(vocab, unk_token="[UNK]"))
    backend.decoder = decoders.WordPiece(cleanup=False)
    tokenizer = Tokenizer(backend)
    assert tokenizer.token_bytes() is None
    out = "".join(stream(tokenizer, prompt, ids, True))
    assert tokenizer.decode(prompt) + out == tokenizer.decode(prompt + ids)
