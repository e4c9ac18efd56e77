"""Every value that a model starts from: one rule for all kinds of attention."""

import math
import zlib

import torch


@torch.no_grad()
def initialize(model, seed):
    """The embedding N(0, emb_std), other matrices N(0, init_std), those that end a residual branch divided by
    sqrt(2 n_layer) as in GPT-2, norm gains 1, lambda vectors N(0, 0.1) (section 2.1 of the paper).

    On stories tokens start much larger than what the branches add to them: at equal scales a small model takes
    several times as long to look anything up, or never does (LOG.md).
    Lambda vectors must not be zero: each one's gradient is a multiple of its partner. A tensor's
    values depend on the seed and its name only, so kinds start from equal weights where they share them.
    """
    for name, p in model.named_parameters():
        if p.is_meta:  # a model to count with: it has no values
            continue
        if p.ndim == 1 and ".lambda_" not in name:
            p.fill_(1.0)
            continue
        std = 0.1 if p.ndim == 1 else model.cfg.emb_std if name == "tok_emb.weight" else model.cfg.init_std
        if name.endswith(("out_proj.weight", "down_proj.weight")):
            std /= math.sqrt(2 * model.cfg.n_layer)
        generator = torch.Generator().manual_seed(zlib.crc32(f"{seed} {name}".encode()))
        p.copy_(torch.randn(p.shape, generator=generator, device="cpu") * std)
