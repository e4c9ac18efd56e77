"""What a run says to the person who started it."""

import torch

import checkpoint
from data import tokenizers


def describe(loss, answers, entropy):
    text = f"validation loss {loss:.4f} nats a token"
    if entropy is not None:
        text += f" (entropy {entropy:.4f})"
    return text if answers is None else text + f", {answers:.1%} of answers right"


def duration(seconds):
    for unit, size in (("h", 3600), ("min", 60)):
        if seconds >= 2 * size:
            return f"{seconds / size:.1f} {unit}"
    return f"{seconds:.0f} s"


def report(cfg, result, tokens=300):
    """Prints a sample, the run's numbers and what to type next."""
    run = result["out_dir"]
    state = checkpoint.load(checkpoint.find(run))
    model, tokenizer = checkpoint.load_model(state), tokenizers.from_dict(state["tokenizer"])
    first = torch.tensor([tokenizer.first()])
    idx = model.generate(first, tokens, generator=torch.Generator().manual_seed(0))
    text = tokenizer.decode_bytes(idx[0, first.shape[1] :].tolist()).decode(errors="replace")
    print(f"\nA sample at temperature 1:\n\n{text}\n")
    print(describe(result["val_loss"], result["answers"], result["entropy"]))
    if result["tokens_per_s"]:
        speed = f"{result['seconds']:.0f} s of training, {result['tokens_per_s']:,.0f} tokens/s"
        print(f"{result['steps']} updates, {speed}, {result['params']:,} parameters")
    print(f"saved in {run}: ckpt.pt (latest), best.pt (lowest validation loss), log.jsonl, config.json")
    print(f"next: python sample.py --out_dir={run}")
    if cfg.attention != "standard" and not (cfg.resume or cfg.init_from):
        print("      the same again with --attention=standard, to compare")
