"""An optimizer's states in host memory, pinned where the parameters are on a GPU.

An update takes the parameters one after another:

    device state = copy of host state
    w, device state = step(w, g, device state)
    host state = copy of device state

All of it is queued on the device's stream, so that the device holds the states of one parameter at
a time. The numbers are those of the optimizer's own step over all parameters, to the bit: it
updates each parameter by itself. Scalars, and what all parameters share, stay where they are.
"""

from __future__ import annotations

import torch
from torch import Tensor

from pcg.runtime.training.torch_optimizers import SHARED_KEYS


class HostStates:
    """Holds the states of an optimizer in host memory between updates."""

    def __init__(self, optimizer: torch.optim.Optimizer) -> None:
        self._optimizer = optimizer
        parameters = [p for group in optimizer.param_groups for p in group["params"]]
        self._device: torch.device = parameters[0].device
        for parameter in parameters:
            self._keep(parameter, {})  # some make their states before the first step

    def step(self) -> None:
        """Update all parameters, with the states of one at a time on the device."""
        optimizer, groups = self._optimizer, self._optimizer.param_groups
        try:
            for group in groups:
                for parameter in group["params"]:
                    optimizer.param_groups = [{**group, "params": [parameter]}]
                    held = self._bring(parameter)
                    optimizer.step()
                    self._keep(parameter, held)
        finally:
            optimizer.param_groups = groups
        if self._device.type == "cuda":  # copies to pinned memory are under way
            torch.cuda.current_stream(self._device).synchronize()

    def _bring(self, parameter: Tensor) -> dict[str, Tensor]:
        """Put copies of a parameter's states on the device; returns those in host memory."""
        state = self._optimizer.state.get(parameter, {})
        held = {key: value for key, value in state.items() if _moves(key, value)}
        for key, value in held.items():
            state[key] = value.to(self._device, non_blocking=True, copy=True)
        return held

    def _keep(self, parameter: Tensor, held: dict[str, Tensor]) -> None:
        """Put a parameter's states into host memory, into the tensors that they came from."""
        state = self._optimizer.state.get(parameter, {})
        for key, value in state.items():
            if _moves(key, value):
                host = held.get(key)
                state[key] = (
                    host_copy(value, self._device)
                    if host is None
                    else host.copy_(value, non_blocking=True)
                )


def _moves(key: str, value: object) -> bool:
    return isinstance(value, Tensor) and value.ndim > 0 and key not in SHARED_KEYS


def host_copy(value: Tensor, device: torch.device) -> Tensor:
    """Return a copy in host memory, from which a device copies fast."""
    copied = torch.empty_like(value, device="cpu", pin_memory=device.type == "cuda")
    return copied.copy_(value, non_blocking=True)
