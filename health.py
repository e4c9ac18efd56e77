"""Losses, gradients and lambdas that are no longer numbers: the update where it happened, and a sentence."""

import math

import torch

LARGEST_LAMBDA = math.exp(60)  # beyond it little is left of float32's range for what is multiplied with lambda


class Health:
    """Watches every update on the device, so that nothing waits for it, until `check` asks."""

    def __init__(self, step, device):
        self.alive = torch.ones((), dtype=torch.bool, device=device)
        self.good = torch.full((), step, device=device)  # updates until the first bad one
        self.seen = torch.zeros(2, device=device)  # loss and gradient norm of the last update that was watched alive

    def watch(self, loss, norm):
        now = torch.stack((loss.float(), norm.float()))
        self.seen = torch.where(self.alive, now, self.seen)
        self.alive = self.alive & now.isfinite().all()
        self.good = self.good + self.alive

    def check(self, step, team, run, model):
        """Raises FloatingPointError in all processes if one of them has seen a bad update before `step`."""
        first = -team.highest(-self.good.item()) + 1
        if first <= step:
            loss, norm = self.seen.tolist()
            name, value = ("gradient norm", norm) if math.isfinite(loss) else ("loss", loss)
            raise diverged(first, name, value, run, model)


def diverged(step, name, value, run, model):
    """The error that says so. It names a lambda that left its range while the vectors it is made of are finite."""
    for i, block in enumerate(model.blocks):
        vectors = [p for key, p in block.attn.named_parameters() if key.startswith("lambda_")]
        if hasattr(block.attn, "lam") and all(p.isfinite().all() for p in vectors):
            lam = block.attn.lam().item()
            if not abs(lam) <= LARGEST_LAMBDA:
                name, value = f"lambda of layer {i}", lam
                break
    good = f"; the last good weights are in {run / 'best.pt'}" * (run / "best.pt").exists()
    return FloatingPointError(
        f"the {name} is {value} at update {step}: the run is lost from there{good}. Start a new run, or one from these"
        " weights (--init_from), with a lower --learning_rate, a longer --warmup_iters or --grad_clip=1.0"
    )
