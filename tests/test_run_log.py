"""The log as TensorBoard events: all of it, the same whether written as the run goes or made from log.jsonl."""

from pathlib import Path

import numpy as np
import pytest
import torch

import run_log
from model import ATTENTIONS, GPT, GPTConfig
from run_log import QUANTILES, attention_numbers, read_log
from train import train


@pytest.mark.parametrize("kind", ATTENTIONS)
def test_attention_numbers(kind):
    """Against the definition, weight by weight."""
    model = GPT(GPTConfig(n_layer=2, n_head=4, n_embd=32, attention=kind, init_std=0.3))
    idx = torch.randint(64, (1, 7), generator=torch.Generator().manual_seed(0))
    numbers = attention_numbers(model, idx)
    one_map = model.attention_maps(idx)[0][1] is None
    assert model.training and {len(v) for v in numbers.values()} == ({0, 2} if one_map else {2})
    for layer, (A1, A2, lam) in enumerate(model.attention_maps(idx)):
        A = A1 if A2 is None else A1 - lam[..., None] * A2
        w = [A[0, h, t, s].item() for h in range(A.shape[1]) for t in range(7) for s in range(t + 1)]
        assert list(numbers["quantiles"][layer]) == list(QUANTILES)
        np.testing.assert_allclose(list(numbers["quantiles"][layer].values()), np.quantile(w, QUANTILES), atol=1e-6)
        assert numbers["negative"][layer] == pytest.approx(np.mean(np.array(w) < 0))
        assert one_map or numbers["lambdas"][layer] == pytest.approx(lam.mean().item())
    assert (max(numbers["negative"]) == 0) == one_map


def curves_of(run):
    """{tag: [(step, value), ..]} of the run's only event file, read by TensorBoard."""
    reader = pytest.importorskip("tensorboard.backend.event_processing.event_accumulator")
    (path,) = Path(run).glob("events.out.tfevents.*")
    events = reader.EventAccumulator(str(path)).Reload()
    return {tag: [(e.step, e.value) for e in events.Scalars(tag)] for tag in events.Tags()["scalars"]}


def test_events_are_the_log(tiny, monkeypatch):
    how = dict(attention="diff", log="tensorboard", lr_decay_iters=8)
    run = train(tiny(max_iters=6, **how))["out_dir"]
    train(tiny(out_dir=run, resume=True, **how))
    live, lines = curves_of(run), read_log(run)[1:]
    for tag, curve in live.items():
        name, *keys = tag.split("/")
        expected = [(line["step"], line[name]) for line in lines if line.get(name) is not None]
        for key in keys:
            expected = [(step, value[int(key) if isinstance(value, list) else key]) for step, value in expected]
        assert curve == [(step, pytest.approx(value)) for step, value in expected], tag
    assert {"loss", "val_loss", "lr", "grad_norm", "tokens_per_s", "lambdas/1", "quantiles/1/0.05"} < set(live)
    assert len(live) == 5 + 2 * (1 + 1 + len(QUANTILES))
    # a resumed run drops what it logged after its last save, and so do the events
    assert [step for step, _ in live["val_loss"]] == [0, 4, 8]

    before = (Path(run) / "log.jsonl").read_bytes()
    monkeypatch.setattr("sys.argv", ["run_log.py", f"--out_dir={run}"])
    run_log.main()
    assert curves_of(run) == live and (Path(run) / "log.jsonl").read_bytes() == before


def test_without_tensorboard(tiny, monkeypatch):
    monkeypatch.setattr("importlib.util.find_spec", lambda name: None)
    with pytest.raises(ValueError, match="tensorboard must be installed for this: pip install tensorboard"):
        train(tiny(log="tensorboard"))
    assert not Path("runs").exists()
    monkeypatch.undo()
    monkeypatch.setattr("sys.argv", ["run_log.py", "--out_dir=nowhere"])
    with pytest.raises(SystemExit, match="run_log.py: nowhere has no log.jsonl"):
        run_log.main()
