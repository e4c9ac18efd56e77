"""What does the second map cost? A training step of each kind, and generating, on whatever machine this is.

    python -m experiments.speed                      # ten minutes on two cores
    python -m experiments.speed --steps=3 --tokens=64   # a quick look
    python -m experiments.speed --peer=transformers  # and beside Hugging Face's Llama and DiffLlama

Every kind runs at its fastest. Beside each ratio to standard attention stands the one that the needed multiplications
alone would give. Measuring needs nothing but torch and the model; the command line and the result need the rest.
"""

import sys
from dataclasses import dataclass, replace
from functools import partial

import torch
import torch.nn.functional as F

from cost import flops_per_token
from device import PEAK_FLOPS
from experiments.measure import DEVICE, GPU, afresh, clock, interleaved, mixed_precision, peak_mib
from model import ATTENTIONS, GPT, GPTConfig, flash

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


# --- What is compared ------------------------------------------------------------------------


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


# --- Measuring -------------------------------------------------------------------------------


def training_step(model, optimizer, idx):
    """One update on random ids. Seconds after the forward pass, after the backward pass, after all."""
    start = clock()
    with mixed_precision():
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
            flops, base = (flops_per_token(m, cfg.block_size) for m in (model, models["standard"]))
            numbers[name] |= {"flops_per_token": flops, "flops_ratio": flops / base}
            if GPU in PEAK_FLOPS:
                numbers[name]["mfu"] = flops * numbers[name]["tokens_per_s"] / PEAK_FLOPS[GPU]
    return numbers


def peak_of_step(name, batch_size, cfg):
    def update(batch_size, T):
        model = build(name, cfg)
        idx = torch.randint(cfg.vocab_size, (batch_size, T + 1), device=DEVICE)
        training_step(model, torch.optim.AdamW(model.parameters(), fused=True), idx)

    return peak_mib(lambda: update(1, 8), lambda: update(batch_size, cfg.block_size))


def generation(names, tokens, rounds=5):
    """{name: median tokens/s} of writing `tokens` greedily after a prompt of 64; of diff without a cache too."""
    cfg = replace(WIDE, block_size=1024)
    models = {name: build(name, cfg).eval() for name in names}
    prompt = torch.randint(cfg.vocab_size, (1, 64), device=DEVICE)

    def turn(model, **how):
        start = clock()
        assert model.generate(prompt, tokens, **how).shape[1] == 64 + tokens
        return (clock() - start,)

    turns = {name: partial(turn, model, temperature=0) for name, model in models.items()}
    turns["diff, no cache"] = partial(turn, models["diff"], temperature=0, use_cache=False)
    with torch.no_grad():
        return {name: tokens / seconds for name, (seconds,) in interleaved(turns, rounds, warm_up=1).items()}


# --- Showing ---------------------------------------------------------------------------------


def tables(numbers):
    """{name: rows} of what the terminal and the README show."""
    compared = [name for name in next(iter(numbers["shapes"].values()))["models"] if name != "standard"]
    step = [["training step", "batch x tokens", "standard, tokens/s", *(f"{name} / standard" for name in compared)]]
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
    peak = [["peak MiB of a step", *numbers["shapes"]]]
    for name in ["standard", *compared]:
        peak.append([name, *(f"{s['models'][name]['peak_mib']:.0f}" for s in numbers["shapes"].values())])
    written = [["generating", "tokens/s"], *([name, f"{n:.0f}"] for name, n in numbers["generation"].items())]
    return {"step": step, "peak": peak, "generation": written}


@dataclass
class SpeedConfig:
    steps: int = 20  # timed turns of each model; of the default one, five times as many
    tokens: int = 512  # to generate
    peer: str = ""  # transformers: also measure its Llama and DiffLlama


def main():
    import tyro

    import experiments
    from config import TrainConfig

    cfg = tyro.cli(SpeedConfig, description=__doc__)
    if cfg.steps < 1 or cfg.tokens < 1 or cfg.peer not in ("", "transformers"):
        sys.exit(f"speed: steps and tokens must be at least 1, and peer, if any, transformers: {cfg}")
    peers = ["Llama", "DiffLlama"] if cfg.peer else []
    names, default = [*ATTENTIONS, "four calls", *peers], TrainConfig()
    shapes = {"the default model": (default.batch_size, default.model_config()), **SHAPES}
    numbers = {"device": DEVICE, "steps": cfg.steps, "shapes": {}}
    for name, (batch_size, shape) in shapes.items():
        print(f"measuring {name}", file=sys.stderr)
        models = steps(names, batch_size, shape, cfg.steps * (1 if name in SHAPES else 5))  # short steps are noisy
        for other in names:
            models[other]["peak_mib"] = afresh(peak_of_step, other, batch_size, shape)
        numbers["shapes"][name] = {"batch_size": batch_size, "tokens": shape.block_size, "models": models}
    print("measuring generation", file=sys.stderr)
    numbers["generation"] = generation([*ATTENTIONS, *peers], cfg.tokens)
    name = "speed" + "-changed" * (cfg != SpeedConfig(peer=cfg.peer))  # no result of the settings that a reader expects
    experiments.save(experiments.RESULTS / f"{name}.json", numbers)
    for rows in tables(numbers).values():
        print()
        experiments.print_table(rows)


if __name__ == "__main__":
    main()
