"""Whatever a user types or brings, the outcome is a right result or one clear sentence, never another exception.

pytest tests/test_fuzz.py                             # a few hundred examples, always the same
pytest tests/test_fuzz.py --hypothesis-profile=long   # over ten thousand, new ones each time; the profiles: conftest.py
"""

import base64
import contextlib
import io
import json
import math
import shutil
import sys
import traceback
from dataclasses import fields, replace
from pathlib import Path

import numpy as np
import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

import checkpoint
import data
import sample
import train as training
from config import TrainConfig
from data import tokenizers
from train import train

ROOT = Path(__file__).parent.parent
CHARACTERS = st.characters(codec="utf-8")
ERRORS = (ValueError, OSError, FloatingPointError)  # what the commands turn into a sentence


def sentence(error):
    """Asserts that an error is one line, and the system's or one that this project raises on purpose."""
    text, source = str(error), traceback.extract_tb(error.__traceback__)[-1]
    assert text.strip() and "\n" not in text, repr(error)
    ours = Path(source.filename).is_relative_to(ROOT) and source.line.startswith("raise")
    assert ours or isinstance(error, OSError), f"{error!r} comes from {source}"


@pytest.fixture(scope="module", autouse=True)
def folder(tmp_path_factory):
    """A working folder with a text and two trained runs, of characters and of byte pairs, for all examples."""
    folder = tmp_path_factory.mktemp("fuzz")
    with pytest.MonkeyPatch.context() as patch, quiet():
        patch.chdir(folder)
        patch.setattr("data.CACHE", folder / "cache")
        Path("text.txt").write_text("the cat sat on the mat, and the other cat sat on the hat.\n" * 20)
        for kind in ("char", "bpe"):
            train(TrainConfig(**{**TINY, "tokenizer": kind, "bpe_vocab_size": 270, "out_dir": kind}))
        yield folder


TINY = dict(
    dataset="text.txt", n_layer=1, n_head=2, n_embd=8, block_size=8, batch_size=2, max_iters=2, eval_interval=2,
    eval_windows=2, log_interval=1, warmup_iters=1, device="cpu",
)  # fmt: skip


@contextlib.contextmanager
def quiet():
    """What is printed goes nowhere; yields where it went."""
    out = io.TextIOWrapper(io.BytesIO(), encoding="utf-8", write_through=True)
    with contextlib.redirect_stdout(out), contextlib.redirect_stderr(out):
        yield out


# --- Command lines ---------------------------------------------------------------------------

VALUES = st.sampled_from(
    "0 1 2 3 -1 -0.0 0.5 1e-320 1e400 nan -inf 1_000 0x10 9999999999999999999999 True off auto cuda cpu char bpe diff"
    " standard stories text.txt char/ckpt.pt no/such FILE:- = -- --help --attention -h".split()
) | st.text(st.characters(codec="utf-8", exclude_characters="\0"), max_size=8)


def arguments(config):
    """Flags of a config, well and badly spelled, with values that fit, with others, and with none."""
    name = st.sampled_from([f.name for f in fields(config)])
    name = name | name.map(lambda name: name.replace("_", "-")) | name.map(lambda name: name[:-1]) | name.map(str.upper)
    flag = name.map("--{}".format)
    pair = st.tuples(flag, VALUES)
    words = pair.map("=".join).map(lambda word: [word]) | pair.map(list) | flag.map(lambda word: [word])
    return st.lists(words, max_size=4).map(lambda lists: sum(lists, []))


class Parsed(Exception):
    """Raised where the command would begin its work."""


def outcome(module, name, args):
    """Runs a script's main as far as its settings have been checked."""

    def stand_in(cfg, *_):
        cfg.check()
        raise Parsed

    with pytest.MonkeyPatch.context() as patch, quiet() as out:
        patch.setattr(module, name, stand_in)
        patch.setattr(sys, "argv", [f"{name}.py", *args])
        patch.setattr(sys, "stdin", io.TextIOWrapper(io.BytesIO()))
        try:
            module.main()
        except Parsed:
            return
        except SystemExit as done:
            if isinstance(done.code, str):
                sentence(done.__context__)
            else:
                assert done.code in (0, 2), done.code
                assert out.buffer.getvalue(), "it ended without a word"


@given(arguments(TrainConfig))
def test_command_lines_of_train(args):
    outcome(training, "train", args)


@given(arguments(sample.SampleConfig))
def test_command_lines_of_sample(args):
    outcome(sample, "sample", args)


JSON = st.none() | st.booleans() | st.integers(-2, 9) | st.floats() | st.text(max_size=3) | st.just([]) | st.just({})
NAMES = st.sampled_from([f.name for f in fields(TrainConfig)] + ["n_layers"])


@given(st.dictionaries(NAMES, JSON, max_size=2).map(json.dumps).map(str.encode) | st.binary(max_size=9))
def test_configs_of_runs(raw):
    Path("char/config.json").write_bytes(raw)
    outcome(training, "train", ["--resume", "--out_dir=char"])


# --- Settings: a run of some updates, and perhaps going on with it ---------------------------

SETTINGS = dict(
    attention=["standard", "diff", "diff_v2", "Diff"], n_layer=[0, 1, 2], n_head=[0, 1, 2, 3, 4], n_kv_head=[-1, 1, 2],
    n_embd=[0, 4, 8, 12, 13], block_size=[0, 1, 2, 9, 2000], dropout=[-0.1, 0.5, 0.99, 1.0], init_std=[0.0, 1e38],
    rope_theta=[0.0, 1e-300, 1.0, 1e300], tie_embeddings=[True, False], dataset=["text.txt", "none.txt", "."],
    tokenizer=["char", "bpe", ""], bpe_vocab_size=[256, 257, 300, 10**6], max_iters=[-1, 0, 1, 3], batch_size=[0, 1, 3],
    gradient_accumulation_steps=[0, 1, 2], learning_rate=[0.0, 1e-3, 1.0, 1e30, math.nan], min_lr=[0.0, 1e-4, math.inf],
    warmup_iters=[0, 1, 5], lr_decay_iters=[0, 1, 9], lr_schedule=["cosine", "none"], weight_decay=[0.0, 1e10],
    beta1=[0.0, 0.9, 1.0], beta2=[0.0, 0.999, -1.0], grad_clip=[0.0, 1e-30, 1.0], eval_interval=[0, 1, 2, 9],
    eval_windows=[0, 1, 5], log_interval=[0, 1, 7], seed=[-1, 0, 2**32 - 1, 2**32], data_seed=[0, 2**32 - 1, 2**63],
    dtype=["auto", "bfloat16", "float16", "fp16"], init_from=["", "char", "bpe", "text.txt"], people=[0, 2, 99],
)  # fmt: skip
CHANGES = [(name, value) for name, values in SETTINGS.items() for value in values]


@given(st.lists(st.sampled_from(CHANGES), max_size=6).map(dict), st.none() | st.sampled_from([0, 2, 4]))
def test_settings(changes, more_iters):
    cfg = TrainConfig(**{**TINY, "out_dir": "new", **changes})
    try:
        with quiet():
            result = train(cfg)
            if more_iters is not None:
                result = train(replace(cfg, resume=True, max_iters=more_iters))
        assert np.isfinite([result["val_loss"], result["best_val_loss"]]).all()
    except ERRORS as error:
        sentence(error)
    finally:
        shutil.rmtree("new", ignore_errors=True)


# --- Texts -----------------------------------------------------------------------------------

ENCODINGS = ["utf-8", "utf-8-sig", "utf-16", "utf-16-le", "latin-1", "cp1252"]
ODD = [
    "\r\n",
    "\r",
    "\n",
    "\0",
    "\ufeff",
    "\u2028",
    "\x85",
    "e\u0301",
    "\U0010ffff",
    "\U0001f469\u200d\U0001f680",
    "a line " * 6000,
]
PIECES = st.text(CHARACTERS, max_size=30) | st.sampled_from(ODD)
TEXTS = st.lists(PIECES, max_size=8).map("".join)
FILES = st.binary(max_size=60) | st.tuples(TEXTS, st.sampled_from(ENCODINGS)).map(
    lambda pair: pair[0].encode(pair[1], errors="replace")
)


@given(FILES, st.sampled_from(["char", "bpe"]), st.integers(1, 40), st.integers(0, 3))
def test_texts(raw, tokenizer, block_size, step):
    Path("bring.txt").write_bytes(raw)
    try:
        dataset = data.load("bring.txt", tokenizer, 260)
        x, y = dataset.batch(step, 3, block_size, seed=0)
        val_x, val_y, _ = dataset.val_windows(5, block_size)
    except ERRORS as error:
        return sentence(error)
    text = raw.decode("utf-8-sig").replace("\r\n", "\n").replace("\r", "\n")
    assert b"".join(dataset.tokenizer.decode_bytes(dataset.tokens(s)) for s in ("train", "val")).decode() == text
    assert x.shape == y.shape == (3, block_size) and val_x.shape == val_y.shape and val_x.shape[1] == block_size
    assert (x[:, 1:] == y[:, :-1]).all() and max(x.max(), y.max(), val_x.max()) < dataset.tokenizer.vocab_size
    shutil.rmtree(dataset.folder)


# --- Checkpoints -----------------------------------------------------------------------------


@given(st.data())
def test_damaged_checkpoints(choose):
    """A file with bytes changed, cut off, put in or left out is refused, or still is the one that was saved."""
    whole = Path("char/ckpt.pt").read_bytes()
    raw, place, few = bytearray(whole), st.integers(0, len(whole) - 1), st.binary(min_size=1, max_size=4)
    for _ in range(choose.draw(st.integers(1, 3))):
        start, new = choose.draw(place), choose.draw(few)
        how = choose.draw(st.sampled_from(["change", "change", "change", "cut", "put in", "leave out"]))
        end = {"cut": len(raw), "put in": start, "leave out": start + len(new), "change": start + len(new)}[how]
        raw[start:end] = new if how in ("change", "put in") else b""
    Path("bring.pt").write_bytes(raw)
    try:
        state = checkpoint.load("bring.pt")
    except ValueError as error:
        return sentence(error)
    saved = checkpoint.load("char/ckpt.pt")
    assert all(torch.equal(state["model"][name], saved["model"][name]) for name in saved["model"])
    assert repr(state["optimizer"]) == repr(saved["optimizer"])
    assert {**state, "model": 0, "optimizer": 0} == {**saved, "model": 0, "optimizer": 0}


# --- Prompts ---------------------------------------------------------------------------------

NUMBERS = dict(
    num_samples=[0, 2, 2**40], max_new_tokens=[-1, 0, 1, 12], top_k=[-1, 0, 1, 3, 10**6, 2**40], latest=[False, True],
    temperature=[-1.0, -0.0, 0.0, 1e-320, 1e-8, 1.0, 1e308, math.inf, math.nan], seed=[-1, 0, 2**32 - 1, 2**32],
    top_p=[-1.0, 0.0, 1e-300, 0.5, 1.0, 1.5, math.nan], out_dir=["char", "bpe", "nowhere", "text.txt"],
)  # fmt: skip
CHOICES = [(name, value) for name, values in NUMBERS.items() for value in values]
FILENAMES = st.text(st.characters(codec="utf-8", exclude_characters="\0"), max_size=9).map("FILE:{}".format)
NAMED = st.sampled_from(["FILE:bring.txt", "FILE:-"]) | FILENAMES
PROMPTS = st.text("the cat sat on the mat.\n") | TEXTS | NAMED


@given(st.lists(st.sampled_from(CHOICES), max_size=3).map(dict), PROMPTS, FILES)
def test_prompts(numbers, start, raw):
    Path("bring.txt").write_bytes(raw)
    cfg = sample.SampleConfig(**{"max_new_tokens": 5, "device": "cpu", "out_dir": "char", **numbers, "start": start})
    with quiet() as out, pytest.MonkeyPatch.context() as patch:
        patch.setattr(sys, "stdin", io.TextIOWrapper(io.BytesIO(raw)))
        try:
            sample.sample(cfg)
        except ERRORS as error:
            return sentence(error)
    text = raw.decode("utf-8-sig") if start in ("FILE:-", "FILE:bring.txt") else start
    prompt = text.removeprefix("\ufeff").replace("\r\n", "\n")
    assert out.buffer.getvalue().decode().split("\n", 1)[1].startswith(prompt)
    assert cfg.out_dir == "bpe" or set(prompt) <= set(checkpoint.load("char/ckpt.pt")["tokenizer"]["chars"])


# --- Folders of token files and their vocabularies -------------------------------------------

CHARS = st.text("abc \n", max_size=6) | st.text(CHARACTERS, max_size=4)
WORDS = st.lists(st.binary(max_size=3).map(lambda raw: base64.b64encode(raw).decode()), max_size=3)
BYTES = [base64.b64encode(bytes([b])).decode() for b in range(256)]
VOCABULARIES = st.one_of(
    st.fixed_dictionaries({"kind": st.just("char"), "chars": CHARS | CHARS.map(lambda c: "".join(sorted(set(c))))}),
    st.fixed_dictionaries({
        "kind": st.just("bpe"), "tokens": WORDS | WORDS.map(BYTES.__add__),
        "pattern": st.sampled_from([tokenizers.PATTERN, ".", "(", "x", "[^x]+|x"]),
    }),
    st.dictionaries(st.sampled_from(["kind", "chars", "tokens", "pattern"]), JSON | st.just("bpe"), max_size=3),
)  # fmt: skip
WHOLE = st.sampled_from([
    {"kind": "char", "chars": "\n abc"}, {"kind": "bpe", "tokens": [*BYTES, "YWI="], "pattern": tokenizers.PATTERN},
])  # fmt: skip
DESCRIBED = WHOLE | VOCABULARIES | JSON
METAS = DESCRIBED.map(lambda d: json.dumps({"tokenizer": d, "lines": bool(d)}).encode()) | st.binary(max_size=9)
ids = lambda most, **how: st.lists(st.integers(0, most), **how).map(lambda ids: np.array(ids, np.uint16).tobytes())  # noqa: E731
IDS, SMALL = ids(300, max_size=60), ids(4, min_size=4, max_size=20)
HEADS = st.tuples(st.sampled_from([20240520, 0]), st.integers(-1, 2), st.integers(-1, 70))
SHARDS = st.tuples(HEADS, IDS).map(lambda pair: np.int32(pair[0]).tobytes().ljust(1024) + pair[1])
FILES_OF_IDS = SMALL | SMALL | SMALL | IDS | SHARDS | st.binary(max_size=60)


@given(METAS, FILES_OF_IDS, FILES_OF_IDS, st.sampled_from(["train.bin", "x_train_000.bin"]))
def test_token_files_and_vocabularies(meta, train, val, name):
    """What they hold comes back as it is, or a sentence says what is wrong with them."""
    shutil.rmtree("folder", ignore_errors=True)
    Path("folder").mkdir()
    for file, raw in {"meta.json": meta, name: train, name.replace("train", "val"): val}.items():
        Path("folder", file).write_bytes(raw)
    try:
        dataset = data.load("folder")
        x, y = dataset.batch(step=0, batch_size=2, block_size=3, seed=0)
        dataset.val_windows(2, 60)
    except ERRORS as error:
        return sentence(error)
    ids = dataset.tokens("train")
    assert ids.tobytes() == (train[1024:] if dataset.files["train"][0][1] else train)
    assert (x[:, 1:] == y[:, :-1]).all() and y.max() < dataset.tokenizer.vocab_size
    text = dataset.tokenizer.decode_bytes(x[0].tolist())
    entries = json.loads(meta)["tokenizer"]
    parts = entries["chars"] if entries["kind"] == "char" else [base64.b64decode(token) for token in entries["tokens"]]
    assert text == b"".join(p.encode() if isinstance(p, str) else p for p in (parts[i] for i in x[0]))
