"""The memory of a server, by explain's numbers."""

from __future__ import annotations

from dataclasses import asdict, dataclass

from pcg.explain.base_memory import base_bytes, packed_bytes
from pcg.runtime.engine.device_memory import step_bytes
from pcg.runtime.engine.engine import Engine
from pcg.runtime.executor import Executor


@dataclass(frozen=True)
class ServingMemory:
    """Bytes that a server takes beside Python and its libraries.

    Attributes:
        weights: the base on its device, with packed copies where a CPU's library makes some.
        adapters: the adapters in host memory.
        kv_cache: the pool of the KV cache and of adapters' pages, if all of it is used.
        workspace: the fullest moment of a step of as many tokens as a step may have.
        recorded: steps and windows that a GPU has recorded before the first request.
    """

    weights: int
    adapters: int
    kv_cache: int
    workspace: int
    recorded: int = 0

    @property
    def bytes(self) -> dict[str, int]:
        """The bytes by what has them."""
        return asdict(self)

    @property
    def total(self) -> int:
        return sum(self.bytes.values())


def serving_memory(executor: Executor, engine: Engine) -> ServingMemory:
    """Return the memory that a server takes at most, without adapters."""
    model, limits, warmed = executor.program.base, engine.scheduler.limits, engine.device.warmed
    is_packed = executor.program.options.packed_weights
    packed = packed_bytes(model, executor.device) if is_packed else 0
    return ServingMemory(
        weights=base_bytes(model) + packed,
        adapters=0,
        kv_cache=engine.device.cache.size_bytes,
        workspace=step_bytes(model, limits, executor.max_positions),
        recorded=0 if warmed is None else warmed.size_bytes,
    )
