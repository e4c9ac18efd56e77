"""x W^T as nn.Linear computes it, and on all threads of a CPU while a text is written."""

import torch
import torch.nn as nn
import torch.nn.functional as F


class Linear(nn.Linear):
    """nn.Linear without a bias. New tokens are few rows, and BLAS multiplies few rows on one thread: so while a text is
    written (in inference mode), W is cut into as many pieces of equally many rows as there are threads, without a copy,
    and the products are a batch. Rows may be left over. The sizes from which it pays are measured in LOG.md."""

    def __init__(self, in_features, out_features):
        super().__init__(in_features, out_features, bias=False)

    def forward(self, x):
        few = x.numel() <= 64 * self.in_features and self.weight.numel() > 2**15 and x.device.type == "cpu"
        pieces = torch.get_num_threads() if few and torch.is_inference_mode_enabled() else 1
        if pieces == 1:
            return super().forward(x)
        rows = self.out_features // pieces * pieces
        W = self.weight[:rows].view(pieces, -1, self.in_features)
        y = torch.bmm(x.flatten(0, -2).expand(pieces, -1, -1), W.mT)  # (pieces, rows of x, rows / pieces)
        y = y.transpose(0, 1).reshape(*x.shape[:-1], rows)
        return y if rows == self.out_features else torch.cat((y, F.linear(x, self.weight[rows:])), dim=-1)
