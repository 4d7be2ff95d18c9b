"""What other engines call options of commands that run a model: an unknown one is answered with
ours, since spelling alone suggests the wrong one (`--max-model-len` for `--model`)."""

from __future__ import annotations

import re
from typing import Any

from typer.core import TyperCommand

_MODEL = "the model is the command's first argument"
_LENGTH = "it is --max-model-len here"
_ROWS = "it is --max-num-seqs here"
_MEMORY = "see --kv-memory, for example 90% of what remains after weights and workspace"
_RANKS = "a model runs on one device"

# vLLM's, SGLang's and llama.cpp's.
ELSEWHERE = {
    "--model": _MODEL,
    "--model-path": _MODEL,
    "-m": _MODEL,
    "--context-length": _LENGTH,
    "--ctx-size": _LENGTH,
    "-c": _LENGTH,
    "--max-running-requests": _ROWS,
    "--parallel": _ROWS,
    "--gpu-memory-utilization": _MEMORY,
    "--mem-fraction-static": _MEMORY,
    "--tensor-parallel-size": _RANKS,
    "--tp-size": _RANKS,
    "--attention-backend": "it is --attention here",
    "--page-size": "it is --block-size here",
    "--chunked-prefill-size": "it is --max-num-batched-tokens here",
}


class EngineCommand(TyperCommand):
    """A command that says what an option of another engine is called here."""

    def parse_args(self, ctx: Any, args: list[str]) -> list[str]:
        try:
            return super().parse_args(ctx, args)
        except Exception as error:
            # click's NoSuchOption, which typer brings under a name that changes with its version.
            hint = ELSEWHERE.get(getattr(error, "option_name", ""))
            ours = {spelling for parameter in self.params for spelling in parameter.opts}
            if hint is not None and ours.issuperset(re.findall("--[a-z-]+", hint)):
                vars(error).update(message=f"{vars(error)['message']}; {hint}", possibilities=None)
            raise
