"""Folders of token files: nanoGPT's train.bin and val.bin, the shards of llm.c and modded-nanogpt, or our own.

Ids are uint16. nanoGPT's files hold nothing else; llm.c's begin with 256 int32: 20240520, 1, the number of ids.
Nothing in a folder is unpickled, and nothing is written to it. All sentences about what is wrong are ValueErrors.
"""

import json
import re
import struct
from itertools import chain

import numpy as np

from . import tokenizers

HEADER, MAGIC = 1024, 20240520
CHUNK = 1 << 22  # ids read at a time


def find(folder, split):
    """The files of a split: of each its path, the number of bytes before its ids, and the number of its ids.

    {split}.bin may do without a header; files like NAME_{split}.bin and NAME_{split}_NUMBER.bin, in this order, not.
    """
    found = []
    for path in sorted(folder.glob("*.bin")):
        if not re.fullmatch(rf"(.*_)?{split}(_\d+)?", path.stem):
            continue
        with open(path, "rb") as file:
            magic, version, count = struct.unpack("<3i", file.read(12).ljust(12, b"\0"))
        size, offset = path.stat().st_size, HEADER if magic == MAGIC else 0
        if not offset and path.stem != split:
            raise ValueError(f"{path} does not begin with {MAGIC}, as llm.c's files of GPT-2's ids do")
        if offset and version != 1:
            raise ValueError(f"{path} has version {version} in its header, and only in version 1 ids have two bytes")
        if offset and size != offset + 2 * count:
            raise ValueError(f"{path} is damaged: its {count:,} ids need {offset + 2 * count:,} bytes, it has {size:,}")
        if size % 2:
            raise ValueError(f"{path} has an odd number of bytes, {size:,}: it is damaged, or its ids are not uint16")
        if size == offset:
            raise ValueError(f"{path} holds no ids: remove it, or put some into it")
        found.append((path, offset, (size - offset) // 2))
    if not found:
        raise ValueError(f"{folder} has neither a {split}.bin (nanoGPT's) nor a file like x_{split}_000.bin (llm.c's)")
    return found


def largest_id(files):
    """The largest id in all of the files."""
    starts = ((path, at) for path, offset, n in files for at in range(offset, offset + 2 * n, 2 * CHUNK))
    return max((int(np.fromfile(path, np.uint16, CHUNK, offset=at).max()) for path, at in starts))


def describe(folder, tokenizer="auto"):
    """(meta, tokenizer, {split: files}) of a folder that anybody made, its ids checked against the vocabulary."""
    files = {split: find(folder, split) for split in ("train", "val")}
    path, meta, kind = folder / "meta.json", {"tokenizer": {"kind": "gpt2"}}, "gpt2"
    text = next(folder.glob("*.txt"), "TEXT")
    example = '{"tokenizer": {"kind": "char", "chars": "abc"}}'
    way_out = f"use the text itself, --dataset={text}, or write its characters to {path}, as in {example}"
    if path.exists():
        try:
            found = json.loads(path.read_text(encoding="utf-8"))
            meta = {"tokenizer": found["tokenizer"], "lines": found.get("lines") is True}
            tokenizers.from_dict(meta["tokenizer"])
            kind = meta["tokenizer"]["kind"]
        except (LookupError, TypeError, AttributeError, RecursionError, ValueError) as error:
            why = type(error).__name__ if type(error) is not ValueError else error  # the last is ours, a sentence
            raise ValueError(f"{path} does not describe a tokenizer ({why}): {way_out}") from None
    elif tokenizer != "gpt2" and (folder / "meta.pkl").exists():
        raise ValueError(f"{folder / 'meta.pkl'} is a pickle, which could run code, and is never read: {way_out}")
    largest = largest_id(chain(*files.values()))
    if largest < 256 and tokenizer != "gpt2" and not path.exists():  # GPT-2's first 256 ids are single bytes
        raise ValueError(f"{folder} has {largest} as its largest id, so it is not GPT-2's: {way_out}")
    if tokenizer not in ("auto", kind):
        raise ValueError(f"tokenizer={tokenizer!r}: the ids in {folder} are those of {kind}, use --tokenizer=auto")
    own = tokenizers.from_dict(meta["tokenizer"])
    if largest >= own.vocab_size:
        raise ValueError(f"{folder} holds the id {largest}, but its vocabulary ({kind}) has only {own.vocab_size}")
    return meta, own, files
