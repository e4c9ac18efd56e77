"""Inputs that broke comparable projects, and what happens to them here.

Tests name their rows of the list, "C01" to "C20" and numbers for reports; the other files have some of them too.
"""

import functools
import json
import math
import re
from pathlib import Path

import numpy as np
import pytest
import torch

import checkpoint
import device
import train as training
from config import PRESETS, TrainConfig
from data import stories, tokenizers
from generation import KVCache
from model import ATTENTIONS, GPT, GPTConfig, blocks, eager, fused
from report import duration, report
from run_log import read_log
from sample import SampleConfig, sample
from train import to_device, train


@pytest.fixture
def command(monkeypatch, capsys):
    """command(*args) -> (exit code, all that was said), of train.py with these words, in this process."""

    def run(*args):
        monkeypatch.setattr("sys.argv", ["train.py", *args])
        try:
            training.main()
            code = 0
        except SystemExit as stop:
            code, said = (stop.code, "") if isinstance(stop.code, int) else (1, stop.code)
            return code, said + "".join(capsys.readouterr())
        return code, "".join(capsys.readouterr())

    return run


@pytest.mark.parametrize(
    "args, code, parts",
    [
        (["--compile=false"], 1, ["compile='false'", "auto, on, off"]),  # C03
        (["--learning_rate"], 2, ["learning-rate"]),
        (["--n_layer=2.5"], 2, ["2.5", "n-layer"]),
        (["--resume=maybe"], 2, ["maybe"]),
        (["--batchsize=3"], 2, ["--batchsize", "--batch-size"]),  # C04, 11
        (["-h"], 0, ["--grad-checkpoint", f"default: {TrainConfig.max_iters}"]),
        (["--help"], 0, [f"--{name.replace('_', '-')}" for name in TrainConfig.__dataclass_fields__]),
        (["config/nope.py"], 2, ["config/nope.py"]),
        (["--init_from=foo"], 1, ["foo", "does not exist"]),
        (["--eval_interval=0"], 1, ["eval_interval=0", "at least 1"]),
        (["--n_embd=66", "--n_head=4"], 1, ["n_embd=66", "n_head=4", "use n_embd=64"]),  # 12
        (["--log_interval=0"], 1, ["log_interval=0"]),  # 14
        (["--batch_size=0"], 1, ["batch_size=0"]),
        (["--n_embd=0"], 1, ["n_embd=0"]),
        (["--block_size=0"], 1, ["block_size=0"]),
        (["--dtype=fp16"], 1, ["'fp16'", "float16"]),  # C13, 22
        (["--device=cuda:99"], 1, ["cuda:99", "cpu"]),
    ],
)
def test_command_line(args, code, parts, command, tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    got, said = command(*args)
    assert got == code and all(part in said for part in parts), said
    assert "Traceback" not in said and not list(tmp_path.iterdir())


def test_values_have_the_type_of_their_setting(command, tiny):
    """C03, C04, 11: whole numbers for fractions, numbers for folders, a space for the equals sign."""
    flags = [f"--{name}={getattr(tiny(), name)}" for name in ("dataset", "n_layer", "n_head", "n_embd", "block_size")]
    for out_dir in ("OUT/123", "2024"):
        code, said = command(*flags, "--learning_rate=1", "--max-iters", "0", "--device", "cpu", f"--out_dir={out_dir}")
        assert code == 0, said
        config = json.loads((Path(out_dir) / "config.json").read_text())
        assert config["learning_rate"] == 1.0 and config["out_dir"] == out_dir
    sample(SampleConfig(out_dir="2024", temperature=0, max_new_tokens=3))
    with pytest.raises(ValueError, match="n_layer=2.5 must be of type int"):
        train(tiny(n_layer=2.5))


def test_a_preset_is_no_flag_to_forget_on_resume(command, tiny):
    train(tiny(out_dir="run", max_iters=0))
    for flag in ("--resume", "--eval_only"):
        code, said = command(flag, "--out_dir=run", "--preset=gpu")
        assert code == 1 and "preset='gpu'" in said and "'laptop'" in said
        assert command(flag, "--out_dir=run", "--preset=laptop")[0] == 0


def test_stories_say_what_can_be_known_of_them(command, tiny, monkeypatch):
    """The default run, smaller: its entropy and what guessing gets right are said beside the loss."""
    few = stories.Difficulty(train_stories=60, val_stories=20)
    monkeypatch.setattr(TrainConfig, "difficulty", lambda self: few)
    small = [f"--{name}={getattr(tiny(), name)}" for name in ("n_layer", "n_head", "n_embd", "emb_std", "device")]
    code, said = command(*small, "--block_size=512", "--batch_size=2", "--max_iters=2", "--attention=standard")
    assert code == 0 and re.search(r"entropy of all stories 0\.\d{4}; answers right by guessing: \w+ \d+%", said), said
    loss = r"validation loss [56]\.\d{4} nats a token \(entropy 0\.\d{4}\), \d+\.\d% of answers right\n"
    assert re.search(loss, said) and "20 validation windows of stories" in said and said.rstrip().endswith("standard")


def test_durations():
    assert [duration(s) for s in (0.4, 119, 120, 7199, 7200)] == ["0 s", "119 s", "2.0 min", "120.0 min", "2.0 h"]


def test_the_command_starts_from_weights_and_stops_in_a_sentence(command, tiny, text_file):
    """Sizes of the model come from the run to start from; and what is in the way."""
    train(tiny(out_dir="run", max_iters=0))
    code, said = command("--init_from=run", "--max_iters=0", f"--dataset={text_file}", "--device=cpu", "--out_dir=new")
    assert code == 0 and checkpoint.read_config("new")["n_embd"] == tiny().n_embd, said
    code, said = command(f"--out_dir={text_file}/run", f"--dataset={text_file}", "--device=cpu")
    assert code == 1 and "train.py: " in said and "harbour.txt" in said and "Traceback" not in said
    code, said = command(f"--out_dir={text_file}", f"--dataset={text_file}", "--device=cpu")
    assert code == 1 and "is a file: name a folder" in said and "Traceback" not in said


def test_a_short_run_leaves_a_checkpoint(tiny):
    """C06, 16."""
    train(tiny(out_dir="run", max_iters=3, eval_interval=2000))
    assert checkpoint.load("run/ckpt.pt")["step"] == checkpoint.load("run/best.pt")["step"] == 3


def test_checkpoints_of_compiled_models(tiny, monkeypatch):
    """C07, 19: written by either, read by either; the same weights, under the same names."""

    def tried(model, *args):
        fast = device.compiled(model, *args)
        assert fast is not model and all(p.grad is None for p in model.parameters())  # nothing for the first update
        return fast

    monkeypatch.setattr(training, "compiled", tried)
    monkeypatch.setattr(torch, "compile", functools.partial(torch.compile, backend="eager"))  # all but the machine code
    half = dict(max_iters=2, lr_decay_iters=4, eval_windows=2)
    for name, modes in {"plain": ("off", "off"), "to": ("off", "on"), "from": ("on", "off")}.items():
        train(tiny(out_dir=name, compile=modes[0], **half))
        train(tiny(out_dir=name, compile=modes[1], **{**half, "max_iters": 4}, resume=True))
    plain, to, back = (checkpoint.load(f"{name}/ckpt.pt")["model"] for name in ("plain", "to", "from"))
    assert list(plain) == list(to) == list(back) == list(GPT(GPTConfig(n_layer=2)).state_dict())
    for name in plain:
        torch.testing.assert_close(plain[name], to[name])
        torch.testing.assert_close(plain[name], back[name])


def raised(error):
    """A function that raises it, whatever it is given."""

    def function(*_, **__):
        raise error

    return function


@pytest.mark.parametrize("at_once", [True, False])
def test_a_compiler_that_fails(at_once, tiny, monkeypatch, capsys):
    """24: a warning and no compiler under auto, a sentence and no run under on."""
    broken = raised(RuntimeError("no compiler\nin sight"))
    monkeypatch.setattr(torch, "compile", broken if at_once else lambda model: broken)
    gpt, idx = GPT(GPTConfig(n_layer=1)), torch.zeros(1, 8, dtype=torch.long)
    autocast = torch.autocast("cpu", enabled=False)
    assert device.compiled(gpt, (idx, idx), autocast, "auto") is gpt
    assert "warning: torch.compile failed (RuntimeError: no compiler in sight)" in capsys.readouterr().out
    with pytest.raises(ValueError, match="compile='on', but torch.compile failed .*no compiler.*--compile=off"):
        train(tiny(compile="on", out_dir="run"))
    assert not Path("run").exists() and all(p.grad is None for p in gpt.parameters())
    monkeypatch.setattr(torch, "compile", raised(torch.OutOfMemoryError("full")))
    with pytest.raises(torch.OutOfMemoryError):  # no fault of the compiler's
        device.compiled(gpt, (idx, idx), autocast, "auto")


def test_a_run_without_git_has_no_commit(monkeypatch):
    assert re.fullmatch("[0-9a-f]{40}(-dirty)?", device.made_with("cpu")["commit"] or "0" * 40)
    monkeypatch.setattr(device.subprocess, "run", raised(FileNotFoundError("git")))
    assert device.made_with("cpu")["commit"] is None


def test_a_learning_rate_that_explodes(tiny):
    """C08, 21: stopped, the update named, and the last good weights are there."""
    with pytest.raises(FloatingPointError, match=r"at update \d+.*run/best.pt"):
        train(tiny(out_dir="run", learning_rate=1e30, grad_clip=0.0, max_iters=30))
    state = checkpoint.load("run/best.pt")
    state["model"]["norm.weight"][0] = math.nan
    checkpoint.save("run/best.pt", **state)
    with pytest.raises(ValueError, match="run/best.pt has weights that are not finite"):
        sample(SampleConfig(out_dir="run"))


def test_devices_and_types(tiny, capsys, monkeypatch):
    """C13, 22, 23: what is used is said; memory is pinned for CUDA alone."""
    train(tiny(dtype="bfloat16", max_iters=1, out_dir="run"))
    assert "cpu, bfloat16" in capsys.readouterr().out
    if not torch.cuda.is_available():
        train(tiny(device="auto", max_iters=0, out_dir="auto"))
        sample(SampleConfig(out_dir="run", max_new_tokens=1))
        with pytest.raises(ValueError, match="device='cuda' is not on this machine: use auto or cpu"):
            train(tiny(device="cuda"))
    assert device.precision("cuda", "bfloat16", bf16_supported=False) == ("float16", True, True)
    with monkeypatch.context() as patch:  # a GPU without bfloat16
        patch.setattr(training, "precision", lambda *_: ("float16", False, False))
        train(tiny(dtype="bfloat16", max_iters=0, out_dir="old"))
        assert "warning: this GPU has no bfloat16 of its own: float16 instead" in capsys.readouterr().out
    for kind in ("cpu", "meta"):
        assert not to_device(np.zeros(3), torch.device(kind)).is_pinned()


@pytest.mark.parametrize("kind", ATTENTIONS)
def test_smallest_of_everything(kind, tiny):
    """14."""
    heads = ATTENTIONS[kind].head_multiple
    ones = dict(eval_windows=1, batch_size=1, block_size=1, n_layer=1, n_head=heads, n_embd=2 * heads, max_iters=2)
    train(tiny(attention=kind, **ones, log_interval=1, eval_interval=1, out_dir="run"))
    sample(SampleConfig(out_dir="run", max_new_tokens=4))


def test_mfu_is_that_of_a_known_device_in_sixteen_bits(tiny, monkeypatch, capsys):
    """31. Here the device without a name is known, a fast one."""
    monkeypatch.setitem(training.PEAK_FLOPS, "", 500e12)
    train(tiny(dtype="bfloat16", out_dir="known"))
    assert "cpu (500 TFLOP/s at best), bfloat16" in capsys.readouterr().out
    header, *lines = read_log("known")
    for line in (line for line in lines if "loss" in line):
        assert (
            line["mfu"] == pytest.approx(line["tokens_per_s"] * header["flops_per_token"] / 500e12) and line["mfu"] < 1
        )
    train(tiny(out_dir="float32"))
    assert not any("mfu" in line for line in read_log("float32"))


def test_a_pair_differs_in_its_attention_alone(tiny, capsys):
    """43, C20: parameters are said. The third of the row, half the heads of twice the size, has the standard's."""
    for kind in ("standard", "diff"):
        train(tiny(attention=kind, max_iters=0, out_dir=kind))
    a, b = (read_log(kind)[0]["params"] for kind in ("diff", "standard"))
    assert f"diff attention, {a:,} parameters (standard: {b:,})" in capsys.readouterr().out and a > b
    one, other = (json.loads(Path(f"{kind}/config.json").read_text()) for kind in ("standard", "diff"))
    assert {name for name in one if one[name] != other[name]} == {"attention", "out_dir"}
    sizes = {GPT(GPTConfig(attention="standard", n_head=n_head)).num_params() for n_head in (2, 4)}
    assert len(sizes) == 1


def test_time_left_is_said_after_ten_updates(tiny, capsys, monkeypatch):
    clock = iter(range(0, 10_000, 5))  # a look at the clock takes five seconds
    monkeypatch.setattr(training.time, "perf_counter", lambda: next(clock))
    train(tiny(max_iters=22, log_interval=100, eval_interval=100))
    (line,) = [line for line in capsys.readouterr().out.splitlines() if "left" in line]
    assert line == "update 10: about 60 s of training left"


def test_presets_have_the_parameters_that_they_promise():
    """Counted by hand: an embedding, and in each layer 4 C^2 of attention, three matrices of SwiGLU, gains, lambdas."""
    letters = tokenizers.CharTokenizer("".join(map(chr, range(32, 63)))).vocab_size
    vocab = {"laptop": letters, "long": letters, "shakespeare": 64, "gpu": 64, "gpt2": 50257, "paper": 50257}
    assert vocab.keys() == PRESETS.keys()
    for name, preset in PRESETS.items():
        cfg = TrainConfig(**preset)
        cfg.check()
        with torch.device("meta"):
            count = GPT(cfg.model_config(vocab[name])).num_params()
        C, D, hidden = cfg.n_embd, cfg.n_embd // cfg.n_head, round(8 * cfg.n_embd / 3)
        layer = 4 * C * C + 3 * C * hidden + 2 * C + 6 * D
        assert count == vocab[name] * C + cfg.n_layer * layer + C, name
    assert count == 756_761_088  # the paper's shape with GPT-2's vocabulary
    with torch.device("meta"):
        assert round(GPT(cfg.model_config(100_288)).num_params() / 1e6) == 834  # with its own: 830M
        assert round(GPT(TrainConfig(**PRESETS["gpt2"]).model_config(50257)).num_params() / 1e6) == 124


def test_edges_of_sampling(tiny, capsys):
    """C10, C11, 32, 33: what is the same choice gives the same text; what is none is refused by name."""
    train(tiny(out_dir="run", max_iters=1))
    size = checkpoint.load("run/ckpt.pt")["model_config"]["vocab_size"]
    capsys.readouterr()

    def text(**how):
        sample(SampleConfig(out_dir="run", max_new_tokens=30, **how))
        return capsys.readouterr().out

    greedy, free = text(temperature=0), text()
    assert greedy != free and len(text(temperature=1e308)) == len(free)
    for how in (dict(temperature=0.0), dict(temperature=1e-8), dict(top_k=1), dict(top_p=0.0)):
        assert text(**how, seed=3) == greedy, how
    for how in (dict(top_k=size), dict(top_k=size + 1), dict(top_k=100_000), dict(top_p=1.0)):
        assert text(**how) == free, how
    for name, values in {"temperature": (-1.0, math.inf, math.nan), "top_p": (-0.1, 1.5), "top_k": (-1,)}.items():
        for value in values:
            with pytest.raises(ValueError, match=f"{name}={value} must be"):
                text(**{name: value})


def test_a_long_prompt_counts_by_its_last_window():
    """C12."""
    gpt, seen = GPT(GPTConfig(block_size=8, n_layer=1)).eval(), []
    gpt.tok_emb.register_forward_pre_hook(lambda _, args: seen.append(args[0]))
    prompt = torch.arange(10_000)[None] % 64
    assert torch.equal(gpt.generate(prompt, 2)[:, :-2], prompt) and torch.equal(seen[0], prompt[:, -8:])


def test_a_text_without_a_new_line(tiny, capsys):
    """34: an empty prompt then starts with the first character."""
    Path("flat.txt").write_text("to be or not to be, " * 300)
    train(tiny(dataset="flat.txt", max_iters=1, out_dir="run"))
    capsys.readouterr()
    sample(SampleConfig(out_dir="run", max_new_tokens=9))
    assert set(capsys.readouterr().out) <= set("to be or not to be, \n")


@pytest.mark.parametrize("kind", ATTENTIONS)
@pytest.mark.parametrize("batch, prompt", [(1, 1), (1, 17), (3, 1), (3, 17)])
def test_cached_logits_in_float32(kind, batch, prompt):
    """C14, 36; in float64 and past the window: tests/test_model.py. 1e-5 is for logits up to 5: float32 rounds larger
    ones by more, with or without a cache, and the probabilities are as close with any."""
    x = torch.randint(64, (batch, prompt), generator=torch.Generator().manual_seed(0))
    for emb_std in (0.1, 0.5):  # logits up to 5 and to 41
        gpt = GPT(GPTConfig(block_size=80, n_layer=2, emb_std=emb_std, attention=kind)).eval()
        text = gpt.generate(x, 60, temperature=0)
        assert torch.equal(text, gpt.generate(x, 60, temperature=0, use_cache=False))
        caches, pieces = [KVCache(80) for _ in gpt.blocks], text.split([prompt] + [1] * 60, dim=1)
        cached, whole = torch.cat([gpt.lm_head(gpt.features(ids, caches)) for ids in pieces], dim=1), gpt(text)[0]
        torch.testing.assert_close(cached, whole, rtol=0, atol=1e-5 * emb_std / 0.1)
        torch.testing.assert_close(cached.softmax(dim=2), whole.softmax(dim=2), rtol=0, atol=1e-5)


@pytest.mark.parametrize("path", [eager, fused, blocks, None])
@pytest.mark.parametrize("kind", ATTENTIONS)
def test_no_logit_sees_a_later_token(kind, path):
    """C18, 28: of the whole model, by each path and with a cache; tests/test_attention.py has NumPy's too."""
    gpt = GPT(GPTConfig(block_size=16, n_layer=2, attention=kind)).eval()
    for block in gpt.blocks:
        block.attn.attend = path or block.attn.attend
    x = torch.arange(16)[None] * 5 % 64
    pieces = [16] if path else [4, 12]  # with a cache: 12 queries at once, after 4 keys

    def logits(x):
        caches = None if path else [KVCache(16) for _ in gpt.blocks]
        return gpt.lm_head(torch.cat([gpt.features(ids, caches) for ids in x.split(pieces, dim=1)], dim=1))

    before, after = logits(x), logits(x.index_fill(1, torch.tensor([10]), 63))
    assert torch.equal(before[:, :10], after[:, :10]) and (before != after)[:, 10:].any(dim=2).all()


@pytest.mark.parametrize("max_iters, decay", [(0, 0), (1, 0), (1, 1), (25, 10)])
@pytest.mark.parametrize("warmup", [0, 1, 10, 20])
def test_any_schedule(warmup, max_iters, decay):
    """C17, 25: at no length of warm-up and decay is a rate zero at first, beyond its bounds, or a division by zero."""
    cfg = TrainConfig(learning_rate=2.0, min_lr=0.5, warmup_iters=warmup, max_iters=max_iters, lr_decay_iters=decay)
    rates = [training.learning_rate(step, cfg) for step in range(25)]
    assert 0 < min(rates) and max(rates) == rates[warmup] == 2.0
    assert set(rates[max(warmup, decay or max_iters) + 1 :]) == {0.5}


def test_evaluation_is_that_of_any_batch_size(tiny):
    """29."""
    trained = train(tiny(out_dir="run", max_iters=2))["val_loss"]
    for batch_size in (1, 4, 8):
        again = train(tiny(out_dir="run", eval_only=True, batch_size=batch_size))["val_loss"]
        assert again == pytest.approx(trained, abs=1e-6)


def test_the_compiler_sees_one_shape(tiny, monkeypatch):
    """39: evaluation, maps and samples take the model as it is, so that nothing is compiled again."""
    seen = set()
    monkeypatch.setattr(
        torch, "compile", lambda model: lambda *batch: (seen.add((*batch[0].shape, model.training)), model(*batch))[1]
    )
    cfg = tiny(compile="on", gradient_accumulation_steps=2, eval_windows=7)
    report(cfg, train(cfg))
    assert seen == {(4, 24, True)}


# Each changes the weights, or what is measured. All other settings: of the model, see test_every_config_field_matters;
# of the stories, see test_data.py; of folders, devices, logs and going on, see the tests of train, memory and export.
CHANGES = dict(
    batch_size=2, gradient_accumulation_steps=2, learning_rate=1e-2, min_lr=1e-3, warmup_iters=0, lr_decay_iters=9,
    lr_schedule="cosine", weight_decay=9.0, beta1=0.5, beta2=0.5, grad_clip=0.01, max_iters=3, seed=1, data_seed=1,
    eval_windows=3, eval_interval=2, log_interval=1, dtype="bfloat16", tokenizer="bpe", bpe_vocab_size=260,
)  # fmt: skip
ELSEWHERE = {
    *GPTConfig.__dataclass_fields__, *stories.Difficulty.__dataclass_fields__, "dataset", "out_dir", "device",
    "compile", "grad_checkpoint", "resume", "init_from", "eval_only", "preset", "log",
}  # fmt: skip


def test_every_setting_matters(tiny):
    """47: none is there for show."""
    assert TrainConfig.__dataclass_fields__.keys() == CHANGES.keys() | (
        ELSEWHERE & TrainConfig.__dataclass_fields__.keys()
    )

    def run(name, **changes):
        train(tiny(**{**dict(n_layer=1, block_size=8, max_iters=4, warmup_iters=1), **changes}, out_dir=name))
        measured = [(line["step"], line.get("val_loss"), line.get("loss")) for line in read_log(name)[1:]]
        return measured, checkpoint.load(f"{name}/ckpt.pt")["model"]["norm.weight"].tolist()

    base, bpe = run("base"), run("bpe", tokenizer="bpe")
    for name, value in CHANGES.items():
        own = dict(tokenizer="bpe") if name == "bpe_vocab_size" else {}
        assert run(name, **own, **{name: value}) not in (base, bpe if own else base), name
