"""Text to token ids and back: characters, or a small byte-pair encoding trained on the text itself.

A tokenizer is kept as plain JSON (`to_dict`, `from_dict`) beside its token files and inside every
checkpoint, so that a checkpoint alone can print text. Ids are below 65,536: files hold them as uint16.
"""

import base64
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
            unknown = "".join(sorted(set(text) - set(self.chars)))
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
        return np.array(self.encoding.encode_ordinary(text), dtype=np.uint16)

    def first(self):
        """The ids that a text from nothing starts with: a new line."""
        return self.encode("\n").tolist()

    def decode_bytes(self, ids):
        return self.encoding.decode_bytes(list(ids))

    def to_dict(self):
        tokens = [base64.b64encode(token).decode() for token in self.tokens]
        return {"kind": "bpe", "pattern": self.pattern, "tokens": tokens}

    @classmethod
    def train(cls, text, vocab_size):
        """Joins the most frequent pair of neighbours into a new token, again and again (Sennrich et al. 2016).

        Ends early when no pair is left that occurs twice.
        """
        import regex

        counts = Counter(regex.findall(PATTERN, text))  # a word's merges do not depend on where it stands
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


def from_dict(d):
    """The tokenizer that `to_dict` wrote."""
    if d["kind"] == "char":
        return CharTokenizer(d["chars"])
    return BPETokenizer([base64.b64decode(token) for token in d["tokens"]], d["pattern"])
