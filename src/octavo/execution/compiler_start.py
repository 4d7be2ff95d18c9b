"""What Triton does before its first kernel, done while PyTorch is imported.

It reads all of its own code, some 400 MB, to know what is in its cache, and has a C compiler build
its calls to the driver: a second or two each where one core is slow, neither of which needs PyTorch
or keeps Python's lock. Imports neither Triton nor PyTorch itself.
"""

from __future__ import annotations

import logging
import os
import threading

# Of which one is there where a driver for NVIDIA GPUs is: natively or in WSL.
_DRIVERS = ("/dev/nvidiactl", "/proc/driver/nvidia/version", "/dev/dxg")
_thread: threading.Thread | None = None

logger = logging.getLogger(__name__)


def start_compiler() -> None:
    """Begin, where there is a GPU. Once in a process."""
    global _thread
    if _thread is None and any(map(os.path.exists, _DRIVERS)):
        _thread = threading.Thread(target=_prepare, name="octavo-compiler", daemon=True)
        _thread.start()


def wait_for_compiler() -> None:
    """Until what was begun is done; whoever compiles before that does it once more."""
    if _thread is not None:
        _thread.join()


def _prepare() -> None:
    try:
        from triton.backends.nvidia.driver import CudaUtils
        from triton.runtime.cache import triton_key

        triton_key()
        CudaUtils()
    except Exception as error:
        # Nothing is lost: the first kernel asks for the same, and tells what is wrong.
        logger.debug("Triton could not be prepared: %s", error)
