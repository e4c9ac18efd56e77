"""The command line of an experiment."""

import json
import sys
import time
from dataclasses import replace
from pathlib import Path

import experiments
from config import PRESETS, TrainConfig, need
from experiments import print_table, save
from experiments.training import REMEMBERED, helpers

# Settings of an experiment that the name of its result says, or the result itself: how many seeds, and which.
SHOWN = "dataset seeds first_seed tuned quick jobs name".split()


def command(kind, run, name, tables, picture, description):
    """The program of an experiment: its settings (a `kind`) from the command line; numbers, tables and a picture.

    With a --dataset, the settings that runs share begin with that dataset's preset.
    """
    import tyro

    sys.stdout.reconfigure(errors="replace")
    start = time.perf_counter()
    try:
        default, prog = kind(), f"python -m experiments.{name}"
        cfg = tyro.cli(kind, prog=prog, description=description)
        if hasattr(cfg, "dataset"):
            default = replace(default, train=replace(TrainConfig(), **PRESETS.get(cfg.dataset, {})))
            cfg = tyro.cli(kind, prog=prog, default=default, description=description)
            name += f"-{Path(cfg.dataset).stem}"
        same = {setting: getattr(cfg, setting) for setting in SHOWN if hasattr(cfg, setting)}
        name += "-changed" * (cfg != replace(default, **same))  # no result of the settings that a reader expects
        own = getattr(cfg, "name", "")
        need(own == Path(own).name, f"name={own!r} must be the name of a file, without a folder")
        with helpers(run, cfg):
            numbers = json.loads(json.dumps(run(cfg)))
    except (ValueError, OSError, FloatingPointError, MemoryError) as error:
        sys.exit(f"{name}: {error}")
    except KeyboardInterrupt:
        print("stopped: the same command goes on from here")
        sys.exit(130)
    name = own or name + "-tuned" * getattr(cfg, "tuned", False) + "-quick" * cfg.quick
    minutes = round((time.perf_counter() - start + sum(REMEMBERED.values())) / 60, 1)
    save(experiments.RESULTS / f"{name}.json", {"minutes": minutes, **numbers})
    if picture:
        picture(numbers, experiments.RESULTS / f"{name}.png")
    for rows in tables(numbers).values():
        print()
        print_table(rows)
    print(f"\nmean ± sd over seeds {numbers['seeds']}; differences: mean of the pairs ± half a 95 % interval")
    print(f"experiments/results/{name}.json")
