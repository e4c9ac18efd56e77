"""Training: what a step does, what a run leaves behind, and that it can be interrupted anywhere.

All on the CPU with models of a second. Processes are signalled after a line they print, never after a time.
"""

import errno
import json
import math
import os
import re
import signal
import subprocess
import sys
import zipfile
from contextlib import nullcontext
from dataclasses import replace
from pathlib import Path

import numpy as np
import pytest
import torch

import checkpoint
import data
import train as training
from config import CHOICES, PRESETS, TrainConfig
from device import precision
from initial import initialize
from model import ATTENTIONS, GPT
from run_log import Log, read_log
from sample import SampleConfig, sample
from train import evaluate, learning_rate, make_optimizer, train

ROOT = Path(__file__).parent.parent
KINDS = list(ATTENTIONS)


def run_script(*args, **kwargs):
    return subprocess.run(
        [sys.executable, *map(str, args)], capture_output=True, text=True, stdin=subprocess.DEVNULL, **kwargs
    )


def weights(run, name="ckpt.pt"):
    return checkpoint.load(Path(run) / name)["model"]


def equal(a, b):
    return a.keys() == b.keys() and all(torch.equal(a[k], b[k]) for k in a)


# --- A whole run -----------------------------------------------------------------------------


@pytest.mark.parametrize("kind", KINDS)
def test_run_from_text_to_sample(kind, tiny, capsys):
    """Reports 40 and 44: the log has the gradient's norm and every layer's lambda."""
    result = train(tiny(attention=kind, max_iters=60, eval_interval=20, learning_rate=3e-3))
    run = Path(result["out_dir"])
    assert run == Path(f"runs/harbour-{kind}")
    assert {p.name for p in run.iterdir()} == {"config.json", "log.jsonl", "ckpt.pt", "best.pt", "lock"}
    first, last = result["history"][0][1], result["val_loss"]
    assert last < first - 0.5 and result["best_val_loss"] == min(loss for _, loss, _ in result["history"])
    header, *lines = read_log(run)
    assert header["params"] == GPT(tiny(attention=kind).model_config(result_vocab(run))).num_params()
    evals, steps = [r for r in lines if "val_loss" in r], [r for r in lines if "loss" in r]
    assert [r["step"] for r in evals] == [0, 20, 40, 60] and len(steps) == 30
    assert all(r["grad_norm"] > 0 and r["tokens_per_s"] > 0 and "mfu" not in r for r in steps)
    assert len(evals[-1]["lambdas"]) == (2 if "diff" in kind else 0)
    assert "harbour" in capsys.readouterr().out

    done = run_script(ROOT / "sample.py", "--max_new_tokens=40", "--start=the", "--device=cpu")
    assert done.returncode == 0, done.stderr
    assert done.stdout.startswith("the") and len(done.stdout) == 3 + 40 + 1


def result_vocab(run):
    return checkpoint.load(run / "ckpt.pt")["model_config"]["vocab_size"]


def test_every_kind_sees_the_same_batches(tiny, monkeypatch):
    """Report 43."""
    seen = {}
    for kind in KINDS:
        seen[kind] = []
        original = GPT.forward

        def forward(self, x, *rest, into=seen[kind], original=original):
            into.append(x.tolist())
            return original(self, x, *rest)

        monkeypatch.setattr(GPT, "forward", forward)
        # neither logging nor evaluating at other times may move the stream: evaluations are told apart by their number
        train(tiny(attention=kind, eval_interval=100, eval_windows=4))
        monkeypatch.setattr(GPT, "forward", original)
    assert seen["standard"] == seen["diff"] == seen["diff_v2"]
    assert len(seen["diff"]) == 8 + 2 and len({str(batch) for batch in seen["diff"][1:9]}) == 8


def test_evaluating_and_logging_change_nothing(tiny):
    base = train(tiny(dropout=0.2, out_dir="a"))
    other = train(tiny(dropout=0.2, out_dir="b", eval_interval=3, log_interval=1, eval_windows=3))
    assert equal(weights(base["out_dir"]), weights(other["out_dir"]))


def test_dropout_differs_from_update_to_update(tiny, monkeypatch):
    seen, original = [], GPT.forward

    def forward(self, idx, targets=None, keys=None):
        if keys is not None:
            seen.append(keys.tolist())
        return original(self, idx, targets, keys)

    monkeypatch.setattr(GPT, "forward", forward)
    for seed in (0, 1):
        train(tiny(dropout=0.5, seed=seed, out_dir=str(seed), max_iters=2, eval_interval=100, eval_windows=1))
    assert [len(keys) for keys in seen] == [4] * 4 and len(set(sum(seen, []))) == 16


def test_seeds_do_what_they_say(tiny):
    runs = [train(tiny(out_dir=str(i), **how)) for i, how in enumerate([{}, {}, {"seed": 1}, {"data_seed": 1}])]
    a, b, c, d = (weights(r["out_dir"]) for r in runs)
    assert equal(a, b) and not equal(a, c) and not equal(a, d)
    assert runs[0]["history"][0] == runs[3]["history"][0] != runs[2]["history"][0]


@pytest.mark.parametrize("dropout", [0.0, 0.5])
@pytest.mark.parametrize("kind", KINDS)
def test_accumulation_is_one_large_batch(kind, dropout, tiny):
    """C16 and report 26. With dropout too: its masks belong to rows."""
    cfg = dict(attention=kind, dropout=dropout, max_iters=1, learning_rate=1e-2, warmup_iters=0, grad_clip=0.0)
    whole = train(tiny(out_dir="whole", batch_size=16, log_interval=1, **cfg))
    cut = train(tiny(out_dir="cut", batch_size=4, gradient_accumulation_steps=4, log_interval=1, **cfg))
    assert cut["train_loss"] == pytest.approx(whole["train_loss"], abs=1e-6)
    norms = [next(r["grad_norm"] for r in read_log(r["out_dir"]) if "loss" in r) for r in (whole, cut)]
    assert norms[0] == pytest.approx(norms[1], rel=1e-5)
    # The first AdamW step is the sign of the gradient, so compare its first moments, which are the gradients
    a, b = (checkpoint.load(f"{name}/ckpt.pt")["optimizer"]["state"] for name in ("whole", "cut"))
    for i in a:
        torch.testing.assert_close(a[i]["exp_avg"], b[i]["exp_avg"], rtol=0, atol=1e-6)


def test_exactly_max_iters_updates(tiny, monkeypatch):
    """C17 and report 13."""
    calls = []
    original = torch.optim.AdamW.step
    monkeypatch.setattr(torch.optim.AdamW, "step", lambda self, *a: (calls.append(1), original(self, *a))[1])
    for max_iters, accumulation in ((0, 1), (1, 1), (7, 3)):
        calls.clear()
        result = train(tiny(max_iters=max_iters, gradient_accumulation_steps=accumulation, out_dir=str(max_iters)))
        assert len(calls) == result["steps"] == max_iters
        assert checkpoint.load(f"{max_iters}/ckpt.pt")["step"] == max_iters


def test_gradients_are_clipped(tiny, monkeypatch):
    norms = []
    original = torch.optim.AdamW.step

    def step(self, *args):
        grads = [p.grad for group in self.param_groups for p in group["params"]]
        norms.append(torch.nn.utils.get_total_norm(grads).item())
        return original(self, *args)

    monkeypatch.setattr(torch.optim.AdamW, "step", step)
    train(tiny(grad_clip=0.05, out_dir="clipped"))
    assert max(norms) < 0.0501
    norms.clear()
    train(tiny(grad_clip=0.0, out_dir="free"))
    assert max(norms) > 0.5


# --- Parts -----------------------------------------------------------------------------------


@pytest.mark.parametrize("schedule", ["linear", "cosine"])
@pytest.mark.parametrize("warmup", [0, 1, 10, 20, 25])
def test_learning_rate(schedule, warmup):
    """C17 and report 25."""
    cfg = TrainConfig(learning_rate=2.0, min_lr=0.5, warmup_iters=warmup, max_iters=20, lr_schedule=schedule)
    rates = [learning_rate(step, cfg) for step in range(30)]
    assert 0 < rates[0] <= 2.0 and max(rates) <= 2.0
    assert rates[:warmup] == sorted(set(rates[:warmup]))
    if warmup < 20:
        assert rates[warmup] == 2.0 and rates[20:] == [0.5] * 10
        assert rates[warmup:21] == sorted(set(rates[warmup:21]), reverse=True)
    if warmup == 10:
        assert rates[15] == pytest.approx(1.25)


def test_norms_and_lambda_vectors_are_not_decayed():
    model = GPT(TrainConfig().model_config())
    names = {id(p): name for name, p in model.named_parameters()}
    decayed, free = (
        [names[id(p)] for p in group["params"]] for group in make_optimizer(model, TrainConfig()).param_groups
    )
    assert all("norm" in name or "subln" in name or "lambda" in name for name in free)
    assert not any("norm" in name or "subln" in name or "lambda_q" in name for name in decayed)
    assert len(decayed) + len(free) == len(names)


@pytest.mark.parametrize(
    "device, dtype, bf16, expected",
    [
        ("cuda", "auto", True, ("bfloat16", True, False)),
        ("cuda", "auto", False, ("float16", True, True)),
        ("cuda", "float16", True, ("float16", True, True)),
        ("cuda", "float32", True, ("float32", False, False)),
        ("mps", "auto", False, ("float32", False, False)),
        ("mps", "float16", False, ("float16", True, False)),
        ("cpu", "auto", False, ("float32", False, False)),
        ("cpu", "bfloat16", False, ("bfloat16", True, False)),
    ],
)
def test_precision(device, dtype, bf16, expected):
    """C13, reports 22 and 23."""
    assert precision(device, dtype, bf16) == expected


def test_evaluation_depends_on_neither_batch_size_nor_dropout(tiny):
    """C15 and report 29."""
    dataset = data.load(tiny().dataset)
    windows = dataset.val_windows(11, 24)
    model = GPT(tiny(dropout=0.5).model_config(dataset.tokenizer.vocab_size))
    losses = [evaluate(model, windows, size, torch.device("cpu"))[0] for size in (1, 4, 11, 50)]
    assert losses == pytest.approx([losses[0]] * 4, abs=1e-6)
    assert model.training
    x, y, _ = windows
    assert losses[0] == pytest.approx(model.eval()(torch.tensor(x), torch.tensor(y))[1].item(), abs=1e-5)


def test_evaluation_in_bfloat16_adds_up_in_more(tiny):
    dataset = data.load(tiny().dataset)
    windows = dataset.val_windows(40, 24)
    model = GPT(tiny().model_config(dataset.tokenizer.vocab_size))
    autocast = torch.autocast("cpu", torch.bfloat16)
    loss = evaluate(model, windows, 40, torch.device("cpu"), autocast)[0]
    with autocast, torch.no_grad():
        logits = model(torch.tensor(windows[0]))[0]
    assert logits.dtype is torch.bfloat16
    exact = torch.nn.functional.cross_entropy(logits.double().flatten(0, 1), torch.tensor(windows[1]).flatten()).item()
    assert loss == pytest.approx(exact, abs=1e-5)


def test_answers_count_when_whole():
    """Two questions of two tokens: one answered, one only in half."""

    class Echo(torch.nn.Module):
        def forward(self, x):
            return torch.nn.functional.one_hot(x, 5).float(), None

    x, y = np.array([[0, 1, 2, 3, 4, 0]]), np.array([[0, 1, 2, 3, 0, 1]])
    question = np.array([[-1, 0, 0, 1, 1, -1]])
    _, answers = evaluate(Echo(), (x, y, question), 1, torch.device("cpu"))
    assert answers == 0.5


# --- Resuming --------------------------------------------------------------------------------


@pytest.mark.parametrize("kind", KINDS)
def test_resumed_run_ends_in_the_same_bits(kind, tiny):
    """C05 and report 15."""
    how = dict(attention=kind, dropout=0.1, lr_decay_iters=12)
    straight = train(tiny(out_dir="straight", max_iters=12, **how))
    train(tiny(out_dir="halved", max_iters=6, **how))
    halved = train(tiny(out_dir="halved", max_iters=12, resume=True, **how))
    assert equal(weights("straight"), weights("halved"))
    strip = lambda run: [{k: v for k, v in r.items() if k != "tokens_per_s"} for r in read_log(run)[1:]]  # noqa: E731
    losses = [[r for r in strip(run) if r["step"] % 4 == 0 or "loss" in r] for run in ("straight", "halved")]
    assert losses[0] == [r for r in losses[1] if r["step"] != 6 or "loss" in r]
    assert straight["best_val_loss"] == halved["best_val_loss"]


@pytest.mark.parametrize("sent, code", [(signal.SIGINT, 130), (signal.SIGTERM, 143), (signal.SIGHUP, 129)])
def test_signal_saves_and_resume_goes_on(sent, code, tiny, tmp_path):
    """C06 and report 16."""
    flags = ["--n_layer=1", "--n_head=2", "--n_embd=16", "--block_size=16", "--batch_size=2", "--warmup_iters=2",
             "--lr_decay_iters=5000", "--eval_interval=1000000", "--eval_windows=2", "--device=cpu",
             f"--dataset={tiny().dataset}"]  # fmt: skip
    command = [sys.executable, str(ROOT / "train.py"), *flags, "--out_dir=killed", "--max_iters=1000000"]
    # a process inherits what is ignored, as SIGHUP is under nohup
    old = signal.signal(sent, signal.default_int_handler if sent == signal.SIGINT else signal.SIG_DFL)
    process = subprocess.Popen(command, stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True, cwd=tmp_path)
    signal.signal(sent, old)
    for line in process.stdout:
        if line.startswith("update 0"):
            break
    process.send_signal(sent)
    out, err = process.communicate()
    assert process.returncode == code, err
    assert "killed/ckpt.pt" in out and "--resume" in out and "sample.py --latest" in out
    step = checkpoint.load("killed/ckpt.pt")["step"]
    assert step < 1000000

    if sent != signal.SIGINT:  # what is saved does not depend on which one it was
        return
    done = run_script(ROOT / "train.py", "--resume", "--out_dir=killed", f"--max_iters={step + 3}", cwd=tmp_path)
    assert done.returncode == 0, done.stderr
    done = run_script(ROOT / "train.py", *flags, "--out_dir=straight", f"--max_iters={step + 3}", cwd=tmp_path)
    assert done.returncode == 0, done.stderr
    assert equal(weights("killed"), weights("straight"))


def test_a_kill_during_evaluation_costs_nothing(tiny, monkeypatch):
    """Report 17."""

    def killed(*args):
        raise KeyboardInterrupt

    train(tiny(out_dir="a", max_iters=4))
    with monkeypatch.context() as patch:
        patch.setattr(training, "evaluate", killed)
        with pytest.raises(KeyboardInterrupt):
            train(tiny(out_dir="b", max_iters=4))
    assert checkpoint.load("b/ckpt.pt")["step"] == 0
    train(tiny(out_dir="b", max_iters=4, resume=True))
    assert equal(weights("a"), weights("b"))
    assert [r.get("val_loss") for r in read_log("a")] == [r.get("val_loss") for r in read_log("b")]


def test_best_is_kept_apart_from_latest(tiny, monkeypatch):
    """Report 18."""
    losses = iter([3.0, 1.0, 2.0])
    monkeypatch.setattr(training, "evaluate", lambda *args: (next(losses), None))
    result = train(tiny(out_dir="run"))
    assert (result["val_loss"], result["best_val_loss"]) == (2.0, 1.0)
    assert checkpoint.load("run/best.pt")["step"] == 4 and checkpoint.load("run/ckpt.pt")["step"] == 8
    assert checkpoint.load("run/best.pt")["best_val_loss"] == 1.0


def test_a_finished_run_says_so(tiny, capsys):
    train(tiny(out_dir="run", max_iters=2))
    assert "complete" not in capsys.readouterr().out
    train(tiny(out_dir="run", max_iters=2, resume=True))
    assert "this run is complete: a larger --max_iters than 2 would go on with it" in capsys.readouterr().out
    train(tiny(out_dir="run", max_iters=3, resume=True))
    assert "complete" not in capsys.readouterr().out


def test_resuming_does_not_forget_the_best(tiny, monkeypatch):
    """The last evaluation comes after the last save; its result is in best.pt alone."""
    losses = iter([3.0, 2.5, 1.0, 2.0, 2.2])
    monkeypatch.setattr(training, "evaluate", lambda *args: (next(losses), None))
    train(tiny(out_dir="run", max_iters=6, lr_decay_iters=12))
    result = train(tiny(out_dir="run", max_iters=8, lr_decay_iters=12, resume=True))
    assert result["best_val_loss"] == checkpoint.load("run/best.pt")["best_val_loss"] == 1.0


def test_init_from_and_eval_only(tiny, capsys):
    first = train(tiny(out_dir="first", max_iters=20))
    second = train(tiny(out_dir="second", init_from="first", max_iters=0))
    assert second["val_loss"] == first["best_val_loss"] and equal(weights("first", "best.pt"), weights("second"))
    before = {p: p.read_bytes() for p in Path("first").iterdir()}
    again = train(tiny(out_dir="first", eval_only=True))
    assert again["val_loss"] == first["best_val_loss"]
    assert before == {p: p.read_bytes() for p in Path("first").iterdir()}
    assert f"{again['val_loss']:.4f}" in capsys.readouterr().out


# --- Files -----------------------------------------------------------------------------------


def test_a_second_run_never_overwrites_the_first(tiny):
    assert [train(tiny(max_iters=0))["out_dir"] for _ in range(2)] == ["runs/harbour-diff", "runs/harbour-diff-2"]
    with pytest.raises(ValueError, match="holds a run already: add --resume"):
        train(tiny(out_dir="runs/harbour-diff"))
    Path("runs/harbour-diff/ckpt.pt").unlink()
    with pytest.raises(ValueError, match="holds a run already: start from it with --init_from"):
        train(tiny(out_dir="runs/harbour-diff"))


def test_a_run_that_began_meanwhile_is_not_overwritten(tiny, monkeypatch):
    """Two starts in one folder: the second looks once more when the folder is its own."""
    load = data.load

    def slow(*args):
        monkeypatch.setattr(data, "load", load)
        train(tiny(out_dir="run", max_iters=2))
        return load(*args)

    monkeypatch.setattr(data, "load", slow)
    with pytest.raises(ValueError, match="run holds a run already"):
        train(tiny(out_dir="run", max_iters=4))
    assert checkpoint.load("run/ckpt.pt")["step"] == 2 and len(read_log("run")) > 1


def test_files_of_others_are_left_alone(tiny):
    Path("mine").mkdir()
    for name, text in {"config.json": '{"model_type": "llama"}', "log.jsonl": "mine"}.items():
        Path("mine", name).write_text(text)
        with pytest.raises(ValueError, match="mine is not the folder of a run"):
            train(tiny(out_dir="mine", max_iters=0))
        assert Path("mine", name).read_text() == text
        Path("mine", name).unlink()
    Path("mine/thesis.new").write_text("mine")
    train(tiny(out_dir="mine", max_iters=0))
    assert Path("mine/thesis.new").exists()
    Path("precious").write_text("mine")
    Path("linked").mkdir()
    Path("linked/lock").symlink_to("../precious")
    train(tiny(out_dir="linked", max_iters=0))
    assert Path("precious").read_text() == "mine"


def test_a_folder_in_use_is_left_alone(tiny):
    train(tiny(out_dir="run", max_iters=2))
    with Log("run", 2):
        before = {p: p.read_bytes() for p in Path("run").iterdir()}
        with pytest.raises(ValueError, match="run is in use by another process: wait for it, or choose another"):
            train(tiny(out_dir="run", resume=True))
        assert before == {p: p.read_bytes() for p in Path("run").iterdir()}
        assert train(tiny(out_dir="run", eval_only=True))["val_loss"]  # reading is free
    assert train(tiny(out_dir="run", resume=True, max_iters=4))["steps"] == 4


def test_a_file_system_without_locks(tmp_path, monkeypatch):
    fcntl = pytest.importorskip("fcntl")

    def flock(*_):
        raise OSError(errno.ENOLCK, "no locks available")

    monkeypatch.setattr(fcntl, "flock", flock)
    with checkpoint.claim(tmp_path), checkpoint.claim(tmp_path):
        assert (tmp_path / "lock").exists()


def test_what_a_killed_process_was_writing_is_removed(tmp_path):
    (tmp_path / "ckpt.pt.17.new").write_bytes(b"half")
    with Log(tmp_path):
        assert [path.name for path in tmp_path.iterdir()] == ["lock"]


def test_writing_is_whole_or_not_at_all(tmp_path):
    path = tmp_path / "file"
    checkpoint.write(path, lambda file: file.write(b"old"))

    def full_disk(file):
        file.write(b"half")
        raise OSError("no space left")

    with pytest.raises(OSError):
        checkpoint.write(path, full_disk)
    assert path.read_bytes() == b"old" and list(tmp_path.iterdir()) == [path]


@pytest.mark.skipif(os.name != "posix", reason="needs fork")
def test_five_kills():
    done = run_script("-m", "tests.kills", "--kills=5", cwd=ROOT)  # 100: see its file
    assert re.search(r"^while it writes +[1-9]", done.stdout, re.MULTILINE), done.stdout
    assert done.returncode == 0, done.stderr
    assert done.stdout.splitlines()[-1].startswith("5 kills of ")


@pytest.mark.skipif(os.name != "posix", reason="needs limits on file sizes")
def test_a_full_disk_costs_only_what_was_not_saved(tiny):
    import resource

    straight = train(tiny(out_dir="straight", lr_decay_iters=8))
    train(tiny(out_dir="run", lr_decay_iters=8, max_iters=4))
    before = Path("run/ckpt.pt").read_bytes()
    soft, hard = resource.getrlimit(resource.RLIMIT_FSIZE)
    resource.setrlimit(resource.RLIMIT_FSIZE, (len(before) // 2, hard))
    try:
        with pytest.raises(OSError, match=r"^\[Errno \d+\] .*: 'run/ckpt.pt'$"):
            train(tiny(out_dir="run", lr_decay_iters=8, resume=True))
    finally:
        resource.setrlimit(resource.RLIMIT_FSIZE, (soft, hard))
    assert Path("run/ckpt.pt").read_bytes() == before and not list(Path("run").glob("*.new"))
    assert train(tiny(out_dir="run", lr_decay_iters=8, resume=True))["val_loss"] == straight["val_loss"]


@pytest.mark.skipif(os.name != "posix", reason="needs users")
def test_a_folder_that_cannot_be_written(tiny, text_file, tmp_path, monkeypatch):
    Path("text.txt").write_bytes(text_file.read_bytes())
    monkeypatch.setattr("data.CACHE", Path("cache"))
    train(tiny(dataset="text.txt", out_dir="run", max_iters=2))
    before = {p: p.read_bytes() for p in Path("run").iterdir()}
    tmp_path.chmod(0o555)
    Path("run").chmod(0o555)
    user = os.geteuid()
    if user == 0:
        os.seteuid(65534)  # nobody: root may write everywhere
    try:
        for out_dir, resume in (("run", True), ("new", False)):
            with pytest.raises(PermissionError, match=out_dir):
                train(tiny(dataset="text.txt", out_dir=out_dir, resume=resume))
    finally:
        os.seteuid(user)
        tmp_path.chmod(0o755)
        Path("run").chmod(0o755)
    assert before == {p: p.read_bytes() for p in Path("run").iterdir()} and not Path("new").exists()


def test_weights_alone_cannot_be_resumed(tiny):
    train(tiny(out_dir="run", max_iters=2))
    Path("run/best.pt").replace("run/ckpt.pt")
    with pytest.raises(ValueError, match="run/ckpt.pt has weights alone.*--init_from"):
        train(tiny(out_dir="run", resume=True))


class Hook:
    def __reduce__(self):
        return (os.mkdir, ("pwned",))


def test_loading_runs_no_code(tiny):
    """C09 and report 20."""
    torch.save({"model": Hook(), "model_config": {}}, "evil.pt")
    with pytest.raises(ValueError, match="evil.pt is not a checkpoint"):
        checkpoint.load("evil.pt")
    assert not Path("pwned").exists()
    torch.save({"model": {}, "model_config": {"attention": "none"}}, "other.pt")
    with pytest.raises(ValueError, match="other.pt is not a checkpoint"):
        checkpoint.load("other.pt")
    for junk in (b"", b"hello", b"PK\x03\x04"):
        Path("junk.pt").write_bytes(junk)
        with pytest.raises(ValueError, match="junk.pt is not a checkpoint"):
            checkpoint.load("junk.pt")


def test_a_tensor_that_is_marked_as_a_folder_is_refused(tiny):
    """torch.load would read nothing, and take whatever is in memory for its values. Found by fuzzing."""
    train(tiny(out_dir="run", max_iters=2))
    raw = bytearray(Path("run/ckpt.pt").read_bytes())
    with zipfile.ZipFile("run/ckpt.pt") as archive:
        part = next(part for part in archive.infolist() if part.filename.endswith("data/3"))
        entry = raw.index(part.filename.encode(), archive.start_dir) - 46  # of the zip's directory
    assert raw[entry : entry + 4] == b"PK\x01\x02" and raw[entry + 38] == 0
    raw[entry + 38] = 0x10
    Path("run/ckpt.pt").write_bytes(raw)
    with pytest.raises(ValueError, match="run/ckpt.pt is not a checkpoint"):
        checkpoint.load("run/ckpt.pt")


def test_checkpoint_prints_its_text_without_the_data_folder(tiny):
    """C07 and report 19: names without a wrapper's prefix."""
    train(tiny(out_dir="run"))
    state = checkpoint.load("run/best.pt")
    tokenizer = data.tokenizers.from_dict(state["tokenizer"])
    assert tokenizer.decode_bytes(tokenizer.encode("the harbour")) == b"the harbour"
    assert not any(name.startswith(("_orig_mod", "module")) for name in state["model"])


def test_log_survives_a_cut_line(tmp_path):
    with Log(tmp_path) as log:
        for step in range(4):
            log.append(step=step)
    with open(log.path, "a") as file:
        file.write('{"step": 4, "lo')
    assert read_log(tmp_path) == [{"step": s} for s in range(4)]
    with Log(tmp_path, 2) as log:
        log.append(step=2, again=True)
    assert read_log(tmp_path) == [{"step": 0}, {"step": 1}, {"step": 2, "again": True}]


# --- Mistakes of the user --------------------------------------------------------------------


@pytest.mark.parametrize("weight", [math.nan, math.inf])
@pytest.mark.parametrize("at_once", [True, False])
def test_a_loss_that_is_no_number_stops_the_run(weight, at_once, tiny, monkeypatch):
    """C08 and report 21."""
    train(tiny(out_dir="good", max_iters=4))
    original = torch.optim.AdamW.step

    def spoil(self, *args):
        original(self, *args)
        self.param_groups[0]["params"][0].data[0, 0] = weight

    monkeypatch.setattr(torch.optim.AdamW, "step", spoil)
    with pytest.raises(FloatingPointError, match=r"update \d+.*good/best.pt.*learning_rate"):
        train(tiny(out_dir="good", resume=True, max_iters=30, eval_interval=1 if at_once else 100))
    monkeypatch.setattr(torch.optim.AdamW, "step", original)
    monkeypatch.setattr(training, "evaluate", lambda *_: (weight, None))  # of finite weights
    with pytest.raises(FloatingPointError, match=r"validation loss.*update 4.*good/best.pt"):
        train(tiny(out_dir="good", resume=True, max_iters=30))
    for name in ("best.pt", "ckpt.pt"):
        assert all(w.isfinite().all() for w in weights("good", name).values())


def test_a_scaler_skips_updates_but_not_for_ever(tiny, monkeypatch):
    """What float16 needs on a GPU: without it here, but for its scaler."""
    monkeypatch.setattr(training, "precision", lambda *_: ("float16", False, True))
    scale, calls, spoilt = torch.amp.GradScaler.scale, [], {3}

    def spoil(self, loss):
        calls.append(loss)
        return scale(self, loss) * (math.inf if len(calls) in spoilt else 1)

    monkeypatch.setattr(torch.amp.GradScaler, "scale", spoil)
    for updates in (2, 3, 4):
        calls.clear()
        train(tiny(out_dir=f"{updates}", max_iters=updates, lr_decay_iters=9, log_interval=1))
    w2, w3, w4 = (weights(f"{updates}", "ckpt.pt")["tok_emb.weight"] for updates in (2, 3, 4))
    assert torch.equal(w2, w3) and not torch.equal(w3, w4)
    calls.clear()
    spoilt = range(3, 100)
    with pytest.raises(FloatingPointError, match=r"gradient norm is (inf|nan) at update 19: .*ever/best.pt"):
        train(tiny(out_dir="ever", max_iters=60, log_interval=1))  # 2^16 halved until it is below 1


@pytest.mark.parametrize("qk, lam", [(200.0, "inf"), (70.0, "2.5"), (55.0, None)])
def test_a_lambda_out_of_range_is_named(qk, lam, tiny, monkeypatch):
    """Beyond 60, where it still is a number, too."""

    def far(gpt, seed):
        initialize(gpt, seed)
        for name, p in gpt.named_parameters():
            if "blocks.1.attn.lambda_q1" in name or "blocks.1.attn.lambda_k1" in name:
                p.data.fill_(math.sqrt(qk / len(p)))

    monkeypatch.setattr("model.initialize", far)
    said = f"the lambda of layer 1 is {lam}.* at update 0: the run is lost"
    with pytest.raises(FloatingPointError, match=said) if lam else nullcontext():
        train(tiny(attention="diff", max_iters=0))


@pytest.mark.parametrize("attention", ["standard", "diff"])
@pytest.mark.parametrize("what", ["loss", "gradient norm"])
@pytest.mark.parametrize("value", [math.nan, math.inf])
def test_a_bad_update_is_named_wherever_it_is(attention, what, value, tiny, monkeypatch):
    """Between two lines of the log too, where it is the loss alone, and where clipping would hide it."""
    calls, forward, clip = {"loss": 0, "gradient norm": 0}, GPT.forward, torch.nn.utils.clip_grad_norm_

    def bad(name):
        calls[name] += 1
        return value if name == what and calls[name] == 3 else 0.0

    def planted(self, idx, targets=None, keys=None):
        logits, loss = forward(self, idx, targets, keys)
        return logits, loss + bad("loss") if self.training and targets is not None else loss

    monkeypatch.setattr(GPT, "forward", planted)
    monkeypatch.setattr(torch.nn.utils, "clip_grad_norm_", lambda *a: clip(*a) + bad("gradient norm"))
    with pytest.raises(FloatingPointError, match=f"the {what} is {value} at update 3: .*run/best.pt.*--init_from"):
        train(tiny(out_dir="run", attention=attention, max_iters=12, log_interval=5, eval_interval=100))


FOREIGN = {
    "no optimizer": lambda s: s.update(optimizer={}),
    "small moments": lambda s: s["optimizer"]["state"][0].update(exp_avg=torch.zeros(3)),
    "other moments": lambda s: s["optimizer"]["state"][0].update(exp_avg_sq=torch.zeros(7)),
    "fewer moments": lambda s: s["optimizer"]["state"].pop(0),
    "sparse moments": lambda s: s["optimizer"]["state"][0].update(
        exp_avg=s["optimizer"]["state"][0]["exp_avg"].to_sparse()
    ),
    "no scaler": lambda s: s.pop("scaler"),
    "no batch size": lambda s: s["train_config"].pop("batch_size"),
    "no characters": lambda s: s["tokenizer"].pop("chars"),
    "fewer characters": lambda s: s["tokenizer"].update(chars="ab"),
    "step": lambda s: s.update(step="x"),
    "negative step": lambda s: s.update(step=-5),
    "far step": lambda s: s.update(step=10**30),
    "processes": lambda s: s.update(processes=None),
    "vocabulary of GPT-2": lambda s: s["tokenizer"].update(kind="gpt2"),
    "best": lambda s: s.update(best_val_loss="x"),
    "window": lambda s: s["model_config"].update(block_size="x"),
    "rope": lambda s: s["model_config"].update(rope_theta=-1.0),
    "layers": lambda s: s["model_config"].update(n_layer=2**40),
    "width": lambda s: s["model_config"].update(n_embd=2**20),
}


@pytest.mark.parametrize("name", FOREIGN)
def test_a_foreign_checkpoint_is_refused_in_a_sentence(name, tiny):
    """And nothing is written beyond a tensor, or built that is as large as it claims to be."""
    train(tiny(out_dir="run", max_iters=2))
    state = checkpoint.load("run/ckpt.pt")
    FOREIGN[name](state)
    checkpoint.save("run/ckpt.pt", **state)
    with pytest.raises(ValueError, match="is not a checkpoint of this project|does not fit its weights"):
        train(tiny(out_dir="run", max_iters=4, resume=True))


def test_the_optimizer_of_a_checkpoint_gives_its_moments_alone(tiny):
    """What else it says, of itself or of a foreign one, is not the run's."""
    ends = []
    for foreign in (False, True):
        train(tiny(out_dir=f"run{foreign}", max_iters=2))
        state = checkpoint.load(f"run{foreign}/ckpt.pt")
        if foreign:
            for group in state["optimizer"]["param_groups"]:
                group.update(maximize=True, weight_decay=5.0, amsgrad=True)
                group.pop("betas")
        checkpoint.save(f"run{foreign}/ckpt.pt", **state)
        train(tiny(out_dir=f"run{foreign}", max_iters=4, resume=True))
        ends.append(checkpoint.load(f"run{foreign}/ckpt.pt")["model"])
    assert all(torch.equal(w, ends[1][name]) for name, w in ends[0].items())


def test_a_kind_of_attention_that_model_py_does_not_have_is_named(tiny):
    train(tiny(out_dir="run", max_iters=0))
    state = checkpoint.load("run/ckpt.pt")
    state["model_config"]["attention"] = "mine"
    checkpoint.save("run/ckpt.pt", **state)
    with pytest.raises(ValueError, match="attention='mine': model.py must have it in ATTENTIONS"):
        checkpoint.load("run/ckpt.pt")


def test_a_checkpoint_that_may_not_be_read_is_not_called_foreign(tmp_path, monkeypatch):
    def forbidden(*_):
        raise PermissionError(errno.EACCES, "Permission denied", "ckpt.pt")

    (tmp_path / "ckpt.pt").touch()
    monkeypatch.setattr(checkpoint.zipfile, "ZipFile", forbidden)
    with pytest.raises(PermissionError):
        checkpoint.load(tmp_path / "ckpt.pt")


def test_another_text_is_not_gone_on_with(tiny, text_file, tmp_path):
    cfg = tiny(out_dir="run", max_iters=2)
    train(cfg)
    turned = tmp_path / "turned.txt"
    turned.write_text(text_file.read_text()[::-1])
    state = checkpoint.load("run/ckpt.pt")
    with pytest.raises(ValueError, match="is not the text that this run began with"):
        state["train_config"]["dataset"] = str(turned)
        checkpoint.save("run/ckpt.pt", **state)
        train(replace(cfg, dataset=str(turned), resume=True, max_iters=4))
    assert train(replace(cfg, dataset=str(turned), eval_only=True))["val_loss"]  # that may be asked


@pytest.mark.parametrize("rest", [b"\0\0\0\n", b"\xff\xfe\n", b"3\n", b'{"step": 1, "lo\n'])
def test_a_damaged_log_does_not_end_a_run(rest, tiny):
    train(tiny(out_dir="run", max_iters=4))
    whole = Path("run/log.jsonl").read_bytes()
    Path("run/log.jsonl").write_bytes(whole + rest + whole)
    assert len(read_log("run")) == whole.count(b"\n")
    assert train(tiny(out_dir="run", max_iters=6, resume=True))["steps"] == 6


def test_grad_checkpoint_is_the_flag_that_computes_again(tiny, monkeypatch):
    asked, again = [], training.cost.compute_again
    monkeypatch.setattr(training.cost, "compute_again", lambda model: asked.append(model) or again(model))
    losses = [train(tiny(max_iters=3, grad_checkpoint=flag))["val_loss"] for flag in (False, True)]
    assert len(asked) == 1 and losses[0] == losses[1]


@pytest.mark.parametrize(
    "change, parts",
    [
        (dict(batch_size=0), ["batch_size=0", "at least 1"]),
        (dict(eval_interval=0), ["eval_interval=0"]),
        (dict(log_interval=0), ["log_interval=0"]),
        (dict(max_iters=-1), ["max_iters=-1", "at least 0"]),
        (dict(learning_rate=0.0), ["learning_rate=0.0"]),
        (dict(learning_rate=math.nan), ["learning_rate=nan"]),
        (dict(beta2=1.0), ["beta2=1.0"]),
        (dict(dtype="fp16"), ["'fp16'", "float16"]),
        (dict(compile="yes"), ["'yes'", "auto, on, off"]),
        (dict(preset="huge"), ["'huge'", "laptop"]),
        (dict(tokenizer="word"), ["'word'", "bpe"]),
        (dict(n_head=3), ["n_head=3", "use n_head=4"]),
        (dict(people=13), ["people=13", "use 12"]),
        (dict(device="cuda:9" if torch.cuda.is_available() else "cuda"), ["device='cuda"]),
        (dict(device="tpu"), ["device='tpu'", "cpu"]),
        (dict(device="cpu:x"), ["device='cpu:x'"]),
        (dict(seed=2**40), ["seed=1099511627776"]),
        (dict(dataset="nope.txt"), ["nope.txt", "stories"]),
        (dict(block_size=3000), ["val split", "block_size=3000", "--block_size="]),
        (dict(resume=True), ["no run in runs"]),
        (dict(init_from="nowhere"), ["nowhere", "does not exist"]),
    ],
)
def test_bad_settings_are_refused_by_name_and_leave_nothing(change, parts, tiny):
    """C04, C13, reports 12 and 14."""
    with pytest.raises(ValueError) as caught:
        train(tiny(**change))
    assert all(part in str(caught.value) for part in parts), caught.value
    assert not Path("runs").exists()


def test_resume_refuses_another_run(tiny):
    train(tiny(out_dir="run", max_iters=2))
    for change in (dict(n_embd=64), dict(data_seed=1), dict(learning_rate=1e-4)):
        name = next(iter(change))
        with pytest.raises(ValueError, match=f"{name}=.* cannot change on --resume"):
            train(tiny(out_dir="run", resume=True, **change))
    with pytest.raises(ValueError, match="batch_size=2 .* is 2 .* this run has 4: use --gradient_accumulation_steps=2"):
        train(tiny(out_dir="run", resume=True, batch_size=2))
    with pytest.raises(ValueError, match="batch_size=3 .* is 3 .* this run has 4: another --batch_size can make it so"):
        train(tiny(out_dir="run", resume=True, batch_size=3))
    with pytest.raises(ValueError, match="max_iters=1 is less than the 2 updates that run has made: use more"):
        train(tiny(out_dir="run", resume=True, max_iters=1))
    assert json.loads(Path("run/config.json").read_text())["max_iters"] == 2
    train(
        tiny(out_dir="run", resume=True, batch_size=2, gradient_accumulation_steps=2)
    )  # the same update in two pieces
    with pytest.raises(ValueError, match="n_layer=3 does not fit the checkpoint, which has 2"):
        train(tiny(out_dir="new", init_from="run", n_layer=3))
    other = Path("other.txt")
    other.write_text("completely different: 0123456789\n" * 300)
    with pytest.raises(ValueError, match="vocabulary"):
        train(tiny(out_dir="new", init_from="run", dataset=str(other)))


@pytest.mark.parametrize(
    "args, code, parts",
    [
        (["--batchsize=3"], 2, ["--batchsize", "--batch-size"]),
        (["--learning_rate=fast"], 2, ["fast"]),
        (["--dtype=fp16"], 1, ["train.py: dtype='fp16'"]),
        (["--attention=dif"], 1, ["'dif'", "diff_v2"]),
        (["--preset=nope"], 1, ["'nope'", "laptop"]),
        (["--dataset=nope.txt"], 1, ["nope.txt"]),
        (["--resume", "--out_dir=nowhere"], 1, ["nowhere"]),
        (["--learning_rate=1", "--min_lr=2"], 1, ["min_lr=2.0 is above learning_rate=1.0"]),
    ],
)
def test_command_line(args, code, parts, tmp_path):
    """C04 and report 11."""
    done = run_script(ROOT / "train.py", *args, cwd=tmp_path)
    assert done.returncode == code
    assert all(part in done.stdout + done.stderr for part in parts), done.stderr
    assert "Traceback" not in done.stderr and not list(tmp_path.iterdir())


def test_help_lists_every_flag_and_presets_are_legal(tmp_path):
    """C04."""
    done = run_script(ROOT / "train.py", "--help")
    assert done.returncode == 0
    for name in TrainConfig.__dataclass_fields__:
        assert f"--{name.replace('_', '-')}" in done.stdout, name
    assert set(CHOICES["preset"]) == set(PRESETS)
    for preset in PRESETS.values():
        replace(TrainConfig(), **preset).check()


@pytest.mark.parametrize(
    "args, parts",
    [
        (["--start=é"], ["'é'"]),
        (["--start=FILE:nope.txt"], ["start='FILE:nope.txt' cannot be read (No such file or directory): name a file"]),
        (["--temperature=-1"], ["temperature=-1.0"]),
        (["--top_p=1.5"], ["top_p=1.5"]),
        (["--out_dir=nowhere"], ["nowhere"]),
        (["--num_samples=0"], ["num_samples=0"]),
    ],
)
def test_sample_refuses_in_a_sentence(args, parts, tiny, tmp_path):
    """C10 to C12, reports 3 and 35."""
    train(tiny(max_iters=1))
    done = run_script(ROOT / "sample.py", *args, cwd=tmp_path)
    assert done.returncode == 1 and done.stdout == ""
    assert all(part in done.stderr for part in parts) and "Traceback" not in done.stderr


def test_sample_prompts_and_repeats(tiny, tmp_path, capsys):
    """C10 to C12, reports 32, 33 and 35."""
    train(tiny(max_iters=1))
    Path("long.txt").write_bytes(b"the ship\r\n" * 1000)

    def say(**how):
        capsys.readouterr()
        sample(SampleConfig(**{"max_new_tokens": 12, **how}))
        return capsys.readouterr().out

    greedy = say(temperature=0.0, start="the ship")
    assert greedy == say(temperature=0.0, start="the ship", seed=5) and len(greedy) == 8 + 12 + 1
    assert say(seed=1) == say(seed=1, top_k=100000) != say(seed=2)
    assert say(start="") == say() and len(say()) == 12 + 1
    assert len(say(start="FILE:long.txt")) == 9 * 1000 + 12 + 1
    assert say(num_samples=3, max_new_tokens=3).count("-" * 40) == 2
    flags = ["--temperature=0", "--start=the ship", "--max_new_tokens=12"]
    assert run_script(ROOT / "sample.py", *flags, cwd=tmp_path).stdout == greedy  # as typed
    piped = subprocess.run(
        [sys.executable, ROOT / "sample.py", "--start=FILE:-", "--max_new_tokens=2", "--latest"],
        input=b"bell", capture_output=True, cwd=tmp_path,
    )  # fmt: skip
    assert piped.stdout.startswith(b"bell") and json.loads(Path("runs/harbour-diff/config.json").read_text())
