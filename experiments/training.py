"""Trained runs: kept by a hash of what their numbers depend on, shared between experiments and between processes."""

import hashlib
import inspect
import json
import multiprocessing
import os
import signal
import sys
import threading
from contextlib import contextmanager
from dataclasses import asdict, replace
from pathlib import Path

import numpy as np
import torch

import checkpoint
import experiments
from config import PRESETS, TrainConfig, need
from device import made_with, pick_device
from experiments import ROOT, T_975
from model import ATTENTIONS

RUNS = checkpoint.RUNS / "experiments"

# What a run's numbers come from, as it was imported: a file that changes meanwhile is another run's.
NAMES = """model.py linear.py initial.py blocks.py dropout.py train.py evaluate.py health.py device.py run_log.py
    data/*.py""".split()
NAMED = [path for name in NAMES for path in sorted(ROOT.glob(name))]
CODE = {path: path.read_bytes() for path in NAMED}

FIRST_SEED = 1  # of those that are compared: 0 is the quick start's, whose text was chosen with it in view
TUNED = ("learning_rate", "init_std")  # what experiments.tune tries, in this order
TRAINED, REMEMBERED = set(), {}  # runs that this process has trained; {run: seconds}, which others did
HELPS = False  # whether this process is another's helper
QUICK_PEOPLE = 6  # in a story, at most

# What an experiment sets itself, from its own settings.
OWN = "dataset attention seed data_seed out_dir resume init_from eval_only preset".split()

# Settings that say where a run is and how it goes on, not what it computes.
PLACE = {"out_dir": "", "resume": False, "preset": "laptop"}


def preset(name):
    return replace(TrainConfig(), **PRESETS[name])


def fingerprint(cfg):
    """A name for what a run's numbers depend on: settings, text, code, kind of device; not the version of torch."""
    digest = hashlib.sha256(json.dumps(asdict(replace(cfg.resolved(), **PLACE)), sort_keys=True).encode())
    digest.update(pick_device(cfg.device).type.encode())
    kind = Path(inspect.getfile(ATTENTIONS[cfg.attention]))  # an experiment, if it adds it
    CODE.setdefault(kind, kind.read_bytes())
    for path in [*NAMED, *([] if kind in NAMED else [kind])]:
        digest.update(CODE[path])
    text = Path(cfg.dataset)
    if text.is_file():
        digest.update(text.read_bytes())
    for path in sorted([*text.glob("*.bin"), *text.glob("meta.json")]):
        ids = path.read_bytes() if path.stat().st_size < 1 << 20 else np.memmap(path, mode="r")[:: 1 << 10].tobytes()
        digest.update(f"{path.name} {path.stat().st_size}".encode() + ids)  # of a large file every 1,024th byte
    return f"{text.stem}-{cfg.attention}-{digest.hexdigest()[:12]}"


def trained(cfg, wait=True):
    """train(cfg) in a folder named by its fingerprint: done once, gone on with if it was interrupted, remembered.

    Raises FloatingPointError for a run that diverged, which is remembered too. Where another process is at it: waits,
    or else raises checkpoint.InUse.
    """
    run = RUNS / fingerprint(cfg)
    done = run / "result.json"
    if not done.exists():
        run.mkdir(parents=True, exist_ok=True)
        with alone_at(run, wait):
            if not done.exists():  # which the other may have written
                result = train_on(cfg, run)
                checkpoint.write(done, lambda file: file.write(json.dumps(result).encode()))
                TRAINED.add(run)
    result = json.loads(done.read_text())
    if run not in TRAINED | REMEMBERED.keys():
        print(f"remembered: {run}")
        REMEMBERED[run] = result.get("seconds", 0)
    if "diverged" in result:
        raise FloatingPointError(result["diverged"])
    return result


def alone_at(run, wait):
    """A lock, for `with`: no other process trains this run."""
    try:
        return checkpoint.claim(run, "result.lock")
    except checkpoint.InUse:
        if not wait:
            raise
    print(f"{run}: another process is at it, waiting for it")
    return checkpoint.claim(run, "result.lock", wait=True)


def train_on(cfg, run):
    """The result of train(cfg) in the folder `run`, or of going on with it; {"diverged": why}. Interrupted: exits."""
    from train import train

    try:
        result = train(replace(cfg, out_dir=str(run), resume=(run / "ckpt.pt").exists()))
    except FloatingPointError as error:
        return {"diverged": str(error)}
    if "interrupted" in result:
        print("saved: the same command goes on from here")
        sys.exit(128 + result["interrupted"])
    return {**result, "commit": made_with(None)["commit"], "threads": torch.get_num_threads()}


def ahead(cfgs, trials=False):
    """Trains those of these TrainConfigs that no other process is at: processes that all begin with this share the
    work. Of trials some may diverge, and what is trained next hangs on them; else a helper has done its part here."""
    for i, cfg in enumerate(cfgs, 1):
        told = ", ".join(f"{name}={getattr(cfg, name)}" for name in ("n_embd", *TUNED, "seed"))
        print(f"\n--- run {i} of {len(cfgs)}: {cfg.attention}, {told}")
        try:
            trained(cfg, wait=False)
        except checkpoint.InUse:
            print("another process is at it")
        except FloatingPointError as error:
            if not trials:
                raise
            print(error)
    if HELPS and not trials:
        sys.exit()


@contextmanager
def helpers(run, cfg):
    """Within it, cfg.jobs - 1 more processes do run(cfg) too, until all is trained, and all have equally many threads.

    Raises ValueError with one sentence if there cannot be so many.
    """
    jobs, cores = getattr(cfg, "jobs", 1), os.cpu_count()
    need(1 <= jobs <= cores, f"jobs={jobs} must be from 1 to {cores}, the cores of this machine")
    need(jobs == 1 or locks_hold(), f"jobs={jobs}: this system cannot lock files in {RUNS}, use --jobs=1")
    threads = max(1, torch.get_num_threads() // jobs)
    torch.set_num_threads(threads)
    processes, listens = [], signal.signal(signal.SIGINT, signal.SIG_IGN)  # Ctrl-C is for this process alone
    try:
        for _ in range(jobs - 1):
            process = multiprocessing.get_context("spawn").Process(
                target=help_with, args=(run, cfg, threads), daemon=True
            )
            process.start()
            processes.append(process)
        signal.signal(signal.SIGINT, listens)
        yield
        if lost := [str(process.exitcode) for process in processes if process.exitcode]:
            print(f"warning: helpers ended early (exit codes {', '.join(lost)}); what they left was trained here")
    finally:
        signal.signal(signal.SIGINT, listens)
        for process in processes:
            process.terminate()  # a run is saved
        for process in processes:
            process.join()


def locks_hold():
    """Whether a file in RUNS that is locked cannot be locked again: some file systems do not know."""
    RUNS.mkdir(parents=True, exist_ok=True)
    try:
        with checkpoint.claim(RUNS, wait=True), checkpoint.claim(RUNS):
            return False
    except checkpoint.InUse:
        return True


def help_with(run, cfg, threads):
    """A helper's whole life. It says nothing, and ends with the process that it helps, whatever ends that."""
    global HELPS
    HELPS = True
    os.setsid()  # a terminal that is closed ends the first process, and that its helpers
    sys.stdout = sys.stderr = open(os.devnull, "w")
    signal.signal(signal.SIGTERM, lambda signum, frame: sys.exit(128 + signum))

    def watch():
        multiprocessing.parent_process().join()
        os.kill(os.getpid(), signal.SIGTERM)

    threading.Thread(target=watch, daemon=True).start()
    torch.set_num_threads(threads)
    run(cfg)


def check(cfg, *names):
    """Of an experiment's settings: enough seeds, not more than T_975 knows, and nothing set that would be set over:
    what every experiment sets itself, and `names`.

    Raises ValueError with one sentence.
    """
    most, default = len(T_975) + 1, type(cfg)().train
    need(1 <= cfg.seeds <= most, f"seeds={cfg.seeds} must be from 1 to {most}")
    kinds = getattr(cfg, "kinds", ("standard",))
    need(kinds and len(set(kinds)) == len(kinds), f"kinds={' '.join(kinds)!r} must be one or more, each of them once")
    for name in (*OWN, *names):
        value = getattr(cfg.train, name)
        need(
            value in (getattr(default, name), getattr(TrainConfig(), name), getattr(cfg, "dataset", None)),
            f"train.{name}={value!r}: this experiment sets it itself, leave it out",
        )


def best_of(kind, base):
    """`base`, a TrainConfig, with what experiments.tune found for this kind. Raises ValueError if it tried others.

    What was found for whole runs is taken for shorter ones too.
    """
    base, name = base.resolved(), f"tune-{Path(base.dataset).stem}"
    path = experiments.RESULTS / f"{name}.json"
    need(path.exists(), f"{path.name} does not exist: run python -m experiments.tune --dataset={base.dataset} first")
    found = experiments.load(name)
    made = TrainConfig(**found["settings"])
    for setting, value in found["settings"].items():
        need(
            setting in ("attention", "seed", "data_seed")
            or getattr(base, setting) in (value, getattr(shorter(made), setting))
            or setting == "max_iters"
            and base.max_iters < value,
            f"{name}.json was made with {setting}={value!r}, not {getattr(base, setting)!r}: leave out --tuned, or"
            f" --train.{setting}",
        )
    need(kind in found["kinds"], f"{name}.json has no attention={kind!r}: tune it too, or leave out --tuned")
    return replace(base, **found["kinds"][kind]["best"])


def arms(base, kinds, tuned=False):
    """{kind: TrainConfig}: `base` for each kind, if `tuned` with what experiments.tune found for it; all checked."""
    found = {kind: replace(best_of(kind, base) if tuned else base, attention=kind) for kind in kinds}
    for cfg in found.values():
        cfg.check()
    return found


def own(cfg):
    """What of a TrainConfig may be its kind's own, for a result to say."""
    return {name: getattr(cfg, name) for name in TUNED}


def runs(arms, seeds):
    """Yields (kind, seed, result): the numbers of each run of {kind: TrainConfig}, all of them once all are trained.

    Runs of one seed share their batches and, where kinds share weights, the initial values.
    """
    found = [(kind, seed, replace(cfg, seed=seed, data_seed=seed)) for seed in seeds for kind, cfg in arms.items()]
    ahead([cfg for *_, cfg in found])
    for kind, seed, cfg in found:
        yield kind, seed, trained(cfg)


def models(arms, seeds):
    """`runs`, and of each its last weights, in eval mode: (kind, seed, model, result)."""
    for kind, seed, result in runs(arms, seeds):
        yield kind, seed, checkpoint.load_model(checkpoint.load(Path(result["out_dir"]) / "ckpt.pt")), result


def equally_long(windows, count):
    """(n, T) ids: the first of these validation windows, at most `count`, cut to the length that half of them have.

    What fills up a short story is no text, and has no business in a measurement.
    """
    x, y, _ = windows
    lengths = (y >= 0).sum(axis=1)
    T = int(np.sort(lengths)[len(lengths) // 2])
    return torch.from_numpy(x[lengths >= T][:count, :T])


def shorter(train):
    """A TrainConfig with a quarter of the updates, and stories easy enough for that."""
    people = max(train.fewest, min(train.people, QUICK_PEOPLE))
    return replace(train, max_iters=max(1, train.max_iters // 4), people=people, denials=0)


def shortened(cfg):
    """An experiment's settings, with the text and every number in `train`; with --quick: one seed, and shorter runs."""
    cfg = replace(cfg, train=replace(cfg.train, dataset=getattr(cfg, "dataset", cfg.train.dataset)).resolved())
    if not cfg.quick:
        return cfg
    train = shorter(cfg.train)
    print(f"quick: one seed, {train.max_iters} updates a run; stories have {train.people} people at most, no denials")
    return replace(cfg, seeds=1, train=train)
