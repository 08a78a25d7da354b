"""Named tensors that ranks have parts of by name: all of them on each rank, in one exchange."""

from __future__ import annotations

import json
from collections.abc import Mapping
from math import prod

import torch
from torch import Tensor

from pcg.ranks.group import Ranks

_ALIGNMENT = 16


def united(own: Mapping[str, Tensor], ranks: Ranks) -> dict[str, Tensor]:
    """Return this rank's tensors and the others', by name; all ranks call this.

    Those of the others are new, on the device that ranks exchange tensors on.
    """
    if ranks.size == 1:
        return dict(own)
    facts = [
        [name, str(one.dtype).removeprefix("torch."), [*one.shape]] for name, one in own.items()
    ]
    head = json.dumps(facts).encode()
    parts = [torch.frombuffer(bytearray(head), dtype=torch.uint8)]
    parts += [one.detach().contiguous().view(-1).view(torch.uint8) for one in own.values()]
    sizes = [padded(part.nbytes) for part in parts]
    mine = torch.tensor([len(head), sum(sizes)], device=ranks.device)
    lengths = [one.tolist() for one in ranks.all_gather(mine)]
    sent = torch.zeros(max(size for _, size in lengths), dtype=torch.uint8, device=ranks.device)
    for place, part in zip(sent[: sum(sizes)].split(sizes), parts, strict=True):
        place[: part.nbytes] = part
    found = dict(own)
    for rank, (came, (length, _)) in enumerate(zip(ranks.all_gather(sent), lengths, strict=True)):
        if rank == ranks.rank:
            continue
        start = padded(length)
        for name, kind, shape in json.loads(bytes(came[:length].cpu().numpy())):
            dtype: torch.dtype = getattr(torch, kind)
            size = prod(shape) * dtype.itemsize
            found[name] = came[start : start + size].view(dtype).view(shape)
            start += padded(size)
    return found


def padded(size_bytes: int) -> int:
    """Return the bytes that a tensor takes in a message, so that the next one is aligned."""
    return -(-size_bytes // _ALIGNMENT) * _ALIGNMENT
