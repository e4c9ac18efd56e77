"""Attention for a block of queries at a time, against the keys up to its last: the future is not computed at all.

A fused kernel reads a row's keys piece by piece and divides by the row's sum at the end. Two maps have two sums, and
neither is known before the end, so that the pieces cannot be subtracted on the way: two calls, and two products with
V. A block of rows has both maps whole. They are combined before V, and one product is enough.
"""

import torch


def in_blocks(attend, q1, k1, q2, k2, v, lam, size=128):
    """attend(q1, k1, q2, k2, v, lam), computed for `size` queries at a time. Shapes as in model.py's `eager`."""

    def rows(t, start, end):
        return t if t is None else t[:, :, start:end]

    past, v = k1.shape[2] - q1.shape[2], v.contiguous()
    lam = lam if lam is None else lam.expand(q1.shape[:3])
    y = []
    # From the last block to the first, each cut from the one before: the gradient of a slice is as large as its source.
    for start in reversed(range(0, q1.shape[2], size)):
        k1, k2, v = (rows(t, 0, past + start + size) for t in (k1, k2, v))
        now_q1, now_q2, now_lam = (rows(t, start, start + size) for t in (q1, q2, lam))
        y.append(attend(now_q1, k1, now_q2, k2, v, now_lam))
    return torch.cat(y[::-1], dim=2)
