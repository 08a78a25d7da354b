"""AdamW over an adapter, and its state as tensors by name."""

from __future__ import annotations

from collections.abc import Iterable, Mapping

import torch
from torch import Tensor

from pcg.errors import FinetuneError
from pcg.runtime.adapter_pieces import AdapterPieces
from pcg.runtime.finetune_options import FinetuneOptions

_STATE = ("step", "exp_avg", "exp_avg_sq")

Parameters = Mapping[str, Tensor]


def make_optimizer(parameters: Parameters, options: FinetuneOptions) -> torch.optim.Optimizer:
    """AdamW, decaying the bypass weights alone: a bias would shrink from the base's own."""
    biases = [tensor for path, tensor in parameters.items() if _is_bias(path)]
    weights = [tensor for path, tensor in parameters.items() if not _is_bias(path)]
    groups = [{"params": weights, "weight_decay": options.weight_decay}]
    if biases:
        groups.append({"params": biases, "weight_decay": 0.0})
    betas = (float(options.betas[0]), float(options.betas[1]))
    return torch.optim.AdamW(groups, lr=options.learning_rate, betas=betas, eps=options.eps)


def _is_bias(path: str) -> bool:
    return "bias" in path.rpartition(".")[2]  # an LSTM's are bias_ih_l0 and the like


def optimizer_tensors(
    optimizer: torch.optim.Optimizer, parameters: Parameters, pieces: AdapterPieces | None = None
) -> dict[str, Tensor]:
    """Its state by "<parameter>/<key>"; empty before the first step.

    Args:
        optimizer: over the parameters.
        parameters: by name.
        pieces: that they are, of an adapter whose whole parameters' state is wanted.
    """
    found: dict[str, Tensor] = {}
    states = {name: optimizer.state[tensor] for name, tensor in parameters.items()}
    for key in _STATE if any(states.values()) else ():
        values = {name: state[key] for name, state in states.items()}
        if pieces is not None:
            values = _of_paths(values, pieces) if key == "step" else pieces.joined(values)
        found |= {f"{path}/{key}": value for path, value in values.items()}
    return found


def _of_paths(values: Mapping[str, Tensor], pieces: AdapterPieces) -> dict[str, Tensor]:
    """One value of each parameter's pieces, which all have the same."""
    return {pieces.path_of(name): value for name, value in values.items()}


def load_optimizer(
    optimizer: torch.optim.Optimizer,
    parameters: Parameters,
    saved: Mapping[str, Tensor],
    pieces: AdapterPieces | None = None,
) -> None:
    """Give each parameter its saved state.

    Args:
        optimizer: over the parameters.
        parameters: by name.
        saved: as `optimizer_tensors` gives it.
        pieces: that the parameters are, of an adapter that the state is of.

    Raises:
        FinetuneError: it is not the state of these parameters.
    """
    left = dict(saved) if pieces is None else _cut(saved, pieces, parameters)
    for path, tensor in parameters.items() if saved else ():
        for key in _STATE:
            value = left.pop(f"{path}/{key}", None)
            if value is None or (key != "step" and value.shape != tensor.shape):
                raise FinetuneError(
                    f"the checkpoint is damaged: its optimizer has no {key} for {path}; use an "
                    "older one, or start anew with resume=False"
                )
            # torch keeps the count of steps on the CPU.
            optimizer.state[tensor][key] = value if key == "step" else value.to(tensor.device)
    if left:
        raise FinetuneError(
            f"the checkpoint is damaged: its optimizer has {next(iter(left))}, which the adapter "
            "does not; use an older one, or start anew with resume=False"
        )


def _cut(
    saved: Mapping[str, Tensor], pieces: AdapterPieces, names: Iterable[str]
) -> dict[str, Tensor]:
    """A whole adapter's state as that of a rank's pieces; what fits none is as it was."""
    found = dict(saved)
    for key in _STATE:
        ending = f"/{key}"
        wholes = {p.removesuffix(ending): v for p, v in saved.items() if p.endswith(ending)}
        for path in wholes.keys() & {pieces.path_of(name) for name in names}:
            del found[f"{path}{ending}"]
        if key == "step":
            own = {n: wholes[p].clone() for n in names if (p := pieces.path_of(n)) in wholes}
        else:
            own = pieces.cut(wholes)
        found |= {f"{name}{ending}": value for name, value in own.items()}
    return found
