"""Signals that end a program. That a run is saved by them: test_train, and kills."""

import signal
import subprocess
import sys
import threading
from pathlib import Path

import pytest

from signals import StopOnSignal

ROOT = Path(__file__).parent.parent

# A signal at the moment when `module` is about to be imported: a moment that a clock would miss.
INTERRUPTED = """
import runpy, signal, sys

class Finder:
    def find_spec(self, name, path=None, target=None):
        if name == {module!r}:
            signal.raise_signal({sent})

sys.meta_path.insert(0, Finder())
sys.argv, sys.path[0] = [{program!r}], {folder!r}
runpy.run_path({folder!r} + "/" + {program!r}, run_name="__main__")
"""


@pytest.mark.parametrize("program", ["train.py", "sample.py"])
@pytest.mark.parametrize("module", ["torch", "tyro"])
@pytest.mark.parametrize("sent, code", [(signal.SIGINT, 130), (signal.SIGTERM, 143)])
def test_a_signal_before_the_first_update_is_one_line(program, module, sent, code, tmp_path):
    script = INTERRUPTED.format(module=module, sent=int(sent), program=program, folder=str(ROOT))
    old = signal.signal(sent, signal.default_int_handler if sent == signal.SIGINT else signal.SIG_DFL)
    done = subprocess.run([sys.executable, "-c", script], capture_output=True, text=True, cwd=tmp_path)
    signal.signal(sent, old)
    assert done.returncode == code, done.stderr
    assert done.stderr == f"\n{program}: stopped by signal {int(sent)}; what was saved before is whole\n"
    assert done.stdout == "" and not list(tmp_path.iterdir())


def test_signals_are_not_taken_from_another_thread():
    before, seen = signal.getsignal(signal.SIGINT), []

    def within():
        with StopOnSignal() as stop:
            seen.append((stop.signum, signal.getsignal(signal.SIGINT)))

    thread = threading.Thread(target=within)
    thread.start()
    thread.join()
    assert seen == [(0, before)] and signal.getsignal(signal.SIGINT) == before
