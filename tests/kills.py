"""Kills training again and again, at any moment, and sees that it ends in the bits of a run that was left alone.

    python -m tests.kills --kills=100

A run is started in a process of its own, killed, resumed, killed, .., and at last let be. Moments: at its start, soon
after a line of its log, while it writes a file. Blows: SIGKILL, SIGINT and SIGTERM, and these twice, since the first
makes it save. After each one, every file in the folder is whole. The seed says what is done; what it hits is up to the
machine. Processes are forked, so that torch is imported once: not on Windows.
"""

import os
import random
import signal
import sys
import tempfile
import time
import traceback
from collections import Counter
from dataclasses import dataclass, replace
from pathlib import Path

import torch
import torch._dynamo  # AdamW imports it; once, here, and not in every process  # noqa: F401

import checkpoint
import data
from config import TrainConfig
from process import begin
from run_log import read_log
from train import train

BLOWS = {
    "SIGKILL": [signal.SIGKILL],
    "SIGINT": [signal.SIGINT],
    "SIGTERM": [signal.SIGTERM],
    "SIGINT twice": [signal.SIGINT] * 2,
    "SIGTERM twice": [signal.SIGTERM] * 2,
}


MOMENTS = ("while it writes", "at the start", "after a line")


@dataclass
class KillsConfig:
    kills: int = 100
    seed: int = 0


def start(cfg):
    """The id of a new process that trains, or goes on where the last one was killed."""
    pid = os.fork()
    if pid:
        return pid
    status = 1
    try:
        signal.alarm(120)  # seconds; nothing here takes so long
        signal.signal(signal.SIGINT, signal.default_int_handler)  # where a shell's background jobs ignore it
        sys.stdout, os.environ["RANK"] = open(os.devnull, "w"), "1"  # so that no signal is announced
        begin("train.py")
        result = train(replace(cfg, resume=(Path(cfg.out_dir) / "ckpt.pt").exists()))
        status = 128 + result["interrupted"] if "interrupted" in result else 0
    except BaseException:
        traceback.print_exc()
    finally:
        os._exit(status)


def status(pid, wait=False):
    """The exit status of a process, minus its signal if one killed it; None while it runs."""
    done, code = os.waitpid(pid, 0 if wait else os.WNOHANG)
    return os.waitstatus_to_exitcode(code) if done else None


def await_moment(pid, run, moment, rng):
    """Returns at a moment to kill at: None, or the exit status if the process has ended before."""
    lines = lambda: (run / "log.jsonl").read_bytes().count(b"\n") if (run / "log.jsonl").exists() else 0  # noqa: E731
    wanted, writes = lines() + rng.randrange(1, 12), rng.randrange(1, 6)
    delay, seen = rng.uniform(0, 0.2 if moment == "at the start" else 0.01), set()
    while (code := status(pid)) is None:
        if moment == "while it writes":
            seen |= (
                {entry.inode() for entry in os.scandir(run) if entry.name.endswith(".new")} if run.exists() else set()
            )
            if len(seen) >= writes:
                return None
        elif moment == "at the start" or lines() >= wanted:
            time.sleep(delay)
            return status(pid)
    return code


def check_whole(run, step):
    """Everything in the folder can be read. Returns the update of its checkpoint, which is not before `step`."""
    if (run / "best.pt").exists():
        checkpoint.load(run / "best.pt")
    if not (run / "ckpt.pt").exists():
        assert step == 0, f"{run} has lost its checkpoint of update {step}"
        return 0
    checkpoint.read_config(run), read_log(run)
    now = checkpoint.load(run / "ckpt.pt")["step"]
    assert now >= step, f"{run} was at update {step} and is at {now}"
    return now


def left(run):
    """What a run leaves behind, with every tensor as its bytes and without what depends on time."""
    bits = lambda tensors: {name: t.numpy().tobytes() for name, t in tensors.items()}  # noqa: E731
    state, best = checkpoint.load(run / "ckpt.pt"), checkpoint.load(run / "best.pt")
    moments = {i: bits(tensors) for i, tensors in state["optimizer"]["state"].items()}
    log = [{k: v for k, v in line.items() if k != "tokens_per_s"} for line in read_log(run)[1:]]
    return [bits(state["model"]), moments, state["step"], bits(best["model"]), best["step"], log]


def kill(cfg):
    """Runs it all. Returns (kills by (moment, blow), runs); raises AssertionError if anything was lost."""
    rng, tally, runs = random.Random(cfg.seed), Counter(), 0
    blows = rng.choices(list(BLOWS), [4, 1, 1, 1, 1], k=cfg.kills)  # whatever a slow machine makes of the moments
    torch.set_num_threads(1)
    with tempfile.TemporaryDirectory() as folder:
        text, data.CACHE = Path(folder) / "text.txt", Path(folder) / "cache"
        text.write_text("".join(chr(97 + (i * i + i // 7) % 26) for i in range(5000)))
        settings = TrainConfig(
            dataset=str(text), n_layer=2, n_head=2, n_embd=16, block_size=16, batch_size=4, max_iters=100, dropout=0.1,
            eval_interval=5, eval_windows=4, log_interval=1, warmup_iters=2, device="cpu", out_dir=f"{folder}/alone",
        )  # fmt: skip
        assert status(start(settings), wait=True) == 0
        alone = left(Path(settings.out_dir))
        while tally.total() < cfg.kills:
            runs, step, run = runs + 1, 0, Path(folder) / str(runs)
            for _ in range(rng.randrange(1, 12)):
                moment = MOMENTS[tally.total() % 3]  # each of them, however few kills
                blow = blows[tally.total()]
                pid = start(replace(settings, out_dir=str(run)))
                code = await_moment(pid, run, moment, rng)
                if code is None:
                    for signum in BLOWS[blow]:
                        os.kill(pid, signum)
                    code = status(pid, wait=True)
                    signum = BLOWS[blow][0]
                    assert code in (0, -signum, 128 + signum), f"{blow} {moment}: exit status {code}"
                    tally[moment, blow] += code != 0
                step = check_whole(run, step)
                if code == 0 or tally.total() == cfg.kills:
                    break
            assert status(start(replace(settings, out_dir=str(run))), wait=True) == 0
            for ours, theirs in zip(left(run), alone, strict=True):
                assert ours == theirs, f"{run} is not the run that was left alone"
            assert not list(run.glob("*.new")), "something half-written is left"
    return tally, runs


def main():
    import tyro

    tally, runs = kill(tyro.cli(KillsConfig, description=__doc__))
    for moment in sorted({moment for moment, _ in tally}):
        print(f"{moment:17s}", ", ".join(f"{tally[moment, blow]} {blow}" for blow in BLOWS))
    print(f"{tally.total()} kills of {runs} runs: nothing lost, all end in the bits of the one left alone")


if __name__ == "__main__":
    main()
