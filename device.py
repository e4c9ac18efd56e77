"""Where a model runs and what with: the device, the type of its matrix products, torch.compile, versions."""

import re
import subprocess
import sys
from pathlib import Path

import numpy as np
import torch

# Dense bfloat16 peak of known GPUs in FLOP/s, from their data sheets: without one, no MFU is reported.
PEAK_FLOPS = {
    "NVIDIA H200": 989e12, "NVIDIA H100 80GB HBM3": 989e12, "NVIDIA A100-SXM4-80GB": 312e12,
    "NVIDIA A100-SXM4-40GB": 312e12, "NVIDIA L4": 121e12, "NVIDIA GeForce RTX 4090": 165e12,
    "NVIDIA GeForce RTX 3090": 71e12,
}  # fmt: skip


def pick_device(name="auto"):
    """The torch device of that name; "auto" is the first of cuda, mps and cpu that this machine has.

    Raises ValueError with one sentence if it has none of that name.
    """
    count = {"cuda": torch.cuda.device_count(), "mps": int(torch.backends.mps.is_available()), "cpu": 1}
    if name == "auto":
        name = next(kind for kind, n in count.items() if n)
    kind, _, index = name.partition(":")
    if not re.fullmatch("[0-9]*", index) or int(index or 0) >= count.get(kind, 0):
        raise ValueError(
            f"device={name!r} is not on this machine: use auto or {', '.join(k for k in count if count[k])}"
        )
    return torch.device(name)


def precision(device_type, dtype, bf16_supported=False):
    """(dtype name, autocast or not, gradient scaler or not) for a kind of device; auto is 16 bits on a GPU alone.

    A GPU that has no bfloat16 of its own computes in float16 instead.
    """
    if device_type == "cuda" and dtype in ("auto", "bfloat16"):
        dtype = "bfloat16" if bf16_supported else "float16"
    elif dtype == "auto":
        dtype = "float32"
    return dtype, dtype != "float32", dtype == "float16" and device_type == "cuda"


def compiled(model, batch, autocast, mode):
    """torch.compile(model), tried forward and backward on a batch (x, y).

    Where that fails, a mode of "on" raises ValueError with one sentence, and "auto" gives the model as it was.
    """
    try:
        fast = torch.compile(model)
        with autocast:
            _, loss = fast(*batch)
        loss.backward()
        return fast
    except torch.OutOfMemoryError:
        raise
    except Exception as error:  # of any kind: a mistake of the model's own shows up again without the compiler
        why = f"torch.compile failed ({type(error).__name__}: {' '.join(str(error).split())[:200]})"
        if mode == "on":
            raise ValueError(f"compile={mode!r}, but {why}: use --compile=off") from None
        print(f"warning: {why}; going on without it")
        return model
    finally:
        model.zero_grad(set_to_none=True)


def made_with(device):
    """What a number depends on besides the settings: a dict of versions, the device's name and this code's commit."""
    command = ["git", "-C", str(Path(__file__).parent), "describe", "--always", "--abbrev=40", "--exclude=*", "--dirty"]
    try:
        commit = subprocess.run(command, capture_output=True, text=True, check=True).stdout.strip()
    except (OSError, subprocess.CalledProcessError):  # no git, or no checkout
        commit = None
    return {
        "device": device, "threads": torch.get_num_threads(), "torch": torch.__version__, "numpy": np.__version__,
        "python": sys.version.split()[0], "commit": commit,
    }  # fmt: skip
