"""Where the `octavo` command begins: before anything that takes time to import."""

from __future__ import annotations

import signal


def main() -> None:
    """Run the command. Ctrl-C while it is still being imported ends it without a word."""
    # Where it is ignored, as in a shell's background, it stays so.
    is_ours = signal.getsignal(signal.SIGINT) is signal.default_int_handler
    if is_ours:
        signal.signal(signal.SIGINT, signal.SIG_DFL)
    from octavo.cli import main as run

    if is_ours:
        signal.signal(signal.SIGINT, signal.default_int_handler)
    run()


if __name__ == "__main__":
    main()
