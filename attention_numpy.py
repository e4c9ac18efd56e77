"""Differential attention in NumPy alone: slow, plain, and what every faster path is held to.

    python attention_numpy.py        # a walk through two maps and their difference

Four steps: (1) loops, (2) matrices, (3) whole layers, fed from a model's state-dict by name, (4) gradients
by hand. The walk checks them against each other; tests/test_attention.py checks model.py against them. Symbols
and equation numbers are those of the paper (Ye et al. 2024, arXiv 2410.05258). There is no batch axis, and
heads are a Python loop, so that no reshape can hide a mistake. On each `def`: the shapes in -> the shapes out, with

    T tokens, C channels, D head size (the paper's d), E width of a value (D, or 2 D in the paper's layer)
"""

import math

import numpy as np

# --- 1. Loops: nothing hidden ----------------------------------------------------------------


def diff_attention_loops(Q1, K1, Q2, K2, V, lam, causal=True):  # 4 x (T, D), (T, E), scalar or (T,) -> (T, E)
    """eq. 1: y_t = sum over u of (a1_tu - lam a2_tu) v_u. lam = 0 makes it standard attention."""
    (T, D), E = Q1.shape, V.shape[1]
    lam = np.broadcast_to(lam, T)
    Y = np.zeros((T, E))
    for t in range(T):
        visible = range(t + 1) if causal else range(T)
        s1 = [sum(Q1[t, j] * K1[u, j] for j in range(D)) / math.sqrt(D) for u in visible]
        s2 = [sum(Q2[t, j] * K2[u, j] for j in range(D)) / math.sqrt(D) for u in visible]
        e1 = [math.exp(s - max(s1)) for s in s1]  # the maximum cancels in the ratio; without it, exp overflows
        e2 = [math.exp(s - max(s2)) for s in s2]
        for u in visible:
            weight = e1[u] / sum(e1) - lam[t] * e2[u] / sum(e2)  # may be negative
            Y[t] += weight * V[u]
    return Y


# --- 2. Matrices: the same in one line each --------------------------------------------------


def softmax_map(Q, K, causal=True):  # (T, D), (T, D) -> (T, T)
    """A = softmax(Q K^T / sqrt(D)): row t says where token t looks, and sums to 1."""
    T, D = Q.shape
    S = Q @ K.T / np.sqrt(D)
    if causal:
        S = np.where(np.arange(T)[:, None] >= np.arange(T), S, -np.inf)
    e = np.exp(S - S.max(axis=1, keepdims=True))
    return e / e.sum(axis=1, keepdims=True)


def diff_map(A1, A2, lam):  # (T, T), (T, T), scalar or (T,) -> (T, T)
    """The weights on V: A1 - lam A2. Row t sums to 1 - lam_t."""
    return A1 - np.atleast_1d(lam)[:, None] * A2


def diff_attention(Q1, K1, Q2, K2, V, lam, causal=True):  # 4 x (T, D), (T, E), scalar or (T,) -> (T, E)
    return diff_map(softmax_map(Q1, K1, causal), softmax_map(Q2, K2, causal), lam) @ V


# --- 3. Whole layers ---------------------------------------------------------------------------
# `w` maps the names in a state-dict to arrays; a projection's matrix has one row an output, so head i of
# size n is rows i n .. (i + 1) n.


def head(x, W, i, size):  # (T, C), (heads * size, C) -> (T, size)
    return x @ W[i * size : (i + 1) * size].T


def rope(x, theta=10000.0, sign=1):  # (T, D) -> (T, D)
    """Rotary positions: channels (j, j + D/2) are a complex number, turned by t theta^(-2j/D). sign=-1 turns back."""
    T, D = x.shape
    angle = np.arange(T)[:, None] * theta ** (-2 * np.arange(D // 2) / D)
    z = (x[:, : D // 2] + 1j * x[:, D // 2 :]) * np.exp(1j * sign * angle)
    return np.hstack([z.real, z.imag])


def rms_norm(x, gain, eps=1e-5):  # (T, E), (E,) -> (T, E)
    return x / np.sqrt((x**2).mean(axis=1, keepdims=True) + eps) * gain


def lambda_init(layer):  # layer counts from 0, the paper's l from 1
    return 0.8 - 0.6 * math.exp(-0.3 * layer)


def layer_lambda(w, layer):  # -> scalar
    """eq. 2: one lambda a layer, for all its heads."""
    return math.exp(w["lambda_q1"] @ w["lambda_k1"]) - math.exp(w["lambda_q2"] @ w["lambda_k2"]) + lambda_init(layer)


def standard_layer(x, w, layer, n_head, n_kv_head, theta=10000.0, causal=True):  # (T, C) -> (T, C), maps
    """Softmax attention, n_head queries in groups over n_kv_head keys and values."""
    D = x.shape[1] // n_head
    heads, maps = [], []
    for i in range(n_head):
        g = i // (n_head // n_kv_head)  # the key and value that this head shares with its neighbours
        Q, K = rope(head(x, w["q_proj.weight"], i, D), theta), rope(head(x, w["k_proj.weight"], g, D), theta)
        A = softmax_map(Q, K, causal)
        heads.append(A @ head(x, w["v_proj.weight"], g, D))
        maps.append((A, None, None))
    return np.hstack(heads) @ w["out_proj.weight"].T, maps


def diff_heads(x, w, n_head, n_kv_head, theta):  # (T, C) -> n_head / 2 x (i, g, 4 x (T, D), (T, 2 D))
    """Of each head in `diff_layer`: its number, its group's, rotated Q1, K1, Q2, K2 (T, D), and V (T, 2 D)."""
    D = x.shape[1] // n_head
    for i in range(n_head // 2):
        g = i // (n_head // n_kv_head)  # the pair of keys and the wide value of this head's group
        Q1, Q2 = (rope(head(x, w["q_proj.weight"], 2 * i + b, D), theta) for b in (0, 1))
        K1, K2 = (rope(head(x, w["k_proj.weight"], 2 * g + b, D), theta) for b in (0, 1))
        yield i, g, Q1, K1, Q2, K2, head(x, w["v_proj.weight"], g, 2 * D)


def diff_layer(x, w, layer, n_head, n_kv_head, theta=10000.0, causal=True):  # (T, C) -> (T, C), maps
    """The paper's layer (V1): eq. 1 in each head, then eq. 3, RMSNorm of each head and the fixed factor."""
    lam = layer_lambda(w, layer)
    heads, maps = [], []
    for _, _, Q1, K1, Q2, K2, V in diff_heads(x, w, n_head, n_kv_head, theta):
        A1, A2 = softmax_map(Q1, K1, causal), softmax_map(Q2, K2, causal)
        Y = diff_map(A1, A2, lam) @ V
        heads.append((1 - lambda_init(layer)) * rms_norm(Y, w["subln.weight"]))
        maps.append((A1, A2, lam))
    return np.hstack(heads) @ w["out_proj.weight"].T, maps


def diff_v2_layer(x, w, layer, n_head, n_kv_head, theta=10000.0, causal=True):  # (T, C) -> (T, C), maps
    """Version 2: both maps of a head use one key and value; lambda is a sigmoid, one a token and head."""
    D = x.shape[1] // n_head
    heads, maps = [], []
    for i in range(n_head):
        g = i // (n_head // n_kv_head)
        Q1, Q2 = (rope(head(x, w["q_proj.weight"], 2 * i + b, D), theta) for b in (0, 1))
        K = rope(head(x, w["k_proj.weight"], g, D), theta)
        lam = 1 / (1 + np.exp(-x @ w["lambda_proj.weight"][i]))  # (T,)
        A1, A2 = softmax_map(Q1, K, causal), softmax_map(Q2, K, causal)
        heads.append(diff_map(A1, A2, lam) @ head(x, w["v_proj.weight"], g, D))
        maps.append((A1, A2, lam))
    return np.hstack(heads) @ w["out_proj.weight"].T, maps


LAYERS = {"standard": standard_layer, "diff": diff_layer, "diff_v2": diff_v2_layer}

# --- 4. Gradients by hand ----------------------------------------------------------------------
# dX stands for the derivative of a scalar loss by X. The paper's appendix G leaves the norm out of its
# derivation; here it is in.


def diff_attention_backward(dY, Q1, K1, Q2, K2, V, lam, causal=True):  # (T, E), ... -> dQ1 dK1 dQ2 dK2 dV dlam
    scale = 1 / np.sqrt(Q1.shape[1])
    A1, A2 = softmax_map(Q1, K1, causal), softmax_map(Q2, K2, causal)
    dV = diff_map(A1, A2, lam).T @ dY
    dA = dY @ V.T  # (T, T), by the combined map: A1 gets dA, A2 gets -lam dA
    # A row a = softmax(s) has Jacobian diag(a) - a a^T, hence a * (da - a . da).
    dS1 = A1 * (dA - (A1 * dA).sum(axis=1, keepdims=True))
    dS2 = -np.atleast_1d(lam)[:, None] * A2 * (dA - (A2 * dA).sum(axis=1, keepdims=True))
    dlam = -(dA * A2).sum(axis=1) if np.ndim(lam) else -(dA * A2).sum()
    return dS1 @ K1 * scale, dS1.T @ Q1 * scale, dS2 @ K2 * scale, dS2.T @ Q2 * scale, dV, dlam


def rms_norm_backward(dz, x, gain, eps=1e-5):  # (T, E), (T, E), (E,) -> (T, E), (E,)
    """z = gain x / r, r = sqrt(mean(x^2) + eps): moving along x also moves r, which takes most of it back."""
    r = np.sqrt((x**2).mean(axis=1, keepdims=True) + eps)
    dn = dz * gain
    dx = (dn - x * (dn * x).mean(axis=1, keepdims=True) / r**2) / r
    return dx, (dz * x / r).sum(axis=0)


def diff_layer_backward(dout, x, w, layer, n_head, n_kv_head, theta=10000.0, causal=True):  # (T, C) -> (T, C), dw
    """The gradients of `diff_layer`: by its input, and by each array in w, under the same names."""
    D = x.shape[1] // n_head
    lam, gamma = layer_lambda(w, layer), 1 - lambda_init(layer)
    Wo = w["out_proj.weight"]
    dx, dw, dlam = np.zeros_like(x), {name: np.zeros_like(value) for name, value in w.items()}, 0.0

    def through_projection(dh, name, i, size):  # (T, size), the gradient by head(x, W, i, size) -> (T, C)
        rows = slice(i * size, (i + 1) * size)
        dw[name][rows] += dh.T @ x  # += because grouped queries share keys and values
        return dh @ w[name][rows]

    for i, g, Q1, K1, Q2, K2, V in diff_heads(x, w, n_head, n_kv_head, theta):
        columns = slice(i * 2 * D, (i + 1) * 2 * D)  # what out_proj reads of this head
        Y = diff_attention(Q1, K1, Q2, K2, V, lam, causal)
        dw["out_proj.weight"][:, columns] = dout.T @ (gamma * rms_norm(Y, w["subln.weight"]))
        dY, dgain = rms_norm_backward(gamma * dout @ Wo[:, columns], Y, w["subln.weight"])
        dw["subln.weight"] += dgain
        dQ1, dK1, dQ2, dK2, dV, dlam_i = diff_attention_backward(dY, Q1, K1, Q2, K2, V, lam, causal)
        dlam += dlam_i
        for b, (dQ, dK) in enumerate([(dQ1, dK1), (dQ2, dK2)]):
            dx += through_projection(rope(dQ, theta, sign=-1), "q_proj.weight", 2 * i + b, D)
            dx += through_projection(rope(dK, theta, sign=-1), "k_proj.weight", 2 * g + b, D)
        dx += through_projection(dV, "v_proj.weight", g, 2 * D)

    for b, sign in (("1", 1), ("2", -1)):  # lam = exp(q1 . k1) - exp(q2 . k2) + lambda_init
        q, k = w[f"lambda_q{b}"], w[f"lambda_k{b}"]
        dw[f"lambda_q{b}"] = sign * dlam * np.exp(q @ k) * k
        dw[f"lambda_k{b}"] = sign * dlam * np.exp(q @ k) * q
    return dx, dw


# --- Run as a program ------------------------------------------------------------------------


def walk_through():
    """Two maps that look at one signal and share one distraction; their difference keeps the signal."""
    rng = np.random.default_rng(0)
    T, D, signal, noise, lam = 6, 8, 1, 3, 0.8
    show = lambda A: "\n".join("  " + " ".join(f"{a:6.2f}" for a in row) for row in A)  # noqa: E731

    K = np.sqrt(D) * np.linalg.qr(rng.normal(size=(D, D)))[0][:T]  # orthogonal keys: any scores can be had
    scores1, scores2 = 0.2 * rng.normal(size=(2, T, T))
    scores1[:, [signal, noise]] += 2.5, 2.3
    scores2[:, noise] += 1.5
    Q1, Q2 = scores1 @ K / np.sqrt(D), scores2 @ K / np.sqrt(D)
    V = rng.normal(size=(T, 2 * D))
    A1, A2 = softmax_map(Q1, K, causal=False), softmax_map(Q2, K, causal=False)
    A = diff_map(A1, A2, lam)
    print(f"{T} tokens, no mask. Token {signal} is the signal; token {noise} distracts both maps alike.")
    print(
        f"\nA1, each row a softmax:\n{show(A1)}\nA2, another:\n{show(A2)}\nA1 - {lam} A2, the weights on V:\n{show(A)}"
    )
    print(f"\nrow sums: {A.sum(axis=1).round(12).tolist()}, that is 1 - lambda")
    print(f"negative weights: {(A < 0).sum()} of {A.size}; a softmax can have none")
    for name, u in (("signal", signal), ("distraction", noise)):
        before, after = A1[:, u].mean(), (np.abs(A[:, u]) / np.abs(A).sum(axis=1)).mean()
        print(f"share of the {name:11s} in the absolute weight: A1 {before:.2f}, difference {after:.2f}")

    print("\nthe reference against itself, largest differences:")
    for causal in (False, True):
        loops = diff_attention_loops(Q1, K, Q2, K, V, lam, causal)
        error = np.abs(loops - diff_attention(Q1, K, Q2, K, V, lam, causal)).max()
        print(f"  loops = matrices, {'with' if causal else 'without'} a causal mask: {error:.0e}")
        assert error < 1e-12, error
    dY = rng.normal(size=V.shape)
    dQ1 = diff_attention_backward(dY, Q1, K, Q2, K, V, lam)[0]
    step, up, down = 1e-5, Q1.copy(), Q1.copy()
    up[4, 2] += step
    down[4, 2] -= step
    slope = sum(s * (dY * diff_attention(Q, K, Q2, K, V, lam)).sum() for s, Q in ((1, up), (-1, down))) / (2 * step)
    print(f"  gradient by hand = finite difference, one entry of Q1: {abs(dQ1[4, 2] - slope):.0e}")
    assert abs(dQ1[4, 2] - slope) < 1e-7, (dQ1[4, 2], slope)


if __name__ == "__main__":
    walk_through()
