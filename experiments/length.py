"""How do time and memory grow with the length of a text? One attention layer, and its attention alone, by each path.

    python -m experiments.length                     # ten minutes on two cores
    python -m experiments.length --longest=2048 --rounds=1   # a quick look

Shows where each path of model.py pays, and so where its rule, `fastest`, should change from one to the other.
"""

import contextlib
import math
import statistics
import sys
import warnings
from dataclasses import dataclass
from functools import partial

import numpy as np
import torch
import torch.nn.functional as F
from torch.nn.attention import SDPBackend, sdpa_kernel
from torch.profiler import ProfilerActivity, profile

from experiments.measure import DEVICE, afresh, clock, interleaved, mixed_precision, peak_mib
from model import ATTENTIONS, BLOCKS_UNTIL, GPTConfig, blocks, eager, fastest, fused, rope_table


def unpadded(q1, k1, q2, k2, v, lam):
    """`fused`, but for the zeros that it pads q and k with. Few kernels take values of another width."""
    sdpa = partial(F.scaled_dot_product_attention, is_causal=True)
    return sdpa(q1, k1, v) - lam[..., None] * sdpa(q2, k2, v)


PATHS = {"fastest": fastest, "eager": eager, "fused": fused, "blocks": blocks}
BACKENDS = ("FLASH_ATTENTION", "CUDNN_ATTENTION", "EFFICIENT_ATTENTION", "MATH")  # of PyTorch's SDPA
LENGTHS = (256, 1024, 2048, 4096, 8192, 16384)  # tokens
LONGEST_OF_MAPS = 8192  # tokens: what paths that keep whole maps are asked for


def layer_pass(kind, path, T):
    """Forward and backward of one attention layer over T tokens, 2 heads of 64, batch 1. Seconds."""
    cfg = GPTConfig(n_head=2, n_embd=128, attention=kind)
    layer = ATTENTIONS[kind](cfg, layer=0).to(DEVICE)
    for p in layer.parameters():
        torch.nn.init.normal_(p, std=0.1)
    layer.attend = PATHS[path]
    x = torch.randn(1, T, cfg.n_embd, device=DEVICE, requires_grad=True)
    rope, start = rope_table(cfg, 0, T, like=x), clock()
    with mixed_precision():
        y = layer(x, rope)
    y.sum().backward()
    return clock() - start


def attention_pass(path, T):
    """Forward and backward of two differential heads alone, each two maps of 64-wide queries, 128-wide values. Seconds.

    Two, since a CPU's flash kernel gives each thread heads of its own in its backward pass.
    """
    kind = dict(device=DEVICE, dtype=torch.bfloat16 if DEVICE == "cuda" else torch.float32, requires_grad=True)
    q1, k1, q2, k2, v = (torch.randn(1, 2, T, width, **kind) for width in (64, 64, 64, 64, 128))
    lam, start = torch.tensor(0.8, **kind), clock()
    {**PATHS, "unpadded": unpadded}[path](q1, k1, q2, k2, v, lam).sum().backward()
    return clock() - start


def kernels(kind, path, T=256):
    """Names of the attention kernels of a layer's backward pass, from the profiler."""
    with profile(activities=[ProfilerActivity.CPU, *[ProfilerActivity.CUDA] * (DEVICE == "cuda")]) as prof:
        layer_pass(kind, path, T)
    names = {event.key.removeprefix("aten::") for event in prof.key_averages()}
    wanted = ("_scaled_dot_product", "softmax")
    return sorted(name for name in names if any(w in name for w in wanted) and "backward" in name.lower())


def peak_of_layer(kind, path, T):
    return peak_mib(lambda: layer_pass(kind, path, 16), lambda: layer_pass(kind, path, T))


def peak_of_attention(path, T):
    return peak_mib(lambda: attention_pass(path, 16), lambda: attention_pass(path, T))


def layers(lengths, rounds):
    """One layer, {length: {"kind, path": {"ms", "ratio" to standard, "peak_mib"}}}."""
    table = {}
    for T in lengths:
        paths = ["fastest", "fused"] if T > LONGEST_OF_MAPS else list(PATHS)
        kinds = {kind: paths if kind == "diff" else set(paths) & {"fastest", "eager"} for kind in ATTENTIONS}
        cases = {f"{kind}, {path}": (kind, path, T) for kind in kinds for path in PATHS if path in kinds[kind]}
        ms = milliseconds(layer_pass, cases, rounds)
        base = ms["standard, fastest"]
        table[T] = {
            name: {"ms": ms[name], "ratio": ms[name] / base, "peak_mib": afresh(peak_of_layer, *case)}
            for name, case in cases.items()
        }
    return table


def attention(lengths, rounds):
    """Attention alone, {length: {path: {"ms", "ms_to_eager", "peak_mib", "peak_to_eager"}}}, where `eager` is asked."""
    table = {}
    for T in (T for T in lengths if T <= LONGEST_OF_MAPS):
        ms = milliseconds(attention_pass, {path: (path, T) for path in PATHS}, rounds)
        # a process takes 5 % more or less than the next, as its allocator has it
        peak = {path: statistics.median(afresh(peak_of_attention, path, T) for _ in range(5)) for path in PATHS}
        table[T] = {
            path: {"ms": ms[path], "ms_to_eager": ms[path] / ms["eager"],
                   "peak_mib": peak[path], "peak_to_eager": peak[path] / peak["eager"]}
            for path in PATHS
        }  # fmt: skip
    return table


def backends(T, rounds):
    """Attention alone by each of SDPA's backends: {"path, backend": ms, or None if PyTorch has no such kernel here}."""

    def by(backend, path, T):
        with sdpa_kernel(SDPBackend.__members__[backend]):
            return attention_pass(path, T)

    cases, taken = [(backend, path, T) for path in ("fused", "unpadded") for backend in BACKENDS], {}
    for case in cases:
        with warnings.catch_warnings(), contextlib.suppress(RuntimeError):
            warnings.simplefilter("ignore")  # they say why a kernel refuses
            by(*case)
            taken[case] = case
    ms = milliseconds(by, taken, rounds)
    return {f"{path}, {backend}": ms.get((backend, path, T)) for backend, path, T in cases}


def milliseconds(function, cases, rounds):
    """{name: median} of function(*case), interleaved."""
    turns = {name: lambda case=case: (1e3 * function(*case),) for name, case in cases.items()}
    return {name: ms for name, (ms,) in interleaved(turns, rounds).items()}


def exponent(layers, case):
    """x, where peak memory grows as T^x: the slope of the logarithms, over lengths that `fastest` leaves to `fused`."""
    points = [(int(T), row[case]["peak_mib"]) for T, row in layers.items() if int(T) > BLOCKS_UNTIL and case in row]
    return np.polyfit(*np.log(points).T, deg=1)[0] if len(points) > 1 else math.nan


def tables(numbers):
    """{name: rows} of what the terminal and the README show."""
    lengths = list(numbers["layers"])
    layer = [["one layer: ms / MiB", *(f"T = {T}" for T in lengths), "memory grows as"]]
    for case in numbers["layers"][lengths[0]]:
        cells = [numbers["layers"][T].get(case) for T in lengths]
        growth = f"T^{exponent(numbers['layers'], case):.2f}"
        layer.append([case, *(f"{c['ms']:.1f} / {c['peak_mib']:.0f}" if c else "" for c in cells), growth])
    alone = [["attention alone, of `eager`: time / memory", *(f"T = {T}" for T in numbers["attention"])]]
    for path in PATHS:
        rows = [row[path] for row in numbers["attention"].values()]
        alone.append([path, *(f"{row['ms_to_eager']:.2f} / {row['peak_to_eager']:.3f}" for row in rows)])
    backend = [["attention alone, ms by kernel of SDPA", *BACKENDS]]
    for path in ("fused", "unpadded"):
        taken = [numbers["backends"][f"{path}, {name}"] for name in BACKENDS]
        backend.append([path, *("refused" if ms is None else f"{ms:.0f}" for ms in taken)])
    kernel = [["path", "kernel of the backward pass"]]
    kernel += [[path, ", ".join(names)] for path, names in numbers["kernels"].items()]
    return {"layer": layer, "attention": alone, "backend": backend, "kernel": kernel}


def picture(numbers, path):
    import matplotlib

    matplotlib.use("agg")
    import matplotlib.pyplot as plt

    figure, (left, right) = plt.subplots(1, 2, figsize=(10, 3.6), layout="constrained")
    for i, kind in enumerate(ATTENTIONS):
        for style, way in (("-", "fastest"), (":", "eager")):
            points = [(T, row[f"{kind}, {way}"]) for T, row in numbers["layers"].items() if f"{kind}, {way}" in row]
            lengths = [int(T) for T, _ in points]
            for axes, value in ((left, "ms"), (right, "peak_mib")):
                axes.loglog(lengths, [p[value] for _, p in points], f"C{i}{style}", marker=".", label=f"{kind}, {way}")
    for axes, label in ((left, "ms"), (right, "peak MiB")):
        axes.set(xlabel="T, tokens", ylabel=f"one layer, forward and backward, {label}")
        axes.grid(alpha=0.3)
    left.legend(fontsize=8)
    figure.savefig(path, dpi=120)
    plt.close(figure)


@dataclass
class LengthConfig:
    longest: int = LENGTHS[-1]  # tokens
    rounds: int = 5  # timed turns of each path


def main():
    import tyro

    import experiments

    cfg = tyro.cli(LengthConfig, description=__doc__)
    if cfg.rounds < 1 or cfg.longest < LENGTHS[0]:
        sys.exit(f"length: rounds={cfg.rounds} must be at least 1 and longest={cfg.longest} at least {LENGTHS[0]}")
    numbers = {"device": DEVICE, "rounds": cfg.rounds}
    lengths = [T for T in LENGTHS if T <= cfg.longest]
    numbers["layers"], numbers["attention"] = layers(lengths, cfg.rounds), attention(lengths, cfg.rounds)
    numbers["backends"] = backends(min(cfg.longest, 4096), cfg.rounds)
    numbers["kernels"] = {f"{kind}, {path}": kernels(kind, path) for kind in ATTENTIONS for path in PATHS}
    name = "length" + "-changed" * (cfg != LengthConfig())  # no result of the settings that a reader expects
    experiments.save(experiments.RESULTS / f"{name}.json", numbers)
    numbers = experiments.load(name)
    picture(numbers, experiments.RESULTS / f"{name}.png")
    for rows in tables(numbers).values():
        print()
        experiments.print_table(rows)


if __name__ == "__main__":
    main()
