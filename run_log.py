"""log.jsonl: its lines, what they say of the attention, and the same as TensorBoard events.

python train.py --log=tensorboard               # writes them as the run goes, beside log.jsonl
python run_log.py --out_dir=runs/stories-diff   # makes them from log.jsonl, which holds all of it
tensorboard --logdir=runs                       # shows them, under the names of log.jsonl
"""

import json
import sys
from dataclasses import dataclass
from pathlib import Path

import checkpoint
from config import need, need_packages
from model import causal_mask

QUANTILES = (0, 0.05, 0.25, 0.5, 0.75, 0.95, 1)


@dataclass
class EventsConfig:
    out_dir: str = ""  # the run's folder; empty means the newest


class Log:
    """log.jsonl, to which `append` adds a line. Opened at a step, it keeps the lines before that; else it starts empty.

    From its making to the end of its `with`, the folder is this process's alone.
    """

    def __init__(self, run, step=None):
        self.lock, self.path = checkpoint.claim(run), Path(run) / "log.jsonl"
        try:
            if step is None:  # once more, now that nobody else can begin here
                checkpoint.must_be_free(run)
        except ValueError:
            self.lock.close()
            raise
        for rest in Path(run).glob("*.*.[0-9]*.new"):  # of a process that was killed while it wrote
            rest.unlink()
        if self.path.exists():
            kept = [] if step is None else [line for line in read_log(run) if line.get("step", -1) < step]
            text = "".join(json.dumps(line) + "\n" for line in kept)
            checkpoint.write(self.path, lambda file: file.write(text.encode()))

    def __enter__(self):
        return self

    def __exit__(self, *_):
        self.lock.close()

    def append(self, **record):
        with open(self.path, "a", encoding="utf-8") as file:
            file.write(json.dumps(record) + "\n")


def read_log(run):
    """The lines of log.jsonl, dicts, up to the first that is not whole: a kill or a crash may have left it so."""
    lines = []
    for raw in (Path(run) / "log.jsonl").read_bytes().split(b"\n")[:-1]:
        try:
            line = json.loads(raw)
        except ValueError:
            break
        if not isinstance(line, dict):
            break
        lines.append(line)
    return lines


def attention_numbers(model, idx):
    """(1, T) ids -> lists with an entry a layer: the mean of lambda, where there is one; the QUANTILES of the weights
    on V, A1 - lam A2 of all heads where the mask lets through; the share of them below zero."""
    model.eval()
    maps = model.attention_maps(idx)
    model.train()
    seen = causal_mask(idx.shape[1], idx.shape[1], like=maps[0][0]) == 0
    weights = [(A1 if A2 is None else A1 - lam[..., None] * A2)[:, :, seen] for A1, A2, lam in maps]
    return {
        "lambdas": [lam.mean().item() for _, _, lam in maps if lam is not None],
        "quantiles": [dict(zip(QUANTILES, w.quantile(w.new_tensor(QUANTILES)).tolist())) for w in weights],
        "negative": [(w < 0).float().mean().item() for w in weights],
    }


def curves(value, name=""):
    """A line of log.jsonl -> (tag, number) for each number in it: loss, lambdas/0 (its layer), quantiles/0/0.05."""
    if isinstance(value, dict | list):
        for key, part in value.items() if isinstance(value, dict) else enumerate(value):
            yield from curves(part, f"{name}/{key}" if name else key)
    elif value is not None and name != "step":
        yield name, value


def write_events(writer, line):
    if "step" in line:  # the first line says what made the run
        for tag, number in curves(line):
            writer.add_scalar(tag, number, line["step"])
        writer.flush()


def events(run):
    """Makes a run's event file anew, from log.jsonl; returns its writer, for the lines to come."""
    from torch.utils.tensorboard import SummaryWriter

    for old in Path(run).glob("events.out.tfevents.*"):
        old.unlink()
    writer = SummaryWriter(run)
    for line in read_log(run):
        write_events(writer, line)
    return writer


class EventLog(Log):
    """The same, and the events."""

    def __init__(self, run, step=None):
        super().__init__(run, step)
        self.path.touch()
        self.writer = events(run)

    def append(self, **line):
        super().append(**line)
        write_events(self.writer, line)


def main():
    import tyro

    cfg = tyro.cli(EventsConfig, description=__doc__)
    try:
        need_packages("tensorboard")
        run = cfg.out_dir or checkpoint.newest_run()
        need((Path(run) / "log.jsonl").is_file(), f"{run} has no log.jsonl: name the folder of a run")
        events(run).close()
        print(f"{run}: an event file, for tensorboard --logdir={run}")
    except (ValueError, OSError) as error:
        sys.exit(f"run_log.py: {error}")


if __name__ == "__main__":
    main()
