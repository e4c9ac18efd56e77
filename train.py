"""Trains a GPT on one GPU, a Mac or a CPU.

    python train.py                              # differential attention, on the built-in stories
    python train.py --attention=standard         # the pair: one flag apart
    python train.py --dataset=my.txt --max_iters=500
    python train.py --resume --out_dir=runs/stories-diff

From Python: train(TrainConfig(...)) returns the numbers. The batches of a run depend on data_seed and
the step alone, so two runs that differ in the model see the same text in the same order.
"""

import math
import signal
import sys
import time
from contextlib import nullcontext
from dataclasses import asdict, replace
from pathlib import Path

import numpy as np
import torch
import torch.nn.functional as F
from tqdm import tqdm

import checkpoint
import data
from config import MAY_CHANGE, PRESETS, TrainConfig
from device import PEAK_FLOPS, pick_device, precision
from model import GPT
from run_log import EventLog, attention_numbers

# ---------------------------------------------------------------------------------------------
# Parts


def learning_rate(step, cfg):
    """The rate of update `step`: up to learning_rate in warmup_iters, then down to min_lr at lr_decay_iters."""
    if step < cfg.warmup_iters:
        return cfg.learning_rate * (step + 1) / (cfg.warmup_iters + 1)
    end = cfg.lr_decay_iters or cfg.max_iters
    done = min(1.0, (step - cfg.warmup_iters) / max(1, end - cfg.warmup_iters))
    left = 1 - done if cfg.lr_schedule == "linear" else (1 + math.cos(math.pi * done)) / 2
    return cfg.min_lr + (cfg.learning_rate - cfg.min_lr) * left


def make_optimizer(model, cfg):
    matrices = [p for p in model.parameters() if p.ndim >= 2]
    vectors = [p for p in model.parameters() if p.ndim < 2]  # norm gains, lambda vectors
    groups = [{"params": matrices, "weight_decay": cfg.weight_decay}, {"params": vectors, "weight_decay": 0.0}]
    return torch.optim.AdamW(groups, lr=cfg.learning_rate, betas=(cfg.beta1, cfg.beta2), fused=True)


@torch.no_grad()
def evaluate(model, windows, batch_size, device, autocast=None):
    """Validation loss in nats a token over the fixed windows and, where they ask questions, the share answered right.

    An answer is right if each of its tokens is the likeliest after the true ones before it: greedy
    generation would then write the whole of it.
    """
    model.eval()
    nats, hits = 0.0, []
    for rows in zip(*(np.split(a, range(batch_size, len(a), batch_size)) for a in windows[:2])):
        x, y = (torch.from_numpy(a).to(device) for a in rows)
        with autocast or nullcontext():
            logits, _ = model(x)
        nats += F.cross_entropy(logits.float().flatten(0, 1), y.flatten(), ignore_index=-1, reduction="sum").item()
        hits.append((logits.argmax(dim=-1) == y).cpu().numpy())
    model.train()
    hits, question = np.concatenate(hits), windows[2]
    right = np.ones(question.max() + 1, dtype=bool)
    np.logical_and.at(right, question[question >= 0], hits[question >= 0])
    return nats / int((windows[1] >= 0).sum()), float(right.mean()) if len(right) else None


class StopOnSignal:
    """Within it, the first SIGINT or SIGTERM only sets `signum`, so that the loop can save; a second one kills."""

    def __enter__(self):
        self.signum, self.old = 0, {}
        try:
            self.old = {s: signal.signal(s, self.handle) for s in (signal.SIGINT, signal.SIGTERM)}
        except ValueError:  # not in the main thread: signals are not ours to handle
            pass
        return self

    def handle(self, signum, frame):
        self.signum = signum
        self.__exit__()

    def __exit__(self, *_):
        for s, handler in self.old.items():
            signal.signal(s, handler)


# ---------------------------------------------------------------------------------------------
# The run


def starting_point(cfg):
    """(cfg, state, dataset, model_cfg): what a run begins with, all of it checked; state is a checkpoint or None."""
    goes_on = cfg.resume or cfg.eval_only
    if goes_on and not cfg.out_dir:
        cfg = replace(cfg, out_dir=str(checkpoint.newest_run()))
    state = None
    if goes_on or cfg.init_from:
        names = ("ckpt.pt",) if cfg.resume else ("best.pt", "ckpt.pt")
        state = checkpoint.load(checkpoint.find(cfg.out_dir if goes_on else cfg.init_from, names))
    elif cfg.out_dir and (Path(cfg.out_dir) / "ckpt.pt").exists():
        raise ValueError(
            f"{cfg.out_dir} holds a run already: add --resume to go on with it, or choose another --out_dir"
        )
    if cfg.resume:
        for name, old in state["train_config"].items():
            if name not in MAY_CHANGE and getattr(cfg, name) != old:
                raise ValueError(f"{name}={getattr(cfg, name)!r} cannot change on --resume: this run has {old!r}")

    dataset = data.load(cfg.dataset, cfg.tokenizer, cfg.bpe_vocab_size, cfg.difficulty())
    dataset.starts("train", cfg.block_size)  # raises here, not at the first step, if the text is too short
    if state and dataset.tokenizer.to_dict() != state["tokenizer"]:
        theirs = data.tokenizers.from_dict(state["tokenizer"])
        raise ValueError(
            f"dataset={cfg.dataset!r} has a vocabulary of {dataset.tokenizer.vocab_size} tokens that is not the"
            f" checkpoint's of {theirs.vocab_size}: use the text that it was trained on"
        )
    model_cfg = cfg.model_config(dataset.tokenizer.vocab_size)
    for name, value in asdict(model_cfg).items():
        if state and state["model_config"][name] != value and name != "dropout":
            raise ValueError(f"{name}={value!r} does not fit the checkpoint, which has {state['model_config'][name]!r}")
    return cfg, state, dataset, model_cfg


def train(cfg):
    """Trains, or resumes, or evaluates, as cfg says; prints as it goes. Returns the run's numbers, a dict.

    Raises ValueError with one sentence for settings or files that do not fit, FloatingPointError when the loss
    is no longer a number.
    """
    cfg.check()
    device = pick_device(cfg.device)
    bf16 = device.type == "cuda" and torch.cuda.is_bf16_supported()
    dtype, use_autocast, use_scaler = precision(device.type, cfg.dtype, bf16)
    autocast = torch.autocast(device.type, getattr(torch, dtype)) if use_autocast else nullcontext()

    cfg, state, dataset, model_cfg = starting_point(cfg)
    windows = dataset.val_windows(cfg.eval_windows, cfg.block_size)
    entropy = dataset.val_entropy(len(windows[0]))

    # The model and its optimiser
    model = GPT(model_cfg, cfg.seed)
    if state:
        model.load_state_dict(state["model"])
    model = model.to(device)
    optimizer, scaler = make_optimizer(model, cfg), torch.amp.GradScaler(device.type, enabled=use_scaler)
    step, best = 0, math.inf
    if cfg.resume:
        optimizer.load_state_dict(state["optimizer"])
        scaler.load_state_dict(state["scaler"])
        step, best = state["step"], state["best_val_loss"]
        best_path = Path(cfg.out_dir) / "best.pt"
        if best_path.exists():  # may know more: ckpt.pt is saved before its evaluation
            best = min(best, checkpoint.load(best_path)["best_val_loss"])
    compiled = cfg.compile == "on" or (cfg.compile == "auto" and device.type == "cuda")
    forward = torch.compile(model) if compiled else model
    params, flops = model.num_params(), model.flops_per_token(cfg.block_size)
    with torch.device("meta"):
        standard = GPT(replace(model_cfg, attention="standard")).num_params()
    gpu = torch.cuda.get_device_name(device) if device.type == "cuda" else ""
    peak = PEAK_FLOPS.get(gpu)
    print(f"{cfg.attention} attention, {params:,} parameters (standard: {standard:,}), {flops / 1e6:.1f} MFLOP a token")
    print(f"{gpu or device.type}, {dtype}, fused attention{', compiled' if compiled else ''}")
    if cfg.eval_only:
        val_loss, answers = evaluate(model, windows, cfg.batch_size, device, autocast)
        print(describe(val_loss, answers, entropy))
        return {"val_loss": val_loss, "answers": answers, "entropy": entropy, "params": params, "out_dir": cfg.out_dir}

    # The folder
    if not cfg.out_dir:
        cfg = replace(cfg, out_dir=str(checkpoint.free_name(f"{Path(cfg.dataset).stem}-{cfg.attention}")))
    run = Path(cfg.out_dir)
    run.mkdir(parents=True, exist_ok=True)
    checkpoint.write_config(run, asdict(replace(cfg, resume=False)))
    log = (EventLog if cfg.log == "tensorboard" else checkpoint.Log)(run, step if cfg.resume else None)
    if not cfg.resume:
        log.append(
            torch=torch.__version__, numpy=np.__version__, python=sys.version.split()[0], device=gpu or device.type,
            threads=torch.get_num_threads(), params=params, params_standard=standard, flops_per_token=flops,
            entropy=entropy, commit=checkpoint.commit(),
        )  # fmt: skip

    def keep(name, **more):
        checkpoint.save(
            run / name, model=model.state_dict(), model_config=asdict(model_cfg), tokenizer=dataset.tokenizer.to_dict(),
            train_config=asdict(cfg), step=step, best_val_loss=best, **more,
        )  # fmt: skip

    print(f"{run}: update {step} of {cfg.max_iters}, {len(windows[0])} validation windows of {cfg.dataset}")
    if entropy is not None:
        guesses = ", ".join(f"{guess} {share:.0%}" for guess, share in dataset.meta["guesses"].items())
        print(f"entropy of all stories {dataset.meta['expected_entropy']:.4f}; answers right by guessing: {guesses}")
    bar = tqdm(total=cfg.max_iters, initial=step, unit="step", disable=not sys.stderr.isatty(), smoothing=0.05)
    train_loss, seconds, counted = None, 0.0, 0
    with StopOnSignal() as stop, bar:
        while True:
            last = step >= cfg.max_iters or stop.signum
            if step % cfg.eval_interval == 0 or last:
                if not all(p.isfinite().all() for p in model.parameters()):
                    raise diverged(step, "largest weight", math.nan, run)
                # Save first: a kill during a long evaluation then costs nothing, and resuming evaluates again.
                keep("ckpt.pt", optimizer=optimizer.state_dict(), scaler=scaler.state_dict())
                if stop.signum:
                    break
                val_loss, answers = evaluate(model, windows, cfg.batch_size, device, autocast)
                if not math.isfinite(val_loss):
                    raise diverged(step, "validation loss", val_loss, run)
                window = torch.from_numpy(windows[0][:1, windows[1][0] >= 0][:, :256])  # without what fills up a story
                attention = attention_numbers(model, window.to(device))
                log.append(step=step, val_loss=val_loss, answers=answers, **attention)
                speed = f", {counted / seconds:,.0f} tokens/s" if seconds else ""
                bar.write(f"update {step}: {describe(val_loss, answers, entropy)}{speed}")  # print, above the bar
                if val_loss < best:
                    best = val_loss
                    keep("best.pt")
            if last:
                break

            start = time.perf_counter()
            torch.manual_seed(cfg.seed * 1_000_003 + step)  # dropout's stream, the same after an interruption
            rate = learning_rate(step, cfg)
            for group in optimizer.param_groups:
                group["lr"] = rate
            # A step's batch is drawn whole, then cut: how many pieces must not change what is seen.
            rows = dataset.batch(step, cfg.batch_size * cfg.gradient_accumulation_steps, cfg.block_size, cfg.data_seed)
            total = 0.0
            for x, y in zip(*(np.split(a, cfg.gradient_accumulation_steps) for a in rows)):
                with autocast:
                    _, loss = forward(to_device(x, device), to_device(y, device))
                scaler.scale(loss / cfg.gradient_accumulation_steps).backward()
                total += loss.detach() / cfg.gradient_accumulation_steps
            scaler.unscale_(optimizer)
            norm = torch.nn.utils.clip_grad_norm_(model.parameters(), cfg.grad_clip or math.inf)
            scaler.step(optimizer)
            scaler.update()
            optimizer.zero_grad(set_to_none=True)
            step += 1
            bar.update()

            if step % cfg.log_interval == 0 or step % cfg.eval_interval == 0 or step == cfg.max_iters:
                train_loss, norm = total.item(), norm.item()  # the device is waited for only here
                for name, value in (("loss", train_loss), ("gradient norm", norm)):
                    if not math.isfinite(value) and not use_scaler:
                        raise diverged(step, name, value, run)
            seconds += time.perf_counter() - start
            counted += rows[0].size
            if step % cfg.log_interval == 0:
                record = {"step": step - 1, "loss": train_loss, "grad_norm": norm, "lr": rate}
                record["tokens_per_s"] = counted / seconds
                if peak:
                    record["mfu"] = record["tokens_per_s"] * flops / peak
                log.append(**record)
                bar.set_postfix_str(f"loss {train_loss:.3f}, {record['tokens_per_s']:,.0f} tokens/s")

    if stop.signum:
        return {"interrupted": stop.signum, "out_dir": str(run), "steps": step}
    history = [(line["step"], line["val_loss"]) for line in checkpoint.read_log(run) if "val_loss" in line]
    return {
        "val_loss": val_loss, "best_val_loss": best, "train_loss": train_loss, "answers": answers, "entropy": entropy,
        "lambdas": attention["lambdas"], "params": params, "params_standard": standard, "steps": step,
        "seconds": seconds, "tokens_per_s": counted / seconds if seconds else None, "history": history,
        "out_dir": str(run),
    }  # fmt: skip


def diverged(step, name, value, run):
    return FloatingPointError(
        f"the {name} is {value} at update {step}: the run is lost from there; the last good weights are in"
        f" {run / 'best.pt'}. Try a lower --learning_rate, a longer --warmup_iters or --grad_clip=1.0"
    )


def describe(loss, answers, entropy):
    text = f"validation loss {loss:.4f} nats a token"
    if entropy is not None:
        text += f" (entropy {entropy:.4f})"
    return text if answers is None else text + f", {answers:.1%} of answers right"


def to_device(array, device):
    tensor = torch.from_numpy(array)
    return tensor.pin_memory().to(device, non_blocking=True) if device.type == "cuda" else tensor.to(device)


def report(cfg, result, tokens=300):
    """Prints a sample, the run's numbers and what to type next."""
    run = result["out_dir"]
    state = checkpoint.load(checkpoint.find(run))
    model, tokenizer = checkpoint.load_model(state), data.tokenizers.from_dict(state["tokenizer"])
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
    if cfg.attention != "standard":
        print("      the same again with --attention=standard, to compare")


def main():
    import tyro  # only here: train(cfg) needs no command line

    sys.stdout.reconfigure(errors="replace")  # a terminal without a character shows "?" instead of failing

    def parse(default):
        return tyro.cli(TrainConfig, default=default, description=__doc__)

    cfg = parse(TrainConfig())
    try:
        if cfg.preset not in PRESETS:
            cfg.check()
        # The flags again, over other defaults: those of the preset, of the run that goes on, or of the weights' model.
        default = replace(TrainConfig(), **PRESETS[cfg.preset])
        if cfg.resume or cfg.eval_only:
            out_dir = cfg.out_dir or str(checkpoint.newest_run())
            default = replace(TrainConfig(**checkpoint.read_config(out_dir)), out_dir=out_dir)
        elif cfg.init_from:
            theirs = checkpoint.load(checkpoint.find(cfg.init_from))["model_config"]
            default = replace(default, **{k: v for k, v in theirs.items() if k != "vocab_size"})
        cfg = parse(default)
        result = train(cfg)
    except (ValueError, OSError, FloatingPointError) as error:
        sys.exit(f"train.py: {error}")
    except KeyboardInterrupt:
        sys.exit(130)
    if "interrupted" in result:
        print(
            f"stopped by signal {result['interrupted']}, saved update {result['steps']} in {result['out_dir']}/ckpt.pt"
        )
        print(f"go on: python train.py --resume --out_dir={result['out_dir']}")
        sys.exit(128 + result["interrupted"])
    if not cfg.eval_only:
        report(cfg, result)


if __name__ == "__main__":
    main()
