"""AdamW over an adapter, and its state as tensors by name."""

from __future__ import annotations

from collections.abc import Mapping

import torch
from torch import Tensor

from pcg.errors import FinetuneError
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
    optimizer: torch.optim.Optimizer, parameters: Parameters
) -> dict[str, Tensor]:
    """Its state by "<parameter>/<key>"; empty before the first step."""
    return {
        f"{path}/{key}": value
        for path, tensor in parameters.items()
        for key, value in optimizer.state[tensor].items()
    }


def load_optimizer(
    optimizer: torch.optim.Optimizer, parameters: Parameters, saved: Mapping[str, Tensor]
) -> None:
    """Give each parameter its saved state.

    Raises:
        FinetuneError: it is not the state of these parameters.
    """
    left = dict(saved)
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
