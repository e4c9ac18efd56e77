"""A GPT whose attention is standard or differential: every layer of it, in this file.

    from model import GPT, GPTConfig
    model = GPT(GPTConfig(attention="diff"))     # or "standard", or "diff_v2"
    logits, loss = model(idx, targets)           # (B, T) token ids -> (B, T, V), scalar

Around the attention everything is the same for every kind: RMSNorm before each branch, RoPE,
SwiGLU, no biases. One equation covers all of them (Ye et al. 2024, arXiv 2410.05258, eq. 1):

    y = (A1 - lam A2) V,    Ai = softmax(Qi Ki^T / sqrt(D))  over the tokens so far
"standard" has no second map; "diff" (V1) and "diff_v2" (V2) differ in where lam, K and V come from.

Shapes: B batch, T new tokens, S tokens attended to, C = n_embd, H = n_head, D = C / H (the head size, the
paper's d), V vocabulary. Read from top to bottom: every name is known when it is used. Beside it: linear.py (a
product), initial.py (the first values), blocks.py (attention in blocks), dropout.py, generation.py (the cache).
"""

import math
from dataclasses import dataclass
from functools import partial

import torch
import torch.nn as nn
import torch.nn.functional as F

from blocks import in_blocks
from dropout import Dropout
from generation import stream
from initial import initialize
from linear import Linear


@dataclass
class GPTConfig:
    """The architecture: all that changes the function from tokens to logits. Stored in checkpoints."""

    block_size: int = 256  # tokens: the window that training and generation use
    vocab_size: int = 64  # tokens
    n_layer: int = 4
    n_head: int = 4  # query heads of the standard kind; the others derive theirs from it
    n_kv_head: int = 0  # key heads, shared by groups of query heads; 0 means n_head
    n_embd: int = 128  # C, channels
    dropout: float = 0.0  # probability, on embeddings and residual branches
    attention: str = "diff"  # a key of ATTENTIONS
    init_std: float = 0.1  # of every matrix at the start but the embedding
    emb_std: float = 0.1  # of the token embedding at the start; TrainConfig has 0.5 for stories
    rope_theta: float = 10000.0  # RoPE's base wavelength, tokens / (2 pi)
    tie_embeddings: bool = True  # one matrix reads tokens in and scores them at the end

    @property
    def head_size(self):
        return self.n_embd // self.n_head

    @property
    def kv_heads(self):
        return self.n_kv_head or self.n_head


# --- Small parts ------------------------------------------------------------------------------


def upcast(x):
    """At least float32: lambda, norms and RoPE are never computed in less, and float64 stays float64."""
    return x.to(torch.promote_types(x.dtype, torch.float32))


class RMSNorm(nn.Module):
    """x / sqrt(mean(x^2) + eps) * weight over the last axis."""

    def __init__(self, size, eps=1e-5):
        super().__init__()
        self.weight = nn.Parameter(torch.empty(size))
        self.eps = eps

    def forward(self, x, factor=None):
        weight = upcast(self.weight) if factor is None else factor * upcast(self.weight)
        return F.rms_norm(upcast(x), weight.shape, weight, self.eps).type_as(x)


def rope_table(cfg, start, end, like):
    """RoPE's cos and sin for positions start .. end - 1, each (T, D), on the device of `like` and in its type or
    float32; the first half of sin is negative, see `rotate`. RoFormer, arXiv 2104.09864, eq. 15."""
    kind = dict(device=like.device, dtype=torch.promote_types(like.dtype, torch.float32))
    frequency = cfg.rope_theta ** (-torch.arange(0, cfg.head_size, 2, **kind) / cfg.head_size)  # radians a token
    angle = torch.outer(torch.arange(start, end, **kind), frequency)
    cos, sin = angle.cos(), angle.sin()
    return torch.cat((cos, cos), dim=-1), torch.cat((-sin, sin), dim=-1)


def rotate(x, rope):
    """RoPE: turns channel pair (x1, x2) = (j, j + D/2) of x (B, heads, T, D) by its token's j-th angle, to
    (x1 cos - x2 sin, x2 cos + x1 sin). These are the half-split pairs; the official code has (2j, 2j + 1)."""
    cos, sin = rope
    return torch.addcmul(x.roll(x.shape[-1] // 2, dims=-1) * sin, x, cos).type_as(x)  # roll: (x2, x1), contiguous


# --- Attention itself -------------------------------------------------------------------------
# Twice: `eager` shows its maps, `fused` never stores them; `blocks` is `eager` for a few queries at a time. They
# differ in speed alone, and `fastest` picks one. With grouped queries each head of K and V serves several of Q.


def causal_mask(T, S, like):
    """(T, S), to be added to scores: -inf where one of the last T of S tokens would look ahead, else 0."""
    return like.new_full((T, S), -math.inf).triu(S - T + 1)


def shared(t, H):
    """(B, G, S, width) -> (B, H, S, width): each head of K or V serves H / G neighbouring query heads."""
    return t if t.shape[1] == H else t.repeat_interleave(H // t.shape[1], dim=1)


def softmax_map(q, k):
    """One attention map: (B, H, T, D), (B, G, S, D) -> (B, H, T, S), each row a distribution over tokens."""
    (B, H, T, D), S = q.shape, k.shape[2]
    if T == 1:  # a new token sees all keys so far
        return upcast(q * D**-0.5 @ shared(k, H).mT).softmax(dim=-1)
    mask = causal_mask(T, S, like=q)
    q, k = q.reshape(B * H, T, D), shared(k, H).reshape(B * H, S, D)
    scores = torch.baddbmm(mask, q, k.mT, alpha=D**-0.5)  # q k^T / sqrt(D) + mask, in one pass over the map
    return upcast(scores).softmax(dim=-1).view(B, H, T, S)


def eager(q1, k1, q2, k2, v, lam):
    """y = (A1 - lam A2) V, as in the paper. Stores T x S maps."""
    A = softmax_map(q1, k1)
    if q2 is not None:
        A = torch.addcmul(A, lam[..., None], softmax_map(q2, k2), value=-1)  # A1 - lam A2, in one pass
    return A.type_as(v) @ shared(v, A.shape[1])


def fused(q1, k1, q2, k2, v, lam):
    """y = A1 V - lam (A2 V), the same thing by linearity. Memory linear in T."""
    y = flash(q1, k1, v)
    if q2 is not None:
        y = y + -lam[..., None] * flash(q2, k2, v)  # y - lam .. would store the gradient's negative too
    return y


def flash(q, k, v):
    """softmax(q k^T / sqrt(D)) v in one fused kernel: (B, H, T, D), (B, G, S, D), (B, G, S, E) -> (B, H, T, E)."""
    T, S, D, E = q.shape[2], k.shape[2], q.shape[3], v.shape[3]
    if E > D:
        # Flash kernels want q, k and v equally wide; given a wider v, PyTorch takes a slower kernel in silence
        # (on a CPU one that stores the maps). Zeros add nothing to q . k, so pad.
        q, k = F.pad(q, (0, E - D)), F.pad(k, (0, E - D))
    mask = None if T == S else causal_mask(T, S, like=q)
    return F.scaled_dot_product_attention(
        q, k, v, attn_mask=mask, is_causal=T == S, scale=D**-0.5, enable_gqa=q.shape[1] != k.shape[1]
    )


blocks = partial(in_blocks, eager)
BLOCKS_UNTIL = 1024  # tokens: what blocks keep for the backward pass grows with their square


def fastest(q1, k1, q2, k2, v, lam):
    """One row: `eager`. On a CPU `blocks`, while they keep little. Else `fused`. Measured by experiments/length.py."""
    on_cpu = v.device.type == "cpu" and v.shape[2] <= BLOCKS_UNTIL
    path = eager if q1.shape[2] == 1 else blocks if on_cpu else fused
    return path(q1, k1, q2, k2, v, lam)


# --- The kinds of attention -------------------------------------------------------------------
# To add one: a class that makes `operands` (or overrides `forward`), and a line in ATTENTIONS. The parameter
# names q_proj .. subln are the official code's.


class Attention(nn.Module):
    """What every kind shares: projections, RoPE, cache, the choice of a path, the output projection."""

    head_multiple = 1  # n_head and n_kv_head come in multiples of this
    query_factor = 1  # query heads (softmax maps) for each of n_head
    value_factor = 1  # width of a value, in head sizes
    borrowed = staticmethod(lambda cfg: 0)  # hidden units that the MLP gives up, so that all kinds are equally large
    attend = staticmethod(fastest)  # or eager, fused, blocks: the answer is the same

    def __init__(self, cfg, layer):
        super().__init__()
        C, D = cfg.n_embd, cfg.head_size
        assert C == cfg.n_head * D and D % 2 == 0, f"{C} channels in {cfg.n_head} heads: RoPE needs an even size"
        assert cfg.n_head % cfg.kv_heads == 0, f"{cfg.n_head} query heads cannot share {cfg.kv_heads} keys evenly"
        assert cfg.kv_heads % self.head_multiple == 0, f"odd heads in pairs: {cfg}"
        self.D = D
        self.q_proj = Linear(C, self.query_factor * cfg.n_head * D)
        self.k_proj = Linear(C, cfg.kv_heads * D)
        self.v_proj = Linear(C, cfg.kv_heads * D)
        self.out_proj = Linear(C, C)

    def qkv(self, x, rope, cache):
        """(B, T, C) -> queries (B, heads, T, D), keys (B, heads, S, D), values (B, heads, S, E), q and k rotated."""

        def heads(proj, width):
            return proj(x).unflatten(2, (-1, width)).transpose(1, 2)

        q, k = rotate(heads(self.q_proj, self.D), rope), rotate(heads(self.k_proj, self.D), rope)
        v = heads(self.v_proj, self.value_factor * self.D)
        return (q, k, v) if cache is None else (q, *cache.append(k, v))

    def operands(self, x, rope, cache=None):
        """(B, T, C) -> q1, k1, q2, k2, v, lam: what `eager` and `fused` take."""
        raise NotImplementedError

    def finish(self, y):
        """Called on (B, heads, T, E), before heads are merged."""
        return y

    def forward(self, x, rope, cache=None):
        y = self.finish(self.attend(*self.operands(x, rope, cache)))  # (B, heads, T, E)
        return self.out_proj(y.transpose(1, 2).flatten(2).type_as(x))  # (B, T, C)

    def maps(self, x, rope):
        """(B, T, C) -> A1, A2 (each (B, heads, T, T)) and lam; A2 and lam are None if there is no second map."""
        q1, k1, q2, k2, _, lam = self.operands(x, rope)
        return softmax_map(q1, k1), None if q2 is None else softmax_map(q2, k2), lam


class StandardAttention(Attention):
    """One causal softmax map a head: the baseline."""

    def operands(self, x, rope, cache=None):
        q, k, v = self.qkv(x, rope, cache)
        return q, k, None, None, v, None


class DiffAttention(Attention):
    """The paper's attention (V1, section 2.1): n_head / 2 heads of two maps each, values 2 D wide.

    lam = exp(lambda_q1 . lambda_k1) - exp(lambda_q2 . lambda_k2) + lambda_init    one a layer  (eq. 2)
    head = (1 - lambda_init) RMSNorm((A1 - lam A2) V)                                           (eq. 3)
    """

    head_multiple = 2
    value_factor = 2

    def __init__(self, cfg, layer):
        super().__init__(cfg, layer)
        self.lambda_init = 0.8 - 0.6 * math.exp(-0.3 * layer)  # layer = the paper's l - 1
        for name in ("lambda_q1", "lambda_k1", "lambda_q2", "lambda_k2"):
            setattr(self, name, nn.Parameter(torch.empty(self.D)))
        self.subln = RMSNorm(2 * self.D)  # one gain for all heads, but each head has its own mean square

    def lam(self):
        q1, k1, q2, k2 = map(upcast, (self.lambda_q1, self.lambda_k1, self.lambda_q2, self.lambda_k2))
        return q1.dot(k1).exp() - q2.dot(k2).exp() + self.lambda_init

    def operands(self, x, rope, cache=None):
        q, k, v = self.qkv(x, rope, cache)
        # Head i is the pair (2i, 2i + 1), of queries and of keys alike. Pair first and share after:
        # when grouped queries share keys, a head's two maps still use the two keys of their own pair.
        lam = cache.once(self.lam) if cache else self.lam()
        return q[:, 0::2], k[:, 0::2], q[:, 1::2], k[:, 1::2], v, lam

    def finish(self, y):
        return self.subln(y, factor=1 - self.lambda_init)


class DiffAttentionV2(Attention):
    """Microsoft's V2: twice the queries on the same K and V, lam = sigmoid(x W_lambda) a token and head, no norm."""

    query_factor = 2
    borrowed = staticmethod(lambda cfg: round((cfg.n_embd + cfg.n_head) / 3))  # C (C + H) weights, at 3 C a hidden unit

    def __init__(self, cfg, layer):
        super().__init__(cfg, layer)
        self.lambda_proj = Linear(cfg.n_embd, cfg.n_head)

    def operands(self, x, rope, cache=None):
        q, k, v = self.qkv(x, rope, cache)
        with torch.autocast(x.device.type, enabled=False):
            lam = F.linear(upcast(x), upcast(self.lambda_proj.weight)).sigmoid()  # (B, T, H)
        # Neighbours are paired, never the two halves: a pair must sit on the same key.
        return q[:, 0::2], k, q[:, 1::2], k, v, lam.transpose(1, 2)


ATTENTIONS = {"standard": StandardAttention, "diff": DiffAttention, "diff_v2": DiffAttentionV2}


# --- The transformer around it ----------------------------------------------------------------


class SwiGLU(nn.Module):
    """(swish(x W^G) * x W_1) W_2, the paper's section 2.2."""

    def __init__(self, cfg):
        super().__init__()
        hidden = round(8 * cfg.n_embd / 3) - ATTENTIONS[cfg.attention].borrowed(cfg)
        self.gate_proj = Linear(cfg.n_embd, hidden)
        self.up_proj = Linear(cfg.n_embd, hidden)
        self.down_proj = Linear(hidden, cfg.n_embd)

    def forward(self, x):
        return self.down_proj(F.silu(self.gate_proj(x)) * self.up_proj(x))


class Block(nn.Module):
    """Y = X + Attention(RMSNorm(X)), then Y + SwiGLU(RMSNorm(Y)): eq. 4 and 5."""

    def __init__(self, cfg, layer):
        super().__init__()
        self.attn_norm = RMSNorm(cfg.n_embd)
        self.attn = ATTENTIONS[cfg.attention](cfg, layer)
        self.mlp_norm = RMSNorm(cfg.n_embd)
        self.mlp = SwiGLU(cfg)
        self.attn_drop, self.mlp_drop = (Dropout(cfg.dropout, place=2 * layer + i) for i in (1, 2))

    def forward(self, x, rope, cache=None, keys=None):
        x = x + self.attn_drop(self.attn(self.attn_norm(x), rope, cache), keys)
        return x + self.mlp_drop(self.mlp(self.mlp_norm(x)), keys)


class GPT(nn.Module):
    def __init__(self, cfg, seed=0):
        super().__init__()
        self.cfg = cfg
        self.tok_emb = nn.Embedding(cfg.vocab_size, cfg.n_embd)
        self.dropout = Dropout(cfg.dropout, place=0)
        self.blocks = nn.ModuleList(Block(cfg, layer) for layer in range(cfg.n_layer))
        self.norm = RMSNorm(cfg.n_embd)
        self.lm_head = Linear(cfg.n_embd, cfg.vocab_size)
        if cfg.tie_embeddings:
            self.lm_head.weight = self.tok_emb.weight
        initialize(self, seed)

    def features(self, idx, caches=None, keys=None):
        """(B, T) ids of the next T tokens, any T -> (B, T, C), what the head scores. keys (B,): see Dropout."""
        x = self.dropout(self.tok_emb(idx), keys)
        past = caches[0].length if caches else 0
        rope = rope_table(self.cfg, past, past + idx.shape[1], like=x)
        for block, cache in zip(self.blocks, caches or [None] * len(self.blocks)):
            x = block(x, rope, cache, keys)
        return self.norm(x)

    def forward(self, idx, targets=None, keys=None):
        """(B, T) ids -> logits (B, T, V), and with targets (B, T) the mean loss, nats a token; -1 is skipped."""
        logits = self.lm_head(self.features(idx, keys=keys))
        if targets is None:
            return logits, None
        return logits, F.cross_entropy(upcast(logits).flatten(0, 1), targets.flatten(), ignore_index=-1)

    @torch.no_grad()
    def attention_maps(self, idx):
        """(B, T) ids -> for each layer (A1, A2, lam), maps (B, heads, T, T), lam a scalar ("diff") or
        (B, heads, T) ("diff_v2"). The weights on V are A1 - lam[..., None] * A2; "standard" has (A, None, None)."""
        maps, x = [], self.tok_emb(idx)
        rope = rope_table(self.cfg, 0, idx.shape[1], like=x)
        for block in self.blocks:
            maps.append(block.attn.maps(block.attn_norm(x), rope))
            x = block(x, rope)
        return maps

    def num_params(self):
        return sum(p.numel() for p in self.parameters())

    def generate(self, idx, max_new_tokens, **how):
        """(B, T) ids -> (B, T + max_new_tokens). `how`: the arguments of generation.stream."""
        return torch.cat((idx, *stream(self, idx, max_new_tokens, **how)), dim=1)
