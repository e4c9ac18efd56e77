"""Several processes as one run: what `torchrun --nproc_per_node=N train.py` adds to `python train.py`.

Every process holds the whole model, computes its share of each batch, and averages its gradients with the others'
(PyTorch's DistributedDataParallel), so that all of them always hold equal weights. Whatever ends a run, they agree
on, so that none waits for one that is gone; and only the first of them speaks and writes files.
"""

import os
from contextlib import ExitStack, contextmanager, nullcontext, redirect_stderr, redirect_stdout
from dataclasses import dataclass

import torch
import torch.distributed as dist
from torch.nn.parallel import DistributedDataParallel

from device import pick_device


@dataclass(frozen=True)
class Team:
    """The processes of a run, and which of them this one is. For a team of one everything here does next to nothing."""

    rank: int = 0  # this process, 0 .. size - 1
    size: int = 1  # processes
    local_rank: int = 0  # this process among those of its machine
    local_size: int = 1  # processes on this machine

    @property
    def first(self):
        return self.rank == 0

    def device(self, name):
        """The device of this process: a GPU of its own, or the CPU that all share. Raises as `pick_device` does."""
        device = pick_device(name)
        if self.size == 1 or device.type == "cpu":
            return device
        if device.type != "cuda" or device.index is not None:
            raise ValueError(
                f"device={name!r} is one device, not one for each of {self.size} processes: use cuda or cpu"
            )
        if self.local_size > (gpus := torch.cuda.device_count()):
            raise ValueError(f"{self.local_size} processes need a GPU each and this machine has {gpus}: start {gpus}")
        device = torch.device("cuda", self.local_rank)
        torch.cuda.set_device(device)
        return device

    def together(self, make):
        """make(), in the first process of each machine and then in the rest, which find what it has prepared.

        An error of one process is a ValueError, with its sentence, in all of them.
        """
        if self.size == 1:
            return make()
        for turn in (True, False):
            error, errors = None, [None] * self.size
            if (self.local_rank == 0) == turn:
                try:
                    result = make()
                except (ValueError, OSError, MemoryError) as e:
                    error = e
            dist.all_gather_object(errors, error)
            for error in filter(None, errors):
                raise ValueError(str(error))
        return result

    def sum(self, tensor):
        """The sum of all processes' tensors, in place."""
        if self.size > 1:
            dist.all_reduce(tensor)
        return tensor

    def highest(self, number):
        """The highest of all processes' whole numbers."""
        if self.size == 1:
            return number
        number = torch.tensor(number)  # on the CPU: no GPU is waited for
        dist.all_reduce(number, op=dist.ReduceOp.MAX)
        return number.item()

    def share(self, forward):
        """The same function of a batch's share, whose backward pass averages gradients over the processes."""
        return forward if self.size == 1 else DistributedDataParallel(forward, gradient_as_bucket_view=True)

    def averaging(self, forward, now):
        """Around a micro-batch, forward and backward: gradients are averaged `now`, or left to a later micro-batch."""
        return nullcontext() if self.size == 1 or now else forward.no_sync()


ALONE = Team()


@contextmanager
def join():
    """The team that torchrun started, or a team of one. Within it, all but the first process are silent."""
    if not dist.is_torchelastic_launched():
        yield ALONE
        return
    team = Team(*(int(os.environ[name]) for name in ("RANK", "WORLD_SIZE", "LOCAL_RANK", "LOCAL_WORLD_SIZE")))
    dist.init_process_group("cpu:gloo,cuda:nccl" if torch.cuda.is_available() else "gloo")
    with ExitStack() as stack:
        stack.callback(dist.destroy_process_group)
        if not team.first:
            nowhere = stack.enter_context(open(os.devnull, "w"))
            stack.enter_context(redirect_stdout(nowhere))
            stack.enter_context(redirect_stderr(nowhere))
        yield team


def gone(error):
    """Whether PyTorch's error says that another process of the run is gone, so that this one cannot go on either."""
    return isinstance(error, dist.DistError) or "gloo" in str(error)  # gloo's are RuntimeErrors and no more
