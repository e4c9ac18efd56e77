"""The experiments that ask the paper's questions: what their numbers mean, at toy size."""

import json
import math
import random
from dataclasses import asdict, dataclass, field, replace
from unittest.mock import Mock

import numpy as np
import pytest
import torch

import data
import experiments
from config import TrainConfig
from data import stories, tokenizers
from evaluate import evaluate
from experiments import ablations, anatomy, compare, icl, outliers, report, retrieval, scaling, training, tune
from experiments.program import command
from model import ATTENTIONS, GPT, GPTConfig, eager, rope_table, shared, softmax_map

WORDS = tokenizers.BPETokenizer.of_words(stories.VOCABULARY)
TOY = TrainConfig(
    n_layer=2,
    n_head=4,
    n_embd=32,
    emb_std=0.5,
    max_iters=2,
    batch_size=2,
    eval_interval=1,
    eval_windows=4,
    device="cpu",
)

USUAL = replace(TOY, n_head=TrainConfig().n_head, n_embd=TrainConfig().n_embd)  # where an experiment sets these


@dataclass(frozen=True)
class Few(stories.Difficulty):
    train_stories: int = 30
    val_stories: int = 9


@pytest.fixture(autouse=True)
def own_folders(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    monkeypatch.setattr(data, "CACHE", tmp_path / "cache")
    monkeypatch.setattr(experiments, "RESULTS", tmp_path / "results")
    monkeypatch.setattr("config.Difficulty", Few)


# --- compare and tune ------------------------------------------------------------------------


@pytest.mark.parametrize(
    "losses, loss, update",
    [
        ([3, 2, 1], 1.5, 15),
        ([3, 2, 1], 1.0, 20),
        ([3, 2, 1], 0.9, None),
        ([1, 2, 3], 1.0, 0),
        ([3, 1, 2], 2, 5),
        ([], 1, None),
    ],
)
def test_when_a_curve_comes_down_to_a_loss(losses, loss, update):
    history = [(10 * i, value, None) for i, value in enumerate(losses)]
    assert compare.reached(history, loss) == update


def test_how_much_sooner():
    run, slow = ([(0, 4.0, None), (10, 2.0, None), (20, last, None)] for last in (1.0, 1.9))
    assert compare.sooner([run, run], [slow, slow]) == "55% ± 0%"
    assert compare.sooner([slow, run], [run, run]) == "1 of 2 get there"
    assert compare.sooner([run], [run]) == "100%"
    up = [(0, 4.0, None), (10, 1.5, None), (20, 1.6, None)]  # a copy needs as many updates, wherever the loss goes
    assert compare.sooner([up], [up]) == "100%" and compare.sooner([up[:1]], [up[:1]]) == "0 of 1 get there"
    assert compare.sooner([run], [[(0, 0.5, None)]]) == "0 of 1 get there"


def test_tuning_finds_what_is_best_for_each_kind(monkeypatch):
    """And with as many runs for each, also beyond an edge; a comparison refuses what was found for other settings."""
    ideal, seen = {"standard": (2e-3, 0.2), "diff": (1e-3, 0.1)}, []

    def stand_in(cfg):
        seen.append(cfg)
        rate, std = ideal[cfg.attention]
        return {"val_loss": abs(math.log(cfg.learning_rate / rate)) + abs(math.log(cfg.init_std / std)) + cfg.seed}

    monkeypatch.setattr(tune, "trained", stand_in)
    monkeypatch.setattr(training, "ahead", lambda cfgs, **_: None)
    base = replace(TOY, learning_rate=1e-3, init_std=0.1)
    numbers = tune.tune(tune.TuneConfig(kinds=("standard", "diff"), train=base))
    assert {kind: (k["best"]["learning_rate"], k["best"]["init_std"]) for kind, k in numbers["kinds"].items()} == ideal
    assert [len(k["tries"]) for k in numbers["kinds"].values()] == [7, 7] and len(seen) == 2 * 7 * 2
    assert {cfg.learning_rate for cfg in seen} == {5e-4, 1e-3, 2e-3, 4e-3}  # 2e-3 was an edge at first, and 0.2
    assert {cfg.init_std for cfg in seen} == {0.05, 0.1, 0.2, 0.4}
    assert {cfg.seed for cfg in seen} == {100, 101} and all(cfg.seed == cfg.data_seed for cfg in seen)
    best = [row for row in tune.tables(numbers)["tries"] if row[4].startswith("best")]
    assert [row[:3] for row in best] == [["standard", "0.002", "0.2"], ["diff", "0.001", "0.1"]]
    assert [row[4] for row in best] == ["best", "best"]
    ideal["diff"] = (1.0, 1e-4)
    far = tune.tune(tune.TuneConfig(kinds=("standard", "diff"), train=base))
    assert [len(k["tries"]) for k in far["kinds"].values()] == [2 * tune.MOST - 1] * 2
    assert tune.tables(far)["tries"][-1][4] == "best, at the edge of learning_rate and init_std"
    ideal["diff"] = (1e-3, 0.1)

    experiments.save(experiments.RESULTS / "tune-stories.json", numbers)
    found = training.best_of("standard", base)
    assert (found.learning_rate, found.init_std, found.max_iters) == (2e-3, 0.2, 2)
    with pytest.raises(ValueError, match="made with max_iters=2, not 3: leave out --tuned"):
        training.best_of("standard", replace(base, max_iters=3))
    with pytest.raises(ValueError, match="no attention='diff_v2'"):
        training.best_of("diff_v2", base)
    with pytest.raises(ValueError, match="run python -m experiments.tune --dataset=a/my.txt first"):
        training.best_of("diff", replace(base, dataset="a/my.txt"))
    assert training.best_of("diff", training.shorter(base)).init_std == ideal["diff"][1]  # with --quick
    assert training.best_of("diff", replace(base, max_iters=1)).max_iters == 1
    compared = []
    result = {"params": 1, "val_loss": 2.0, "answers": None, "entropy": None, "lambdas": [], "history": [],
              "tokens_per_s": 1.0, "seconds": 1.0}  # fmt: skip
    monkeypatch.setattr(training, "trained", lambda cfg, **_: compared.append(cfg) or result)
    cfg = compare.CompareConfig(kinds=("standard", "diff"), seeds=1, tuned=True, train=base)
    assert compare.compare(cfg)["kinds"]["standard"]["learning_rate"] == 2e-3
    assert [(cfg.learning_rate, cfg.init_std) for cfg in compared] == list(ideal.values())


def test_sizes_and_variants_have_what_was_found_for_their_kind(monkeypatch, variants):
    """With --tuned, at every width; a variant has what its version has."""
    found = {"standard": (1e-3, 0.1), "diff": (2e-3, 0.05), "diff_v2": (4e-3, 0.2)}
    best = {kind: {"best": dict(zip(training.TUNED, values))} for kind, values in found.items()}
    experiments.save(experiments.RESULTS / "tune-stories.json", {"settings": asdict(USUAL), "kinds": best})
    trained, tried, factor = [], [], lambda cfg: {16: 4.0, 32: 0.5}[cfg.n_embd]

    def try_out(cfg):
        tried.append(cfg)
        return {"val_loss": abs(cfg.init_std - factor(cfg) * found[cfg.attention][1])}

    monkeypatch.setattr(training, "ahead", lambda cfgs, **_: None)
    monkeypatch.setattr(tune, "trained", try_out)
    monkeypatch.setattr(training, "trained", lambda cfg: trained.append(cfg) or {"val_loss": 2.0, "params": 1})
    numbers = scaling.scaling(scaling.ScalingConfig(widths=(16, 32, 64), seeds=1, tuned=True, train=USUAL))
    assert len(trained) == 9 and {cfg.n_embd for cfg in trained} == {16, 32, 64}
    arms = ablations.arms(USUAL, tuned=True)
    kinds = {name: name for name in found} | {name: "diff" for name in arms if name.startswith("diff_")}
    kinds |= {name: "diff_v2" for name in arms if name.startswith("diff_v2")}
    for cfg in trained:  # narrower ones have an initial scale of their own
        rate, std = found[cfg.attention]
        assert (cfg.learning_rate, cfg.init_std) == (rate, std * (1 if cfg.n_embd == USUAL.n_embd else factor(cfg)))
    assert numbers["kinds"]["diff"]["init_std"] == [0.2, 0.025, 0.05]
    assert {cfg.seed for cfg in tried} == {tune.TuneConfig().first_seed}
    assert len(tried) == 3 * (5 + 4)  # the best lies at an edge, twice at 16 channels
    bare = arms.pop("diff_no_norm, init_std of standard")
    assert (bare.attention, bare.learning_rate, bare.init_std) == ("diff_no_norm", 2e-3, 0.1)
    for name, cfg in arms.items():
        assert (cfg.learning_rate, cfg.init_std) == found[kinds.get(name, "standard")]


# --- retrieval -------------------------------------------------------------------------------


@pytest.mark.parametrize("depth, place", [(0.0, 0), (0.5, 4), (1.0, 8)])
def test_a_text_is_what_its_cell_says(depth, place):
    words, parts, answers = retrieval.text(random.Random(3).random, 5, 9, depth, 4)
    said = "".join(words)
    asked = list(stories.re.finditer(stories.ANSWER, said))
    assert len(words) == len(parts) == 1 + 9 * 4 + 4 * 7 and len(asked) == len(answers) == 4
    for at, answer in zip(answers, asked):
        assert "".join(words[at : at + 2]) == " " + answer[1] and said.count(answer[1]) == 2  # told, and asked for
    names = {part: [i for i, p in enumerate(parts) if retrieval.PARTS[p] == part] for part in retrieval.PARTS}
    assert [len(names[part]) for part in retrieval.PARTS] == [4, 16, 16, 1, 28]
    assert names["answer"] == list(range(1 + 4 * place, 5 + 4 * place)) and parts[0] == 3
    assert "".join(words[i] for i in names["answer"][1:3]) == " " + asked[0][1]
    assert len({answer[1] for answer in asked}) == 4


class Oracle(torch.nn.Module):
    """Answers by looking it up, but for questions at the places `blind`, and looks nowhere in particular."""

    def __init__(self, blind=(), verbs_only=False):
        super().__init__()
        self.blind, self.verbs_only = blind, verbs_only

    def forward(self, ids):
        logits = torch.zeros(*ids.shape, WORDS.vocab_size)
        name = WORDS.encode("? Ann")[0]
        for b, row in enumerate(ids.tolist()):
            text = [WORDS.decode_bytes([i]).decode().strip() for i in row]
            asked = 0
            for t in range(2, len(row)):
                if row[t - 1] == name or row[t - 2] == name:
                    who = t if row[t - 1] == name else t - 1
                    asked += who == t
                    if asked - 1 not in self.blind and not (self.verbs_only and who < t):
                        logits[b, t, row[text.index(text[who]) + 1 + t - who]] = 1
        return logits, None

    def attention_maps(self, ids):
        T = ids.shape[1]
        A1 = torch.ones(len(ids), 2, T, T).tril() / torch.arange(1, T + 1)[:, None]
        A2 = torch.zeros(len(ids), 2, T, T)
        A2[..., 0] = 1
        return [(A1, None, None), (A1, A2, torch.tensor(0.25))]


def test_a_model_that_looks_up_is_right_and_weights_add_up():
    cell = retrieval.ask(Oracle(), WORDS, 4, 12, 0.5, 3, texts=3)
    assert (cell["first"], cell["all"]) == (1, 1)
    cell = retrieval.ask(Oracle(verbs_only=True), WORDS, 4, 12, 0.5, 3, texts=3)
    assert (cell["first"], cell["all"]) == (0, 0)
    cell = retrieval.ask(Oracle(blind=(0,)), WORDS, 4, 12, 0.5, 3, texts=3)
    assert (cell["first"], cell["all"]) == (0, pytest.approx(2 / 3))
    falls, T = np.array(cell["shares"]), 1 + 12 * 4 + 4
    uniform = np.array([4, 12, 32, 1, 4]) / T
    np.testing.assert_allclose(falls[0], [uniform, uniform], atol=1e-6)
    np.testing.assert_allclose(falls[1][0], uniform - [0, 0, 0, 0.25, 0], atol=1e-6)
    np.testing.assert_allclose(falls.sum(axis=-1), [[1, 1], [0.75, 1]], atol=1e-6)
    assert falls[1][1][3] == pytest.approx((0.25 - 1 / T) / (0.25 + 1 - 2 / T), rel=1e-5)


@pytest.mark.parametrize("kind", ATTENTIONS)
def test_weights_of_a_model_add_up_to_its_row_sum(kind):
    model = GPT(GPTConfig(vocab_size=WORDS.vocab_size, n_layer=2, n_embd=32, attention=kind)).eval()
    cell = retrieval.ask(model, WORDS, 2, 12, 0.0, 2, texts=2)
    sums = np.array(cell["shares"])[:, 0].sum(axis=-1)
    for block, total in zip(model.blocks, sums):
        if kind == "diff_v2":
            assert 0 < total < 1
        else:
            assert total == pytest.approx(1 - (block.attn.lam().item() if kind == "diff" else 0), abs=1e-5)


# --- anatomy ---------------------------------------------------------------------------------


def test_rank_entropy_and_likeness():
    rank_one = torch.outer(torch.arange(1.0, 10), torch.arange(9.0, 0, -1))
    assert anatomy.effective_rank(rank_one).item() == pytest.approx(1, abs=1e-6)
    assert anatomy.effective_rank(torch.eye(9)).item() == pytest.approx(9)
    uniform = torch.full((8,), 1 / 8)
    assert anatomy.entropy(uniform).item() == pytest.approx(math.log(8)) and anatomy.entropy(torch.eye(3)[0]) == 0
    generator = torch.Generator().manual_seed(0)
    x, other = torch.randn(2, 500, 6, generator=generator)
    turn = torch.linalg.qr(torch.randn(6, 6, generator=generator))[0]
    assert anatomy.cka(x, 3 * x @ turn + 1).item() == pytest.approx(1, abs=1e-5) and anatomy.cka(x, other) < 0.05
    A, y = torch.rand(2, 3, 7, 7).tril(), torch.randn(2, 3, 7, 4)
    A[:, 1:] = A[:, :1]  # three heads with one map
    A = A / A.sum(dim=-1, keepdim=True)
    same = anatomy.of_layer(A, A, torch.tensor(0.25), y)
    assert same["cosine"] == pytest.approx(1) and same["negative"] == 0 and same["cka"] < 0.9
    assert same["rank A1"] == pytest.approx(same["rank lambda A2"]) == pytest.approx(same["rank weights"])
    assert anatomy.of_layer(A, A, torch.tensor(4.0), y)["negative"] == 1
    assert anatomy.of_layer(A[:, :1], None, None, y[:, :1])["cosine"] is None


@pytest.mark.parametrize("kind", ATTENTIONS)
def test_a_head_that_does_nothing_has_no_importance_and_lambda_is_scaled(kind):
    model = GPT(GPTConfig(n_layer=2, n_embd=32, attention=kind)).eval()
    idx = torch.arange(40).view(2, 20) % 64
    attn = model.blocks[1].attn
    width = 2 * attn.D  # a head of `diff`, two of the others
    attn.out_proj.weight.data[:, :width] = 0  # of layer 1, the first

    @torch.no_grad()
    def loss():
        return model(idx[:, :-1], idx[:, 1:])[1].item()

    before, rises = loss(), anatomy.importances(model, loss)
    heads = 32 // width
    assert [len(of_layer) for of_layer in rises] == [heads, heads]
    assert rises[1][0] == 0 and sum(rise == 0 for of_layer in rises for rise in of_layer) == 1
    with torch.no_grad():
        assert len(anatomy.looking(model, idx)) == 2
    if model.attention_maps(idx)[0][2] is not None:
        assert anatomy.scaled(model, loss, 1.0) == before != anatomy.scaled(model, loss, 0.5)
    assert loss() == before  # all is as it was


def test_the_start_is_that_of_the_run_itself():
    cfg = anatomy.AnatomyConfig(dataset="stories", kinds=("standard",), seeds=2, train=replace(TOY, max_iters=0))
    found = anatomy.anatomy(cfg)["kinds"]["standard"]
    assert found["cosine at the start"] == found["cosine"] and found["cosine"][0] != found["cosine"][1]


def test_how_uneven_heads_are():
    assert anatomy.uneven([1.0, 1.0, 1.0]) == 0 and anatomy.uneven([0.0, 2.0]) == pytest.approx(math.sqrt(2))
    assert anatomy.uneven([1.0]) is None and anatomy.uneven([-1.0, 0.5]) is None


def test_what_fills_up_a_story_is_left_out():
    x = np.arange(40).reshape(4, 10)
    y = np.where(np.arange(10) < np.array([4, 10, 6, 8])[:, None], x, -1)
    found = training.equally_long((x, y, None), 9)
    assert found.tolist() == [x[1, :8].tolist(), x[3, :8].tolist()]
    assert training.equally_long((x, x, None), 3).tolist() == x[:3].tolist()


# --- outliers --------------------------------------------------------------------------------


@pytest.mark.parametrize("kind", ["standard", "diff", "diff_v2"])  # of another they might all be equal
def test_logits_with_all_their_bits_change_nothing_and_fewer_change_more(kind):
    model = GPT(GPTConfig(n_layer=1, n_embd=32, attention=kind)).eval()
    x = torch.randn(2, 20, 32, generator=torch.Generator().manual_seed(0))
    operands = model.blocks[0].attn.operands(x, rope_table(model.cfg, 0, 20, like=x))
    exact = eager(*operands)
    errors = [(outliers.attend_with(bits)(*operands) - exact).abs().max().item() for bits in outliers.BITS]
    assert errors[0] < 1e-6 < errors[1] < errors[2] < errors[3]


def test_quantising():
    logits = torch.tensor([[[[7.0, 99.0], [-3.2, 7.0]]]])  # 99 is in the future: it sets no scale
    assert outliers.rounded(logits, 4)[0, 0].tolist() == [[7, 99], [-3, 7]]
    assert torch.equal(outliers.rounded(logits, None), logits)
    assert outliers.rounded(torch.zeros(1, 1, 2, 2), 4).tolist() == torch.zeros(1, 1, 2, 2).tolist()


def test_a_planted_outlier_is_the_largest(monkeypatch):
    model = GPT(GPTConfig(n_layer=2, n_embd=32, attention="diff")).eval()
    idx = torch.arange(20).view(1, 20)
    before = outliers.largest(model, idx)
    operands = model.blocks[1].attn.operands

    def planted(*a):
        q1, k1, q2, k2, v, lam = operands(*a)
        q2, k2 = q2.clone(), k2.clone()
        q2[0, 0, 5], k2[0, 0, 3] = 30.0, 30.0  # of the second map: 8 x 30 x 30 / sqrt(8)
        k2[0, 0, 9] = 1000.0  # in the future of token 5; seen from later ones
        q2[0, 0, 9:] = 0.0
        return q1, k1, q2, k2, v, lam

    model.blocks[1].attn.operands = planted
    after = outliers.largest(model, idx)
    assert after["logits"]["1st"] == pytest.approx(900 * math.sqrt(8)) and before["logits"]["1st"] < 100
    assert list(after["logits"]) == ["1st", "2nd", "3rd", "10th", "100th", "median"]
    sizes = [after["hidden states"][place] for place in list(outliers.TOP)]
    assert sizes == sorted(sizes, reverse=True)


# --- scaling ---------------------------------------------------------------------------------


def test_a_kind_that_needs_fewer_parameters_and_a_copy_of_the_baseline():
    params = [50_000, 100_000, 200_000, 800_000]

    def losses(saved, noise=0.0):
        sizes = np.log(np.array(params) / saved)
        return [(4 - 0.2 * sizes + noise * seed * np.array([1, -1, 1, -1])).tolist() for seed in range(3)]

    kinds = {"standard": losses(1), "better": losses(0.8), "same": losses(1, noise=0.01)}
    numbers = {"seeds": [0, 1, 2], "widths": [1, 2, 3, 4],
               "kinds": {kind: {"init_std": [0.1] * 4, "params": params, "val_loss": found}
                         for kind, found in kinds.items()}}  # fmt: skip
    assert scaling.needed(numbers, "better") == pytest.approx([0.8] * 3)
    a, b, off = scaling.line(params, kinds["standard"][0])
    assert (a, b, off) == (pytest.approx(4), pytest.approx(0.2), pytest.approx(0, abs=1e-9))
    equal = {row[0]: row[1] for row in scaling.tables(numbers)["equal"][1:]}
    assert equal["better"] == "80% (80% to 80%)" and "not distinguishable" in equal["same"]
    assert scaling.tables(numbers)["losses"][1][-2] == f"{0.2 * math.log(2):.3f} ± 0.000"
    assert scaling.said([0.8]) == "80% (one seed says nothing)"
    half = math.log(2) * experiments.T_975[1] / math.sqrt(3)  # of logarithms: twice as many is as far as half
    assert (
        scaling.said([0.5, 1.0, 2.0]) == f"100% ({math.exp(-half):.0%} to {math.exp(half):.0%}) (not distinguishable)"
    )
    for saved, verdict in ((0.8, "seen"), (1.25, "opposite")):
        kinds = {"standard": losses(1), "diff": losses(saved)}
        found = {"kinds": {kind: {"params": params, "val_loss": found} for kind, found in kinds.items()}}
        assert report.parameters(found, "diff") == (f"{saved:.0%} ({saved:.0%} to {saved:.0%})", verdict)
    assert report.parameters(numbers, "same")[1] == report.NEITHER
    kinds["standard"] = [losses[::-1] for losses in kinds["standard"]]
    numbers["kinds"]["standard"]["val_loss"] = kinds["standard"]
    assert scaling.needed(numbers, "better") is None and "does not fall" in scaling.tables(numbers)["equal"][1][1]
    for widths, why in (((32, 64), "at least 3"), ((32, 48, 64, 32), "each of them once")):
        with pytest.raises(ValueError, match=why):
            scaling.scaling(scaling.ScalingConfig(widths=widths))


# --- ablations -------------------------------------------------------------------------------


@pytest.fixture
def variants(monkeypatch):
    monkeypatch.setattr("model.ATTENTIONS", ATTENTIONS)
    for name, variant in ablations.VARIANTS.items():
        monkeypatch.setitem(ATTENTIONS, name, variant)


def layer(kind, layer=1, **changes):
    """(layer, x, rope) of a model of 4 heads of 8, in float64."""
    model = GPT(GPTConfig(n_layer=2, n_embd=32, attention=kind, **changes)).double()
    x = torch.randn(2, 9, 32, dtype=torch.float64, generator=torch.Generator().manual_seed(0))
    return model.blocks[layer].attn, x, rope_table(model.cfg, 0, 9, like=x)


def before_merging(attn, x, rope):
    """(B, heads, T, E): what a layer's heads put out, before they are merged."""
    seen = []
    attn.out_proj.register_forward_pre_hook(lambda _, inputs: seen.append(inputs[0]))
    attn(x, rope)
    return seen[0].unflatten(2, (-1, attn.value_factor * attn.D)).transpose(1, 2)


def test_variants_are_what_they_are_named_for(variants):
    """Each from the maps of its layer, by hand."""
    diff, x, rope = layer("diff")
    A1, A2, lam = diff.maps(x, rope)
    v = diff.operands(x, rope)[4]

    def norm(y):
        return y / (y.square().mean(dim=-1, keepdim=True) + 1e-5).sqrt()

    init = 0.8 - 0.6 * math.exp(-0.3)
    expected = {
        "diff": (1 - init) * norm((A1 - lam * A2) @ v), "diff_no_norm": (1 - init) * ((A1 - lam * A2) @ v),
        "diff_no_factor": norm((A1 - lam * A2) @ v), "diff_lambda_0": (1 - init) * norm(A1 @ v),
        "diff_lambda_1": (1 - init) * norm((A1 - A2) @ v),
        "diff_init_0.8": 0.2 * norm((A1 - (lam - init + 0.8) * A2) @ v),
        "diff_init_0.5": 0.5 * norm((A1 - (lam - init + 0.5) * A2) @ v),
    }  # fmt: skip
    for kind, y in expected.items():
        torch.testing.assert_close(before_merging(layer(kind)[0], x, rope), y, msg=kind, rtol=1e-9, atol=1e-9)

    standard, *_ = layer("standard")
    A, v = standard.maps(x, rope)[0], standard.operands(x, rope)[4]
    torch.testing.assert_close(before_merging(layer("standard_norm")[0], x, rope), norm(A @ v))

    for changes in ({}, {"n_kv_head": 2}):
        v2, *_ = layer("diff_v2", **changes)
        A1, A2, lam = v2.maps(x, rope)
        v = shared(v2.operands(x, rope)[4], 4)
        raw = (x @ v2.lambda_proj.weight.T).transpose(1, 2)[..., None]
        for kind, weights in {"diff_v2_no_sigmoid": A1 - raw * A2, "diff_v2_no_lambda": A1 - A2}.items():
            torch.testing.assert_close(before_merging(layer(kind, **changes)[0], x, rope), weights @ v, msg=kind)
        A = torch.stack((A1, A2), dim=2).flatten(1, 2)  # 8 maps, in the order of the query heads
        keys = v2.operands(x, rope)[1].shape[1]
        values = v2.operands(x, rope)[4].repeat_interleave(8 // keys, dim=1)
        q = v2.qkv(x, rope, None)[0]
        own = softmax_map(q, v2.operands(x, rope)[1])
        torch.testing.assert_close(own, A)
        y = own @ values
        across = y[:, :4] - torch.sigmoid(raw) * y[:, 4:]
        torch.testing.assert_close(before_merging(layer("diff_v2_across", **changes)[0], x, rope), across)


def test_arms_are_fair(variants):
    """Equal batches and, but for a vector or two, equally many parameters."""
    arms = ablations.arms(replace(TOY, n_embd=64))
    counts = {name: GPT(arm.model_config(99)).num_params() for name, arm in arms.items()}
    assert len(arms) == 15 and max(counts.values()) - min(counts.values()) < 0.01 * counts["standard"]
    assert arms["standard, half the heads, twice as wide"].model_config().head_size == 32
    for arm in arms.values():
        assert replace(arm, attention="", n_head=0, n_kv_head=0) == replace(TOY, n_embd=64, attention="", n_head=0)


def test_gradients_and_spikes_are_of_equal_settings(monkeypatch, variants):
    """What is tuned for each version would be seen in both."""
    best = {kind: {"best": {"learning_rate": 1e-3 * i, "init_std": 0.1 * i}} for i, kind in enumerate(ATTENTIONS, 1)}
    experiments.save(experiments.RESULTS / "tune-stories.json", {"settings": asdict(TOY), "kinds": best})
    seen, fast, before = [], [], []
    monkeypatch.setattr(training, "ahead", lambda cfgs, **_: before.extend(cfgs))
    monkeypatch.setattr(tune, "trained", lambda cfg: {"val_loss": 2.0})
    monkeypatch.setattr(ablations, "gradients", lambda cfg, text: seen.append(cfg) or {"q_proj": 1.0})
    monkeypatch.setattr(ablations, "spikes", lambda cfg: fast.append(cfg) or len(fast))
    found = ablations.ablations(ablations.AblationsConfig(updates=6, seeds=1, tuned=True, train=TOY))["arms"]
    assert {(cfg.learning_rate, cfg.init_std) for cfg in seen} == {(TOY.learning_rate, TOY.init_std)}
    assert len(seen) == 15 and found["diff_no_factor"]["init_std"] == 0.2
    assert [cfg.learning_rate / TOY.learning_rate for cfg in fast] == [*ablations.RATES] * 4
    assert {(cfg.init_std, cfg.max_iters, cfg.eval_interval, cfg.log_interval) for cfg in fast} == {
        (TOY.init_std, 6, 6, 1)
    }
    assert len(before) == 15 + 20 and all(cfg in before for cfg in fast)
    assert found["diff"]["spikes"] == [[6, 7, 8, 9, 10]] and found["diff_v2"]["spikes"] == [[11, 12, 13, 14, 15]]


def test_spikes_are_counted(tmp_path, monkeypatch):
    """From a run's log; a run that ended early is told from one without a spike."""

    def stand_in(cfg):
        if cfg.learning_rate > 3:
            raise FloatingPointError
        return {"out_dir": str(cfg.learning_rate)}

    logs = {"1.0": [5, 4, 3, 3.4, 2, 2], "2.0": [5, 4, 4.6, 3, 9, 3.4]}
    monkeypatch.setattr(ablations, "trained", stand_in)
    monkeypatch.setattr(ablations, "read_log", lambda run: [{"loss": x} for x in logs[str(run)]] + [{"val_loss": 99}])
    assert [ablations.spikes(replace(TOY, learning_rate=rate)) for rate in (1.0, 2.0, 4.0)] == [0, 2, None]


def test_tables_of_ablations_say_who_is_worse():
    def arm(losses, slope):
        return {"val_loss": losses, "gradients": [{"q_proj": slope * (1 + i)} for i in range(3)], "spikes": []}

    arms = {"standard": arm([2.0, 2.1, 1.9], 2.0), "diff": arm([2.01, 2.08, 1.91], 1.0),
            "diff_no_norm": arm([3.0, 3.1, 2.9], 4.0), "diff_v2": arm([2.0, None, 2.0], 2.0)}  # fmt: skip
    shown = ablations.tables({"seeds": [0, 1, 2], "arms": arms})
    rows = {row[0]: row[1:] for row in shown["losses"]}
    assert "not distinguishable" in rows["diff"][2] and rows["diff_no_norm"][1:] == [
        "+1.0000 ± 0.0430",
        "+1.0000 ± 0.0000",
    ]
    assert rows["diff_v2"] == ["diverged (1 of 3)", "", ""]
    assert [row[1] for row in shown["gradients"][1:]] == ["1.00", "0.50", "2.00", "1.00"]


# --- icl -------------------------------------------------------------------------------------


class Reader(torch.nn.Module):
    """Knows the classes, and labels a word as the last example of its class was, `places` examples back at most."""

    def __init__(self, words, places=99):
        super().__init__()
        self.words, self.places = words, places

    def forward(self, ids):
        logits, class_of = torch.zeros(*ids.shape, self.words.vocab_size), dict(icl.ITEMS)
        for b, row in enumerate(ids.tolist()):
            said = [self.words.decode_bytes([i]).decode().strip() for i in row]
            for t in range(1, len(row), 3):
                for before in range(t - 3, max(0, t - 3 * self.places) - 1, -3):
                    if before > 0 and class_of[said[before]] == class_of[said[t]]:
                        logits[b, t, row[before + 1]] = 1
                        break
        return logits, None


def test_labels_are_new_in_every_text_and_right_ones_are_counted():
    words, draw = icl.tokenizer(), random.Random(0)
    texts = [icl.episode(draw, 32) for _ in range(20)]
    for examples in texts:
        label_of = {}
        assert all(label_of.setdefault(dict(icl.ITEMS)[word], label) == label for word, label in examples)
        assert len(set(label_of.values())) == len(label_of)
    assert len({dict(examples).get("owl") for examples in texts}) > 4
    found = icl.right(Reader(words), words, texts)
    for shots, examples in zip(found, texts):
        seen = [dict(icl.ITEMS)[word] for word, _ in examples]
        assert shots.tolist() == [name in seen[:i] for i, name in enumerate(seen)]
    shares = icl.by_shots(Reader(words), words, 100)
    assert shares[0] == 0 and shares[-1] == 1 and shares == sorted(shares)
    assert icl.at_best(0) == pytest.approx(1 / 8) and icl.at_best(1) == pytest.approx(1 / 4 + 3 / 4 / 7)
    two = 1 - 9 / 16 + 9 / 16 * (1 / 3 / 7 + 2 / 3 / 6)
    assert icl.at_best(2) == pytest.approx(two) and 1 > icl.at_best(31) > 0.999


def test_the_spread_over_orders_is_that_of_a_reader():
    """Who reads it all is right in any order; who looks at the last two alone knows one class or two."""
    words = icl.tokenizer()
    for of_sets in icl.by_order(Reader(words), words, 2, 8, 4).values():
        assert of_sets == [(1, 1, 1)] * 2
    found = icl.by_order(Reader(words, places=2), words, 3, 8, 20)
    assert found["by class"] == [(0.25, 0.25, 0.25)] * 3  # the last two are of one class, whichever
    assert found["in turn"] == [(0.5, 0.5, 0.5)] * 3  # and here of two
    assert all((best, worst) == (0.5, 0.25) and worst < mean < best for best, worst, mean in found["random"])
    assert icl.spread(found["random"]) == 0.25


def test_a_prepared_text_trains_and_is_prepared_once(capsys):
    folder = icl.prepare(5)
    before = {path: path.stat().st_mtime_ns for path in folder.iterdir()}
    assert icl.prepare(5) == folder and before == {path: path.stat().st_mtime_ns for path in folder.iterdir()}
    x, y = data.load(str(folder)).batch(0, 2, 96, 0)
    said = data.load(str(folder)).tokenizer.decode_bytes(x[0]).decode()
    assert said.startswith("\n") and said.count(".") == 31 and "\n" not in said[1:]
    with pytest.raises(ValueError, match="examples=7 must be a multiple of 4, up to 28: use 8"):
        icl.icl(icl.IclConfig(examples=7))


# --- report ----------------------------------------------------------------------------------


def arm(*losses):
    history = [[(0, 4.0, None), (100, loss, None)] for loss in losses]
    return {"learning_rate": 1e-3, "init_std": 0.1, "val_loss": [*losses], "history": history}


def save_best(dataset, **kinds):
    """tune-DATASET.json: (learning rate, init_std) of each kind."""
    best = {kind: {"best": dict(zip(training.TUNED, values))} for kind, values in kinds.items()}
    experiments.save(experiments.RESULTS / f"tune-{dataset}.json", {"kinds": best})


def test_claims_get_their_verdicts_from_results(capsys, monkeypatch):
    """Missing ones, those of few seeds and those of other settings get none, and fail the check by name."""

    def verdicts():
        return {row[0]: row[2:5] for row in report.tables()["claims"]}

    assert verdicts()["V1 has a lower loss"] == ["", "", "not asked yet"]
    assert verdicts()["mathematics"][2].startswith("cannot be asked here")
    better, same = arm(1.9, 2.0, 1.8, 1.91, 1.9), arm(2.01, 2.08, 1.91, 2.0, 2.0)
    kinds = {"standard": arm(2.0, 2.1, 1.9, 2.0, 2.0), "diff": better, "diff_v2": same}
    numbers = {"settings": asdict(report.SHAKESPEARE), "seeds": [*range(1, 6)], "baseline": "standard", "kinds": kinds}
    numbers["minutes"] = 41.6
    path = experiments.RESULTS / "compare-shakespeare-tuned.json"
    experiments.save(path, numbers)
    assert verdicts()["V1 has a lower loss"][2] == "not asked yet"  # nothing is tuned
    save_best("shakespeare", **dict.fromkeys(kinds, (1e-3, 0.1)))
    told, seeds, verdict = verdicts()["V1 has a lower loss"]
    assert told.startswith("2.000 → 1.902 (-0.098 ± ") and (seeds, verdict) == ("5", "seen")
    row = next(row for row in report.tables()["claims"] if row[0] == "V1 has a lower loss")
    assert row[5:] == ["`python -m experiments.compare --dataset=shakespeare --tuned`", "42"]
    assert verdicts()["V2 has a lower loss"][2] == "not distinguishable"
    told, _, verdict = verdicts()["V1 needs fewer tokens for an equal loss"]
    assert told.startswith("100% → 95%") and verdict == "seen"
    kinds["diff"] = arm(2.1, 2.2, 2.0, 2.11, 2.1)
    experiments.save(path, numbers)
    assert verdicts()["V1 has a lower loss"][2] == "opposite"
    assert verdicts()["V1 needs fewer tokens for an equal loss"] == ["0 of 5 get there", "5", "opposite"]
    kinds["diff"] = arm(2.1, 2.2, 2.0, 2.11, 1.9)
    experiments.save(path, numbers)
    told = verdicts()["V1 needs fewer tokens for an equal loss"]
    assert told == ["1 of 5 get there", "5", "not distinguishable"]

    experiments.save(path, {**numbers, "settings": {**numbers["settings"], "max_iters": 7}})
    assert report.wrong("compare-shakespeare-tuned").endswith("was made with max_iters=7: now it is 2000")
    assert verdicts()["V1 has a lower loss"][2] == "not asked yet"
    for wrong, said in (
        ({"seeds": [1, 2]}, "has seeds [1, 2], and needs 5 from 1 on"),
        ({"seeds": [*range(100, 105)]}, "has seeds [100, 101, 102, 103, 104], and needs 5 from 1 on"),
        ({"settings": {**numbers["settings"], "block_size": 256}}, "made with block_size=256: now it is 64"),
        ({"kinds": {kind: kinds[kind] for kind in ("diff", "standard", "diff_v2")}}, "needs standard first, diff and"),
        ({"kinds": {kind: kinds[kind] for kind in ("standard", "diff_v2")}}, "needs standard first, diff and diff_v2"),
        ({"kinds": {**kinds, "diff": {**better, "init_std": 0.2}}}, "init_std=0.2 for diff, tune-shakespeare.json 0.1"),
    ):
        experiments.save(path, {**numbers, **wrong})
        assert said in report.wrong("compare-shakespeare-tuned")
    of_all = {name: {setting: k[setting] for setting in training.TUNED} for name, k in kinds.items()}
    of_all["diff_v2"]["init_std"] = 0.3  # of a result that keeps them beside its kinds
    experiments.save(path, {**numbers, "own": of_all})
    assert report.wrong("compare-shakespeare-tuned").endswith("init_std=0.3 for diff_v2, tune-shakespeare.json 0.1")
    save_best("shakespeare", **dict.fromkeys((*kinds, "another"), (1e-3, 0.1)))
    experiments.save(path, numbers)
    assert report.wrong("compare-shakespeare-tuned") == ""
    path.unlink()
    monkeypatch.setattr("sys.argv", ["report", "--check"])
    with pytest.raises(SystemExit, match="7 of 7 results are missing or not right"):
        report.main()
    said = capsys.readouterr()
    assert "| V1 has a lower loss" in said.out and "run python -m experiments.scaling --tuned first" in said.err
    assert experiments.how("compare-shakespeare-tuned") == "python -m experiments.compare --dataset=shakespeare --tuned"


def test_a_model_that_guesses_gets_no_verdict():
    """Few bits and other orders change nothing for it."""
    bits = lambda rise, answers: [[[1.0, share], [1.0 + rise, share]] for share in answers]  # noqa: E731
    good, bad = [0.9, 1.0, 0.95], [0.9, 0.2, 0.9]
    kinds = {"standard": {"bits": bits(0.3, good)}, "diff": {"bits": bits(0.1, good)}}
    assert report.FEW_BITS({"kinds": kinds}, "diff")[1] == "seen"
    lost = {"kinds": {"standard": {"val_loss": [2.0, 2.1]}, "diff": {"val_loss": [2.0, None]}}}
    assert report.MORE(lost, "diff") == ("a run diverged, or has no number", "cannot be told")
    for kind in kinds:
        guessing = {**kinds, kind: {"bits": bits(0.1, bad)}}
        assert report.FEW_BITS({"kinds": guessing}, "diff")[1] == "not all have learned it"
    orders = lambda worst, mean: [{sort: [(0.9, worst, mean)] for sort in icl.SORTS}] * 3  # noqa: E731
    kinds = {"standard": {"orders": orders(0.5, 0.7)}, "diff": {"orders": orders(0.6, 0.8)}}
    assert [read({"kinds": kinds}, "diff")[1] for read in (report.ANY_ORDER, report.IN_TURN)] == ["seen"] * 2
    kinds["diff"] = {"orders": orders(0.6, 0.4)}
    assert report.ANY_ORDER({"kinds": kinds}, "diff")[1] == "not all have learned it"


def test_every_claim_can_be_read_from_its_result(variants, monkeypatch):
    """From the numbers that each experiment makes, at toy size."""
    monkeypatch.setattr(retrieval, "FACTS", (2, 3))
    monkeypatch.setattr(retrieval, "SENTENCES", (12, 40))
    monkeypatch.setattr(icl, "SHOTS", (0, 3))
    made = {
        "compare-shakespeare-tuned": compare.compare(compare.CompareConfig(seeds=2, train=TOY)),
        "scaling-tuned": scaling.scaling(scaling.ScalingConfig(widths=(16, 32, 64), seeds=2, train=USUAL)),
        "ablations-tuned": ablations.ablations(ablations.AblationsConfig(updates=2, seeds=2, train=TOY)),
        "anatomy-shakespeare-tuned": anatomy.anatomy(anatomy.AnatomyConfig(dataset="stories", seeds=2, train=TOY)),
        "retrieval": retrieval.retrieval(retrieval.RetrievalConfig(seeds=2, texts=1, train=TOY)),
        "outliers": outliers.outliers(outliers.OutliersConfig(seeds=2, train=TOY)),
        "icl-tuned": icl.icl(icl.IclConfig(seeds=2, texts=5, texts_asked=3, sets=2, orders=2, train=TOY)),
    }
    save_best(TOY.dataset, **dict.fromkeys(("standard", "diff", "diff_v2"), (TOY.learning_rate, TOY.init_std)))
    for name, numbers in made.items():
        experiments.save(experiments.RESULTS / f"{name}.json", {"minutes": 2.0, **numbers})
        monkeypatch.setitem(report.NEEDED, name, (USUAL if name == "scaling-tuned" else TOY, 2))
        assert report.wrong(name) == ""
    rows = report.tables()["claims"][1:]
    rows = rows[: len(report.CLAIMS)]
    assert all(row[2] and row[3] == "2" for row in rows)
    legal = (
        "seen",
        "opposite",
        report.NEITHER,
        "not all have learned it",
        "see the picture",
        "cannot be asked here: hangs",
    )
    assert all(row[4].startswith(legal) for row in rows)


# --- The command of an experiment ------------------------------------------------------------


@pytest.mark.parametrize(
    "flags, name",
    [
        ([], "toy"),
        (["--quick"], "toy-quick"),
        (["--train.max_iters=7"], "toy-changed"),
        (["--tuned", "--train.max_iters=7", "--quick"], "toy-changed-tuned-quick"),
        (["--name=mine", "--quick"], "mine"),
    ],
)
def test_a_result_of_other_settings_has_another_name(flags, name, monkeypatch, capsys):
    """What a reader expects in a file is not written over by a try."""

    @dataclass
    class ToyConfig:
        seeds: int = 3
        quick: bool = False
        tuned: bool = False
        name: str = ""
        train: TrainConfig = field(default_factory=TrainConfig)

    monkeypatch.setattr("sys.argv", ["toy", *flags])
    drawn = []
    command(
        ToyConfig, lambda cfg: {"seeds": [0], "updates": cfg.train.max_iters}, "toy",
        lambda numbers: {"": [["updates"], [str(numbers["updates"])]]},
        lambda numbers, path: drawn.append(path.name), "A toy.",
    )  # fmt: skip
    assert [path.name for path in experiments.RESULTS.iterdir()] == [f"{name}.json"] and drawn == [f"{name}.png"]
    numbers = json.loads((experiments.RESULTS / f"{name}.json").read_text())
    assert numbers["updates"] == (7 if "changed" in name else TrainConfig().max_iters) and numbers["minutes"] >= 0
    assert f"experiments/results/{name}.json" in capsys.readouterr().out
    monkeypatch.setattr("sys.argv", ["toy", "--name=../x"])
    with pytest.raises(SystemExit, match="toy: name='../x' must be the name of a file"):
        command(ToyConfig, None, "toy", None, None, "A toy.")
    for error, said in ((MemoryError("too little"), "toy: too little"), (KeyboardInterrupt(), "130")):
        monkeypatch.setattr("sys.argv", ["toy"])
        with pytest.raises(SystemExit, match=said):
            command(ToyConfig, Mock(side_effect=error), "toy", None, None, "A toy.")


def test_quick_is_shorter_and_easier():
    settings = compare.CompareConfig(seeds=4, train=TrainConfig(max_iters=400, people=9, fewest=3, denials=5))
    assert training.shortened(settings) == replace(settings, train=replace(settings.train, emb_std=0.5))
    assert training.shortened(replace(settings, dataset="a.txt")).train == replace(
        settings.train, dataset="a.txt", emb_std=0.1
    )
    quick = training.shortened(replace(settings, quick=True))
    easier = replace(settings.train, max_iters=100, people=6, denials=0, emb_std=0.5)
    assert quick.seeds == 1 and quick.train == easier
    for fewest, people in ((7, 7), (2, 4)):
        crowd = replace(settings.train, fewest=fewest, people=max(people, fewest))
        assert training.shortened(replace(settings, quick=True, train=crowd)).train.people == people


# --- Each of them from its first run to its picture ------------------------------------------


@pytest.mark.parametrize(
    "experiment, settings",
    [
        (retrieval, dict(texts=1)),
        (anatomy, dict(dataset="stories", windows=2)),
        (outliers, dict(windows=2)),
        (scaling, dict(widths=(16, 32, 48), train=USUAL)),
        (ablations, dict(updates=3)),
        (icl, dict(texts=9, texts_asked=3, sets=2, orders=2)),
    ],
    ids=lambda value: getattr(value, "__name__", "").removeprefix("experiments."),
)
def test_from_training_to_picture(experiment, settings, tmp_path, monkeypatch, variants):
    monkeypatch.setattr(retrieval, "FACTS", (2, 3))
    monkeypatch.setattr(retrieval, "SENTENCES", (12, 40))
    name = experiment.__name__.removeprefix("experiments.")
    kind = next(value for key, value in vars(experiment).items() if key.lower() == f"{name}config")
    numbers = json.loads(json.dumps(getattr(experiment, name)(kind(**{"seeds": 2, "train": TOY, **settings}))))
    assert list(numbers.get("kinds", numbers.get("arms")))[:3] == ["standard", "diff", "diff_v2"]
    assert numbers["seeds"] == [1, 2]
    for rows in experiment.tables(numbers).values():
        assert len({len(row) for row in rows}) == 1 and len(rows) > 2
    experiment.picture(numbers, tmp_path / "picture.png")
    assert (tmp_path / "picture.png").stat().st_size > 5000
    if experiment is outliers:  # without bits it is the run's own loss
        model = next(training.models({"diff": replace(TOY, attention="diff")}, [1]))[2]
        windows = data.load("stories", difficulty=Few()).val_windows(4, TOY.block_size)
        own = evaluate(model, windows, 2, torch.device("cpu"))[0]
        assert numbers["kinds"]["diff"]["bits"][0][0][0] == pytest.approx(own, abs=1e-5)
    wrongs = {"seeds=11": dict(seeds=11), "train.seed=3": dict(train=replace(TOY, seed=3))}
    if experiment is not ablations:
        wrongs |= {"kinds='' must be": dict(kinds=()), "kinds='diff diff'": dict(kinds=("diff", "diff"))}
    for part, wrong in wrongs.items():
        with pytest.raises(ValueError, match=part):
            getattr(experiment, name)(kind(**{"train": TOY, **wrong}))
