"""The settings of a run: every flag of train.py, its default, and the one check of them all."""

import importlib.util
import math
from dataclasses import dataclass, fields, replace

from data.stories import Difficulty
from model import ATTENTIONS, GPTConfig


def need(ok, sentence):
    if not ok:
        raise ValueError(sentence)


def need_packages(*names):
    """Of those that requirements.txt does not have."""
    missing = [name for name in names if not importlib.util.find_spec(name)]
    need(not missing, f"{', '.join(missing)} must be installed for this: pip install {' '.join(missing)}")


@dataclass
class TrainConfig:
    """A run. The defaults are the quick start: minutes on a laptop's CPU."""

    # the model; see GPTConfig
    attention: str = "diff"  # standard, diff (the paper) or diff_v2
    n_layer: int = 4
    n_head: int = 2  # query heads of the standard kind
    n_kv_head: int = 0  # key heads; 0 means n_head
    n_embd: int = 64  # channels
    block_size: int = 120  # tokens a window
    dropout: float = 0.0
    init_std: float = GPTConfig.init_std  # of every matrix at the start but the embedding
    emb_std: float = 0.0  # of the token embedding at the start; 0 means 0.5 for stories, 0.1 for other texts
    rope_theta: float = GPTConfig.rope_theta
    tie_embeddings: bool = True  # input and output embedding are one matrix

    # the text
    # stories, shakespeare, tinyshakespeare, tinystories, openwebtext, fineweb, fineweb-edu, or the path of a UTF-8 file
    # or of a folder of token files
    dataset: str = "stories"
    # char, bpe (byte pairs learned from the text) or gpt2; auto is the dataset's own, or char
    tokenizer: str = "auto"
    bpe_vocab_size: int = 1024  # tokens
    people: int = Difficulty.people  # stories: people at most, each with something they do
    fewest: int = Difficulty.fewest  # stories: people at least
    distractors: int = Difficulty.distractors  # stories: sentences about nothing
    denials: int = Difficulty.denials  # stories: sentences that could be taken for an answer
    restatements: int = Difficulty.restatements  # stories: facts said again
    questions: int = Difficulty.questions  # stories: questions at the end

    # the optimiser
    max_iters: int = 4600  # updates
    batch_size: int = 32  # windows a micro-batch
    gradient_accumulation_steps: int = 1  # micro-batches an update, in each process of torchrun's
    learning_rate: float = 3e-3  # at its highest
    min_lr: float = 0.0  # at the end
    warmup_iters: int = 50  # updates
    lr_decay_iters: int = 0  # updates until min_lr; 0 means max_iters
    lr_schedule: str = "linear"  # linear or cosine
    weight_decay: float = 0.1  # of matrices; norm gains and lambda vectors have none
    beta1: float = 0.9  # AdamW
    beta2: float = 0.98  # AdamW
    grad_clip: float = 1.0  # largest norm of the gradient; 0 is no limit

    # the run
    out_dir: str = ""  # the run's folder; empty means a new one, runs/DATASET-ATTENTION
    eval_interval: int = 200  # updates
    eval_windows: int = 200  # validation windows (stories: whole stories)
    log_interval: int = 10  # updates
    log: str = "jsonl"  # jsonl, or tensorboard: its event file beside log.jsonl
    seed: int = 0  # initial weights and dropout
    data_seed: int = 0  # batches
    device: str = "auto"  # auto, cuda, mps or cpu
    dtype: str = "auto"  # auto, float32, bfloat16 or float16: what matrix products are computed in
    compile: str = "auto"  # auto, on or off: torch.compile; auto is on for CUDA, where it works
    grad_checkpoint: bool = False  # less memory, a third more work: layers are computed again for their gradients
    resume: bool = False  # go on with the run in out_dir
    init_from: str = ""  # start from the best weights of this run
    eval_only: bool = False  # evaluate the run in out_dir, train nothing
    preset: str = "laptop"  # laptop, long, shakespeare, gpu, gpt2 or paper: other defaults for all of the above

    def resolved(self):
        """The same with the number that emb_std=0 stands for: stories have few words, and each must stand out."""
        return replace(self, emb_std=self.emb_std or (0.5 if self.dataset == "stories" else 0.1))

    def model_config(self, vocab_size=GPTConfig.vocab_size):
        whole = self.resolved()
        own = {f.name: getattr(whole, f.name) for f in fields(GPTConfig) if f.name != "vocab_size"}
        return GPTConfig(vocab_size=vocab_size, **own)

    def difficulty(self):
        return Difficulty(**{f.name: getattr(self, f.name) for f in fields(Difficulty) if hasattr(self, f.name)})

    def check(self):
        """Raises ValueError with one sentence: the field, its value, the nearest legal value."""
        for f in fields(self):
            value, kinds = getattr(self, f.name), (int, float) if f.type is float else f.type
            need(isinstance(value, kinds), f"{f.name}={value!r} must be of type {f.type.__name__}")
        for lowest, names in AT_LEAST.items():
            for name in names.split():
                value = getattr(self, name)
                need(lowest <= value < math.inf, f"{name}={value} must be a number of at least {lowest}")
        need(self.learning_rate > 0, f"learning_rate={self.learning_rate} must be greater than 0")
        need(self.min_lr <= self.learning_rate, f"min_lr={self.min_lr} is above learning_rate={self.learning_rate}")
        for name in ("seed", "data_seed"):
            need(getattr(self, name) < 2**32, f"{name}={getattr(self, name)} must be less than {2**32}")
        for name in ("beta1", "beta2"):
            need(0 <= getattr(self, name) < 1, f"{name}={getattr(self, name)} must be at least 0 and less than 1")
        for name, legal in CHOICES.items():
            need(getattr(self, name) in legal, f"{name}={getattr(self, name)!r} must be one of {', '.join(legal)}")
        need(
            not (self.eval_only and self.init_from),
            "eval_only evaluates --out_dir=RUN: name it there, not in init_from",
        )
        need(not (self.resume and self.init_from), "resume goes on with --out_dir=RUN: leave out --init_from")
        check_model(self.model_config())
        self.difficulty().check()
        if self.log == "tensorboard":
            need_packages("tensorboard")


AT_LEAST = {
    1: "batch_size gradient_accumulation_steps eval_interval eval_windows log_interval",
    0: "max_iters learning_rate min_lr warmup_iters lr_decay_iters weight_decay grad_clip seed data_seed",
}
PRESETS = {
    "laptop": {},  # the defaults
    # harder stories, about forty minutes on one core: all answers right from update 3,000 on
    "long": dict(questions=8, distractors=6, denials=4, restatements=2, block_size=192, max_iters=10000),
    # the size and the steps of nanoGPT's recipe for a CPU, with enough heads for `diff` to have four
    "shakespeare": dict(
        dataset="shakespeare", n_layer=4, n_head=8, n_embd=128, block_size=64, emb_std=0.1, batch_size=12,
        max_iters=2000, learning_rate=2e-3, min_lr=2e-4, lr_schedule="cosine", warmup_iters=100, eval_interval=200,
        eval_windows=400,
    ),
    # the size of nanoGPT's recipe for one GPU; not tried here
    "gpu": dict(
        dataset="shakespeare", n_layer=6, n_head=6, n_embd=384, block_size=256, batch_size=64, max_iters=5000,
        dropout=0.2, init_std=0.05, emb_std=0.05, learning_rate=1e-3, min_lr=1e-4, lr_schedule="cosine",
        warmup_iters=100, eval_interval=500, eval_windows=400,
    ),
    # the smallest GPT-2, 124 M parameters, with the settings of the GPT-3 paper for that size (arXiv 2005.14165, table
    # 2.1 and appendix B): 0.5 M tokens an update, a warm-up of 375 M, then once through 10 B; not tried here.
    # With N processes, give each --gradient_accumulation_steps=32 / N.
    "gpt2": dict(
        dataset="fineweb-edu", tokenizer="gpt2", n_layer=12, n_head=12, n_embd=768, block_size=1024, init_std=0.036,
        emb_std=0.036, batch_size=16, gradient_accumulation_steps=32, max_iters=19073, learning_rate=6e-4, min_lr=6e-5,
        lr_schedule="cosine", warmup_iters=715, beta2=0.95, eval_interval=500, eval_windows=400,
    ),
    # the smallest of the paper's scaling runs (section 3.2, appendix E): 830 M parameters with its vocabulary, 757 M
    # with GPT-2's; 0.25 M tokens an update; not tried here
    "paper": dict(
        dataset="fineweb", tokenizer="gpt2", n_layer=24, n_head=16, n_embd=1536, block_size=2048, init_std=0.0255,
        emb_std=0.0255, batch_size=4, gradient_accumulation_steps=32, max_iters=40000, learning_rate=1.5e-4,
        warmup_iters=375, weight_decay=0.05, eval_interval=500, eval_windows=400,
    ),
}  # fmt: skip
CHOICES = {
    "dtype": ("auto", "float32", "bfloat16", "float16"),
    "compile": ("auto", "on", "off"),
    "lr_schedule": ("linear", "cosine"),
    "tokenizer": ("auto", "char", "bpe", "gpt2"),
    "log": ("jsonl", "tensorboard"),
    "preset": tuple(PRESETS),
}
# What may differ when a run is resumed: the rest would make it another run. (The windows of an update must not, but
# how they are cut may.)
MAY_CHANGE = (
    "max_iters out_dir eval_interval log_interval log device compile grad_checkpoint batch_size"
    " gradient_accumulation_steps resume init_from eval_only preset"
).split()


LARGEST = 1 << 20  # of any size of a model, and more than any has


def multiple(unit, value):
    """The one nearest to `value`, but not 0."""
    return unit * max(1, round(value / unit))


def check_model(cfg):
    """Of a GPTConfig. Raises ValueError with one sentence: the field, its value, the nearest legal value."""
    for name in ("block_size", "vocab_size", "n_layer", "n_head", "n_embd"):
        need(getattr(cfg, name) >= 1, f"{name}={getattr(cfg, name)} must be at least 1")
        need(getattr(cfg, name) <= LARGEST, f"{name}={getattr(cfg, name)} must be at most {LARGEST}")
    for name in ("init_std", "emb_std", "rope_theta"):
        need(0 < getattr(cfg, name) < math.inf, f"{name}={getattr(cfg, name)} must be a positive number")
    need(0 <= cfg.dropout < 1, f"dropout={cfg.dropout} must be at least 0 and less than 1")
    need(cfg.attention in ATTENTIONS, f"attention={cfg.attention!r} must be one of {', '.join(ATTENTIONS)}")
    unit, H, C = ATTENTIONS[cfg.attention].head_multiple, cfg.n_head, cfg.n_embd
    legal = [n for n in range(unit, C // 2 + 1, unit) if C % (2 * n) == 0]
    near = min(legal, key=lambda n: (abs(n - H), -n), default=0)
    use = f"n_head={near}" if near else f"n_head={H + 1}, n_embd={multiple(2 * (H + 1), C)}"
    need(
        H % unit == 0,
        f"n_head={H} must be even, since {cfg.attention} attention pairs heads, and divide n_embd={C} into heads of"
        f" even size: use {use}",
    )
    nearest = multiple(2 * H, C)
    need(C % (2 * H) == 0, f"n_embd={C} does not divide into n_head={H} heads of even size: use n_embd={nearest}")
    legal = [n for n in range(unit, H + 1, unit) if H % n == 0]
    nearest = min(legal, key=lambda n: abs(n - cfg.kv_heads))
    even = " and be even, since a pair of heads needs two keys" * (unit == 2)
    need(cfg.kv_heads in legal, f"n_kv_head={cfg.n_kv_head} must divide n_head={H}{even}: use {nearest}")


def can_go_on(cfg, state, processes):
    """Raises ValueError with one sentence if a TrainConfig cannot go on with a checkpoint in so many processes."""
    need(
        cfg.max_iters >= state["step"],
        f"max_iters={cfg.max_iters} is less than the {state['step']} updates that {cfg.out_dir} has made: use more",
    )
    need("optimizer" in state, f"{cfg.out_dir}/ckpt.pt has weights alone, as best.pt has: use --init_from")
    old = state["train_config"]
    for name in old:
        new = getattr(cfg, name, None)
        need(
            name in MAY_CHANGE or new == old[name],
            f"{name}={new!r} cannot change on --resume: it was {old[name]!r}",
        )
    ours = processes * cfg.batch_size * cfg.gradient_accumulation_steps
    theirs = state.get("processes", 1) * old["batch_size"] * old["gradient_accumulation_steps"]
    times, rest = divmod(theirs, processes * cfg.batch_size)
    need(
        ours == theirs,
        f"processes={processes} x batch_size={cfg.batch_size} x gradient_accumulation_steps="
        f"{cfg.gradient_accumulation_steps} is {ours} windows an update, this run has {theirs}: "
        + (f"use --gradient_accumulation_steps={times}" if not rest else "another --batch_size can make it so"),
    )
