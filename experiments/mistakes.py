"""The classic mistakes of ports of differential attention, each a small edit of the reference.

`Diff` and `DiffV2` are attention_numpy's layers cut into steps; a mistake is a dict of the steps that it replaces:

    type("Port", (Diff,), DIFF["no head norm (subln)"])(x, w, layer, n_head, n_kv_head, theta)()    # -> (T, C)

`experiments.check_port` tries them on somebody's output. They were seen in public implementations, in the questions
asked about them, and in what their authors and the paper's answered.
"""

import numpy as np

from attention_numpy import lambda_init, layer_lambda, rms_norm, rope

EVERYTHING = 10**9  # tokens ahead that a mask shows: no mask


class Diff:
    """The paper's layer. i counts heads, j the columns of size D in q, k and v: a head has two of each."""

    sign, ahead, axis, eps, keys_turn = -1, 0, 1, 1e-5, 1

    def __init__(self, x, w, layer, n_head, n_kv_head, theta):
        self.x, self.w, self.layer, self.theta = x, w, layer, theta
        self.q, self.k, self.v = (x @ w[f"{name}.weight"].T for name in ("q_proj", "k_proj", "v_proj"))
        self.D, self.G = x.shape[1] // n_head, n_kv_head
        self.heads = self.q.shape[1] // self.D // 2
        self.r = 2 * self.heads // self.G  # queries that share a key

    def queries(self, i):
        return 2 * i, 2 * i + 1

    def keys(self, i):  # the pair of the head's group
        return 2 * (i // self.r), 2 * (i // self.r) + 1

    def values(self, i):  # what each map is multiplied with, both (T, E)
        V = np.hstack([self.part(self.v, j) for j in self.keys(i)])
        return V, V

    def part(self, a, j):
        return a[:, j * self.D : (j + 1) * self.D]

    def turn(self, a, sign=1):
        return rope(a, self.theta, sign)

    def scale(self):
        return self.D**-0.5

    def scores(self, j_q, j_k):
        Q, K = self.turn(self.part(self.q, j_q)), self.turn(self.part(self.k, j_k), self.keys_turn)
        return Q @ K.T * self.scale()

    def softmax(self, S, ahead):
        S = np.where(np.tri(*S.shape, k=ahead), S, -np.inf)
        e = np.exp(S - S.max(axis=self.axis, keepdims=True))
        return e / e.sum(axis=self.axis, keepdims=True)

    def mix(self, i, S1, S2, V1, V2):
        return self.softmax(S1, self.ahead) @ V1 + self.sign * self.lam(i) * (self.softmax(S2, self.ahead) @ V2)

    def lambda_init(self):
        return lambda_init(self.layer)

    def lam(self, i):
        return layer_lambda(self.w, self.layer) - lambda_init(self.layer) + self.lambda_init()

    def norm(self, Y):  # (heads, T, E)
        return np.stack([rms_norm(head, self.w["subln.weight"], self.eps) for head in Y])

    def factor(self):
        return 1 - self.lambda_init()

    def merge(self, Y):
        return np.hstack(Y)

    def __call__(self):  # -> (T, C)
        Y = []
        for i in range(self.heads):
            S1, S2 = map(self.scores, self.queries(i), self.keys(i))
            Y.append(self.mix(i, S1, S2, *self.values(i)))
        return self.merge(self.factor() * self.norm(np.stack(Y))) @ self.w["out_proj.weight"].T


class DiffV2(Diff):
    def keys(self, i):  # one for both maps
        return (2 * i // self.r,) * 2

    def values(self, i):
        return tuple(self.part(self.v, j) for j in self.keys(i))

    def logit(self, i):  # (T, 1)
        return self.x @ self.w["lambda_proj.weight"][i, :, None]

    def lam(self, i):
        return 1 / (1 + np.exp(-self.logit(i)))

    def norm(self, Y):
        return Y

    def factor(self):
        return 1.0


def interleaved(s, a, sign=1):
    """RoPE on channels (2 j, 2 j + 1): the half-split one, with the channels in another order."""
    return rope(a[:, np.r_[0 : s.D : 2, 1 : s.D : 2]], s.theta, sign)


# Not a mistake, but the same function with the rows of q_proj and k_proj in another order.
CONVENTIONS = {"": {}, ", with RoPE on channels (2 j, 2 j + 1) as in the official code": dict(turn=interleaved)}

# --- s is the layer whose step it is ---------------------------------------------------------


def swapped(s, i, S1, S2, V1, V2):
    return Diff.mix(s, i, S2, S1, V2, V1)


def softmax_of_difference(s, i, S1, S2, V1, V2):
    return s.softmax(S1 + s.sign * s.lam(i) * S2, s.ahead) @ V1


def second_unmasked(s, i, S1, S2, V1, V2):
    return s.softmax(S1, s.ahead) @ V1 + s.sign * s.lam(i) * (s.softmax(S2, EVERYTHING) @ V2)


def first_unmasked(s, i, S1, S2, V1, V2):
    return s.softmax(S1, EVERYTHING) @ V1 + s.sign * s.lam(i) * (s.softmax(S2, s.ahead) @ V2)


def masked_after(s, S, ahead):
    return Diff.softmax(s, S, EVERYTHING) * np.tri(*S.shape, k=ahead)


def late(s):
    return lambda_init(s.layer + 1) - lambda_init(s.layer)


def dot_products(s, i):
    w = s.w
    return w["lambda_q1"] @ w["lambda_k1"] - w["lambda_q2"] @ w["lambda_k2"] + s.lambda_init()


def one_norm(s, Y):
    return Y / np.sqrt((Y**2).mean(axis=(0, 2), keepdims=True) + s.eps) * s.w["subln.weight"]


def no_gain(s, Y):
    return np.stack([rms_norm(head, np.ones(head.shape[1]), s.eps) for head in Y])


def layer_norm(s, Y):
    return Diff.norm(s, Y - Y.mean(axis=2, keepdims=True))


def halves(s, i):  # of the queries; in `key_halves` of the keys
    return i, s.heads + i


def key_halves(s, i):
    return i // s.r, s.G // 2 + i // s.r


def repeated_keys(s, i):
    return 2 * i // s.r, (2 * i + 1) // s.r


def wide_values(s, i):  # as they should be, where the keys are not
    return (np.hstack([s.part(s.v, j) for j in Diff.keys(s, i)]),) * 2


BOTH = {
    "logits are scaled by 1 / sqrt(2 D), not 1 / sqrt(D)": dict(scale=lambda s: (2 * s.D) ** -0.5),
    "logits are multiplied by sqrt(D), not divided": dict(scale=lambda s: s.D**0.5),
    "logits are not scaled": dict(scale=lambda s: 1.0),
    "logits are scaled twice": dict(scale=lambda s: 1 / s.D),
    "the two maps are swapped": dict(mix=swapped),
    "the second map is added, not subtracted": dict(sign=1),
    "lambda is left out: A1 - A2": dict(lam=lambda s, i: 1.0),
    "lambda is zero: the second map is not there": dict(lam=lambda s, i: 0.0),
    "softmax of the difference, not difference of softmaxes": dict(mix=softmax_of_difference),
    "softmax over queries, not keys": dict(axis=0),
    "no causal mask: tokens see the future": dict(ahead=EVERYTHING),
    "no causal mask on the first map": dict(mix=first_unmasked),
    "no causal mask on the second map": dict(mix=second_unmasked),
    "the mask comes after the softmax": dict(softmax=masked_after),
    "the mask is off by one: tokens see the next one": dict(ahead=1),
    "the mask is off by one: tokens do not see themselves": dict(ahead=-1),
    "no RoPE": dict(turn=lambda s, a, sign=1: a),
    "RoPE turns keys the other way": dict(keys_turn=-1),
    "heads are merged without transposing back": dict(merge=lambda s, Y: Y.reshape(Y.shape[1], -1)),
}
DIFF = BOTH | {
    "no head norm (subln)": dict(norm=lambda s, Y: Y),
    "one norm over all heads, not one for each": dict(norm=one_norm),
    "the head norm takes the mean off: LayerNorm, not RMSNorm": dict(norm=layer_norm),
    "the head norm has eps 1e-6, not 1e-5": dict(eps=1e-6),
    "the head norm's gain is left out": dict(norm=no_gain),
    "the factor (1 - lambda_init) is missing": dict(factor=lambda s: 1.0),
    "the factor is lambda_init, not (1 - lambda_init)": dict(factor=lambda s: s.lambda_init()),
    "the factor is (1 - lambda), not (1 - lambda_init)": dict(factor=lambda s: 1 - s.lam(0)),
    "lambda stays at lambda_init": dict(lam=lambda s, i: s.lambda_init()),
    "lambda is made of dot products without exp": dict(lam=dot_products),
    "lambda_init counts layers from 1": dict(lambda_init=lambda s: lambda_init(s.layer + 1)),
    "lambda_init counts layers from 1, in lambda alone": dict(lam=lambda s, i: layer_lambda(s.w, s.layer) + late(s)),
    "lambda_init counts layers from 1, in the factor alone": dict(factor=lambda s: 1 - lambda_init(s.layer) - late(s)),
    "lambda_init is 0.8 in every layer": dict(lambda_init=lambda s: 0.8),
    "queries are paired by halves, keys by neighbours": dict(queries=halves),
    "branches are the two halves of the query and key heads, not neighbours": dict(
        queries=halves, keys=key_halves, values=wide_values
    ),
    "branches are the two halves of the query, key and value heads, not neighbours (DiffLlama's order)": dict(
        queries=halves, keys=key_halves
    ),
}
V2 = BOTH | {
    "the two halves of the query heads are paired, not neighbours": dict(queries=halves),
    "the two halves of the query heads are paired, each with its own key and value": dict(
        queries=halves, keys=lambda s, i: (i // s.r, (s.heads + i) // s.r)
    ),
    "lambda has no sigmoid": dict(lam=DiffV2.logit),
    "there is a head norm, as in version 1": dict(norm=no_gain),
}
# Only where queries share keys
DIFF_GROUPED = {
    "keys are repeated before they are paired (as in the official file without flash attention)": dict(
        keys=repeated_keys, values=wide_values
    ),
    "groups of keys are tiled, not repeated one by one": dict(keys=lambda s, i: (2 * i % s.G, 2 * i % s.G + 1)),
}
V2_GROUPED = {"groups of keys are tiled, not repeated one by one": dict(keys=lambda s, i: (i % s.G,) * 2)}


def mistakes(kind, n_head, n_kv_head):
    """(the layer in steps, {sentence: steps that it replaces}) for a kind of attention."""
    layer, alone, grouped = {"diff": (Diff, DIFF, DIFF_GROUPED), "diff_v2": (DiffV2, V2, V2_GROUPED)}[kind]
    return layer, alone if n_head == n_kv_head else alone | grouped
