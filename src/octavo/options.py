"""Command-line options that several commands share. Light: typer only."""

from __future__ import annotations

from dataclasses import fields
from typing import Annotated, Any

import typer

from octavo.config import EngineConfig

DEFAULTS = EngineConfig()
ENGINE_FIELDS = frozenset(field.name for field in fields(EngineConfig))
_ENGINE = "Engine"

Model = Annotated[str, typer.Argument(help="A name, a directory or a GGUF file.")]
Dtype = Annotated[
    str, typer.Option(help="auto, bfloat16, float16 or float32.", rich_help_panel=_ENGINE)
]
LoadFormat = Annotated[
    str,
    typer.Option(
        help="auto, safetensors, gguf, or dummy (random weights from a config alone).",
        rich_help_panel=_ENGINE,
    ),
]
Weights = Annotated[
    str,
    typer.Option(
        "--weights",
        "--quantization",
        help="Weights: bf16, fp8 (on a GPU), int8 and int4 (on a CPU), or auto: as the file stores "
        "them.",
        rich_help_panel=_ENGINE,
    ),
]
KVDtype = Annotated[
    str,
    typer.Option(
        "--kv-dtype",
        "--kv-cache-dtype",
        help="Keys and values: bf16, fp16, fp8 (e4m3, on a GPU), or auto: as the model computes, "
        "fp8 where its checkpoint asks for it.",
        rich_help_panel=_ENGINE,
    ),
]
KV = Annotated[
    str,
    typer.Option(
        help="How attention finds blocks: paged (in block tables) or virtual (mapped at contiguous "
        "addresses by the driver); contiguous, to compare with: one run for each sequence.",
        rich_help_panel=_ENGINE,
    ),
]
Reserve = Annotated[
    str | None,
    typer.Option(
        help="Under contiguous, what a sequence is given at admission: max (the longest sequence), "
        "pow2 (prompt, and output rounded up to a power of two) or oracle (what it will need) "
        "[default: max].",
        rich_help_panel=_ENGINE,
    ),
]
SchedulerMode = Annotated[
    str,
    typer.Option(
        "--scheduler",
        help="continuous, or static, to compare with: nobody joins a batch until all of it ended.",
        rich_help_panel=_ENGINE,
    ),
]
BlockSize = Annotated[
    int | None,
    typer.Option(
        help="Tokens in a block [default: 16, or the next that can be mapped under virtual].",
        rich_help_panel=_ENGINE,
    ),
]
KVMemory = Annotated[
    str,
    typer.Option(
        help="Memory of the KV cache: auto, a size (512MiB, 40GiB), or a share of what remains "
        "after weights and workspace (90%).",
        rich_help_panel=_ENGINE,
    ),
]
PrefixCaching = Annotated[
    bool | None,
    typer.Option(
        "--prefix-caching/--no-prefix-caching",
        help="Share the blocks of prompts that begin alike [default: on, but under contiguous].",
        rich_help_panel=_ENGINE,
    ),
]
Sharing = Annotated[
    bool | None,
    typer.Option(
        "--sharing/--no-sharing",
        help="Share blocks between sequences; without it samples and beams copy all of theirs, and "
        "no prefix is cached [default: on, but under contiguous].",
        rich_help_panel=_ENGINE,
    ),
]
Preemption = Annotated[
    str,
    typer.Option(
        help="How a sequence that lost its blocks comes back: recompute, swap or auto.",
        rich_help_panel=_ENGINE,
    ),
]
SwapMemory = Annotated[
    str,
    typer.Option(
        help="Host memory to swap to: 0 or a size; for preemption by swap or auto.",
        rich_help_panel=_ENGINE,
    ),
]
MaxModelLen = Annotated[
    int | None,
    typer.Option(
        help="Longest sequence, prompt and output together [default: the model's own limit].",
        rich_help_panel=_ENGINE,
    ),
]
MaxNumSeqs = Annotated[
    int | None,
    typer.Option(
        help="Sequences that run at once [default: 64 on a CPU, 1024 on a GPU].",
        rich_help_panel=_ENGINE,
    ),
]
Deterministic = Annotated[
    bool,
    typer.Option(
        help="On a GPU: the same tokens whatever runs beside a request, to the last bit, slower.",
        rich_help_panel=_ENGINE,
    ),
]
Device = Annotated[
    str,
    typer.Option(help="cpu, cuda, or auto: a GPU where there is one.", rich_help_panel=_ENGINE),
]
MaxNumBatchedTokens = Annotated[
    int | None,
    typer.Option(
        help="Token budget of a step [default: chosen for the device].", rich_help_panel=_ENGINE
    ),
]
MaxQueuedRequests = Annotated[
    int,
    typer.Option(
        help="Requests that may wait beside the max-num-seqs that run; more are refused. A request "
        "of n choices counts as n.",
        rich_help_panel=_ENGINE,
    ),
]
Depth = Annotated[
    int | None,
    typer.Option(
        help="Steps in flight: 1 synchronous, 2 pipelined [default: chosen for the device].",
        rich_help_panel=_ENGINE,
    ),
]
Threads = Annotated[
    int | None,
    typer.Option(help="Compute threads [default: cores less one].", rich_help_panel=_ENGINE),
]
OneThread = Annotated[
    int | None, typer.Option("--threads", help="Compute threads.", rich_help_panel=_ENGINE)
]
Attention = Annotated[
    str,
    typer.Option(
        help="Attention backend: auto; on a CPU compiled, gather or contiguous; on a GPU triton, "
        "flash3 (FlashAttention-3 for long chunks), flashinfer (where it is installed), stock "
        "(FlashAttention-2 and cuDNN, under virtual or contiguous) or mixed (under virtual: slots "
        "for long chunks, tables elsewhere).",
        rich_help_panel=_ENGINE,
    ),
]
MapForks = Annotated[
    bool | None,
    typer.Option(
        "--map-forks/--no-map-forks",
        help="Under virtual: map samples and beams in slots of their own, or read them through "
        "their block tables [default: mapped on a CPU only].",
        rich_help_panel=_ENGINE,
    ),
]
APIKey = Annotated[
    str | None, typer.Option(help="The server's API key [default: $OCTAVO_API_KEY].")
]
AsJSON = Annotated[bool, typer.Option("--json", help="Print one JSON object.")]


def given_options(context: typer.Context) -> list[str]:
    """Of a command's parameters those that are not left to their defaults."""
    return [
        name
        for name in context.params
        if (source := context.get_parameter_source(name)) is not None
        and source.name not in ("DEFAULT", "DEFAULT_MAP")
    ]


def engine_options(context: typer.Context) -> dict[str, Any]:
    """Those of a command's options that are the engine's, by the names of `EngineConfig`: a command
    lists them as parameters, and that is all it does about them."""
    return {name: value for name, value in context.params.items() if name in ENGINE_FIELDS}
