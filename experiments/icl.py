"""Labels whose meaning only the context gives: does the model learn them, with how many examples, and in any order?

    python -m experiments.icl --tuned
    python -m experiments.icl --quick

The paper's many-shot classification and its robustness to the order of examples (section 3.5). A word belongs to one
of a few classes, always; which label a class has is new in every text: "owl red. saw blue. hen red. .." A model must
learn the classes from its training and the labels from the examples before. For the order, the same examples stand in
many orders, at random, class by class, or with the classes in turn (the paper's other one), before the same questions:
the spread is the accuracy of the best order minus that of the worst, the mean over sets of examples.
"""

import hashlib
import json
import random
import statistics
from dataclasses import asdict, dataclass, field, replace
from functools import partial

import numpy as np
import torch

import checkpoint
import experiments
from config import TrainConfig, need
from data import tokenizers
from experiments import against, pm, training, tune
from experiments.program import command
from model import ATTENTIONS

CLASSES = {
    "animal": "ape bat cat cow dog fox hen owl".split(),
    "tool": "awl axe bit fan gun jig saw vat".split(),
    "food": "bun egg fig ham jam nut pea pie".split(),
    "cloth": "bib cap fur hat hem rag tie wig".split(),
}
LABELS = "red blue grey gold pink teal lime rust".split()
ITEMS = [(word, name) for name, members in CLASSES.items() for word in members]
SORTS = ("random", "by class", "in turn")  # of orders: any, AABBCCDD, ABCDABCD
SHOTS = (0, 1, 2, 4, 8, 16, 31)  # examples before the one that is scored


@dataclass
class IclConfig:
    kinds: tuple[str, ...] = tuple(ATTENTIONS)  # the first is what the others are compared with
    seeds: int = 3  # models of each kind
    first_seed: int = training.FIRST_SEED  # of these models
    texts: int = 50000  # to train on
    texts_asked: int = 200  # in which every label is asked for
    examples: int = 8  # of a set whose order is changed, equally many of each class
    sets: int = 10  # of examples, each with labels of its own; of each set, all other words are asked for
    orders: int = 10  # of each set, of each sort
    tuned: bool = False  # each kind's own learning rate and initial scale, tried out first, as experiments.tune does
    quick: bool = False  # one seed, a quarter of the updates
    jobs: int = 1  # runs at a time, each in a process of its own
    # of the models: with two heads some of any kind are still learning at the end
    train: TrainConfig = field(default_factory=partial(TrainConfig, n_head=4, max_iters=3000, emb_std=0.5))


def episode(draw, shots):
    """[(word, label), ..]: a text's examples. `draw`: a random.Random."""
    labels = dict(zip(CLASSES, draw.sample(LABELS, len(CLASSES))))
    return [(word, labels[name]) for word, name in draw.choices(ITEMS, k=shots)]


def text(examples):
    return " ".join(f"{word} {label}." for word, label in examples)


def tokenizer():
    words = {word for word, _ in ITEMS} | set(LABELS)
    return tokenizers.BPETokenizer.of_words(sorted({*words, *(f" {word}" for word in words)}))


def prepare(count):
    """A folder of token files for train.py, in the runs' folder: made once, named by a hash of what is in it."""
    texts = {"train": random.Random(1), "val": random.Random(2)}
    lines = {s: [text(episode(draw, SHOTS[-1] + 1)) + "\n" for _ in range(count)] for s, draw in texts.items()}
    lines["val"] = lines["val"][:1000]
    key = hashlib.sha256("".join(lines["train"]).encode()).hexdigest()[:12]
    folder, words = training.RUNS / f"icl-{key}", tokenizer()
    if not (folder / "meta.json").exists():  # written last
        folder.mkdir(parents=True, exist_ok=True)
        for split, told in lines.items():
            ids = words.encode("".join(told))
            checkpoint.write(folder / f"{split}.bin", lambda file, ids=ids: file.write(ids.tobytes()))
        meta = json.dumps({"tokenizer": words.to_dict(), "lines": True}).encode()
        checkpoint.write(folder / "meta.json", lambda file: file.write(meta))
    return folder


@torch.no_grad()
def right(model, words, texts):
    """(texts, shots) True where an example's label is the likeliest next token. Texts of equally many examples."""
    ids = torch.from_numpy(np.stack([words.encode("\n" + text(examples)) for examples in texts]).astype(np.int64))
    assert ids.shape[1] == 1 + 3 * len(texts[0]), f"{ids.shape} tokens"
    predicted = model(ids[:, :-1])[0].argmax(dim=-1)
    return (predicted[:, 1::3] == ids[:, 2::3]).numpy()


def by_shots(model, words, questions):
    """For each of SHOTS the share of right labels, whether or not the class has been seen."""
    draw = random.Random(3)
    found = right(model, words, [episode(draw, SHOTS[-1] + 1) for _ in range(questions)])
    return found[:, list(SHOTS)].mean(axis=0).tolist()


def by_order(model, words, sets, examples, orders):
    """{"random": [(best, worst, mean) of a set], "by class": .., ..}: accuracies of orders, on the same questions."""
    draw, each = random.Random(4), examples // len(CLASSES)
    found = {sort: [] for sort in SORTS}
    for _ in range(sets):
        labels = dict(zip(CLASSES, draw.sample(LABELS, len(CLASSES))))
        shown = {name: [(word, labels[name]) for word in draw.sample(m, each)] for name, m in CLASSES.items()}
        flat = [example for of_class in shown.values() for example in of_class]
        asked = [(word, labels[name]) for word, name in ITEMS if (word, labels[name]) not in flat]
        for sort, accuracies in found.items():
            of_orders = []
            for _ in range(orders):
                groups = [draw.sample(shown[name], each) for name in draw.sample(list(shown), len(shown))]
                order = draw.sample(flat, len(flat))
                if sort != "random":
                    order = [example for group in (groups if sort == "by class" else zip(*groups)) for example in group]
                of_orders.append(float(right(model, words, [[*order, question] for question in asked])[:, -1].mean()))
            accuracies.append((max(of_orders), min(of_orders), sum(of_orders) / orders))
    return found


def icl(cfg):
    """{"train", "tuning", "seeds", "kinds": {kind: {"shots": [a seed's], "orders": [a seed's], "val_loss"}}}"""
    training.check(cfg, "block_size")
    for name in ("texts", "texts_asked", "sets", "orders"):
        need(getattr(cfg, name) >= 1, f"{name}={getattr(cfg, name)} must be at least 1")
    most, unit = min(map(len, CLASSES.values())) - 1, len(CLASSES)
    need(
        cfg.examples % unit == 0 and unit <= cfg.examples <= unit * most,
        f"examples={cfg.examples} must be a multiple of {unit}, up to {unit * most}: use {2 * unit}",
    )
    words, folder = tokenizer(), prepare(cfg.texts)
    shared = replace(cfg.train, dataset=str(folder), block_size=3 * (SHOTS[-1] + 1) + 1)
    cfg = training.shortened(replace(cfg, train=shared))
    arms, found = training.arms(cfg.train, cfg.kinds), {}
    if cfg.tuned:
        found = tune.tune(tune.TuneConfig(dataset=str(folder), kinds=cfg.kinds, seeds=1, train=cfg.train))
        arms = {kind: replace(arm, **found["kinds"][kind]["best"]) for kind, arm in arms.items()}
    seeds, kinds = range(cfg.first_seed, cfg.first_seed + cfg.seeds), {}
    for kind, _, model, result in training.models(arms, seeds):
        k = kinds.setdefault(kind, {"shots": [], "orders": [], "val_loss": []})
        k["shots"].append(by_shots(model, words, cfg.texts_asked))
        k["orders"].append(by_order(model, words, cfg.sets, cfg.examples, cfg.orders))
        k["val_loss"].append(result["val_loss"])
    said = {"train": asdict(cfg.train), "examples": cfg.examples, "tuning": found}
    return {**said, "seeds": list(seeds), "kinds": kinds}


def at_best(shots):
    """The share of right labels of a model that knows what examples tell, and else guesses among other labels."""
    others = len(CLASSES) - 1
    shown = [1.0] + [0.0] * others  # the chance of k labels, if the class in question is not among the examples
    for _ in range(shots):
        more = [0.0, *(p * (others - k) / others for k, p in enumerate(shown))]
        shown = [p * k / others + more[k] for k, p in enumerate(shown)]
    unseen = (others / len(CLASSES)) ** shots
    return 1 - unseen + unseen * sum(p / (len(LABELS) - k) for k, p in enumerate(shown))


def tables(numbers):
    """{name: rows} of what the terminal and the README show."""
    shots = [["right after so many examples", *map(str, SHOTS)], ["at best", *(f"{at_best(s):.0%}" for s in SHOTS)]]
    orders = [["best minus worst order", *(c for sort in SORTS for c in (sort, "difference")), "mean accuracy"]]
    spreads = {kind: {s: [spread(o[s]) for o in k["orders"]] for s in SORTS} for kind, k in numbers["kinds"].items()}
    baseline = next(iter(spreads))
    for kind, k in numbers["kinds"].items():
        shots.append([kind, *(pm(values, "{:.1%}") for values in zip(*k["shots"]))])
        row = [kind]
        for sort in SORTS:
            row.append(pm(spreads[kind][sort], "{:.1%}"))
            row.append("" if kind == baseline else against(spreads[kind][sort], spreads[baseline][sort], "{:.1%}"))
        orders.append([*row, pm([statistics.fmean(mean for *_, mean in o["random"]) for o in k["orders"]], "{:.1%}")])
    tries = tune.tables(numbers["tuning"]) if numbers["tuning"] else {}
    return {"shots": shots, "orders": orders, **tries}


def spread(of_sets):
    return statistics.fmean(best - worst for best, worst, _ in of_sets)


def picture(numbers, path):
    with experiments.drawing(path, (5, 3.4)) as axes:
        places = range(len(SHOTS))
        for kind, k in numbers["kinds"].items():
            experiments.band(axes, places, k["shots"], marker="o", label=kind)
        axes.plot(places, [at_best(s) for s in SHOTS], ":", color="grey", label="at best")
        axes.set(xticks=places, xticklabels=SHOTS, xlabel="examples before", ylabel="labels right")
        axes.legend()


def main():
    command(IclConfig, icl, "icl", tables, picture, __doc__)


if __name__ == "__main__":
    main()
