"""Where a model runs: the device, the type of its matrix products, and the speed it could have."""

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
    if not (index or "0").isdigit() or int(index or 0) >= count.get(kind, 0):
        raise ValueError(
            f"device={name!r} is not on this machine: use auto or {', '.join(k for k in count if count[k])}"
        )
    return torch.device(name)


def precision(device_type, dtype, bf16_supported=False):
    """(dtype name, autocast or not, gradient scaler or not) for a kind of device; auto is bfloat16 on a GPU with it."""
    if dtype == "auto":
        dtype = {"cuda": "bfloat16" if bf16_supported else "float16"}.get(device_type, "float32")
    return dtype, dtype != "float32", dtype == "float16" and device_type == "cuda"
