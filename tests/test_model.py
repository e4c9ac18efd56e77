"""The whole model: sizes, initial values, losses, generation, and the place where a kind is added."""

import math
import re
from dataclasses import replace

import numpy as np
import pytest
import torch

import dropout
import model
from config import TrainConfig, check_model
from dropout import Dropout
from generation import KVCache, pick
from linear import Linear, mkl_on_amd
from model import ATTENTIONS, GPT, DiffAttention, GPTConfig, blocks, eager, fastest, fused, rope_table

KINDS = list(ATTENTIONS)
SMALL = GPTConfig(block_size=16, vocab_size=31, n_layer=3, n_head=4, n_embd=24, emb_std=0.1)


def ids(*shape, seed=0, vocab_size=31):
    return torch.randint(vocab_size, shape, generator=torch.Generator().manual_seed(seed))


# --- Sizes -----------------------------------------------------------------------------------


@pytest.mark.parametrize("n_embd, n_head", [(64, 4), (128, 4), (256, 8), (768, 12)])
def test_diff_adds_lambda_vectors_and_gains_only(n_embd, n_head):
    """C20."""
    cfg = GPTConfig(n_embd=n_embd, n_head=n_head)
    count = {kind: GPT(replace(cfg, attention=kind)).num_params() for kind in ("standard", "diff")}
    D = n_embd // n_head
    assert count["diff"] - count["standard"] == cfg.n_layer * (4 * D + 2 * D)


@pytest.mark.parametrize(
    "n_embd, n_head, n_kv_head", [(128, 4, 0), (128, 8, 0), (384, 6, 0), (384, 6, 2), (768, 12, 0)]
)
def test_v2_has_as_many_parameters(n_embd, n_head, n_kv_head):
    cfg = GPTConfig(n_embd=n_embd, n_head=n_head, n_kv_head=n_kv_head)
    count = {kind: GPT(replace(cfg, attention=kind)).num_params() for kind in ("standard", "diff_v2")}
    assert abs(count["diff_v2"] / count["standard"] - 1) < 1e-3


def test_the_model_of_the_first_lines():
    """Those of model.py, and its parameters counted by hand."""
    gpt = GPT(GPTConfig(attention="diff"))
    logits, loss = gpt(ids(2, 256, vocab_size=64), ids(2, 256, vocab_size=64))
    assert logits.shape == (2, 256, 64) and loss.shape == () and gpt.cfg.block_size == 256
    layer = 4 * 128 * 128 + 3 * 128 * round(8 * 128 / 3) + 2 * 128 + (4 + 2) * 32
    assert gpt.num_params() == 64 * 128 + 4 * layer + 128


def test_a_model_to_count_with_draws_nothing(monkeypatch):
    monkeypatch.setattr(torch, "randn", None)
    with torch.device("meta"):
        assert GPT(SMALL).num_params() > 0


def test_heads_of_a_768_wide_model():
    """(heads, width of q and k, width of v): halving the heads and the head size too is the classic mistake.

    Report 41.
    """
    shapes = {}
    for kind in ("standard", "diff", "diff_v2"):
        cfg = GPTConfig(n_embd=768, n_head=12, attention=kind)
        layer = ATTENTIONS[kind](cfg, 0)
        q1, k1, _, _, v, _ = layer.operands(x := torch.randn(1, 5, 768), model.rope_table(cfg, 0, 5, like=x))
        shapes[kind] = (q1.shape[1], q1.shape[3], v.shape[3])
        assert q1.shape[1] * v.shape[3] == 768
    assert shapes == {"standard": (12, 64, 64), "diff": (6, 64, 128), "diff_v2": (12, 64, 64)}


def test_standard_is_a_plain_gpt():
    """Report 51; what it computes is compared in tests/test_attention.py."""
    names = {name.split(".", 2)[-1] for name in GPT(replace(SMALL, attention="standard")).state_dict()}
    assert not {name for name in names if "lambda" in name or "subln" in name}


@pytest.mark.parametrize("kind", KINDS)
def test_no_matrix_has_a_bias(kind):
    assert not [name for name in GPT(replace(SMALL, attention=kind)).state_dict() if not name.endswith("weight")
                and ".lambda_" not in name]  # fmt: skip


@pytest.mark.parametrize("kind", KINDS)
def test_a_block_is_equations_4_and_5(kind):
    gpt = GPT(replace(SMALL, attention=kind)).double()
    block, x = gpt.blocks[1], torch.randn(2, 7, 24, dtype=torch.float64)
    rope = rope_table(gpt.cfg, 0, 7, like=x)

    def norm(x):
        return x / (x.square().mean(dim=-1, keepdim=True) + 1e-5).sqrt()

    y = x + block.attn(norm(x), rope)
    gate, up, down = (getattr(block.mlp, f"{name}_proj").weight for name in ("gate", "up", "down"))
    inner = norm(y) @ gate.T
    expected = y + (inner * inner.sigmoid() * (norm(y) @ up.T)) @ down.T
    torch.testing.assert_close(block(x, rope), expected, rtol=0, atol=1e-12)


# --- Initial values --------------------------------------------------------------------------


def test_kinds_start_from_equal_weights_where_they_share_them():
    a, b, c = (GPT(replace(SMALL, attention=kind), seed=3).state_dict() for kind in ("standard", "diff", "diff_v2"))
    assert all(torch.equal(a[name], b[name]) for name in a)
    assert torch.equal(a["blocks.1.attn.k_proj.weight"], c["blocks.1.attn.k_proj.weight"])
    default, zero = GPT(SMALL).state_dict(), GPT(SMALL, seed=0).state_dict()
    assert all(torch.equal(default[name], zero[name]) for name in zero)
    other = GPT(SMALL, seed=4).state_dict()
    assert not torch.equal(b["tok_emb.weight"], other["tok_emb.weight"])


@pytest.mark.parametrize("kind", KINDS)
def test_every_matrix_has_the_spread_of_its_role(kind):
    gpt = GPT(
        GPTConfig(n_layer=2, n_embd=256, n_head=4, attention=kind, init_std=0.08, emb_std=0.3, tie_embeddings=False)
    )
    for name, p in gpt.named_parameters():
        if p.ndim == 2:
            std = {"tok_emb": 0.3, "out_proj": 0.04, "down_proj": 0.04}.get(name.split(".")[-2], 0.08)
            assert p.std().item() == pytest.approx(std, rel=0.1), name
            assert abs(p.mean().item()) < std * 5 / math.sqrt(p.numel()), name
        elif ".lambda_" not in name:
            assert (p == 1).all(), name
    lambdas = [p for name, p in gpt.named_parameters() if ".lambda_" in name and p.ndim == 1]
    if kind == "diff":
        assert len(lambdas) == 2 * 4 and torch.cat(lambdas).std().item() == pytest.approx(0.1, rel=0.1)


def test_tokens_of_stories_start_five_times_as_large_as_other_matrices():
    """What makes a small model look things up (LOG.md)."""
    start = GPT(TrainConfig(n_embd=256).resolved().model_config()).state_dict()
    ratio = start["tok_emb.weight"].std() / start["blocks.0.attn.q_proj.weight"].std()
    assert ratio.item() == pytest.approx(5, rel=0.05)


@pytest.mark.parametrize("kind", KINDS)
def test_untrained_loss_is_that_of_guessing(kind):
    x = ids(4, 50)
    _, loss = GPT(replace(SMALL, attention=kind, init_std=0.02, emb_std=0.02))(x[:, :-1], x[:, 1:])
    assert loss.item() == pytest.approx(math.log(31), abs=0.1)


# --- The function ----------------------------------------------------------------------------


@pytest.mark.parametrize("kind", KINDS)
def test_all_paths_any_length_float64(kind):
    """Report 28."""
    gpt = GPT(replace(SMALL, attention=kind)).double()
    x = ids(2, 29)  # longer than block_size
    logits, _ = gpt(x)
    assert logits.dtype is torch.float64 and logits.shape == (2, 29, 31)
    for path in (eager, fused):
        for block in gpt.blocks:
            block.attn.attend = path
        torch.testing.assert_close(gpt(x)[0], logits, rtol=0, atol=1e-12)


@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize("dtype, atol", [(torch.bfloat16, 0.3), (torch.float32, 1e-4)])
def test_a_model_in_another_type(kind, dtype, atol):
    """All of it converted, not by autocast: it runs, stays in its type, and says about the same."""
    gpt = GPT(replace(SMALL, attention=kind))
    exact = gpt.double()(ids(2, 16))[0]
    gpt.to(dtype)
    for path in (fused, fastest):
        for block in gpt.blocks:
            block.attn.attend = path
        logits, loss = gpt(ids(2, 16), ids(2, 16, seed=1))
        assert logits.dtype is dtype and loss.dtype is torch.float32
        torch.testing.assert_close(logits.double(), exact, rtol=0, atol=atol)
    table = model.rope_table(gpt.cfg, 1000, 1010, like=logits)
    assert table[0].dtype is torch.float32
    operands = gpt.blocks[0].attn.operands(torch.randn(1, 10, 24).to(dtype), table)
    assert operands[0].dtype is dtype and (operands[5] is None or operands[5].dtype is torch.float32)


@pytest.mark.parametrize("kind", KINDS)
def test_loss_is_the_mean_over_targets(kind):
    gpt, x, y = GPT(replace(SMALL, attention=kind)), ids(2, 9), ids(2, 9, seed=1)
    logits, loss = gpt(x, y)
    by_hand = -logits.log_softmax(-1).gather(2, y[..., None]).mean()
    torch.testing.assert_close(loss, by_hand)
    skipped = y.clone()
    skipped[0] = -1
    torch.testing.assert_close(gpt(x, skipped)[1], gpt(x[1:], y[1:])[1])


@pytest.mark.parametrize("path", [eager, fused, blocks])
@pytest.mark.parametrize("kind", KINDS)
def test_dropout_acts_in_training_only(kind, path):
    """C15 and report 27."""
    gpt = GPT(replace(SMALL, attention=kind, dropout=0.5))
    for block in gpt.blocks:
        block.attn.attend = path
    x = ids(2, 16)
    assert not torch.equal(gpt(x)[0], gpt(x)[0])
    gpt.eval()
    assert torch.equal(gpt(x)[0], gpt(x)[0])


def test_dropout_is_on_embeddings_and_branches(monkeypatch):
    """Here it doubles the embeddings and leaves nothing of the branches, so that only the embeddings arrive."""
    gpt, x, seen = GPT(replace(SMALL, dropout=0.3)), ids(2, 5), []

    def forward(dropout, x, keys):
        seen.append((dropout.p, dropout.training, dropout.place, keys))
        return 2 * x if len(seen) == 1 else 0 * x

    monkeypatch.setattr(Dropout, "forward", forward)
    assert torch.equal(gpt.features(x, keys="keys"), gpt.norm(2 * gpt.tok_emb(x)))
    assert seen == [(0.3, True, place, "keys") for place in range(1 + 2 * SMALL.n_layer)]


@pytest.mark.parametrize("p", [0.1, 0.5, 0.9])
def test_masks_of_dropout_look_drawn(p):
    """Neighbours in a row, rows of neighbouring keys and places of a model: as often equal as if drawn by lot."""
    keys, ones = torch.arange(32), torch.ones(32, 48, 64)
    kept = torch.stack([Dropout(p, place)(ones, keys).flatten(1) for place in range(6)])  # (place, row, position)
    torch.testing.assert_close(kept.unique(), torch.tensor([0, 1 / (1 - p)]))
    m = ((kept == 0).double() - p) / math.sqrt(p * (1 - p))  # mean 0, variance 1
    n = m.shape[2]
    rows, places = m[0] @ m[0].T / n, torch.einsum("prn,qrn->pqr", m, m) / n
    pairs = [rows[~torch.eye(32, dtype=bool)], places[~torch.eye(6, dtype=bool)].flatten()]
    lags = [(m[..., :-lag] * m[..., lag:]).mean(dim=2).flatten() for lag in (1, 2, 7, 63, 64, 65)]
    for mean in (m.mean(dim=2).flatten(), *pairs, *lags):  # each of about N(0, 1 / n)
        assert mean.abs().max() * math.sqrt(n) < 5 and 0.8 < mean.std() * math.sqrt(n) < 1.2


def lowbias32(n):
    """C. Wellons' hash, of Python's whole numbers."""
    n = ((n ^ n >> 16) * 0x7FEB352D) % 2**32
    n = ((n ^ n >> 15) * 0x846CA68B) % 2**32
    return n ^ n >> 16


def test_masks_of_dropout_are_the_same_everywhere():
    """Number by number: a run that goes on elsewhere, or years later, has the same ones."""
    keys = [0, 1, 2**31, 2**32 - 1]
    for place, p in ((0, 0.5), (7, 0.25)):
        kept = Dropout(p, place)(torch.ones(4, 9, 10), torch.tensor(keys)) != 0
        rows = [lowbias32((key + 0x1E3779B1 * place) % 2**32) for key in keys]
        assert kept.flatten(1).tolist() == [
            [lowbias32(row ^ position) % 2**31 >= p * 2**31 for position in range(90)] for row in rows
        ]
    assert dropout.keys_of(3, 2, 1).tolist() == np.random.SeedSequence([1, 3, 1]).generate_state(2).tolist()


def test_masks_of_dropout_belong_to_rows():
    """However a batch is cut, in whatever type; keys that are not given are drawn."""
    drop, x, keys = Dropout(0.5, 2), torch.randn(6, 5, 8, requires_grad=True), torch.arange(2**32 - 6, 2**32)
    y = drop(x, keys)
    assert torch.equal(y, torch.cat([drop(*piece) for piece in zip(x.split([1, 2, 3]), keys.split([1, 2, 3]))]))
    assert torch.equal((y != 0).double(), drop(torch.ones_like(x, dtype=torch.float64), keys) / 2)
    assert drop(x.bfloat16(), keys).dtype == torch.bfloat16
    y.sum().backward()
    assert torch.equal(x.grad, 2.0 * (y != 0))
    torch.manual_seed(0)
    first, second = drop(x), drop(x)
    torch.manual_seed(0)
    assert torch.equal(drop(x), first) and not torch.equal(first, second)
    assert drop(torch.ones(0, 5, 8)).shape == (0, 5, 8)
    assert drop.eval()(x, keys) is x and Dropout(0.0, 2)(x, keys) is x


@pytest.mark.parametrize("kind", KINDS)
def test_attention_maps(kind):
    """Report 50."""
    gpt, x = GPT(replace(SMALL, attention=kind)), ids(2, 13)
    maps = gpt.attention_maps(x)
    assert len(maps) == SMALL.n_layer
    for A1, A2, lam in maps:
        A = A1 if A2 is None else A1 - lam[..., None] * A2
        row_sum = torch.ones(()) if lam is None else 1 - lam
        torch.testing.assert_close(A.sum(-1), row_sum.expand(A.shape[:3]))
        assert (A.triu(1) == 0).all() and not A.requires_grad
    assert maps[0][0].shape == (2, 2 if kind == "diff" else 4, 13, 13)
    # They are those of the layers at work: of what each one is given when the model reads the ids.
    given = []
    for block in gpt.blocks:
        block.attn.register_forward_pre_hook(lambda attn, args: given.append((attn, *args[:2])))
    gpt(x)
    for mine, (attn, *args) in zip(maps, given, strict=True):
        for ours, theirs in zip(mine, attn.maps(*args), strict=True):
            assert ours is theirs or torch.equal(ours, theirs)


def test_every_config_field_matters():
    """No setting is there for show: each one changes the model, the window or a check. Report 47."""
    base = replace(SMALL, dropout=0.0)
    other = dict(vocab_size=32, n_layer=2, n_head=2, n_kv_head=2, n_embd=32, dropout=0.3, attention="standard",
                 init_std=0.3, emb_std=0.3, rope_theta=100.0, tie_embeddings=False, block_size=8)  # fmt: skip
    assert set(other) == set(base.__dataclass_fields__)
    x = ids(2, 12)

    def behaviour(cfg):
        torch.manual_seed(0)
        gpt = GPT(cfg).train()
        text = gpt.eval().generate(x, 30, temperature=0)
        return gpt.num_params(), gpt.train()(x)[0].sum().item(), text.tolist()

    for name, value in other.items():
        assert behaviour(base) != behaviour(replace(base, **{name: value})), name


# --- Generation ------------------------------------------------------------------------------


@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize("n_kv_head", [0, 2])
@pytest.mark.parametrize("batch, prompt", [(1, 1), (3, 11), (3, 16), (1, 40)])
def test_cache_changes_nothing(kind, n_kv_head, batch, prompt):
    """C14 and report 36."""
    gpt = GPT(replace(SMALL, attention=kind, n_kv_head=n_kv_head)).double().eval()
    x = ids(batch, prompt)
    cached, plain = (gpt.generate(x, 45, temperature=0, use_cache=c) for c in (True, False))
    assert torch.equal(cached, plain) and torch.equal(cached[:, :prompt], x)
    assert cached.shape == (batch, prompt + 45)


def test_generation_draws_from_the_whole_distribution_unless_told():
    gpt, plain = GPT(SMALL).eval(), dict(temperature=1.0, top_k=0, top_p=1.0, use_cache=True)
    logits, x = torch.randn(200, 31), ids(1, 5)
    drawn = lambda draw, *args, **how: draw(*args, generator=torch.Generator().manual_seed(0), **how)  # noqa: E731
    assert torch.equal(drawn(gpt.generate, x, 50), drawn(gpt.generate, x, 50, **plain))
    del plain["use_cache"]
    assert torch.equal(drawn(pick, logits), drawn(pick, logits, **plain))


@pytest.mark.parametrize("shape", [(1, 1), (3, 1), (2, 4), (1,), (3, 3)])
def test_products_with_few_rows_are_cut(shape, monkeypatch):
    cut, bmm = [], torch.bmm
    threads = 9
    monkeypatch.setattr("linear.OTHER_ORDER", True)
    monkeypatch.setattr(torch, "get_num_threads", lambda: threads)
    monkeypatch.setattr(torch, "bmm", lambda W, x: cut.append((tuple(W.shape), tuple(x.shape))) or bmm(W, x))
    x, rows = torch.randn(*shape, 192, dtype=torch.float64), math.prod(shape)
    for out_features in (396, 401):  # 401: 5 rows of W are left over
        linear = Linear(192, out_features).double()
        with torch.inference_mode():
            y = linear(x)
        assert y.shape == (*shape, out_features)
        torch.testing.assert_close(y, x @ linear.weight.mT, rtol=0, atol=1e-12)
        assert cut == [((9, 44, 192), (9, 192, rows))] * (rows <= 8)
        cut.clear()
    linear, x = Linear(20000, 5), torch.randn(2, 20000)  # fewer rows than threads: as a small vocabulary has
    with torch.inference_mode():
        torch.testing.assert_close(linear(x), x @ linear.weight.mT, rtol=1e-3, atol=1e-3)
    cut.clear()
    linear(x)  # training: nothing changes
    with torch.inference_mode():
        Linear(128, 512)(torch.randn(1, 1, 128))  # too small
        assert not cut
        threads = 1  # one row is slow to multiply in one piece, even so
        linear(x)
    assert cut == [((2, 2, 20000), (2, 20000, 2))]
    monkeypatch.setattr("linear.OTHER_ORDER", False)
    with torch.inference_mode():
        linear(x)
    assert len(cut) == 1


def test_the_order_of_a_product_depends_on_the_cpu(tmp_path, monkeypatch):
    cpu = tmp_path / "cpuinfo"
    monkeypatch.setattr("torch.backends.mkl.is_available", lambda: True)
    assert not mkl_on_amd(cpu)  # not on Linux
    for vendor, amd in (("AuthenticAMD", True), ("GenuineIntel", False)):
        cpu.write_text(f"processor: 0\nvendor_id: {vendor}\n")
        assert mkl_on_amd(cpu) == amd
    cpu.write_text("vendor_id: AuthenticAMD")
    monkeypatch.setattr("torch.backends.mkl.is_available", lambda: False)
    assert not mkl_on_amd(cpu)


def test_lambda_is_computed_once_while_a_text_is_written(monkeypatch):
    calls, lam = [], DiffAttention.lam
    monkeypatch.setattr(DiffAttention, "lam", lambda self: calls.append(0) or lam(self))
    gpt = GPT(replace(SMALL, attention="diff", n_layer=3)).eval()
    gpt.generate(ids(1, 5), 6)
    assert len(calls) == 3
    gpt(ids(1, 5))  # without a cache, always: it changes with every update
    assert len(calls) == 6


def test_window_restarts_from_its_last_half():
    gpt = GPT(replace(SMALL, block_size=8)).double().eval()
    lengths = []

    def before(_, args):
        assert torch.is_inference_mode_enabled()  # nothing is kept for gradients
        lengths.append(args[0].shape[1])

    gpt.blocks[0].attn.register_forward_pre_hook(before)
    gpt.generate(ids(1, 6), 8, temperature=0, use_cache=False)
    assert lengths == [6, 7, 8, 4, 5, 6, 7, 8]
    lengths.clear()
    gpt.generate(ids(1, 6), 8, temperature=0)
    assert lengths == [6, 1, 1, 4, 1, 1, 1, 1]
    for use_cache, expected in ((False, [8, 4, 5]), (True, [8, 4, 1])):  # a prompt that is longer than the window
        lengths.clear()
        gpt.generate(ids(1, 13), 3, temperature=0, use_cache=use_cache)
        assert lengths == expected


def test_smallest_model_generates():
    for kind in KINDS:
        gpt = GPT(GPTConfig(block_size=1, vocab_size=2, n_layer=1, n_head=2, n_embd=4, attention=kind)).eval()
        assert gpt.generate(ids(1, 1, vocab_size=2), 5).shape == (1, 6)


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_cache_has_the_type_of_its_keys(dtype):
    """Report 38."""
    cache = KVCache(4)
    k, v = cache.append(torch.ones(1, 2, 3, 5, dtype=dtype), torch.ones(1, 1, 3, 7, dtype=dtype))
    assert k.dtype is v.dtype is dtype and k.shape == (1, 2, 3, 5) and v.shape == (1, 1, 3, 7)


def test_pick():
    """C10, C11, reports 32 and 33."""
    logits = torch.tensor([[1.0, 3.0, 2.0, 0.0], [0.0, 0.5, 4.0, 3.9]]).repeat(2000, 1)

    def drawn(**how):
        return pick(logits, generator=torch.Generator().manual_seed(0), **how)

    assert set(drawn().flatten().tolist()) == {0, 1, 2, 3}
    greedy = torch.tensor([[1], [2]]).repeat(2000, 1)
    for how in (dict(temperature=0), dict(temperature=1e-308), dict(top_k=1), dict(top_p=0.0), dict(top_p=1e-9)):
        assert torch.equal(drawn(**how), greedy), how
    for how in (dict(top_k=4), dict(top_k=100000), dict(top_p=1.0), dict(top_k=0)):
        assert torch.equal(drawn(**how), drawn()), how
    assert set(drawn(top_k=2)[::2].flatten().tolist()) == {1, 2}
    assert {pick(logits[:1], top_k=2).item() for _ in range(50)} == {1, 2}
    tied = torch.tensor([[1.0, 3.0, 3.0, 3.0]]).repeat(300, 1)
    assert len(set(pick(tied, top_k=2).flatten().tolist())) == 2
    # 3.0 has 64 % and 2.0 has 24 %: together they reach 0.8, and 0.6 needs the first alone
    assert set(drawn(top_p=0.8)[::2].flatten().tolist()) == {1, 2}
    assert set(drawn(top_p=0.6)[::2].flatten().tolist()) == {1}
    assert len(set(pick(torch.zeros(300, 4), top_p=0.5).flatten().tolist())) == 2  # reached, not passed
    share = (drawn()[::2] == 1).double().mean().item()
    assert share == pytest.approx(logits[0].softmax(0)[1].item(), abs=0.03)


# --- The table of kinds ----------------------------------------------------------------------


class MeanAttention(model.Attention):
    """A toy: every token sees the mean of the values so far."""

    def operands(self, x, rope, cache=None):
        q, k, v = self.qkv(x, rope, cache)
        return torch.zeros_like(q), k, None, None, v, None


def test_a_fourth_kind_is_a_class_and_an_entry(monkeypatch):
    monkeypatch.setitem(ATTENTIONS, "mean", MeanAttention)
    gpt = GPT(replace(SMALL, attention="mean")).double().eval()
    gpt(ids(2, 9), ids(2, 9))[1].backward()
    A, second, lam = gpt.attention_maps(ids(2, 9))[0]
    torch.testing.assert_close(A[0, 0, 8], torch.full((9,), 1 / 9, dtype=torch.float64))
    assert second is lam is None
    x = ids(1, 5)
    assert torch.equal(gpt.generate(x, 40, temperature=0), gpt.generate(x, 40, temperature=0, use_cache=False))


@pytest.mark.parametrize(
    "change, parts",
    [
        (dict(attention="dif"), ["'dif'", "standard, diff, diff_v2"]),
        (dict(n_head=1), ["n_head=1", "use n_head=2"]),
        (dict(n_head=3), ["n_head=3", "even", "n_embd=24", "use n_head=4"]),
        (dict(n_head=5, n_embd=40), ["n_head=5", "use n_head=4"]),
        (dict(n_head=5, n_embd=66), ["n_head=5", "n_embd=66", "use n_head=6, n_embd=72"]),
        (dict(n_head=4, n_embd=66), ["n_embd=66", "n_head=4", "use n_embd=64"]),
        (dict(n_head=4, n_embd=20), ["n_embd=20", "even size", "use n_embd=16"]),
        (dict(n_head=4, n_kv_head=1), ["n_kv_head=1", "even", "use 2"]),
        (dict(n_head=4, n_kv_head=3), ["n_kv_head=3", "n_head=4"]),
        (dict(attention="standard", n_head=6, n_kv_head=4), ["n_kv_head=4", "use 3"]),
        (dict(n_kv_head=-1), ["n_kv_head=-1"]),
        (dict(n_embd=0), ["n_embd=0", "at least 1"]),
        (dict(n_embd=10**15), ["n_embd=1000000000000000", "at most"]),
        (dict(n_layer=0), ["n_layer=0"]),
        (dict(block_size=0), ["block_size=0"]),
        (dict(dropout=1.0), ["dropout=1.0"]),
        (dict(dropout=float("nan")), ["dropout=nan"]),
        (dict(init_std=0.0), ["init_std=0.0"]),
        (dict(rope_theta=-1.0), ["rope_theta=-1.0"]),
    ],
)
def test_bad_architecture_is_refused_by_name(change, parts):
    """C19, reports 12 and 14."""
    with pytest.raises(ValueError) as caught:
        check_model(replace(SMALL, **change))
    assert all(part in str(caught.value) for part in parts), caught.value


@pytest.mark.parametrize(
    "change, words",
    [
        (dict(n_embd=26), "26 channels in 4 heads: RoPE needs an even size"),
        (dict(n_embd=20), "20 channels in 4 heads"),
        (dict(attention="standard", n_kv_head=3), "4 query heads cannot share 3 keys evenly"),
        (dict(n_head=3), "odd heads in pairs"),
        (dict(n_kv_head=1), "odd heads in pairs"),
    ],
)
def test_bad_architecture_is_no_layer(change, words):
    with pytest.raises(AssertionError, match=words):
        GPT(replace(SMALL, **change))


def test_suggestions_are_legal():
    """C19 and report 12: both numbers are named, and what is suggested is legal at once."""
    for kind in KINDS:
        for n_head in (1, 2, 3, 4, 5, 6, 7):
            for n_embd in range(1, 70):
                cfg = GPTConfig(attention=kind, n_head=n_head, n_embd=n_embd)
                try:
                    check_model(cfg)
                except ValueError as error:
                    said, use = str(error).rsplit("use ", 1)
                    assert f"n_head={n_head}" in said and f"n_embd={n_embd}" in said
                    check_model(replace(cfg, **{n: int(v) for n, v in re.findall(r"(\w+)=(\d+)", use)}))
    with pytest.raises(ValueError, match="use n_head=4$"):
        check_model(GPTConfig(attention="diff", n_head=5, n_embd=64))
