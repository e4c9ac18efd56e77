"""Exported models answer as they did here: transformers, in both directions, and ONNX.

DiffLlama is somebody else's implementation of the paper: where it agrees with `diff`, the two confirm each other.
"""

import json
import random
import shutil
from dataclasses import replace
from pathlib import Path

import pytest
import torch
from hypothesis import example, given
from hypothesis import strategies as st

import checkpoint
import data
import llama
from config import TrainConfig
from data import fast_tokenizers
from data.tokenizers import BPETokenizer, CharTokenizer
from export import ExportConfig, export, main
from model import ATTENTIONS
from sample import SampleConfig, sample
from train import evaluate, train

transformers = pytest.importorskip("transformers")
transformers.logging.set_verbosity_error()
transformers.logging.disable_progress_bar()

# name -> what it trains with: heads that share keys or not, embeddings tied or not, both tokenizers
SHAPES = {
    "all": dict(n_kv_head=0, tie_embeddings=True, tokenizer="char"),
    "grouped": dict(
        n_kv_head=4, tie_embeddings=False, tokenizer="bpe", bpe_vocab_size=300, rope_theta=3000.0, init_std=0.08
    ),
}


@pytest.fixture(scope="module")
def runs(text_file, tmp_path_factory):
    """A folder with, for each kind and shape, a run KIND-SHAPE and what it became in transformers, KIND-SHAPE-there."""
    root = tmp_path_factory.mktemp("runs")
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(data, "CACHE", root / "cache")
        for kind in llama.TYPES:
            for name, shape in SHAPES.items():
                run = root / f"{kind}-{name}"
                train(
                    TrainConfig(
                        attention=kind, dataset=str(text_file), n_layer=2, n_head=8, n_embd=64, block_size=128,
                        batch_size=2, max_iters=20, eval_interval=20, eval_windows=4, warmup_iters=2,
                        learning_rate=1e-2, device="cpu", out_dir=str(run), **shape,
                    )
                )  # fmt: skip
                export(ExportConfig(str(run), to="transformers", out=f"{run}-there"))
        yield root


def opened(run):
    state = checkpoint.load(checkpoint.find(run))
    return checkpoint.load_model(state), data.tokenizers.from_dict(state["tokenizer"])


def opened_there(folder):
    model = transformers.AutoModelForCausalLM.from_pretrained(folder)
    return model, transformers.AutoTokenizer.from_pretrained(folder)


def windows_of(run, text_file):
    cfg = TrainConfig(**checkpoint.read_config(run))
    return data.load(str(text_file), cfg.tokenizer, cfg.bpe_vocab_size).val_windows(4, cfg.block_size)


def assert_same(ours, theirs, windows):
    """Logits, 100 greedy tokens, the loss that transformers computes itself."""
    x, y = (torch.from_numpy(a) for a in windows[:2])
    with torch.no_grad():
        torch.testing.assert_close(theirs(x).logits, ours(x)[0], rtol=0, atol=1e-4)
        whole = torch.cat((x, y[:, -1:]), dim=1)  # it shifts the targets by one
        loss = theirs(whole, labels=whole).loss.item()
    assert loss == pytest.approx(evaluate(ours, windows, 4, "cpu")[0], abs=1e-4)
    prompt = x[:2, :9]
    there = theirs.generate(prompt, max_new_tokens=100, do_sample=False, attention_mask=torch.ones_like(prompt))
    assert there.shape == (2, 109) and torch.equal(ours.eval().generate(prompt, 100, temperature=0), there)


@pytest.mark.parametrize("shape", SHAPES)
@pytest.mark.parametrize("kind", llama.TYPES)
def test_there_and_back(kind, shape, runs, text_file, capsys):
    run, there, back = (f"{runs}/{kind}-{shape}{end}" for end in ("", "-there", "-back"))
    windows = windows_of(run, text_file)
    ours, tokenizer = opened(run)
    theirs, fast = opened_there(there)
    gains = [p for name, p in ours.named_parameters() if "norm" in name or "subln" in name]
    assert min((gain - 1).abs().max() for gain in gains) > 0.02, "not trained enough to see a gain that was lost"
    assert type(theirs).__name__ == {"standard": "LlamaForCausalLM", "diff": "DiffLlamaForCausalLM"}[kind]
    assert_same(ours, theirs, windows)
    assert theirs.generation_config.bos_token_id == tokenizer.first()[0] and theirs.config.eos_token_id is None
    text = "the harbour\n\n at dawn"
    assert fast(text)["input_ids"] == tokenizer.encode(text).tolist()
    assert {p.name for p in Path(there).iterdir()} >= {"config.json", "model.safetensors", "tokenizer.json"}

    export(ExportConfig(there, from_="transformers", out=back))
    again, same_tokenizer = opened(back)
    assert replace(again.cfg, emb_std=ours.cfg.emb_std) == ours.cfg  # theirs do not know how ours began
    assert same_tokenizer.to_dict() == tokenizer.to_dict()
    assert_same(again, theirs, windows)
    how = {name: value for name, value in checkpoint.read_config(back).items() if name != "dataset"}
    loss = train(TrainConfig(**how | dict(dataset=str(text_file), out_dir=back, eval_only=True, eval_windows=4)))[
        "val_loss"
    ]
    assert loss == pytest.approx(evaluate(ours, windows, 4, "cpu")[0], abs=1e-4)
    more = dict(dataset=str(text_file), out_dir=f"{back}-on", init_from=back, max_iters=1, eval_windows=4, device="cpu")
    assert train(TrainConfig(**how | more))["history"][0][1] == pytest.approx(loss, abs=1e-4)
    capsys.readouterr()
    sample(SampleConfig(out_dir=back, max_new_tokens=5, start="the", device="cpu"))
    assert capsys.readouterr().out.startswith("the")


@pytest.mark.parametrize("kv_heads", [8, 4, 2])
def test_their_random_model_here(kv_heads, tmp_path, monkeypatch):
    """Built and filled by transformers, with nothing of this project."""
    monkeypatch.chdir(tmp_path)
    tokenizer = CharTokenizer("\nabcdefghijklmnopqrstuvwxyz ")
    config = transformers.DiffLlamaConfig(
        vocab_size=28, hidden_size=48, intermediate_size=128, num_hidden_layers=3, num_attention_heads=8,
        num_key_value_heads=kv_heads, max_position_embeddings=128, initializer_range=0.2, lambda_std_dev=0.5,
        tie_word_embeddings=kv_heads == 4, rope_theta=500.0, eos_token_id=None,
    )  # fmt: skip
    torch.manual_seed(0)
    theirs = transformers.AutoModelForCausalLM.from_config(config).eval()
    for name, p in theirs.named_parameters():
        if "norm" in name:
            torch.nn.init.uniform_(p, 0.5, 1.5)
    theirs.save_pretrained("there")
    fast = transformers.PreTrainedTokenizerFast(tokenizer_object=fast_tokenizers.to_fast(tokenizer))
    fast.save_pretrained("there")
    assert export(ExportConfig("there", from_="transformers")) == Path("runs/there")
    x = torch.randint(28, (4, 128), generator=torch.Generator().manual_seed(1)).numpy()
    assert_same(opened("runs/there")[0], theirs, (x[:, :-1], x[:, 1:], x[:, 1:] * 0 - 1))


def neighbours_kept(model, original=llama.their_weights):
    """The permutation forgotten."""
    weights = original(model)
    return weights | {llama.their_name(k): w for k, w in model.state_dict().items() if "k_proj" in k}


def gain_forgotten(model, original=llama.their_weights):
    return original(model) | {llama.their_name(k): w for k, w in model.state_dict().items() if "out_proj" in k}


@pytest.mark.parametrize("mistake", [neighbours_kept, gain_forgotten])
def test_a_mistake_is_seen_and_writes_nothing(mistake, runs, tmp_path, monkeypatch):
    monkeypatch.setattr(llama, "their_weights", mistake)
    with pytest.raises(ValueError, match="the logits differ by .* nothing was written"):
        export(ExportConfig(f"{runs}/diff-grouped", to="transformers", out=str(tmp_path / "there")))
    assert not list(tmp_path.iterdir())


# --- Tokenizers ------------------------------------------------------------------------------

TEXT = "a b\n\n  ab abab don't 1234567  \t tabs\u2003é\u0301 naïve \U0001f600\U0001f680 你好!!?\x00\r\n"


def wild(rng):
    """Byte pairs that no training would learn: tokens that merges alone never reach, and many ways to make one."""
    letters = [b"a", b"b", b" ", *(bytes([b]) for b in "é".encode())]
    tokens = [bytes([byte]) for byte in range(256)] + [b"xy", b"wx", b"yz", b"wxyz"]  # x and y join first
    while len(tokens) < 320:
        token = b"".join(rng.choices(letters + tokens[260:], k=2))
        tokens += [token] * (token not in tokens and len(token) < 9)
    return BPETokenizer(tokens)


PAIRS, CHARS = wild(random.Random(0)), CharTokenizer(TEXT)
FAST = {tokenizer: fast_tokenizers.to_fast(tokenizer) for tokenizer in (PAIRS, CHARS)}


@given(st.text("ab é") | st.text(st.sampled_from(TEXT)) | st.text())
@example(TEXT)
@example("wxyz")
def test_byte_pairs_are_the_same(text):
    ids = PAIRS.encode(text).tolist()
    assert FAST[PAIRS].encode(text).ids == ids and FAST[PAIRS].decode(ids) == text


@given(st.text(st.sampled_from(TEXT)))
@example(TEXT)
def test_characters_are_the_same(text):
    ids = CHARS.encode(text).tolist()
    assert FAST[CHARS].encode(text).ids == ids and FAST[CHARS].decode(ids) == text


def test_an_unknown_character_is_an_error_there_too():
    for encode in (CHARS.encode, FAST[CHARS].encode):
        with pytest.raises(Exception, match="the vocabulary"):
            encode("a z")


@pytest.mark.parametrize("tokenizer", FAST)
def test_only_our_own_tokenizers_come_back(tokenizer, tmp_path):
    path, fast = tmp_path / "tokenizer.json", fast_tokenizers.to_fast(tokenizer)
    fast.save(str(path))
    assert fast_tokenizers.load(path).to_dict() == tokenizer.to_dict()
    fast.add_special_tokens(["<end>"])
    fast.save(str(path))
    with pytest.raises(ValueError, match="neither characters nor byte pairs"):
        fast_tokenizers.load(path)


# --- ONNX ------------------------------------------------------------------------------------


@pytest.mark.parametrize("kind", ATTENTIONS)
def test_onnx(kind, tiny):
    onnxruntime = pytest.importorskip("onnxruntime")
    train(tiny(attention=kind, n_layer=1, n_kv_head=2, max_iters=3, out_dir="run"))
    path = export(ExportConfig("run", to="onnx"))
    assert path == Path("run/model.onnx")
    session, model = onnxruntime.InferenceSession(path), opened("run")[0]
    assert session.get_inputs()[0].shape == ["batch", "length"]
    for shape in ((1, 1), (5, 24), (2, 61)):
        ids = torch.randint(model.cfg.vocab_size, shape)
        logits = torch.from_numpy(session.run(["logits"], {"ids": ids.numpy()})[0])
        torch.testing.assert_close(logits, model(ids)[0], rtol=0, atol=1e-4)


# --- Mistakes of the user --------------------------------------------------------------------


@pytest.mark.parametrize(
    "kind, change, parts",
    [
        ("standard", dict(hidden_act="gelu"), ["hidden_act='gelu'", "'silu'"]),
        ("standard", dict(rms_norm_eps=1e-6), ["rms_norm_eps=1e-06", "1e-05"]),
        ("diff", dict(attention_bias=True), ["attention_bias=True"]),
        ("standard", dict(mlp_bias=True), ["mlp_bias=True"]),
        ("standard", dict(head_dim=16), ["head_dim=16", "have 8"]),
        ("diff", dict(intermediate_size=172), ["intermediate_size=172", "have 171"]),
        ("diff", dict(num_attention_heads=7), ["n_head=7"]),
        ("diff", dict(num_key_value_heads=1), ["n_kv_head=1", "even"]),
        ("standard", dict(vocab_size=99), ["embed_tokens"]),
        ("standard", dict(num_hidden_layers=3), ["model.layers.2"]),
        ("standard", dict(num_hidden_layers=1), ["model.layers.1"]),
        ("standard", dict(model_type="mistral"), ["model_type='mistral'", "llama"]),
        ("standard", dict(model_type="nope"), ["there cannot be read"]),
        (
            "standard",
            dict(rope_parameters={"rope_type": "linear", "factor": 2.0, "rope_theta": 1e4}),
            ["rope_parameters=", "'linear'"],
        ),
    ],
)
def test_other_folders_are_refused_by_name(kind, change, parts, runs, tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    shutil.copytree(f"{runs}/{kind}-all-there", "there")
    config = json.loads(Path("there/config.json").read_text())
    Path("there/config.json").write_text(json.dumps(config | change))
    with pytest.raises(ValueError) as caught:
        export(ExportConfig("there", from_="transformers"))
    assert all(part in str(caught.value) for part in parts), caught.value
    assert "\n" not in str(caught.value) and not Path("runs").exists()


@pytest.mark.parametrize("name", ["config.json", "tokenizer.json", "model.safetensors"])
def test_damaged_folders_are_refused(name, runs, tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    shutil.copytree(f"{runs}/standard-all-there", "there")
    for damage in (lambda path: path.write_bytes(path.read_bytes()[:100]), Path.unlink):
        damage(Path("there") / name)
        with pytest.raises(ValueError, match="^there") as caught:
            export(ExportConfig("there", from_="transformers"))
        assert "\n" not in str(caught.value) and not Path("runs").exists()


def test_refusals_of_the_way_out(tiny, monkeypatch):
    run = train(tiny(attention="diff_v2", max_iters=0))["out_dir"]
    for how, message in (
        (dict(to="transformers"), "transformers has no class for attention='diff_v2'"),
        (dict(to="pickle"), "--to=transformers, --to=onnx and --from=transformers"),
        (dict(to="onnx", from_="transformers"), "--to=transformers, --to=onnx and --from=transformers"),
        (dict(), "--to=transformers, --to=onnx and --from=transformers"),
        (dict(to="onnx", out=run), "exists already"),
    ):
        with pytest.raises(ValueError, match=message):
            export(ExportConfig(run, **how))
    monkeypatch.setattr("importlib.util.find_spec", lambda name: None)
    with pytest.raises(ValueError, match="onnx, onnxscript, onnxruntime .*: pip install onnx onnxscript onnxruntime"):
        export(ExportConfig(run, to="onnx"))
    assert not list(Path(run).glob("*onnx*"))


def test_a_tokenizer_of_another_size_is_refused(runs, tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    shutil.copytree(f"{runs}/standard-all-there", "there")
    shutil.copy(f"{runs}/standard-grouped-there/tokenizer.json", "there")
    with pytest.raises(ValueError, match=r"there has vocab_size=\d+, but a tokenizer of \d+"):
        export(ExportConfig("there", from_="transformers"))


def test_command_line(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    for args, message in (
        (["nowhere", "--to=onnx"], "nowhere/best.pt does not exist"),
        (["--to=onnx"], "no run in runs"),
    ):
        monkeypatch.setattr("sys.argv", ["export.py", *args])
        with pytest.raises(SystemExit, match=f"^export.py: {message}"):
            main()
