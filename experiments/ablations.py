"""What is each part of differential attention for? Without it, or with another in its place, all else equal.

    python -m experiments.ablations --tuned
    python -m experiments.ablations --quick

The ablation tables of both versions (the paper's section 3.8 and appendix G; Microsoft's notes on V2), on the text of
the preset shakespeare, in half its updates. With --tuned a variant has what experiments.tune found best for the version
that it is a variant of. Beside the loss, with the preset's settings for all: how large the gradient of each projection
is at the start, against standard attention's, and at which multiple of the learning rate the loss begins to spike. The
variants are classes here, in ATTENTIONS like any other kind, and nowhere in model.py.
"""

import statistics
from dataclasses import asdict, dataclass, field, replace
from pathlib import Path

import torch

import data
import experiments
from config import TrainConfig
from experiments import against, pm, training, tune
from experiments.program import command
from experiments.training import trained
from model import ATTENTIONS, GPT, DiffAttention, DiffAttentionV2, RMSNorm, StandardAttention, upcast
from run_log import read_log


class NoNorm(DiffAttention):
    def finish(self, y):
        return (1 - self.lambda_init) * y


class NoFactor(DiffAttention):
    def finish(self, y):
        return self.subln(y)


class Init(DiffAttention):
    """lambda_init the same in all layers."""

    def __init__(self, cfg, layer):
        super().__init__(cfg, layer)
        self.lambda_init = self.value


class Init08(Init):
    value = 0.8


class Init05(Init):
    value = 0.5


class Fixed(DiffAttention):
    """lambda a constant; the factor after the head norm as ever."""

    def lam(self):
        return self.lambda_q1.new_tensor(self.value)


class Fixed0(Fixed):
    value = 0.0


class Fixed1(Fixed):
    value = 1.0


class V2NoSigmoid(DiffAttentionV2):
    """lambda a product, of any size and sign."""

    def operands(self, x, rope, cache=None):
        *operands, _ = super().operands(x, rope, cache)
        return *operands, upcast(self.lambda_proj(x)).transpose(1, 2)


class V2NoLambda(DiffAttentionV2):
    """A1 - A2."""

    def operands(self, x, rope, cache=None):
        *operands, lam = super().operands(x, rope, cache)
        return *operands, torch.ones_like(lam)


class V2AcrossGroups(DiffAttentionV2):
    """Head i is the pair (i, i + H): one of each half, on different keys and values. The official code warns of it."""

    def forward(self, x, rope, cache=None):
        q1, k, q2, _, v, lam = self.operands(x, rope, cache)
        q = torch.stack((q1, q2), dim=2).flatten(1, 2)  # as q_proj made them
        y1, y2 = self.attend(q, k, None, None, v, None).chunk(2, dim=1)
        y = y1 - lam[..., None] * y2
        return self.out_proj(y.transpose(1, 2).flatten(2).type_as(x))


class StandardNorm(StandardAttention):
    """With the head norm of differential attention, and no factor."""

    def __init__(self, cfg, layer):
        super().__init__(cfg, layer)
        self.subln = RMSNorm(self.D)

    def finish(self, y):
        return self.subln(y)


VARIANTS = {
    "standard_norm": StandardNorm, "diff_no_norm": NoNorm, "diff_no_factor": NoFactor, "diff_init_0.8": Init08,
    "diff_init_0.5": Init05, "diff_lambda_0": Fixed0, "diff_lambda_1": Fixed1, "diff_v2_no_sigmoid": V2NoSigmoid,
    "diff_v2_no_lambda": V2NoLambda, "diff_v2_across": V2AcrossGroups,
}  # fmt: skip
RATES = (1, 2, 4, 8, 16)  # times the learning rate
SPIKE = 0.5  # nats: a training loss so far above the lowest before it


@dataclass
class AblationsConfig:
    seeds: int = 3  # runs of each
    first_seed: int = training.FIRST_SEED  # of these runs
    updates: int = 200  # of a run at a high learning rate
    tuned: bool = False  # each version's own learning rate and initial scale, from tune-shakespeare.json
    quick: bool = False  # one seed, a quarter of the updates
    jobs: int = 1  # runs at a time, each in a process of its own
    train: TrainConfig = field(default_factory=lambda: replace(training.preset("shakespeare"), max_iters=1000))


def version(name):
    """The kind that an arm is a variant of."""
    return "diff_v2" if name.startswith("diff_v2") else "diff" if name.startswith("diff") else "standard"


def arms(base, tuned=False):
    """{name: TrainConfig}: the two versions and their baseline, then the variants."""
    for name in VARIANTS:
        ATTENTIONS.setdefault(name, VARIANTS[name])
    found = training.arms(base, ("standard", "diff", "diff_v2"), tuned)
    wide = replace(found["standard"], n_head=base.n_head // 2, n_kv_head=(base.n_kv_head + 1) // 2)
    found |= {"standard, half the heads, twice as wide": wide}
    found |= {"the same, head norm": replace(wide, attention="standard_norm")}
    bare = replace(found["diff"], attention="diff_no_norm", init_std=found["standard"].init_std)
    found |= {"diff_no_norm, init_std of standard": bare}
    return found | {n: replace(found[version(n)], attention=n) for n in VARIANTS if n != "standard_norm"}


def gradients(cfg, dataset):
    """{"q_proj": size, ..}: root mean square of the gradient of each projection at the start, the mean over layers."""
    model = GPT(cfg.model_config(dataset.tokenizer.vocab_size), cfg.seed)
    x, y = dataset.batch(0, cfg.batch_size, cfg.block_size, cfg.data_seed)
    model(torch.from_numpy(x), torch.from_numpy(y))[1].backward()
    norms = {}
    for name, p in model.named_parameters():
        if p.ndim == 2 and ".attn." in name and "lambda" not in name:
            norms.setdefault(name.split(".")[-2], []).append(p.grad.square().mean().sqrt().item())
    return {name: statistics.fmean(values) for name, values in norms.items()}


def at_rates(cfg, updates):
    """The runs of a few updates at RATES times the learning rate."""
    short = replace(cfg, max_iters=updates, warmup_iters=updates // 10, log_interval=1, eval_interval=updates)
    return [replace(short, learning_rate=rate * cfg.learning_rate) for rate in RATES]


def spikes(cfg):
    """How many updates of a run were spikes, None if it diverged."""
    try:
        result = trained(cfg)
    except FloatingPointError:
        return None
    losses = [line["loss"] for line in read_log(Path(result["out_dir"])) if "loss" in line]
    return sum(loss > min(losses[:i]) + SPIKE for i, loss in enumerate(losses) if i)


def ablations(cfg):
    """{"train", "seeds", "arms": {name: {"val_loss", "gradients": [of a seed], "spikes": [of RATES] of a seed}}}"""
    training.check(cfg)
    cfg = training.shortened(cfg)
    shared = cfg.train
    seeds, found = range(cfg.first_seed, cfg.first_seed + cfg.seeds), {}
    text = data.load(shared.dataset, shared.tokenizer, shared.bpe_vocab_size, shared.difficulty())
    updates = max(2, cfg.updates // (4 if cfg.quick else 1))
    runs = []  # (name, run, the same with the settings that all share from there on, that at high rates)
    for name, arm in arms(cfg.train, cfg.tuned).items():
        arm.check()
        found[name] = {**training.own(arm), "val_loss": [], "gradients": [], "spikes": []}
        for seed in seeds:
            arm = replace(arm, seed=seed, data_seed=seed)
            equal = replace(arm, **training.own(shared))
            fast = at_rates(equal, updates) if name in ("standard", "diff", "diff_no_norm", "diff_v2") else []
            runs.append((name, arm, equal, fast))
    training.ahead([run for _, arm, _, fast in runs for run in (arm, *fast)], trials=True)
    for name, arm, equal, fast in runs:
        found[name]["val_loss"].append(tune.last_loss(arm))
        found[name]["gradients"].append(gradients(equal, text))
        if fast:
            found[name]["spikes"].append([spikes(run) for run in fast])
    return {"train": asdict(cfg.train), "seeds": list(seeds), "arms": found}


def tables(numbers):
    """{name: rows} of what the terminal and the README show."""
    found, losses = numbers["arms"], [["attention", "validation loss", "against its own version", "against standard"]]
    projections = list(found["standard"]["gradients"][0])
    slopes = [["gradient at the start / standard's", *projections]]
    fast = [["spikes at a learning rate times", *map(str, RATES)]]
    for name, arm in found.items():
        if None in arm["val_loss"]:
            losses.append([name, f"diverged ({arm['val_loss'].count(None)} of {len(numbers['seeds'])})", "", ""])
        else:
            row = [name, pm(arm["val_loss"], "{:.4f}")]
            for other in ("" if version(name) == "standard" else version(name), "standard"):
                row.append("" if other in ("", name) else against(arm["val_loss"], found[other]["val_loss"], "{:.4f}"))
            losses.append(row)
        ratios = [
            statistics.geometric_mean(g[p] / s[p] for g, s in zip(arm["gradients"], found["standard"]["gradients"]))
            for p in projections
        ]
        slopes.append([name, *(f"{ratio:.2f}" for ratio in ratios)])
        if arm["spikes"]:
            fast.append(
                [name, *(", ".join("diverged" if n is None else str(n) for n in c) for c in zip(*arm["spikes"]))]
            )
    return {"losses": losses, "gradients": slopes, "spikes": fast}


def picture(numbers, path):
    """Each arm's distance from standard, a point for each seed."""
    with experiments.drawing(path, (7, 4)) as axes:
        base, names = numbers["arms"]["standard"]["val_loss"], []
        for name, arm in numbers["arms"].items():
            if None not in arm["val_loss"] + base:
                values = [loss - other for loss, other in zip(arm["val_loss"], base)]
                axes.plot(values, [len(names)] * len(values), "o", color="C0", alpha=0.6)
                names.append(name)
        axes.axvline(0, color="grey", linewidth=0.8)
        axes.set_yticks(range(len(names)), names)
        axes.invert_yaxis()
        axes.set_xlabel("validation loss, difference to standard")


def main():
    command(AblationsConfig, ablations, "ablations", tables, picture, __doc__)


if __name__ == "__main__":
    main()
