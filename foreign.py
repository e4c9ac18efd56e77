"""What a checkpoint of somebody else may hold: looked at before it is used."""

from dataclasses import fields

import torch

from model import ATTENTIONS, GPT, GPTConfig


def check(state):
    """Raises an exception, of whatever kind, if this is not what `save` is given. Nothing large is built for that."""
    cfg, tokenizer, settings = GPTConfig(**state["model_config"]), state["tokenizer"], state["train_config"]
    entries = {"char": "chars", "bpe": "tokens"}.get(tokenizer["kind"])
    whole = (
        all(isinstance(getattr(cfg, f.name), (int, float) if f.type is float else f.type) for f in fields(GPTConfig)),
        1 <= cfg.n_layer <= len(state["model"]) and cfg.block_size >= 1 and cfg.rope_theta > 0,
        cfg.vocab_size == (len(tokenizer[entries]) if entries else 50257),
        type(state["step"]) is int and 0 <= state["step"] < 1 << 53 and type(state["best_val_loss"]) is float,
        type(state.get("processes", 1)) is int,
        {"dataset", "max_iters", "batch_size", "gradient_accumulation_steps"} <= set(settings),
    )
    if not all(whole):
        raise ValueError(whole)
    if cfg.attention in ATTENTIONS:
        with torch.device("meta"):
            # A copy: assign=True would stay in the metadata of the one that is loaded later, and untie its embeddings.
            GPT(cfg).load_state_dict(dict(state["model"]), assign=True)


def restore(state, optimizer, scaler):
    """Puts what a checkpoint holds of them back: the moments, not the optimizer's settings, which the run has itself.
    Raises ValueError with one sentence if it does not fit: a fused AdamW would write beyond moments that are too small.
    """
    try:
        params = [p for group in optimizer.param_groups for p in group["params"]]
        moments = state["optimizer"]["state"] if state["step"] else {}
        shapes = [
            tuple(moments[i][name].shape for name in ("exp_avg", "exp_avg_sq", "step")) for i in range(len(moments))
        ]
        if any(t.layout is not torch.strided for moment in moments.values() for t in moment.values()):
            raise TypeError
        if state["step"] and shapes != [(p.shape, p.shape, ()) for p in params]:
            raise ValueError(shapes)
        optimizer.load_state_dict({"state": moments, "param_groups": optimizer.state_dict()["param_groups"]})
        scaler.load_state_dict(state["scaler"])
    except Exception as error:  # whatever a damaged or foreign state provokes
        raise ValueError(
            f"the optimizer in ckpt.pt does not fit its weights ({type(error).__name__}): start anew with --init_from"
        ) from None
