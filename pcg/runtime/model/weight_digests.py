"""SHA-256 of a base's weights, equal for a process with whole tensors and for ranks with parts.

All ranks of a group have to have the same base weights, though each reads a part of them. Ranks
with the same files, by machine and inode, have the same weights, and nothing is read. Otherwise
ranks with the same files divide the tensors, each digests its share, and the digests of all groups
are compared: 8B in bf16 on two machines of 8 ranks is 2 GB a rank, a second at 2 GB/s a core. A
rank digests all weights of a module in its memory.
"""

from __future__ import annotations

import hashlib
import json
from collections.abc import Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor

import torch
from torch import Tensor

from pcg.ir.graph import Parameter
from pcg.kernels.devices import device_pool
from pcg.kernels.torch.products import is_remote, remote_of
from pcg.ranks.agreement import agreed, check_same, compare
from pcg.ranks.group import Ranks
from pcg.runtime.model.base_weights import TensorSource, WeightStore
from pcg.runtime.model.weights import Weights

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

    So the digests of ranks with some rows each add up to the digest of the whole tensor.
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


CALL = "the base's weights"
FIX = "Give all ranks the same weights: one directory, or copies of the same files"
_DIGEST_BYTES = 32


def check_same_weights(ranks: Ranks, weights: TensorSource) -> None:
    """Refuse base weights that differ between ranks; all ranks call this.

    Raises:
        ParallelError: on every rank; names the ranks that differ from the first, and the tensors.
    """
    if ranks.size == 1:
        return
    if not isinstance(weights, Weights):
        check_same(ranks, CALL, {"random weights": weights.identity()}, FIX)
        return
    index = {name: f"{item.dtype} {list(item.shape)}" for name, item in weights.index.items()}
    check_same(ranks, CALL, index, FIX)
    identities = ranks.tell(hashlib.sha256(weights.identity().encode()).digest())
    if len(set(identities)) == 1:
        return
    sharing = [rank for rank, item in enumerate(identities) if item == identities[ranks.rank]]
    shares = _shares(weights, len(sharing))
    digests = agreed(ranks, CALL, lambda: _digests(weights, shares[sharing.index(ranks.rank)]))
    names = sorted(weights.index)
    replies = ranks.tell(b"".join(digests.get(name, bytes(_DIGEST_BYTES)) for name in names))
    by_rank = []
    for identity in identities:
        parts = [word for word, item in zip(replies, identities, strict=True) if item == identity]
        by_rank.append(dict(zip(names, _joined(parts), strict=True)))
    compare(CALL, by_rank, FIX)


def _shares(weights: Weights, count: int) -> list[list[str]]:
    shares: list[list[str]] = [[] for _ in range(count)]
    sizes = [0] * count
    for name in sorted(weights.index, key=lambda name: (-weights.numel(name), name)):
        least = sizes.index(min(sizes))
        shares[least].append(name)
        sizes[least] += weights.numel(name)
    return shares


def _digests(weights: Weights, names: Sequence[str]) -> Mapping[str, bytes]:
    with hashing_threads(torch.device("cpu")) as pool:
        digests = dict(zip(names, pool.map(weights.digest, names), strict=True))
    weights.release()
    return digests


def _joined(parts: Sequence[bytes]) -> list[str]:
    """Join the ranks' digests; each tensor has one from one rank."""
    pieces = [
        [part[at : at + _DIGEST_BYTES] for part in parts]
        for at in range(0, len(parts[0]), _DIGEST_BYTES)
    ]
    return [max(each).hex() for each in pieces]
