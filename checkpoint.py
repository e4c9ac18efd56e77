"""A run's folder: the one place that knows its files.

    config.json   the TrainConfig that made it
    log.jsonl     what was measured, a JSON object a line
    ckpt.pt       the latest state, enough to go on with: weights, optimiser, step
    best.pt       the weights with the lowest validation loss
    lock          empty; held by the process that writes here

Of experiments it has result.json beside, what train(cfg) returned, and result.lock.

Checkpoints hold plain types and tensors and are read with weights_only=True: loading one runs no code.
They carry the tokenizer, so a checkpoint alone can print text. Every file is written under another name
and renamed when it is whole, so that a kill at any moment leaves the previous one.
"""

import json
import os
import zipfile
from pathlib import Path

import torch

import foreign
from model import ATTENTIONS, GPT, GPTConfig

RUNS = Path("runs")  # where runs go whose folder nobody named


def write(path, save):
    """Calls save(file) on a new file and puts it in the place of `path` once it is on disk."""
    temporary = path.with_name(f"{path.name}.{os.getpid()}.new")
    try:
        with open(temporary, "wb") as file:
            save(file)
            file.flush()
            os.fsync(file.fileno())
        os.replace(temporary, path)
    finally:
        temporary.unlink(missing_ok=True)


def save(path, **state):
    try:
        write(Path(path), lambda file: torch.save(state, file))
    except RuntimeError as error:  # PyTorch's; what stopped it, such as a full disk, is behind it
        cause = error.__context__ or error
        cause.filename = str(path)
        raise cause from None


def load(path):
    """The dict that `save` wrote, its tensors on the CPU. Raises ValueError with one sentence if `path` is not one."""
    if not Path(path).is_file():
        raise ValueError(f"{path} does not exist: train first, or name another run")
    try:
        with zipfile.ZipFile(path) as archive:
            # A checksum that torch.load would not look at, and a mark by which it takes a tensor for an empty folder.
            if archive.testzip() or any(part.external_attr for part in archive.infolist()):
                raise zipfile.BadZipFile
        state = torch.load(path, map_location="cpu", weights_only=True)
        foreign.check(state)
        kind = state["model_config"]["attention"]
        finite = all(w.isfinite().all() for w in state["model"].values())
    except PermissionError:
        raise
    except Exception as error:  # whatever a damaged or foreign file provokes, it is the file that is wrong
        raise ValueError(f"{path} is not a checkpoint of this project ({type(error).__name__})") from None
    if kind not in ATTENTIONS:
        raise ValueError(f"{path} has attention={kind!r}: model.py must have it in ATTENTIONS")
    if not finite:
        raise ValueError(f"{path} has weights that are not finite: its run diverged")
    return state


def find(run, prefer=("best.pt", "ckpt.pt")):
    """The path of a run's checkpoint, the first of `prefer` that exists."""
    paths = [Path(run) / name for name in prefer]
    return next((path for path in paths if path.is_file()), paths[0])


def load_model(state, device="cpu"):
    """A checkpoint's model, on the device, in eval mode."""
    model = GPT(GPTConfig(**state["model_config"]))
    model.load_state_dict(state["model"])
    return model.to(device).eval()


def newest_run(root=RUNS):
    """The folder under root whose checkpoint was written last. Raises ValueError if there is none."""
    checkpoints = list(Path(root).glob("*/ckpt.pt"))
    if not checkpoints:
        raise ValueError(f"no run in {root}/: train first (python train.py), or name one with --out_dir")
    return max(checkpoints, key=lambda path: path.stat().st_mtime).parent


def free_name(name, root=RUNS):
    """root/name, or root/name-2, -3, ..: the first folder that does not exist."""
    n = 1
    while (folder := Path(root) / (name if n == 1 else f"{name}-{n}")).exists():
        n += 1
    return folder


def write_config(run, config):
    write(Path(run) / "config.json", lambda file: file.write(json.dumps(config, indent=1).encode()))


def read_config(run, kind=dict):
    """The settings of a run, a `kind`. Raises ValueError with one sentence if there are none."""
    path = Path(run) / "config.json"
    try:
        return kind(**json.loads(path.read_text(encoding="utf-8")))
    except (OSError, ValueError, TypeError, RecursionError):
        raise ValueError(f"{path} is missing, damaged or another version's: {run} is not the folder of a run") from None


def must_be_free(run):
    """Raises ValueError with one sentence if a folder holds what a new run there would replace."""
    ways_out = {"ckpt.pt": "add --resume to go on with it", "best.pt": "start from it with --init_from"}
    for name, way_out in ways_out.items():
        if (Path(run) / name).exists():
            raise ValueError(f"{run} holds a run already: {way_out}, or choose another --out_dir")


class InUse(ValueError):
    pass


def claim(run, name="lock", wait=False):
    """The run's lock, an open file that makes the folder this process's own until it is closed, or the process dies.

    If another holds it: waits, or else raises InUse, with one sentence. Windows, and file systems without locks, do not
    know.
    """
    file = open(Path(run) / name, "a")  # not "w", which would empty what a link leads to
    try:
        if os.name == "posix":
            import fcntl

            fcntl.flock(file, fcntl.LOCK_EX | (0 if wait else fcntl.LOCK_NB))
    except BlockingIOError:
        file.close()
        raise InUse(f"{run} is in use by another process: wait for it, or choose another --out_dir") from None
    except OSError:
        pass  # a file system without locks, as some clusters have
    return file
