"""The attention of model.py against attention_numpy.py: one layer at a time, in float64.

The two files share no code, and this is the only place where both are imported. Tolerances: values
differ by rounding only, about 1e-15 here, so 1e-12 means another formula; gradients grow with the sizes.
Sizes are pairwise different, so that no wrong broadcast can pass.
"""

import inspect
import math
import re
import subprocess
import sys
from functools import partial

import numpy as np
import pytest
import torch
from torch.profiler import ProfilerActivity, profile

import attention_numpy as reference
import model
from blocks import in_blocks
from generation import KVCache
from model import ATTENTIONS, GPTConfig, blocks, eager, fastest, fused, softmax_map

B, T, D, H, LAYER = 5, 7, 14, 12, 2  # D must be even, H have divisors: no two sizes are equal, of pairs of keys neither
PATHS = {"eager": eager, "fused": fused, "blocks": partial(blocks, size=3)}  # T is no multiple of 3
CASES = [(kind, kv) for kind in reference.LAYERS for kv in (0, 6, 4, 2)]  # 12 has even divisors to share by


def make(kind, n_kv_head=0, seed=0):
    """A layer in float64 with weights that make every part matter, its RoPE table, and an input (B, T, C)."""
    cfg = GPTConfig(n_embd=H * D, n_head=H, n_kv_head=n_kv_head, attention=kind)
    layer = ATTENTIONS[kind](cfg, LAYER).double()
    rng = torch.Generator().manual_seed(seed)
    with torch.no_grad():
        for p in layer.parameters():
            p.copy_(torch.randn(p.shape, generator=rng, dtype=p.dtype) * (0.3 if p.ndim == 1 else 0.2))
    x = torch.randn(B, T, H * D, generator=rng, dtype=torch.float64)
    rope = model.rope_table(cfg, 0, T, like=x)
    return cfg, layer, rope, x


def numpy_weights(layer):
    return {name: value.numpy() for name, value in layer.state_dict().items()}


def by_reference(cfg, layer, x):
    """The same layer by the reference: output (B, T, C) and the maps of each sequence."""
    w = numpy_weights(layer)
    run = reference.LAYERS[cfg.attention]
    out = [run(sequence, w, LAYER, H, cfg.kv_heads, cfg.rope_theta) for sequence in x.numpy()]
    return np.stack([y for y, _ in out]), [maps for _, maps in out]


def distance(cfg, layer, rope, x):
    """Largest difference between model.py's layer and the reference."""
    with torch.no_grad():
        return np.abs(layer(x, rope).numpy() - by_reference(cfg, layer, x)[0]).max()


# --- Agreement -------------------------------------------------------------------------------


@pytest.mark.parametrize("causal", [True, False])
@pytest.mark.parametrize("per_token", [False, True])
def test_loops_are_matrices(causal, per_token):
    rng = np.random.default_rng(1)
    Q1, K1, Q2, K2 = rng.normal(size=(4, T, D))
    V, lam = rng.normal(size=(T, 2 * D + 1)), rng.normal(size=T) if per_token else 0.7
    loops = reference.diff_attention_loops(Q1, K1, Q2, K2, V, lam, causal)
    matrices = reference.diff_attention(Q1, K1, Q2, K2, V, lam, causal)
    np.testing.assert_allclose(loops, matrices, rtol=0, atol=1e-12)


@pytest.mark.parametrize("path", PATHS)
@pytest.mark.parametrize("kind, kv", CASES)
def test_layer_is_the_reference(kind, kv, path):
    """Reports 28, 46 and 51."""
    cfg, layer, rope, x = make(kind, kv)
    layer.attend = PATHS[path]
    assert distance(cfg, layer, rope, x) < 1e-12


def test_rotation_is_the_reference():
    cfg, _, rope, _ = make("standard")
    x = torch.randn(B, H, T, D, dtype=torch.float64, generator=torch.Generator().manual_seed(1))
    turned = model.rotate(x, rope).numpy()
    expected = [[reference.rope(head, cfg.rope_theta) for head in heads] for heads in x.numpy()]
    np.testing.assert_allclose(turned, expected, atol=1e-12, rtol=0)


@pytest.mark.parametrize("kind, kv", CASES)
def test_maps_are_the_reference(kind, kv):
    cfg, layer, rope, x = make(kind, kv)
    A1, A2, lam = layer.maps(x, rope)
    for b, heads in enumerate(by_reference(cfg, layer, x)[1]):
        assert len(heads) == A1.shape[1]
        for i, (ref1, ref2, ref_lam) in enumerate(heads):
            np.testing.assert_allclose(A1[b, i].detach(), ref1, rtol=0, atol=1e-12)
            if kind == "standard":
                assert A2 is lam is ref2 is ref_lam is None
                continue
            np.testing.assert_allclose(A2[b, i].detach(), ref2, rtol=0, atol=1e-12)
            ours = lam.detach() if kind == "diff" else lam[b, i].detach()
            np.testing.assert_allclose(ours, ref_lam, rtol=0, atol=1e-12)


@pytest.mark.parametrize("causal", [True, False])
@pytest.mark.parametrize("per_token", [False, True])
def test_gradients_by_hand_are_differences(causal, per_token):
    rng = np.random.default_rng(3)
    draw = lambda: [*rng.normal(size=(4, T, D)), rng.normal(size=(T, 3)), rng.normal(size=T if per_token else ())]  # noqa: E731
    operands, directions, dY, step = draw(), draw(), rng.normal(size=(T, 3)), 1e-6
    grads = reference.diff_attention_backward(dY, *operands, causal)
    for i, (grad, direction) in enumerate(zip(grads, directions)):
        up, down = ([*operands[:i], operands[i] + s * step * direction, *operands[i + 1 :]] for s in (1, -1))
        change = reference.diff_attention(*up, causal) - reference.diff_attention(*down, causal)
        assert np.shape(grad) == np.shape(direction)
        assert (dY * change).sum() / (2 * step) == pytest.approx(np.sum(grad * direction), rel=1e-6)


def test_scores_far_beyond_exp():
    """Each row of a map is then 0 but for a 1."""
    rng = np.random.default_rng(2)
    Q1, K1, Q2, K2 = 1e4 * rng.normal(size=(4, T, D))
    V = rng.normal(size=(T, D))
    best = [[max(range(t + 1), key=lambda u: Q[t] @ K[u]) for t in range(T)] for Q, K in ((Q1, K1), (Q2, K2))]
    for attention in (reference.diff_attention_loops, reference.diff_attention):
        np.testing.assert_allclose(attention(Q1, K1, Q2, K2, V, 0.7), V[best[0]] - 0.7 * V[best[1]], rtol=0, atol=1e-12)


def test_as_many_groups_as_channels_a_head():
    """Sizes that are equal by chance: 2 key heads of 2 channels."""
    q, k, v = (torch.randn(1, n, 5, 2, dtype=torch.float64) for n in (4, 2, 2))
    torch.testing.assert_close(model.flash(q, k, v), eager(q, k, None, None, v, None), rtol=0, atol=1e-12)


def test_defaults_are_the_model_s():
    known = dict(causal=True, theta=GPTConfig().rope_theta, eps=model.RMSNorm(1).eps, sign=1)
    for function in filter(inspect.isfunction, vars(reference).values()):
        for name, parameter in inspect.signature(function).parameters.items():
            assert parameter.default in (parameter.empty, known.get(name)), (function, name)


@pytest.mark.parametrize("prefill", [1, 4, T - 1])
@pytest.mark.parametrize("path", PATHS)
@pytest.mark.parametrize("kind, kv", CASES)
def test_cache_is_the_reference(kind, kv, path, prefill):
    """C14 and report 37: a query alone against all keys so far is a row of the whole."""
    cfg, layer, rope, x = make(kind, kv)
    layer.attend = PATHS[path]
    cache = KVCache(T)
    pieces = [
        (0, prefill),
        *((t, t + 1) for t in range(prefill, T - 2)),
        (max(prefill, T - 2), T),
    ]  # the last: 1 or 2 tokens
    with torch.no_grad():
        out = torch.cat([layer(x[:, a:b], [r[a:b] for r in rope], cache) for a, b in pieces], dim=1)
    np.testing.assert_allclose(out, by_reference(cfg, layer, x)[0], rtol=0, atol=1e-12)


@pytest.mark.parametrize("kv", [0, 6, 2])
@pytest.mark.parametrize("path", PATHS)
def test_gradients_of_diff_are_the_ones_by_hand(kv, path):
    cfg, layer, rope, x = make("diff", kv)
    layer.attend = PATHS[path]
    x.requires_grad_()
    cotangent = torch.randn(x.shape, generator=torch.Generator().manual_seed(3), dtype=x.dtype)
    layer(x, rope).backward(cotangent)
    w = numpy_weights(layer)
    total = {name: 0.0 for name in w}
    for b in range(B):
        dx, dw = reference.diff_layer_backward(
            cotangent[b].numpy(), x[b].detach().numpy(), w, LAYER, H, cfg.kv_heads, cfg.rope_theta
        )
        np.testing.assert_allclose(x.grad[b], dx, rtol=0, atol=1e-10)
        total = {name: total[name] + dw[name] for name in total}
    for name, p in layer.named_parameters():
        np.testing.assert_allclose(p.grad, total[name], rtol=0, atol=1e-10, err_msg=name)
        assert p.grad.abs().max() > 1e-6, f"{name} is out of the comparison's reach"


@pytest.mark.parametrize("kind, kv", [case for case in CASES if case[0] != "diff"])
def test_gradients_of_all_paths_are_equal_and_those_of_differences(kind, kv):
    _, layer, rope, x = make(kind, kv)
    x.requires_grad_()
    cotangent = torch.randn(x.shape, generator=torch.Generator().manual_seed(3), dtype=x.dtype)
    grads = []
    for layer.attend in PATHS.values():
        grads.append(torch.autograd.grad(layer(x, rope), [x, *layer.parameters()], cotangent))
    for a, b, c in zip(*grads):
        torch.testing.assert_close(a, b, rtol=0, atol=1e-10)
        torch.testing.assert_close(a, c, rtol=0, atol=1e-10)
    # ... and one direction through everything at once, by central differences
    leaves = [x, *layer.parameters()]
    rng = torch.Generator().manual_seed(4)
    directions = [torch.randn(p.shape, generator=rng, dtype=p.dtype) for p in leaves]
    slope, step = sum((g * d).sum() for g, d in zip(grads[0], directions)), 1e-6
    with torch.no_grad():
        values = []
        for sign in (1, -2):
            for p, d in zip(leaves, directions):
                p += sign * step * d
            values.append((layer(x, rope) * cotangent).sum())
    torch.testing.assert_close((values[0] - values[1]) / (2 * step), slope, rtol=1e-6, atol=0)


# --- The comparison can fail: each classic mistake, planted, is seen -------------------------


def halves(self, x, rope, cache=None):
    q, k, v = self.qkv(x, rope, cache)
    (q1, q2), (k1, k2) = q.chunk(2, dim=1), k.chunk(2, dim=1)
    return q1, k1, q2, k2, v, self.lam()


def share_before_pairing(self, x, rope, cache=None):
    q, k, v = self.qkv(x, rope, cache)
    k = k.repeat_interleave(q.shape[1] // k.shape[1], dim=1)
    v = v.repeat_interleave(k.shape[1] // 2 // v.shape[1], dim=1)
    return q[:, 0::2], k[:, 0::2], q[:, 1::2], k[:, 1::2], v, self.lam()


def one_head_norm(self, y):
    flat = y.transpose(1, 2).flatten(2)
    flat = flat / (flat.square().mean(-1, keepdim=True) + self.subln.eps).sqrt()
    return (1 - self.lambda_init) * self.subln.weight * flat.unflatten(2, (-1, y.shape[3])).transpose(1, 2)


def v2_halves(self, x, rope, cache=None):
    q, k, v = self.qkv(x, rope, cache)
    q1, q2 = q.chunk(2, dim=1)
    return q1, k, q2, k, v, (x @ self.lambda_proj.weight.T).sigmoid().transpose(1, 2)


def edit_core(edit):
    """A planted core: edit(q1, k1, q2, k2, v, lam) -> y."""
    return lambda patch: patch.setattr(model.Attention, "attend", staticmethod(edit))


def edit_kind(kind, **attributes):
    return lambda patch: [patch.setattr(ATTENTIONS[kind], name, value) for name, value in attributes.items()]


def masked_softmax(q, k, dim=-1, diagonal=0, scale=None, mask_after=False):
    k = k.repeat_interleave(q.shape[1] // k.shape[1], dim=1)
    scores = q @ k.transpose(2, 3) * (scale or q.shape[3] ** -0.5)
    future = torch.ones(scores.shape[2:], dtype=torch.bool).triu(1 + diagonal)
    if mask_after:
        return scores.softmax(dim).masked_fill(future, 0)
    return scores.masked_fill(future, -math.inf).softmax(dim).nan_to_num()


def diff_of(first, second=None, sign=-1):
    def core(q1, k1, q2, k2, v, lam):
        A = first(q1, k1) + sign * lam[..., None] * (second or first)(q2, k2)
        return A @ v.repeat_interleave(q1.shape[1] // v.shape[1], dim=1)

    return core


def softmax_of_difference(q1, k1, q2, k2, v, lam):
    """softmax of the difference in place of the difference of softmaxes"""
    k1, k2, v = (t.repeat_interleave(q1.shape[1] // t.shape[1], dim=1) for t in (k1, k2, v))
    scores = (q1 @ k1.transpose(2, 3) - lam * q2 @ k2.transpose(2, 3)) * q1.shape[3] ** -0.5
    return scores.masked_fill(torch.ones(scores.shape[2:]).triu(1).bool(), -math.inf).softmax(-1) @ v


DIFF = ATTENTIONS["diff"]
MISTAKES = {
    "branches are the two halves of the heads": edit_kind("diff", operands=halves),
    "keys shared before they are paired": edit_kind("diff", operands=share_before_pairing),
    "maps swapped": edit_core(lambda q1, k1, q2, k2, v, lam: eager(q2, k2, q1, k1, v, lam)),
    "plus lambda": edit_core(diff_of(masked_softmax, sign=1)),
    "scale by sqrt(2 D)": edit_core(diff_of(lambda q, k: masked_softmax(q, k, scale=(2 * D) ** -0.5))),
    "logits multiplied by sqrt(D)": edit_core(diff_of(lambda q, k: masked_softmax(q, k, scale=D**0.5))),
    "softmax over queries": edit_core(diff_of(lambda q, k: masked_softmax(q, k, dim=2))),
    "second map without a mask": edit_core(diff_of(masked_softmax, lambda q, k: masked_softmax(q, k, diagonal=T))),
    "mask off by one": edit_core(diff_of(lambda q, k: masked_softmax(q, k, diagonal=1))),
    "mask after the softmax": edit_core(diff_of(lambda q, k: masked_softmax(q, k, mask_after=True))),
    "softmax of the difference": edit_core(softmax_of_difference),
    "lambda left out": edit_core(lambda q1, k1, q2, k2, v, lam: eager(q1, k1, q2, k2, v, torch.ones(()))),
    "head norm forgotten": edit_kind("diff", finish=lambda self, y: (1 - self.lambda_init) * y),
    "(1 - lambda_init) forgotten": edit_kind("diff", finish=lambda self, y: self.subln(y)),
    "(1 - lambda) for (1 - lambda_init)": edit_kind("diff", finish=lambda self, y: (1 - self.lam()) * self.subln(y)),
    "one norm over all heads": edit_kind("diff", finish=one_head_norm),
    "heads merged in the wrong order": edit_kind(
        "diff", finish=lambda self, y: (1 - self.lambda_init) * self.subln(y).flip(1)
    ),
    "lambda_init counted from 1": edit_kind(
        "diff", lam=lambda self: original_lam(self) - self.lambda_init + 0.8 - 0.6 * math.exp(-0.3 * (LAYER + 1))
    ),
    "lambda not through exp": edit_kind(
        "diff",
        lam=lambda self: self.lambda_q1 @ self.lambda_k1 - self.lambda_q2 @ self.lambda_k2 + self.lambda_init,
    ),
    "no RoPE": lambda patch: patch.setattr(model, "rotate", lambda x, rope: x),
    "RoPE turns the other way for keys": lambda patch: patch.setattr(model, "rotate", wrong_rotate),
    "V2: pairs across groups": edit_kind("diff_v2", operands=v2_halves),
    "V2: lambda without the sigmoid": lambda patch: patch.setattr(torch.Tensor, "sigmoid", lambda t: t),
}
original_lam = DIFF.lam  # as it is before any patch


def wrong_rotate(x, rope, rotate=model.rotate):
    return rotate(x, (rope[0], rope[1] * (1 if x.shape[1] == H else -1)))


@pytest.mark.parametrize("mistake", MISTAKES)
def test_planted_mistake_is_seen(mistake, monkeypatch):
    """Report 46."""
    cfg, layer, rope, x = make("diff_v2" if mistake.startswith("V2") else "diff", n_kv_head=4)
    assert distance(cfg, layer, rope, x) < 1e-12
    MISTAKES[mistake](monkeypatch)
    assert distance(cfg, layer, rope, x) > 1e-3


# --- Properties: they say what is broken when the comparison fails ---------------------------


def test_published_example():
    torch.manual_seed(0)
    q1, k1, q2, k2 = torch.randn(4, 6, 8).double().numpy()
    A1, A2 = reference.softmax_map(q1, k1, causal=False), reference.softmax_map(q2, k2, causal=False)
    A = reference.diff_map(A1, A2, 0.8)
    np.testing.assert_allclose(A.sum(axis=1), 0.2, rtol=0, atol=1e-12)
    assert (A < 0).sum() == 13


def test_walk_through_says_what_it_shows():
    """The numbers that `python attention_numpy.py` prints, and its three errors."""
    said = subprocess.run([sys.executable, reference.__file__], capture_output=True, text=True, check=True).stdout
    assert "    0.04   0.40   0.05   0.45   0.04   0.02\n" in said  # the first row of A1: signal and distraction alike
    assert "    0.12   0.14   0.11   0.41   0.13   0.09\n" in said
    assert "   -0.06   0.29  -0.04   0.13  -0.07  -0.05\n" in said
    assert f"row sums: {[0.2] * 6}, that is" in said and "negative weights: 27 of 36;" in said
    assert "share of the signal      in the absolute weight: A1 0.46, difference 0.58" in said
    assert "share of the distraction in the absolute weight: A1 0.40, difference 0.13" in said
    errors = re.findall(r"(without|with a causal|one entry of Q1).*: (\d+e[+-]\d+)$", said, re.M)
    assert [what for what, _ in errors] == ["without", "with a causal", "one entry of Q1"]
    assert all(float(error) < 1e-9 for _, error in errors)


@pytest.mark.parametrize("sign", [1, -1])
@pytest.mark.parametrize("name, error", [("diff_attention_loops", 1e-11), ("diff_attention_backward", 1e-6)])
def test_walk_through_would_see_a_mistake(name, error, sign, monkeypatch):
    original = getattr(reference, name)
    monkeypatch.setattr(reference, name, lambda *args: [part + sign * error for part in original(*args)])
    with pytest.raises(AssertionError):
        reference.walk_through()


def random_operands(heads=3, groups=3, width=2 * D):
    rng = torch.Generator().manual_seed(5)
    draw = lambda n, w: torch.randn(B, n, T, w, generator=rng, dtype=torch.float64)  # noqa: E731
    return draw(heads, D), draw(groups, D), draw(heads, D), draw(groups, D), draw(groups, width)


def test_rows_and_signs():
    q1, k1, q2, k2, _ = random_operands()
    A1, A2, lam = softmax_map(q1, k1), softmax_map(q2, k2), torch.tensor(0.6, dtype=torch.float64)
    A = A1 - lam[..., None] * A2
    torch.testing.assert_close(A1.sum(-1), torch.ones_like(A1[..., 0]), rtol=0, atol=1e-12)
    torch.testing.assert_close(A.sum(-1), torch.full_like(A[..., 0], 0.4), rtol=0, atol=1e-12)
    assert (A1 >= 0).all() and (A < 0).any()
    assert (A.triu(1) == 0).all()


@pytest.mark.parametrize("path", PATHS)
def test_limits(path):
    """lam = 0 is standard attention; two equal maps leave (1 - lam) of it."""
    path = PATHS[path]
    q1, k1, q2, k2, v = random_operands()
    standard = path(q1, k1, None, None, v, None)
    zero, lam = torch.zeros((), dtype=torch.float64), torch.tensor(0.3, dtype=torch.float64)
    torch.testing.assert_close(path(q1, k1, q2, k2, v, zero), standard, rtol=0, atol=1e-12)
    torch.testing.assert_close(path(q1, k1, q1, k1, v, lam), 0.7 * standard, rtol=0, atol=1e-12)


@pytest.mark.parametrize("path", PATHS)
@pytest.mark.parametrize("kind, kv", CASES)
def test_the_past_does_not_see_the_future(kind, kv, path):
    """C18 and report 28."""
    cfg, layer, rope, x = make(kind, kv)
    layer.attend = PATHS[path]
    changed = x.clone()
    changed[:, 4] += 1.0
    with torch.no_grad():
        before, after = layer(x, rope), layer(changed, rope)
    assert torch.equal(before[:, :4], after[:, :4])
    assert ((before - after)[:, 4:].abs().amax(dim=(0, 2)) > 1e-6).all()
    before, after = (by_reference(cfg, layer, inputs)[0] for inputs in (x, changed))
    assert np.array_equal(before[:, :4], after[:, :4])


@pytest.mark.parametrize("kind", reference.LAYERS)
def test_rope_scores_depend_on_distance_only(kind):
    """Report 48."""
    cfg, layer, rope, x = make(kind)
    later = model.rope_table(cfg, 11, 11 + T, like=x)
    for A, B_ in zip(layer.maps(x, rope)[:2], layer.maps(x, later)[:2]):
        if A is not None:
            torch.testing.assert_close(A, B_, rtol=0, atol=1e-12)
    other = model.rope_table(cfg, 0, 2 * T, like=x)
    assert (layer.maps(x, rope)[0] - layer.maps(x, [r[::2] for r in other])[0]).abs().max() > 1e-3


@pytest.mark.parametrize("kind, kv", CASES)
def test_fused_is_fused(kind, kv):
    """The CPU's flash kernel runs, forward and backward, and the one that stores maps does not. Report 49."""
    _, layer, rope, x = make(kind, kv)
    layer.attend = fused
    with profile(activities=[ProfilerActivity.CPU]) as prof:
        layer(x, rope).sum().backward()
    ran = {event.key for event in prof.key_averages()}
    assert "aten::_scaled_dot_product_flash_attention_for_cpu" in ran
    assert "aten::_scaled_dot_product_flash_attention_for_cpu_backward" in ran
    assert not {key for key in ran if "math" in key or "softmax" in key}


def test_fastest_chooses_by_device_and_length(monkeypatch):
    monkeypatch.setattr(model, "eager", lambda *_: "eager")
    monkeypatch.setattr(model, "blocks", lambda *_: "blocks")
    monkeypatch.setattr(model, "fused", lambda *_: "fused")

    def choice(T, S, device="cpu"):
        q, k = (torch.zeros(1, 1, n, 2, device=device) for n in (T, S))
        return fastest(q, k, q, k, k, None)

    assert choice(1, 1) == choice(1, 2000) == choice(1, 9, "meta") == "eager"
    assert choice(1024, 1024) == choice(2, 1024) == "blocks"
    assert choice(1025, 1025) == choice(2, 1025) == choice(8, 8, "meta") == "fused"


def test_blocks_leave_the_future_out():
    """Queries and keys of each block: 128 queries, and no key after the last of them."""
    seen = []

    def attend(q1, k1, *_):
        seen.append((q1.shape[2], k1.shape[2]))
        return q1

    q, k = torch.zeros(1, 1, 300, 2), torch.zeros(1, 1, 310, 2)
    in_blocks(attend, q, k, None, None, k, None)
    assert sorted(seen) == [(44, 310), (128, 138), (128, 266)]


def test_lambda_by_hand():
    """Report 46."""
    _, layer, _, _ = make("diff")
    with torch.no_grad():
        for name, value in (("q1", 0.5), ("k1", 0.2), ("q2", -0.1), ("k2", 0.3)):
            getattr(layer, f"lambda_{name}").fill_(value)
    assert layer.lam().item() == pytest.approx(math.exp(D * 0.1) - math.exp(D * -0.03) + layer.lambda_init, abs=1e-12)
    published = [0.2, 0.3555, 0.4707, 0.5561, 0.6193]
    assert [round(DIFF(GPTConfig(), i).lambda_init, 4) for i in range(5)] == published
    assert [round(reference.lambda_init(i), 4) for i in range(5)] == published


@pytest.mark.parametrize("kind", ["diff", "diff_v2"])
def test_lambda_matters_and_learns(kind):
    """Report 47."""
    _, layer, rope, x = make(kind)
    weights = [p for name, p in layer.named_parameters() if name.startswith("lambda")]
    y = layer(x, rope)
    y.square().sum().backward()
    assert all(p.grad.abs().min() > 0 for p in weights)
    with torch.no_grad():
        weights[0].add_(0.5)
    assert (layer(x, rope) - y).abs().max() > 1e-3


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float16])
@pytest.mark.parametrize("qk", [60.0, -60.0])
def test_lambda_is_finite_and_learns_up_to_60(dtype, qk):
    """60 is where exp still fits float32 with room for its gradient; float16 would have ended at 11."""
    _, layer, _, _ = make("diff")
    layer.to(dtype if dtype is torch.float32 else torch.bfloat16)
    with torch.no_grad():
        layer.lambda_q1.fill_(8.0)
        layer.lambda_k1.fill_(qk / (8 * D))
        layer.lambda_q2.zero_()
    with torch.autocast("cpu", dtype, enabled=dtype is not torch.float32):
        lam = layer.lam()
    lam.backward()
    assert lam.isfinite() and lam.dtype is torch.float32
    assert lam.item() == pytest.approx(math.exp(qk) - 1 + layer.lambda_init, rel=0.3, abs=1e-3)
    assert all(p.grad.isfinite().all() for name, p in layer.named_parameters() if name.startswith("lambda"))


@pytest.mark.parametrize("kind", ["diff", "diff_v2"])
@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16])
def test_autocast_does_not_lower_lambda(kind, dtype):
    _, layer, rope, x = make(kind)
    exact = layer.operands(x, rope)[5]
    with torch.autocast("cpu", dtype):
        q1, *_, lam = layer.float().operands(x.float(), [r.float() for r in rope])
    assert q1.dtype is dtype and lam.dtype is torch.float32
    torch.testing.assert_close(lam.double(), exact, rtol=1e-5, atol=1e-6)


def test_low_precision_does_not_lower_maps():
    q, k = torch.randn(2, B, 2, T, D, generator=torch.Generator().manual_seed(6)).bfloat16()
    for queries in (q, q[:, :, -1:]):  # a new token has a way of its own
        A = softmax_map(queries, k)
        assert A.dtype is torch.float32
        torch.testing.assert_close(A.sum(-1), torch.ones(A.shape[:3]), rtol=0, atol=1e-6)


def test_low_precision_does_not_lower_norms():
    norm, x = model.RMSNorm(D), torch.randn(T, D).bfloat16()
    torch.nn.init.constant_(norm.weight, 1 / 3)  # a value that bfloat16 would round
    assert torch.equal(norm(x), norm(x.float()).bfloat16())
