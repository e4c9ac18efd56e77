"""Generation: the window that slides over the text, kept keys and values, the choice of a token."""

import math

import torch


class KVCache:
    """Rotated keys and values of one layer, so that a new token costs one row of attention; and its lambda, if one
    serves all tokens."""

    def __init__(self, size):
        self.size = size  # tokens
        self.length = 0  # tokens held
        self.k = self.v = self.lam = None

    def append(self, k, v):
        """(B, heads, T, width) twice -> the same for all S tokens so far."""
        if self.k is None:
            self.k, self.v = (t.new_empty(*t.shape[:2], self.size, t.shape[3]) for t in (k, v))
        new = slice(self.length, self.length + k.shape[2])
        self.k[:, :, new], self.v[:, :, new] = k, v
        self.length = new.stop
        return self.k[:, :, : new.stop], self.v[:, :, : new.stop]

    def once(self, lam):
        """lam() of the first call."""
        if self.lam is None:
            self.lam = lam()
        return self.lam


@torch.inference_mode()
def stream(model, idx, max_new_tokens, temperature=1.0, top_k=0, top_p=1.0, generator=None, use_cache=True):
    """(B, T) ids -> an iterator of (B, 1), the tokens that follow one by one.

    The model sees a window of block_size tokens. When it is full, it starts again from its last
    half, with or without the cache, so that both give the same text. Call in eval mode.
    """
    start, size = max(0, idx.shape[1] - model.cfg.block_size), model.cfg.block_size
    caches = None
    for _ in range(max_new_tokens):
        if idx.shape[1] - start > size:
            start, caches = idx.shape[1] - max(1, size // 2), None
        if caches:
            x = model.features(idx[:, -1:], caches)
        else:
            caches = [KVCache(size) for _ in model.blocks] if use_cache else None
            x = model.features(idx[:, start:], caches)
        token = pick(model.lm_head(x[:, -1]), temperature, top_k, top_p, generator)
        idx = torch.cat((idx, token.to(idx.device)), dim=1)
        yield token


def pick(logits, temperature=1.0, top_k=0, top_p=1.0, generator=None):
    """(B, V) logits -> (B, 1) ids. Temperature 0 takes the best; top_k keeps that many (0: all); top_p keeps
    the fewest whose probability reaches it, at least one. The generator lives on the CPU: same text everywhere."""
    if temperature == 0:
        return logits.argmax(dim=-1, keepdim=True)
    # float64, and the maximum taken off first: a tiny temperature must not overflow
    logits = logits.cpu().double()
    logits = (logits - logits.amax(dim=-1, keepdim=True)) / temperature
    if 0 < top_k < logits.shape[-1]:
        kept = logits.topk(top_k)  # by index: equal logits must not let in more than top_k
        logits = torch.full_like(logits, -math.inf).scatter(1, kept.indices, kept.values)
    if top_p < 1:
        probs, order = logits.softmax(dim=-1).sort(dim=-1, descending=True)
        surplus = (probs.cumsum(dim=-1) - probs >= top_p).index_fill(1, torch.tensor([0]), False)
        logits = logits.masked_fill(surplus.scatter(1, order, surplus), -math.inf)
    return torch.multinomial(logits.softmax(dim=-1), 1, generator=generator)
