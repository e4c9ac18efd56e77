"""Text to token ids and back: characters, byte pairs learned from the text itself, or GPT-2's.

A tokenizer is kept as plain JSON (`to_dict`, `from_dict`) beside its token files and inside every
checkpoint, so that a checkpoint alone can print text. Ids are below 65,536: files hold them as uint16.
"""

import base64
import hashlib
import os
from collections import Counter, defaultdict

import numpy as np

# What byte pairs may never cross: a word with the space before it, a number of up to three digits,
# a run of punctuation, spaces. In the syntax of the `regex` package, as tiktoken takes it.
PATTERN = r""" ?\p{L}+| ?\p{N}{1,3}| ?[^\s\p{L}\p{N}]+|\s+(?!\S)|\s+"""


class CharTokenizer:
    """One id a character, in the order of their code points."""

    def __init__(self, chars):
        self.chars = "".join(sorted(set(chars)))
        self.vocab_size = len(self.chars)

    def encode(self, text):
        """str -> (n,) uint16. Raises ValueError that lists the characters it does not know."""
        codes = np.frombuffer(text.encode("utf-32-le", "surrogatepass"), dtype=np.uint32)
        known = np.frombuffer(self.chars.encode("utf-32-le"), dtype=np.uint32)
        ids = np.minimum(np.searchsorted(known, codes), len(known) - 1)
        if (known[ids] != codes).any():
            unknown = "".join(c for c in dict.fromkeys(text) if c not in self.chars)
            raise ValueError(f"the vocabulary has no {unknown[:20]!r}: it holds {self.chars!r}")
        return ids.astype(np.uint16)

    def first(self):
        """The ids that a text from nothing starts with: a new line or, in a text without any, the first character."""
        return self.encode("\n" if "\n" in self.chars else self.chars[0]).tolist()

    def decode_bytes(self, ids):
        return "".join(self.chars[i] for i in ids).encode()

    def to_dict(self):
        return {"kind": "char", "chars": self.chars}


class BPETokenizer:
    """Byte pairs through tiktoken; any text can be encoded, since all 256 bytes are tokens."""

    def __init__(self, tokens, pattern=PATTERN):
        import tiktoken  # only here: a character model needs none

        self.tokens, self.pattern = tokens, pattern
        ranks = {token: rank for rank, token in enumerate(tokens)}
        self.encoding = tiktoken.Encoding("own", pat_str=pattern, mergeable_ranks=ranks, special_tokens={})
        self.vocab_size = len(tokens)

    def encode(self, text):
        try:
            return self.encoding.encode_to_numpy(text, allowed_special="all").astype(np.uint16)
        except ValueError as error:
            raise ValueError(f"byte pairs cannot be made of this text ({error}): use --tokenizer=char") from None

    def first(self):
        """The ids that a text from nothing starts with: a new line."""
        return self.encode("\n").tolist()

    def decode_bytes(self, ids):
        return self.encoding.decode_bytes(list(ids))

    def to_dict(self):
        tokens = [base64.b64encode(token).decode() for token in self.tokens]
        return {"kind": "bpe", "pattern": self.pattern, "tokens": tokens}

    @classmethod
    def of_words(cls, words):
        """Each of these is one token, and all other text is bytes."""
        return cls([bytes([b]) for b in range(256)] + [word.encode() for word in words if len(word.encode()) > 1])

    @classmethod
    def train(cls, pieces, vocab_size):
        """Joins the most frequent pair of neighbours into a new token, again and again (Sennrich et al. 2016).

        The text comes in pieces that end between words. Ends early when no pair is left that occurs twice.
        """
        import regex

        counts = Counter()  # a word's merges do not depend on where it stands
        for piece in pieces:
            counts.update(regex.findall(PATTERN, piece))
        words = [[bytes([b]) for b in word.encode()] for word in counts]
        times = list(counts.values())
        pairs, where = Counter(), defaultdict(set)  # a pair's number of occurrences, the words that hold it
        for i, word in enumerate(words):
            for pair in zip(word, word[1:]):
                pairs[pair] += times[i]
                where[pair].add(i)
        tokens = [bytes([b]) for b in range(256)]
        while len(tokens) < vocab_size and pairs:
            top = max(pairs.values())
            if top < 2:
                break
            left, right = best = min(pair for pair, n in pairs.items() if n == top)  # ties: the same on every run
            tokens.append(left + right)
            for i in where.pop(best):
                old, new = words[i], []
                for token in old:
                    if new and new[-1] == left and token == right:
                        new[-1] = left + right
                    else:
                        new.append(token)
                words[i] = new
                for word, sign in ((old, -1), (new, 1)):
                    for pair in zip(word, word[1:]):
                        pairs[pair] += sign * times[i]
                        if sign > 0:
                            where[pair].add(i)
                for pair in zip(old, old[1:]):
                    if pairs[pair] <= 0:
                        del pairs[pair]
        return cls(tokens)


GPT2_FILES = [
    "https://openaipublic.blob.core.windows.net/gpt-2/encodings/main/" + f for f in ("vocab.bpe", "encoder.json")
]


class GPT2Tokenizer(BPETokenizer):
    """GPT-2's byte pairs, through tiktoken: it fetches the two published files once and checks their sha256.

    "<|endoftext|>" in a text is the one token of that name.
    """

    vocab_size = 50257

    def __init__(self):
        import tiktoken

        try:
            self.encoding = tiktoken.get_encoding("gpt2")
        except OSError as error:
            folder = os.environ.get("TIKTOKEN_CACHE_DIR", "not set")
            files = " and ".join(f"{url} as {hashlib.sha1(url.encode()).hexdigest()}" for url in GPT2_FILES)
            raise OSError(
                f"GPT-2's vocabulary could not be fetched ({type(error).__name__}): put {files} into a folder,"
                f" and name that folder in TIKTOKEN_CACHE_DIR (now {folder}); a text can do with --tokenizer=char"
            ) from None

    def first(self):
        """The ids that a text from nothing starts with: <|endoftext|>."""
        return [self.encoding.eot_token]

    def to_dict(self):
        return {"kind": "gpt2"}


PROBE = "one tree,\n 12 \u00fcber 345."


def from_dict(d):
    """The tokenizer that `to_dict` wrote. Raises ValueError with one sentence if it did not write this."""
    if not isinstance(d, dict) or d.get("kind") not in ("char", "bpe", "gpt2"):
        raise ValueError('it has no "kind" that is char, bpe or gpt2')
    if d["kind"] == "gpt2":
        return GPT2Tokenizer()
    if d["kind"] == "char":
        chars = d.get("chars")
        whole = isinstance(chars, str) and sorted(set(chars.encode("utf-8", "ignore").decode()))
        if not whole or whole != list(chars):
            raise ValueError('its "chars" must be a string of characters, each once, in the order of their code points')
        return CharTokenizer(chars)
    try:
        tokens = [base64.b64decode(token, validate=True) for token in d["tokens"]]
        if not {bytes([b]) for b in range(256)} <= set(tokens) or len(set(tokens)) < len(tokens):
            raise ValueError
        tokenizer = BPETokenizer(tokens, d["pattern"])
        if tokenizer.decode_bytes(tokenizer.encode(PROBE)).decode() != PROBE:
            raise ValueError
        return tokenizer
    except Exception:  # of tiktoken's own kinds too
        raise ValueError(
            'its "tokens" must be base64, each once, all 256 bytes among them, and "pattern" a regex'
        ) from None
