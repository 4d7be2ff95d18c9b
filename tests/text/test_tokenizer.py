from __future__ import annotations

import json
import subprocess
import sys
from pathlib import Path

import pytest
from tokenizers import Tokenizer as Backend
from tokenizers import decoders, models, pre_tokenizers, processors, trainers

from octavo.text.tokenizer import TokenizerError, load_tokenizer

CORPUS = ["the quick brown fox jumps over the lazy dog", "hello world, hello there"] * 4


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    """A model directory with a trained byte-level BPE tokenizer."""
    backend = Backend(models.BPE())
    backend.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    backend.decoder = decoders.ByteLevel()
    trainer = trainers.BpeTrainer(
        vocab_size=320,
        special_tokens=["<s>", "</s>"],
        initial_alphabet=pre_tokenizers.ByteLevel.alphabet(),
        show_progress=False,
    )
    backend.train_from_iterator(CORPUS, trainer)
    backend.post_processor = processors.TemplateProcessing(
        single="<s> $A", special_tokens=[("<s>", 0)]
    )
    backend.enable_truncation(4)
    backend.save(str(tmp_path / "tokenizer.json"))
    write(tmp_path / "tokenizer_config.json", {"bos_token": "<s>", "eos_token": "</s>"})
    return tmp_path


def write(file: Path, value: object) -> None:
    file.write_text(json.dumps(value))


def test_a_directory(folder: Path) -> None:
    tokenizer = load_tokenizer(folder)
    ids = tokenizer.encode("hello world, hello there")
    assert ids[0] == 0 == tokenizer.bos_token_id
    assert tokenizer.decode(ids) == "hello world, hello there"  # the saved truncation is off
    assert tokenizer.encode("hello", add_special_tokens=False) == tokenizer.encode("hello")[1:]
    assert (tokenizer.bos_token, tokenizer.eos_token) == ("<s>", "</s>")
    assert tokenizer.eos_token_ids == (1,)
    assert tokenizer.special_ids == {0, 1}
    assert (
        tokenizer.vocab_size == Backend.from_file(str(folder / "tokenizer.json")).get_vocab_size()
    )
    assert tokenizer.chat_template is None
    assert tokenizer.decode([10**6, 2**33, -1]) == ""


def test_text_that_spells_special_tokens(folder: Path) -> None:
    tokenizer = load_tokenizer(folder)
    assert tokenizer.encode("a</s>", add_special_tokens=False)[-1] == 1
    plain = tokenizer.encode("a</s>", add_special_tokens=False, allow_special=False)
    assert 1 not in plain
    assert tokenizer.decode(plain) == "a</s>"
    assert tokenizer.encode("a</s>", add_special_tokens=False)[-1] == 1  # not switched for others


def test_tokens_kept_beside_tokenizer_json(folder: Path) -> None:
    size = load_tokenizer(folder).vocab_size
    write(
        folder / "tokenizer_config.json",
        {
            "added_tokens_decoder": {
                str(size): {"content": "<|im_end|>", "special": True},
                "0": {"content": "<s>", "special": True},
            },
            "eos_token": {"content": "<|im_end|>"},
        },
    )
    write(folder / "added_tokens.json", {"<think>": size + 1})
    write(folder / "special_tokens_map.json", {"bos_token": "<s>"})
    write(folder / "generation_config.json", {"eos_token_id": [size, 1]})
    tokenizer = load_tokenizer(folder)
    assert tokenizer.encode("<|im_end|><think>", add_special_tokens=False) == [size, size + 1]
    assert tokenizer.vocab_size == size + 2
    assert tokenizer.special_ids == {0, 1, size}
    assert tokenizer.eos_token_ids == (size, 1)
    assert tokenizer.bos_token == "<s>"
    write(folder / "added_tokens.json", {"<think>": size + 7})
    with pytest.raises(TokenizerError, match="different versions"):
        load_tokenizer(folder)


def test_where_chat_templates_are_kept(folder: Path) -> None:
    def render(**kwargs: object) -> str:
        template = load_tokenizer(folder).chat_template
        assert template is not None
        return template.render([{"role": "user", "content": "hi"}], **kwargs)  # type: ignore[arg-type]

    config = {"bos_token": "<s>", "chat_template": "{{ bos_token }}config"}
    write(folder / "tokenizer_config.json", config)
    assert render() == "<s>config"
    named = [{"name": "default", "template": "d"}, {"name": "tool_use", "template": "t"}]
    write(folder / "tokenizer_config.json", config | {"chat_template": named})
    assert render() == "d"
    assert render(tools=[{}]) == "t"
    write(folder / "chat_template.json", {"chat_template": "json"})
    assert render() == "json"
    (folder / "chat_template.jinja").write_text("jinja")
    assert render() == "jinja"


def test_gguf_file(tmp_path: Path) -> None:
    import gguf

    from .tiny_tokenizers import byte_level_metadata, tiny_tokenizer

    metadata = byte_level_metadata()
    writer = gguf.GGUFWriter(tmp_path / "tiny.gguf", "llama")
    writer.add_tokenizer_model("gpt2")
    writer.add_tokenizer_pre("smollm")
    writer.add_token_list(metadata["tokenizer.ggml.tokens"])
    writer.add_token_types(metadata["tokenizer.ggml.token_type"])
    writer.add_token_merges(metadata["tokenizer.ggml.merges"])
    writer.add_bos_token_id(1)
    writer.add_eos_token_id(0)
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.write_tensors_to_file()
    writer.close()
    loaded, expected = load_tokenizer(tmp_path / "tiny.gguf"), tiny_tokenizer("byte_level")
    text = "<|im_start|>hello 12 é😀"
    assert loaded.encode(text) == expected.encode(text)
    assert loaded.eos_token_ids == expected.eos_token_ids


def test_lone_surrogates_are_refused(folder: Path) -> None:
    with pytest.raises(TokenizerError, match="surrogate"):
        load_tokenizer(folder).encode("\ud800")


def test_missing_and_corrupt_files(tmp_path: Path) -> None:
    with pytest.raises(TokenizerError, match="does not exist"):
        load_tokenizer(tmp_path / "nowhere")
    with pytest.raises(TokenizerError, match=r"has no tokenizer\.json"):
        load_tokenizer(tmp_path)
    (tmp_path / "tokenizer.model").write_bytes(b"\n")
    with pytest.raises(TokenizerError, match=r"has tokenizer\.model but no tokenizer\.json"):
        load_tokenizer(tmp_path)
    with pytest.raises(TokenizerError, match="neither"):
        load_tokenizer(tmp_path / "tokenizer.model")
    (tmp_path / "tokenizer.json").write_text('{"model": ')
    with pytest.raises(TokenizerError, match="download it again"):
        load_tokenizer(tmp_path)


@pytest.mark.parametrize("content", ["{", "[]", "\udcff"])
def test_corrupt_config(folder: Path, content: str) -> None:
    config = folder / "tokenizer_config.json"
    config.write_bytes(content.encode("utf-8", "surrogateescape"))
    with pytest.raises(TokenizerError, match=r"tokenizer_config\.json"):
        load_tokenizer(folder)


def test_loading_imports_neither_torch_nor_transformers(folder: Path) -> None:
    code = (
        "import sys; from octavo.text import tokenizer, detokenizer, stop_strings\n"
        "assert not {'tokenizers', 'jinja2'} & set(sys.modules)\n"
        f"tokenizer.load_tokenizer({str(folder)!r})\n"
        "assert not {'torch', 'transformers'} & set(sys.modules)"
    )
    subprocess.run([sys.executable, "-c", code], check=True)
