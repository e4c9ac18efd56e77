"""How does the loss of each kind fall with the number of parameters, and how many fewer would be enough for the same?

    python -m experiments.scaling --tuned      # five widths, 50 thousand to 0.8 million parameters
    python -m experiments.scaling --widths 128 256 384 --train.max_iters=5000     # on a GPU

The paper's first figure at a hundred thousandth of the parameters, on the text and with the steps of the preset
shakespeare. For each seed a line loss = a - b log(parameters) is drawn through the baseline; where another kind's loss
at a size lies on it says how many parameters the baseline needs for that. Five sizes within a factor of sixteen do not
say where the lines go beyond them: the fit is a ruler here, no law. All sizes of a kind share one learning rate. With
--tuned it is what experiments.tune found for the kind at the preset's own width, and at each other width the initial
scale is tuned too, on a seed of its own: which one is best changes with width, and by more than the kinds differ.
"""

import math
from dataclasses import asdict, dataclass, field, replace
from functools import partial

import numpy as np

import experiments
from config import TrainConfig, need
from experiments import paired, pm, training, tune
from experiments.program import command
from model import ATTENTIONS


@dataclass
class ScalingConfig:
    kinds: tuple[str, ...] = tuple(ATTENTIONS)  # the first is what the others are compared with
    widths: tuple[int, ...] = (32, 48, 64, 96, 128)  # channels, in heads of 16 or 24
    seeds: int = 3  # runs of each
    first_seed: int = training.FIRST_SEED  # of these runs
    tuned: bool = False  # each kind's own learning rate from tune-shakespeare.json, and initial scale at each width
    quick: bool = False  # one seed, a quarter of the updates
    jobs: int = 1  # runs at a time, each in a process of its own
    train: TrainConfig = field(default_factory=partial(training.preset, "shakespeare"))  # what all runs share


def scaling(cfg):
    """{"train", "seeds", "widths", "kinds": {kind: {"learning_rate", "init_std": [a width's], "params": [a width's],
    "val_loss": [[a width's] of a seed]}}}"""
    training.check(cfg, "n_embd", "n_head")
    need(len(set(cfg.widths)) > 2, f"widths={cfg.widths}: a line through losses needs at least 3 different ones")
    need(len(set(cfg.widths)) == len(cfg.widths), f"widths={cfg.widths}: each of them once")
    cfg = training.shortened(cfg)
    seeds = range(cfg.first_seed, cfg.first_seed + cfg.seeds)
    arms, kinds = training.arms(cfg.train, cfg.kinds, cfg.tuned), {}
    for kind, arm in arms.items():
        kinds[kind] = {
            "learning_rate": arm.learning_rate,
            "init_std": [],
            "params": [],
            "val_loss": [[] for _ in seeds],
        }
    shapes = [dict(n_embd=width, n_head=2 * max(1, width // 32)) for width in cfg.widths]
    sizes = {(kind, shape["n_embd"]): replace(arm, **shape) for shape in shapes for kind, arm in arms.items()}
    for arm in sizes.values():
        arm.check()  # all of them before the first is trained
    if cfg.tuned:
        sizes |= tuned({size: arm for size, arm in sizes.items() if arm.n_embd != cfg.train.n_embd})
    for (kind, _), arm in sizes.items():
        kinds[kind]["init_std"].append(arm.init_std)
    for (kind, _), seed, result in training.runs(sizes, seeds):
        kinds[kind]["val_loss"][seed - cfg.first_seed].append(result["val_loss"])
        kinds[kind]["params"] += [result["params"]] * (seed == cfg.first_seed)
    return {"train": asdict(cfg.train), "seeds": list(seeds), "widths": list(cfg.widths), "kinds": kinds}


def tuned(arms):
    """{size: TrainConfig}, each with the initial scale that is best by the last loss of a run with the first seed of
    tuning: of a few, and of those beyond while the best lies at an edge."""
    seed = tune.TuneConfig().first_seed
    losses = {size: {} for size in arms}
    tries = {size: [factor * arm.init_std for factor in tune.FACTORS] for size, arm in arms.items()}
    while any(tries.values()):
        runs = [
            (size, replace(arms[size], init_std=std, seed=seed, data_seed=seed)) for size in arms for std in tries[size]
        ]
        training.ahead([run for _, run in runs], trials=True)
        for size, run in runs:
            losses[size][run.init_std] = tune.score([tune.last_loss(run)])
        tries = {size: beyond(found) for size, found in losses.items()}
    return {size: replace(arm, init_std=min(losses[size], key=losses[size].get)) for size, arm in arms.items()}


def beyond(losses):
    """Of {init_std: loss}, the next to try: what lies beyond an edge that is the best so far."""
    best = min(losses, key=losses.get)
    at_edge = best in (min(losses), max(losses)) and math.isfinite(losses[best])
    return [std for std in (best / 2, best * 2) if at_edge and std not in losses]


def line(params, losses):
    """(a, b, off): of loss = a - b log(params) by least squares, and the largest distance of a loss from it."""
    x = np.log(params)
    slope, a = np.polyfit(x, losses, 1)
    return a, -slope, np.abs(a + slope * x - losses).max()


def needed(numbers, kind):
    """For each seed: the parameters that `kind` takes for what the baseline takes 1 for, geometric mean over sizes.

    None if the baseline's loss does not fall with size.
    """
    baseline, k = numbers["kinds"][next(iter(numbers["kinds"]))], numbers["kinds"][kind]
    shares = []
    for own, other in zip(k["val_loss"], baseline["val_loss"]):
        a, b, _ = line(baseline["params"], other)
        if b <= 0:  # the loss does not fall with size: there is nothing to read off
            return None
        wanted = (a - np.array(own)) / b  # log of the parameters with which the baseline has these losses
        shares.append(math.exp(np.mean(np.log(k["params"]) - wanted)))
    return shares


def said(shares):
    """Text of what `needed` found."""
    if shares is None:
        return "the baseline's loss does not fall with size"
    mean, _, half = paired(np.log(shares), [0.0] * len(shares))
    if half is None:
        return f"{math.exp(mean):.0%} (one seed says nothing)"
    low, high = math.exp(mean - half), math.exp(mean + half)
    return f"{math.exp(mean):.0%} ({low:.0%} to {high:.0%})" + " (not distinguishable)" * (abs(mean) <= half)


def tables(numbers):
    """{name: rows} of what the terminal and the README show."""
    rows = [
        ["validation loss", *(f"{width} wide" for width in numbers["widths"]), "falls by, if doubled", "off the line"]
    ]
    baseline, equal = next(iter(numbers["kinds"])), [["parameters for equal loss", "of the baseline's"]]
    scales = [["init_std", *rows[0][1:-2]]]
    for kind, k in numbers["kinds"].items():
        scales.append([kind, *(f"{std:g}" for std in k["init_std"])])
        fits = [line(k["params"], losses) for losses in k["val_loss"]]
        cells = [pm(losses) for losses in zip(*k["val_loss"])]
        rows.append([kind, *cells, pm([b * math.log(2) for _, b, _ in fits]), f"{max(off for *_, off in fits):.3f}"])
        if kind != baseline:
            equal.append([kind, said(needed(numbers, kind))])
    return {"losses": rows, "scales": scales} | ({"equal": equal} if len(equal) > 1 else {})


def picture(numbers, path):
    with experiments.drawing(path, (5, 3.6)) as axes:
        for kind, k in numbers["kinds"].items():
            (drawn,) = axes.plot(k["params"], np.mean(k["val_loss"], axis=0), "o", label=kind)
            for own in k["val_loss"]:
                a, b, _ = line(k["params"], own)
                axes.plot(k["params"], a - b * np.log(k["params"]), color=drawn.get_color(), alpha=0.3)
        axes.set(xscale="log", xlabel="parameters", ylabel="validation loss, nats a token")
        axes.set_xticks(k["params"], [f"{n / 1000:,.0f} K" for n in k["params"]])
        axes.minorticks_off()
        axes.legend()


def main():
    command(ScalingConfig, scaling, "scaling", tables, picture, __doc__)


if __name__ == "__main__":
    main()
