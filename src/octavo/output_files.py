"""Files that commands write at their end: found fit to be written before the work starts.

One rule for all of them: a file's directory must exist, and is never made. Light: no matplotlib
but where a plot is asked for.
"""

from __future__ import annotations

import os
import stat
import sys
from importlib.util import find_spec
from pathlib import Path

from octavo.config import ConfigError


def check_writable(option: str, path: Path | None) -> None:
    """Raises `ConfigError` where a file could not be written, before minutes of measuring. ``path``
    is what ``option`` names; None: nothing."""
    if path is None:
        return
    try:
        found = path.stat()
    except FileNotFoundError:
        check_directory(option, path.resolve().parent)
        return
    except OSError as error:
        raise ConfigError(f"{option} {path}: {error.strerror}; name another file") from error
    if stat.S_ISDIR(found.st_mode):
        raise ConfigError(f"{option} {path}: is a directory; name a file in it")
    if not os.access(path, os.W_OK):
        raise ConfigError(f"{option} {path}: the file may not be written; name another")


def check_directory(option: str, path: Path) -> None:
    """Raises `ConfigError` where no file could be made in ``path``."""
    if path.exists() and not path.is_dir():
        raise ConfigError(f"{option}: {path} is no directory; name one")
    if not path.is_dir():
        raise ConfigError(f"{option}: the directory {path} does not exist; make it")
    if not os.access(path, os.W_OK | os.X_OK):
        raise ConfigError(f"{option}: nothing may be written in the directory {path}")


def check_plot(option: str, path: Path | None) -> None:
    """`check_writable` for a plot: also where it cannot be drawn, or in no such format."""
    if path is None:
        return
    require_plots(option)
    from matplotlib.backend_bases import FigureCanvasBase

    kinds = FigureCanvasBase.get_supported_filetypes()
    if path.suffix.lower().lstrip(".") not in kinds:
        raise ConfigError(f"{option} {path}: the name must end in .{', .'.join(sorted(kinds))}")
    check_writable(option, path)


def require_plots(option: str) -> None:
    """Raises `ConfigError` where nothing can be drawn."""
    if find_spec("matplotlib") is None:
        raise ConfigError(
            f"{option} needs matplotlib; run: {sys.executable} -m pip install 'matplotlib>=3.10'"
        )
