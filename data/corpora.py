"""Texts that do not fit in memory: files read in pieces, and the corpora that others train on, fetched once.

    for piece in pieces("my.txt"): ...
    folder = fetch("tinystories", "data/cache")

A download goes to NAME.part and goes on where an earlier one stopped. A file is used if its sha256 is the one below, so
everybody trains on the same bytes; of fineweb-edu it is the one that Hugging Face names. The texts are not this
project's: tinyshakespeare comes from A. Karpathy's char-rnn, tinystories from R. Eldan and Y. Li (CDLA-Sharing-1.0),
openwebtext from A. Gokaslan and V. Cohen (CC0), fineweb and fineweb-edu from Hugging Face (ODC-By 1.0), their ids from
K. Jordan.
"""

import hashlib
import http.client
import lzma
import math
import os
import re
import sys
import tarfile
import urllib.request
from contextlib import suppress
from functools import partial
from pathlib import Path

from tqdm import tqdm

CHUNK = 1 << 20  # characters or bytes held at a time
MAX_BYTES = 1 << 26  # of a document in an archive; pages have a thousandth of it
LAST_WORD_END = re.compile(r".*\S(?=[ \n])", re.DOTALL)  # no pattern of ours or GPT-2's has a token across it
RECORD = re.compile(rb"([0-9a-f]{64}) \d+ \d+")  # of a file that was right: sha256, size, time of its last change
FAILURES = (OSError, http.client.HTTPException, ValueError)  # the last: of a server that sends nonsense
HUB = "https://huggingface.co/datasets"
TINYSTORIES = f"{HUB}/roneneldan/TinyStories/resolve/f54c09fd23315a6f9c86f9dc80f725de7d8f9c64/TinyStoriesV2-GPT4"
FINEWEB = f"{HUB}/kjj0/fineweb10B-gpt2/resolve/889765ea1f903759787add96995d81171b632d0c"
FINEWEB_EDU = f"{HUB}/kjj0/finewebedu10B-gpt2/resolve/main"
FINEWEB_SHA256 = """5b95c8e0966f0861685b307b23dc5ae42b228ef74b28cb499784ae021f201640
771fa4a99b9fe0946ffb6e848b4ba5c6a9b0fe87860ebf03bc2c1c7e45f8178e
d4ba8d2d740905a836a4222d2aff01750560e7d49a51a745a1b3235520aec2cd
f70fa272369730fd9e39f1848bfe4daa3289b6e490c1e7762777f00ea8b66246
d8d88850f89fe2030e866380e90d544167467d407080403b830b903543925835
36cef3fc41863eb6731b41e986edde38e368853ee6deb87b928990bf445a119c
d80e5b209983e636655fc738fdf281f0132f0298bf4c0848f7e7a6bea6ca06f0
fa9f94dce61686b5467bc6cd3078424203db23ac254d804a6d8d5d440afc1e11
308e6937af5d78b7489a8aac3a3951dced5b46103e613f8bc4eb543f5092526c
1635300891634346ecff3a78d6e489a69c647885f0dcd249fe3eb76fac683458""".split()

# By name: the files of the corpus, each with its address and sha256; None: as `published`.
SOURCES = {
    "tinyshakespeare": {
        "tinyshakespeare.txt": (
            "https://raw.githubusercontent.com/karpathy/char-rnn/master/data/tinyshakespeare/input.txt",
            "86c4e6aa9db7c042ec79f339dcb96d42b0075e16b8fc2e86bf0ca57e2dc565ed",
        )
    },
    "tinystories": {  # 2.2 GB of text
        "train.txt": (f"{TINYSTORIES}-train.txt", "6418d412de72888f52b5142c761ac21a582f7d1166f0bfbdb5f03ccfdec90443"),
        "val.txt": (f"{TINYSTORIES}-valid.txt", "6874bae9a4c1a4e7edcf0e53b86c17817e9cf881fc75ff2368da457b80c0585d"),
    },
    "openwebtext": {  # 13 GB, 40 GB of text
        "openwebtext.tar.xz": (
            "https://zenodo.org/records/3834942/files/openwebtext.tar.xz",
            "9fe39d154c5bc67da8c359415372b79510eb1e2edb0d035fe4f7fc3a732b9336",
        )
    },
    "fineweb": {  # 2 GB: 100 million ids of GPT-2 to validate, 9 times as many to train
        (file := f"fineweb_{'train' if i else 'val'}_{i:06d}.bin"): (f"{FINEWEB}/{file}", digest)
        for i, digest in enumerate(FINEWEB_SHA256)
    },
    "fineweb-edu": {  # 20 GB: 10 billion ids of GPT-2, 100 million of them to validate
        (file := f"finewebedu_{'train' if i else 'val'}_{i:06d}.bin"): (f"{FINEWEB_EDU}/{file}", None)
        for i in range(100)
    },
}


def progress(name, total):
    """A bar of bytes on a terminal, for what takes more than a second."""
    shown = sys.stderr.isatty()
    return tqdm(desc=name, total=total, unit="B", unit_scale=True, delay=1, leave=False, disable=not shown)


def pieces(path, start=0, stop=math.inf):
    """The characters start .. stop of a UTF-8 file, in pieces that byte pairs do not cross: encode one after the other.

    A byte-order mark is dropped, line ends become \\n. Raises ValueError with one sentence if it is not UTF-8.
    """
    with open(path, encoding="utf-8-sig") as file, progress(Path(path).name, os.path.getsize(path)) as bar:

        def read(limit):
            try:
                text = file.read(min(CHUNK, limit))
            except UnicodeDecodeError as e:
                byte = file.buffer.tell() - len(e.object) + e.start  # its object ends where reading has come to
                raise ValueError(f"{path} is not UTF-8 (byte {byte:,}): save it as UTF-8 first") from None
            bar.update(file.buffer.tell() - bar.n)
            return text

        left, rest = stop - start, ""
        while start and (skipped := read(start)):
            start -= len(skipped)
        while left and (chunk := read(left)):
            left, rest = left - len(chunk), rest + chunk
            safe = LAST_WORD_END.match(rest)
            end = safe.end() if safe else len(rest)  # a million characters without a space may be cut anywhere
            yield rest[:end]
            rest = rest[end:]
        if rest:
            yield rest


def documents(archive, validation):
    """OpenWebText's documents from its archive of archives, <|endoftext|> after each; every 2,000th validates."""
    number = 0
    with open(archive, "rb") as file, progress(Path(archive).name, os.path.getsize(archive)) as bar:
        outer = tarfile.open(fileobj=lzma.open(file), mode="r|")
        for member in outer:
            if not member.name.endswith(".xz"):
                continue
            inner = tarfile.open(fileobj=lzma.open(outer.extractfile(member)), mode="r|")
            for document in inner:
                if document.isfile():
                    if document.size > MAX_BYTES:
                        raise OSError(f"{archive}: {document.name} has {document.size:,} bytes, too many for a page")
                    if (number % 2000 == 0) == validation:
                        text = inner.extractfile(document).read().decode(errors="replace")
                        yield re.sub(r"\n{3,}", "\n\n", text).strip() + "<|endoftext|>"
                    number += 1
            bar.update(file.tell() - bar.n)


def texts(name, folder):
    """{split: a function that yields its text in pieces} of a corpus that is kept as text in two splits."""
    folder = fetch(name, folder)
    if name == "openwebtext":
        archive = folder / "openwebtext.tar.xz"
        return {"train": partial(documents, archive, False), "val": partial(documents, archive, True)}
    return {"train": partial(pieces, folder / "train.txt"), "val": partial(pieces, folder / "val.txt")}


def fetch(name, folder):
    """The folder, under the given one, with the files of a corpus: those missing downloaded, all of them checked.

    A file that has not changed since it was right is not read again. Raises OSError with one sentence.
    """
    folder = Path(folder, name)
    for part, (url, sha256) in SOURCES[name].items():
        path, record = folder / part, folder / f"{part}.sha256"
        known = RECORD.fullmatch(record.read_bytes()) if path.exists() and record.exists() else None
        sha256 = sha256 or (known[1].decode() if known else published(url))
        if not path.exists():
            download(url, path)
        right = f"{sha256} {path.stat().st_size} {path.stat().st_mtime_ns}".encode()
        if known and known[0] == right:
            continue
        digest = hashlib.sha256()
        with open(path, "rb") as file, progress(f"checking {path.name}", os.path.getsize(path)) as bar:
            while chunk := file.read(CHUNK):
                digest.update(chunk)
                bar.update(len(chunk))
        if digest.hexdigest() != sha256:
            path.unlink(missing_ok=True)  # another process may have found out too
            raise OSError(
                f"{path} was damaged, its sha256 was not {sha256}: it is removed, the next try fetches it anew"
            )
        with suppress(OSError):  # in a folder that others fill, it is read again each time
            record.write_bytes(right)
    return folder


def published(url):
    """The sha256 of a file that Hugging Face keeps: what Git has in its place, a pointer, names it."""
    pointer = url.replace("/resolve/", "/raw/")
    try:
        with urllib.request.urlopen(pointer, timeout=60) as response:
            named = re.search(rb"^oid sha256:([0-9a-f]{64})$", response.read(CHUNK), re.MULTILINE)
    except FAILURES as error:
        raise no_network(pointer, error, "it names the file's sha256") from None
    if not named:
        raise OSError(f"{pointer} names no sha256 of the file, which cannot be checked: use another --dataset")
    return named[1].decode()


def no_network(url, error, kept):
    reason = " ".join(str(getattr(error, "reason", error)).split())
    return OSError(
        f"{url} could not be fetched ({reason}): {kept}; --dataset=stories and --dataset=PATH need no download"
    )


def download(url, path):
    """Fetches url to path, a megabyte at a time. What has arrived stays in path.part, and the next try goes on there.

    Two processes at once write the same bytes in the same places.
    """
    part = path.with_name(f"{path.name}.part")
    have = part.stat().st_size if part.exists() else 0
    # Asks for the last byte again: a server has no answer to a range that begins at the end of the file.
    request = urllib.request.Request(url, headers={"Range": f"bytes={have - 1}-"} if have else {})
    try:
        with urllib.request.urlopen(request, timeout=60) as response:
            start = have - 1 if response.status == 206 else 0  # 206: from there on; else from the beginning
            size = start + int(response.headers["Content-Length"] or 0)
            part.parent.mkdir(parents=True, exist_ok=True)
            part.touch()
            with open(part, "r+b") as file, progress(path.name, size) as bar:
                bar.update(file.seek(start))
                while chunk := response.read(CHUNK):
                    file.write(chunk)
                    bar.update(len(chunk))
                if file.tell() < size:
                    raise ConnectionError(f"it ended after {file.tell():,} of {size:,} bytes")
                file.truncate()
    except FAILURES as error:
        kept = "what has arrived is kept"
        if getattr(error, "code", None) == 416:  # no such range
            part.unlink(missing_ok=True)
            kept = f"{part} was longer than the file and is removed"
        raise no_network(url, error, f"{kept}, the next try goes on from there") from None
    if path.exists():  # another process was faster
        part.unlink(missing_ok=True)
    else:
        with suppress(FileNotFoundError):  # faster still
            os.replace(part, path)
