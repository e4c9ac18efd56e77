"""What comes from elsewhere is data, never code, and stays in its folder. One test for each promise."""

import ast
import io
import json
import tarfile
from dataclasses import asdict, replace
from pathlib import Path

import pytest
import torch
from test_corpora import archive

import checkpoint
import data
from config import TrainConfig
from data import corpora, tokenizers
from train import train

ROOT = Path(__file__).parent.parent
SOURCES = [path for folder in (".", "data", "experiments") for path in sorted((ROOT / folder).glob("*.py"))]


def calls(path):
    """(name, call) of every call in a file: "eval", "torch.load", .."""
    for node in ast.walk(ast.parse(path.read_text(encoding="utf-8"))):
        if isinstance(node, ast.Call):
            yield ast.unparse(node.func), node


def test_nothing_is_executed_or_unpickled():
    """Report 20. No call could run code that a file holds; checkpoints load as weights, arrays without objects."""
    forbidden = {"eval", "exec", "compile", "__import__", "os.system", "os.popen", "pickle.load", "pickle.loads",
                 "importlib.import_module", "yaml.load", "torch.hub.load", "shutil.unpack_archive"}  # fmt: skip
    loads = 0
    for path in SOURCES:
        for name, call in calls(path):
            given = {keyword.arg: ast.unparse(keyword.value) for keyword in call.keywords}
            if path.name != "check_port.py":  # imports the layer that its user names, to call it
                assert name not in forbidden, f"{path}: {name}"
            assert "shell" not in given and not name.endswith((".extractall", ".extract")), f"{path}: {name}"
            if name == "torch.load":
                loads += 1
                assert given["weights_only"] == "True", path
            if name == "np.load":
                assert given.get("allow_pickle", "False") == "False", path
    assert loads >= 2  # the walk does see them


class Code:
    """Pickled, it would make a file called pwned when it is read."""

    def __reduce__(self):
        return open, ("pwned", "w")


@pytest.mark.parametrize("place", ["model", "optimizer", "tokenizer", "train_config"])
def test_code_in_any_part_of_a_checkpoint_is_not_run(place, tiny):
    train(tiny(out_dir="run", max_iters=2))
    state = torch.load("run/ckpt.pt", weights_only=True)
    state[place] = {**state[place], "x": Code()}
    torch.save(state, "run/ckpt.pt")
    with pytest.raises(ValueError, match="is not a checkpoint of this project"):
        train(tiny(out_dir="run", max_iters=3, resume=True))
    assert not Path("pwned").exists()


def test_settings_of_another_are_data(tiny):
    """A run's folder from elsewhere: its config.json names another folder to write to, which is left alone."""
    cfg = tiny(out_dir="theirs", max_iters=2)
    train(cfg)
    settings = {**asdict(cfg), "out_dir": "../elsewhere", "resume": True}
    Path("theirs/config.json").write_text(json.dumps(settings))
    default = replace(checkpoint.read_config("theirs", TrainConfig), out_dir="theirs")  # as the command line has it
    train(replace(default, max_iters=3, resume=True))
    assert not Path("../elsewhere").exists() and checkpoint.load("theirs/ckpt.pt")["step"] == 3
    for text in ("import os", "[1]", json.dumps({**settings, "__class__": "os.system"})):
        Path("theirs/config.json").write_text(text)
        with pytest.raises(ValueError, match="is not the folder of a run"):
            checkpoint.read_config("theirs", TrainConfig)


@pytest.mark.parametrize("name", ["../escaped.txt", "/tmp/escaped.txt", "link"])
def test_names_in_an_archive_lead_nowhere(name, tmp_path):
    """OpenWebText's archives are read, member by member, and nothing of them is written under its own name."""
    inner = io.BytesIO()
    with tarfile.open(fileobj=inner, mode="w:xz") as tar:
        member = tarfile.TarInfo(name)
        if name == "link":
            member.type, member.linkname = tarfile.SYMTYPE, "/etc/passwd"
            tar.addfile(member)
        else:
            member.size = 4
            tar.addfile(member, io.BytesIO(b"page"))
    path = tmp_path / "in" / "openwebtext.tar.xz"
    path.parent.mkdir()
    path.write_bytes(archive({"../openwebtext/a.xz": inner.getvalue()}))
    before = set(tmp_path.rglob("*"))
    assert list(corpora.documents(path, validation=True)) == ([] if name == "link" else ["page<|endoftext|>"])
    assert set(tmp_path.rglob("*")) == before and not Path("/tmp/escaped.txt").exists()


def test_a_document_of_any_size_is_not_read(tmp_path, monkeypatch):
    path = tmp_path / "openwebtext.tar.xz"
    path.write_bytes(archive({"a.xz": archive({"1.txt": b"a page", "2.txt": b"too much"})}))
    assert len(list(corpora.documents(path, validation=False))) == 1
    monkeypatch.setattr(corpora, "MAX_BYTES", 7)
    with pytest.raises(OSError, match="2.txt has 8 bytes, too many"):
        list(corpora.documents(path, validation=False))


def test_what_is_downloaded_is_used_after_its_sum_is_right(tmp_path, monkeypatch):
    """And before, nothing is opened: the code that reads it is not called."""
    body = tmp_path / "body"
    body.write_bytes(b"whatever")
    monkeypatch.setitem(corpora.SOURCES, "openwebtext", {"openwebtext.tar.xz": (body.as_uri(), "0" * 64)})
    monkeypatch.setattr(corpora, "documents", lambda *_: pytest.fail("read before it was checked"))
    with pytest.raises(OSError, match="its sha256 was not"):
        data.load("openwebtext", tokenizer="char", cache=tmp_path / "cache")
    assert not list((tmp_path / "cache").rglob("*.xz"))


def test_a_vocabulary_is_data(tmp_path):
    """What a foreign meta.json may hold: numbers and text, no matter which."""
    for kind in ({"kind": "os"}, {"kind": "char", "chars": 5}, {"kind": "__class__"}, {}, []):
        with pytest.raises((ValueError, LookupError, TypeError)):
            tokenizers.from_dict(kind)
    (tmp_path / "meta.pkl").write_bytes(b"cos\nsystem\n(S'touch pwned'\ntR.")
    for split in ("train", "val"):
        (tmp_path / f"{split}.bin").write_bytes(bytes(200))
    with pytest.raises(ValueError, match="is a pickle, which could run code, and is never read"):
        data.load(str(tmp_path))
    assert not Path("pwned").exists()
