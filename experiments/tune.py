"""Which learning rate and which initial scale suit each kind of attention? As many tries for one as for the other.

    python -m experiments.tune --dataset=shakespeare
    python -m experiments.compare --dataset=shakespeare --tuned

First three learning rates, a factor of two apart, then at the best of them two more initial scales (init_std). Where
the best of any kind lies at an edge, all kinds try one more beyond it. The lowest mean of the final validation losses
wins. Seeds are others than those of comparisons, which so stay fresh.
"""

import math
import statistics
from dataclasses import asdict, dataclass, field, replace

from config import TrainConfig
from experiments import pm, training
from experiments.program import command
from experiments.training import TUNED, trained
from model import ATTENTIONS

FACTORS = (0.5, 1.0, 2.0)  # of what the settings say
MOST = 6  # values of a setting; the best may then lie at an edge


@dataclass
class TuneConfig:
    dataset: str = "stories"  # whatever train.py takes
    kinds: tuple[str, ...] = tuple(ATTENTIONS)
    seeds: int = 2  # runs of each try
    first_seed: int = 100  # of these runs; the others follow
    quick: bool = False  # one seed, a quarter of the updates
    jobs: int = 1  # runs at a time, each in a process of its own
    train: TrainConfig = field(default_factory=TrainConfig)  # what all runs share


def tune(cfg):
    """Trains what is missing. Returns {"settings", "seeds", "kinds": {kind: {"tries": [..], "best": {..}}}}."""
    training.check(cfg)
    cfg = training.shortened(cfg)
    base = cfg.train
    for kind in cfg.kinds:
        replace(base, attention=kind).check()
    seeds = range(cfg.first_seed, cfg.first_seed + cfg.seeds)
    best = {kind: replace(base, attention=kind) for kind in cfg.kinds}
    tries = {kind: {} for kind in cfg.kinds}

    def loss(arm):
        key, done = tuple(getattr(arm, name) for name in TUNED), tries[arm.attention]
        if key not in done:
            done[key] = [last_loss(cfg) for cfg in with_seeds(arm)]
        return score(done[key])

    def with_seeds(arm):
        return [replace(arm, seed=seed, data_seed=seed) for seed in seeds]

    for name in TUNED:
        values, beyond = [], [factor * getattr(base, name) for factor in FACTORS]
        while beyond and len(values) < MOST:
            values = sorted(values + beyond)
            ways = {kind: [replace(arm, **{name: v}) for v in values] for kind, arm in best.items()}
            training.ahead([cfg for arms in ways.values() for arm in arms for cfg in with_seeds(arm)], trials=True)
            best = {kind: min(arms, key=loss) for kind, arms in ways.items()}
            wins = [getattr(arm, name) for arm in best.values()]
            beyond = [values[0] / 2] * (values[0] in wins) + [values[-1] * 2] * (values[-1] in wins)
    kinds = {
        kind: {
            "tries": [{**dict(zip(TUNED, key)), "val_loss": losses} for key, losses in tries[kind].items()],
            "best": training.own(arm),
        }
        for kind, arm in best.items()
    }
    return {"settings": asdict(base), "seeds": list(seeds), "kinds": kinds}


def last_loss(cfg):
    """None for a run that diverged."""
    try:
        return trained(cfg)["val_loss"]
    except FloatingPointError as error:
        return print(error)


def score(losses):
    return math.inf if None in losses else statistics.fmean(losses)


def tables(numbers):
    """{name: rows}: a row for each try, the best marked, "at the edge" where better may lie beyond."""
    rows = [["attention", *TUNED, "validation loss", ""]]
    for kind, k in numbers["kinds"].items():
        for one in k["tries"]:
            best = all(one[name] == k["best"][name] for name in TUNED)
            edges = [name for name in TUNED if one[name] in (f([t[name] for t in k["tries"]]) for f in (min, max))]
            mark = "best" + f", at the edge of {' and '.join(edges)}" * bool(edges) if best else ""
            rows.append(
                [kind, *(f"{one[name]:g}" for name in TUNED), pm(one["val_loss"], "{:.4f}") or "diverged", mark]
            )
    return {"tries": rows}


def main():
    command(TuneConfig, tune, "tune", tables, None, __doc__)


if __name__ == "__main__":
    main()
