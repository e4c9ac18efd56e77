"""Signals that end a program: Ctrl-C, a scheduler's SIGTERM, a closed terminal. Imported before torch, which takes
seconds to import: Ctrl-C is likely just then."""

import os
import signal
import sys


def end_in_a_line(program):
    """From now on SIGINT and SIGTERM end this process with one line, not with a traceback or in silence."""

    def leave(signum, frame):
        line = f"\n{program}: stopped by signal {signum}; what was saved before is whole\n"
        os.write(2, line.encode())  # print could be what is interrupted, and refuses to start again
        sys.exit(128 + signum)

    for s in (signal.SIGINT, signal.SIGTERM):
        if signal.getsignal(s) != signal.SIG_IGN:  # as a shell's background jobs ignore Ctrl-C
            signal.signal(s, leave)


class StopOnSignal:
    """Within it, the first SIGINT, SIGTERM or SIGHUP (a closed terminal, unless nohup has it ignored) only sets
    `signum`, so that the loop can save; a second one ends it at once."""

    def __enter__(self):
        self.signum, self.old, signals = 0, {}, [signal.SIGINT, signal.SIGTERM]
        if hasattr(signal, "SIGHUP") and signal.getsignal(signal.SIGHUP) != signal.SIG_IGN:
            signals.append(signal.SIGHUP)
        try:
            self.old = {s: signal.signal(s, self.handle) for s in signals}
        except ValueError:  # not in the main thread: signals are not ours to handle
            pass
        return self

    def handle(self, signum, frame):
        self.signum = signum
        self.__exit__()

    def __exit__(self, *_):
        for s, handler in self.old.items():
            signal.signal(s, handler)
