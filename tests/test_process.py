"""A program's streams and signals. That a run is saved by a signal: test_train, and kills."""

import signal
import subprocess
import sys
import threading
from pathlib import Path

import pytest

from process import StopOnSignal, listened

ROOT = Path(__file__).parent.parent
# A signal at the moment when `module` is looked for: a moment that a clock would miss. And where exceptions get lost.
INTERRUPTED = """
import runpy, signal, sys

class Finder:
    def find_spec(self, name, path=None, target=None):
        if name == {module!r}:
            try:
                for _ in range({times}):
                    signal.raise_signal({sent})
            except BaseException:
                pass

sys.meta_path.insert(0, Finder())
sys.argv, sys.path[0] = [{program!r}, "--device=none"], {folder!r}
runpy.run_path({folder!r} + "/" + {program!r}, run_name="__main__")
"""


def interrupted(program, module, sent, folder, ignored=False, times=1, closed=""):
    """What a program says, and its exit status, if signals come when it imports a module."""
    script = INTERRUPTED.format(module=module, sent=int(sent), program=program, folder=str(ROOT), times=times)
    default = signal.default_int_handler if sent == signal.SIGINT else signal.SIG_DFL
    old = signal.signal(sent, signal.SIG_IGN if ignored else default)  # a process inherits what is ignored
    done = subprocess.run(
        ["sh", "-c", f'exec "$@" {closed}', "sh", sys.executable, "-c", script],
        capture_output=True, text=True, cwd=folder,
    )  # fmt: skip
    signal.signal(sent, old)
    return done


@pytest.mark.parametrize("program, module, sent", [
    ("train.py", "torch", signal.SIGINT), ("train.py", "tyro", signal.SIGTERM),
    ("sample.py", "torch", signal.SIGTERM), ("sample.py", "tyro", signal.SIGINT),
])  # fmt: skip
def test_a_signal_before_the_first_update_is_one_line(program, module, sent, tmp_path):
    done = interrupted(program, module, sent, tmp_path, times=2)
    assert done.returncode == 128 + sent, done.stderr
    assert done.stderr == f"\n{program}: stopped by signal {int(sent)}; what was saved before is whole\n"
    assert done.stdout == "" and not list(tmp_path.iterdir())


def test_a_signal_that_is_ignored_stays_so(tmp_path, monkeypatch):
    done = interrupted("sample.py", "torch", signal.SIGINT, tmp_path, ignored=True)
    assert done.returncode == 1 and "no run" in done.stderr and "signal" not in done.stderr, done.stderr
    ignored = {signal.SIGTERM: signal.SIG_IGN, signal.SIGINT: signal.default_int_handler}
    monkeypatch.setattr(signal, "getsignal", ignored.get)
    assert listened("SIGINT", "SIGTERM", "SIGHUP", "SIGNONE") == [signal.SIGINT]


@pytest.mark.parametrize("closed", ["<&- >&-", "<&- >&- 2>&-"])
def test_streams_may_be_closed(closed, tmp_path):
    done = interrupted("sample.py", "torch", signal.SIGTERM, tmp_path, closed=closed)
    assert done.returncode == 143 and ("stopped by" in done.stderr) == ("2>" not in closed), done.stderr
    done = interrupted("sample.py", "none", signal.SIGTERM, tmp_path, closed=closed)
    assert done.returncode == 1 and ("no run" in done.stderr) == ("2>" not in closed), done.stderr
    assert "Traceback" not in done.stderr and not done.stdout


def test_signals_are_not_taken_from_another_thread():
    before, seen = signal.getsignal(signal.SIGINT), []

    def within():
        with StopOnSignal() as stop:
            seen.append((stop.signum, signal.getsignal(signal.SIGINT)))

    thread = threading.Thread(target=within)
    thread.start()
    thread.join()
    assert seen == [(0, before)] and signal.getsignal(signal.SIGINT) == before
