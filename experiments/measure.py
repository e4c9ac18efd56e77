"""Time and memory, measured so that they can be compared: in turns, by medians, each peak in a process of its own.

A machine that others use slows all turns alike. Nothing but torch is needed here.
"""

import subprocess
import sys
import time
from pathlib import Path

import torch

DEVICE = "cuda" if torch.cuda.is_available() else "cpu"
GPU = torch.cuda.get_device_name() if DEVICE == "cuda" else ""


def mixed_precision():
    """As train.py has it: bfloat16 on a GPU, float32 on a CPU."""
    return torch.autocast(DEVICE, torch.bfloat16, enabled=DEVICE == "cuda")


def clock():
    """Seconds, once the device has done all it was given."""
    if DEVICE == "cuda":
        torch.cuda.synchronize()
    return time.perf_counter()


def interleaved(turns, rounds, warm_up=2):
    """turns: {name: function -> seconds, or a tuple of them}. {name: median, or a tuple of medians}."""
    taken = {name: [] for name in turns}
    for i in range(warm_up + rounds):
        for name, turn in turns.items():
            seconds = turn()
            if i >= warm_up:
                taken[name].append(seconds)
    return {name: torch.tensor(s).median(dim=0).values.tolist() for name, s in taken.items()}


def peak_mib(warm_up, run):
    """What `run` adds to the peak memory of this process, in MiB, after something small that loads what it needs."""

    def peak():
        if DEVICE == "cuda":
            return torch.cuda.max_memory_allocated() / 2**20
        with open("/proc/self/status") as status:  # Linux
            return next(int(line.split()[1]) for line in status if line.startswith("VmHWM")) / 2**10

    warm_up()
    before = peak()
    run()
    return peak() - before


def afresh(function, *args):
    """function(*args), a number, in a process of its own. The arguments are such that Python can read their repr."""
    module = sys.modules[function.__module__].__spec__.name  # also where it is run as __main__
    code = f"from model import GPTConfig; from {module} import *; print({function.__name__}(*{args!r}))"
    command = [sys.executable, "-c", code]
    root = Path(__file__).parents[1]
    return float(subprocess.run(command, cwd=root, capture_output=True, text=True, check=True).stdout)
