"""Trains a GPT on one GPU, a Mac or a CPU, or on many GPUs with torchrun.

    python train.py                              # differential attention, on the built-in stories
    python train.py --attention=standard         # the pair: one flag apart
    python train.py --dataset=my.txt --max_iters=500
    python train.py --resume --out_dir=runs/stories-diff
    torchrun --nproc_per_node=8 train.py --preset=gpt2

From Python: train(TrainConfig(...)) returns the numbers. The batches of a run depend on data_seed and
the step alone, so two runs that differ in the model see the same text in the same order.
"""

from process import StopOnSignal, begin

if __name__ == "__main__":
    begin("train.py")

import math
import sys
import time
from contextlib import nullcontext
from dataclasses import asdict, replace
from pathlib import Path

import numpy as np
import torch
from tqdm import tqdm

import checkpoint
import cost
import data
import foreign
from config import PRESETS, TrainConfig, can_go_on, need
from device import PEAK_FLOPS, compiled, made_with, precision
from distributed import ALONE, gone, join
from dropout import keys_of
from evaluate import evaluate
from health import LARGEST_LAMBDA, Health, diverged
from model import BLOCKS_UNTIL, GPT
from report import describe, duration, report
from run_log import EventLog, Log, attention_numbers, read_log

# --- Parts -----------------------------------------------------------------------------------


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


# --- The run ---------------------------------------------------------------------------------


def starting_point(cfg, processes):
    """(cfg, state, dataset, model_cfg, windows): what a run begins with, checked; state is a checkpoint or None."""
    goes_on = cfg.resume or cfg.eval_only
    if goes_on and not cfg.out_dir:
        cfg = replace(cfg, out_dir=str(checkpoint.newest_run()))
    need(
        not Path(cfg.out_dir).is_file(), f"out_dir={cfg.out_dir!r} is a file: name a folder, or one that does not exist"
    )
    state = None
    if goes_on or cfg.init_from:
        names = ("ckpt.pt",) if cfg.resume else ("best.pt", "ckpt.pt")
        state = checkpoint.load(checkpoint.find(cfg.out_dir if goes_on else cfg.init_from, names))
    if cfg.out_dir and not goes_on:
        checkpoint.must_be_free(cfg.out_dir)
        if any((Path(cfg.out_dir) / name).exists() for name in ("config.json", "log.jsonl")):
            checkpoint.read_config(cfg.out_dir, TrainConfig)  # else they are another program's
    if cfg.resume:
        can_go_on(cfg, state, processes)
    if not (goes_on or cfg.out_dir):
        cfg = replace(cfg, out_dir=str(checkpoint.free_name(f"{Path(cfg.dataset).stem}-{cfg.attention}")))

    dataset = data.load(cfg.dataset, cfg.tokenizer, cfg.bpe_vocab_size, cfg.difficulty())
    dataset.starts("train", cfg.block_size)  # raises here, not at the first step, if the text is too short
    if state and dataset.tokenizer.to_dict() != state["tokenizer"]:
        theirs = data.tokenizers.from_dict(state["tokenizer"])
        raise ValueError(
            f"dataset={cfg.dataset!r} has a vocabulary of {dataset.tokenizer.vocab_size} tokens that is not the"
            f" checkpoint's of {theirs.vocab_size}: use the text that it was trained on"
        )
    if cfg.resume and state.get("text", dataset.mark()) != dataset.mark():
        raise ValueError(f"dataset={cfg.dataset!r} is not the text that this run began with: use --init_from instead")
    model_cfg = cfg.model_config(dataset.tokenizer.vocab_size)
    for name, value in asdict(model_cfg).items():
        if state and state["model_config"][name] != value and name not in ("dropout", "init_std", "emb_std"):
            raise ValueError(f"{name}={value!r} does not fit the checkpoint, which has {state['model_config'][name]!r}")
    return cfg, state, dataset, model_cfg, dataset.val_windows(cfg.eval_windows, cfg.block_size)


def train(cfg, team=ALONE):
    """Trains, or resumes, or evaluates, as cfg says; prints as it goes. Returns the run's numbers, a dict.

    Raises ValueError with one sentence for settings or files that do not fit, FloatingPointError when the loss
    is no longer a number, MemoryError when there is too little of it. `team`: the processes that train together.
    """
    cfg.check()
    cfg = cfg.resolved()
    device = team.together(lambda: team.device(cfg.device))
    cfg, state, dataset, model_cfg, windows = team.together(lambda: starting_point(cfg, team.size))
    entropy = dataset.val_entropy(len(windows[0]))
    bf16 = device.type == "cuda" and torch.cuda.is_bf16_supported(including_emulation=False)
    dtype, use_autocast, use_scaler = precision(device.type, cfg.dtype, bf16)
    autocast = torch.autocast(device.type, getattr(torch, dtype)) if use_autocast else nullcontext()
    gpu = torch.cuda.get_device_name(device) if device.type == "cuda" else ""
    peak = PEAK_FLOPS.get(gpu, 0) * use_autocast  # FLOP/s, in 16 bits

    with torch.device("meta"):  # counts, and needs no memory
        model, standard = GPT(model_cfg), GPT(replace(model_cfg, attention="standard")).num_params()
    params, flops = model.num_params(), cost.flops_per_token(model, cfg.block_size)
    needs, fits = cost.plan(cfg, model_cfg, params, device, use_autocast, team.local_size)
    size = f"{params:,} parameters (standard: {standard:,}), {model_cfg.vocab_size:,} kinds of token"
    print(f"{cfg.attention} attention, {size}, {flops / 1e6:.1f} MFLOP a token")
    way = "in blocks" if device.type == "cpu" and cfg.block_size <= BLOCKS_UNTIL else "fused"  # as `fastest` has it
    print(
        f"{f'{team.size} x ' * (team.size > 1)}{gpu or device.type}"
        f"{f' ({peak / 1e12:.0f} TFLOP/s at best)' * (peak > 0)}, {dtype}, attention {way}"
    )
    if cfg.dtype not in ("auto", dtype):
        print(f"warning: this GPU has no {cfg.dtype} of its own: {dtype} instead")
    if not cfg.eval_only:
        print(needs if fits else f"warning: this needs {needs}: {cost.LOWER}")

    # The model and its optimiser
    with cost.in_words(needs):
        model = GPT(model_cfg, cfg.seed)
        if state:
            model.load_state_dict(state["model"])
        model = model.to(device)
    if cfg.grad_checkpoint:
        cost.compute_again(model)
    optimizer, scaler = make_optimizer(model, cfg), torch.amp.GradScaler(device.type, enabled=use_scaler)
    step, best = 0, math.inf
    if cfg.resume:
        foreign.restore(state, optimizer, scaler)
        step, best, old_end = state["step"], state["best_val_loss"], state["train_config"]["max_iters"]
        best_path = Path(cfg.out_dir) / "best.pt"
        if best_path.exists():  # may know more: ckpt.pt is saved before its evaluation
            best = min(best, checkpoint.load(best_path)["best_val_loss"])
    state = None  # the weights are twice in memory no longer
    if cfg.eval_only:
        val_loss, answers = evaluate(model, windows, cfg.batch_size, device, autocast, team)
        print(f"{cfg.out_dir}: {describe(val_loss, answers, entropy)}")
        return {"val_loss": val_loss, "answers": answers, "entropy": entropy, "params": params, "out_dir": cfg.out_dir}

    forward = model
    if cfg.compile == "on" or (cfg.compile == "auto" and device.type == "cuda"):
        batch = *dataset.batch(0, cfg.batch_size, cfg.block_size, cfg.data_seed), keys_of(0, cfg.batch_size, cfg.seed)
        batch = [to_device(a, device) for a in batch]
        with cost.in_words(needs):
            forward = team.together(lambda: compiled(model, batch, autocast, cfg.compile))
    forward = team.share(forward)

    # The folder, which the first process alone writes
    run = Path(cfg.out_dir)

    def claimed():
        if not team.first:
            return nullcontext()
        run.mkdir(parents=True, exist_ok=True)
        log = (EventLog if cfg.log == "tensorboard" else Log)(run, step if cfg.resume else None)
        checkpoint.write_config(run, asdict(replace(cfg, resume=False)))
        if not cfg.resume:
            log.append(
                **made_with(gpu or device.type), processes=team.size, params=params, params_standard=standard,
                flops_per_token=flops, entropy=entropy,
            )  # fmt: skip
        return log

    log = team.together(claimed)

    def note(**record):
        if team.first:
            log.append(**record)

    def keep(name, **more):
        if team.first:
            checkpoint.save(
                run / name, model=model.state_dict(), model_config=asdict(model_cfg), step=step, best_val_loss=best,
                tokenizer=dataset.tokenizer.to_dict(), text=dataset.mark(), train_config=asdict(cfg),
                processes=team.size, **more,
            )  # fmt: skip

    print(f"{run}: update {step} of {cfg.max_iters}, {len(windows[0])} validation windows of {cfg.dataset}")
    if cfg.resume and step >= cfg.max_iters:
        print(f"this run is complete: a larger --max_iters than {cfg.max_iters} would go on with it")
    if cfg.resume and old_end not in (0, cfg.max_iters) and not cfg.lr_decay_iters:
        print(f"the learning rate ends at update {cfg.max_iters} now, not at {old_end}: no longer the same run")
    if entropy is not None:
        guesses = ", ".join(f"{guess} {share:.0%}" for guess, share in dataset.meta["guesses"].items())
        print(f"entropy of all stories {dataset.meta['expected_entropy']:.4f}; answers right by guessing: {guesses}")
    bar = tqdm(total=cfg.max_iters, initial=step, unit="step", disable=not sys.stderr.isatty(), smoothing=0.05)
    train_loss, seconds, counted, timed, health = None, 0.0, 0, step + 10, Health(step, device)
    with StopOnSignal() as stop, bar, log, cost.in_words(needs):
        while True:
            signum = team.highest(stop.signum)  # a signal to one process stops all
            last = step >= cfg.max_iters or signum
            if step % cfg.eval_interval == 0 or last:
                if not all(p.isfinite().all() for p in model.parameters()):
                    raise diverged(step, "largest weight", math.nan, run, model)
                # Save first: a kill during a long evaluation then costs nothing, and resuming evaluates again.
                keep("ckpt.pt", optimizer=optimizer.state_dict(), scaler=scaler.state_dict())
                if signum:
                    team.highest(0)  # the others wait until the first has saved: torchrun ends all when one leaves
                    break
                val_loss, answers = evaluate(model, windows, cfg.batch_size, device, autocast, team)
                if not math.isfinite(val_loss):
                    raise diverged(step, "validation loss", val_loss, run, model)
                window = torch.from_numpy(windows[0][:1, windows[1][0] >= 0][:, :256])  # without what fills up a story
                attention = attention_numbers(model, window.to(device))
                if not max(map(abs, attention["lambdas"]), default=0) <= LARGEST_LAMBDA:
                    raise diverged(step, "largest lambda", max(attention["lambdas"], key=abs), run, model)
                note(step=step, val_loss=val_loss, answers=answers, **attention)
                speed = f", {counted / seconds:,.0f} tokens/s" if seconds else ""
                bar.write(f"update {step}: {describe(val_loss, answers, entropy)}{speed}")  # print, above the bar
                if val_loss < best:
                    best = val_loss
                    keep("best.pt")
            if last:
                break

            start = time.perf_counter()
            rate = learning_rate(step, cfg)
            for group in optimizer.param_groups:
                group["lr"] = rate
            # A step's batch is drawn whole, then cut: how many pieces must not change what is seen.
            pieces, mine = cfg.gradient_accumulation_steps * team.size, slice(team.rank, None, team.size)
            x, y = dataset.batch(step, cfg.batch_size * pieces, cfg.block_size, cfg.data_seed)
            keys, total = keys_of(step, len(x), cfg.seed), 0.0
            for i, piece in enumerate(zip(*(np.split(a, pieces)[mine] for a in (x, y, keys)))):
                with team.averaging(forward, now=i + 1 == cfg.gradient_accumulation_steps):
                    with autocast:
                        _, loss = forward(*(to_device(a, device) for a in piece))
                    scaler.scale(loss / cfg.gradient_accumulation_steps).backward()
                total += loss.detach() / pieces
            scaler.unscale_(optimizer)
            norm = torch.nn.utils.clip_grad_norm_(model.parameters(), cfg.grad_clip or math.inf)
            if not use_scaler:
                health.watch(total, norm)
            scaler.step(optimizer)
            scaler.update()
            optimizer.zero_grad(set_to_none=True)
            step += 1
            bar.update()

            if step % cfg.log_interval == 0 or step % cfg.eval_interval == 0 or step in (timed, cfg.max_iters):
                train_loss, norm = team.sum(total).item(), norm.item()  # the device is waited for only here
                if not use_scaler:
                    health.check(step, team, run, model)
                # A scaler skips bad updates and halves its scale; below 1 it is not the scale that is wrong.
                elif scaler.get_scale() < 1 and not math.isfinite(norm):
                    raise diverged(step, "gradient norm", norm, run, model)
            seconds += time.perf_counter() - start
            counted += x.size
            if step == timed < cfg.max_iters and bar.disable:  # on a terminal the bar says it
                bar.write(f"update {step}: about {duration(seconds / 10 * (cfg.max_iters - step))} of training left")
            if step % cfg.log_interval == 0:
                record = {"step": step - 1, "loss": train_loss, "grad_norm": norm, "lr": rate}
                record["tokens_per_s"] = counted / seconds
                if peak:
                    record["mfu"] = record["tokens_per_s"] * flops / (peak * team.size)
                note(**record)
                bar.set_postfix_str(f"loss {train_loss:.3f}, {record['tokens_per_s']:,.0f} tokens/s")

    if signum:
        return {"interrupted": signum, "out_dir": str(run), "steps": step}
    lines = read_log(run) if team.first else []
    history = [(line["step"], line["val_loss"], line["answers"]) for line in lines if "val_loss" in line]
    return {
        "val_loss": val_loss, "best_val_loss": best, "train_loss": train_loss, "answers": answers, "entropy": entropy,
        "lambdas": attention["lambdas"], "params": params, "params_standard": standard, "steps": step,
        "seconds": seconds, "tokens_per_s": counted / seconds if seconds else None, "history": history,
        "out_dir": str(run),
    }  # fmt: skip


def to_device(array, device):
    tensor = torch.from_numpy(array)
    return tensor.pin_memory().to(device, non_blocking=True) if device.type == "cuda" else tensor.to(device)


def main():
    import tyro  # only here: train(cfg) needs no command line

    sys.stdout.reconfigure(errors="replace")  # a terminal without a character shows "?" instead of failing

    def parse(default):
        return tyro.cli(TrainConfig, default=default, description=__doc__)

    with join() as team:
        try:
            cfg = parse(TrainConfig())
            if cfg.preset not in PRESETS:
                cfg.check()
            # The flags again, over other defaults: of the preset, of the run that goes on, or of the weights' model.
            default, goes_on = replace(TrainConfig(), **PRESETS[cfg.preset]), cfg.resume or cfg.eval_only
            if goes_on:
                out_dir = cfg.out_dir or str(checkpoint.newest_run())
                default = replace(checkpoint.read_config(out_dir, TrainConfig), out_dir=out_dir)
                default.check()
            elif cfg.init_from:
                theirs = checkpoint.load(checkpoint.find(cfg.init_from))["model_config"]
                default = replace(default, **{k: v for k, v in theirs.items() if k != "vocab_size"})
            cfg = parse(default)
            if goes_on and cfg.preset != default.preset:
                raise ValueError(
                    f"preset={cfg.preset!r} cannot change {out_dir}, made with {default.preset!r}: leave it out"
                )
            result = train(cfg, team)
            if team.first and not (cfg.eval_only or "interrupted" in result):
                report(cfg, result)
        except (ValueError, FloatingPointError) as error:  # the same in all processes
            sys.exit(f"train.py: {error}" if team.first else 1)
        except (OSError, MemoryError) as error:
            sys.exit(f"train.py: {error}")
        except RuntimeError as error:
            if team.size == 1 or not gone(error):
                raise
            if team.rank < 2:  # the second speaks too, since the first may be the one that is gone
                lost = "train.py: another process of this run is gone: go on from its last ckpt.pt with --resume"
                print(lost, file=sys.__stderr__, flush=True)  # at once: torchrun is about to end this process too
            sys.exit(1)
        if "interrupted" in result:
            run, start = result["out_dir"], f"torchrun --nproc_per_node={team.size}" if team.size > 1 else "python"
            print(f"stopped by signal {result['interrupted']}, saved update {result['steps']} in {run}/ckpt.pt")
            print(f"go on: {start} train.py --resume --out_dir={run}; or: python sample.py --latest --out_dir={run}")
            sys.exit(128 + result["interrupted"])


if __name__ == "__main__":
    main()
