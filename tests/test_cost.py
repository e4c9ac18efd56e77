"""FLOPs as PyTorch counts them, memory as autograd keeps it, layers computed again, and words for too little."""

import math
from dataclasses import replace

import pytest
import torch
from torch.utils.flop_counter import FlopCounterMode

import cost
from config import PRESETS, TrainConfig
from model import ATTENTIONS, GPT, GPTConfig, blocks, eager, fused
from train import train

KINDS = list(ATTENTIONS)
SMALL = GPTConfig(block_size=48, vocab_size=11, n_layer=5, n_head=6, n_embd=96)


@pytest.mark.parametrize("kind", ["standard", "diff", "diff_v2"])  # another might not use all of its matrices
def test_flops_are_those_of_the_matrices_and_half_of_each_map(kind):
    """Report 31."""
    cfg = replace(SMALL, attention=kind)
    gpt, T = GPT(cfg), 16
    for block in gpt.blocks:
        block.attn.attend = eager
    with FlopCounterMode(display=False) as counted:
        gpt(torch.zeros(1, T, dtype=torch.long))[0].sum().backward()
    per_token = counted.get_total_flops() / T
    # the eager path multiplies whole maps: T keys a query where the causal half has (T + 1) / 2
    attention = cost.flops_per_token(gpt, T) - cost.flops_per_token(gpt, -1)
    assert per_token == pytest.approx(cost.flops_per_token(gpt, -1) + attention * T / ((T + 1) / 2))


def step(cfg, grad_checkpoint, sixteen_bits=False, path=fused):
    """(loss, gradients, bytes kept for the backward pass) of one step, in training mode."""
    gpt = GPT(cfg)
    if grad_checkpoint:
        cost.compute_again(gpt)
    for block in gpt.blocks:
        block.attn.attend = path
    own = {p.untyped_storage().data_ptr() for p in gpt.parameters()}
    kept = {}  # holds what it has seen, so that no address comes twice

    def pack(tensor):
        if tensor.untyped_storage().data_ptr() not in own:
            kept[tensor.untyped_storage().data_ptr()] = tensor
        return tensor

    torch.manual_seed(7)
    idx = torch.randint(cfg.vocab_size, (3, cfg.block_size + 1))
    with torch.autograd.graph.saved_tensors_hooks(pack, lambda tensor: tensor):
        with torch.autocast("cpu", torch.bfloat16, enabled=sixteen_bits):
            _, loss = gpt(idx[:, :-1], idx[:, 1:])
    size = sum(t.untyped_storage().nbytes() for t in kept.values())
    loss.backward()
    return loss, [p.grad for p in gpt.parameters() if p.grad is not None], size


@pytest.mark.parametrize("kind", KINDS)
def test_computing_again_changes_no_bit(kind):
    cfg = replace(SMALL, attention=kind, dropout=0.3)
    (loss, grads, size), (loss_again, grads_again, size_again) = step(cfg, False), step(cfg, True)
    assert torch.equal(loss, loss_again) and len(grads) == len(grads_again) > 9
    assert all(map(torch.equal, grads, grads_again))
    assert size_again < size / 8


@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize("sixteen_bits", [False, True])
def test_estimate_is_what_autograd_keeps(kind, sixteen_bits):
    """Of one layer: what five layers keep more than four, in the estimate and in truth; without rounded weights."""
    cfgs = [replace(SMALL, attention=kind, n_layer=n) for n in (4, 5)]
    few, many = (step(cfg, False, sixteen_bits)[2] for cfg in cfgs)
    rounded = 2 * sum(p.numel() for p in GPT(cfgs[0]).blocks[0].parameters() if p.ndim == 2) * sixteen_bits
    guess = [cost.estimate(cfg, 0, 3 * SMALL.block_size, sixteen_bits) for cfg in cfgs]
    assert guess[1] - guess[0] == pytest.approx(many - few - rounded, rel=0.25)


@pytest.mark.parametrize("kind", KINDS)
def test_maps_of_blocks_are_in_the_estimate(kind):
    cfgs = [replace(SMALL, attention=kind, block_size=300, n_layer=n) for n in (4, 5)]
    few, many = (step(cfg, False, path=blocks)[2] for cfg in cfgs)
    layer = 4 * (24 * SMALL.n_embd + cost.maps(cfgs[0]))
    assert 3 * 300 * layer == pytest.approx(many - few, rel=0.25)
    guess = [cost.estimate(cfg, 0, 3 * 300, on_cpu=True) for cfg in cfgs]
    assert guess[1] - guess[0] == pytest.approx(1.5 * 3 * 300 * layer)
    assert cost.maps(replace(cfgs[0], block_size=1025)) == 0


def test_estimates_of_known_sizes():
    """Weights, gradients and moments of 100 parameters; a token's logits, three times; a layer's 24 C, or its input."""
    flat = replace(SMALL, n_layer=0, vocab_size=1000)
    fixed = cost.estimate(flat, 0, 0)
    assert cost.estimate(flat, 100, 0) - fixed == pytest.approx(1600)
    wide = replace(flat, vocab_size=2000)
    assert cost.estimate(wide, 0, 1) - cost.estimate(flat, 0, 1) == pytest.approx(12_000)
    for again, floats in ((True, SMALL.n_embd), (False, 24 * SMALL.n_embd)):
        few, many = (cost.estimate(replace(SMALL, n_layer=n), 0, 1, grad_checkpoint=again) for n in (10, 11))
        assert many - few == pytest.approx(4 * floats)


def test_a_run_says_what_it_takes(tiny, capsys, monkeypatch):
    train(tiny(max_iters=0))
    assert "about 0.4 GB of memory, of" in capsys.readouterr().out
    monkeypatch.setattr(cost, "available", lambda device: 0.3e9)
    train(tiny(max_iters=0))
    (line,) = [line for line in capsys.readouterr().out.splitlines() if "warning" in line]
    assert "needs about 0.4 GB of memory, of 0.3 (0.4 with --grad_checkpoint): lower" in line and "--batch_size" in line
    gpu = replace(TrainConfig(), **PRESETS["gpu"])
    plan, fits = cost.plan(gpu, gpu.model_config(65), 10_649_088, torch.device("cpu"), False, processes=2)
    assert plan == "about 8.1 GB of memory a process, of 0.1 (3.0 with --grad_checkpoint)" and not fits
    assert math.isfinite(cost.available(torch.device("cpu")))


@pytest.mark.parametrize(
    "error",
    [
        torch.OutOfMemoryError("CUDA out of memory"),
        MemoryError(),
        lambda: torch.empty(2**55),
        KeyError("x"),
        RuntimeError("x"),
    ],
)
def test_too_little_memory_is_said_in_a_sentence(error, tiny, monkeypatch):
    def forward(*_):
        if callable(error):
            error()  # what PyTorch's own allocator raises
        raise error

    monkeypatch.setattr(torch.nn.functional, "silu", forward)
    if str(error).strip("'") == "x":  # not for lack of memory
        with pytest.raises(type(error)):
            train(tiny(eval_windows=1))
        return
    with pytest.raises(MemoryError, match=r"out of memory: the estimate was about 0.4 GB.*--batch_size.*--grad_ch"):
        train(tiny(eval_windows=1))
