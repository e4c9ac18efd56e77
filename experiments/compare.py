"""Which kind of attention has the lower validation loss: same text, batches, parameters and steps?

    python -m experiments.compare --dataset=stories         # the quick start's settings
    python -m experiments.compare --dataset=shakespeare     # nanoGPT's CPU recipe, on ten plays
    python -m experiments.compare --dataset=shakespeare --tuned     # each kind at what experiments.tune found for it
    python -m experiments.compare --dataset=my.txt --train.max_iters=500 --seeds=3

Every kind is trained once a seed; runs of one seed share their batches and, where kinds share weights, the
initial values, and are compared in pairs. Any setting of train.py can be changed with --train.NAME.
"""

import statistics
from dataclasses import dataclass, field
from pathlib import Path

import experiments
from config import TrainConfig
from experiments import against, pm, training
from experiments.program import command
from model import ATTENTIONS

EACH = ("val_loss", "answers", "lambdas", "history", "tokens_per_s", "threads", "seconds")  # what is kept of each run


@dataclass
class CompareConfig:
    dataset: str = "stories"  # whatever train.py takes
    kinds: tuple[str, ...] = tuple(ATTENTIONS)  # the first is what the others are compared with
    seeds: int = 5  # runs of each kind
    first_seed: int = training.FIRST_SEED  # of these runs; the others follow
    tuned: bool = False  # each kind's own learning rate and initial scale, from tune-DATASET.json
    quick: bool = False  # one seed, a quarter of the updates
    jobs: int = 1  # runs at a time, each in a process of its own
    name: str = ""  # of the files in results/; empty means compare-DATASET, and -changed with other settings
    train: TrainConfig = field(default_factory=TrainConfig)  # what all runs share


def compare(cfg):
    """Trains what is missing. Returns {"settings", "seeds", "baseline", "kinds": {kind: numbers}}, plain types."""
    training.check(cfg)
    cfg = training.shortened(cfg)
    seeds = range(cfg.first_seed, cfg.first_seed + cfg.seeds)
    arms, runs = training.arms(cfg.train, cfg.kinds, cfg.tuned), {kind: [] for kind in cfg.kinds}
    for kind, _, result in training.runs(arms, seeds):
        runs[kind].append(result)
    numbers = {"settings": vars(cfg.train), "seeds": list(seeds), "baseline": cfg.kinds[0], "kinds": {}}
    for kind, results in runs.items():
        numbers["kinds"][kind] = {
            **training.own(arms[kind]),
            **{name: results[0][name] for name in ("params", "entropy")},
            **{name: [r.get(name) for r in results] for name in EACH},
        }
    return numbers


def half_right(history):
    """The update from which on at least half of the answers were right, None if there is none."""
    wrong = [step for step, _, answers in history if answers < 0.5]
    return min((step for step, _, _ in history if step > max(wrong, default=-1)), default=None)


def reached(history, loss):
    """The update at which a validation curve first comes down to a loss, between its points; None if it does not."""
    points = [(step, val_loss) for step, val_loss, _ in history]
    if points and points[0][1] <= loss:
        return points[0][0]
    for (step, before), (later, after) in zip(points, points[1:]):
        if after <= loss:
            return later if before <= after else step + (later - step) * min(1, (before - loss) / (before - after))
    return None


def share(run, baseline):
    """The updates that a run takes to the last loss of the baseline's, for each that the baseline takes; or None."""
    update, theirs = (reached(history, baseline[-1][1]) for history in (run, baseline))
    return update / theirs if theirs and update is not None else None


def sooner(runs, baseline):
    """The same, pair by pair, as text."""
    shares = [share(run, other) for run, other in zip(runs, baseline)]
    there = [s for s in shares if s is not None]
    return pm(shares, "{:.0%}") if len(there) == len(runs) else f"{len(there)} of {len(runs)} get there"


def tables(numbers):
    """{name: rows} of what the terminal and the README show."""
    kinds, baseline = numbers["kinds"], numbers["baseline"]
    asks = kinds[baseline]["answers"][0] is not None
    alike = len({n for k in kinds.values() for n in k.get("threads", [])}) < 2  # else no speed says anything
    columns = ["attention", "parameters", "seeds", "validation loss"]
    beside = [f"difference to {baseline}", "updates to its loss"] * (len(kinds) > 1)
    rows = [columns + beside + ["answers right", "half right at"] * asks + ["tokens/s"]]
    for kind, k in kinds.items():
        row = [kind, f"{k['params']:,}", str(len(k["val_loss"])), pm(k["val_loss"], "{:.4f}")]
        if kind != baseline:
            row.append(against(k["val_loss"], kinds[baseline]["val_loss"], "{:.4f}"))
            row.append(sooner(k["history"], kinds[baseline]["history"]))
        elif len(kinds) > 1:
            row += ["", ""]
        if asks:
            row.append(", ".join(f"{a:.0%}" if a in (0, 1) else f"{a:.1%}" for a in k["answers"]))
            row.append(", ".join(str(half_right(run) or "never") for run in k["history"]))
        speeds = [speed for speed in k["tokens_per_s"] if speed]  # none: gone on with at its end
        rows.append([*row, f"{statistics.median(speeds):,.0f}" if speeds and alike else ""])
    return {"losses": rows}


def picture(numbers, path):
    """Loss curves: the mean over seeds, and a band from the lowest to the highest."""
    with experiments.drawing(path, (6, 3.6)) as axes:
        for kind, k in numbers["kinds"].items():
            steps = [step for step, _, _ in k["history"][0]][1:]
            experiments.band(axes, steps, [[loss for _, loss, _ in run][1:] for run in k["history"]], label=kind)
        if k["entropy"] is not None:
            axes.axhline(k["entropy"], color="grey", linestyle=":", label="entropy of the text")
        axes.set(xlabel="updates", ylabel="validation loss, nats a token")
        axes.set_title(Path(numbers["settings"]["dataset"]).stem)
        axes.legend()


def main():
    command(CompareConfig, compare, "compare", tables, picture, __doc__)


if __name__ == "__main__":
    main()
