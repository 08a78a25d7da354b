"""Checks of what pipeline stages cannot train, each refused by its name."""

from __future__ import annotations

from pcg.errors import UnsupportedError
from pcg.ir.program.program import Training
from pcg.peft.adapter import Adapter
from pcg.runtime.model.state import ModelState


def check_stages(state: ModelState, training: Training, adapter: Adapter) -> None:
    """Refuse an adapter that the state's pipeline stages cannot train.

    Raises:
        UnsupportedError: says what they cannot train.
    """
    if state.stages.count == 1:
        return
    over = f"over {state.mesh.sizes}"
    if adapter.recipe.encoder is not None:
        raise UnsupportedError(
            f"{adapter.recipe.method} {over}: its encoder trains what all stages read; leave the "
            "encoder out, or use pp=1"
        )
    if training.restored or state.program.options.budget.size_bytes is not None:
        raise UnsupportedError(
            f"memory_budget={state.program.options.budget.written!r} {over}: it is planned for all "
            "layers of one rank; use a share such as 0.5, or pp=1"
        )
    readers: dict[str, set[int]] = {}
    for stage in (state.stages[i] for i in range(state.stages.count)):
        for parameter, layer in stage.own(training.model).parameters():
            path = parameter.source.format(layer=layer)
            if parameter.role == "adapter" and path not in adapter.shared:
                readers.setdefault(path, set()).add(stage.index)
    for path, stages in readers.items():
        if len(stages) > 1 and adapter.parameter(path) is not None:
            raise UnsupportedError(
                f"{path} {over}: layers of several stages share it, and each would train its own; "
                "leave it out of the recipe, or use pp=1"
            )
