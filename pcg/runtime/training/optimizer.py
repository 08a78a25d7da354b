"""An adapter's optimizer, and its state as tensors by name."""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from typing import Any

import torch
from torch import Tensor

from pcg.errors import FinetuneError
from pcg.runtime.adapters.adapter_shards import AdapterShards
from pcg.runtime.training.torch_optimizers import Optimizer

Parameters = Mapping[str, Tensor]


def make_optimizer(
    parameters: Parameters, optimizer: Optimizer, learning_rate: float
) -> torch.optim.Optimizer:
    """Make the optimizer of an adapter's parameters.

    Biases do not decay: they would shrink from the base's own.

    Raises:
        FinetuneError: an option is out of its range, or it does not take a parameter.
    """
    if optimizer.takes_matrices_alone:
        for path, tensor in parameters.items():
            if tensor.ndim != 2:
                raise FinetuneError(
                    f"optimizer {optimizer.name!r} takes matrices alone, and {path} is "
                    f"{list(tensor.shape)}; use adamw, or leave it out of the recipe"
                )
    groups: list[dict[str, Any]] = [
        {"params": [tensor for path, tensor in parameters.items() if not _is_bias(path)]}
    ]
    biases = [tensor for path, tensor in parameters.items() if _is_bias(path)]
    if biases:
        groups.append({"params": biases})
        if "weight_decay" in optimizer.options:
            groups[-1]["weight_decay"] = 0.0
    made: Any = optimizer.torch_class
    try:
        return made(groups, lr=learning_rate, **optimizer.options)  # type: ignore[no-any-return]
    except ValueError as error:
        raise FinetuneError(f"optimizer {optimizer.name!r}: {error}") from error


def check_optimizer(optimizer: Optimizer, learning_rate: float) -> None:
    """Raise a FinetuneError, by torch's words, if an option is out of its range."""
    make_optimizer({"weight": torch.zeros(1, 1)}, optimizer, learning_rate)


def _is_bias(path: str) -> bool:
    return "bias" in path.rpartition(".")[2]  # an LSTM's are bias_ih_l0 and the like


def optimizer_tensors(
    optimizer: torch.optim.Optimizer, parameters: Parameters, shards: AdapterShards | None = None
) -> dict[str, Tensor]:
    """Return the state of whole tensors by "<parameter>/<key>"; empty before the first step.

    `shards` are those that the parameters are; None if they are whole.
    """
    states = {name: optimizer.state.get(tensor, {}) for name, tensor in parameters.items()}
    found: dict[str, Tensor] = {}
    for key in dict.fromkeys(key for state in states.values() for key in state):
        values = {name: state[key] for name, state in states.items() if key in state}
        if shards is not None and next(iter(values.values())).ndim:
            values = shards.joined(values)
        elif shards is not None:  # a scalar, which all shards of a parameter have alike
            values = {shards.path_of(name): value for name, value in values.items()}
        found |= {f"{path}/{key}": value for path, value in values.items()}
    return found


def load_optimizer(
    optimizer: torch.optim.Optimizer,
    kind: Optimizer,
    parameters: Parameters,
    saved: Mapping[str, Tensor],
    shards: AdapterShards | None = None,
) -> None:
    """Restore the state of each parameter that `optimizer_tensors` returned after a step.

    Raises:
        FinetuneError: it is not the state of these parameters.
    """
    left = dict(saved) if shards is None else _cut(saved, shards, parameters, kind)
    fix = "use an older one, or start anew with resume=False"
    for path, tensor in parameters.items():
        for key, expected in kind.state(tuple(tensor.shape)).items():
            value = left.pop(f"{path}/{key}", None)
            if value is None or value.shape != expected.shape:
                raise FinetuneError(
                    f"the checkpoint is damaged: its optimizer has no {key} for {path}; {fix}"
                )
            optimizer.state[tensor][key] = value.to(tensor.device) if expected.is_meta else value
    if left:
        raise FinetuneError(
            f"the checkpoint is damaged: its optimizer has {next(iter(left))}, which the adapter "
            f"does not; {fix}"
        )


def _cut(
    saved: Mapping[str, Tensor], shards: AdapterShards, names: Iterable[str], kind: Optimizer
) -> dict[str, Tensor]:
    """Cut the state of a rank's shards out of a whole adapter's; other entries stay."""
    found = dict(saved)
    for key, expected in kind.state((1, 1)).items():
        ending = f"/{key}"
        wholes = {p.removesuffix(ending): v for p, v in saved.items() if p.endswith(ending)}
        for path in wholes.keys() & {shards.path_of(name) for name in names}:
            del found[f"{path}{ending}"]
        if not expected.ndim:
            own = {n: wholes[p].clone() for n in names if (p := shards.path_of(n)) in wholes}
        else:
            own = shards.cut(wholes)
        found |= {f"{name}{ending}": value for name, value in own.items()}
    return found
