"""What a program is to the system that runs it: its streams, and the signals that end it. Imported before all else,
since torch takes seconds to import, and Ctrl-C is likely just then."""

import os
import signal
import sys
from contextlib import suppress


def begin(program):
    """Opens the standard streams that are closed, on nothing. From now on SIGINT and SIGTERM end this process with one
    line, not with a traceback or in silence."""
    for name in ("stdin", "stdout", "stderr"):
        if getattr(sys, name) is None:
            setattr(sys, name, open(os.devnull, "r" if name == "stdin" else "w"))

    def leave(signum, frame):
        with suppress(OSError, RuntimeError):  # nobody reads, or writing was what is interrupted
            sys.stdout.flush()
        with suppress(OSError):
            if os.environ.get("RANK", "0") == "0":  # one of torchrun's processes speaks
                line = f"\n{program}: stopped by signal {signum}; what was saved before is whole\n"
                os.write(2, line.encode())  # print does not start again within itself
        os._exit(128 + signum)  # an exception could be lost: torch, for one, swallows those of an import within

    for s in listened("SIGINT", "SIGTERM"):
        signal.signal(s, leave)


def listened(*names):
    """Those signals that this system has and that are not ignored, as SIGINT is in a shell's background jobs."""
    signals = [getattr(signal, name) for name in names if hasattr(signal, name)]
    return [s for s in signals if signal.getsignal(s) not in (signal.SIG_IGN, None)]


class StopOnSignal:
    """Within it, the first SIGINT, SIGTERM or SIGHUP (a closed terminal) only sets `signum`, so that the loop can save;
    a second one ends it at once."""

    def __enter__(self):
        self.signum, self.old = 0, {}
        try:
            self.old = {s: signal.signal(s, self.handle) for s in listened("SIGINT", "SIGTERM", "SIGHUP")}
        except ValueError:  # not in the main thread: signals are not ours to handle
            pass
        return self

    def handle(self, signum, frame):
        self.signum = signum
        self.__exit__()

    def __exit__(self, *_):
        for s, handler in self.old.items():
            signal.signal(s, handler)
