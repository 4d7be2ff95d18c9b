"""The `octavo` command. Parses options and calls the rooms; loads nothing heavy by itself."""

from __future__ import annotations

import json
import logging
import sys
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Annotated, Any

import typer

from octavo import __version__
from octavo.config import DEFAULT_MODEL, ConfigError, EngineConfig, ServerConfig

app = typer.Typer(
    name="octavo",
    help="An LLM inference and serving engine whose subject is the KV cache's memory.",
    no_args_is_help=True,
    add_completion=False,
    pretty_exceptions_enable=False,
    rich_markup_mode=None,
)
bench_app = typer.Typer(
    help="Measure, and print each figure beside its goal.", no_args_is_help=True
)
app.add_typer(bench_app, name="bench")

_ENGINE = "Engine"
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
        help="Weights on a CPU: bf16, int8, int4, or auto: as the file stores them.",
        rich_help_panel=_ENGINE,
    ),
]
KV = Annotated[str, typer.Option(help="KV cache manager: paged.", rich_help_panel=_ENGINE)]
BlockSize = Annotated[int, typer.Option(help="Tokens in a block.", rich_help_panel=_ENGINE)]
KVMemoryOption = Annotated[
    str,
    typer.Option(
        help="Memory of the KV cache: auto, a size (512MiB, 40GiB), or a share of what remains "
        "after weights and workspace (90%).",
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
    int, typer.Option(help="Sequences that run at once.", rich_help_panel=_ENGINE)
]
MaxNumBatchedTokens = Annotated[
    int | None,
    typer.Option(
        help="Token budget of a step [default: chosen for the device].", rich_help_panel=_ENGINE
    ),
]
MaxQueuedRequests = Annotated[
    int,
    typer.Option(help="Requests that may wait; more are refused.", rich_help_panel=_ENGINE),
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
Attention = Annotated[
    str,
    typer.Option(help="Attention backend: auto, compiled or gather.", rich_help_panel=_ENGINE),
]
AsJSON = Annotated[bool, typer.Option("--json", help="Print one JSON object.")]

_DEFAULTS = EngineConfig()


@app.callback(invoke_without_command=True)
def _main(
    version: Annotated[bool, typer.Option("--version", help="Print the version.")] = False,
) -> None:
    if version:
        typer.echo(f"octavo {__version__}")
        raise typer.Exit


@app.command()
def serve(
    model: Annotated[str, typer.Argument(help="A name, a directory or a GGUF file.")] = (
        DEFAULT_MODEL
    ),
    host: Annotated[str, typer.Option(help="Address to listen on.")] = "127.0.0.1",
    port: Annotated[int, typer.Option(help="Port to listen on; 0 takes a free one.")] = 8000,
    served_model_name: Annotated[
        str | None, typer.Option(help="What clients call the model [default: MODEL].")
    ] = None,
    drain_timeout: Annotated[
        float, typer.Option(help="Seconds that running requests get to finish at shutdown.")
    ] = 30.0,
    load_format: LoadFormat = _DEFAULTS.load_format,
    dtype: Dtype = _DEFAULTS.dtype,
    weights: Weights = _DEFAULTS.weights,
    kv: KV = _DEFAULTS.kv,
    block_size: BlockSize = _DEFAULTS.block_size,
    kv_memory: KVMemoryOption = _DEFAULTS.kv_memory,
    max_model_len: MaxModelLen = None,
    max_num_seqs: MaxNumSeqs = _DEFAULTS.max_num_seqs,
    max_num_batched_tokens: MaxNumBatchedTokens = None,
    max_queued_requests: MaxQueuedRequests = _DEFAULTS.max_queued_requests,
    depth: Depth = None,
    threads: Threads = None,
    attention: Attention = _DEFAULTS.attention,
) -> None:
    """Serve a model over an OpenAI-compatible HTTP API."""
    with _readable_errors():
        config = EngineConfig(
            model=model,
            load_format=load_format,
            dtype=dtype,
            weights=weights,
            kv=kv,
            block_size=block_size,
            kv_memory=kv_memory,
            max_model_len=max_model_len,
            max_num_seqs=max_num_seqs,
            max_num_batched_tokens=max_num_batched_tokens,
            max_queued_requests=max_queued_requests,
            depth=depth,
            threads=threads,
            attention=attention,
        )
        server = ServerConfig(
            host=host,
            port=port,
            served_model_name=served_model_name,
            drain_timeout_s=drain_timeout,
        )
        from octavo.server.run import serve as run_server

        raise typer.Exit(run_server(config, server))


@app.command()
def generate(
    model: Annotated[str, typer.Argument(help="A name, a directory or a GGUF file.")],
    prompt: Annotated[str, typer.Argument(help="The text to continue; - reads standard input.")],
    chat: Annotated[
        bool, typer.Option("--chat", help="Send the prompt as a user's message.")
    ] = False,
    max_tokens: Annotated[int, typer.Option(help="Tokens to generate at most.")] = 128,
    temperature: Annotated[float, typer.Option(help="0 is greedy.")] = 1.0,
    top_k: Annotated[int, typer.Option(help="Sample from the k likeliest tokens; 0: all.")] = 0,
    top_p: Annotated[float, typer.Option(help="Sample from the likeliest mass p.")] = 1.0,
    min_p: Annotated[
        float, typer.Option(help="Drop tokens less likely than this share of the likeliest.")
    ] = 0.0,
    seed: Annotated[int | None, typer.Option(help="Makes the output repeatable.")] = None,
    stop: Annotated[list[str] | None, typer.Option(help="Stop before this text.")] = None,
    ignore_eos: Annotated[
        bool, typer.Option("--ignore-eos", help="Go on after the model's end tokens.")
    ] = False,
    as_json: AsJSON = False,
    load_format: LoadFormat = _DEFAULTS.load_format,
    dtype: Dtype = _DEFAULTS.dtype,
    weights: Weights = _DEFAULTS.weights,
    kv: KV = _DEFAULTS.kv,
    block_size: BlockSize = _DEFAULTS.block_size,
    kv_memory: KVMemoryOption = _DEFAULTS.kv_memory,
    max_model_len: MaxModelLen = None,
    max_num_seqs: MaxNumSeqs = _DEFAULTS.max_num_seqs,
    max_num_batched_tokens: MaxNumBatchedTokens = None,
    depth: Depth = None,
    threads: Threads = None,
    attention: Attention = _DEFAULTS.attention,
) -> None:
    """Complete one prompt in this process and print the text."""
    with _readable_errors():
        from octavo.core.request import FinishReason
        from octavo.core.sampling_params import SamplingParams
        from octavo.engine.llm import LLM

        params = SamplingParams(
            temperature=temperature,
            top_k=top_k,
            top_p=top_p,
            min_p=min_p,
            seed=seed,
            max_tokens=max_tokens,
            stop=tuple(stop or ()),
            ignore_eos=ignore_eos,
        )
        text = sys.stdin.read() if prompt == "-" else prompt
        with LLM(
            model,
            load_format=load_format,
            dtype=dtype,
            weights=weights,
            kv=kv,
            block_size=block_size,
            kv_memory=kv_memory,
            max_model_len=max_model_len,
            max_num_seqs=max_num_seqs,
            max_num_batched_tokens=max_num_batched_tokens,
            depth=depth,
            threads=threads,
            attention=attention,
        ) as llm:
            if chat:
                completion = llm.chat([{"role": "user", "content": text}], params)
            else:
                completion = llm.generate(text, params)[0]
        if completion.finish_reason is FinishReason.ERROR:
            raise RuntimeError(completion.error or "the step failed")
        if not as_json:
            typer.echo(completion.text)
            return
        num_prompt, num_output = completion.num_prompt_tokens, len(completion.token_ids)
        _print_json(
            {
                "text": completion.text,
                "token_ids": list(completion.token_ids),
                "finish_reason": completion.finish_reason.value,
                "usage": {
                    "prompt_tokens": num_prompt,
                    "completion_tokens": num_output,
                    "total_tokens": num_prompt + num_output,
                },
            }
        )


@app.command()
def pull(
    model: Annotated[str, typer.Argument(help="The name of a known model.")] = DEFAULT_MODEL,
) -> None:
    """Fetch a known model into the cache directory and print its path."""
    with _readable_errors():
        from octavo.model_store import pull as fetch

        typer.echo(fetch(model))


@bench_app.command("simulator")
def bench_simulator(as_json: AsJSON = False) -> None:
    """What the scheduler and the block manager cost: simulated tokens a second of one core."""
    from octavo.bench import simulator

    report: Any = simulator.run()
    if as_json:
        _print_json(report)
        return
    typer.echo(f"{'rows':>6} {'plan µs':>9} {'update µs':>10} {'step µs':>9} {'tokens/s':>12}")
    for figure in report["rows"]:
        typer.echo(
            f"{figure['rows']:>6} {figure['plan_us']:>9.1f} {figure['update_us']:>10.1f} "
            f"{figure['step_us']:>9.1f} {figure['tokens_per_second']:>12,.0f}"
        )
    typer.echo(
        f"step at 256 rows: {report['share_of_goal']:.2f} of the goal of "
        f"{report['goal_step_us']:.0f} µs"
    )


@bench_app.command("attention")
def bench_attention(as_json: AsJSON = False, threads: Threads = 1) -> None:
    """The attention backends of this machine against each other, on SmolLM2-135M's shape."""
    from octavo.bench import attention

    figures = attention.run(threads or 1)
    if as_json:
        _print_json(figures)
        return
    typer.echo(attention.table(figures))


@bench_app.command("decode")
def bench_decode(
    model: Annotated[str, typer.Argument(help="A name, a directory or a GGUF file.")] = (
        DEFAULT_MODEL
    ),
    dtype: Dtype = _DEFAULTS.dtype,
    weights: Weights = _DEFAULTS.weights,
    threads: Threads = None,
    depth: Depth = None,
    as_json: AsJSON = False,
) -> None:
    """Decode and prefill speed in process, beside the machine's memory rate in the same run."""
    with _readable_errors():
        from octavo.bench import decode

        report = decode.run(model, dtype=dtype, weights=weights, threads=threads, depth=depth)
        if as_json:
            _print_json(report)
            return
        typer.echo(decode.table(report))


@contextmanager
def _readable_errors() -> Iterator[None]:
    """Expected errors are one line on standard error and exit code 1, without a traceback."""
    logging.basicConfig(level=logging.INFO, format="%(levelname)s %(name)s: %(message)s")
    logging.getLogger("uvicorn.error").setLevel(logging.WARNING)
    try:
        yield
    except (ConfigError, ValueError, MemoryError, OSError, RuntimeError) as error:
        if isinstance(error, typer.Exit):
            raise
        typer.echo(f"octavo: {error}", err=True)
        raise typer.Exit(1) from error


def _print_json(value: Any) -> None:
    typer.echo(json.dumps(value, ensure_ascii=False))


def main() -> None:
    """The entry point of the `octavo` command."""
    app()


if __name__ == "__main__":
    main()
