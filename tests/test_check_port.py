"""check_port names what is wrong: mistakes planted in model.py's layer, by other code, and in the reference."""

import os
import re
import sys

import numpy as np
import pytest
import torch
from test_attention import CASES, LAYER, MISTAKES, B, D, H, T, make

from attention_numpy import LAYERS
from experiments import check_port
from experiments.check_port import CheckPortConfig, check
from experiments.mistakes import mistakes

C = H * D
# What test_attention.py calls a mistake, and what must be in the verdict
NAMES = {
    "branches are the two halves of the heads": "two halves of the query and key heads",
    "keys shared before they are paired": "repeated before they are paired",
    "maps swapped": "swapped",
    "plus lambda": "added, not subtracted",
    "scale by sqrt(2 D)": "scaled by 1 / sqrt(2 D)",
    "logits multiplied by sqrt(D)": "multiplied by sqrt(D)",
    "softmax over queries": "softmax over queries",
    "second map without a mask": "no causal mask on the second map",
    "mask off by one": "tokens see the next one",
    "mask after the softmax": "the mask comes after the softmax",
    "softmax of the difference": "softmax of the difference",
    "lambda left out": "A1 - A2",
    "head norm forgotten": "no head norm",
    "(1 - lambda_init) forgotten": "(1 - lambda_init) is missing",
    "(1 - lambda) for (1 - lambda_init)": "the factor is (1 - lambda), not (1 - lambda_init)",
    "one norm over all heads": "one norm over all heads",
    "lambda_init counted from 1": "counts layers from 1, in lambda alone",
    "lambda not through exp": "without exp",
    "no RoPE": "no RoPE",
    "RoPE turns the other way for keys": "keys the other way",
    "V2: pairs across groups": "two halves of the query heads are paired, not neighbours",
    "V2: lambda without the sigmoid": "no sigmoid",
}


def saved(tmp_path, layer, rope, x, prefix="", change=None):
    """A file with a layer of model.py in float32, its x, and the y that it makes; change(entries) edits them."""
    with torch.no_grad():
        y = layer.float()(x.float(), [r.float() for r in rope])
    entries = {"x": x.float(), "y": y, **{prefix + name: p for name, p in layer.state_dict().items()}}
    if change:
        change(entries)
    torch.save(entries, tmp_path / "port.pt")
    return str(tmp_path / "port.pt")


def explanation(verdict):
    return re.search(r"explained by: (.*) \(then it agrees to \de-0[5-9]", verdict)[1].split("; and ")


@pytest.mark.parametrize("kind, kv", [case for case in CASES if case[0] != "standard"])
def test_steps_are_the_reference(kind, kv):
    cfg, layer, _, x = make(kind, kv)
    how = ({k: v.numpy() for k, v in layer.state_dict().items()}, LAYER, H, cfg.kv_heads, 500.0)
    steps, _ = mistakes(kind, H, cfg.kv_heads)
    np.testing.assert_allclose(steps(x[0].numpy(), *how)(), LAYERS[kind](x[0].numpy(), *how)[0], rtol=0, atol=1e-12)


@pytest.mark.parametrize("kind, kv", [case for case in CASES if case[0] != "standard"])
def test_the_right_layer_is_accepted(kind, kv, tmp_path):
    cfg, layer, rope, x = make(kind, kv)
    file = saved(tmp_path, layer, rope, x, "model.layers.2.self_attn.")
    agrees, lines = check(CheckPortConfig(file, n_head=H))
    assert agrees and re.match(r"agrees with the paper's layer to \de-0[5-9]$", lines[0]), lines
    assert f"{cfg.kv_heads} keys, layer 2" in lines[1]


def test_a_norm_without_a_gain_and_parameters_instead_of_tensors(tmp_path):
    _, layer, rope, x = make("diff")
    torch.nn.init.ones_(layer.subln.weight)

    def change(entries):
        del entries["subln.weight"]
        entries["q_proj.weight"] = torch.nn.Parameter(entries["q_proj.weight"])
        entries["o_proj.weight"] = entries.pop("out_proj.weight")
        entries.update(x=entries["x"][0], y=entries["y"][0])

    assert check(CheckPortConfig(saved(tmp_path, layer, rope, x, change=change), layer=LAYER))[0]


@pytest.mark.parametrize("mistake", NAMES)
def test_a_mistake_in_the_model_is_named(mistake, tmp_path, monkeypatch):
    _, layer, rope, x = make("diff_v2" if mistake.startswith("V2") else "diff", n_kv_head=4)
    MISTAKES[mistake](monkeypatch)
    agrees, lines = check(CheckPortConfig(saved(tmp_path, layer, rope, x), layer=LAYER))
    assert not agrees and len(explanation(lines[0])) == 1 and NAMES[mistake] in lines[0], lines
    assert not lines[2:], "something else explains it as well"


def by_steps(tmp_path, kind, *names, batch=1):
    """A file whose y the reference made with those mistakes, rounded to float32."""
    cfg, layer, rope, x = make(kind, 4)
    w = {k: v.float().double().numpy() for k, v in layer.state_dict().items()}
    x = x[:batch].float()
    steps, edits = mistakes(kind, H, 4)
    port = type("Port", (steps,), {step: new for name in names for step, new in edits[name].items()})
    with np.errstate(invalid="ignore"):
        y = np.stack([port(one.double().numpy(), w, LAYER, H, 4, 10000.0)() for one in x])
    return saved(tmp_path, layer, rope, x, change=lambda entries: entries.update(y=torch.tensor(y).float()))


@pytest.mark.parametrize("kind", ["diff", "diff_v2"])
def test_every_mistake_is_named(kind, tmp_path):
    for name in mistakes(kind, H, 4)[1]:
        if "eps" in name:
            continue  # seen only where values are tiny: below
        agrees, lines = check(CheckPortConfig(by_steps(tmp_path, kind, name), layer=LAYER))
        assert not agrees and explanation(lines[0]) == [name] and not lines[2:], lines


def test_eps_is_named_where_it_matters(tmp_path):
    cfg, layer, rope, x = make("diff")
    layer.subln.eps = 1e-6
    with torch.no_grad():
        layer.v_proj.weight *= 1e-3
    agrees, lines = check(CheckPortConfig(saved(tmp_path, layer, rope, x), layer=LAYER))
    assert not agrees and explanation(lines[0]) == ["the head norm has eps 1e-6, not 1e-5"]


@pytest.mark.parametrize(
    "names",
    [
        ("no head norm (subln)", "the factor (1 - lambda_init) is missing"),
        ("logits are scaled by 1 / sqrt(2 D), not 1 / sqrt(D)", "lambda stays at lambda_init"),
    ],
)
def test_two_mistakes_are_named(names, tmp_path):
    agrees, lines = check(CheckPortConfig(by_steps(tmp_path, "diff", *names), layer=LAYER))
    assert not agrees and explanation(lines[0]) == list(names), lines


def interleaved(x, rope):
    """RoPE as the official code pairs channels, by complex numbers."""
    z = torch.view_as_complex(x.unflatten(-1, (-1, 2)).contiguous()) * torch.complex(
        *(t.chunk(2, dim=-1)[1] for t in rope)
    )
    return torch.view_as_real(z).flatten(-2)


def test_the_official_rope_is_no_mistake(tmp_path, monkeypatch):
    _, layer, rope, x = make("diff", 4)
    monkeypatch.setattr("model.rotate", interleaved)
    agrees, lines = check(CheckPortConfig(saved(tmp_path, layer, rope, x), layer=LAYER))
    assert agrees and "channels (2 j, 2 j + 1) as in the official code" in lines[0]
    monkeypatch.setattr(layer, "finish", lambda y: layer.subln(y))
    agrees, lines = check(CheckPortConfig(saved(tmp_path, layer, rope, x), layer=LAYER))
    assert not agrees and "(1 - lambda_init) is missing" in lines[0] and "official code" in lines[0]


def test_what_nothing_explains_is_located(tmp_path):
    _, layer, rope, x = make("diff", 4)
    right = layer.finish

    def finish(y):
        z = right(y)
        z[:, 2, 3:] *= -1
        return z

    layer.finish = finish
    agrees, lines = check(CheckPortConfig(saved(tmp_path, layer, rope, x), layer=LAYER))
    assert (
        not agrees
        and "no known mistake explains it: first at token 3, in heads 2 of 6 (the first is right:" in lines[0]
    )


def test_what_an_input_cannot_show_is_said(tmp_path):
    _, layer, rope, x = make("diff")
    with torch.no_grad():
        for name in ("q1", "k1", "q2", "k2"):
            getattr(layer, f"lambda_{name}").zero_()
    agrees, lines = check(CheckPortConfig(saved(tmp_path, layer, [r[:1] for r in rope], x[:, :1]), layer=LAYER))
    hidden = lines[-1].removeprefix("this input and these weights would not show: ").split("; ")
    assert agrees and "lambda stays at lambda_init" in hidden and "no RoPE" in hidden and "no head norm" not in hidden
    assert any("all lambda vectors are zero" in line for line in lines)


@pytest.mark.parametrize(
    "change, how, parts",
    [
        (lambda e: e.pop("y"), {}, ["lacks the input x or the output y"]),
        (lambda e: e.pop("lambda_k2"), {}, ["lack lambda_k2"]),
        (lambda e: [e.pop(name) for name in list(e) if name not in "xy"], {}, ["official code's names"]),
        (lambda e: e.update({"q_proj.bias": torch.zeros(C)}), {}, ["q_proj.bias"]),
        (lambda e: e.update(lambda_q1=torch.tensor(1.0)), {}, ["lambda_q1 has shape ()"]),
        (lambda e: e.update({"k_proj.weight": torch.ones(50, C), "v_proj.weight": torch.ones(50, C)}), {}, ["50"]),
        (lambda e: e["v_proj.weight"].fill_(torch.nan), {}, ["v_proj.weight", "not finite"]),
        (lambda e: e.update(y=e["y"][:, 1:]), {}, [f"({B}, {T}, {C})", f"({B}, {T - 1}, {C})"]),
        (lambda e: e.update(x=e["x"][..., : C // 2], y=e["y"][..., : C // 2]), {}, [f"({C}, {C})", f"({C // 2}, "]),
        (lambda e: e.update({"q_proj.weight": e["q_proj.weight"][: H * D // 2]}), {}, ["halved twice"]),
        (lambda e: None, {"n_head": 6}, ["halved twice", f"{D} values", f"heads of {2 * D}", "--n_head=12"]),
        (lambda e: None, {"n_head": 5}, ["n_head=5", "use 12"]),
        (lambda e: None, {"layer": -1}, ["--layer"]),
        (lambda e: e.update({"layers.3.q_proj.weight": torch.ones(2, 2)}), {}, ["layer=2", "layers, [-1, 3]"]),
        (lambda e: e.update(x="text"), {}, ["port.pt", "arrays by name"]),
        (lambda e: e.update(x=e["x"].to_sparse()), {}, ["port.pt", "arrays by name"]),
        (lambda e: e["y"].fill_(torch.nan), {}, ["nowhere a number"]),
        (lambda e: e["y"].zero_(), {}, ["y is zero everywhere"]),
        (lambda e: e["out_proj.weight"].zero_(), {}, ["puts out zeros", "random"]),
        (lambda e: [e[n].fill_(9e9) for n in ("lambda_q1", "lambda_k1")], {}, ["too large", "no finite output"]),
    ],
)  # fmt: skip
def test_what_does_not_fit_is_refused_in_a_sentence(change, how, parts, tmp_path):
    _, layer, rope, x = make("diff")
    file = saved(tmp_path, layer, rope, x, change=change)
    with pytest.raises(ValueError) as caught:
        check(CheckPortConfig(file, **{"layer": LAYER, **how}))
    assert all(part in str(caught.value) for part in parts), caught.value
    assert "\n" not in str(caught.value)


def run(monkeypatch, capsys, *args):
    """(exit code, printed) of the command line."""
    monkeypatch.setattr(sys, "argv", ["check_port", *args])
    with pytest.raises(SystemExit) as done:
        check_port.main()
    return done.value.code, capsys.readouterr().out


def test_command_line_and_callables(tmp_path, monkeypatch, capsys):
    monkeypatch.chdir(tmp_path)
    monkeypatch.syspath_prepend(tmp_path)  # as python -m does with the working folder
    (tmp_path / "my_port.py").write_text(
        "import torch, model\n"
        "cfg = model.GPTConfig(n_embd=32, n_head=4, init_std=0.3)\n"
        "attention = model.GPT(cfg).blocks[1].attn\n"
        "class Port(torch.nn.Module):\n"
        "    def __init__(self):\n"
        "        super().__init__()\n"
        "        self.attn = attention\n"
        "    def forward(self, x):\n"
        "        return self.attn(x, model.rope_table(cfg, 0, x.shape[1], x))\n"
        "right, wrong, pair = Port(), lambda x: -right(x), lambda x: (right(x), None)\n"
        "def writes(x): return x.copy_(right(x))\n"
        "def fails(x): return x @ x\n"
    )
    code, out = run(monkeypatch, capsys, "--callable=my_port:right", "--layer=1", "--n-head=4")
    assert code == 0 and out.startswith("agrees"), out
    import my_port

    arrays = {name: p.numpy() for name, p in my_port.attention.state_dict().items()}
    np.savez("port.npz", **arrays)
    code, out = run(monkeypatch, capsys, "port.npz", "--callable=my_port:writes", "--layer=1")
    assert code == 0 and out.startswith("agrees"), out
    code, out = run(monkeypatch, capsys, "port.npz", "--callable=my_port:wrong", "--layer=1")
    assert code == 1 and out.startswith("differs"), out
    for args, part in (
        ([], "--callable"),
        (["nope.npz"], "nope.npz is not a file"),
        (["--callable=my_port:nothing"], "nothing"),
        (["--callable=no_such_module:f"], "no_such_module"),
        (["--callable=.my_port:right"], "not package.module:name"),
        (["--callable=my_port:Port"], "not a class"),
        (["port.npz", "--callable=my_port:fails", "--layer=1"], "failed on x (RuntimeError"),
        (["port.npz", "--layer=1", "--rope_theta=0"], "rope_theta=0.0 must be greater than 0"),
        (["port.npz", "--layer=1"], "lacks the input x"),
        (["port.npz", "--layer=1", "--callable=my_port:pair"], "y alone, not a tuple"),
    ):
        code, _ = run(monkeypatch, capsys, *args)
        assert part in code and "\n" not in code
    for junk in (b"", b"hello", b"PK\x03\x04"):
        for name in ("junk.npz", "junk.pt"):
            (tmp_path / name).write_bytes(junk)
            code, _ = run(monkeypatch, capsys, name)
            assert f"{name} is not a .npz or torch file" in code
    torch.save({"x": Hook()}, "evil.pt")
    np.savez("evil.npz", x=Hook())
    for name in ("evil.pt", "evil.npz"):
        assert "is not a .npz or torch file" in run(monkeypatch, capsys, name)[0]
    assert not (tmp_path / "pwned").exists()


class Hook:
    def __reduce__(self):
        return (os.mkdir, ("pwned",))
