"""Which learning rate and which initial scale suit each kind of attention? As many tries for one as for the other.

    python -m experiments.tune --dataset=shakespeare
    python -m experiments.compare --dataset=shakespeare --tuned

First three learning rates, a factor of two apart, then at the best of them two more initial scales (init_std). The
lowest mean of the final validation losses wins. Seeds are others than those of comparisons, which so stay fresh.
"""

import math
import statistics
from dataclasses import asdict, dataclass, field, replace

import experiments
from config import TrainConfig
from experiments import TUNED, pm, trained
from model import ATTENTIONS

FACTORS = (0.5, 1.0, 2.0)  # of what the settings say


@dataclass
class TuneConfig:
    dataset: str = "stories"  # whatever train.py takes
    kinds: tuple[str, ...] = tuple(ATTENTIONS)
    seeds: int = 2  # runs of each try
    first_seed: int = 100  # of these runs; the others follow
    quick: bool = False  # one seed, a quarter of the updates
    train: TrainConfig = field(default_factory=TrainConfig)  # what all runs share


def tune(cfg):
    """Trains what is missing. Returns {"settings", "seeds", "kinds": {kind: {"tries": [..], "best": {..}}}}."""
    experiments.check(cfg)
    cfg = experiments.shortened(cfg)
    base = cfg.train
    for kind in cfg.kinds:
        replace(base, attention=kind).check()
    seeds, kinds = range(cfg.first_seed, cfg.first_seed + cfg.seeds), {}
    for kind in cfg.kinds:
        best, tries = replace(base, attention=kind), {}
        for name in TUNED:
            for factor in FACTORS:
                now = replace(best, **{name: factor * getattr(best, name)})
                key = tuple(getattr(now, tuned) for tuned in TUNED)
                if key not in tries:
                    print(f"\n--- {kind}, " + ", ".join(f"{n}={value:g}" for n, value in zip(TUNED, key)))
                    tries[key] = [last_loss(replace(now, seed=seed, data_seed=seed)) for seed in seeds]
            best = replace(best, **dict(zip(TUNED, min(tries, key=lambda key: score(tries[key])))))
        kinds[kind] = {
            "tries": [{**dict(zip(TUNED, key)), "val_loss": losses} for key, losses in tries.items()],
            "best": {name: getattr(best, name) for name in TUNED},
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
    experiments.command(TuneConfig, tune, "tune", tables, None, __doc__)


if __name__ == "__main__":
    main()
