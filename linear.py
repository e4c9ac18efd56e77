"""x W^T as nn.Linear computes it, and in another order while a text is written on an AMD CPU."""

from pathlib import Path

import torch
import torch.nn as nn
import torch.nn.functional as F


def mkl_on_amd(cpu=Path("/proc/cpuinfo")):
    """Whether BLAS is MKL, whose best kernels are for Intel's CPUs alone, on a CPU of AMD's; False if unknown."""
    return torch.backends.mkl.is_available() and cpu.exists() and "AuthenticAMD" in cpu.read_text()


OTHER_ORDER = mkl_on_amd()  # on Intel's CPUs it takes twice the time; measured: LOG.md


class Linear(nn.Linear):
    """nn.Linear without a bias. New tokens are few rows, for which MKL reads W at a fifth of memory's speed on an AMD
    CPU. There, while a text is written (in inference mode), W x^T is computed, with W cut, without a copy, in as many
    pieces of equally many rows as there are threads, at least two; some may be left over."""

    def __init__(self, in_features, out_features):
        super().__init__(in_features, out_features, bias=False)

    def forward(self, x):
        few = x.numel() <= 8 * self.in_features and self.weight.numel() > 2**16 and x.is_cpu
        if not (OTHER_ORDER and few and torch.is_inference_mode_enabled()):
            return super().forward(x)
        pieces = max(2, torch.get_num_threads())
        rows = self.out_features // pieces * pieces
        W = self.weight[:rows].view(pieces, -1, self.in_features)
        y = torch.bmm(W, x.reshape(-1, self.in_features).mT.expand(pieces, -1, -1))  # (pieces, rows / pieces, N)
        y = y.flatten(0, 1).mT.unflatten(0, x.shape[:-1])
        return y if rows == self.out_features else torch.cat((y, F.linear(x, self.weight[rows:])), dim=-1)
