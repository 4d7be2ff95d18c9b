"""A program: an engine's kernels, compiled for a Hopper GPU on a machine that may have none.

A stand-in for the driver loads and launches nothing; the rest is Triton's own. Memory that nobody
has written holds the largest ints and NaN, so that an operation that looks something up by what a
kernel should have written fails. Prints what was compiled, as JSON.
"""

from __future__ import annotations

import json
import sys
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import torch
import triton
from triton.backends.compiler import GPUTarget
from triton.runtime import driver

_PROPERTIES = {"max_shared_mem": 232448, "multiprocessor_count": 132, "warpSize": 32}


class StandIn:
    """Counts what it loads and launches."""

    def __init__(self) -> None:
        self.num_loaded = self.num_launched = 0
        self.utils = SimpleNamespace(
            get_device_properties=lambda device: _PROPERTIES, load_binary=self._load
        )

    def _load(self, *args: Any) -> tuple[Any, ...]:
        self.num_loaded += 1
        return "module", "function", 32, 0, 1024

    def launcher_cls(self, src: Any, metadata: Any) -> Any:
        def launch(*args: Any) -> None:
            self.num_launched += 1

        return launch

    def get_current_target(self) -> GPUTarget:
        return GPUTarget("cuda", 90, 32)

    def get_current_device(self) -> int:
        return 0

    def get_current_stream(self, device: int | None = None) -> int:
        return 0

    def get_active_torch_device(self) -> torch.device:
        return torch.device("cpu")

    def is_active(self) -> bool:
        return True


def main(folder: Path, kinds: list[dict[str, Any]]) -> list[dict[str, Any]]:
    """For each of ``kinds``, a dtype and options of `GPUParts`: what was compiled ahead, and what
    happened later that should not, when the start goes on and at steps of sizes in between."""
    from octavo.config import EngineConfig
    from octavo.engine.build_gpu import compile_kernels, warm_up
    from octavo.engine.gpu_parts import GPUParts
    from octavo.engine.mechanism import resolve_limits
    from octavo.execution.device import PlainDevice
    from octavo.execution.models.loading import load_config, load_model

    stand_in = StandIn()
    driver.set_active(stand_in)
    device = PlainDevice()
    config = EngineConfig(model=str(folder), max_num_seqs=4, max_num_batched_tokens=600)
    limits = resolve_limits(
        config,
        str(folder),
        load_config(folder),
        max_num_seqs=1,
        max_num_batched_tokens=1,
        depth=2,
    )
    # `use_deterministic_algorithms` would import the compiler.
    torch.set_deterministic_debug_mode("error")
    torch.utils.deterministic.fill_uninitialized_memory = True
    compiled: list[str] = []
    triton.knobs.runtime.jit_post_compile_hook = lambda **call: compiled.append(call["fn"].name)
    num_tokens, found = min(600, limits.max_model_len - 2), []
    for kind in kinds:
        model = load_model(
            folder,
            dtype=kind["dtype"],
            device=device.torch_device,
            max_positions=limits.max_model_len,
        )
        embedding: Any = model.embedding
        options = {name: value for name, value in kind.items() if name != "dtype"}
        parts = GPUParts(model, device, 16, limits, **options)
        runner = parts.runner(parts.layout.num_blocks(num_tokens + 2) + 1, capture=False)
        compiled.clear()
        stand_in.num_loaded = stand_in.num_launched = 0
        compile_kernels(parts, runner, num_tokens)
        ahead = {
            "ahead": list(compiled),
            "loaded_ahead": stand_in.num_loaded,
            "launched_ahead": stand_in.num_launched,
        }
        compiled.clear()
        stand_in.num_loaded = 0
        # As the engine's start goes on; launches find what they launch, but write nothing: a token
        # that only the device knows stays negative.
        model.embedding = lambda ids, of=embedding: of(ids.clamp(min=0))
        warm_up(runner, num_tokens)
        for count in (32, 100, 300):
            warm_up(parts.runner(parts.layout.num_blocks(count + 2) + 1, capture=True), count)
        late = {"late": list(compiled), "loaded_late": stand_in.num_loaded}
        found.append({**ahead, **late, "launched_late": stand_in.num_launched})
    return found


if __name__ == "__main__":
    results = main(Path(sys.argv[1]), json.loads(sys.argv[2]))
    print(json.dumps({"results": results, "modules": sorted(sys.modules)}))
