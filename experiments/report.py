"""What was published, and what is seen here: a table of claims, made from experiments/results.

    python -m experiments.report             # prints the table
    python -m experiments.report --check     # and fails if a result is missing, or of other settings or too few seeds

A verdict is of pairs of runs with equal seeds: "seen" or "opposite" where a 95 % confidence interval of their
differences leaves zero out on that side, else "not distinguishable". Where a model that only guesses would look best,
there is none unless all have learned what is asked. Minutes are those of the whole command if one process trains
all of it, with the runs that it shares with others.
"""

import statistics
from dataclasses import asdict, dataclass, replace

import experiments
from config import TrainConfig
from experiments import compare, icl, mean_sd, paired, pm, print_table, retrieval, scaling, training
from experiments.training import preset

SHAKESPEARE, STORIES = preset("shakespeare"), TrainConfig()
# Of each result: the settings that its runs share now, and how many seeds it needs.
NEEDED = {
    "compare-shakespeare-tuned": (SHAKESPEARE, 5), "scaling-tuned": (SHAKESPEARE, 3),
    "ablations-tuned": (replace(SHAKESPEARE, max_iters=1000), 3),
    "anatomy-shakespeare-tuned": (SHAKESPEARE, 3), "retrieval": (STORIES, 5), "outliers": (STORIES, 3),
    "icl-tuned": (replace(STORIES, n_head=4, max_iters=3000), 3),
}  # fmt: skip
NEITHER = "not distinguishable"
# What an experiment sets itself, run by run; icl has a text of its own besides.
FREE = ("attention", "seed", "data_seed", "out_dir", "preset")
FREE_OF = {"icl-tuned": ("dataset", "block_size")}


@dataclass
class ReportConfig:
    check: bool = False  # fail unless every result is there, whole and of the settings that the code has now


def of_kinds(less, values, form="{:.3f}", learned=None):
    """A reader of results: `values(numbers, kind)` are a seed's numbers, and the claim is that they are less, or more.

    `learned(numbers, kind)`: shares of right answers, which must be a half in every run for a verdict.
    """

    def read(numbers, kind, other="standard"):
        ours, theirs = values(numbers, kind), values(numbers, other)
        if None in (*ours, *theirs):
            return "a run diverged, or has no number", "cannot be told"
        difference, _, half = paired(ours, theirs)
        told = f"{form.format(mean_sd(theirs)[0])} → {form.format(mean_sd(ours)[0])}"
        if half is None:
            return told, "one seed says nothing"
        told += f" ({'+' if difference >= 0 else '-'}{form.format(abs(difference))} ± {form.format(half)})"
        if learned and min(*learned(numbers, kind), *learned(numbers, other)) < 0.5:
            return told, "not all have learned it"
        if abs(difference) <= half:
            return told, NEITHER
        return told, "seen" if (difference < 0) == less else "opposite"

    return read


def loss(numbers, kind):
    return numbers.get("kinds", numbers.get("arms"))[kind]["val_loss"]


def sooner(numbers, kind):
    """Updates to the baseline's last loss, for each that it takes; a run that does not get there is no better."""
    runs, others = (numbers["kinds"][name]["history"] for name in (kind, numbers["baseline"]))
    shares = [compare.share(run, other) for run, other in zip(runs, others)]
    if None in shares:
        worse = LESS(numbers, kind)[1] == "opposite"
        return compare.sooner(runs, others), "opposite" if worse and not any(shares) else NEITHER
    return of_kinds(True, lambda _, name: shares if name == kind else [1.0] * len(shares), "{:.0%}")(numbers, kind)


def answers(longest):
    def values(numbers, kind):
        lengths = retrieval.SENTENCES[-1:] if longest else retrieval.short(numbers)
        return [float(retrieval.mean(cells, "all", sentences=lengths)) for cells in numbers["kinds"][kind]]

    return values


def attention_on(part):
    def values(numbers, kind):
        within, i = retrieval.short(numbers), retrieval.PARTS.index(part)
        return [float(retrieval.mean(c, "shares", sentences=within).mean(axis=0)[1][i]) for c in numbers["kinds"][kind]]

    return values


def in_any_order(numbers, kind):
    return [statistics.fmean(mean for *_, mean in o["random"]) for o in numbers["kinds"][kind]["orders"]]


def spread(sort):
    return lambda numbers, kind: [icl.spread(o[sort]) for o in numbers["kinds"][kind]["orders"]]


def largest(what):
    return lambda numbers, kind: [one[what]["1st"] for one in numbers["kinds"][kind]["largest"]]


def rise(numbers, kind):
    """What the loss rises by with 4 bits."""
    return [losses[-1][0] - losses[0][0] for losses in numbers["kinds"][kind]["bits"]]


def right(numbers, kind):
    """Answers, with all bits."""
    return [losses[0][1] for losses in numbers["kinds"][kind]["bits"]]


def of(name):
    return lambda numbers, kind: numbers["kinds"][kind][name]


def alike(numbers, kind):
    """No verdict: how alike heads are at the start hangs on the initial scale, which is tuned for each kind."""
    pairs = ((name, [numbers["kinds"][name][when] for when in ("cosine at the start", "cosine")])
             for name in ("standard", kind))  # fmt: skip
    told = ", ".join(f"{name} {' → '.join(pm(values, '{:.2f}') for values in found)}" for name, found in pairs)
    return told, "cannot be asked here: hangs on the initial scale, which is tuned for each kind"


def last_lambdas(numbers, kind):
    layers = zip(*(run[-1][1] for run in numbers["kinds"][kind]["lambdas"]))
    return ", ".join(f"{statistics.fmean(layer):.2f}" for layer in layers), "see the picture"


def parameters(numbers, kind):
    shares = scaling.needed(numbers, kind)
    told, neither, _ = scaling.said(shares).partition(" (not distinguishable)")
    if neither or shares is None or len(shares) == 1:
        return told, NEITHER
    return told, "seen" if statistics.geometric_mean(shares) < 1 else "opposite"


LESS, MORE = of_kinds(True, loss), of_kinds(False, loss)
FOUND, FAR = (of_kinds(False, answers(longest), "{:.0%}") for longest in (False, True))
ANSWER, NOISE = of_kinds(False, attention_on("answer")), of_kinds(True, attention_on("noise"))
ANY_ORDER, IN_TURN = (of_kinds(True, spread(sort), "{:.1%}", in_any_order) for sort in ("random", "in turn"))
LOGIT, STATE = (of_kinds(True, largest(what), "{:.1f}") for what in ("logits", "hidden states"))
FEW_BITS, UNEVEN = of_kinds(True, rise, learned=right), of_kinds(True, of("spread"))
LOSSES, HEADS, PARTS = "compare-shakespeare-tuned", "anatomy-shakespeare-tuned", "ablations-tuned"
# (claim, published, result, its reader, the kind, what it is compared with if not standard)
CLAIMS = [
    ("V1 has a lower loss", "by 0.025 to 0.032", LOSSES, LESS, "diff"),
    ("V2 has a lower loss", "by 0.02 to 0.03", LOSSES, LESS, "diff_v2"),
    ("V1 needs fewer tokens for an equal loss", "63.7 %", LOSSES, sooner, "diff"),
    ("V1 needs fewer parameters for an equal loss", "62.2 %, 59.5 %", "scaling-tuned", parameters, "diff"),
    ("facts are found more often (2 to 12, up to 5 asked for)", "0.55 → 0.85 (6, 2)", "retrieval", FOUND, "diff"),
    ("also in texts longer than trained on", "0.52 → 0.86 (64K, trained on)", "retrieval", FAR, "diff"),
    ("more attention on the answer", "0.03 → 0.30", "retrieval", ANSWER, "diff"),
    ("less attention on noise", "0.52 → 0.02", "retrieval", NOISE, "diff"),
    ("the order of examples matters less (random)", "19.0 → 4.0 points", "icl-tuned", ANY_ORDER, "diff"),
    ("also with classes in turn", "56.7 → 13.4 points", "icl-tuned", IN_TURN, "diff"),
    ("the largest attention logit is smaller", "318 → 38.8", "outliers", LOGIT, "diff"),
    ("the largest hidden state is smaller", "3609 → 1688", "outliers", STATE, "diff"),
    ("logits of 4 bits cost less", "29.5 → 7.4 points", "outliers", FEW_BITS, "diff"),
    ("V1 without head norm is worse", "+0.060", PARTS, MORE, "diff_no_norm", "diff"),
    ("and worse than standard", "+0.035", PARTS, MORE, "diff_no_norm"),
    ("lambda_init 0.8 everywhere is a little worse", "+0.003", PARTS, MORE, "diff_init_0.8", "diff"),
    ("lambda_init 0.5 everywhere is a little worse", "+0.004", PARTS, MORE, "diff_init_0.5", "diff"),
    ("V2 across groups is worse", "clearly", PARTS, MORE, "diff_v2_across", "diff_v2"),
    ("V2 without lambda is worse", "yes", PARTS, MORE, "diff_v2_no_lambda", "diff_v2"),
    ("V2 without sigmoid is worse", "yes", PARTS, MORE, "diff_v2_no_sigmoid", "diff_v2"),
    ("heads become less alike in training (cosine of maps)", "yes (DEX)", HEADS, alike, "diff"),
    ("importance is more even over heads", "yes (DEX)", HEADS, UNEVEN, "diff"),
    ("lambda by layer", "0.2 to 0.4 first, about 0.8 deep", HEADS, last_lambdas, "diff"),
]
NEVER = {
    "benchmarks (LM Eval)": "ask for knowledge that a model of a million parameters has no room for",
    "hallucination": "is judged by a large model in summaries that these do not write",
    "mathematics": "needs a model that reasons in words",
}


def wrong(name):
    """What is wrong with a result, in a sentence, or ""."""
    settings, seeds = NEEDED[name]
    try:
        numbers = experiments.load(name)
        tuning = f"tune-{settings.dataset}"
        best = experiments.load(tuning)["kinds"] if name.endswith("-tuned") and name not in FREE_OF else {}
    except ValueError as error:
        return str(error)
    if len(numbers["seeds"]) < seeds or numbers["seeds"][0] != training.FIRST_SEED:
        return f"{name}.json has seeds {numbers['seeds']}, and needs {seeds} from {training.FIRST_SEED} on"
    made, kinds = numbers.get("train") or numbers["settings"], numbers.get("kinds") or numbers["arms"]
    for setting, value in asdict(settings.resolved()).items():
        if setting not in (*FREE, *FREE_OF.get(name, ())) and made.get(setting) != value:
            return f"{name}.json was made with {setting}={made.get(setting)!r}: now it is {value!r}"
    if next(iter(kinds)) != "standard" or not {"diff", "diff_v2"} < set(kinds):
        return f"{name}.json is of {', '.join(kinds)}, and needs standard first, diff and diff_v2"
    for kind in (kind for kind in best if kind in kinds):
        for setting, value in best[kind]["best"].items():
            has = numbers.get("own", kinds)[kind][setting]
            if isinstance(has, list):  # a width's
                has = has[numbers["widths"].index(made["n_embd"])]
            if has != value:
                return f"{name}.json has {setting}={has} for {kind}, {tuning}.json {value}"
    return ""


def tables():
    """{name: rows} of what the terminal and the README show; claims whose result is missing, or not right, say so."""
    rows = [["claim", "published", "here", "seeds", "verdict", "command", "minutes"]]
    faults = {name: wrong(name) for name in NEEDED}
    for claim, published, name, read, *kinds in CLAIMS:
        ours, verdict, seeds, minutes = "", "not asked yet", "", ""
        if not faults[name]:
            numbers = experiments.load(name)
            (ours, verdict), seeds = read(numbers, *kinds), str(len(numbers["seeds"]))
            minutes = f"{numbers['minutes']:.0f}"
        rows.append([claim, published, ours, seeds, verdict, f"`{experiments.how(name)}`", minutes])
    rows[1:] = sorted(rows[1:], key=lambda row: row[4] == "not asked yet")  # what there is, first
    rows += [[claim, "better", "", "", f"cannot be asked here: {why}", "", ""] for claim, why in NEVER.items()]
    return {"claims": rows}


def main():
    import sys

    import tyro

    sys.stdout.reconfigure(errors="replace")
    cfg = tyro.cli(ReportConfig, description=__doc__)
    print_table(tables()["claims"])
    faults = list(filter(None, map(wrong, NEEDED)))
    for fault in faults:
        print(fault, file=sys.stderr)
    if cfg.check and faults:
        sys.exit(f"report: {len(faults)} of {len(NEEDED)} results are missing or not right")


if __name__ == "__main__":
    main()
