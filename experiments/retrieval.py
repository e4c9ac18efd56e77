"""Is the answer right, and does attention fall on it, as a text has more facts, more noise and more length?

    python -m experiments.retrieval            # the models of experiments.compare --dataset=stories
    python -m experiments.retrieval --quick

The paper's multi-needle question (section 3.4): facts stand among noise, the one asked for at a chosen depth, and
several are asked for in a row. All sentences have four tokens, so that the texts of a cell of the grid are equally
long; the longest are longer than what the models were trained on. The weights are those on V, A1 - lambda A2, of the
row that must find the answer: their signed sums over the parts of the text add up to the row's sum.
"""

import random
from dataclasses import asdict, dataclass, field

import numpy as np
import torch

import experiments
from config import TrainConfig, need
from data import stories, tokenizers
from experiments import against, pm, training
from experiments.program import command
from model import ATTENTIONS

FACTS = (2, 4, 8, 12)
SENTENCES = (14, 20, 40, 80)  # of four tokens
DEPTHS = (0.0, 0.25, 0.5, 0.75, 1.0)  # of the fact that is asked for first: 0 is the beginning
PARTS = ("answer", "other facts", "noise", "first token", "rest")
NOISE = [scene for scene in stories.SCENES if len(stories.words(scene)) == 4]


@dataclass
class RetrievalConfig:
    kinds: tuple[str, ...] = tuple(ATTENTIONS)  # the first is what the others are compared with
    seeds: int = 5  # models of each kind
    first_seed: int = training.FIRST_SEED  # of these models
    questions: int = 5  # in a row, at most; never more than there are facts
    texts: int = 40  # of each cell of the grid
    tuned: bool = False  # each kind's own learning rate and initial scale, from tune-stories.json
    quick: bool = False  # one seed, a quarter of the updates, an eighth of the texts
    jobs: int = 1  # runs at a time, each in a process of its own
    train: TrainConfig = field(default_factory=TrainConfig)  # of the models


def text(uniform, facts, sentences, depth, questions):
    """(words, parts, answers): a text, the part each of its words is in, and where the words of each answer are.

    Parts are numbers in PARTS, the answer that of the first question; `uniform()` draws from [0, 1).
    """
    t = stories.Teller(uniform)
    names, verbs, things = list(stories.NAMES), list(stories.VERBS), list(stories.THINGS)
    known = [(t.take(names), t.take(verbs), t.take(things)) for _ in range(facts)]
    places = list(range(sentences))
    asked_for = places.pop(round(depth * (sentences - 1)))
    where = {asked_for: 0, **{t.take(places): i for i in range(1, facts)}}
    said, parts = [], [PARTS.index("first token")]
    for place in range(sentences):
        if place in where:
            said.append(stories.FACT.format(*known[where[place]]))
        elif t.choose((True, False)):
            said.append(t.choose(NOISE))
        else:
            said.append(stories.DENIAL.format(t.choose(stories.VERBS), t.choose(stories.THINGS)))
        parts += [PARTS.index("noise" if place not in where else "other facts" if where[place] else "answer")] * 4
    others = known[1:]
    asked = [known[0], *(t.take(others) for _ in range(min(questions, facts) - 1))]
    said += [stories.QUESTION.format(*fact) for fact in asked]
    words = stories.words("\n" + " ".join(said))
    answers = [len(parts) + 7 * i + 4 for i in range(len(asked))]  # " And" " Ann" "?" " Ann" " mends" " maps" "."
    return words, parts + [PARTS.index("rest")] * (len(words) - len(parts)), answers


def shares(maps, part):
    """How the last row's weights fall on the parts: maps of GPT.attention_maps, part (B, T) numbers in PARTS.

    Returns (L, 2, len(PARTS)): for each layer, mean over texts and heads, the signed sums and the shares of |weights|.
    """
    member = torch.stack([part == i for i in range(len(PARTS))], dim=-1)[:, None].double()  # (B, 1, T, parts)
    rows = [(A1 if A2 is None else A1 - lam[..., None] * A2)[:, :, -1:].double() for A1, A2, lam in maps]
    signed = [(row @ member).mean(dim=(0, 1, 2)) for row in rows]
    absolute = [(row.abs() / row.abs().sum(dim=-1, keepdim=True) @ member).mean(dim=(0, 1, 2)) for row in rows]
    return torch.stack([torch.stack(signed), torch.stack(absolute)], dim=1)


@torch.no_grad()
def ask(model, tokenizer, facts, sentences, depth, questions, texts):
    """One cell of the grid: {"first": share of first answers right, "all": of all answers, "shares": see above}."""
    uniform = random.Random(f"{facts} {sentences} {depth}").random  # the same texts for every model
    drawn = [text(uniform, facts, sentences, depth, questions) for _ in range(texts)]
    ids = torch.tensor([tokenizer.encode("".join(words)).tolist() for words, _, _ in drawn])
    part, answers = torch.tensor([part for _, part, _ in drawn]), drawn[0][2]
    assert ids.shape == part.shape, f"{ids.shape} tokens, {part.shape} words"
    right = model(ids[:, :-1])[0].argmax(dim=-1) == ids[:, 1:]  # of the token after each
    right = torch.stack([right[:, at - 1] & right[:, at] for at in answers], dim=1)  # both words
    row = answers[0]  # tokens before the answer: the last of them looks for it
    maps = model.attention_maps(ids[:, :row])
    first, every = (r.double().mean().item() for r in (right[:, 0], right))
    return {"facts": facts, "sentences": sentences, "depth": depth, "first": first, "all": every,
            "shares": shares(maps, part[:, :row]).numpy().round(6).tolist()}  # fmt: skip


def retrieval(cfg):
    """{"settings", "seeds", "kinds": {kind: [the cells of a seed's model, ..]}}"""
    training.check(cfg)
    need(cfg.questions >= 1 and cfg.texts >= 1, f"questions={cfg.questions}, texts={cfg.texts}: at least 1 of each")
    settings = {"questions": cfg.questions, "texts": cfg.texts, "trained_on": cfg.train.block_size}
    need(
        short({"settings": settings}),
        f"questions={cfg.questions}: with the shortest text they are longer than the {cfg.train.block_size} tokens that"
        " the models are trained on, ask fewer",
    )
    tokenizer = tokenizers.BPETokenizer.of_words(stories.VOCABULARY)
    cfg = training.shortened(cfg)
    settings["texts"] = texts = max(1, cfg.texts // 8) if cfg.quick else cfg.texts
    arms = training.arms(cfg.train, cfg.kinds, cfg.tuned)
    seeds, kinds = range(cfg.first_seed, cfg.first_seed + cfg.seeds), {kind: [] for kind in cfg.kinds}
    for kind, _, model, _ in training.models(arms, seeds):
        kinds[kind].append([
            ask(model, tokenizer, facts, sentences, depth, cfg.questions, texts)
            for facts in FACTS for sentences in SENTENCES for depth in DEPTHS
        ])  # fmt: skip
    own = {kind: training.own(arm) for kind, arm in arms.items()}
    return {"settings": settings, "train": asdict(cfg.train), "own": own, "seeds": list(seeds), "kinds": kinds}


def mean(cells, what, **where):
    """Of the cells with these values (one, or several), the mean of a number, or of an array."""
    chosen = [c[what] for c in cells if all(c[k] in (v if isinstance(v, tuple) else (v,)) for k, v in where.items())]
    return np.mean(chosen, axis=0)


def short(numbers):
    """The lengths within what the models were trained on, questions included."""
    room = numbers["settings"]["trained_on"] - 7 * numbers["settings"]["questions"]
    return tuple(sentences for sentences in SENTENCES if 4 * sentences + 1 <= room)


def tables(numbers):
    """{name: rows} of what the terminal and the README show."""
    within, kinds, seen = short(numbers), numbers["kinds"], {}
    baseline = next(iter(kinds))
    for axis, values in {"facts": FACTS, "sentences": SENTENCES, "depth": DEPTHS}.items():
        rows = [["answers right", *(f"{axis} {v:g}" for v in values), f"mean, against {baseline}"]]
        where = {} if axis == "sentences" else {"sentences": within}
        what = "first" if axis == "depth" else "all"
        means = {kind: [mean(cells, what, **where) for cells in models] for kind, models in kinds.items()}
        for kind, models in kinds.items():
            cells = [pm([mean(c, what, **where, **{axis: v}) for c in models], "{:.0%}") for v in values]
            rows.append([kind, *cells, "" if kind == baseline else against(means[kind], means[baseline], "{:.1%}")])
        seen[axis] = rows
    rows = [["weight on", *PARTS, "row sum", f"answer, against {baseline}", "noise"]]
    falls = {k: np.array([mean(c, "shares", sentences=within).mean(axis=0) for c in m]) for k, m in kinds.items()}
    for kind, of_seeds in falls.items():
        for i, name in enumerate((kind, f"{kind}, share of absolute weight")):
            row = [name, *(pm(values.tolist()) for values in of_seeds[:, i].T)]
            row.append(pm(of_seeds[:, i].sum(axis=-1).tolist()))
            for part in ("answer", "noise"):
                ours, theirs = (f[:, i, PARTS.index(part)].tolist() for f in (of_seeds, falls[baseline]))
                row.append("" if kind == baseline else against(ours, theirs))
            rows.append(row)
    return {**seen, "weight": rows}


def picture(numbers, path):
    with experiments.drawing(path, (12, 3), len(SENTENCES), sharey=True) as axes:
        for ax, sentences in zip(axes, SENTENCES):
            for kind, models in numbers["kinds"].items():
                found = [[mean(cells, "all", facts=f, sentences=sentences) for f in FACTS] for cells in models]
                experiments.band(ax, FACTS, found, marker="o", fillstyle="none", label=kind)
            longer = " (longer than trained on)" * (sentences not in short(numbers))
            ax.set_title(f"{4 * sentences} tokens{longer}", fontsize=9)
            ax.set(xlabel="facts", xticks=FACTS, ylim=(-0.03, 1.03))
        axes[0].set_ylabel("answers right")
        axes[0].legend()


def main():
    command(RetrievalConfig, retrieval, "retrieval", tables, picture, __doc__)


if __name__ == "__main__":
    main()
