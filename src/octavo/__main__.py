"""Where the `octavo` command begins: before anything that takes time to import."""

from __future__ import annotations

import signal
import sys


def main() -> None:
    """Run the command. Ctrl-C before there is one ends it without a word."""
    # Where it is ignored, as in a shell's background, it stays so.
    is_ours = signal.getsignal(signal.SIGINT) is signal.default_int_handler
    if is_ours:
        signal.signal(signal.SIGINT, signal.SIG_DFL)
    from octavo.cli import main as run

    try:
        if is_ours:
            signal.signal(signal.SIGINT, signal.default_int_handler)
        run()
    except KeyboardInterrupt:  # while the command line is made; afterwards typer catches it
        sys.exit(128 + signal.SIGINT)


if __name__ == "__main__":
    main()
