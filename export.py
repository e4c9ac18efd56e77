"""A trained model for other programs, and back.

    python export.py runs/stories-diff --to=transformers    # a folder for AutoModelForCausalLM and AutoTokenizer
    python export.py runs/stories-diff --to=onnx            # a file for onnxruntime: any batch, any length
    python export.py FOLDER --from=transformers             # such a folder as a run, for sample.py and --init_from

What is made is compared with the model it comes from, logit by logit, before anything is written.
"""

import logging
import math
import os
import shutil
import sys
import warnings
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Annotated

import torch
import tyro

import checkpoint
import llama
from config import TrainConfig, need, need_packages
from data import fast_tokenizers, tokenizers
from model import eager

NEEDS = {  # --to, --from -> the packages that it takes
    ("transformers", ""): ("transformers",),
    ("", "transformers"): ("transformers",),
    ("onnx", ""): ("onnx", "onnxscript", "onnxruntime"),
}


@dataclass
class ExportConfig:
    source: tyro.conf.Positional[str] = ""  # the run's folder, empty means the newest; with --from, the folder to read
    to: str = ""  # transformers or onnx
    from_: Annotated[str, tyro.conf.arg(name="from")] = ""  # transformers
    out: str = ""  # what to make; empty means transformers or model.onnx in the run's folder; with --from, a new run


class Logits(torch.nn.Module):
    """(B, T) ids -> (B, T, V), and nothing else."""

    def __init__(self, model):
        super().__init__()
        self.model = model

    def forward(self, ids):
        return self.model(ids)[0]


def difference(model, logits):
    """The largest difference between a GPT's logits and those of `logits`, a function of ids, in units of the largest.
    Raises ValueError if rounding in float32 does not explain it."""
    ids = torch.randint(model.cfg.vocab_size, (3, 50), generator=torch.Generator().manual_seed(0))
    with torch.no_grad():
        expected = model(ids)[0]
        gap = ((logits(ids) - expected).abs().max() / expected.abs().max()).item()
    need(gap < 1e-4, f"the logits differ by {gap:.1e} of the largest: not the same model, so nothing was written")
    return gap


# Each of the three ways returns logits, a function of ids, to compare with, and save(path).


def to_transformers(model, tokenizer):
    from transformers import PreTrainedTokenizerFast

    theirs = llama.to_transformers(model, tokenizer.first()[0])
    fast = PreTrainedTokenizerFast(tokenizer_object=fast_tokenizers.to_fast(tokenizer))

    def save(folder):
        theirs.save_pretrained(folder)
        fast.save_pretrained(folder)

    return lambda ids: theirs(ids).logits, save


def to_onnx(model):
    """ids (batch, length) int64 -> logits (batch, length, V)."""
    import onnxruntime

    for block in model.blocks:
        block.attn.attend = eager  # matrix products and a softmax: every runtime has them
    ids = torch.zeros(2, 7, dtype=torch.int64)  # any sizes but 0 and 1, which would be taken for constants
    logging.getLogger("torch.onnx").setLevel(logging.ERROR)
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")  # torch's, about itself
        program = torch.onnx.export(
            Logits(model).eval(), (ids,), input_names=["ids"], output_names=["logits"],
            dynamic_shapes=({0: "batch", 1: "length"},), dynamo=True, verbose=False,
        )  # fmt: skip
    graph = program.model_proto.SerializeToString()
    session = onnxruntime.InferenceSession(graph)
    logits = lambda ids: torch.from_numpy(session.run(None, {"ids": ids.numpy()})[0])  # noqa: E731
    return logits, lambda path: checkpoint.write(path, lambda file: file.write(graph))


def from_transformers(source):
    """(GPT, logits, save): what it makes is a run for sample.py, --init_from and, told a --dataset, --eval_only."""
    model, theirs = llama.from_transformers(source)
    tokenizer = fast_tokenizers.load(source / "tokenizer.json")
    size, kind = tokenizer.vocab_size, tokenizer.to_dict()["kind"]
    need(size == model.cfg.vocab_size, f"{source} has vocab_size={model.cfg.vocab_size}, but a tokenizer of {size}")
    same = {k: v for k, v in asdict(model.cfg).items() if k != "vocab_size"}
    config = asdict(TrainConfig(dataset=f"(imported from {source})", tokenizer=kind, bpe_vocab_size=size, **same))

    def save(run):
        run.mkdir()
        checkpoint.write_config(run, config)
        checkpoint.save(
            run / "ckpt.pt", model=model.state_dict(), model_config=asdict(model.cfg), train_config=config,
            tokenizer=tokenizer.to_dict(), step=0, best_val_loss=math.inf,
        )  # fmt: skip

    return model, lambda ids: theirs(ids).logits, save


def export(cfg):
    """Makes what cfg says; returns its path. Raises ValueError or OSError with one sentence."""
    need((cfg.to, cfg.from_) in NEEDS, "choose one of --to=transformers, --to=onnx and --from=transformers")
    need_packages(*NEEDS[cfg.to, cfg.from_])
    source = Path(cfg.source if cfg.source or cfg.from_ else checkpoint.newest_run())
    beside = {"transformers": source / "transformers", "onnx": source / "model.onnx"}
    out = Path(cfg.out or beside.get(cfg.to) or checkpoint.free_name(source.resolve().name))
    need(not out.exists(), f"{out} exists already: choose another --out")
    if cfg.from_:
        model, logits, save = from_transformers(source)
    else:
        state = checkpoint.load(checkpoint.find(source))
        model, tokenizer = checkpoint.load_model(state), tokenizers.from_dict(state["tokenizer"])
        logits, save = to_onnx(model) if cfg.to == "onnx" else to_transformers(model, tokenizer)
    gap = difference(model, logits)
    temporary = out.with_name(f"{out.name}.{os.getpid()}.new")  # whole, or not there
    try:
        out.parent.mkdir(parents=True, exist_ok=True)
        save(temporary)
        os.replace(temporary, out)
    finally:
        shutil.rmtree(temporary, ignore_errors=True)
    print(f"{out}: {model.cfg.attention} attention, logits equal to {gap:.0e} of the largest")
    return out


def main():
    try:
        export(tyro.cli(ExportConfig, description=__doc__))
    except (ValueError, OSError) as error:
        sys.exit(f"export.py: {error}")


if __name__ == "__main__":
    main()
