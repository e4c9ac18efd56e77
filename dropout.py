"""Dropout whose masks belong to the rows of a batch: an update cut into pieces, or over processes, keeps its masks."""

import numpy as np
import torch
import torch.nn as nn


class Dropout(nn.Module):
    """In training each value is 0 with probability p, else divided by 1 - p; in eval mode nothing changes.

    PyTorch's own draws a mask for the batch that it is given: a batch of 16 and four of 4 differ. Here the mask is a
    hash of the row's key, of `place`, which tells a model's dropouts apart, and of the position in the row: the same
    on every device, and again when --grad_checkpoint computes a layer again.
    """

    def __init__(self, p, place):
        super().__init__()
        self.p, self.place = p, place

    def forward(self, x, keys=None):
        """(B, T, C), keys (B,) of whole numbers -> (B, T, C). Without keys they are drawn anew."""
        if not (self.training and self.p):
            return x
        if keys is None:
            keys = torch.randint(2**31, x.shape[:1], device=x.device)
        row = mixed(keys.int() + ODD * self.place)
        position = torch.arange(x.shape[1:].numel(), dtype=torch.int32, device=x.device).view(x.shape[1:])
        uniform = mixed(row[:, None, None] ^ position) & (2**31 - 1)  # 0 .. 2^31 - 1
        return torch.where(uniform < int(self.p * 2**31), 0, x / (1 - self.p))


ODD = 0x1E3779B1  # places far apart


def mixed(n):
    """32 bits -> 32 bits that look random: each bit of n changes about half of them (lowbias32 of C. Wellons)."""
    n = (n ^ (n >> 16 & 0xFFFF)) * 0x7FEB352D  # & makes the shift one of unsigned numbers; products keep 32 bits
    n = (n ^ (n >> 15 & 0x1FFFF)) * (0x846CA68B - 2**32)
    return n ^ (n >> 16 & 0xFFFF)


def keys_of(step, rows, seed):
    """(rows,): the keys of an update's batch, for a run of that seed."""
    return np.random.SeedSequence([seed, step, 1]).generate_state(rows).astype(np.int64)  # [seed, step] draws batches
