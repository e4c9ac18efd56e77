"""What training costs, said before it starts: FLOPs a token, and the memory of a step (and again if it was too little).

    PyTorch itself                                       0.4 GB
    weights, gradients, AdamW's two moments              16 bytes a parameter
    activations, for each token of a micro-batch         4 bytes x (24 C (L + 1) + 3 V + maps)

24 C is what each of the L layers keeps of a token for the backward pass: norms 6 C, attention 5 C to 10 C by kind,
SwiGLU 4 x 8/3 C (a test counts it); and a layer whose turn it is needs as much again for gradients. 3 V: logits,
their log-softmax and its gradient. With --grad_checkpoint a layer keeps its input alone, C, and computes its 24 C
when its turn comes. In 16 bits they are 16 C (norms and the residual stream stay in float32), and a parameter takes
2 bytes more, for its rounded copy. On a CPU activations take half as much again: its allocator leaves gaps. There,
`blocks` also keeps its maps, of each pair both and their difference.
"""

import math
import os
from contextlib import contextmanager
from functools import partial

import torch
import torch.nn as nn
from torch.utils.checkpoint import checkpoint

from model import ATTENTIONS, BLOCKS_UNTIL

GB = 1e9


def compute_again(model):
    """--grad_checkpoint: from now on a layer keeps its input alone, and computes again what its gradients need."""
    for block in model.blocks:
        block.forward = partial(checkpoint, block.forward, use_reentrant=False)


def flops_per_token(model, T):
    """Multiplications and additions that training needs for a token of a T-token window, forward and backward.

    Matrices: two a weight forward, four backward; norm gains and the embedding's look-up are left out.
    Attention: each query meets (T + 1) / 2 keys on average. q . k costs 2 D for every softmax map;
    the product with V, 2 C in all, is needed once, on the combined map.
    """
    matrices = sum(m.weight.numel() for m in model.modules() if isinstance(m, nn.Linear))
    for_each_key = sum(block.attn.q_proj.out_features + model.cfg.n_embd for block in model.blocks)
    return 3 * (2 * matrices + 2 * for_each_key * (T + 1) / 2)


def estimate(cfg, params, tokens, sixteen_bits=False, grad_checkpoint=False, on_cpu=False):
    """Bytes that training a GPTConfig takes in one process, for micro-batches of so many tokens."""
    C, L, layer = cfg.n_embd, cfg.n_layer, cfg.n_embd * (16 if sixteen_bits else 24)
    layer += maps(cfg) if on_cpu else 0
    kept = C * L + 2 * layer if grad_checkpoint else layer * (L + 1)
    activations = 4 * tokens * (kept + 3 * cfg.vocab_size) * (1.5 if on_cpu else 1)
    return 0.4 * GB + (18 if sixteen_bits else 16) * params + activations


def maps(cfg):
    """Numbers that a layer keeps for each token where attention runs in blocks of 128 queries."""
    kind = ATTENTIONS[cfg.attention]
    for_each_weight = 1 if kind.head_multiple == kind.query_factor == 1 else 1.5  # a pair of maps and its difference
    keys = (cfg.block_size + 128) / 2  # that a query meets on average
    return for_each_weight * kind.query_factor * cfg.n_head * keys if cfg.block_size <= BLOCKS_UNTIL else 0


def available(device):
    """Bytes of memory that the GPU, or else this machine, has in all; infinity where it does not say."""
    if device.type == "cuda":
        return torch.cuda.mem_get_info(device)[1]
    return os.sysconf("SC_PAGE_SIZE") * os.sysconf("SC_PHYS_PAGES") if hasattr(os, "sysconf") else math.inf


LOWER = (
    "lower --batch_size (and raise --gradient_accumulation_steps to make up for it), --block_size or --n_embd,"
    " or add --grad_checkpoint"
)


def plan(cfg, model_cfg, params, device, sixteen_bits, processes=1):
    """What each of the processes on this machine takes, in words, and whether there is so much."""
    tokens, cpu = cfg.batch_size * cfg.block_size, device.type == "cpu"
    sizes = [estimate(model_cfg, params, tokens, sixteen_bits, flag, cpu) / GB for flag in (False, True)]
    there = available(device) / GB / (processes if cpu else 1)
    needed, other = sizes[cfg.grad_checkpoint], sizes[not cfg.grad_checkpoint]
    flag = f"{other:.1f} {'without' if cfg.grad_checkpoint else 'with'} --grad_checkpoint"
    each = " a process" * (processes > 1)
    return f"about {needed:.1f} GB of memory{each}, of {there:.1f} ({flag})", needed <= there


@contextmanager
def in_words(plan):
    """Within it, running out of memory is a MemoryError with one sentence that names the plan."""
    try:
        yield
    except (MemoryError, RuntimeError) as error:
        out_of_memory = isinstance(error, (MemoryError, torch.OutOfMemoryError))
        if not (out_of_memory or "can't allocate memory" in str(error)):  # the words of PyTorch's CPU allocator
            raise
        raise MemoryError(f"out of memory: the estimate was {plan}: {LOWER}") from None
