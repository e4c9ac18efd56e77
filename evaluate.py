"""How good is a model? Its loss on fixed validation windows, and the share of questions that it answers right."""

from contextlib import nullcontext

import numpy as np
import torch
import torch.nn.functional as F

from distributed import ALONE


@torch.no_grad()
def evaluate(model, windows, batch_size, device, autocast=None, team=ALONE):
    """Validation loss in nats a token over the fixed windows and, where they ask questions, the share answered right.

    An answer is right if each of its tokens is the likeliest after the true ones before it: greedy generation would
    then write the whole of it. Processes take turns at the batches; each batch is added up where it stands in the
    order, so that their number changes nothing, not even the rounding.
    """
    x, y, question = windows
    batches = [slice(i, i + batch_size) for i in range(0, len(x), batch_size)]
    nats = torch.zeros(len(batches), dtype=torch.float64)
    wrong = np.zeros(question.max() + 1, dtype=np.int64)  # tokens of each answer
    model.eval()
    for i in range(team.rank, len(batches), team.size):
        inputs, targets = (torch.from_numpy(a[batches[i]]).to(device) for a in (x, y))
        with autocast or nullcontext():
            logits, _ = model(inputs)
        nats[i] = F.cross_entropy(logits.float().flatten(0, 1), targets.flatten(), ignore_index=-1, reduction="sum")
        misses = (logits.argmax(dim=-1) != targets).cpu().numpy()
        asked = question[batches[i]]
        np.add.at(wrong, asked[asked >= 0], misses[asked >= 0])
    model.train()
    wrong = team.sum(torch.from_numpy(wrong))
    loss = team.sum(nats).sum().item() / int((y >= 0).sum())
    return loss, (wrong == 0).double().mean().item() if len(wrong) else None
