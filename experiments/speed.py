"""What does the second map cost? Time and memory of training and generating, on whatever machine this is.

    python -m experiments.speed                      # half an hour on two cores
    python -m experiments.speed --steps=3 --longest=2048 --tokens=64   # a quick look
    python -m experiments.speed --peer=transformers  # and beside Hugging Face's Llama and DiffLlama

All that is compared is interleaved (A B C A B C ..) in one process, each turn between two waits for the device, and
compared by medians, so that a machine that others use slows all alike. Peak memory is that of a fresh process each.
Nothing but torch and model.py is needed to measure; the command line, the result and the picture need the rest.
"""

import math
import subprocess
import sys
import time
from dataclasses import dataclass, replace
from functools import partial
from pathlib import Path

import numpy as np
import torch
import torch.nn.functional as F
from torch.profiler import ProfilerActivity, profile

from device import PEAK_FLOPS
from model import ATTENTIONS, GPT, GPTConfig, blocks, eager, fastest, flash, fused, rope_table

DEVICE = "cuda" if torch.cuda.is_available() else "cpu"
GPU = torch.cuda.get_device_name() if DEVICE == "cuda" else ""
PATHS = {"fastest": fastest, "eager": eager, "fused": fused, "blocks": blocks}
LENGTHS = (256, 1024, 2048, 4096, 8192, 16384)  # tokens, of one layer
LONGEST_OF_MAPS = 4096  # tokens: what paths that keep whole maps are asked for

WIDE = GPTConfig(n_layer=6, n_head=6, n_embd=384)
SHAPES = {  # name: (batch size, the model); main adds the default model
    "6 layers, 6 heads, 384 wide": (16, replace(WIDE, block_size=256)),
    "the same, longer": (2, replace(WIDE, block_size=1024)),
}
if DEVICE == "cuda":  # sizes for which such a device is made
    for T, D in ((1024, 64), (2048, 64), (4096, 64), (4096, 128)):
        heads = 768 // D
        SHAPES[f"12 layers, {heads} heads of {D}, T {T}"] = (
            32768 // T,
            GPTConfig(block_size=T, vocab_size=50304, n_layer=12, n_head=heads, n_embd=768, init_std=0.03),
        )


# ---------------------------------------------------------------------------------------------
# What is compared


def four_calls(q1, k1, q2, k2, v, lam):
    """The way of the official code where the kernel wants values as wide as queries: both maps with each half of V."""

    def with_halves(q, k):
        return torch.cat([flash(q, k, half) for half in v.chunk(2, dim=3)], dim=3)

    return with_halves(q1, k1) - lam[..., None] * with_halves(q2, k2)


class Peer(torch.nn.Module):
    """A model of Hugging Face's transformers of the same shape, in the clothes of GPT."""

    def __init__(self, name, cfg):
        super().__init__()
        import transformers

        config = getattr(transformers, f"{name}Config")(
            vocab_size=cfg.vocab_size, hidden_size=cfg.n_embd, intermediate_size=round(8 * cfg.n_embd / 3),
            num_hidden_layers=cfg.n_layer, num_attention_heads=cfg.n_head, num_key_value_heads=cfg.kv_heads,
            max_position_embeddings=cfg.block_size, rms_norm_eps=1e-5, tie_word_embeddings=cfg.tie_embeddings,
            bos_token_id=None, eos_token_id=None, pad_token_id=None,
        )  # fmt: skip
        self.model = transformers.AutoModelForCausalLM.from_config(config, attn_implementation="sdpa")

    def forward(self, idx, targets):
        logits = self.model(idx, use_cache=False).logits
        return logits, F.cross_entropy(logits.float().flatten(0, 1), targets.flatten())

    def num_params(self):
        return sum(p.numel() for p in self.parameters())

    def generate(self, idx, tokens, **_):
        return self.model.generate(idx, attention_mask=torch.ones_like(idx), max_new_tokens=tokens, do_sample=False)


def build(name, cfg):
    """The model of that name: a kind, "four calls" (of diff), or one of Hugging Face's."""
    if name in ("Llama", "DiffLlama"):
        return Peer(name, cfg).to(DEVICE)
    model = GPT(replace(cfg, attention="diff" if name == "four calls" else name)).to(DEVICE)
    if name == "four calls":
        for block in model.blocks:
            block.attn.attend = four_calls
    return model


# ---------------------------------------------------------------------------------------------
# Measuring


def clock():
    """Seconds, once the device has done all it was given."""
    if DEVICE == "cuda":
        torch.cuda.synchronize()
    return time.perf_counter()


def interleaved(turns, rounds, warm_up=2):
    """turns: {name: function -> seconds, or a tuple of them}. {name: median, or a tuple of medians}."""
    taken = {name: [] for name in turns}
    for i in range(warm_up + rounds):
        for name, turn in turns.items():
            seconds = turn()
            if i >= warm_up:
                taken[name].append(seconds)
    return {name: torch.tensor(s).median(dim=0).values.tolist() for name, s in taken.items()}


def training_step(model, optimizer, idx):
    """One update on random ids. Seconds after the forward pass, after the backward pass, after all."""
    start = clock()
    with torch.autocast(DEVICE, torch.bfloat16, enabled=DEVICE == "cuda"):
        _, loss = model(idx[:, :-1], idx[:, 1:])
    forward = clock()
    loss.backward()
    backward = clock()
    optimizer.step()
    optimizer.zero_grad(set_to_none=True)
    return forward - start, backward - start, clock() - start


def steps(names, batch_size, cfg, rounds):
    """{name: median milliseconds, tokens/s, ratios to standard, parameters} of a training step of each model."""
    models = {name: build(name, cfg) for name in names}
    idx = torch.randint(cfg.vocab_size, (batch_size, cfg.block_size + 1), device=DEVICE)
    turns = {
        name: partial(training_step, model, torch.optim.AdamW(model.parameters(), fused=True), idx)
        for name, model in models.items()
    }
    taken, numbers = interleaved(turns, rounds), {}
    for name, model in models.items():
        forward, backward, whole = taken[name]
        numbers[name] = {
            "forward_ms": 1e3 * forward, "forward_backward_ms": 1e3 * backward, "step_ms": 1e3 * whole,
            "tokens_per_s": batch_size * cfg.block_size / whole, "ratio": whole / taken["standard"][2],
            "params": model.num_params(),
        }  # fmt: skip
        if isinstance(model, GPT):
            flops, base = (m.flops_per_token(cfg.block_size) for m in (model, models["standard"]))
            numbers[name] |= {"flops_per_token": flops, "flops_ratio": flops / base}
            if GPU in PEAK_FLOPS:
                numbers[name]["mfu"] = flops * numbers[name]["tokens_per_s"] / PEAK_FLOPS[GPU]
    return numbers


def layer_pass(kind, path, T):
    """Forward and backward of one attention layer over T tokens, 2 heads of 64, batch 1. Seconds."""
    cfg = GPTConfig(n_head=2, n_embd=128, attention=kind)
    layer = ATTENTIONS[kind](cfg, layer=0).to(DEVICE)
    for p in layer.parameters():
        torch.nn.init.normal_(p, std=0.1)
    layer.attend = PATHS[path]
    x = torch.randn(1, T, cfg.n_embd, device=DEVICE, requires_grad=True)
    rope, start = rope_table(cfg, 0, T, like=x), clock()
    with torch.autocast(DEVICE, torch.bfloat16, enabled=DEVICE == "cuda"):
        y = layer(x, rope)
    y.sum().backward()
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


def peak_of_step(name, batch_size, cfg):
    def update(batch_size, T):
        model = build(name, cfg)
        idx = torch.randint(cfg.vocab_size, (batch_size, T + 1), device=DEVICE)
        training_step(model, torch.optim.AdamW(model.parameters(), fused=True), idx)

    return peak_mib(lambda: update(1, 8), lambda: update(batch_size, cfg.block_size))


def peak_mib(warm_up, run):
    """What `run` adds to the peak memory of this process, in MiB, after something small that loads what it needs."""

    def peak():
        if DEVICE == "cuda":
            return torch.cuda.max_memory_allocated() / 2**20
        with open("/proc/self/status") as status:  # Linux
            return next(int(line.split()[1]) for line in status if line.startswith("VmHWM")) / 2**10

    warm_up()
    before = peak()
    run()
    return peak() - before


def afresh(function, *args):
    """function(*args), a number, in a process of its own."""
    code = "from model import GPTConfig; from experiments import speed; print(speed.{}(*{!r}))"
    command = [sys.executable, "-c", code.format(function.__name__, args)]
    root = Path(__file__).parents[1]
    return float(subprocess.run(command, cwd=root, capture_output=True, text=True, check=True).stdout)


def layers(lengths, rounds):
    """One layer, {length: {"kind, path": {"ms", "ratio" to standard, "peak_mib"}}}."""
    table = {}
    for T in lengths:
        paths = ["fastest", "fused"] if T > LONGEST_OF_MAPS else list(PATHS)
        kinds = {kind: paths if kind == "diff" else set(paths) & {"fastest", "eager"} for kind in ATTENTIONS}
        cases = {f"{kind}, {path}": (kind, path, T) for kind in kinds for path in PATHS if path in kinds[kind]}
        ms = interleaved({name: partial(layer_ms, *case) for name, case in cases.items()}, rounds)
        base = ms["standard, fastest"][0]
        table[T] = {
            name: {"ms": ms[name][0], "ratio": ms[name][0] / base, "peak_mib": afresh(peak_of_layer, *case)}
            for name, case in cases.items()
        }
    return table


def layer_ms(*case):
    return (1e3 * layer_pass(*case),)


def generation(names, tokens, rounds=3):
    """{name: median tokens/s} of writing `tokens` after a prompt of 64, greedily, one text at a time."""
    cfg = replace(WIDE, block_size=1024)
    models = {name: build(name, cfg).eval() for name in names}
    prompt = torch.randint(cfg.vocab_size, (1, 64), device=DEVICE)

    def turn(model, **how):
        start = clock()
        assert model.generate(prompt, tokens, **how).shape[1] == 64 + tokens
        return (clock() - start,)

    turns = {name: partial(turn, model, temperature=0) for name, model in models.items()}
    for name in [name for name in names if name in ATTENTIONS]:
        turns[f"{name}, no cache"] = partial(turn, models[name], temperature=0, use_cache=False)
    with torch.no_grad():
        return {name: tokens / seconds for name, (seconds,) in interleaved(turns, rounds, warm_up=1).items()}


# ---------------------------------------------------------------------------------------------
# Showing


def tables(numbers):
    """{name: rows} of what the terminal and the README show."""
    compared = [name for name in next(iter(numbers["shapes"].values()))["models"] if name != "standard"]
    step = [["training step", "batch x tokens", "standard, tokens/s", *(f"{name} / standard" for name in compared)]]
    peak = [["peak MiB of a step", *numbers["shapes"]]]
    for name, shape in numbers["shapes"].items():
        row = [
            name,
            f"{shape['batch_size']} x {shape['tokens']}",
            f"{shape['models']['standard']['tokens_per_s']:,.0f}",
        ]
        for other in compared:
            model = shape["models"][other]
            floor = f" (FLOPs {model['flops_ratio']:.2f})" if "flops_ratio" in model else ""
            row.append(f"{model['ratio']:.2f}{floor}")
        step.append(row)
    for name in ["standard", *compared]:
        peak.append([name, *(f"{s['models'][name]['peak_mib']:.0f}" for s in numbers["shapes"].values())])
    lengths = list(numbers["layers"])
    layer = [["one layer: ms / MiB", *(f"T = {T}" for T in lengths), "memory grows as"]]
    for case in numbers["layers"][lengths[0]]:
        cells = [numbers["layers"][T].get(case) for T in lengths]
        growth = f"T^{exponent(numbers['layers'], case):.2f}"
        layer.append([case, *(f"{c['ms']:.1f} / {c['peak_mib']:.0f}" if c else "" for c in cells), growth])
    kernel = [["path", "kernel of the backward pass"]]
    kernel += [[path, ", ".join(names)] for path, names in numbers["kernels"].items()]
    written = [["generating", "tokens/s"], *([name, f"{n:.0f}"] for name, n in numbers["generation"].items())]
    return {"step": step, "peak": peak, "layer": layer, "kernel": kernel, "generation": written}


def exponent(layers, case):
    """x, where peak memory grows as T^x: the slope of the logarithms, over lengths that `fastest` leaves to `fused`."""
    points = [(int(T), row[case]["peak_mib"]) for T, row in layers.items() if int(T) > 1024 and case in row]
    return np.polyfit(*np.log(points).T, deg=1)[0] if len(points) > 1 else math.nan


def picture(numbers, path):
    import matplotlib

    matplotlib.use("agg")
    import matplotlib.pyplot as plt

    figure, (left, right) = plt.subplots(1, 2, figsize=(10, 3.6), layout="constrained")
    for color, kind in zip(("C0", "C3", "C2"), ATTENTIONS):
        for style, way in (("-", "fastest"), (":", "eager")):
            points = [(T, row[f"{kind}, {way}"]) for T, row in numbers["layers"].items() if f"{kind}, {way}" in row]
            lengths = [int(T) for T, _ in points]
            for axes, value in ((left, "ms"), (right, "peak_mib")):
                axes.loglog(lengths, [p[value] for _, p in points], color + style, marker=".", label=f"{kind}, {way}")
    for axes, label in ((left, "ms"), (right, "peak MiB")):
        axes.set(xlabel="T, tokens", ylabel=f"one layer, forward and backward, {label}")
        axes.grid(alpha=0.3)
    left.legend(fontsize=8)
    figure.savefig(path, dpi=120)
    plt.close(figure)


@dataclass
class SpeedConfig:
    steps: int = 20  # timed turns of each model
    longest: int = LENGTHS[-1]  # tokens, of one layer
    tokens: int = 512  # to generate
    peer: str = ""  # transformers: also measure its Llama and DiffLlama


def main():
    import tyro

    import experiments
    from config import TrainConfig

    cfg = tyro.cli(SpeedConfig, description=__doc__)
    if cfg.steps < 1 or cfg.longest < LENGTHS[0] or cfg.tokens < 1 or cfg.peer not in ("", "transformers"):
        sys.exit(f"speed: steps and tokens must be at least 1, longest at least {LENGTHS[0]}, peer transformers: {cfg}")
    peers = ["Llama", "DiffLlama"] if cfg.peer else []
    names, default = [*ATTENTIONS, "four calls", *peers], TrainConfig()
    shapes = {"the default model": (default.batch_size, default.model_config()), **SHAPES}
    numbers = {"device": DEVICE, "steps": cfg.steps, "shapes": {}}
    for name, (batch_size, shape) in shapes.items():
        print(f"timing {name}", file=sys.stderr)
        models = steps(names, batch_size, shape, cfg.steps)
        for other in names:
            models[other]["peak_mib"] = afresh(peak_of_step, other, batch_size, shape)
        numbers["shapes"][name] = {"batch_size": batch_size, "tokens": shape.block_size, "models": models}
    print("timing one layer", file=sys.stderr)
    numbers["layers"] = layers([T for T in LENGTHS if T <= cfg.longest], max(1, cfg.steps // 4))
    numbers["kernels"] = {f"{kind}, {path}": kernels(kind, path) for kind in ATTENTIONS for path in PATHS}
    print("timing generation", file=sys.stderr)
    numbers["generation"] = generation([*ATTENTIONS, *peers], cfg.tokens)
    experiments.save(experiments.RESULTS / "speed.json", numbers)
    numbers = experiments.load("speed")
    picture(numbers, experiments.RESULTS / "speed.png")
    for rows in tables(numbers).values():
        print()
        experiments.print_table(rows)


if __name__ == "__main__":
    main()
