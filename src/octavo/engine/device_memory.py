"""How a device's memory is shared out: arithmetic over what was measured. Knows no device.

::

    total = other + weights + workspace + graphs + sampling + KV cache + unused
"""

from __future__ import annotations

from dataclasses import dataclass

from octavo.config import ConfigError, KVMemory

# ``auto`` leaves the rest to whoever else uses the device.
_UTILIZATION = 0.9


@dataclass(frozen=True, slots=True, kw_only=True)
class DeviceMemory:
    """Bytes; the parts sum to ``total_bytes``.

    ``other_bytes`` were taken when the KV cache was sized, but not by weights: the driver, the
    libraries, other processes. ``workspace_bytes`` is what a forward pass took that was run.
    ``graph_bytes`` and ``sampling_bytes`` are kept for what comes later: captured steps, and rows
    that penalize, forbid or bias tokens.
    """

    total_bytes: int
    other_bytes: int
    weight_bytes: int
    workspace_bytes: int
    graph_bytes: int
    sampling_bytes: int
    kv_bytes: int
    unused_bytes: int

    def parts(self) -> dict[str, int]:
        """By name, in the order of the sum; the total left out."""
        return {
            "other": self.other_bytes,
            "weights": self.weight_bytes,
            "workspace": self.workspace_bytes,
            "graphs": self.graph_bytes,
            "sampling": self.sampling_bytes,
            "KV cache": self.kv_bytes,
            "unused": self.unused_bytes,
        }


def share_out(
    memory: KVMemory,
    *,
    total_bytes: int,
    free_bytes: int,
    weight_bytes: int,
    workspace_bytes: int,
    graph_bytes: int,
    sampling_bytes: int,
    block_bytes: int,
    block_size: int,
) -> DeviceMemory:
    """Give the KV cache whole blocks of what remains. ``free_bytes`` of ``total_bytes`` are free
    while the weights are there and nothing else is.

    Raises:
        ConfigError: less remains than ``memory`` asks for, or than two blocks.
    """
    step_bytes = workspace_bytes + graph_bytes + sampling_bytes
    remaining = free_bytes - step_bytes
    if remaining < 2 * block_bytes:
        raise ConfigError(
            f"no GPU memory remains for the KV cache: {free_bytes / 2**30:.2f} GiB are free beside "
            f"the weights, and steps take {step_bytes / 2**30:.2f} GiB of workspace, captures and "
            "sampling; lower max_num_seqs or max_num_batched_tokens, or take a smaller model"
        )
    if memory.num_bytes is not None:
        wanted = memory.num_bytes
        if wanted > remaining:
            raise ConfigError(
                f"kv_memory asks for {wanted / 2**30:.2f} GiB but {remaining / 2**30:.2f} "
                "GiB of GPU memory remain after weights, workspace and what is kept for captured "
                "steps and sampling; ask for less"
            )
    elif memory.fraction is not None:
        wanted = int(memory.fraction * remaining)
    else:
        budget = int(_UTILIZATION * total_bytes) - (total_bytes - free_bytes) - workspace_bytes
        wanted = min(remaining, budget)
    num_blocks = max(wanted, 0) // block_bytes
    if num_blocks < 2:
        raise ConfigError(
            f"the KV cache needs at least two blocks of {block_bytes} bytes "
            f"({block_size} tokens each), but {max(wanted, 0)} bytes of GPU memory "
            "remain for it; give more memory or take a smaller model"
        )
    kv_bytes = num_blocks * block_bytes
    return DeviceMemory(
        total_bytes=total_bytes,
        other_bytes=total_bytes - free_bytes - weight_bytes,
        weight_bytes=weight_bytes,
        workspace_bytes=workspace_bytes,
        graph_bytes=graph_bytes,
        sampling_bytes=sampling_bytes,
        kv_bytes=kv_bytes,
        unused_bytes=remaining - kv_bytes,
    )
