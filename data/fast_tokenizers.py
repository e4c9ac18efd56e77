"""A tokenizer in the file format of the `tokenizers` library, the tokenizer.json that transformers opens, and back.

Text with a character that a character tokenizer does not know is an error there, as it is here: no id stands for it.
"""

import json

from . import tokenizers


def byte_letters():
    """byte -> the character that stands for it in tokenizer.json: itself if it is visible, else one from U+0100 on."""
    from tokenizers.pre_tokenizers import ByteLevel

    letters = sorted(ByteLevel.alphabet())
    visible = [ord(letter) for letter in letters if ord(letter) < 256]
    return dict(zip(visible + [byte for byte in range(256) if byte not in visible], letters))


def to_fast(tokenizer):
    """A tokenizers.Tokenizer that gives the same ids."""
    from tokenizers import Regex, Tokenizer, decoders, models
    from tokenizers.pre_tokenizers import ByteLevel, Sequence, Split

    if isinstance(tokenizer, tokenizers.CharTokenizer):  # words of one character
        fast = Tokenizer(models.WordLevel({char: i for i, char in enumerate(tokenizer.chars)}, unk_token=""))
        fast.pre_tokenizer = Split(Regex(r"[\s\S]"), "isolated")
        fast.decoder = decoders.Fuse()
        return fast

    letter, encoding = byte_letters(), tokenizer.encoding

    def spell(token):
        return "".join(letter[byte] for byte in token)

    # tiktoken takes a piece that is a token whole; else it joins neighbours into the token of the lowest id, again and
    # again, whatever pair once made that token: so every cut of a token in two tokens is a merge.
    ids = encoding._mergeable_ranks
    cuts = [(token[:i], token[i:]) for token in sorted(ids, key=ids.get) for i in range(1, len(token))]
    merges = [(spell(left), spell(right)) for left, right in cuts if left in ids and right in ids]
    fast = Tokenizer(models.BPE({spell(token): i for token, i in ids.items()}, merges, ignore_merges=True))
    pieces = Split(Regex(encoding._pat_str), "isolated")
    fast.pre_tokenizer = Sequence([pieces, ByteLevel(add_prefix_space=False, use_regex=False)])
    fast.decoder = decoders.ByteLevel()
    fast.add_special_tokens(list(encoding._special_tokens))  # GPT-2's <|endoftext|>, whose id is the next
    return fast


def load(path):
    """The tokenizer of a tokenizer.json. Raises ValueError for one that `to_fast` could not have made."""
    from tokenizers import Tokenizer

    try:
        fast = Tokenizer.from_file(str(path))
    except Exception as error:  # the library has one class for all
        raise ValueError(f"{path} cannot be read: {error}") from None
    spec, vocab = what_counts(fast), sorted(fast.get_vocab(), key=fast.token_to_id)
    if spec["model"]["type"] == "WordLevel":
        tokenizer = tokenizers.CharTokenizer("".join(vocab))
    elif "<|endoftext|>" in vocab:
        tokenizer = tokenizers.GPT2Tokenizer()
    else:
        byte = {letter: byte for byte, letter in byte_letters().items()}
        pieces = ((spec["pre_tokenizer"] or {}).get("pretokenizers") or [{}])[0]
        tokens = [bytes(byte.get(letter, 0) for letter in token) for token in vocab]
        tokenizer = tokenizers.BPETokenizer(tokens, pieces.get("pattern", {}).get("Regex", tokenizers.PATTERN))
    if what_counts(to_fast(tokenizer)) != spec:
        raise ValueError(f"{path} is neither characters nor byte pairs in the form that export.py writes")
    return tokenizer


def what_counts(fast):
    """What ids depend on: tokenizer.json as a dict, but for what a library adds to it that changes none."""
    spec = {k: v for k, v in json.loads(fast.to_str()).items() if k not in ("truncation", "padding")}
    return spec | {"post_processor": fast.num_special_tokens_to_add(False)}
