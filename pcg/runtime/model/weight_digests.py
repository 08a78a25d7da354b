"""SHA-256 of a base's weights, alike for a process that holds whole tensors and for its ranks."""

from __future__ import annotations

import hashlib
import json
from concurrent.futures import ThreadPoolExecutor

import torch
from torch import Tensor

from pcg.ir.graph import Parameter
from pcg.kernels.devices import device_pool
from pcg.kernels.torch.products import is_remote, remote_of
from pcg.runtime.model.base_weights import WeightStore

_MOST_THREADS = 8


def base_digest(weights: WeightStore, dtype: torch.dtype | None = None) -> str:
    """Return `sha256:` and the SHA-256 of the `weight_digests` of a base, computed once."""
    if dtype not in weights.digests:
        text = json.dumps(weight_digests(weights, dtype), sort_keys=True)
        weights.digests[dtype] = f"sha256:{hashlib.sha256(text.encode()).hexdigest()}"
    return weights.digests[dtype]


def weight_digests(weights: WeightStore, dtype: torch.dtype | None = None) -> dict[str, str]:
    """Return the SHA-256 of the `row_digests` of each frozen tensor, as it is computed with.

    Args:
        dtype: the floating type that tensors in this process are rounded to before.
    """

    def digest(item: tuple[str, Parameter]) -> str:
        tensor = weights.whole(*item)
        if is_remote(tensor):
            return remote_of(tensor).digest()
        if dtype is not None and tensor.is_floating_point():
            tensor = tensor.to(dtype)
        return hashlib.sha256(row_digests(tensor)).hexdigest()

    frozen = dict(weights.frozen())
    with hashing_threads(weights.device) as pool:
        return dict(zip(frozen, pool.map(digest, frozen.items()), strict=True))


def row_digests(tensor: Tensor) -> bytes:
    """Return the SHA-256 of each row of a tensor, one behind the other; a vector is one row.

    So ranks that hold some rows each tell of the whole tensor what a process does that has it.
    """
    rows = torch.atleast_2d(tensor.detach()).flatten(0, -2).to("cpu").contiguous()
    return b"".join(hashlib.sha256(row).digest() for row in rows.view(torch.uint8).numpy())


def hashing_threads(device: torch.device) -> ThreadPoolExecutor:
    """Return threads for `row_digests`, which runs without the interpreter's lock.

    Args:
        device: that of the tensors.
    """
    threads = max(1, min(_MOST_THREADS, torch.get_num_threads()))
    return device_pool(device, threads, "pcg digests")
