"""A text as token files, and the batches that a training step reads from them.

    dataset = data.load("stories")                   # or "shakespeare", or the path of a UTF-8 file
    x, y = dataset.batch(step=0, batch_size=8, block_size=128, seed=0)

A prepared text is a folder of three files: train.bin and val.bin (token ids, raw uint16) and
meta.json (the tokenizer and what is known about the text). Folders are made once, under a name
that holds a hash of everything they depend on.
"""

import hashlib
import json
import os
import re
import shutil
import tempfile
from dataclasses import asdict, dataclass
from pathlib import Path

import numpy as np

from . import shakespeare, stories, tokenizers

CACHE = Path(__file__).parent / "cache"
VAL_FRACTION = 0.1  # the last tenth of a text validates; stories make theirs from another seed


@dataclass
class Dataset:
    folder: Path
    meta: dict
    tokenizer: object
    _starts: tuple = (None, None)  # the last block_size that `batch` was asked for, and its starts

    def tokens(self, split):
        """The ids of "train" or "val", mapped from the file: (n,) uint16. A new map each time, so that the
        pages that batches touched do not pile up in memory."""
        return np.memmap(self.folder / f"{split}.bin", dtype=np.uint16, mode="r")

    def starts(self, split, block_size):
        """Where a window of block_size ids, and the id after it, may begin: a range or (n,) int64.

        Anywhere, or, where lines are texts of their own, at the newline before a line.
        """
        tokens = self.tokens(split)
        last = len(tokens) - block_size - 1
        if last < 0:
            raise ValueError(
                f"the {split} split has {len(tokens):,} tokens, too few for block_size={block_size}:"
                f" use --block_size={max(1, len(tokens) - 1)} or less, or a longer text"
            )
        if not self.meta["lines"]:
            return range(last + 1)
        return np.flatnonzero(tokens[: last + 1] == self.tokenizer.encode("\n")[0])

    def batch(self, step, batch_size, block_size, seed):
        """The training batch of a step: x and y (batch_size, block_size) int64, y one id ahead of x.

        It depends on these arguments alone, not on what was drawn before: that is why two kinds of attention
        see the same batches, and an interrupted run goes on with the right one.
        """
        if self._starts[0] != block_size:
            self._starts = block_size, self.starts("train", block_size)
        starts, tokens = self._starts[1], self.tokens("train")
        chosen = np.random.default_rng([seed, step]).integers(len(starts), size=batch_size)
        rows = np.stack([tokens[starts[i] : starts[i] + block_size + 1] for i in chosen]).astype(np.int64)
        return rows[:, :-1], rows[:, 1:]

    def val_windows(self, count, block_size):
        """Fixed validation rows: x, y and question, each (n, width) int64 with n <= count.

        Windows spread evenly over the split; or, where lines are texts of their own, whole lines from their first
        token, filled up with y = -1. `question` numbers the answers to score, and is -1 outside of them.
        """
        tokens = self.tokens("val")
        if not self.meta["lines"]:
            last = self.starts("val", block_size)[-1]
            starts = np.unique(np.linspace(0, last, min(count, last // block_size + 1)).astype(np.int64))
            rows = np.stack([tokens[s : s + block_size + 1] for s in starts]).astype(np.int64)
            return rows[:, :-1], rows[:, 1:], np.full_like(rows[:, 1:], -1)
        text = self.tokenizer.decode_bytes(tokens).decode()
        lines = text.splitlines(keepends=True)[:count]
        width = max(map(len, lines))
        if width > block_size:
            raise ValueError(f"block_size={block_size} is too short for the longest story: use --block_size={width}")
        x, y, question = (np.full((len(lines), width), fill, dtype=np.int64) for fill in (0, -1, -1))
        asked = 0
        for i, line in enumerate(lines):
            ids = self.tokenizer.encode("\n" + line)
            x[i, : len(line)], y[i, : len(line)] = ids[:-1], ids[1:]
            for answer in re.finditer(stories.ANSWER, line):
                question[i, answer.start(1) : answer.end(1)] = asked
                asked += 1
        return x, y, question

    def val_entropy(self, count):
        """nats a token: the generator's -log p of the first `count` validation lines, over their length; else None."""
        if "nats" not in self.meta:
            return None
        return sum(self.meta["nats"][:count]) / sum(self.meta["lengths"][:count])


def load(name, tokenizer="char", bpe_vocab_size=1024, difficulty=None, cache=None):
    """The dataset of that name, or of the text file at that path, prepared on first use.

    Raises ValueError or OSError with one sentence when the text cannot be had or used.
    """
    cache = Path(cache or CACHE)
    if name == "stories":
        if tokenizer != "char":
            raise ValueError(f"tokenizer={tokenizer!r}: stories are read by character, use --tokenizer=char")
        difficulty = difficulty or stories.Difficulty()
        difficulty.check()
        key = f"stories-{_hash(json.dumps(asdict(difficulty)), stories.__file__)}"
        return _open(cache / key, lambda: _prepare_stories(difficulty))
    if name == "shakespeare":
        text = shakespeare.text(cache)
    else:
        text = _read(name)
    size = f"-{bpe_vocab_size}" if tokenizer == "bpe" else ""
    key = f"{Path(name).stem}-{tokenizer}{size}-{_hash(text)}"
    return _open(cache / key, lambda: _prepare_text(name, text, tokenizer, bpe_vocab_size))


def _read(path):
    path = Path(path)
    if not path.is_file():
        raise ValueError(f"dataset={str(path)!r} is neither 'stories', 'shakespeare' nor a text file that exists")
    try:
        text = path.read_text(encoding="utf-8-sig")  # drops a byte-order mark; line ends become \n
    except UnicodeDecodeError as e:
        raise ValueError(f"{path} is not UTF-8 (byte {e.start:,}): save it as UTF-8 first") from None
    return text


def _prepare_stories(difficulty):
    told = {
        "train": list(stories.generate(difficulty, 1, difficulty.train_stories)),
        "val": list(stories.generate(difficulty, 2, difficulty.val_stories)),
    }
    texts, nats = zip(*told["val"])
    mean_nats, mean_length = stories.expected(difficulty)
    meta = {
        "lines": True, "nats": nats, "lengths": list(map(len, texts)), "difficulty": asdict(difficulty),
        "expected_entropy": mean_nats / mean_length, "guesses": stories.guesses(texts),
    }  # fmt: skip
    splits = {split: "".join(text for text, _ in pairs) for split, pairs in told.items()}
    return splits, tokenizers.CharTokenizer(stories.ALPHABET), meta


def _prepare_text(name, text, kind, bpe_vocab_size):
    if kind not in ("char", "bpe"):
        raise ValueError(f"tokenizer={kind!r} must be char or bpe")
    cut = round(len(text) * (1 - VAL_FRACTION))
    if not 0 < cut < len(text):
        raise ValueError(f"{name} holds {len(text)} characters, too few to train on")
    splits = {"train": text[:cut], "val": text[cut:]}
    if kind == "bpe":
        if not 256 < bpe_vocab_size <= 65536:
            raise ValueError(f"bpe_vocab_size={bpe_vocab_size} must be from 257 to 65536")
        tokenizer = tokenizers.BPETokenizer.train(splits["train"], bpe_vocab_size)
    else:
        tokenizer = tokenizers.CharTokenizer(text)
        if tokenizer.vocab_size > 65536:
            raise ValueError(f"{name} has {tokenizer.vocab_size} kinds of character, over 65536: use --tokenizer=bpe")
    return splits, tokenizer, {"lines": False}


def _open(folder, prepare):
    if not folder.exists():
        splits, tokenizer, meta = prepare()
        folder.parent.mkdir(parents=True, exist_ok=True)
        temporary = Path(tempfile.mkdtemp(dir=folder.parent, prefix=".new-"))  # whole, or not there
        temporary.chmod(0o755)  # others may read it
        try:
            for split, text in splits.items():
                tokenizer.encode(text).tofile(temporary / f"{split}.bin")
            meta = {"tokenizer": tokenizer.to_dict(), **meta}
            (temporary / "meta.json").write_text(json.dumps(meta), encoding="utf-8")
            if not folder.exists():
                os.replace(temporary, folder)
        finally:
            shutil.rmtree(temporary, ignore_errors=True)
    meta = json.loads((folder / "meta.json").read_text(encoding="utf-8"))
    return Dataset(folder, meta, tokenizers.from_dict(meta["tokenizer"]))


def _hash(text, *files):
    digest = hashlib.sha256(text.encode())
    for file in files:
        digest.update(Path(file).read_bytes())
    return digest.hexdigest()[:12]
