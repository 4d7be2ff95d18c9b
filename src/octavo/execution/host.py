"""What the host offers: memory that is free, cores that compute. Linux; opens /proc and /sys."""

from __future__ import annotations

import os
from pathlib import Path


def available_bytes() -> int:
    """Memory that can be taken now without swapping: the kernel's estimate, within the control
    group's limit if there is one."""
    available = _meminfo()["MemAvailable"]
    limit = _read_number(Path("/sys/fs/cgroup/memory.max"))
    used = _read_number(Path("/sys/fs/cgroup/memory.current"))
    if limit is not None and used is not None:
        available = min(available, max(limit - used, 0))
    return available


def total_bytes() -> int:
    """All of the host's memory, or what the control group may have of it."""
    limit = _read_number(Path("/sys/fs/cgroup/memory.max"))
    total = _meminfo()["MemTotal"]
    return total if limit is None else min(limit, total)


def num_physical_cores() -> int:
    """Cores this process may run on, hyper-threads counted once: two threads that share a core
    compute no faster than one, and wait for each other."""
    cpus = os.sched_getaffinity(0)
    cores = set()
    for cpu in cpus:
        siblings = Path(f"/sys/devices/system/cpu/cpu{cpu}/topology/thread_siblings_list")
        try:
            cores.add(siblings.read_text().strip())
        except OSError:
            cores.add(str(cpu))
    return max(len(cores), 1)


def _meminfo() -> dict[str, int]:
    sizes = {}
    for line in Path("/proc/meminfo").read_text().splitlines():
        name, _, rest = line.partition(":")
        fields = rest.split()
        if len(fields) == 2 and fields[1] == "kB":
            sizes[name] = int(fields[0]) * 1024
    return sizes


def _read_number(path: Path) -> int | None:
    """The file's number; None when it is absent or says ``max``."""
    try:
        return int(path.read_text())
    except (OSError, ValueError):
        return None
