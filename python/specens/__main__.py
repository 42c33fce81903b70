"""The command `specens`, also `python -m specens`: what holds before anything of it is loaded."""

import os
import signal
import sys
import time
from types import FrameType

from specens.cli import INTERRUPTED

DEAF_SECONDS = 2.0  # a second Ctrl-C so soon is the same one, and must not end what the first one still prints


def main() -> None:
    """Run the command line. Ctrl-C ends it with exit code 130 and no traceback, from the first import to the end."""
    try:
        if signal.getsignal(signal.SIGINT) is signal.default_int_handler:
            signal.signal(signal.SIGINT, _Interrupt())
        _open_what_is_closed()
        from specens.cli import bare

        missing = bare.missing_packages()
        if missing:
            sys.exit(bare.run(sys.argv[1:], missing))
        from specens.cli.main import main as run

        run()
    except KeyboardInterrupt:
        sys.stderr.write("interrupted\n")
        sys.exit(INTERRUPTED)
    finally:
        if isinstance(signal.getsignal(signal.SIGINT), _Interrupt):
            signal.signal(signal.SIGINT, signal.SIG_IGN)  # all is said, and Python ends


def _open_what_is_closed() -> None:
    """Let standard streams that the shell closed (`>&-`) be nowhere: else a file of ours would get their numbers."""
    for number, name in enumerate(("stdin", "stdout", "stderr")):
        if getattr(sys, name) is None:
            nowhere = os.open(os.devnull, os.O_RDWR)
            if nowhere != number:
                os.dup2(nowhere, number)
                os.close(nowhere)
            setattr(sys, name, os.fdopen(number, "r" if number == 0 else "w"))


class _Interrupt:
    """Python's own answer to Ctrl-C, but once in a while only."""

    def __init__(self) -> None:
        self._last = -DEAF_SECONDS

    def __call__(self, number: int, frame: FrameType | None) -> None:
        now = time.monotonic()
        if now - self._last >= DEAF_SECONDS:
            self._last = now
            signal.default_int_handler(number, frame)


if __name__ == "__main__":
    main()
