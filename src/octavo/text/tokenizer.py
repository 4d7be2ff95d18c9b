"""Text to token ids and back. Knows tokenizer files; knows no requests and no models."""

from __future__ import annotations

import json
import threading
from collections.abc import Iterable, Mapping, Sequence
from os import PathLike
from pathlib import Path
from typing import TYPE_CHECKING, Any

from octavo.text.chat_template import ChatTemplate
from octavo.text.token_bytes import TokenBytes, strip_spaces, token_bytes_of

if TYPE_CHECKING:
    import tokenizers


class TokenizerError(ValueError):
    """A tokenizer could not be loaded, or a text or id cannot be converted."""


class Tokenizer:
    """A ``tokenizers.Tokenizer`` with what an engine needs to know beside it.

    ``prefix_ids`` and ``suffix_ids`` are put around what the backend encodes when special tokens
    are asked for (GGUF files; a tokenizer.json has its own post-processor). ``eos_token_ids``
    are all the tokens that end a turn, the tokenizer's own first. Safe to share between threads.
    """

    def __init__(
        self,
        backend: tokenizers.Tokenizer,
        *,
        bos_token_id: int | None = None,
        eos_token_ids: Iterable[int] = (),
        prefix_ids: Sequence[int] = (),
        suffix_ids: Sequence[int] = (),
        chat_template: ChatTemplate | None = None,
    ) -> None:
        self._backend = backend
        self._plain_backend: tokenizers.Tokenizer | None = None
        self._plain_lock = threading.Lock()
        self._prefix = list(prefix_ids)
        self._suffix = list(suffix_ids)
        added = backend.get_added_tokens_decoder()
        self.special_ids = frozenset(index for index, token in added.items() if token.special)
        self.vocab_size = max([backend.get_vocab_size(with_added_tokens=True) - 1, *added]) + 1
        self.bos_token_id = bos_token_id
        self.eos_token_ids = tuple(eos_token_ids)
        self.chat_template = chat_template
        self._bytes = token_bytes_of(backend, frozenset())
        self._visible_bytes = token_bytes_of(backend, self.special_ids)

    @property
    def bos_token(self) -> str | None:
        """The text of the beginning-of-sequence token."""
        return None if self.bos_token_id is None else self._backend.id_to_token(self.bos_token_id)

    @property
    def eos_token(self) -> str | None:
        """The text of the tokenizer's own end-of-sequence token."""
        return self._backend.id_to_token(self.eos_token_ids[0]) if self.eos_token_ids else None

    def encode(
        self, text: str, add_special_tokens: bool = True, allow_special: bool = True
    ) -> list[int]:
        """``text`` as token ids.

        ``add_special_tokens`` adds the beginning and end tokens that the model wants around a
        prompt; leave it off for what a chat template rendered, which spells them itself.
        ``allow_special`` False reads special tokens that the text spells (``<|im_end|>``) as
        ordinary characters: for text from people who must not close a turn.

        Raises:
            TokenizerError: the text holds half a surrogate pair.
        """
        backend = self._backend if allow_special else self._without_special()
        try:
            ids: list[int] = backend.encode(text, add_special_tokens=add_special_tokens).ids
        except (TypeError, UnicodeEncodeError) as error:
            if not isinstance(text, str):
                raise TokenizerError(f"text must be a string, got {type(text).__name__}") from None
            raise TokenizerError(
                "the text is not valid Unicode: it holds half of a surrogate pair"
            ) from error
        if add_special_tokens and (self._prefix or self._suffix):
            return self._prefix + ids + self._suffix
        return ids

    def decode(self, ids: Sequence[int], skip_special_tokens: bool = True) -> str:
        """Token ids as text. Invalid UTF-8 becomes U+FFFD; ids without a token are nothing.

        Differs from the library where bytes are invalid in a SentencePiece text: the library
        replaces every byte of the run, valid characters too, which a stream cannot take back.
        """
        table = self.token_bytes(skip_special_tokens)
        if table is None:
            known = [i for i in ids if 0 <= i < self.vocab_size]
            text: str = self._backend.decode(known, skip_special_tokens=skip_special_tokens)
            return text
        text = b"".join([table[token_id] for token_id in ids]).decode("utf-8", "replace")
        return strip_spaces(text, table.strip_left) if table.strip_left else text

    def token_bytes(self, skip_special_tokens: bool = True) -> TokenBytes | None:
        """The bytes of each token, or None where decoding is more than joining them."""
        return self._visible_bytes if skip_special_tokens else self._bytes

    def token_to_id(self, token: str) -> int | None:
        """The id of a token given in the vocabulary's spelling."""
        index: int | None = self._backend.token_to_id(token)
        return index

    def _without_special(self) -> tokenizers.Tokenizer:
        """A copy that reads special tokens as text. Switching the shared one is not thread-safe."""
        with self._plain_lock:
            if self._plain_backend is None:
                copy = type(self._backend).from_str(self._backend.to_str())
                copy.encode_special_tokens = True
                self._plain_backend = copy
            return self._plain_backend


def load_tokenizer(path: str | PathLike[str]) -> Tokenizer:
    """The tokenizer of a model: a Hugging Face directory or a ``.gguf`` file.

    Raises:
        TokenizerError: files are missing, corrupt or of a kind that is not supported.
        ChatTemplateError: the chat template is not valid.
    """
    path = Path(path)
    if path.is_dir():
        return _from_directory(path)
    if not path.exists():
        raise TokenizerError(f"{path} does not exist; give a model directory or a .gguf file")
    if path.name == "tokenizer.json":
        return _from_directory(path.parent)
    if path.suffix != ".gguf":
        raise TokenizerError(f"{path} is neither a model directory nor a .gguf file")
    from octavo.core.gguf_file import GGUFFile
    from octavo.text.gguf_tokenizer import tokenizer_from_gguf

    return tokenizer_from_gguf(GGUFFile(path).metadata)


def _from_directory(folder: Path) -> Tokenizer:
    from tokenizers import Tokenizer as Backend

    file = folder / "tokenizer.json"
    if not file.exists():
        raise TokenizerError(_what_is_missing(folder))
    try:
        backend = Backend.from_file(str(file))
    except Exception as error:  # the library raises bare Exception
        raise TokenizerError(f"{file} cannot be read: {error}; download it again") from error
    backend.no_truncation()  # limits belong to the engine, whatever was saved with the file
    backend.no_padding()
    config = _read_json(folder / "tokenizer_config.json")
    _add_tokens(backend, folder, config)
    names = _read_json(folder / "special_tokens_map.json") | config
    special_tokens = {
        key: token
        for key, value in names.items()
        if key.endswith("_token") and (token := _token_text(value)) is not None
    }
    unmarked = [
        token for token in special_tokens.values() if backend.token_to_id(token) is not None
    ]
    backend.add_special_tokens(unmarked)
    bos_token, eos_token = special_tokens.get("bos_token"), special_tokens.get("eos_token")
    generation = _read_json(folder / "generation_config.json").get("eos_token_id") or []
    ends = [generation] if isinstance(generation, int) else list(generation)
    if eos_token is not None:
        ends.insert(0, backend.token_to_id(eos_token))
    return Tokenizer(
        backend,
        bos_token_id=None if bos_token is None else backend.token_to_id(bos_token),
        eos_token_ids=dict.fromkeys(i for i in ends if i is not None),
        chat_template=_chat_template(folder, config, special_tokens),
    )


def _what_is_missing(folder: Path) -> str:
    for name in ("tokenizer.model", "spiece.model", "vocab.json", "vocab.txt", "tekken.json"):
        if (folder / name).exists():
            return (
                f"{folder} has {name} but no tokenizer.json, which is the only form that is read; "
                "convert it once with transformers: "
                "AutoTokenizer.from_pretrained(folder).save_pretrained(folder)"
            )
    return f"{folder} has no tokenizer.json; copy it from the model's repository"


def _add_tokens(backend: tokenizers.Tokenizer, folder: Path, config: Mapping[str, Any]) -> None:
    """Adds the tokens that older repositories keep beside tokenizer.json."""
    from tokenizers import AddedToken

    listed: dict[int, Any] = {
        index: {"content": token}
        for token, index in _read_json(folder / "added_tokens.json").items()
    }
    listed |= {int(i): spec for i, spec in (config.get("added_tokens_decoder") or {}).items()}
    fields = ("special", "lstrip", "rstrip", "single_word", "normalized")
    known = backend.get_added_tokens_decoder()
    for index in sorted(listed):
        spec = listed[index]
        token = spec["content"]
        if index in known:
            continue
        present = backend.token_to_id(token)
        if present is not None and present != index:
            raise TokenizerError(f"{folder}: token {token!r} is {present} in tokenizer.json")
        backend.add_tokens([AddedToken(token, **{f: spec[f] for f in fields if f in spec})])
        if backend.token_to_id(token) != index:
            raise TokenizerError(
                f"{folder}: added token {token!r} should be {index}, but tokenizer.json ends at "
                f"{backend.token_to_id(token)}; the files belong to different versions"
            )


def _chat_template(
    folder: Path, config: Mapping[str, Any], special_tokens: Mapping[str, str]
) -> ChatTemplate | None:
    source = config.get("chat_template")
    if (folder / "chat_template.json").exists():
        source = _read_json(folder / "chat_template.json").get("chat_template", source)
    if (folder / "chat_template.jinja").exists():
        source = _read_text(folder / "chat_template.jinja")
    if isinstance(source, list):
        source = {entry["name"]: entry["template"] for entry in source}
    for file in sorted((folder / "additional_chat_templates").glob("*.jinja")):
        source = {"default": source} if isinstance(source, str) else dict(source or {})
        source[file.stem] = _read_text(file)
    if not source:
        return None
    return ChatTemplate(
        source,
        special_tokens.get("bos_token"),
        special_tokens.get("eos_token"),
        special_tokens=special_tokens,
    )


def _token_text(value: object) -> str | None:
    """A special token as configs write it: its text, or an object that holds it."""
    if isinstance(value, Mapping):
        value = value.get("content")
    return value if isinstance(value, str) and value else None


def _read_text(file: Path) -> str:
    try:
        return file.read_text(encoding="utf-8")
    except (OSError, UnicodeDecodeError) as error:
        raise TokenizerError(f"{file} cannot be read: {error}") from error


def _read_json(file: Path) -> dict[str, Any]:
    """A JSON object, or an empty one where the file does not exist."""
    if not file.exists():
        return {}
    try:
        value = json.loads(_read_text(file))
    except ValueError as error:
        raise TokenizerError(f"{file} is not valid JSON: {error}; download it again") from error
    if not isinstance(value, dict):
        raise TokenizerError(f"{file} must hold a JSON object, got {type(value).__name__}")
    return value
