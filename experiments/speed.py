"""What does the second map cost? Time of a training step, memory, and the kernel that ran.

    python -m experiments.speed              # all three tables, on whatever machine this is
    python -m experiments.speed --steps=5    # a quick look

Steps of all kinds are interleaved (A B C A B C ..) in one process and compared by medians, so that a machine
that others use slows them alike. Memory is the peak of a fresh process each. Nothing but torch and model.py is
needed to measure; the command line and the result file need the rest.
"""

import statistics
import subprocess
import sys
import time
from dataclasses import dataclass

import torch
from torch.profiler import ProfilerActivity, profile

from model import ATTENTIONS, GPT, GPTConfig, rope_table

SIZES = {  # name: (batch size, the model)
    "6 layers, 6 heads, 384 wide": (16, GPTConfig(block_size=256, n_layer=6, n_head=6, n_embd=384)),
    "the same, longer": (2, GPTConfig(block_size=1024, n_layer=6, n_head=6, n_embd=384)),
}
LENGTHS = (1024, 2048, 4096, 8192)  # tokens, for the memory of one layer


def build(kind, cfg, device):
    """The model, and a function that makes one training step of it on random ids and returns its seconds."""
    model = GPT(GPTConfig(**{**vars(cfg), "attention": kind})).to(device)
    optimizer = torch.optim.AdamW(model.parameters(), fused=True)
    wait = torch.cuda.synchronize if device == "cuda" else lambda: None

    def step(idx):
        wait()
        start = time.perf_counter()
        with torch.autocast(device, torch.bfloat16, enabled=device == "cuda"):
            _, loss = model(idx[:, :-1], idx[:, 1:])
        loss.backward()
        optimizer.step()
        optimizer.zero_grad(set_to_none=True)
        wait()
        return time.perf_counter() - start

    return model, step


def step_times(batch_size, cfg, steps, device):
    """{kind: {"median_ms", "ratio" to standard, "flops_ratio", "params"}}, steps interleaved."""
    kinds = {kind: build(kind, cfg, device) for kind in ATTENTIONS}
    idx = torch.randint(cfg.vocab_size, (batch_size, cfg.block_size + 1), device=device)
    times = {kind: [] for kind in kinds}
    for i in range(steps + 2):
        for kind, (_, step) in kinds.items():
            seconds = step(idx)
            if i >= 2:  # the first two warm up
                times[kind].append(seconds)
    T, base = cfg.block_size, "standard"
    return {
        kind: {
            "median_ms": 1e3 * statistics.median(times[kind]),
            "ratio": statistics.median(times[kind]) / statistics.median(times[base]),
            "flops_ratio": model.flops_per_token(T) / kinds[base][0].flops_per_token(T),
            "params": model.num_params(),
        }
        for kind, (model, _) in kinds.items()
    }


def layer_pass(kind, use_fused, T, device="cpu"):
    """Forward and backward of one attention layer over T tokens: 2 heads of 64, batch 1."""
    cfg = GPTConfig(n_head=2, n_embd=128, attention=kind)
    layer = ATTENTIONS[kind](cfg, layer=0).to(device)
    for p in layer.parameters():
        torch.nn.init.normal_(p, std=0.1)
    layer.use_fused = use_fused
    x = torch.randn(1, T, cfg.n_embd, device=device, requires_grad=True)
    layer(x, rope_table(cfg, 0, T, like=x)).sum().backward()


def kernels(kind, use_fused):
    """Names of the attention kernels that a pass runs, from the profiler."""
    cuda = torch.cuda.is_available()
    with profile(activities=[ProfilerActivity.CPU, *[ProfilerActivity.CUDA] * cuda]) as prof:
        layer_pass(kind, use_fused, 256, "cuda" if cuda else "cpu")
    names = {event.key.removeprefix("aten::") for event in prof.key_averages()}
    wanted = ("_scaled_dot_product", "softmax")
    return sorted(name for name in names if any(w in name for w in wanted) and "backward" in name.lower())


def peak_mib(kind, use_fused, T):
    """What one pass adds to the peak memory of this process, in MiB; call it in a fresh one. Linux only."""

    def peak():
        with open("/proc/self/status") as status:
            return next(int(line.split()[1]) for line in status if line.startswith("VmHWM")) / 2**10

    layer_pass(kind, use_fused, 16)  # loads what any pass needs
    before = peak()
    layer_pass(kind, use_fused, T)
    return peak() - before


def memory(lengths):
    """{kind: {"eager" and "fused": [MiB for each length]}}, on the CPU."""
    table = {}
    for kind in ATTENTIONS:
        table[kind] = {}
        for path in ("eager", "fused"):
            table[kind][path] = []
            for T in lengths:
                code = f"from experiments.speed import peak_mib; print(peak_mib({kind!r}, {path == 'fused'}, {T}))"
                out = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True).stdout
                table[kind][path].append(float(out))
    return table


def tables(numbers):
    """{name: rows} of what the terminal and the README show."""
    sizes = numbers["sizes"]
    step = [["training step", "batch x tokens", *(f"{kind} / standard" for kind in ATTENTIONS if kind != "standard")]]
    for name, size in sizes.items():
        row = [name, f"{size['batch_size']} x {size['tokens']}"]
        for kind, k in size["kinds"].items():
            if kind != "standard":
                row.append(f"{k['ratio']:.2f} (FLOPs {k['flops_ratio']:.2f})")
        step.append(row)
    kernel = [["path", "kernel of the backward pass"]]
    kernel += [[path, ", ".join(names)] for path, names in numbers["kernels"].items()]
    memory = [["peak MiB of one layer", *(f"T = {T}" for T in numbers["lengths"])]]
    for kind, paths in numbers["memory_mib"].items():
        memory += [[f"{kind}, {path}", *(f"{m:.0f}" for m in mib)] for path, mib in paths.items()]
    return {"step": step, "kernel": kernel, "memory": memory}


@dataclass
class SpeedConfig:
    steps: int = 20  # timed steps of each kind
    longest: int = LENGTHS[-1]  # tokens, for the memory table


def main():
    import tyro

    import experiments
    from config import TrainConfig

    cfg = tyro.cli(SpeedConfig, description=__doc__)
    if cfg.steps < 1 or cfg.longest < LENGTHS[0]:
        sys.exit(f"speed: steps={cfg.steps} must be at least 1 and longest={cfg.longest} at least {LENGTHS[0]}")
    device = "cuda" if torch.cuda.is_available() else "cpu"
    default = TrainConfig()
    sizes = {"the default model": (default.batch_size, default.model_config()), **SIZES}
    lengths = [T for T in LENGTHS if T <= cfg.longest]
    numbers = {"device": device, "steps": cfg.steps, "lengths": lengths, "sizes": {}}
    for name, (batch_size, model_cfg) in sizes.items():
        print(f"timing {name}", file=sys.stderr)
        kinds = step_times(batch_size, model_cfg, cfg.steps, device)
        numbers["sizes"][name] = {"batch_size": batch_size, "tokens": model_cfg.block_size, "kinds": kinds}
    numbers["kernels"] = {f"{k}, {'fused' if f else 'eager'}": kernels(k, f) for k in ATTENTIONS for f in (True, False)}
    print("measuring memory", file=sys.stderr)
    numbers["memory_mib"] = memory(lengths)
    experiments.save(experiments.RESULTS / "speed.json", numbers)
    for rows in tables(numbers).values():
        print()
        experiments.print_table(rows)


if __name__ == "__main__":
    main()
