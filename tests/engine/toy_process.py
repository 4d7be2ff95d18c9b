"""An engine process over the toy executor, run as a script in place of `octavo.engine.process`.

The model's name says how it behaves: ``toy``; ``toy-slow`` takes its time;
``toy-refuses``, ``toy-lacks``, ``toy-raises`` and ``toy-crashes`` fail to start; ``toy-bug`` raises
something unforeseen in its third step; ``toy-fails-step`` fails its second step; ``toy-hangs``
hangs in its third until it gets SIGUSR1; ``toy-caches`` caches prefixes, ``toy-caches-slow`` takes
its time with that. Of a path only the last part counts.
"""

from __future__ import annotations

import os
import signal
import sys
import time
from dataclasses import replace
from pathlib import Path

sys.path.insert(0, str(Path(__file__).parents[1]))

from octavo.config import BLOCK_SIZE, ConfigError, EngineConfig, ResourceError
from octavo.core.plan import StepPlan, StepResult
from octavo.engine.core import EngineCore
from octavo.engine.process import run_process
from octavo.engine.report import EngineReport
from octavo.memory.paged import PagedManager
from octavo.scheduling.scheduler import Scheduler, SchedulerConfig
from toy_executor import VOCAB, ToyExecutor

NUM_BLOCKS = 257
EOS = VOCAB - 1


class WideSeedExecutor(ToyExecutor):
    """The toy hashes 32 bits of a seed."""

    def launch(self, plan: StepPlan) -> None:
        inits = tuple(replace(init, seed=init.seed % 2**31) for init in plan.row_inits)
        super().launch(replace(plan, row_inits=inits))


class BuggyExecutor(WideSeedExecutor):
    def collect(self) -> StepResult:
        if len(self.plans) == 3:
            raise KeyError("a bug")
        return super().collect()


class ExitingExecutor(WideSeedExecutor):
    """A library that ends the process, past every handler."""

    def collect(self) -> StepResult:
        if len(self.plans) == 3:
            os._exit(7)
        return super().collect()


class SlowExecutor(WideSeedExecutor):
    def collect(self) -> StepResult:
        time.sleep(0.005)
        return super().collect()


class HangingExecutor(WideSeedExecutor):
    def collect(self) -> StepResult:
        if len(self.plans) == 3:
            signal.sigwait({signal.SIGUSR1})
        return super().collect()


EXECUTORS = {
    "toy-bug": BuggyExecutor,
    "toy-exits": ExitingExecutor,
    "toy-slow": SlowExecutor,
    "toy-caches-slow": SlowExecutor,
    "toy-hangs": HangingExecutor,
}


def toy_report(core: EngineCore, model: str = "toy") -> EngineReport:
    config = core.scheduler.config
    return EngineReport(
        model=model,
        architecture="Toy",
        dtype="int",
        weights="no",
        device="cpu",
        attention="none",
        num_threads=1,
        depth=core.depth,
        vocab_size=VOCAB,
        max_model_len=config.max_model_len,
        max_num_seqs=config.max_num_seqs,
        max_num_batched_tokens=config.max_num_batched_tokens,
        max_queued_requests=config.max_queued_requests,
        eos_token_ids=(EOS,),
        capacity=core.executor.capacity,
        weight_bytes=0,
        workspace_bytes=0,
        load_s=0.0,
    )


def build(config: EngineConfig) -> tuple[EngineCore, EngineReport]:
    model = Path(config.model).name
    if model == "toy-refuses":
        raise ConfigError("kv_memory asks for\n too much; ask for less")
    if model == "toy-lacks":
        raise ResourceError("the host refuses\n addresses; use less")
    if model == "toy-crashes":
        os.abort()
    if model == "toy-raises":
        raise OSError("the disk is on fire")
    max_model_len = config.max_model_len or 512
    max_num_seqs = config.max_num_seqs or 64
    block_size = config.block_size or BLOCK_SIZE
    kind = EXECUTORS.get(model, WideSeedExecutor)
    executor = kind(NUM_BLOCKS, block_size, max_num_seqs)
    if model == "toy-fails-step":
        executor.fail_steps.add(2)
    scheduler = Scheduler(
        SchedulerConfig(
            max_num_seqs=max_num_seqs,
            max_num_batched_tokens=max(64, max_num_seqs),
            max_model_len=max_model_len,
            max_queued_requests=config.max_queued_requests,
        ),
        PagedManager(
            NUM_BLOCKS,
            block_size,
            max_num_seqs,
            prefix_caching=model.startswith("toy-caches"),
        ),
    )
    core = EngineCore(scheduler, executor, config.depth or 1)
    return core, toy_report(core, model)


if __name__ == "__main__":
    # Before any thread starts, so that none but the one that waits for it takes the signal.
    signal.pthread_sigmask(signal.SIG_BLOCK, {signal.SIGUSR1})
    sys.exit(run_process(build))
