"""`octavo layout`: which blocks a model has at a page size, and the table of docs/layout.md.

Arithmetic only: reads a model's configuration, loads neither weights nor torch.
"""

from __future__ import annotations

from dataclasses import replace
from typing import TYPE_CHECKING, Annotated, Any

import typer

from octavo import options
from octavo.config import (
    DEFAULT_MODEL,
    DTYPE_ALIASES,
    DTYPES,
    KV_DTYPE_ALIASES,
    KV_DTYPES,
    ConfigError,
    parse_size,
)
from octavo.core.layout import (
    KVLayout,
    MappableBlock,
    SeparatePages,
    block_candidates,
    choose_block,
    format_bytes,
    mappable_block,
)
from octavo.terminal import print_json, readable_errors

if TYPE_CHECKING:
    from octavo.core.model_config import ModelConfig

_DTYPE_BYTES = {"bfloat16": 2, "float16": 2, "float32": 4}
_KV_DTYPE_BYTES = {"bf16": 2, "fp16": 2, "fp8": 1}
# Tokens of a conversation of a few turns; padding pays below a few hundred, big blocks above.
EXPECTED_LENGTH = 2048
# Layers, KV heads and head dimension; ranks to split the heads over.
_TABLE_MODELS = (
    ("Yi-6B", 32, 4, 128, 1),
    ("Llama-3-8B", 32, 8, 128, 1),
    ("Yi-34B", 60, 8, 128, 1),
    ("Yi-34B", 60, 8, 128, 2),
    ("Llama-3-70B", 80, 8, 128, 8),
    ("Qwen3-8B", 36, 8, 128, 1),
)
_TABLE_PAGES = (64 << 10, 256 << 10, 2 << 20)


def layout(
    model: Annotated[
        str, typer.Argument(help="A name, a directory, a config.json or a GGUF file.")
    ] = DEFAULT_MODEL,
    page_size: Annotated[
        str, typer.Option(help="What is mapped at least: a size such as 64KiB, or host.")
    ] = "2MiB",
    tensor_parallel: Annotated[int, typer.Option(help="Ranks that share the KV heads.")] = 1,
    dtype: options.Dtype = "auto",
    kv_dtype: options.KVDtype = "auto",
    expected_length: Annotated[
        int, typer.Option(help="Tokens of a typical sequence when it ends.")
    ] = EXPECTED_LENGTH,
    block_size: Annotated[
        int | None, typer.Option(help="Ask for blocks of exactly so many tokens.")
    ] = None,
    as_json: Annotated[bool, typer.Option("--json", help="Print one JSON object.")] = False,
) -> None:
    """Show the blocks of a model that can be mapped whole, and what they waste."""
    with readable_errors():
        config = load_config(model)
        token = token_layout(config, tensor_parallel, dtype, kv_dtype)
        page_bytes = _parse_page_size(page_size)
        chosen = choose_block(token, page_bytes, expected_length)
        candidates = list(block_candidates(token, page_bytes))
        if block_size is not None:
            chosen = mappable_block(replace(token, block_size=block_size), page_bytes)
            candidates = [chosen]
        paper = SeparatePages(token, page_bytes)
        if as_json:
            print_json(
                {
                    "model": model,
                    "num_layers": token.num_layers,
                    "num_kv_heads": token.num_kv_heads,
                    "head_dim": token.head_dim,
                    "token_bytes": token.token_bytes,
                    "page_bytes": page_bytes,
                    "expected_length": expected_length,
                    "chosen": _describe(chosen, expected_length),
                    "candidates": [_describe(each, expected_length) for each in candidates],
                    "vattention": {
                        "tokens_per_page": round(float(paper.num_tokens), 4),
                        "block_bytes": paper.block_bytes,
                        "num_pages": paper.num_pages,
                        "expected_waste_bytes": round(paper.expected_waste_bytes(expected_length)),
                    },
                }
            )
            return
        typer.echo(
            f"{model}: {token.num_layers} layers, {token.num_kv_heads} KV heads a rank of "
            f"{token.head_dim}, {format_bytes(token.token_bytes)} a token\n"
            f"pages of {format_bytes(page_bytes)}, sequences of about {expected_length} tokens\n"
        )
        for block in candidates:
            mark = "*" if block == chosen else " "
            typer.echo(f"{mark} {_sentence(block, expected_length)}")
        typer.echo(
            f"  vAttention's separate tensors: {_tokens(paper)} tokens in "
            f"{format_bytes(paper.block_bytes)}, a page in each of {paper.num_pages}: "
            f"{_waste(paper, expected_length)} wasted by a sequence"
        )


def token_layout(
    config: ModelConfig, tensor_parallel: int, dtype: str, kv_dtype: str = "auto"
) -> KVLayout:
    """The layout of one rank, in blocks of one token.

    Raises:
        ConfigError: the heads cannot be split so, or the dtype is unknown.
    """
    dtype = DTYPE_ALIASES.get(dtype, dtype)
    if dtype not in DTYPES:
        raise ConfigError(f"dtype must be {', '.join(DTYPES)}: got {dtype!r}")
    kv_dtype = KV_DTYPE_ALIASES.get(kv_dtype, kv_dtype)
    if kv_dtype not in KV_DTYPES:
        raise ConfigError(f"kv_dtype must be {', '.join(KV_DTYPES)}: got {kv_dtype!r}")
    if kv_dtype == "auto" and config.fp8 is not None and config.fp8.kv:
        kv_dtype = "fp8"
    if kv_dtype == "auto":
        num_bytes = _DTYPE_BYTES[config.dtype if dtype == "auto" else dtype]
    else:
        num_bytes = _KV_DTYPE_BYTES[kv_dtype]
    if tensor_parallel < 1 or config.num_kv_heads % tensor_parallel:
        raise ConfigError(
            f"tensor_parallel must divide the model's {config.num_kv_heads} key-value heads, got "
            f"{tensor_parallel}"
        )
    return KVLayout(
        num_layers=config.num_layers,
        num_kv_heads=config.num_kv_heads // tensor_parallel,
        head_dim=config.head_dim,
        dtype_bytes=num_bytes,
        block_size=1,
    )


def markdown_table() -> str:
    """The table of docs/layout.md: bf16, blocks for sequences of ``EXPECTED_LENGTH`` tokens."""
    lines = [
        "| model | token | page | blocks that can be mapped | waste | vAttention | waste |",
        "|---|---|---|---|---|---|---|",
    ]
    for name, num_layers, num_kv_heads, head_dim, num_ranks in _TABLE_MODELS:
        token = KVLayout(num_layers, num_kv_heads // num_ranks, head_dim, 2, 1)
        label = name if num_ranks == 1 else f"{name} TP-{num_ranks}"
        for page_bytes in _TABLE_PAGES:
            chosen = choose_block(token, page_bytes, EXPECTED_LENGTH)
            blocks = "; ".join(
                f"**{_short(block)}**" if block == chosen else _short(block)
                for block in block_candidates(token, page_bytes)
            )
            paper = SeparatePages(token, page_bytes)
            lines.append(
                f"| {label} | {format_bytes(token.token_bytes)} | {format_bytes(page_bytes)} "
                f"| {blocks} | {_waste(chosen, EXPECTED_LENGTH)} "
                f"| {_tokens(paper)} in {format_bytes(paper.block_bytes)} "
                f"| {_waste(paper, EXPECTED_LENGTH)} |"
            )
    return "\n".join(lines) + "\n"


def load_config(model: str) -> ModelConfig:
    """A model's configuration from its name or path; loads neither weights nor torch."""
    from octavo.model_store import resolve_model

    path = resolve_model(model)
    if path.suffix == ".gguf":
        from octavo.core.gguf_file import GGUFFile
        from octavo.execution.models.gguf_config import gguf_config

        return gguf_config(GGUFFile(path))
    from octavo.execution.models.hf_config import load_hf_config

    return load_hf_config(path)


def _parse_page_size(text: str) -> int:
    from octavo.execution.pages.interface import host_page_bytes

    if text == "host":
        return host_page_bytes()
    try:
        page_bytes = parse_size("page_size", text)
    except ConfigError:
        page_bytes = 0
    if page_bytes < 1 or page_bytes & (page_bytes - 1):
        raise ConfigError(
            f"page_size must be host or a power of two such as 4KiB, 64KiB or 2MiB, got {text!r}"
        )
    return page_bytes


def _describe(block: MappableBlock, expected_length: int) -> dict[str, Any]:
    return {
        "block_size": block.block_size,
        "block_bytes": block.block_bytes,
        "num_pages": block.num_pages,
        "num_padding_layers": block.num_padding_layers,
        "padding_share": round(block.padding_share, 4),
        "expected_waste_bytes": round(block.expected_waste_bytes(expected_length)),
    }


def _short(block: MappableBlock) -> str:
    padding = f" ({block.padding_share:.0%} padding)" if block.num_padding_layers else ""
    return f"{block.block_size} in {format_bytes(block.block_bytes)}{padding}"


def _sentence(block: MappableBlock, expected_length: int) -> str:
    padding = (
        f", {block.num_padding_layers} padding layers ({block.padding_share:.1%})"
        if block.num_padding_layers
        else ""
    )
    return (
        f"{block.block_size} tokens in {format_bytes(block.block_bytes)}{padding}: "
        f"{_waste(block, expected_length)} wasted by a sequence"
    )


def _tokens(pages: SeparatePages) -> str:
    """Of a page: whole, or with a decimal."""
    count = pages.num_tokens
    return str(count) if count.denominator == 1 else f"{float(count):.4g}"


def _waste(block: MappableBlock | SeparatePages, expected_length: int) -> str:
    return format_bytes(block.expected_waste_bytes(expected_length))
