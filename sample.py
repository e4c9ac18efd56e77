"""Writes text with a trained model, as it comes.

    python sample.py                                        # the newest run
    python sample.py --out_dir=runs/stories-diff --temperature=0
    python sample.py --start="Ann mends maps." --num_samples=3
    python sample.py --start=FILE:prompt.txt                # or --start=FILE:- for standard input

A checkpoint is enough: no data folder, and any device will do.
"""

from process import begin

if __name__ == "__main__":
    begin("sample.py")

import codecs
import os
import sys
from dataclasses import dataclass
from pathlib import Path

import torch

import checkpoint
from data import tokenizers
from device import pick_device
from generation import stream


@dataclass
class SampleConfig:
    out_dir: str = ""  # the run's folder; empty means the newest
    latest: bool = False  # use the latest weights, not those with the lowest validation loss
    start: str = ""  # the prompt; FILE:PATH reads a file, FILE:- standard input; empty means a new line
    num_samples: int = 1
    max_new_tokens: int = 500  # a sample
    temperature: float = 0.8  # 0 always takes the likeliest token
    top_k: int = 0  # choose among this many likeliest tokens; 0 means all
    top_p: float = 1.0  # choose among the likeliest tokens that together reach this probability
    seed: int = 0
    device: str = "auto"  # auto, cuda, mps or cpu

    def check(self):
        """Raises ValueError with one sentence: the field, its value, the nearest legal value."""
        if not 0 <= self.temperature < float("inf"):
            raise ValueError(f"temperature={self.temperature} must be 0 (greedy) or a positive number")
        if not 0 <= self.top_p <= 1:
            raise ValueError(f"top_p={self.top_p} must be from 0 (greedy) to 1 (all tokens)")
        for name, lowest in (("num_samples", 1), ("max_new_tokens", 0), ("top_k", 0), ("seed", 0)):
            if not lowest <= getattr(self, name) < 2**32:
                raise ValueError(f"{name}={getattr(self, name)} must be from {lowest} to {2**32 - 1}")


def read_prompt(start):
    """The text that `start` stands for. Raises ValueError with one sentence."""
    path = start.removeprefix("FILE:")
    if path == start:
        path, raw = "on the command line", os.fsencode(start)
    else:
        try:
            raw = sys.stdin.buffer.read() if path == "-" else Path(path).read_bytes()
        except OSError as error:
            raise ValueError(f"start={start!r} cannot be read ({error.strerror}): name a file of text") from None
    try:
        return raw.decode("utf-8-sig").replace("\r\n", "\n")
    except UnicodeDecodeError as e:
        raise ValueError(f"the prompt {path} is not UTF-8 (byte {e.start:,})") from None


def encode_prompt(tokenizer, prompt):
    """The ids of a prompt, (1, T) int64; of an empty one, those that a text from nothing starts with."""
    return torch.tensor([tokenizer.encode(prompt).tolist() if prompt else tokenizer.first()])


def stream_text(model, tokenizer, ids, **how):
    """The text that follows the ids (1, T), in pieces. `how`: those of generation.stream."""
    decoder = codecs.getincrementaldecoder("utf-8")(errors="replace")  # a token may end inside a character
    for token in stream(model, ids, **how):
        yield decoder.decode(tokenizer.decode_bytes([token.item()]))
    yield decoder.decode(b"", final=True)


def sample(cfg):
    cfg.check()
    run = cfg.out_dir or checkpoint.newest_run()
    path = checkpoint.find(run, ("ckpt.pt",) if cfg.latest else ("best.pt", "ckpt.pt"))
    state = checkpoint.load(path)
    device = pick_device(cfg.device)
    model, tokenizer = checkpoint.load_model(state, device), tokenizers.from_dict(state["tokenizer"])
    prompt = read_prompt(cfg.start)
    ids = encode_prompt(tokenizer, prompt).to(device)
    generator = torch.Generator().manual_seed(cfg.seed)
    how = dict(temperature=cfg.temperature, top_k=cfg.top_k, top_p=cfg.top_p, generator=generator)
    print(f"{path}: {model.cfg.attention} attention, update {state['step']}, on {device}", file=sys.stderr)
    for n in range(cfg.num_samples):
        if n:
            print("\n" + "-" * 40)
        print(prompt, end="", flush=True)
        for text in stream_text(model, tokenizer, ids, max_new_tokens=cfg.max_new_tokens, **how):
            print(text, end="", flush=True)
    print()


def main():
    import tyro

    sys.stdout.reconfigure(errors="replace")  # a terminal without the character shows "?" instead of failing
    try:
        sample(tyro.cli(SampleConfig, description=__doc__))
    except BrokenPipeError:  # the reader has enough, as in `python sample.py | head`
        os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())
    except (ValueError, OSError) as error:
        sys.exit(f"sample.py: {error}")


if __name__ == "__main__":
    main()
