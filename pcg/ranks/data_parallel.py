"""Data parallelism of a finetuning step: which replica takes which sequences, and what is summed.

    loss = Σ_replicas Σ_t ce(t) / N        g = Σ_replicas g_replica        N: the step's targets

The base is frozen, so a step sums the adapter's gradients once, whatever its batches are: in a
message of 4 bytes a number, 168 MB for LoRA of rank 16 on all linears of Llama-3.1-8B. All replicas
know all sequences, so that a step is the same at any degree, and a job goes on at another one.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence

import torch
from torch import Tensor

from pcg.ranks.group import Ranks


def shares(batches: Sequence[Sequence[int]], replicas: int) -> list[list[list[int]]]:
    """Divide the sequences of a step's batches over replicas, for about as many tokens each.

    A batch's sequences go, the longest first, to the replica that has the fewest of its tokens; of
    several, to the one that has the fewest of the step. A part is no longer than a replica's part
    of the batch's tokens and its longest sequence together, and may be empty.

    Args:
        batches: the tokens of each sequence of each batch.
        replicas: how many there are.
    Returns:
        For each replica the places of its sequences in each batch, ascending.
    """
    of_step = [0] * replicas
    parts: list[list[list[int]]] = [[] for _ in range(replicas)]
    for lengths in batches:
        of_batch = [0] * replicas
        own: list[list[int]] = [[] for _ in range(replicas)]
        for place in sorted(range(len(lengths)), key=lambda place: -lengths[place]):
            owner = min(range(replicas), key=lambda one: (of_batch[one], of_step[one]))
            own[owner].append(place)
            of_batch[owner] += lengths[place]
            of_step[owner] += lengths[place]
        for part, places in zip(parts, own, strict=True):
            part.append(sorted(places))
    return parts


def sum_gradients(ranks: Ranks, parameters: Mapping[str, Tensor]) -> list[str]:
    """Add up the replicas' gradients in place, in one message; zeros stand for those of none.

    Args:
        ranks: the replicas; one of them may have had no sequence, and so no gradient.
        parameters: the trained tensors by name; all have a gradient afterwards.
    Returns:
        The names of those that no replica had a gradient of.
    """
    missing = torch.tensor([p.grad is None for p in parameters.values()], device=ranks.device)
    for parameter in parameters.values():
        if parameter.grad is None:
            parameter.grad = torch.zeros_like(parameter)
    if ranks.size > 1 and parameters:
        gradients = [p.grad for p in parameters.values() if p.grad is not None]
        dtype = torch.promote_types(torch.float32, gradients[0].dtype)
        flat = [one.reshape(-1).to(ranks.device, dtype) for one in (*gradients, missing)]
        total = ranks.all_reduce(torch.cat(flat))
        *sums, lacking = total.split([one.numel() for one in flat])
        for gradient, total in zip(gradients, sums, strict=True):
            gradient.copy_(total.view_as(gradient))
        missing = lacking == ranks.size
    return [name for name, lacks in zip(parameters, missing.tolist(), strict=True) if lacks]
