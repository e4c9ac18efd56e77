"""Where does a trained model look? The two maps of one head and their difference, as a picture.

    python -m experiments.maps                                  # the newest run, a question about a story
    python -m experiments.maps --out_dir=runs/my-diff --prompt="A text of mine, up to where it gets interesting"

Rows are the tokens that look, columns the tokens looked at; blue is positive weight, red negative. The last row is
where the model stands when it is about to say what comes after the prompt.
"""

from dataclasses import dataclass
from pathlib import Path

import numpy as np

import checkpoint
import experiments
from data import tokenizers
from sample import encode_prompt

PROMPT = "\nAnn mends maps. Ben hides kites. The door was open. Nobody wants jugs. Fay sells hats. And Ben? Ben"


@dataclass
class MapsConfig:
    out_dir: str = ""  # the run's folder; empty means the newest
    prompt: str = ""  # the text to look at; empty means a question about a story
    layer: int = -1  # counted from 0; -1 picks the layer and head that look back most sharply from the last token
    head: int = 0  # counted from 0; of the layer, if that is given
    picture: str = ""  # the picture's path, its numbers beside it as .json; empty means maps.png in the run's folder


def maps_of(model, tokenizer, prompt, layer=-1, head=0):
    """{"tokens", "layer", "head", "lam", "maps": {title: (T, T) list}} of one head. Raises ValueError by name."""
    ids = encode_prompt(tokenizer, prompt)
    if ids.shape[1] < 10:
        raise ValueError(f"the prompt {prompt!r} has {ids.shape[1]} tokens: use one of at least 10")
    maps = model.attention_maps(ids)
    weights = [A1[0] if A2 is None else (A1 - lam[..., None] * A2)[0] for A1, A2, lam in maps]  # (heads, T, T)
    if layer == -1:
        # the last token's strongest weight, but for its neighbours and the first token
        far = [w[:, -1, 1:-4].amax(dim=1) for w in weights]
        layer = max(range(len(far)), key=lambda i: far[i].max())
        head = int(far[layer].argmax())
    if not (0 <= layer < len(maps) and 0 <= head < len(weights[0])):
        raise ValueError(f"layer={layer}, head={head}: this model has {len(maps)} layers of {len(weights[0])} heads")
    A1, A2, lam = maps[layer]
    pictures = {"A1": A1[0, head]}
    if A2 is not None:
        pictures |= {"A2": A2[0, head], "A1 - lambda A2": weights[layer][head]}
        lam = lam if lam.ndim == 0 else lam[0, head].mean()
    return {
        "tokens": [tokenizer.decode_bytes([i]).decode(errors="replace") for i in ids[0].tolist()],
        "layer": layer, "head": head, "lam": None if lam is None else round(lam.item(), 4),
        "attention": model.cfg.attention, "maps": {k: np.round(A.numpy(), 4).tolist() for k, A in pictures.items()},
    }  # fmt: skip


def picture(numbers, path):
    import matplotlib.pyplot as plt

    tokens = [{" ": "␣", "\n": "⏎"}.get(token, token.strip(" ")) for token in numbers["tokens"]]
    size = min(8, 280 / len(tokens))  # points
    figure, axes = plt.subplots(1, len(numbers["maps"]), figsize=(5 * len(numbers["maps"]), 5.4), layout="constrained")
    for ax, (title, A) in zip(np.atleast_1d(axes), numbers["maps"].items()):
        A = np.array(A)
        # Square roots, so that small weights can be seen beside large ones.
        ax.imshow(np.sign(A) * np.sqrt(np.abs(A)), cmap="RdBu", vmin=-1, vmax=1)
        ax.set_title(f"{title}: {(A < 0).sum() / np.tril(np.ones_like(A)).sum():.0%} of weights negative", fontsize=10)
        ax.set_xticks(range(len(tokens)), tokens, fontsize=size, rotation=90)
        ax.set_yticks(range(len(tokens)), tokens, fontsize=size)
        ax.tick_params(length=0, pad=1)
        j = A[-1].argmax()
        note = f"the last token's largest weight: {A[-1, j]:+.2f} on {tokens[j]!r}"
        ax.annotate(
            note,
            (j, len(A) - 1),
            (len(A) * 0.35, len(A) * 0.12),
            fontsize=8,
            arrowprops={"arrowstyle": "->", "lw": 0.6},
        )
    lam = "" if numbers["lam"] is None else f", lambda {numbers['lam']:.2f}"
    figure.suptitle(f"{numbers['attention']}: layer {numbers['layer']}, head {numbers['head']}{lam}", fontsize=11)
    figure.savefig(path, dpi=160)
    plt.close(figure)


def main():
    import sys

    import tyro

    cfg = tyro.cli(MapsConfig, description=__doc__)
    try:
        run = cfg.out_dir or checkpoint.newest_run()
        state = checkpoint.load(checkpoint.find(run))
        model, tokenizer = checkpoint.load_model(state), tokenizers.from_dict(state["tokenizer"])
        if not cfg.prompt and state["train_config"]["dataset"] != "stories":
            raise ValueError(f"{run} was not trained on stories: give a --prompt of its own kind")
        numbers = maps_of(model, tokenizer, cfg.prompt or PROMPT, cfg.layer, cfg.head)
    except (ValueError, OSError) as error:
        sys.exit(f"maps: {error}")
    path = Path(cfg.picture or Path(run) / "maps.png")
    experiments.save(path.with_suffix(".json"), numbers)
    picture(numbers, path)
    for title, A in numbers["maps"].items():
        last = np.array(A)[-1]
        strongest = ", ".join(f"{numbers['tokens'][j]!r} {last[j]:+.2f}" for j in np.abs(last).argsort()[::-1][:3])
        print(f"{title:15s} rows sum to {np.array(A)[-1].sum():.2f}; the last token looks at {strongest}")
    print(path)


if __name__ == "__main__":
    main()
