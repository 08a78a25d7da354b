"""The KV cache of pipeline stages: a rank has the keys and values of its stage's layers.

All ranks count the same pages, so a page takes what that of the stage with the most of them needs.
"""

from __future__ import annotations

from pcg.errors import UnsupportedError
from pcg.ir.program.program import ModelGraph
from pcg.ir.types import TensorType
from pcg.ranks.stages import Stages
from pcg.runtime.memory.kv_cache import bytes_of_page, kv_types


def stage_kv_types(
    model: ModelGraph, stages: Stages, index: int
) -> tuple[tuple[TensorType, TensorType], ...]:
    """Return the types of each layer's keys and values; layers of other stages have no heads."""
    return kv_types(stages[index].own(model))


def page_bytes_of(model: ModelGraph, stages: Stages) -> int:
    """Return the bytes of a page of the stage that has the most of it.

    Raises:
        UnsupportedError: no layer has attention.
    """
    page = max(bytes_of_page(stage_kv_types(model, stages, i)) for i in range(stages.count))
    if not page:
        raise UnsupportedError(
            "no layer of the model has attention, and an engine plans by the KV cache; "
            "Executor.logits computes the logits of such a model"
        )
    return page
