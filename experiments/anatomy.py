"""What do trained pairs of maps look like: rank, entropy, negative weight, likeness of heads, lambda?

    python -m experiments.anatomy --dataset=shakespeare --tuned     # the models of experiments.compare, 4 pairs a layer
    python -m experiments.anatomy --dataset=stories                 # one pair a layer: heads have nobody to be like

Effective rank is the exponential of the entropy of the normalised singular values; entropy is that of a row over the
tokens it may look at. Heads of a layer are held against each other by the cosine of their maps (the weights on V) and
by linear CKA of their outputs. Maps without negative weights are alike before they have learned anything, so their
cosine at the start stands beside it; CKA finds wide outputs more alike than narrow ones. Importance is what the loss
rises by without a head of `diff`, or without two neighbours of another kind, as wide as that; its spread the standard
deviation over the mean, in a layer. The learned lambda is also scaled, to see whether the loss would rather have
another.
"""

from dataclasses import asdict, dataclass, field
from functools import partial
from itertools import combinations
from pathlib import Path

import torch

import data
import experiments
from config import TrainConfig, need
from evaluate import evaluate
from experiments import mean_sd, pm, training
from experiments.program import command
from model import ATTENTIONS, GPT
from run_log import read_log

SCALES = (0.0, 0.5, 0.8, 1.0, 1.25, 2.0)  # of lambda
NUMBERS = {
    "rank A1": "rank of A1", "rank A2": "of A2", "rank lambda A2": "of lambda A2", "rank weights": "of the weights",
    "entropy A1": "entropy of A1", "entropy A2": "of A2", "negative": "weight below 0",
    "cosine": "cosine of heads", "cosine at the start": "at the start", "cka": "CKA of heads",
    "spread": "spread of importance",
}  # fmt: skip


@dataclass
class AnatomyConfig:
    dataset: str = "shakespeare"  # whatever train.py takes
    kinds: tuple[str, ...] = tuple(ATTENTIONS)
    seeds: int = 5  # models of each kind
    first_seed: int = training.FIRST_SEED  # of these models
    windows: int = 8  # of the validation text, to look at maps; losses are of all of the run's
    tuned: bool = False  # each kind's own learning rate and initial scale, from tune-DATASET.json
    quick: bool = False  # one seed, a quarter of the updates
    jobs: int = 1  # runs at a time, each in a process of its own
    train: TrainConfig = field(default_factory=partial(training.preset, "shakespeare"))  # of the models


def effective_rank(A):
    """(.., T, T) -> (..): exp of the entropy of the singular values, as shares of their sum (Roy & Vetterli 2007)."""
    p = torch.linalg.svdvals(A.double())
    return entropy(p / p.sum(dim=-1, keepdim=True)).exp()


def entropy(p):
    """(.., n) -> (..), nats."""
    return -torch.special.xlogy(p, p).sum(dim=-1)


def cka(x, y):
    """Linear CKA of two heads' outputs, each (tokens, width): 1 if one is the other, turned and scaled. (Kornblith et
    al. 2019, arXiv 1905.00414, section 3.)"""
    x, y = x - x.mean(dim=0), y - y.mean(dim=0)
    return (x.T @ y).norm() ** 2 / ((x.T @ x).norm() * (y.T @ y).norm())


def pairs(heads, like):
    """The mean of like(a, b) over pairs of heads, None if there is one head alone."""
    values = [like(a, b).item() for a, b in combinations(heads, 2)]
    return sum(values) / len(values) if values else None


def of_layer(A1, A2, lam, y):
    """The numbers of a layer: its maps (B, heads, T, T), lambda, and outputs of heads y (B, heads, T, E)."""
    weights = A1 if A2 is None else A1 - lam[..., None] * A2
    found = {"rank A1": effective_rank(A1), "rank weights": effective_rank(weights), "entropy A1": entropy(A1)}
    if A2 is not None:
        more = {"rank A2": A2, "rank lambda A2": lam[..., None] * A2}
        found |= {name: effective_rank(A) for name, A in more.items()} | {"entropy A2": entropy(A2)}
    found["negative"] = weights.clamp(max=0).abs().sum(dim=-1) / weights.abs().sum(dim=-1)
    maps, outputs = weights.transpose(0, 1).flatten(1).double(), y.transpose(0, 1).flatten(1, 2).double()
    return {
        **{name: value.double().mean().item() for name, value in found.items()},
        "cosine": pairs(maps, lambda a, b: torch.cosine_similarity(a, b, dim=0)),
        "cka": pairs(outputs, cka),
    }


def looking(model, idx):
    """of_layer of every layer, for the texts idx (B, T)."""
    outputs = []
    for block in model.blocks:
        finish = block.attn.finish
        block.attn.finish = lambda y, finish=finish: (outputs.append(finish(y)), outputs[-1])[1]
    maps = model.attention_maps(idx)
    for block in model.blocks:
        del block.attn.finish  # the class's again
    return [of_layer(*layer, y) for layer, y in zip(maps, outputs)]


def importances(model, loss):
    """What the loss rises by without a head 2 D wide, or two of D side by side: for each layer a list of these."""
    complete, rises = loss(), []
    for block in model.blocks:
        attn, finish = block.attn, block.attn.finish
        heads, together = attn.out_proj.in_features // (attn.value_factor * attn.D), 2 // attn.value_factor
        rises.append([])
        for first in range(0, heads, together):
            keep = (torch.arange(heads) // together != first // together).float()[:, None, None]
            attn.finish = lambda y, finish=finish, keep=keep: finish(y) * keep
            rises[-1].append(loss() - complete)
            del attn.finish
    return rises


def uneven(rises):
    """Standard deviation over mean; None where there is one head alone, or no importance in all."""
    mean, sd = mean_sd(rises)
    return None if sd is None or mean <= 0 else sd / mean


def scaled(model, loss, scale):
    """The loss with every lambda multiplied by `scale`."""
    for block in model.blocks:
        operands = block.attn.operands
        block.attn.operands = lambda *a, operands=operands: (*(o := operands(*a))[:-1], scale * o[-1])
    value = loss()
    for block in model.blocks:
        del block.attn.operands
    return value


def anatomy(cfg):
    """{"settings", "seeds", "kinds": {kind: {number: [a seed's mean over layers], "layers", "lambdas", "scaled"}}}"""
    training.check(cfg)
    need(cfg.windows >= 1, f"windows={cfg.windows} must be at least 1")
    cfg = training.shortened(cfg)
    train = cfg.train
    text = data.load(cfg.dataset, train.tokenizer, train.bpe_vocab_size, train.difficulty())
    windows = text.val_windows(train.eval_windows, train.block_size)
    arms = training.arms(cfg.train, cfg.kinds, cfg.tuned)
    seeds, kinds = range(cfg.first_seed, cfg.first_seed + cfg.seeds), {}
    for kind, seed, model, result in training.models(arms, seeds):

        def loss(model=model):
            value = evaluate(model, windows, train.batch_size, torch.device("cpu"))[0]
            model.eval()
            return value

        empty = {name: [] for name in ("layers", "lambdas", "scaled", *NUMBERS)}
        k = kinds.setdefault(kind, {**training.own(arms[kind]), **empty})
        texts = training.equally_long(windows, cfg.windows)
        layers, rises = looking(model, texts), importances(model, loss)
        for layer, before in zip(layers, looking(GPT(model.cfg, seed).eval(), texts)):
            layer["cosine at the start"] = before["cosine"]
        for name in NUMBERS:
            values = [layer[name] for layer in layers if layer.get(name) is not None]
            k[name].append(sum(values) / len(values) if values else None)
        spreads = list(map(uneven, rises))
        k["spread"][-1] = None if None in spreads else sum(spreads) / len(spreads)
        k["layers"].append(layers)
        log = [line for line in read_log(Path(result["out_dir"])) if "lambdas" in line]
        k["lambdas"].append([[line["step"], line["lambdas"]] for line in log])
        k["scaled"].append([scaled(model, loss, scale) for scale in SCALES] if log[-1]["lambdas"] else None)
    return {"settings": {"windows": cfg.windows}, "train": asdict(cfg.train), "seeds": list(seeds), "kinds": kinds}


def tables(numbers):
    """{name: rows} of what the terminal and the README show."""
    maps = [["mean over layers", *NUMBERS.values()]]
    scales = [["loss, lambda times", *(f"{scale:g}" for scale in SCALES)]]
    lambdas = None
    for kind, k in numbers["kinds"].items():
        maps.append([kind, *(pm(k[name], "{:.2f}") for name in NUMBERS)])
        if None not in k["scaled"]:
            scales.append([kind, *(pm([losses[i] for losses in k["scaled"]], "{:.4f}") for i in range(len(SCALES)))])
            last = [run[-1][1] for run in k["lambdas"]]
            lambdas = lambdas or [["lambda at the end", *(f"layer {i}" for i in range(len(last[0])))]]
            lambdas.append([kind, *(pm(layer, "{:.2f}") for layer in zip(*last))])
    return {"maps": maps} | ({"scaled": scales, "lambdas": lambdas} if lambdas else {})


def picture(numbers, path):
    """lambda by layer over training: a line a layer, the mean over seeds."""
    kinds = {kind: k["lambdas"] for kind, k in numbers["kinds"].items() if k["lambdas"][0][0][1]}
    n = max(1, len(kinds))
    with experiments.drawing(path, (5 * n, 3.4), n, squeeze=False, sharey=True) as axes:
        for ax, (kind, runs) in zip(axes[0], kinds.items()):
            steps = [step for step, _ in runs[0]]
            for layer in range(len(runs[0][0][1])):
                curves = [[by_layer[layer] for _, by_layer in run] for run in runs]
                experiments.band(ax, steps, curves, label=f"layer {layer}")
            ax.set(title=kind + ", mean over tokens and heads" * (kind != "diff"), xlabel="updates")
            ax.legend(fontsize=8)
        axes[0][0].set_ylabel("lambda")


def main():
    command(AnatomyConfig, anatomy, "anatomy", tables, picture, __doc__)


if __name__ == "__main__":
    main()
