"""An optimizer of torch.optim over an adapter, and its state as tensors by name."""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from typing import Any

import torch
from torch import Tensor

from pcg.errors import FinetuneError
from pcg.runtime.adapters.adapter_shards import AdapterShards
from pcg.runtime.training.optimizer_table import Optimizer

_ON_HOST = ("step", "mu_product")
"""Scalars that torch keeps on the CPU."""

Parameters = Mapping[str, Tensor]


def make_optimizer(
    parameters: Parameters, optimizer: Optimizer, learning_rate: float
) -> torch.optim.Optimizer:
    """The optimizer, decaying the bypass weights alone: a bias would shrink from the base's own.

    Raises:
        FinetuneError: an option is out of its range, or a parameter is none that it takes.
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
    made = getattr(torch.optim, optimizer.torch_name)
    try:
        return made(groups, lr=learning_rate, **optimizer.options)  # type: ignore[no-any-return]
    except ValueError as error:
        raise FinetuneError(f"optimizer {optimizer.name!r}: {error}") from error


def check_optimizer(optimizer: Optimizer, learning_rate: float) -> None:
    """FinetuneError: an option is out of its range, by torch's own words."""
    make_optimizer({"weight": torch.zeros(1, 1)}, optimizer, learning_rate)


def _is_bias(path: str) -> bool:
    return "bias" in path.rpartition(".")[2]  # an LSTM's are bias_ih_l0 and the like


def optimizer_tensors(
    optimizer: torch.optim.Optimizer, parameters: Parameters, pieces: AdapterShards | None = None
) -> dict[str, Tensor]:
    """Its state by "<parameter>/<key>"; empty before the first step.

    Args:
        optimizer: over the parameters.
        parameters: by name.
        pieces: that they are, of an adapter whose whole parameters' state is wanted.
    """
    states = {name: optimizer.state.get(tensor, {}) for name, tensor in parameters.items()}
    found: dict[str, Tensor] = {}
    for key in dict.fromkeys(key for state in states.values() for key in state):
        values = {name: state[key] for name, state in states.items() if key in state}
        if pieces is not None:
            is_scalar = not next(iter(values.values())).ndim
            values = _of_paths(values, pieces) if is_scalar else pieces.joined(values)
        found |= {f"{path}/{key}": value for path, value in values.items()}
    return found


def _of_paths(values: Mapping[str, Tensor], pieces: AdapterShards) -> dict[str, Tensor]:
    """One value of each parameter's pieces, which all have the same."""
    return {pieces.path_of(name): value for name, value in values.items()}


def load_optimizer(
    optimizer: torch.optim.Optimizer,
    kind: Optimizer,
    parameters: Parameters,
    saved: Mapping[str, Tensor],
    pieces: AdapterShards | None = None,
) -> None:
    """Give each parameter its saved state.

    Args:
        optimizer: over the parameters.
        kind: what it is.
        parameters: by name.
        saved: as `optimizer_tensors` gives it after a step.
        pieces: that the parameters are, of an adapter that the state is of.

    Raises:
        FinetuneError: it is not the state of these parameters.
    """
    left = dict(saved) if pieces is None else _cut(saved, pieces, parameters, kind)
    for path, tensor in parameters.items():
        for key, shape in kind.state(tuple(tensor.shape)).items():
            value = left.pop(f"{path}/{key}", None)
            if value is None or value.shape != shape:
                raise FinetuneError(
                    f"the checkpoint is damaged: its optimizer has no {key} for {path}; use an "
                    "older one, or start anew with resume=False"
                )
            device = value.device if key in _ON_HOST else tensor.device
            optimizer.state[tensor][key] = value.to(device)
    if left:
        raise FinetuneError(
            f"the checkpoint is damaged: its optimizer has {next(iter(left))}, which the adapter "
            "does not; use an older one, or start anew with resume=False"
        )


def _cut(
    saved: Mapping[str, Tensor], pieces: AdapterShards, names: Iterable[str], kind: Optimizer
) -> dict[str, Tensor]:
    """A whole adapter's state as that of a rank's pieces; what fits none is as it was."""
    found = dict(saved)
    for key, shape in kind.state((1, 1)).items():
        ending = f"/{key}"
        wholes = {p.removesuffix(ending): v for p, v in saved.items() if p.endswith(ending)}
        for path in wholes.keys() & {pieces.path_of(name) for name in names}:
            del found[f"{path}{ending}"]
        if not shape:
            own = {n: wholes[p].clone() for n in names if (p := pieces.path_of(n)) in wholes}
        else:
            own = pieces.cut(wholes)
        found |= {f"{name}{ending}": value for name, value in own.items()}
    return found
