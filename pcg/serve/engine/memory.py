"""The memory of a server, by explain's numbers."""

from __future__ import annotations

from dataclasses import asdict, dataclass

from pcg.explain.base_memory import base_bytes, packed_bytes
from pcg.ir.analysis.saved_memory import transient
from pcg.runtime.engine.limits import Limits
from pcg.runtime.executor import Executor


@dataclass(frozen=True)
class ServingMemory:
    """Bytes that a server takes beside Python and its libraries.

    Attributes:
        weights: the base on its device, with packed copies where a CPU's library makes some.
        adapters: the adapters in host memory.
        kv_cache: the pool of the KV cache and of adapters' pages, if all of it is used.
        workspace: the fullest moment of a step of as many tokens as a step may have.
    """

    weights: int
    adapters: int
    kv_cache: int
    workspace: int

    @property
    def bytes(self) -> dict[str, int]:
        """The bytes by what has them."""
        return asdict(self)

    @property
    def total(self) -> int:
        return self.weights + self.adapters + self.kv_cache + self.workspace


def serving_memory(executor: Executor, limits: Limits, kv_cache_bytes: int) -> ServingMemory:
    """Return the memory that a server takes at most, without adapters."""
    model, tokens, rows = executor.program.base, limits.tokens, limits.running
    seq = min(tokens, executor.max_positions or tokens)
    sizes = [transient(block, tokens, seq).size_bytes(tokens, seq) for block in model.blocks]
    is_packed = executor.program.options.packed_weights
    packed = packed_bytes(model, executor.device) if is_packed else 0
    sizes.append(transient(model.epilogue, rows, 1).size_bytes(rows, 1))
    return ServingMemory(
        weights=base_bytes(model) + packed,
        adapters=0,
        kv_cache=kv_cache_bytes,
        workspace=max(sizes),
    )
