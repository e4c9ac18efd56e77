"""Experiments: one question a file. Each prints a table and writes its numbers and its picture to results/.

What they share is here, in training.py (trained runs, kept by their settings) and in program.py (the command line).
"""

import json
import math
import platform
import statistics
from contextlib import contextmanager
from pathlib import Path

import numpy as np
import torch

import checkpoint
from device import made_with

ROOT = Path(__file__).parent.parent
RESULTS = Path(__file__).parent / "results"

# The 97.5 % points of Student's t for 1, 2, .. degrees of freedom.
T_975 = [12.706, 4.303, 3.182, 2.776, 2.571, 2.447, 2.365, 2.306, 2.262]


def mean_sd(values):
    """Mean and sample standard deviation (None for one value)."""
    return statistics.fmean(values), statistics.stdev(values) if len(values) > 1 else None


def paired(values, baseline):
    """Of the differences value - baseline, seed by seed: mean, standard deviation, half a 95 % confidence interval.

    The last two are None for one seed.
    """
    mean, sd = mean_sd([a - b for a, b in zip(values, baseline)])
    return mean, sd, None if sd is None else T_975[len(values) - 2] * sd / math.sqrt(len(values))


def pm(values, form="{:.3f}"):
    """Mean ± standard deviation, as text; "" if a value is missing."""
    if None in values:
        return ""
    mean, sd = mean_sd(values)
    return form.format(mean) + ("" if sd is None else " ± " + form.format(sd))


def against(values, baseline, form="{:.3f}"):
    """The difference of pairs ± half a 95 % interval, as text, and whether that says anything."""
    if None in (*values, *baseline):
        return ""
    mean, _, half = paired(values, baseline)
    told = ("+" if mean >= 0 else "-") + form.format(abs(mean))
    if half is None:
        return told + " (one seed says nothing)"
    return f"{told} ± {form.format(half)}" + " (not distinguishable)" * (abs(mean) <= half)


def print_table(rows):
    """Rows of strings, the first one the header, as a Markdown table in even columns."""
    widths = [max(map(len, column)) for column in zip(*rows)]
    for i, row in enumerate(rows):
        print("| " + " | ".join(cell.ljust(width) for cell, width in zip(row, widths)) + " |")
        if i == 0:
            print("|" + "|".join("-" * (width + 2) for width in widths) + "|")


def save(path, numbers):
    """Writes the numbers, and what they were measured with, to a .json file."""
    machine = torch.cuda.get_device_name() if torch.cuda.is_available() else cpu_name()
    text = json.dumps({"made_with": made_with(machine), **numbers}, indent=1)
    path.parent.mkdir(parents=True, exist_ok=True)
    checkpoint.write(path, lambda file: file.write(text.encode() + b"\n"))


def cpu_name():
    try:
        lines = Path("/proc/cpuinfo").read_text().splitlines()
        return next(line.split(":")[1].strip() for line in lines if line.startswith("model name"))
    except (OSError, StopIteration):
        return platform.processor() or platform.machine()


def load(name):
    """The numbers of results/NAME.json. Raises ValueError with one sentence if they are not there."""
    path = RESULTS / f"{name}.json"
    if not path.exists():
        raise ValueError(f"{path.name} does not exist: run {how(name)} first (without --quick)")
    return json.loads(path.read_text())


@contextmanager
def drawing(path, size, columns=1, **more):
    """The axes of a new picture, which is written to `path` at the end."""
    import matplotlib.pyplot as plt

    figure, axes = plt.subplots(1, columns, figsize=size, layout="constrained", **more)
    yield axes
    figure.savefig(path, dpi=150)
    plt.close(figure)


def band(axes, x, runs, **more):
    """A line, the mean of runs (each a list of y), and a band from the lowest to the highest."""
    (line,) = axes.plot(x, np.mean(runs, axis=0), **more)
    axes.fill_between(x, np.min(runs, axis=0), np.max(runs, axis=0), color=line.get_color(), alpha=0.2)


def how(name):
    """The command that makes a result: "compare-shakespeare-tuned" -> "python -m experiments.compare --dataset=..."."""
    experiment, *rest = name.split("-")
    flags = [f"--dataset={part}" if part != "tuned" else "--tuned" for part in rest]
    return " ".join([f"python -m experiments.{experiment}", *flags])
