"""A text as token files, and the batches that a training step reads from them.

    dataset = data.load("stories")   # a corpus by name, a UTF-8 file or a folder of token files by path
    x, y = dataset.batch(step=0, batch_size=8, block_size=128, seed=0)

A prepared text is a folder of three files: train.bin and val.bin (token ids, raw uint16) and
meta.json (the tokenizer and what is known about the text). Folders are made once, under a name
that holds a hash of everything they depend on. Others' folders of token files are read as they are.
"""

import hashlib
import json
import os
import re
import shutil
import tempfile
import zlib
from dataclasses import asdict, dataclass
from functools import partial
from itertools import chain
from pathlib import Path

import numpy as np

from . import corpora, shakespeare, stories, tokenfiles, tokenizers

CACHE = Path(__file__).parent / "cache"
VAL_FRACTION = 0.1  # the last tenth of a text validates; stories make theirs from another seed


@dataclass
class Dataset:
    folder: Path
    meta: dict
    tokenizer: object
    files: dict  # of each split, what tokenfiles.find found
    _starts: tuple = (None, None)  # the last block_size that `batch` was asked for, and its starts

    def tokens(self, split, n=0):
        """The ids in the nth file of "train" or "val", mapped from it: (n,) uint16. A new map each time, so that the
        pages that batches touched do not pile up in memory."""
        path, offset, count = self.files[split][n]
        return np.memmap(path, dtype=np.uint16, mode="r", offset=offset, shape=(count,))

    def mark(self):
        """A number that another text would hardly have: a checksum of every file's size, its first and its last ids."""
        crc = 0
        for split, files in self.files.items():
            for n, (_, _, count) in enumerate(files):
                ids = self.tokens(split, n)
                crc = zlib.crc32(f"{count}".encode() + ids[:4096].tobytes() + ids[-4096:].tobytes(), crc)
        return crc

    def starts(self, split, block_size):
        """Where a window of block_size ids, and the id after it, may begin: of each file a range or (n,) int64.

        Anywhere, or, where lines are texts of their own, at the newline before a line.
        """
        counts = [count for _, _, count in self.files[split]]
        if max(counts) <= block_size:
            where = " in its longest file" * (len(counts) > 1)
            fits = min(max(count for _, _, count in files) for files in self.files.values()) - 1  # in either split
            shorter = f"--block_size={fits} or less, or " * (fits > 0)
            raise ValueError(
                f"the {split} split has {max(counts):,} tokens{where}, too few for block_size={block_size}:"
                f" use {shorter}a longer text"
            )
        if not self.meta.get("lines"):
            return [range(max(0, count - block_size)) for count in counts]
        starts = np.flatnonzero(self.tokens(split)[: counts[0] - block_size] == self.tokenizer.encode("\n")[0])
        if not len(starts):
            raise ValueError(f"the {split} split, of lines, has none that {block_size} tokens follow: use another text")
        return [starts]

    def windows(self, split, starts, chosen, block_size):
        """The windows of these numbers, counted through the starts of all files: (n, block_size + 1) int64."""
        ends = np.cumsum([len(s) for s in starts])
        files, rows = np.searchsorted(ends, chosen, side="right"), np.empty((len(chosen), block_size + 1), np.int64)
        for file in np.unique(files):
            tokens = self.tokens(split, file)
            for i in np.flatnonzero(files == file):
                start = starts[file][chosen[i] - ends[file]]  # counted from the end of its file: a negative number
                rows[i] = tokens[start : start + block_size + 1]
        if rows.size and rows.max() >= self.tokenizer.vocab_size:
            raise ValueError(
                f"{self.folder} is damaged: it holds the id {rows.max()}, but its vocabulary has only"
                f" {self.tokenizer.vocab_size}"
            )
        return rows

    def batch(self, step, batch_size, block_size, seed):
        """The training batch of a step: x and y (batch_size, block_size) int64, y one id ahead of x.

        It depends on these arguments alone, not on what was drawn before: that is why two kinds of attention
        see the same batches, and an interrupted run goes on with the right one.
        """
        if self._starts[0] != block_size:
            self._starts = block_size, self.starts("train", block_size)
        starts = self._starts[1]
        chosen = np.random.default_rng([seed, step]).integers(sum(map(len, starts)), size=batch_size)
        rows = self.windows("train", starts, chosen, block_size)
        return rows[:, :-1], rows[:, 1:]

    def val_windows(self, count, block_size):
        """Fixed validation rows: x, y and question, each (n, width) int64 with n <= count.

        Windows spread evenly over the split; or, where lines are texts of their own, whole lines from their first
        token, filled up with y = -1. `question` numbers the answers to score, and is -1 outside of them.
        """
        if not self.meta.get("lines"):
            starts = self.starts("val", block_size)
            last = sum(map(len, starts)) - 1
            chosen = np.unique(np.linspace(0, last, min(count, last // block_size + 1)).astype(np.int64))
            rows = self.windows("val", starts, chosen, block_size)
            return rows[:, :-1], rows[:, 1:], np.full_like(rows[:, 1:], -1)
        try:
            text = self.tokenizer.decode_bytes(self.tokens("val")).decode()
        except (UnicodeDecodeError, LookupError):
            raise ValueError(f"{self.folder} is damaged: its validation split is no text") from None
        lines = text.splitlines(keepends=True)[:count]
        rows = [self.tokenizer.encode("\n" + line) for line in lines]
        if not rows:
            raise ValueError("the val split is empty: it needs a line")
        width = max(map(len, rows)) - 1
        if width > block_size:
            raise ValueError(f"block_size={block_size} is too short for the longest story: use --block_size={width}")
        x, y, question = (np.full((len(lines), width), fill, dtype=np.int64) for fill in (0, -1, -1))
        asked = 0
        for i, (line, ids) in enumerate(zip(lines, rows)):
            n = len(ids) - 1
            x[i, :n], y[i, :n] = ids[:-1], ids[1:]
            ends = np.cumsum([len(self.tokenizer.decode_bytes([token])) for token in y[i, :n]])
            for answer in re.finditer(stories.ANSWER, line):
                question[i, :n][(answer.start(1) < ends) & (ends <= answer.end(1))] = asked
                asked += 1
        return x, y, question

    def val_entropy(self, count):
        """nats a token: the generator's -log p of the first `count` validation lines, over their length; else None."""
        if "nats" not in self.meta:
            return None
        return sum(self.meta["nats"][:count]) / sum(self.meta["lengths"][:count])


def load(name, tokenizer="auto", bpe_vocab_size=1024, difficulty=None, cache=None):
    """The dataset of that name, or of the text file or the folder of token files at that path; prepared on first use.

    Raises ValueError or OSError with one sentence when the text cannot be had or used.
    """
    cache = Path(cache or CACHE)
    if name == "stories":
        if tokenizer not in ("auto", "bpe"):
            raise ValueError(f"tokenizer={tokenizer!r}: stories are read by word, use --tokenizer=auto")
        difficulty = difficulty or stories.Difficulty()
        difficulty.check()
        key = f"stories-{_hash(json.dumps(asdict(difficulty)), stories.__file__)}"
        return _open(cache / key, lambda: _prepare_stories(difficulty))
    shards = name in ("fineweb", "fineweb-edu")
    if shards:  # refused before gigabytes are fetched, as below
        if tokenizer not in ("auto", "gpt2"):
            raise ValueError(f"tokenizer={tokenizer!r}: the ids of {name} are those of gpt2, use --tokenizer=auto")
        tokenizers.GPT2Tokenizer()
    if shards or name and name not in corpora.SOURCES and Path(name).is_dir():
        folder = corpora.fetch(name, cache) if shards else Path(name)
        return Dataset(folder, *tokenfiles.describe(folder, tokenizer))
    two_texts = name in ("tinystories", "openwebtext")  # one to train, one to validate
    if tokenizer == "auto":
        tokenizer = "gpt2" if two_texts else "char"
    if tokenizer not in ("char", "bpe", "gpt2"):
        raise ValueError(f"tokenizer={tokenizer!r} must be auto, char, bpe or gpt2")
    if tokenizer == "bpe" and not 256 < bpe_vocab_size <= 65536:
        raise ValueError(f"bpe_vocab_size={bpe_vocab_size} must be from 257 to 65536")
    if tokenizer == "gpt2":
        tokenizers.GPT2Tokenizer()  # raises here if its vocabulary cannot be had
    kind = tokenizer + (f"-{bpe_vocab_size}" if tokenizer == "bpe" else "")
    if two_texts:
        key = f"{name}-{kind}-{_hash(json.dumps(corpora.SOURCES[name]))}"
        return _open(cache / key, lambda: _prepare_text(corpora.texts(name, cache), tokenizer, bpe_vocab_size))
    if name == "shakespeare":
        path = shakespeare.text(cache)
    elif name == "tinyshakespeare":
        path = corpora.fetch(name, cache) / "tinyshakespeare.txt"
    else:
        path = Path(name)
    if path.suffix == ".bin":
        raise ValueError(f"dataset={name!r} is a file of token ids, not a text: name its folder, {str(path.parent)!r}")
    if not path.is_file():
        names = ", ".join(["stories", "shakespeare", *corpora.SOURCES])
        raise ValueError(f"dataset={name!r} is none of {names}, and no text file or folder of token files that exists")
    count, digest = 0, hashlib.sha256()
    for piece in corpora.pieces(path):
        count += len(piece)
        digest.update(piece.encode())
    cut = round(count * (1 - VAL_FRACTION))
    if not 0 < cut < count:
        raise ValueError(f"{name} holds {count} characters, too few to train on")
    texts = {"train": partial(corpora.pieces, path, 0, cut), "val": partial(corpora.pieces, path, cut)}
    key = f"{path.stem[:50]}-{kind}-{digest.hexdigest()[:12]}"
    return _open(cache / key, lambda: _prepare_text(texts, tokenizer, bpe_vocab_size))


def _prepare_stories(difficulty):
    told = {
        "train": list(stories.generate(difficulty, 1, difficulty.train_stories)),
        "val": list(stories.generate(difficulty, 2, difficulty.val_stories)),
    }
    tokenizer = tokenizers.BPETokenizer.of_words(stories.VOCABULARY)
    texts, nats = zip(*told["val"])
    mean_nats, mean_length = stories.expected(difficulty)
    meta = {
        "lines": True, "nats": nats, "lengths": [len(tokenizer.encode(text)) for text in texts],
        "difficulty": asdict(difficulty), "expected_entropy": mean_nats / mean_length,
        "guesses": stories.guesses(texts),
    }  # fmt: skip
    splits = {split: ["".join(text for text, _ in pairs)] for split, pairs in told.items()}
    return splits, tokenizer, meta


def _prepare_text(texts, kind, bpe_vocab_size):
    """texts: of each split, a function that yields its text in pieces. They are read again for each purpose."""
    if kind == "gpt2":
        tokenizer = tokenizers.GPT2Tokenizer()
    elif kind == "bpe":
        tokenizer = tokenizers.BPETokenizer.train(texts["train"](), bpe_vocab_size)
    else:
        tokenizer = tokenizers.CharTokenizer(chain.from_iterable(chain(texts["train"](), texts["val"]())))
        if tokenizer.vocab_size > 65536:
            raise ValueError(f"the text has {tokenizer.vocab_size} kinds of character, over 65536: use --tokenizer=bpe")
    return {split: pieces() for split, pieces in texts.items()}, tokenizer, {"lines": False}


def _open(folder, prepare):
    if not folder.exists():
        splits, tokenizer, meta = prepare()
        folder.parent.mkdir(parents=True, exist_ok=True)
        with open(folder.with_name(f".{folder.name}.lock"), "w") as lock:
            if _wait_for(lock):
                for left in folder.parent.glob(f".{folder.name}-*"):  # of a process that was killed
                    shutil.rmtree(left)
            if not folder.exists():
                _write(folder, splits, tokenizer, meta)
    try:
        meta = json.loads((folder / "meta.json").read_text(encoding="utf-8"))
        files = {split: tokenfiles.find(folder, split) for split in ("train", "val")}
        for split, ((path, _, _),) in files.items():
            if path.stat().st_size != meta.get(f"{split}_bytes", path.stat().st_size):
                raise ValueError(f"{path} has another size than was written")
        return Dataset(folder, meta, tokenizers.from_dict(meta["tokenizer"]), files)
    except (ValueError, LookupError, TypeError, AttributeError, RecursionError) as error:
        raise ValueError(f"{folder} is damaged, remove it and it will be made again ({error})") from None


def _write(folder, splits, tokenizer, meta):
    temporary = Path(tempfile.mkdtemp(dir=folder.parent, prefix=f".{folder.name}-"))  # whole, or not there
    temporary.chmod(0o755)  # others may read it
    try:
        for split, pieces in splits.items():
            with open(temporary / f"{split}.bin", "wb") as file:
                for piece in pieces:
                    file.write(tokenizer.encode(piece))
                file.flush()
                os.fsync(file.fileno())  # or a crash of the machine could leave it empty under its last name
                meta = {**meta, f"{split}_bytes": file.tell()}
        with open(temporary / "meta.json", "w", encoding="utf-8") as file:
            json.dump({"tokenizer": tokenizer.to_dict(), **meta}, file)
            file.flush()
            os.fsync(file.fileno())
        if not folder.exists():
            os.replace(temporary, folder)
    finally:
        shutil.rmtree(temporary, ignore_errors=True)


def _wait_for(lock):
    """Makes an open file this process's own until it is closed, or the process dies. False where locks are not known,
    as on Windows and on some clusters."""
    try:
        import fcntl

        fcntl.flock(lock, fcntl.LOCK_EX)
    except (ImportError, OSError):
        return False
    return True


def _hash(text, *files):
    digest = hashlib.sha256(text.encode())
    for file in files:
        digest.update(Path(file).read_bytes())
    return digest.hexdigest()[:12]
