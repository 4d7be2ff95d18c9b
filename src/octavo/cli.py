"""The `octavo` command. Parses options and calls the rooms; loads nothing heavy by itself."""

from __future__ import annotations

import os
import sys
from collections.abc import Iterator, Sequence
from dataclasses import asdict
from typing import TYPE_CHECKING, Annotated, Any, Literal

import typer

from octavo import __version__, options
from octavo.bench.commands import bench_app
from octavo.capacity_commands import calibrate, plan
from octavo.config import (
    DEFAULT_MODEL,
    ConfigError,
    EngineConfig,
    ServerConfig,
    api_keys_of,
    client_key,
)
from octavo.layout_command import layout
from octavo.options import DEFAULTS
from octavo.spellings import EngineCommand
from octavo.terminal import print_json, readable_errors

if TYPE_CHECKING:
    from octavo.engine.completion import Beam

_SERVER = ServerConfig()
_EARLY_STOPPING: dict[str, bool | Literal["never"]] = {
    "true": True,
    "false": False,
    "never": "never",
}

app = typer.Typer(
    name="octavo",
    help="An LLM inference and serving engine whose subject is the KV cache's memory.",
    no_args_is_help=True,
    add_completion=False,
    pretty_exceptions_enable=False,
    rich_markup_mode=None,
)
app.add_typer(bench_app, name="bench")


@app.callback(invoke_without_command=True)
def _main(
    version: Annotated[bool, typer.Option("--version", help="Print the version.")] = False,
) -> None:
    if version:
        typer.echo(f"octavo {__version__}")
        raise typer.Exit


@app.command(cls=EngineCommand)
def serve(
    context: typer.Context,
    model: options.Model = DEFAULT_MODEL,
    host: Annotated[str, typer.Option(help="Address to listen on.")] = "127.0.0.1",
    port: Annotated[int, typer.Option(help="Port to listen on; 0 takes a free one.")] = 8000,
    served_model_name: Annotated[
        list[str] | None,
        typer.Option(
            help="What clients call the model; may be repeated; * takes any [default: MODEL]."
        ),
    ] = None,
    api_key: Annotated[
        list[str] | None,
        typer.Option(
            help="Key that clients must send; may be repeated [default: $OCTAVO_API_KEY]."
        ),
    ] = None,
    cors_origin: Annotated[
        list[str] | None,
        typer.Option(help="Web origin that may use the API; may be repeated; * allows all."),
    ] = None,
    drain_timeout: Annotated[
        float, typer.Option(help="Seconds that running requests get to finish at shutdown.")
    ] = _SERVER.drain_timeout_s,
    stall_timeout: Annotated[
        float, typer.Option(help="Seconds without a step, while there is work, that fail /health.")
    ] = _SERVER.stall_timeout_s,
    client_timeout: Annotated[
        float,
        typer.Option(help="Seconds a client may take to send a request or leave an answer unread."),
    ] = _SERVER.client_timeout_s,
    max_request_bytes: Annotated[
        int, typer.Option(help="Largest body of a request.")
    ] = _SERVER.max_request_bytes,
    max_connections: Annotated[
        int, typer.Option(help="Connections at once; more are answered 503.")
    ] = _SERVER.max_connections,
    admin_endpoints: Annotated[
        bool,
        typer.Option(
            "--admin-endpoints",
            help="Serve administrative endpoints, such as POST /prefixes, /kv/resize and /sleep.",
        ),
    ] = False,
    prefix: Annotated[
        list[str] | None,
        typer.Option(
            metavar="FILE",
            help="Keep what prompts begin with in the prefix cache, whatever else runs: a text, or "
            "a .json file of chat messages; may be repeated.",
        ),
    ] = None,
    log_format: Annotated[str, typer.Option(help="text or json.")] = _SERVER.log_format,
    log_level: Annotated[
        str, typer.Option(help="debug, info (a line for each request), warning or error.")
    ] = _SERVER.log_level,
    load_format: options.LoadFormat = DEFAULTS.load_format,
    dtype: options.Dtype = DEFAULTS.dtype,
    weights: options.Weights = DEFAULTS.weights,
    kv: options.KV = DEFAULTS.kv,
    reserve: options.Reserve = DEFAULTS.reserve,
    scheduler: options.SchedulerMode = DEFAULTS.scheduler,
    kv_dtype: options.KVDtype = DEFAULTS.kv_dtype,
    block_size: options.BlockSize = DEFAULTS.block_size,
    kv_memory: options.KVMemory = DEFAULTS.kv_memory,
    prefix_caching: options.PrefixCaching = DEFAULTS.prefix_caching,
    sharing: options.Sharing = DEFAULTS.sharing,
    preemption: options.Preemption = DEFAULTS.preemption,
    swap_memory: options.SwapMemory = DEFAULTS.swap_memory,
    max_model_len: options.MaxModelLen = None,
    max_num_seqs: options.MaxNumSeqs = DEFAULTS.max_num_seqs,
    max_num_batched_tokens: options.MaxNumBatchedTokens = None,
    max_queued_requests: options.MaxQueuedRequests = DEFAULTS.max_queued_requests,
    depth: options.Depth = None,
    threads: options.Threads = None,
    device: options.Device = DEFAULTS.device,
    deterministic: options.Deterministic = DEFAULTS.deterministic,
    attention: options.Attention = DEFAULTS.attention,
    map_forks: options.MapForks = DEFAULTS.map_forks,
) -> None:
    """Serve a model over an OpenAI-compatible HTTP API."""
    with readable_errors():
        config = EngineConfig(**options.engine_options(context))
        server = ServerConfig(
            host=host,
            port=port,
            served_model_names=tuple(served_model_name or ()),
            api_keys=api_keys_of(api_key or ()),
            cors_origins=tuple(cors_origin or ()),
            drain_timeout_s=drain_timeout,
            stall_timeout_s=stall_timeout,
            client_timeout_s=client_timeout,
            max_request_bytes=max_request_bytes,
            max_connections=max_connections,
            admin_endpoints=admin_endpoints,
            prefixes=tuple(prefix or ()),
            log_format=log_format,
            log_level=log_level,
        )
        from octavo.server.run import serve as run_server

        raise typer.Exit(run_server(config, server))


@app.command(cls=EngineCommand)
def generate(
    context: typer.Context,
    model: options.Model,
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
    beam_width: Annotated[
        int | None,
        typer.Option(help="Search with this many candidates instead of sampling; prints the best."),
    ] = None,
    length_penalty: Annotated[
        float, typer.Option(help="Of a beam search: above 0 favours long texts, below short ones.")
    ] = 1.0,
    early_stopping: Annotated[
        str, typer.Option(help="Of a beam search: true, false or never.")
    ] = "false",
    as_json: options.AsJSON = False,
    load_format: options.LoadFormat = DEFAULTS.load_format,
    dtype: options.Dtype = DEFAULTS.dtype,
    weights: options.Weights = DEFAULTS.weights,
    kv: options.KV = DEFAULTS.kv,
    reserve: options.Reserve = DEFAULTS.reserve,
    scheduler: options.SchedulerMode = DEFAULTS.scheduler,
    kv_dtype: options.KVDtype = DEFAULTS.kv_dtype,
    block_size: options.BlockSize = DEFAULTS.block_size,
    kv_memory: options.KVMemory = DEFAULTS.kv_memory,
    max_model_len: options.MaxModelLen = None,
    max_num_seqs: options.MaxNumSeqs = DEFAULTS.max_num_seqs,
    max_num_batched_tokens: options.MaxNumBatchedTokens = None,
    depth: options.Depth = None,
    threads: options.Threads = None,
    device: options.Device = DEFAULTS.device,
    deterministic: options.Deterministic = DEFAULTS.deterministic,
    attention: options.Attention = DEFAULTS.attention,
    map_forks: options.MapForks = DEFAULTS.map_forks,
) -> None:
    """Complete one prompt in this process and print the text."""
    with readable_errors():
        from octavo.core.request import FinishReason
        from octavo.core.sampling_params import SamplingParams
        from octavo.engine.llm import LLM

        _check_beam_options(beam_width, length_penalty, early_stopping)
        params = SamplingParams(
            temperature=temperature,
            top_k=top_k,
            top_p=top_p,
            min_p=min_p,
            seed=seed,
            max_tokens=max_tokens,
            stop=tuple(stop or ()),
            ignore_eos=ignore_eos,
            use_beam_search=beam_width is not None,
            beam_width=beam_width,
            length_penalty=length_penalty,
            early_stopping=_EARLY_STOPPING[early_stopping],
        )
        text = sys.stdin.read() if prompt == "-" else prompt
        with LLM(**options.engine_options(context)) as llm:
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
        print_json(
            {
                "text": completion.text,
                "token_ids": list(completion.token_ids),
                "finish_reason": completion.finish_reason.value,
                **_beams(completion.beams),
                "usage": {
                    "prompt_tokens": num_prompt,
                    "completion_tokens": num_output,
                    "total_tokens": num_prompt + num_output,
                },
            }
        )


def _check_beam_options(beam_width: int | None, length_penalty: float, early_stopping: str) -> None:
    if early_stopping not in _EARLY_STOPPING:
        words = ", ".join(_EARLY_STOPPING)
        raise ConfigError(f"--early-stopping must be one of {words}, got {early_stopping!r}")
    if beam_width is None:
        for option, is_used in (
            ("--length-penalty", length_penalty != 1.0),
            ("--early-stopping", early_stopping != "false"),
        ):
            if is_used:
                raise ConfigError(f"{option} needs --beam-width; send it or leave {option} out")


def _check_chat_options(given: Sequence[str], *, has_server: bool) -> None:
    """Refuse what would change nothing, here or on a server."""
    if not has_server and "api_key" in given:
        raise ConfigError("--api-key is a server's; give --url with it, or leave it out")
    for name in given:
        if has_server and name in options.ENGINE_FIELDS and name != "model":
            option = "--" + name.replace("_", "-")
            raise ConfigError(
                f"{option} is for a model in this process, and --url talks to a server's; give "
                f"{option} to octavo serve, or leave it out"
            )


def _beams(beams: Sequence[Beam]) -> dict[str, Any]:
    return {"beams": [asdict(beam) for beam in beams]} if beams else {}


@app.command(cls=EngineCommand)
def chat(
    context: typer.Context,
    model: Annotated[
        str,
        typer.Argument(
            help="A name, a directory or a GGUF file; left out with --url: the server's first."
        ),
    ] = DEFAULT_MODEL,
    url: Annotated[
        str | None,
        typer.Option(help="Talk to a running server, such as http://127.0.0.1:8000, instead."),
    ] = None,
    api_key: options.APIKey = None,
    system: Annotated[str | None, typer.Option(help="A system message.")] = None,
    temperature: Annotated[float, typer.Option(help="0 is greedy.")] = 0.7,
    top_p: Annotated[float, typer.Option(help="Sample from the likeliest mass p.")] = 0.95,
    max_tokens: Annotated[
        int | None, typer.Option(help="Tokens in an answer at most [default: all that fit].")
    ] = None,
    dtype: options.Dtype = DEFAULTS.dtype,
    weights: options.Weights = DEFAULTS.weights,
    kv_dtype: options.KVDtype = DEFAULTS.kv_dtype,
    kv_memory: options.KVMemory = DEFAULTS.kv_memory,
    max_model_len: options.MaxModelLen = None,
    threads: options.Threads = None,
    device: options.Device = DEFAULTS.device,
) -> None:
    """Talk with a model; /help lists what a line may begin with."""
    with readable_errors():
        from octavo.chat import Conversation, first_model, run, server_answer

        given = options.given_options(context)
        _check_chat_options(given, has_server=url is not None)
        if url is not None:
            key = client_key(api_key)
            listed = first_model(url, key)
            model = model if "model" in given else listed or model
            limit = {} if max_tokens is None else {"max_tokens": max_tokens}
            answer = server_answer(url, model, key, temperature=temperature, top_p=top_p, **limit)
        else:
            from octavo.core.sampling_params import SamplingParams
            from octavo.engine.llm import LLM

            params = SamplingParams(temperature=temperature, top_p=top_p, max_tokens=max_tokens)
            llm = LLM(**options.engine_options(context), max_num_seqs=1)

            def answer(messages: list[dict[str, str]]) -> Iterator[str]:
                return llm.stream_chat(messages, params)

        def read() -> str:
            return input("> " if sys.stdin.isatty() else "")

        def write(text: str) -> None:
            sys.stdout.write(text)
            sys.stdout.flush()

        num_refused = run(Conversation(answer, system), read, write)
        # Nobody reads the terminal where lines come from a file.
        if num_refused and not sys.stdin.isatty():
            raise typer.Exit(1)


@app.command()
def pull(
    model: Annotated[
        str,
        typer.Argument(help="A known name, or one of the Hugging Face hub; a path is itself."),
    ] = DEFAULT_MODEL,
) -> None:
    """Fetch a model where it is not here yet, and print its path."""
    with readable_errors():
        from octavo.model_store import pull as fetch

        typer.echo(fetch(model))


app.command()(layout)
app.command()(calibrate)
app.command()(plan)


def main() -> None:
    """Run the command; `octavo.__main__` is where a shell enters."""
    try:
        app()
    except OSError as error:  # a command says itself what failed; --help and --version cannot
        typer.echo(f"octavo: {error}", err=True)
        code: object = 1
    except SystemExit as end:
        code = end.code
    try:
        if sys.stdout is not None:
            sys.stdout.flush()
    except OSError as error:
        if not code:
            typer.echo(f"octavo: {error}", err=True)
        code = code or 1
        # Else Python tries again when it ends, and tells of it at length.
        os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())
    sys.exit(code)  # type: ignore[arg-type]


if __name__ == "__main__":
    main()
