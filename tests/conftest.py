"""Shared by the tests: a small text, and the settings of a run that takes a second."""

import random

import matplotlib
import pytest
import torch
from hypothesis import settings

matplotlib.use("Agg")
torch.set_num_threads(1)  # tiny models: a second thread only waits for the first

from config import TrainConfig  # noqa: E402

settings.register_profile("suite", deadline=None, derandomize=True, max_examples=60)
settings.register_profile("long", deadline=None, max_examples=2000, print_blob=True)
settings.load_profile("suite")  # --hypothesis-profile=long chooses the other


def pytest_addoption(parser):
    parser.addoption("--shuffle", type=int, help="run the tests in another order, each number another one")


def pytest_collection_modifyitems(config, items):
    if (seed := config.getoption("--shuffle")) is not None:
        random.Random(seed).shuffle(items)


WORDS = "the ship that left the harbour at dawn came back before the evening bell had rung twice over".split()


@pytest.fixture(scope="session")
def text_file(tmp_path_factory):
    """A text of about 20,000 characters, written by a rule."""
    path = tmp_path_factory.mktemp("text") / "harbour.txt"
    lines = [" ".join(WORDS[(i * j + 3 * j) % len(WORDS)] for j in range(1, 7)) for i in range(600)]
    path.write_text("\n".join(lines))
    return path


@pytest.fixture
def tiny(text_file, tmp_path, monkeypatch):
    """tiny(**changes) -> a TrainConfig of seconds on `text_file`, in an empty working folder."""
    monkeypatch.chdir(tmp_path)
    monkeypatch.setattr("data.CACHE", tmp_path / "cache")

    def settings(**changes):
        small = dict(
            dataset=str(text_file), n_layer=2, n_head=4, n_embd=32, block_size=24, batch_size=4, max_iters=8,
            eval_interval=4, eval_windows=10, log_interval=2, warmup_iters=2, emb_std=0.1, device="cpu",
        )  # fmt: skip
        return TrainConfig(**{**small, **changes})

    return settings
