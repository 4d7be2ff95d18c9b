from __future__ import annotations

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from tokenizers import Regex, pre_tokenizers

from octavo.text.gguf_pre_tokenizers import RULES
from octavo.text.gguf_tokenizer import _pre_tokenizer, tokenizer_from_gguf
from octavo.text.tokenizer import Tokenizer, TokenizerError

from .tiny_tokenizers import byte_level_metadata, sentencepiece_metadata, tiny_tokenizer

ODD = [
    *("", " ", "hello world", "  leading", "trailing  ", "a\r\nb\r\n\r\n", "\t\ttabs\t", "nul\0"),
    *("日本語 中文", "😀👨‍👩‍👧‍👦🏳️‍🌈", "e\u0301n\u0303", "x" + " " * 50 + "y", "\u200b\ufeff"),
    *("مرحبا", "don't I'LL", "\ufffd", "\U0010ffff", "<|im_start|> <|im", "12 345,6789"),
]


def split(rule: str, text: str) -> list[str]:
    """What a rule splits ``text`` into, spelled as text again."""
    tokenizer = tiny_tokenizer("byte_level")
    pieces = _pre_tokenizer(RULES[rule]).pre_tokenize_str(text)
    assert "".join(text[start:end] for _, (start, end) in pieces) == text
    assert tokenizer.decode(tokenizer.encode(text)) == text
    return [text[start:end] for _, (start, end) in pieces]


@pytest.mark.parametrize("text", ODD)
@pytest.mark.parametrize("family", ["byte_level", "sentencepiece"])
def test_round_trip(family: str, text: str) -> None:
    tokenizer = tiny_tokenizer(family)
    assert tokenizer.decode(tokenizer.encode(text, allow_special=False)) == text


@settings(max_examples=200, deadline=None, derandomize=True, database=None)
@given(st.sampled_from(sorted(RULES)), st.text(max_size=30))
def test_every_rule_keeps_every_character(rule: str, text: str) -> None:
    tokenizer = tokenizer_from_gguf(byte_level_metadata(rule))
    assert tokenizer.decode(tokenizer.encode(text, allow_special=False)) == text


@pytest.mark.parametrize(
    ("rule", "text", "expected"),
    [
        ("smollm", "In 2024 x", ["In", " ", "2", "0", "2", "4", " x"]),
        ("gpt-2", "In 2024 x", ["In", " 2024", " x"]),
        ("qwen2", "In 2024 x'S", ["In", " ", "2", "0", "2", "4", " x", "'S"]),
        ("llama-bpe", "In 20245 x", ["In", " ", "202", "45", " x"]),
        ("llama-bpe", "a\n\n  b", ["a", "\n\n", " ", " b"]),
        ("gpt-4o", "HelloWorld's 1234", ["Hello", "World's", " ", "123", "4"]),
        ("tekken", "HelloWorld 12", ["Hello", "World", " ", "1", "2"]),
        ("default", "a+b, 12345", ["a", "+", "b", ",", " ", "123", "45"]),
        ("falcon", "a,b 1234", ["a", ",", "b", " ", "123", "4"]),
        ("deepseek-llm", "ab中文 12\n!", ["ab", "中文", " ", "12", "\n", "!"]),
        ("deepseek-coder", "ab 12", ["ab", " ", "1", "2"]),
        ("deepseek-v3", "ab中文12345", ["ab", "中文", "123", "45"]),
        ("bloom", "one, two", ["one", ",", " two"]),
    ],
)
def test_rules(rule: str, text: str, expected: list[str]) -> None:
    assert split(rule, text) == expected


@settings(max_examples=300, deadline=None, derandomize=True, database=None)
@given(st.text("aZé中1 \n\t'.!½\u3000", max_size=20))
def test_the_built_in_expression_is_gpt2s(text: str) -> None:
    from octavo.text.gguf_pre_tokenizers import GPT2

    explicit = pre_tokenizers.Sequence(
        [
            pre_tokenizers.Split(Regex(GPT2), "isolated"),
            pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=False),
        ]
    )
    assert _pre_tokenizer(RULES["gpt-2"]).pre_tokenize_str(text) == explicit.pre_tokenize_str(text)


def names(tokenizer: Tokenizer, ids: list[int]) -> list[str]:
    return [tokenizer._backend.id_to_token(i) for i in ids]


def test_byte_level_tokens() -> None:
    tokenizer = tiny_tokenizer("byte_level")
    ids = tokenizer.encode("<|im_start|>hello 12<tool>")
    assert names(tokenizer, ids) == ["<|im_start|>", "hello", "Ġ", "1", "2", "<tool>"]
    assert (tokenizer.bos_token, tokenizer.eos_token) == ("<|im_start|>", "<|end|>")
    assert tokenizer.bos_token_id == 1
    assert tokenizer.eos_token_ids == (0,)
    assert tokenizer.special_ids == {0, 1}  # user-defined tokens are text
    assert tokenizer.vocab_size == 258 + 9 + 2
    plain = tokenizer.encode("<|im_start|>", allow_special=False)
    assert 1 not in plain
    assert tokenizer.decode(plain) == "<|im_start|>"
    assert tokenizer.encode("<|im_start|>") == [1]


def test_sentencepiece_tokens() -> None:
    tokenizer = tiny_tokenizer("sentencepiece")
    ids = tokenizer.encode("hello world é☃")
    expected = ["<s>", "▁hello", "▁world", "▁", "é", "<0xE2>", "<0x98>", "<0x83>"]
    assert names(tokenizer, ids) == expected
    assert tokenizer.encode("hello", add_special_tokens=False) == ids[1:2]
    # A dummy space goes before each stretch of text between special tokens.
    assert names(tokenizer, tokenizer.encode("hello</s>hello")) == [
        *("<s>", "▁hello", "</s>", "▁hello")
    ]
    bare = tokenizer_from_gguf(sentencepiece_metadata(ggml__add_space_prefix=False))
    assert names(bare, bare.encode("world", add_special_tokens=False)) == ["world"]
    assert bare.decode(bare.encode(" world")) == " world"
    assert tokenizer.eos_token_ids == (2,)


def test_bos_and_eos_as_the_file_says() -> None:
    for pre, expected in (("smollm", []), ("llama-bpe", [1])):
        assert tokenizer_from_gguf(byte_level_metadata(pre)).encode("") == expected
    both = byte_level_metadata(ggml__add_bos_token=True, ggml__add_eos_token=True)
    assert tokenizer_from_gguf(both).encode("1")[::2] == [1, 0]
    assert len(tokenizer_from_gguf(both).encode("1", add_special_tokens=False)) == 1
    none = sentencepiece_metadata(ggml__add_bos_token=False)
    assert tokenizer_from_gguf(none).encode("") == []


def test_numpy_arrays_are_taken() -> None:
    metadata = sentencepiece_metadata()
    for key in ("scores", "token_type"):
        metadata[f"tokenizer.ggml.{key}"] = np.array(metadata[f"tokenizer.ggml.{key}"])
    text = "hello world"
    assert tokenizer_from_gguf(metadata).encode(text) == tiny_tokenizer("sentencepiece").encode(
        text
    )


def test_chat_templates_come_from_the_file() -> None:
    plain = byte_level_metadata(chat_template="{{ bos_token }}{{ messages[0].content }}")
    template = tokenizer_from_gguf(plain).chat_template
    assert template is not None
    assert template.render([{"role": "user", "content": "hi"}]) == "<|im_start|>hi"
    named = plain | {"tokenizer.chat_template.tool_use": "tools"}
    template = tokenizer_from_gguf(named).chat_template
    assert template is not None
    messages = [{"role": "user", "content": "hi"}]
    assert template.render(messages, tools=[{"type": "function"}]) == "tools"
    assert tokenizer_from_gguf(byte_level_metadata()).chat_template is None


@pytest.mark.parametrize(
    ("change", "message"),
    [
        ({"tokenizer.ggml.model": "t5"}, "'t5' is not supported"),
        ({"tokenizer.ggml.model": None}, "holds no tokenizer"),
        ({"tokenizer.ggml.pre": "klingon"}, r"'klingon' is not a known .* smollm"),
        ({"tokenizer.ggml.tokens": None}, "tokens is missing"),
        ({"tokenizer.ggml.tokens": ["a", "b", "a"]}, "lists 'a' twice"),
        ({"tokenizer.ggml.tokens": ["a", 3]}, "array of strings"),
        ({"tokenizer.ggml.token_type": [1]}, "1 entries for 269 tokens"),
        ({"tokenizer.ggml.merges": None}, "merges is missing"),
        ({"tokenizer.ggml.merges": ["zz yy"]}, "does not fit the tokens"),
    ],
)
def test_errors_name_the_key(change: dict[str, object], message: str) -> None:
    with pytest.raises(TokenizerError, match=message):
        tokenizer_from_gguf(byte_level_metadata() | change)
