"""Which learning rate and which initial scale suit each kind of attention? As many tries for one as for the other.

    python -m experiments.tune --dataset=shakespeare
    python -m experiments.compare --dataset=shakespeare --tuned

First three learning rates, a factor of two apart, then at the best of them two more initial scales (init_std). The
lowest mean of the final validation losses wins. Seeds are others than those of comparisons, which so stay fresh.
"""

from dataclasses import asdict, dataclass, field, replace
from pathlib import Path

import experiments
from config import PRESETS, TrainConfig, need
from experiments import mean_sd, print_table, trained
from model import ATTENTIONS

FACTORS = (0.5, 1.0, 2.0)  # of what the settings say
TUNED = ("learning_rate", "init_std")  # in this order


@dataclass
class TuneConfig:
    dataset: str = "stories"  # whatever train.py takes
    kinds: tuple[str, ...] = tuple(ATTENTIONS)
    seeds: int = 2  # runs of each try
    first_seed: int = 100  # of these runs; the others follow
    quick: bool = False  # one seed, a tenth of the steps: does it run?
    name: str = ""  # of the file in results/; empty means tune-DATASET
    train: TrainConfig = field(default_factory=TrainConfig)  # what all runs share


def tune(cfg):
    """Trains what is missing. Returns {"settings", "seeds", "kinds": {kind: {"tries": [..], "best": {..}}}}."""
    need(cfg.seeds >= 1, f"seeds={cfg.seeds} must be at least 1")
    base = replace(cfg.train, dataset=cfg.dataset)
    for kind in cfg.kinds:
        replace(base, attention=kind).check()
    if cfg.quick:
        base = replace(base, max_iters=base.max_iters // 10)
    seeds, kinds = range(cfg.first_seed, cfg.first_seed + (1 if cfg.quick else cfg.seeds)), {}
    for kind in cfg.kinds:
        best, tries = replace(base, attention=kind), {}
        for name in TUNED:
            for factor in FACTORS:
                now = replace(best, **{name: factor * getattr(best, name)})
                key = tuple(getattr(now, tuned) for tuned in TUNED)
                if key not in tries:
                    print(f"\n--- {kind}, " + ", ".join(f"{n}={value:g}" for n, value in zip(TUNED, key)))
                    runs = [trained(replace(now, seed=seed, data_seed=seed)) for seed in seeds]
                    tries[key] = [run["val_loss"] for run in runs]
            best = replace(best, **dict(zip(TUNED, min(tries, key=lambda key: mean_sd(tries[key])[0]))))
        kinds[kind] = {
            "tries": [{**dict(zip(TUNED, key)), "val_loss": losses} for key, losses in tries.items()],
            "best": {name: getattr(best, name) for name in TUNED},
        }
    return {"settings": asdict(base), "seeds": list(seeds), "kinds": kinds}


def best_of(kind, base):
    """`base`, a TrainConfig, with what was best for this kind. Raises ValueError if that was not tried like this."""
    name = f"tune-{Path(base.dataset).stem}"
    found = experiments.load(name)
    for setting, value in found["settings"].items():
        need(
            setting in ("attention", "seed", "data_seed") or getattr(base, setting) == value,
            f"{name}.json was made with {setting}={value!r}, not {getattr(base, setting)!r}: tune again, or leave out"
            " --tuned",
        )
    need(kind in found["kinds"], f"{name}.json has no attention={kind!r}: tune it too, or leave out --tuned")
    return replace(base, **found["kinds"][kind]["best"])


def table(numbers):
    """The rows that the terminal shows: a try each, the best marked, "edge" where better may lie beyond."""
    rows = [["attention", *TUNED, "validation loss", ""]]
    for kind, k in numbers["kinds"].items():
        for one in k["tries"]:
            best = all(one[name] == k["best"][name] for name in TUNED)
            edges = [name for name in TUNED if one[name] in (f([t[name] for t in k["tries"]]) for f in (min, max))]
            mark = "best" + f", at the edge of {' and '.join(edges)}" * bool(edges) if best else ""
            rows.append([kind, *(f"{one[name]:g}" for name in TUNED), f"{mean_sd(one['val_loss'])[0]:.4f}", mark])
    return rows


def main():
    import sys

    import tyro

    sys.stdout.reconfigure(errors="replace")
    try:
        first = tyro.cli(TuneConfig, description=__doc__)
        default = replace(TuneConfig(), train=replace(TrainConfig(), **PRESETS.get(first.dataset, {})))
        cfg = tyro.cli(TuneConfig, default=default, description=__doc__)
        numbers = tune(cfg)
    except (ValueError, OSError, FloatingPointError) as error:
        sys.exit(f"tune: {error}")
    name = cfg.name or f"tune-{Path(cfg.dataset).stem}" + ("-quick" if cfg.quick else "")
    experiments.save(experiments.RESULTS / f"{name}.json", numbers)
    print(f"\nmean over seeds {numbers['seeds']} ({name}.json)\n")
    print_table(table(numbers))


if __name__ == "__main__":
    main()
