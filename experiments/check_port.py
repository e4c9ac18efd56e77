"""What is wrong with my port? Holds somebody's attention layer against the reference, and names the mistake.

    python -m experiments.check_port port.npz --layer=3
    python -m experiments.check_port --callable=my_model:layer    # imports my_model: runs your code, with your rights

The file holds the layer's state-dict under the official names, prefixes allowed, an input x, (T, C) or (B, T, C), and
the port's output y. A dozen tokens, random weights and random lambda vectors show the most. Without a subln.weight
the head norm's gain is 1.

    numpy.savez("port.npz", x=x, y=y, **{name: p.numpy() for name, p in layer.state_dict().items()})
    torch.save({"x": x, "y": y, **layer.state_dict()}, "port.pt")

A callable gets x, a float32 tensor, and returns y. The weights are those of its state_dict() or of the file, which may
also bring x. A layer with a lambda_proj is taken for version 2. Exit code 0: it is the paper's layer; 1: it is not.
"""

import importlib
import itertools
import re
import sys
import zipfile
from collections import ChainMap
from dataclasses import dataclass
from operator import attrgetter
from pathlib import Path

import numpy as np
import torch
import tyro

from attention_numpy import LAYERS
from config import need
from experiments.mistakes import CONVENTIONS, mistakes

MAX_BYTES = 1 << 32  # of a file's arrays


@dataclass
class CheckPortConfig:
    file: tyro.conf.Positional[str] = ""  # .npz, or what torch.save wrote
    callable: str = ""  # package.module:name of what makes y from x
    n_head: int = 0  # of the standard model, twice the official code's num_heads; 0 believes the weights' shapes
    layer: int = -1  # counted from 0; -1 takes the number in the prefix
    rope_theta: float = 10000.0


# --- Reading a port --------------------------------------------------------------------------


def read(path):
    """{name: tensor} of a .npz or torch file. Raises ValueError with one sentence."""
    need(Path(path).is_file(), f"{path} is not a file")
    if zipfile.is_zipfile(path):
        with zipfile.ZipFile(path) as archive:
            size = sum(part.file_size for part in archive.infolist())
        need(size <= MAX_BYTES, f"{path} unpacks to {size:,} bytes: a layer needs far fewer")
    try:
        with open(path, "rb") as file:
            entries = dict(np.load(file)) if path.endswith(".npz") else torch.load(file, "cpu", weights_only=True)
        tensors = {str(name): torch.as_tensor(value).detach() for name, value in entries.items()}
        for tensor in tensors.values():
            tensor.double().numpy()  # as it will be used: sparse and quantized ones have no such thing
        return tensors
    except Exception as error:  # whatever a damaged or foreign file provokes, it is the file that is wrong
        raise ValueError(f"{path} is not a .npz or torch file of arrays by name ({type(error).__name__})") from None


def imported(name):
    module, _, attribute = name.partition(":")
    try:
        call = attrgetter(attribute)(importlib.import_module(module))
    except Exception as error:  # the module's own too
        raise ValueError(f"callable={name!r} is not package.module:name of something importable ({error})") from None
    need(callable(call) and not isinstance(call, type), f"callable={name!r} must be a function or a layer, not a class")
    return call.eval() if isinstance(call, torch.nn.Module) else call  # no dropout


def one_layer(entries, layer):
    """The weights of one layer, {official name: float64 array}, and its number, -1 if that is not known."""
    own = r"((?:.*\.)?)((?:[qkv]|out|o|lambda)_proj\.(?:weight|bias)|subln\.weight|lambda_[qk][12])"
    layers = {}  # by prefix
    for match, value in ((re.fullmatch(own, name), value) for name, value in entries.items()):
        if match:
            layers.setdefault(match[1], {})[re.sub("^o_", "out_", match[2])] = value.double().numpy()
    need(layers, "there is no q_proj.weight, ..: weights must have the official code's names")
    numbers = {prefix: int((re.findall(r"\d+", prefix) or [-1])[-1]) for prefix in layers}
    if len(layers) > 1:
        layers = {prefix: w for prefix, w in layers.items() if numbers[prefix] == layer}
        need(len(layers) == 1, f"layer={layer} must be one of the file's layers, {sorted(numbers.values())}")
    ((prefix, w),) = layers.items()
    return w, layer if layer >= 0 else numbers[prefix]


def sizes(w, C, n_head):
    """(kind, n_head, n_kv_head) of a layer by its shapes. Raises ValueError with one sentence if they do not fit."""
    kind = "diff_v2" if "lambda_proj.weight" in w else "diff"
    own = ["lambda_proj.weight"] if kind == "diff_v2" else [f"lambda_{name}" for name in ("q1", "k1", "q2", "k2")]
    missing = [name for name in [f"{p}_proj.weight" for p in ("q", "k", "v", "out")] + own if name not in w]
    need(not missing, f"the weights lack {', '.join(missing)}")
    for name, value in w.items():
        need(not name.endswith("bias"), f"there is a {name}: the paper's projections have none")
        axes = 2 if "proj" in name else 1
        need(value.ndim == axes and value.size, f"{name} has shape {value.shape}: the paper's has {axes} axes")
        need(np.isfinite(value).all(), f"{name} has values that are not finite")
    queries, keys = len(w["q_proj.weight"]), len(w["k_proj.weight"])
    D = len(w["lambda_q1"]) if kind == "diff" else queries // (2 * len(w["lambda_proj.weight"]))
    need(D > 0 and D % 2 == C % D == 0, f"{C} channels do not divide into heads of {D}, which RoPE wants even")
    H, G, unit = C // D, keys // D, 2 if kind == "diff" else 1
    if kind == "diff":
        twice = "halved twice: the paper halves the number of heads and keeps their size"
        need(2 * queries != C, f"q_proj.weight makes {queries} channels of {C}; {twice}")
        need(
            H != 2 * n_head,
            f"lambda_q1 has {D} values, but n_head={n_head} makes heads of {C // max(1, n_head)}; {twice}"
            f" (if {n_head} is the official code's num_heads, use --n_head={H})",
        )
        w.setdefault("subln.weight", np.ones(2 * D))  # a norm without a gain, as the authors' first one was
    need(n_head in (0, H), f"n_head={n_head} does not fit weights with {C} channels and heads of {D}: use {H}")
    shapes = {"q_proj.weight": (C if kind == "diff" else 2 * C, C), "lambda_proj.weight": (H, C)}
    shapes |= {"k_proj.weight": (keys, C), "v_proj.weight": (keys, C), "out_proj.weight": (C, C)}
    for name, value in w.items():
        shape = shapes.get(name, (2 * D,) if name == "subln.weight" else (D,))
        need(value.shape == shape, f"{name} has shape {value.shape}: with {H} heads of {D}, the paper's has {shape}")
    fits = keys == G * D and G > 0 and G % unit == 0 and H % G == 0
    need(fits, f"k_proj.weight makes {keys} channels, which {H} heads of {D} cannot share{' in pairs' * (unit == 2)}")
    return kind, H, G


def port(cfg):
    """(x, y, w, layer): a port's input and output, tensors (B, T, C), its weights, arrays by name, and its depth."""
    need(cfg.file or cfg.callable, "give a file or --callable=package.module:name; --help says what must be in it")
    call = imported(cfg.callable) if cfg.callable else None
    entries = read(cfg.file) if cfg.file else dict(call.state_dict()) if hasattr(call, "state_dict") else {}
    w, layer = one_layer(entries, cfg.layer)
    if call:
        random = torch.randn(2, 16, w["q_proj.weight"].shape[-1], generator=torch.Generator().manual_seed(0))
        entries["x"] = entries.get("x", random).float()
        try:
            with torch.no_grad():
                y = call(entries["x"].clone())  # it may write into its input
        except Exception as error:
            raise ValueError(f"callable={cfg.callable!r} failed on x ({type(error).__name__}: {error})") from None
        need(isinstance(y, (torch.Tensor, np.ndarray)), f"the callable must return y alone, not a {type(y).__name__}")
        entries["y"] = torch.as_tensor(y)
    need("x" in entries and "y" in entries, f"{cfg.file} lacks the input x or the output y")
    x, y = entries["x"], entries["y"]
    need(x.ndim in (2, 3) and x.shape == y.shape, f"x {tuple(x.shape)} and y {tuple(y.shape)} are not both (B, T, C)")
    need(x.numel() and x.isfinite().all(), "x is empty or not finite")
    need(y.any() and not y.isnan().all(), "y is zero everywhere, or nowhere a number: that tells nothing of the layer")
    return x.reshape(-1, *x.shape[-2:]), y.reshape(-1, *y.shape[-2:]), w, layer


# --- Judging it ------------------------------------------------------------------------------


def distance(a, b):
    """|a - b|, 0 where both are no numbers (a softmax of nothing), infinite where one is."""
    d = np.where(np.isnan(a) & np.isnan(b), 0, np.abs(a - b))
    return np.where(np.isnan(d), np.inf, d)


def explain(y, layer, edits, tolerance):
    """[(error, convention, names)], best first: the fewest mistakes that lead from the reference to y; [] if none do.

    layer(steps) is the output of the reference with those steps replaced; edits are {name: steps}.
    """
    for count in (0, 1, 2):
        found = []
        for convention, turn in CONVENTIONS.items():
            for names in itertools.combinations(edits, count):
                steps = [edits[name] for name in names]
                if sum(map(len, steps)) == len(ChainMap(*steps)):  # else one would undo the other
                    error = distance(layer({**turn, **ChainMap(*steps)}), y).max()
                    if error <= tolerance:
                        found.append((error, convention, names))
        if found:
            return sorted(found, key=lambda one: (one[1] != "", one[0]))
    return []


def where(right, y, w, heads, tolerance):
    """In words: the first token at which y is wrong, the heads that are, and what that rules out."""
    t = int((distance(right, y).max(axis=(0, 2)) > tolerance).argmax())
    text = f"first at token {t}"
    W = w["out_proj.weight"]
    if np.isfinite(y).all() and np.linalg.cond(W) < 1e4:  # what went into out_proj can be had back
        d = np.abs((y - right) @ np.linalg.inv(W).T).reshape(-1, heads, len(W) // heads).max(axis=(0, 2))
        wrong = np.flatnonzero(d > d.max() / 100)
        text += ", in all heads" if len(wrong) == heads else f", in heads {', '.join(map(str, wrong))} of {heads}"
    if t == 0:
        return text + " (alone with itself: not queries, keys or RoPE; look at values, lambda, norm, factor, merging)"
    # A token alone has (1 - lambda) V, and the norm takes the factor off: it tells lambda's sign and no more.
    return text + " (the first is right: so are values, norm, factor, merging; look at lambda, q, k, RoPE, mask)"


def check(cfg):
    """(whether the port is the paper's layer, the verdict and what else to know: sentences)."""
    need(cfg.rope_theta > 0, f"rope_theta={cfg.rope_theta} must be greater than 0")
    x, y, w, depth = port(cfg)
    kind, n_head, n_kv_head = sizes(w, x.shape[2], cfg.n_head)
    need(depth >= 0 or kind == "diff_v2", "lambda_init depends on which layer it is: give --layer, counted from 0")
    share = 1e-4 if y.dtype in (torch.float32, torch.float64) else 3e-2  # of the largest value: rounding, amplified
    x, y, how = x.double().numpy(), y.double().numpy(), (w, depth, n_head, n_kv_head, cfg.rope_theta)
    try:
        right = np.stack([LAYERS[kind](one, *how)[0] for one in x])
    except OverflowError:
        right = np.full_like(x, np.inf)
    need(np.isfinite(right).all(), "these weights are too large: the paper's layer has no finite output")
    need(right.any(), "x or these weights are such that the paper's layer puts out zeros: use random ones")
    steps, edits = mistakes(kind, n_head, n_kv_head)
    heads = n_head if kind == "diff_v2" else n_head // 2

    @np.errstate(all="ignore")  # mistakes may overflow
    def layer(replaced):
        variant = type("Variant", (steps,), replaced)
        return np.stack([variant(one, *how)() for one in x])

    tolerance, error = share * np.abs(right).max(), distance(right, y).max()
    found = explain(y, layer, edits, tolerance)
    best = found[0] if found else (error, "", ())
    about = f"{kind}: {heads} heads of size {x.shape[2] // n_head}, {n_kv_head} keys, layer {depth}, x {x.shape}"
    if not found:
        verdict = f"differs by {error:.2g}, and no known mistake explains it: " + where(right, y, w, heads, tolerance)
    elif not best[2]:
        verdict = f"agrees with the paper's layer to {best[0]:.0e}{best[1]}"
    else:
        verdict = f"differs by {error:.2g}; explained by: {'; and '.join(best[2])}"
        verdict += f" (then it agrees to {best[0]:.0e}{best[1]})"
    lines = [verdict, f"{about}; largest value {np.abs(right).max():.2g}, tolerance {tolerance:.0e}"]
    others = [names for e, _, names in found[1:] if e <= 10 * best[0] and names != best[2]]
    lines += [f"or, as this input cannot tell, by: {'; and '.join(names)}" for names in others]
    if kind == "diff" and not any(w[name].any() for name in w if name.startswith("lambda_")):
        lines.append("all lambda vectors are zero: so are their gradients, and lambda will never be learned")
    agrees = bool(found) and not best[2]
    hidden = [name for name in edits if agrees and distance(layer(edits[name]), right).max() <= tolerance]
    if hidden:
        lines.append("this input and these weights would not show: " + "; ".join(hidden))
    return agrees, lines


def main():
    try:
        agrees, lines = check(tyro.cli(CheckPortConfig, description=__doc__))
    except (ValueError, OSError) as error:
        sys.exit(f"check_port: {error}")
    print(*lines, sep="\n")
    sys.exit(not agrees)


if __name__ == "__main__":
    main()
