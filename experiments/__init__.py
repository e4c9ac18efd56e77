"""Experiments: one question a file. Each prints a table and writes its numbers and its picture to results/.

What they share is here: trained runs kept by their settings, statistics over seeds, tables, result files.
"""

import hashlib
import inspect
import json
import math
import platform
import statistics
import sys
from dataclasses import asdict, replace
from pathlib import Path

import torch

import checkpoint
from config import need
from device import made_with, pick_device
from model import ATTENTIONS

RESULTS = Path(__file__).parent / "results"
RUNS = checkpoint.RUNS / "experiments"

# Settings that say where a run is and how it goes on, not what it computes.
PLACE = {"out_dir": "", "resume": False, "preset": "laptop"}

# The 97.5 % points of Student's t for 1, 2, .. degrees of freedom.
T_975 = [12.706, 4.303, 3.182, 2.776, 2.571, 2.447, 2.365, 2.306, 2.262]


def fingerprint(cfg):
    """A name for all that a run's numbers depend on: its settings, its text, the code, the kind of device."""
    root = Path(__file__).parent.parent
    digest = hashlib.sha256(json.dumps(asdict(replace(cfg, **PLACE)), sort_keys=True).encode())
    digest.update(pick_device(cfg.device).type.encode())
    code = [root / f"{name}.py" for name in ("model", "blocks", "train", "evaluate")]
    code.append(Path(inspect.getfile(ATTENTIONS[cfg.attention])))  # model.py again, or the experiment that adds it
    for file in (*code, *sorted(root.glob("data/*.py"))):
        digest.update(file.read_bytes())
    if Path(cfg.dataset).is_file():
        digest.update(Path(cfg.dataset).read_bytes())
    return f"{Path(cfg.dataset).stem}-{cfg.attention}-{digest.hexdigest()[:12]}"


def trained(cfg):
    """train(cfg) in a folder named by its fingerprint: done once, gone on with if it was interrupted, remembered."""
    from train import train

    run = RUNS / fingerprint(cfg)
    done = run / "result.json"
    if done.exists():
        print(f"remembered: {run}")
    else:
        result = train(replace(cfg, out_dir=str(run), resume=(run / "ckpt.pt").exists()))
        if "interrupted" in result:
            sys.exit(128 + result["interrupted"])
        text = json.dumps({**result, "commit": made_with(None)["commit"]})
        checkpoint.write(done, lambda file: file.write(text.encode()))
    return json.loads(done.read_text())


def check_seeds(seeds):
    """Raises ValueError with one sentence if there are too few, or more than T_975 has an entry for."""
    most = len(T_975) + 1
    need(1 <= seeds <= most, f"seeds={seeds} must be from 1 to {most}")


def models(base, kinds, seeds):
    """Yields (kind, seed, model, result): of each trained run its last weights, in eval mode, and its numbers.

    Trains what is missing: `base`, a TrainConfig, with this kind and seed, as experiments.compare does.
    """
    for kind in kinds:
        replace(base, attention=kind).check()  # all of them before the first is trained
    for seed in seeds:
        for kind in kinds:
            print(f"\n--- {kind}, seed {seed}")
            result = trained(replace(base, attention=kind, seed=seed, data_seed=seed))
            yield kind, seed, checkpoint.load_model(checkpoint.load(Path(result["out_dir"]) / "ckpt.pt")), result


def shortened(cfg):
    """Of an experiment's settings with --quick: one seed, a quarter of the updates."""
    if not cfg.quick:
        return cfg
    return replace(cfg, seeds=1, train=replace(cfg.train, max_iters=max(1, cfg.train.max_iters // 4)))


def mean_sd(values):
    """Mean and sample standard deviation (None for one value)."""
    return statistics.fmean(values), statistics.stdev(values) if len(values) > 1 else None


def paired(values, baseline):
    """Of the differences value - baseline, seed by seed: mean, standard deviation, half a 95 % confidence interval.

    The last two are None for one seed.
    """
    mean, sd = mean_sd([a - b for a, b in zip(values, baseline)])
    return mean, sd, None if sd is None else T_975[len(values) - 2] * sd / math.sqrt(len(values))


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
        raise ValueError(f"{path} does not exist: run python -m experiments.{name.split('-')[0]} first")
    return json.loads(path.read_text())


def command(kind, run, name, tables, picture, description):
    """The program of an experiment: its settings (a `kind`) from the command line; numbers, tables and a picture."""
    import tyro

    sys.stdout.reconfigure(errors="replace")
    cfg = tyro.cli(kind, description=description)
    try:
        numbers = json.loads(json.dumps(run(cfg)))
    except (ValueError, OSError, FloatingPointError) as error:
        sys.exit(f"{name}: {error}")
    name += "-quick" * cfg.quick
    save(RESULTS / f"{name}.json", numbers)
    picture(numbers, RESULTS / f"{name}.png")
    for rows in tables(numbers).values():
        print()
        print_table(rows)
    print(f"\n{RESULTS / name}.json, .png")
