"""A tokenizer from GGUF metadata. Knows the ``tokenizer.ggml.*`` keys; opens no file."""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterable, Mapping
from typing import TYPE_CHECKING, Any

from octavo.text.chat_template import ChatTemplate
from octavo.text.gguf_pre_tokenizers import GPT2, RULES, PreTokenizerRule
from octavo.text.tokenizer import Tokenizer, TokenizerError

if TYPE_CHECKING:
    import tokenizers

_NORMAL, _UNKNOWN, _CONTROL, _USER_DEFINED, _UNUSED, _BYTE = range(1, 7)
_SPECIAL_TYPES = (_UNKNOWN, _CONTROL)
_SPACE = "\u2581"

# A control token of one of these names ends a turn in every model that has it.
_END_OF_TURN = frozenset(
    {"<|eot_id|>", "<|im_end|>", "<|end|>", "<|return|>", "<|call|>", "<|endoftext|>", "<|eom_id|>"}
    | {"<end_of_turn>", "<EOT>", "_<EOT>", "[EOT]", "[EOS]", "<|end_of_text|>", "<eos>"}
    | {"<end_of_utterance>", "<｜end▁of▁sentence｜>"}
)


def tokenizer_from_gguf(metadata: Mapping[str, object]) -> Tokenizer:
    """The tokenizer and chat template that a GGUF file's metadata describe.

    ``tokenizer.ggml.model`` may be ``gpt2`` (byte-level BPE, split by the rule that
    ``tokenizer.ggml.pre`` names) or ``llama`` (SentencePiece BPE with scores).

    Raises:
        TokenizerError: a key is missing or inconsistent, or names an unknown model or rule.
        ChatTemplateError: the chat template is not valid.
    """
    model = metadata.get("tokenizer.ggml.model")
    if model == "gpt2":
        return _byte_level(metadata)
    if model == "llama":
        return _sentencepiece(metadata)
    if model is None:
        raise TokenizerError("this GGUF file holds no tokenizer: tokenizer.ggml.model is missing")
    raise TokenizerError(
        f"tokenizer.ggml.model {model!r} is not supported; supported: 'gpt2' (byte-level BPE) and "
        "'llama' (SentencePiece)"
    )


def _byte_level(metadata: Mapping[str, object]) -> Tokenizer:
    from tokenizers import Tokenizer as Backend
    from tokenizers import decoders, models

    tokens, types = _vocabulary(metadata)
    # llama.cpp reads a file without the key (made before it existed) by its "default" rule.
    name = metadata.get("tokenizer.ggml.pre") or "default"
    rule = RULES.get(str(name))
    if rule is None:
        raise TokenizerError(
            f"tokenizer.ggml.pre {name!r} is not a known pre-tokenizer rule; known: "
            + ", ".join(sorted(RULES))
        )
    merges = []
    for merge in _strings(metadata, "tokenizer.ggml.merges"):
        cut = merge.find(" ", 1)
        merges.append((merge[:cut], merge[cut + 1 :]))
    try:
        backend = Backend(
            models.BPE(
                vocab={token: index for index, token in enumerate(tokens)},
                merges=merges,
                ignore_merges=rule.ignore_merges,
            )
        )
    except Exception as error:  # the library raises bare Exception
        raise TokenizerError(f"tokenizer.ggml.merges does not fit the tokens: {error}") from error
    backend.pre_tokenizer = _pre_tokenizer(rule)
    backend.decoder = decoders.ByteLevel()
    return _assemble(backend, metadata, tokens, types, add_bos=rule.add_bos, default_ids={})


def _pre_tokenizer(rule: PreTokenizerRule) -> tokenizers.pre_tokenizers.PreTokenizer:
    from tokenizers import Regex, pre_tokenizers

    splits: list[tokenizers.pre_tokenizers.PreTokenizer] = [
        pre_tokenizers.Split(Regex(regex), "isolated") for regex in rule.regexes
    ]
    if rule.regexes[-1] == GPT2:  # ByteLevel has this expression built in
        splits[-1] = pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=True)
    else:
        splits.append(pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=False))
    return pre_tokenizers.Sequence(splits)


def _sentencepiece(metadata: Mapping[str, object]) -> Tokenizer:
    from tokenizers import Tokenizer as Backend
    from tokenizers import decoders, models, normalizers

    tokens, types = _vocabulary(metadata)
    scores: list[float] = _list(metadata, "tokenizer.ggml.scores")
    if len(scores) != len(tokens):
        raise TokenizerError(
            f"tokenizer.ggml.scores has {len(scores)} entries for {len(tokens)} tokens"
        )
    unknown_id = _token_id(metadata, "unknown", tokens)
    try:
        backend = Backend(
            models.BPE(
                vocab={token: index for index, token in enumerate(tokens)},
                merges=_merges_by_score(tokens, types, scores),
                unk_token=tokens[0 if unknown_id is None else unknown_id],
                fuse_unk=True,
                byte_fallback=True,
            )
        )
    except Exception as error:  # the library raises bare Exception
        raise TokenizerError(f"the SentencePiece vocabulary is not valid: {error}") from error
    # The prefix goes before every stretch of text between special tokens, as in llama.cpp.
    add_prefix = bool(metadata.get("tokenizer.ggml.add_space_prefix", True))
    steps: list[Any] = [normalizers.Prepend(_SPACE)] if add_prefix else []
    backend.normalizer = normalizers.Sequence([*steps, normalizers.Replace(" ", _SPACE)])
    strip: list[Any] = [decoders.Strip(" ", 1, 0)] if add_prefix else []
    backend.decoder = decoders.Sequence(
        [decoders.Replace(_SPACE, " "), decoders.ByteFallback(), decoders.Fuse(), *strip]
    )
    return _assemble(
        backend, metadata, tokens, types, add_bos=True, default_ids={"bos": 1, "eos": 2}
    )


def _merges_by_score(
    tokens: list[str], types: list[int], scores: list[float]
) -> list[tuple[str, str]]:
    """Every way to make a piece of two, the best piece first.

    SentencePiece joins whichever neighbours make the piece of the highest score; BPE joins the
    pair that is listed first. The two agree when pairs are listed by the score of what they make.
    """
    mergeable = {
        token: index for index, token in enumerate(tokens) if types[index] in (_NORMAL, _UNUSED)
    }
    merges = [
        (-scores[index], left, right)
        for token, index in mergeable.items()
        for cut in range(1, len(token))
        if (left := token[:cut]) in mergeable and (right := token[cut:]) in mergeable
    ]
    merges.sort(key=lambda merge: merge[0])
    return [(left, right) for _, left, right in merges]


def _assemble(
    backend: tokenizers.Tokenizer,
    metadata: Mapping[str, object],
    tokens: list[str],
    types: list[int],
    *,
    add_bos: bool,
    default_ids: Mapping[str, int],
) -> Tokenizer:
    from tokenizers import AddedToken

    backend.add_tokens(
        [
            AddedToken(token, special=kind in _SPECIAL_TYPES, normalized=False)
            for token, kind in zip(tokens, types, strict=True)
            if kind in _SPECIAL_TYPES or kind == _USER_DEFINED
        ]
    )
    bos = _token_id(metadata, "bos", tokens, default_ids.get("bos"))
    eos = _token_id(metadata, "eos", tokens, default_ids.get("eos"))
    ends = [eos, *(_token_id(metadata, kind, tokens) for kind in ("eot", "eom"))]
    ends += [i for i, kind in enumerate(types) if kind == _CONTROL and tokens[i] in _END_OF_TURN]
    if {"<|return|>", "<|call|>"} <= {tokens[i] for i in ends if i is not None}:
        ends = [i for i in ends if i is None or tokens[i] != "<|end|>"]  # ends a message only
    wants_bos = bool(metadata.get("tokenizer.ggml.add_bos_token", add_bos))
    wants_eos = bool(metadata.get("tokenizer.ggml.add_eos_token", False))
    special_tokens = {
        f"{key}_token": tokens[index]
        for key, name in (("unk", "unknown"), ("pad", "padding"))
        if (index := _token_id(metadata, name, tokens)) is not None
    }
    return Tokenizer(
        backend,
        bos_token_id=bos,
        eos_token_ids=dict.fromkeys(i for i in ends if i is not None),
        prefix_ids=(bos,) if wants_bos and bos is not None else (),
        suffix_ids=(eos,) if wants_eos and eos is not None else (),
        chat_template=_chat_template(
            metadata,
            None if bos is None else tokens[bos],
            None if eos is None else tokens[eos],
            special_tokens,
        ),
    )


def _chat_template(
    metadata: Mapping[str, object],
    bos_token: str | None,
    eos_token: str | None,
    special_tokens: Mapping[str, str],
) -> ChatTemplate | None:
    key = "tokenizer.chat_template"
    sources = {"default": metadata[key]} if key in metadata else {}
    sources |= {
        name.removeprefix(key + "."): metadata[name]
        for name in metadata
        if name.startswith(key + ".")
    }
    texts = {name: source for name, source in sources.items() if isinstance(source, str) and source}
    if not texts:
        return None
    return ChatTemplate(texts, bos_token, eos_token, special_tokens=special_tokens)


def _vocabulary(metadata: Mapping[str, object]) -> tuple[list[str], list[int]]:
    tokens = [
        token or f"[EMPTY_{index}]"
        for index, token in enumerate(_strings(metadata, "tokenizer.ggml.tokens"))
    ]
    if len(set(tokens)) != len(tokens):
        twice, _ = Counter(tokens).most_common(1)[0]
        raise TokenizerError(f"tokenizer.ggml.tokens lists {twice!r} twice")
    if "tokenizer.ggml.token_type" not in metadata:
        return tokens, [_NORMAL] * len(tokens)
    types: list[int] = _list(metadata, "tokenizer.ggml.token_type")
    if len(types) != len(tokens):
        raise TokenizerError(
            f"tokenizer.ggml.token_type has {len(types)} entries for {len(tokens)} tokens"
        )
    return tokens, types


def _token_id(
    metadata: Mapping[str, object], name: str, tokens: list[str], default: int | None = None
) -> int | None:
    """A special token's id. One outside the vocabulary is ignored, as llama.cpp does."""
    value = metadata.get(f"tokenizer.ggml.{name}_token_id", default)
    if value is None:
        return default
    if not isinstance(value, int):
        value = int(str(value))
    return value if 0 <= value < len(tokens) else None


def _strings(metadata: Mapping[str, object], key: str) -> list[str]:
    values = _list(metadata, key)
    if not all(isinstance(value, str) for value in values):
        raise TokenizerError(f"{key} must be an array of strings")
    return values


def _list(metadata: Mapping[str, object], key: str) -> list[Any]:
    """An array of the metadata as a list of plain Python values."""
    values = metadata.get(key)
    if hasattr(values, "tolist"):
        values = values.tolist()
    if isinstance(values, str) or not isinstance(values, Iterable):
        raise TokenizerError(f"this GGUF file's tokenizer is incomplete: {key} is missing")
    return list(values)
