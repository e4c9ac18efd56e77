"""Experiments at toy size: what their numbers mean, not only that a file appeared."""

import json
import math
import multiprocessing
import os
import signal
import subprocess
import sys
import time
from concurrent.futures import ThreadPoolExecutor
from contextlib import nullcontext
from dataclasses import asdict, dataclass, replace
from pathlib import Path

import numpy as np
import pytest
import torch

import checkpoint
import data
import experiments
from data.tokenizers import CharTokenizer
from experiments import compare, length, maps, mean_sd, measure, paired, speed, training
from experiments.training import trained
from model import ATTENTIONS, GPT, GPTConfig, eager, fastest
from sample import encode_prompt
from train import train


@pytest.fixture(autouse=True)
def own_results(tmp_path, monkeypatch):
    monkeypatch.setattr(experiments, "RESULTS", tmp_path / "results")


def test_statistics():
    assert mean_sd([1.0, 2.0, 6.0]) == (3.0, pytest.approx(math.sqrt(7)))
    mean, sd, half = paired([1.0, 2.1, 3.2], [1.0, 2.0, 3.0])
    assert (mean, sd) == (pytest.approx(0.1), pytest.approx(0.1))
    assert half == pytest.approx(4.303 * 0.1 / math.sqrt(3))
    assert mean_sd([1.0]) == (1.0, None) and paired([1.0], [2.0]) == (-1.0, None, None)


def test_trained_runs_are_remembered_and_gone_on_with(tiny, monkeypatch, capsys):
    cfg = tiny(max_iters=6)
    first = trained(cfg)
    called = []

    def stand_in(cfg):
        called.append(cfg)
        Path(cfg.out_dir).mkdir(parents=True, exist_ok=True)
        return {"val_loss": 1.0, "seconds": 1.0}

    monkeypatch.setattr("train.train", stand_in)
    monkeypatch.setattr(training, "REMEMBERED", remembered := {})
    for _ in range(2):
        assert trained(tiny(max_iters=6, out_dir="elsewhere")) == first and not called and not remembered
    monkeypatch.setattr(training, "TRAINED", set())  # another process
    for _ in range(2):
        assert trained(tiny(max_iters=6)) == first and not called
    assert list(remembered.values()) == [first["seconds"]] and first["seconds"] > 0
    assert "remembered" in capsys.readouterr().out
    trained(tiny(max_iters=6, seed=1))
    assert called[0].seed == 1 and not called[0].resume
    run = training.RUNS / training.fingerprint(tiny(max_iters=7))
    run.mkdir(parents=True)
    (run / "ckpt.pt").touch()
    trained(tiny(max_iters=7))
    assert called[1].resume and called[1].out_dir == str(run)


def test_a_run_that_diverged_is_remembered(tiny, monkeypatch):
    called = []

    def stand_in(cfg):
        called.append(cfg)
        raise FloatingPointError("the loss is nan")

    monkeypatch.setattr("train.train", stand_in)
    training.ahead([tiny()], trials=True)
    for again in (lambda: trained(tiny()), lambda: training.ahead([tiny(), tiny(seed=1)])):
        with pytest.raises(FloatingPointError, match="the loss is nan"):
            again()
    assert len(called) == 1


def test_a_run_that_another_process_is_at(tiny, monkeypatch, capsys):
    """Is left to it, or waited for."""
    monkeypatch.setattr("train.train", lambda cfg: {"val_loss": float(cfg.seed)})
    theirs, ours = tiny(seed=1), tiny(seed=2)
    run = training.RUNS / training.fingerprint(theirs)
    run.mkdir(parents=True)
    lock = checkpoint.claim(run, "result.lock")
    training.ahead([theirs, ours])
    assert not (run / "result.json").exists() and trained(ours)["val_loss"] == 2
    with pytest.raises(checkpoint.InUse):
        trained(theirs, wait=False)
    with ThreadPoolExecutor() as thread:
        found = thread.submit(trained, theirs)
        while "waiting" not in capsys.readouterr().out:
            time.sleep(0.01)
        (run / "result.json").write_text('{"val_loss": 3}')
        lock.close()
        assert found.result() == {"val_loss": 3}


@dataclass
class Shared:
    runs: list
    cache: Path
    jobs: int = 2


def until(true):
    deadline = time.monotonic() + 60
    while not true():
        assert time.monotonic() < deadline
        time.sleep(0.01)


def share(cfg):
    data.CACHE = cfg.cache
    training.ahead(cfg.runs)
    (cfg.cache / "measured").touch()  # which is the first process's part


def test_helpers_train_and_save_what_they_are_at(tiny, tmp_path, monkeypatch, capsys):
    monkeypatch.setattr("os.cpu_count", lambda: 2)
    short, endless = tiny(), tiny(max_iters=10**6, eval_interval=10**6)
    ends = training.RUNS / training.fingerprint(short) / "result.json"
    goes_on = training.RUNS / training.fingerprint(endless)
    with training.helpers(share, Shared([short, endless], tmp_path / "cache")):
        until((goes_on / "best.pt").exists)
    assert json.loads(ends.read_text())["val_loss"] == pytest.approx(train(short)["val_loss"], abs=1e-6)
    assert checkpoint.load(goes_on / "ckpt.pt")["step"] > 0 and not (goes_on / "result.json").exists()
    assert not multiprocessing.active_children()
    checkpoint.claim(goes_on, "result.lock").close()
    with training.helpers(share, Shared([short], tmp_path / "cache")):
        multiprocessing.active_children()[0].join()  # of itself, when nothing is left to train
    assert "warning" not in capsys.readouterr().out and not (tmp_path / "cache" / "measured").exists()
    with training.helpers(share, Shared([None], tmp_path / "cache")):
        multiprocessing.active_children()[0].join()
    assert "warning: helpers ended early (exit codes 1)" in capsys.readouterr().out
    assert signal.getsignal(signal.SIGINT) is signal.default_int_handler
    for jobs, why in ((0, "jobs=0 must be from 1 to 2, the cores"), (3, "jobs=3 must"), (2, "cannot lock files")):
        monkeypatch.setattr(checkpoint, "claim", lambda *_, **__: nullcontext())  # as on a file system without locks
        with pytest.raises(ValueError, match=why), training.helpers(share, Shared([], tmp_path, jobs)):
            pass


FIRST = """
import sys
from pathlib import Path
import test_experiments
from experiments.training import helpers
from config import TrainConfig
if __name__ == "__main__":
    cfg = test_experiments.Shared([TrainConfig(**{settings})], Path("cache"))
    with helpers(test_experiments.share, cfg):
        sys.stdin.read()
"""


def test_helpers_end_with_the_process_that_they_help(tiny, tmp_path):
    """Even if that is killed; and save."""
    endless = tiny(max_iters=10**6, eval_interval=10**6)
    (tmp_path / "first.py").write_text(FIRST.replace("{settings}", repr(asdict(endless))))
    paths = os.pathsep.join(map(str, (experiments.ROOT, Path(__file__).parent)))
    first = subprocess.Popen(
        [sys.executable, "first.py"], stdin=subprocess.PIPE, env=os.environ | {"PYTHONPATH": paths}
    )
    run = training.RUNS / training.fingerprint(endless)
    until((run / "best.pt").exists)
    first.kill()
    first.communicate()

    def is_free():
        try:
            checkpoint.claim(run, "result.lock").close()
        except checkpoint.InUse:
            return False
        return True

    until(is_free)
    assert checkpoint.load(run / "ckpt.pt")["step"] > 0


def test_other_code_or_text_is_another_run(tiny, tmp_path, monkeypatch):
    text = tmp_path / "text.txt"
    text.write_text("one text " * 50)
    before = training.fingerprint(tiny(dataset=str(text)))
    assert training.fingerprint(tiny(dataset=str(text))) == before
    text.write_text("another text " * 50)
    assert training.fingerprint(tiny(dataset=str(text))) != before
    before, model = training.fingerprint(tiny()), experiments.ROOT / "model.py"
    monkeypatch.setitem(training.CODE, model, training.CODE[model] + b" ")
    assert training.fingerprint(tiny()) != before


def test_compare_pairs_its_runs(tiny, monkeypatch):
    """Report 43."""
    seen = []
    monkeypatch.setattr(training, "ahead", lambda cfgs, **_: None)
    monkeypatch.setattr(training, "trained", lambda cfg: seen.append(cfg) or RESULT)
    compare.compare(compare.CompareConfig(dataset=tiny().dataset, seeds=2, train=tiny()))
    assert [cfg.attention for cfg in seen] == [*ATTENTIONS] * 2
    for i in range(2):
        same, *others = (replace(cfg, attention="") for cfg in seen[i * len(ATTENTIONS) :][: len(ATTENTIONS)])
        assert all(cfg == same for cfg in others) and same.seed == same.data_seed == 1 + i
    for change in (dict(seeds=0), dict(seeds=11), dict(kinds=("standard", "dif")), dict(train=tiny(seed=3))):
        seen.clear()
        with pytest.raises(ValueError):
            compare.compare(replace(compare.CompareConfig(dataset=tiny().dataset, train=tiny()), **change))
        assert not seen


RESULT = {"params": 1, "val_loss": 2.0, "answers": None, "entropy": None, "lambdas": [], "history": [[0, 3.0, None]],
          "tokens_per_s": 1.0, "seconds": 1.0}  # fmt: skip


def test_compare(tiny, tmp_path):
    cfg = compare.CompareConfig(dataset=tiny().dataset, kinds=("standard", "diff"), seeds=2, train=tiny(max_iters=8))
    numbers = json.loads(json.dumps(compare.compare(cfg)))
    assert list(numbers["kinds"]) == ["standard", "diff"]
    standard, diff = numbers["kinds"].values()
    assert diff["params"] - standard["params"] == 2 * 6 * 8  # two layers of 6 D
    assert len(diff["val_loss"]) == 2 and diff["val_loss"][0] != diff["val_loss"][1]
    for speeds, threads, shown in (([None, 2e4], [1, 1], "20,000"), ([None] * 2, [1, 1], ""), ([9.0, 9.0], [1, 2], "")):
        other = {**numbers, "kinds": {**numbers["kinds"], "diff": {**diff, "tokens_per_s": speeds, "threads": threads}}}
        assert compare.tables(other)["losses"][2][-1] == shown
    rows = compare.tables(numbers)["losses"]
    assert [row[0] for row in rows] == ["attention", "standard", "diff"]
    compare.picture(numbers, tmp_path / "curves.png")
    assert (tmp_path / "curves.png").stat().st_size > 5000


def test_a_better_kind_wins_and_a_copy_is_not_distinguishable():
    """Report 42: the table says it, whoever wins."""

    def kind(losses):
        history = [[(0, 4.0, None), (10, loss, None)] for loss in losses]
        return {"params": 1, "val_loss": losses, "answers": [None], "history": history, "tokens_per_s": [9, 1e3, 2e4]}

    one = {**kind([1.9, 2.0, 1.8]), "val_loss": [1.9]}
    row = compare.tables({"baseline": "a", "kinds": {"a": kind([2.0, 2.1, 1.9]), "one": one}})["losses"][2]
    assert row[3:5] == ["1.9000", "-0.1000 (one seed says nothing)"] and row[-1] == "1,000"
    kinds = {"a": kind([2.0, 2.1, 1.9]), "better": kind([1.9, 2.01, 1.8]), "same": kind([2.01, 2.08, 1.91])}
    rows = compare.tables({"baseline": "a", "kinds": kinds})["losses"]
    assert [("not distinguishable" in row[4]) for row in rows[2:]] == [False, True]
    assert rows[2][4].startswith("-0.09")


def test_when_half_of_the_answers_are_right():
    for answers, update in (([0, 0.6, 0.4, 0.5, 0.7], 60), ([0, 0.4], None), ([0.6, 1], 0), ([0.4, 0.6], 20)):
        assert compare.half_right([(20 * i, 1.0, share) for i, share in enumerate(answers)]) == update


@pytest.mark.parametrize("kind", ATTENTIONS)
def test_maps(kind, tmp_path):
    """Report 50."""
    tokenizer = CharTokenizer("abcdefgh ?.")
    model = GPT(GPTConfig(vocab_size=11, n_layer=2, n_embd=32, attention=kind))
    numbers = maps.maps_of(model.eval(), tokenizer, "a bad cab fed a head.")
    assert "".join(numbers["tokens"]) == "a bad cab fed a head."
    A = {title: np.array(A) for title, A in numbers["maps"].items()}
    assert list(A) == ["A1"] if kind == "standard" else ["A1", "A2", "A1 - lambda A2"]
    np.testing.assert_allclose(A["A1"].sum(axis=1), 1, atol=2e-3)
    if kind == "diff_v2":
        numbers = maps.maps_of(model, tokenizer, "a bad cab fed a head.", layer=1, head=2)
        lam = model.attention_maps(encode_prompt(tokenizer, "a bad cab fed a head."))[1][2][0, 2]
        assert numbers["lam"] == pytest.approx(lam.mean().item(), abs=1e-4)
    if kind == "diff":
        np.testing.assert_allclose(A["A1 - lambda A2"], A["A1"] - numbers["lam"] * A["A2"], atol=2e-4)
    maps.picture(numbers, tmp_path / "maps.png")
    assert (tmp_path / "maps.png").stat().st_size > 5000
    with pytest.raises(ValueError, match="layer=2, head=0: this model has 2 layers"):
        maps.maps_of(model, tokenizer, "a bad cab fed", layer=2)
    with pytest.raises(ValueError, match="at least 10"):
        maps.maps_of(model, tokenizer, "a bad")


TINY = GPTConfig(block_size=32, n_layer=1, n_head=2, n_embd=32, vocab_size=11)


def test_speed_of_steps(monkeypatch):
    """By a clock that only attention moves: what is slow is seen, in the model that is and in no other."""
    now = [0.0]
    for kind, seconds in (("standard", 1.0), ("diff", 1.0), ("diff_v2", 3.0)):

        def attend(*operands, seconds=seconds):
            now[0] += seconds
            return fastest(*operands)

        monkeypatch.setattr(ATTENTIONS[kind], "attend", staticmethod(attend))
    monkeypatch.setattr(speed, "clock", lambda: now[0])
    numbers = speed.steps(["standard", "diff", "diff_v2"], 2, TINY, rounds=3)
    assert [numbers[kind]["ratio"] for kind in ("standard", "diff", "diff_v2")] == [1, 1, 3]
    assert numbers["diff"]["flops_ratio"] == 1 < numbers["diff_v2"]["flops_ratio"]
    assert numbers["diff_v2"]["forward_ms"] == numbers["diff_v2"]["step_ms"] == 3000
    assert numbers["diff_v2"]["tokens_per_s"] == 2 * 32 / 3


def test_the_baselines_of_speed_compute_what_they_are_named_for():
    """Report 49: the paper's two halves of V."""
    idx = torch.arange(20).view(1, 20) % 11
    ours = GPT(replace(TINY, attention="diff"))
    torch.testing.assert_close(speed.build("four calls", TINY)(idx)[0], ours(idx)[0])


def test_speed_of_generation():
    numbers = speed.generation(["standard", "diff"], tokens=2, rounds=1)
    assert set(numbers) == {"standard", "diff", "diff, no cache"}
    assert all(n > 0 for n in numbers.values())


@pytest.mark.parametrize("kind", ATTENTIONS)
def test_kernels_are_named(kind):
    if torch.cuda.is_available():
        pytest.skip("this names the CPU's kernels; on CUDA they have others")
    assert length.kernels(kind, "fused") == ["_scaled_dot_product_flash_attention_for_cpu_backward"]
    assert length.kernels(kind, "eager") == length.kernels(kind, "fastest") == ["_softmax_backward_data"]
    assert length.kernels(kind, "fastest", T=1025) == ["_scaled_dot_product_flash_attention_for_cpu_backward"]


def test_backends_that_refuse_are_said_to():
    """Flash wants values as wide as keys: that is what the zeros are for. On a CPU there are two kernels."""
    if torch.cuda.is_available():
        pytest.skip("this names the CPU's kernels; on CUDA they have others")
    ms = length.backends(T=32, rounds=1)
    assert {name for name, value in ms.items() if value} == {"fused, FLASH_ATTENTION", "fused, MATH", "unpadded, MATH"}
    assert len(ms) == 8
    q1, k1, q2, k2, v = (torch.randn(1, 2, 9, width, dtype=torch.float64) for width in (4, 4, 4, 4, 8))
    operands = q1, k1, q2, k2, v, torch.tensor(0.3, dtype=torch.float64)
    torch.testing.assert_close(length.unpadded(*operands), eager(*operands), rtol=0, atol=1e-12)


@pytest.mark.skipif(sys.platform != "linux", reason="a process's peak memory is read from /proc")
@pytest.mark.parametrize("kind", ATTENTIONS)
def test_memory_is_linear_when_fused(kind):
    fused, eager = (
        [measure.afresh(length.peak_of_layer, kind, path, T) for T in (1100, 4400)] for path in ("fastest", "eager")
    )
    # four times as long: 4 if linear, 16 if quadratic
    assert fused[1] < 6 * fused[0] and eager[1] > 6 * eager[0] and eager[1] > 5 * fused[1], (fused, eager)


def test_exponent():
    layers = {str(T): {"case": {"peak_mib": 3 * T**1.5}} for T in (256, 2048, 4096)}
    layers["256"]["case"]["peak_mib"] = 1e9  # left out: another path
    assert length.exponent(layers, "case") == pytest.approx(1.5)


@pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a GPU; test_fused_is_fused is its twin on the CPU")
@pytest.mark.parametrize("kind", ATTENTIONS)
def test_bfloat16_on_a_gpu(kind):
    """Fused is as exact as eager in the same type, and runs a flash or cuDNN kernel. Report 49."""
    model = GPT(GPTConfig(attention=kind, n_embd=256)).cuda()
    idx = torch.randint(64, (2, 256), device="cuda")
    exact = model.double()(idx)[0]
    errors = []
    for path in (eager, fastest):
        for block in model.float().blocks:
            block.attn.attend = path
        with torch.autocast("cuda", torch.bfloat16):
            errors.append((model(idx)[0] - exact).abs().max().item())
    # twice an honest computation in the same type, and a floor of a rounding of the largest logit
    assert errors[1] <= 2 * errors[0] + 2**-8 * exact.abs().max().item()
    assert any("flash" in name or "cudnn" in name for name in length.kernels(kind, "fastest"))
