"""Two processes are one: torchrun starts this file twice, as a script, and the test looks at what the two have done.

One start does it all, since starting costs most. Needs no network: the processes meet at a free port of this machine.
"""

import json
import os
import signal
import subprocess
import sys
from contextlib import nullcontext
from dataclasses import replace
from pathlib import Path

import pytest
import torch

ROOT = Path(__file__).parent.parent
sys.path.insert(0, str(ROOT))  # for the script

import checkpoint  # noqa: E402
import data  # noqa: E402
import train as training  # noqa: E402
from distributed import Team  # noqa: E402
from evaluate import evaluate  # noqa: E402
from run_log import read_log  # noqa: E402

RUN = dict(
    batch_size=2, gradient_accumulation_steps=2, dropout=0.2, max_iters=6, log_interval=1, eval_interval=3,
)  # fmt: skip


def script(cfg, team, train=training.train):
    """What each of the two does in the place of `train`, called by `main`. Notes what it saw in a file of its own."""
    seen = {"unsynced": []}
    no_sync, adamw_step = torch.nn.parallel.DistributedDataParallel.no_sync, torch.optim.AdamW.step

    def counting(ddp):
        seen["unsynced"].append(1)
        return no_sync(ddp)

    torch.nn.parallel.DistributedDataParallel.no_sync = counting
    save, cross_entropy = checkpoint.save, torch.nn.functional.cross_entropy

    def saving(path, **state):
        seen["saved"].append(str(path))
        save(path, **state)

    def scoring(*args, reduction="mean", **how):
        seen["evaluated"] += reduction == "sum"  # as evaluation has it, of a batch
        return cross_entropy(*args, reduction=reduction, **how)

    seen |= {"saved": [], "evaluated": 0}
    checkpoint.save, torch.nn.functional.cross_entropy = saving, scoring
    seen["two"] = train(replace(cfg, out_dir="two"), team)["val_loss"]
    torch.nn.parallel.DistributedDataParallel.no_sync = no_sync
    checkpoint.save, torch.nn.functional.cross_entropy = save, cross_entropy
    train(replace(cfg, out_dir="again"), team)
    train(replace(cfg, out_dir="cut", max_iters=3, lr_decay_iters=6), team)

    def signalled(optimizer, *args):
        adamw_step(optimizer, *args)
        if team.rank == 1 and optimizer.state[optimizer.param_groups[0]["params"][0]]["step"] == 2:
            os.kill(os.getpid(), signal.SIGINT)

    torch.optim.AdamW.step = signalled
    seen["stopped"] = train(replace(cfg, out_dir="stopped", max_iters=1000, lr_decay_iters=6), team)
    torch.optim.AdamW.step = adamw_step
    for name, change in {
        "diverged": dict(learning_rate=1e30, grad_clip=0.0),
        "missing": dict(init_from="none"),
        "nowhere": dict(out_dir="two/ckpt.pt/run"),
    }.items():
        try:
            train(replace(cfg, **{"out_dir": name, **change}), team)
        except (FloatingPointError, ValueError) as error:
            seen[name] = str(error)

    def mistake():
        if team.rank == 1:
            raise ValueError("only the second process sees this")

    Path(f"seen-{team.rank}.json").write_text(json.dumps(seen))
    team.together(mistake)


ADAMW_STEP = torch.optim.AdamW.step


def deadly(optimizer, *args):
    """An update of AdamW, the tenth of which one process does not survive."""
    ADAMW_STEP(optimizer, *args)
    step = optimizer.state[optimizer.param_groups[0]["params"][0]]["step"]
    if step == 10 and os.environ["RANK"] == os.environ["LOST"]:
        os.kill(os.getpid(), signal.SIGKILL)


def torchrun(cfg, **environment):
    flags = [f"--{name}={getattr(cfg, name)}" for name in vars(cfg) if getattr(cfg, name) != getattr(type(cfg)(), name)]
    command = "-m torch.distributed.run --standalone --local_addr=localhost --nproc_per_node=2".split()
    command = [sys.executable, *command, __file__, *flags]
    return subprocess.run(command, capture_output=True, text=True, timeout=120, env=os.environ | environment)


def test_two_processes_are_one(tiny):
    """Reports 26 and 30."""
    cfg = tiny(**RUN)
    done = torchrun(cfg)
    assert Path("seen-1.json").exists(), done.stderr
    first, second = (json.loads(Path(f"seen-{rank}.json").read_text()) for rank in (0, 1))

    # as one process with one batch of them all, dropout included, and twice the same
    one = training.train(tiny(**{**RUN, "batch_size": 8, "gradient_accumulation_steps": 1}, out_dir="one"))
    logs = {name: read_log(name)[1:] for name in ("one", "two", "again")}
    for a, b, c in zip(*logs.values()):
        assert a["step"] == b["step"] and b.get("loss", b.get("val_loss")) == c.get("loss", c.get("val_loss"))
        for name in ("loss", "val_loss", "grad_norm", "lr"):
            assert a.get(name, 0) == pytest.approx(b.get(name, 0), rel=2e-6)
    assert [len(log) for log in logs.values()] == [6 + 3] * 3
    w1, w2, w3 = (checkpoint.load(f"{name}/ckpt.pt")["model"] for name in logs)
    for name in w1:
        assert torch.equal(w2[name], w3[name])
        torch.testing.assert_close(w1[name], w2[name], rtol=0, atol=1e-5)

    # evaluation: the same number in both, and, from the same weights and batches, in one process
    assert first["two"] == second["two"] == pytest.approx(one["val_loss"], rel=2e-6)
    windows = data.load(cfg.dataset).val_windows(cfg.eval_windows, cfg.block_size)
    model = checkpoint.load_model(checkpoint.load("two/ckpt.pt"))
    assert evaluate(model, windows, cfg.batch_size, torch.device("cpu"))[0] == first["two"]
    assert len(windows[0]) // cfg.batch_size % 2 == 1  # the batches do not divide between two
    batches = -(-len(windows[0]) // cfg.batch_size)
    assert first["evaluated"] + second["evaluated"] == 3 * batches and second["evaluated"]  # shared, three times
    assert set(first["saved"]) == {"two/ckpt.pt", "two/best.pt"} and not second["saved"]

    # gradients travel once an update; the second's signal and mistakes stop both
    assert len(first["unsynced"]) == len(second["unsynced"]) == 6
    assert first["stopped"] == second["stopped"] == {"interrupted": signal.SIGINT, "out_dir": "stopped", "steps": 2}
    assert checkpoint.load("stopped/ckpt.pt")["step"] == 2
    assert "at update 2" in first["diverged"] and first["diverged"] == second["diverged"]
    assert "none/best.pt does not exist" in first["missing"] and first["missing"] == second["missing"]
    assert not Path("missing").exists()
    assert "Not a directory" in first["nowhere"] and first["nowhere"] == second["nowhere"]
    assert done.stderr.count("train.py: only the second process sees this") == 1 and done.returncode == 1
    assert done.stdout.count("two: update 0 of 6") == 1

    # one process goes on with what two began, if an update is as large as before
    with pytest.raises(ValueError, match="is 4 windows an update, this run has 8: use --gradient_accumulation_steps=4"):
        training.train(tiny(**RUN, out_dir="cut", lr_decay_iters=6, resume=True))
    training.train(tiny(**{**RUN, "batch_size": 8, "gradient_accumulation_steps": 1}, out_dir="cut",
                        lr_decay_iters=6, resume=True))  # fmt: skip
    for name, w in checkpoint.load("cut/ckpt.pt")["model"].items():
        torch.testing.assert_close(w, w1[name], rtol=0, atol=1e-5)


@pytest.mark.parametrize("size, start", [(1, "python"), (2, "torchrun --nproc_per_node=2")])
def test_a_stopped_run_says_how_to_go_on(size, start, monkeypatch, capsys):
    """As many processes as before, or its updates would have another number of windows."""
    monkeypatch.setattr(sys, "argv", ["train.py"])
    monkeypatch.setattr(training, "join", lambda: nullcontext(Team(size=size)))
    monkeypatch.setattr(training, "train", lambda *_: {"interrupted": 2, "out_dir": "run", "steps": 7})
    with pytest.raises(SystemExit):
        training.main()
    assert f"go on: {start} train.py --resume --out_dir=run;" in capsys.readouterr().out


@pytest.mark.parametrize("rank", [0, 1])
def test_a_process_that_dies_ends_the_run_in_a_sentence(rank, tiny):
    """Either of them, by SIGKILL; what was saved is whole, and the run goes on from there, in one process."""
    done = torchrun(tiny(out_dir="lost", max_iters=60, eval_interval=4, data_seed=rank), LOST=str(rank))
    assert done.stderr.count("train.py: another process of this run is gone: go on") == 1 and done.returncode == 1
    assert "RuntimeError" not in done.stderr and "Connection" not in done.stderr
    assert checkpoint.load("lost/ckpt.pt")["step"] == 8 and checkpoint.load("lost/best.pt")
    training.train(tiny(out_dir="lost", max_iters=9, eval_interval=4, data_seed=rank, batch_size=8, resume=True))


def test_each_process_has_a_gpu_of_its_own(monkeypatch):
    """What one machine with two GPUs would be told, of GPUs that are made up."""
    chosen, team = [], Team(rank=3, size=4, local_rank=1, local_size=2)
    monkeypatch.setattr("distributed.pick_device", torch.device)
    monkeypatch.setattr("torch.cuda.device_count", lambda: 2)
    monkeypatch.setattr("torch.cuda.set_device", chosen.append)
    assert Team().device("cuda:1") == torch.device("cuda:1") and team.device("cpu").type == "cpu" and not chosen
    assert team.device("cuda") == torch.device("cuda:1") and chosen == [torch.device("cuda:1")]
    for name in ("cuda:0", "mps"):
        with pytest.raises(ValueError, match=f"device='{name}' is one device, not one for each of 4 processes"):
            team.device(name)
    with pytest.raises(ValueError, match="3 processes need a GPU each and this machine has 2: start 2"):
        Team(0, 3, 0, 3).device("cuda")


if __name__ == "__main__":
    torch.set_num_threads(1)
    signal.signal(signal.SIGINT, signal.default_int_handler)  # where a shell's background jobs ignore it
    data.CACHE = Path("cache")  # like the fixture
    if "LOST" in os.environ:
        torch.optim.AdamW.step = deadly
    else:
        training.train = script
    training.main()
