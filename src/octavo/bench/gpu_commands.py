"""`octavo bench gpu` and `octavo bench kernels`: what runs on a GPU. Loads nothing heavy until it
runs."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated, Any

import typer

from octavo import options
from octavo.config import ConfigError
from octavo.output_files import check_writable
from octavo.terminal import print_json, readable_errors


def add_to(app: typer.Typer) -> None:
    """Add the commands to ``octavo bench``."""
    app.command("gpu")(gpu)
    app.command("kernels")(kernels)
    app.command("translation")(translation)


def gpu(
    works: Annotated[
        list[str] | None,
        typer.Argument(
            help="startup, load, swap, decode, sampling, sharegpt, prefill, graphs, shared-prefix, "
            "deterministic [all]."
        ),
    ] = None,
    model: Annotated[
        str, typer.Option(help="llama-3.1-8b, llama-3.2-1b, or a config.json: random weights.")
    ] = "llama-3.1-8b",
    weights: options.Weights = options.DEFAULTS.weights,
    kv_dtype: options.KVDtype = options.DEFAULTS.kv_dtype,
    attention: options.Attention = options.DEFAULTS.attention,
    profile: Annotated[
        Path | None,
        typer.Option(metavar="FILE", help="Also write a trace of the works, for Perfetto."),
    ] = None,
    as_json: options.AsJSON = False,
) -> None:
    """Whole works on a GPU, each beside its floor in the same run."""
    with readable_errors():
        check_writable("--profile", profile)
        _check_gpu()
        from octavo.bench import works as module

        asked = tuple(works or module.WORKS)
        if unknown := sorted(set(asked) - set(module.WORKS)):
            raise ConfigError(
                f"unknown works {', '.join(unknown)}; choose from {', '.join(module.WORKS)}"
            )
        if not as_json:
            typer.echo(module.HEADER)
        report = module.run(
            model,
            asked,
            (lambda figure: None) if as_json else (lambda figure: typer.echo(module.line(figure))),
            profile=None if profile is None else str(profile),
            weights=weights,
            kv_dtype=kv_dtype,
            attention=attention,
        )
        if as_json:
            print_json(report)
            return
        typer.echo(module.summary(report))


def kernels(as_json: options.AsJSON = False) -> None:
    """The GPU's kernels on an 8B's shapes: time, rate, share of the ceiling in the same run."""
    with readable_errors():
        _check_gpu()
        from octavo.bench import gpu_kernels

        report: Any = gpu_kernels.run()
        if as_json:
            print_json(report)
            return
        typer.echo(gpu_kernels.table(report))


def translation(
    sections: Annotated[
        list[str] | None,
        typer.Argument(help="pages, prefill, decode, offline, load, mapping, hits [all]."),
    ] = None,
    model: Annotated[
        str, typer.Option(help="llama-3-8b-200k or yi-6b-200k: random weights.")
    ] = "llama-3-8b-200k",
    kinds: Annotated[
        str,
        typer.Option(help="Of paged, virtual, mixed, stock, paged-fa3, virtual-fa3, flashinfer."),
    ] = "paged,virtual,mixed,stock",
    as_json: options.AsJSON = False,
) -> None:
    """The paged translation against the virtual one on a GPU: the same engine, the same work."""
    with readable_errors():
        _check_gpu()
        from octavo.bench import translation as module
        from octavo.bench import works

        for name, given, known in (
            ("sections", sections or module.SECTIONS, module.SECTIONS),
            ("kinds", kinds.split(","), tuple(module.KINDS)),
            ("models", [model], module.SHAPES),
        ):
            if unknown := sorted(set(given) - set(known)):
                raise ConfigError(
                    f"unknown {name} {', '.join(unknown)}; choose from {', '.join(known)}"
                )
        rows = module.measure(
            model,
            sections or module.SECTIONS,
            kinds.split(","),
            (lambda row: None) if as_json else (lambda row: typer.echo(module.line(row))),
        )
        if as_json:
            print_json({"model": model, "versions": works.versions(), "rows": rows})


def _check_gpu() -> None:
    import torch

    if not torch.cuda.is_available():
        raise ConfigError(
            "PyTorch finds no CUDA device here, which this measures; octavo bench decode measures "
            "a CPU"
        )
