"""Do attention logits and hidden states have outliers, and what happens when logits have few bits?

    python -m experiments.outliers            # the models of experiments.compare --dataset=stories
    python -m experiments.outliers --quick

The paper's table of activation outliers and its figure of quantised attention (section 3.7). Logits are those of all
maps, q . k / sqrt(D), where the mask lets through; hidden states are what the layers put out. Quantising is symmetric
and dynamic, by the largest logit of a row (one scale for each token that looks, head and map); with all 32 bits nothing
changes. `diff_v2` has twice as many logits as the others, so its hundredth is of more.
"""

from dataclasses import asdict, dataclass, field

import numpy as np
import torch

import data
import experiments
from config import TrainConfig, need
from evaluate import evaluate
from experiments import against, pm, training
from experiments.program import command
from model import ATTENTIONS, rope_table, shared

BITS = (None, 8, 6, 4)
TOP = {"1st": 0, "2nd": 1, "3rd": 2, "10th": 9, "100th": 99, "median": None}  # in order of size


@dataclass
class OutliersConfig:
    kinds: tuple[str, ...] = tuple(ATTENTIONS)  # the first is what the others are compared with
    seeds: int = 5  # models of each kind
    first_seed: int = training.FIRST_SEED  # of these models
    windows: int = 20  # of the validation text, for the largest values; losses are of all of the run's
    tuned: bool = False  # each kind's own learning rate and initial scale, from tune-stories.json
    quick: bool = False  # one seed, a quarter of the updates
    jobs: int = 1  # runs at a time, each in a process of its own
    train: TrainConfig = field(default_factory=TrainConfig)  # of the models


def logits_of(q, k):
    """(B, H, T, D), (B, G, S, D) -> (B, H, T, S)."""
    return q @ shared(k, q.shape[1]).mT * q.shape[-1] ** -0.5


def seen(logits):
    """True where the mask lets through."""
    return torch.ones(logits.shape[-2:], dtype=torch.bool).tril(logits.shape[-1] - logits.shape[-2])


def rounded(logits, bits):
    """To whole multiples of a step, the largest logit of a row that the mask lets through being 2^(bits - 1) - 1."""
    if bits is None:
        return logits
    step = (logits * seen(logits)).abs().amax(dim=-1, keepdim=True) / (2 ** (bits - 1) - 1)
    return torch.where(step > 0, (logits / step).round() * step, logits)


def attend_with(bits):
    """The path `eager` with rounded logits."""

    def softmax_map(q, k):
        logits = logits_of(q, k)
        return rounded(logits, bits).masked_fill(~seen(logits), -torch.inf).softmax(dim=-1)

    def attend(q1, k1, q2, k2, v, lam):
        A = softmax_map(q1, k1)
        if q2 is not None:
            A = A - lam[..., None] * softmax_map(q2, k2)
        return A @ shared(v, A.shape[1])

    return attend


@torch.no_grad()
def largest(model, idx):
    """{"logits": {"1st": .., "median": ..}, "hidden states": ..} of absolute values, over all layers and texts."""
    x, values = model.tok_emb(idx), {"logits": [], "hidden states": []}
    rope = rope_table(model.cfg, 0, idx.shape[1], like=x)
    for block in model.blocks:
        q1, k1, q2, k2, _, _ = block.attn.operands(block.attn_norm(x), rope)
        for q, k in ((q1, k1), (q2, k2)):
            if q is not None:
                logits = logits_of(q, k)
                values["logits"].append(logits[:, :, seen(logits)].flatten())
        x = block(x, rope)
        values["hidden states"].append(x.flatten())
    found = {}
    for name, parts in values.items():
        sizes = torch.cat(parts).abs().sort(descending=True).values
        places = {place: len(sizes) // 2 if i is None else min(i, len(sizes) - 1) for place, i in TOP.items()}
        found[name] = {place: sizes[i].item() for place, i in places.items()}
    return found


def outliers(cfg):
    """{"settings", "seeds", "kinds": {kind: {"largest": [a seed's], "bits": [a seed's [loss, answers] for BITS]}}}"""
    training.check(cfg)
    need(cfg.windows >= 1, f"windows={cfg.windows} must be at least 1")
    cfg = training.shortened(cfg)
    text = data.load("stories", difficulty=cfg.train.difficulty())
    windows = text.val_windows(cfg.train.eval_windows, cfg.train.block_size)
    arms = training.arms(cfg.train, cfg.kinds, cfg.tuned)
    seeds, kinds = range(cfg.first_seed, cfg.first_seed + cfg.seeds), {}
    for kind, _, model, _ in training.models(arms, seeds):
        k = kinds.setdefault(kind, {**training.own(arms[kind]), "largest": [], "bits": []})
        k["largest"].append(largest(model, training.equally_long(windows, cfg.windows)))
        losses = []
        for bits in BITS:
            for block in model.blocks:
                block.attn.attend = attend_with(bits)
            losses.append(evaluate(model, windows, cfg.train.batch_size, torch.device("cpu")))
        k["bits"].append(losses)
    return {"settings": {"windows": cfg.windows}, "train": asdict(cfg.train), "seeds": list(seeds), "kinds": kinds}


def tables(numbers):
    """{name: rows} of what the terminal and the README show."""
    kinds = numbers["kinds"]
    baseline = next(iter(kinds))
    top = [["absolute value", "of", *TOP, f"1st, against {baseline}"]]
    few = [["attention", *(f"loss, {b or 32} bits" for b in BITS), *(f"answers, {b or 32} bits" for b in BITS)]]
    few[0].append(f"rise with {BITS[-1]} bits, against {baseline}")
    for what in ("logits", "hidden states"):
        for kind, k in kinds.items():
            sizes, theirs = ([one[what] for one in found["largest"]] for found in (k, kinds[baseline]))
            row = [what, kind, *(pm([one[place] for one in sizes], "{:.2f}") for place in TOP)]
            first = [[one["1st"] for one in found] for found in (sizes, theirs)]
            top.append([*row, "" if kind == baseline else against(*first, "{:.2f}")])
    rises = {kind: [losses[-1][0] - losses[0][0] for losses in k["bits"]] for kind, k in kinds.items()}
    for kind, k in kinds.items():
        losses, answers = np.array(k["bits"], dtype=float).transpose(2, 1, 0).tolist()  # bits, seeds
        row = [kind, *(pm(values, "{:.4f}") for values in losses), *(pm(values, "{:.0%}") for values in answers)]
        few.append([*row, "" if kind == baseline else against(rises[kind], rises[baseline], "{:.4f}")])
    return {"largest": top, "bits": few}


def picture(numbers, path):
    """The loss with few bits, over that with all of them."""
    with experiments.drawing(path, (5, 3.4)) as axes:
        places = range(len(BITS))
        for kind, k in numbers["kinds"].items():
            rises = [[loss - losses[0][0] for loss, _ in losses] for losses in k["bits"]]
            experiments.band(axes, places, rises, marker="o", label=kind)
        axes.set(xticks=places, xticklabels=[b or 32 for b in BITS], xlabel="bits of a logit")
        axes.set_ylabel("rise of the loss, nats a token")
        axes.legend()


def main():
    command(OutliersConfig, outliers, "outliers", tables, picture, __doc__)


if __name__ == "__main__":
    main()
