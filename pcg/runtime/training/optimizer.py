"""An adapter's optimizer, its state as tensors by name, and states in host memory.

Names of states are "<parameter>/<key>", and the key alone for a tensor that all parameters share.

States in host memory are pinned where the parameters are on a GPU. An update takes the parameters
in turn:

    device state = copy of host state
    w, device state = step(w, g, device state)
    host state = copy of device state

All of it is queued on the device's stream, so that the device holds the states of one parameter at
a time. The numbers are those of the optimizer's own step over all parameters, to the bit: it
updates each parameter by itself. Scalars and shared tensors stay where they are.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from typing import Any

import torch
from torch import Tensor

from pcg.errors import FinetuneError
from pcg.runtime.adapters.adapter_shards import AdapterShards
from pcg.runtime.training.torch_optimizers import SHARED_KEYS, Optimizer


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


Parameters = Mapping[str, Tensor]

_FUSED = ("adam", "adamw", "sgd")
"""Optimizers that have kernels for all parameters at once."""
_CAPTURABLE = ("adadelta", "adamax", "asgd", "nadam", "radam", "rmsprop", "rprop")
"""Optimizers whose steps on a GPU may read the learning rate and the number of steps there."""
_CAPTURED_ON = ("cuda",)


def make_optimizer(
    parameters: Parameters, optimizer: Optimizer, learning_rate: float
) -> torch.optim.Optimizer:
    """Make the optimizer of an adapter's parameters.

    Biases do not decay: they would shrink from the base's own.

    Raises:
        FinetuneError: an option is out of its range, or it does not take a parameter.
    """
    check_parameters(parameters, optimizer)
    weights = [tensor for path, tensor in parameters.items() if not _is_bias(path)]
    # A pipeline stage may train nothing.
    groups: list[dict[str, Any]] = [{"params": weights if parameters else [torch.zeros(0, 0)]}]
    biases = [tensor for path, tensor in parameters.items() if _is_bias(path)]
    if biases:
        groups.append({"params": biases})
        if "weight_decay" in optimizer.options:
            groups[-1]["weight_decay"] = 0.0
    optimizer_class: Any = optimizer.torch_class
    # The first step of a dampened momentum is unlike the others, and these kernels are recorded.
    is_fused = optimizer.name in _FUSED and not optimizer.options.get("dampening")
    is_fused = is_fused and _is_plain(parameters.values())
    device = _device_of(parameters)
    # What such a step computes differs in rounding, so steps that are not recorded run alike.
    is_captured = optimizer.name in _CAPTURABLE and not optimizer.is_offloaded
    is_captured = is_captured and device.type in _CAPTURED_ON
    how = {"fused": True} if is_fused else {}
    if is_captured:
        how = {"capturable": True, "foreach": True}
    try:
        result: torch.optim.Optimizer = optimizer_class(
            groups, lr=learning_rate, **optimizer.options, **how
        )
    except ValueError as error:
        raise FinetuneError(f"optimizer {optimizer.name!r}: {error}") from error
    if is_fused and device.type == "cpu":  # whose kernels do not count what they write
        result.register_step_post_hook(_count_versions)
    if has_device_rate(result):
        rate = _rate(learning_rate, device)
        for group in result.param_groups:
            group["lr"] = rate
    return result


def _count_versions(optimizer: torch.optim.Optimizer, *_: object) -> None:
    for group in optimizer.param_groups:
        torch.autograd.graph.increment_version(group["params"])


def check_parameters(parameters: Parameters, optimizer: Optimizer) -> None:
    """Raise a FinetuneError for a parameter that an optimizer does not take."""
    for path, tensor in parameters.items():
        optimizer.check_dtype(tensor.dtype)
        if optimizer.takes_matrices_alone and tensor.ndim != 2:
            raise FinetuneError(
                f"optimizer {optimizer.name!r} takes matrices alone, and {path} is "
                f"{list(tensor.shape)}; use adamw, or leave it out of the recipe"
            )


def _device_of(parameters: Parameters) -> torch.device:
    return next((tensor.device for tensor in parameters.values()), torch.device("cpu"))


def has_device_rate(optimizer: torch.optim.Optimizer) -> bool:
    """Return whether an optimizer's rate and numbers of steps lie where its parameters do."""
    return bool(optimizer.defaults.get("fused") or optimizer.defaults.get("capturable"))


def _is_plain(tensors: Iterable[Tensor]) -> bool:
    """Return whether torch's fused kernels update these tensors.

    On CPUs it takes a third of the time of an operator for each step of the formula, and on a GPU
    it is a few launches. It goes through memory in order, whatever the strides are: parameters,
    gradients and states need the same strides.
    """
    return all(
        t.is_contiguous() and (t.is_cuda or (t.is_cpu and t.dtype == torch.float32))
        for t in tensors
    )


def _rate(rate: float, device: torch.device) -> Tensor:
    """Return a learning rate on the device, as an update reads it there."""
    dtype = torch.float32 if device.type == "cuda" else torch.float64
    return torch.full((), rate, dtype=dtype, device=device)


def set_rate(optimizer: torch.optim.Optimizer, rate: float) -> None:
    """Set the learning rate of the next update; the host does not wait."""
    for group in optimizer.param_groups:
        if isinstance(group["lr"], Tensor):
            group["lr"].fill_(rate)
        else:
            group["lr"] = rate


def check_optimizer(optimizer: Optimizer, learning_rate: float) -> None:
    """Raise a FinetuneError, by its library's words, if an option is out of its range."""
    make_optimizer({"weight": torch.zeros(1, 1)}, optimizer, learning_rate)


def _is_bias(path: str) -> bool:
    return "bias" in path.rpartition(".")[2]  # an LSTM's are bias_ih_l0 and the like


def optimizer_tensors(
    optimizer: torch.optim.Optimizer, parameters: Parameters, shards: AdapterShards | None = None
) -> dict[str, Tensor]:
    """Return the state of whole tensors by name; empty before the first step.

    `shards` are those that the parameters are; None if they are whole.
    """
    states = {name: optimizer.state.get(tensor, {}) for name, tensor in parameters.items()}
    tensors: dict[str, Tensor] = {}
    for key in dict.fromkeys(key for state in states.values() for key in state):
        values = {n: torch.as_tensor(state[key]) for n, state in states.items() if key in state}
        if key in SHARED_KEYS:
            tensors[key] = next(iter(values.values()))
            continue
        if shards is not None and next(iter(values.values())).ndim:
            values = shards.joined(values)
        elif shards is not None:  # a scalar, which all shards of a parameter have alike
            values = {shards.path_of(name): value for name, value in values.items()}
        tensors |= {f"{path}/{key}": value for path, value in values.items()}
    return tensors if shards is None else shards.united(tensors)


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
    left = dict(saved) if shards is None else _cut(saved, shards, parameters)
    on_device = has_device_rate(optimizer)
    device = _device_of(parameters)
    shared = {key: left.pop(key).to(device) for key in SHARED_KEYS if key in left}
    fix = "use an older one, or start anew with resume=False"
    for path, tensor in parameters.items():
        for key, expected in kind.state(tuple(tensor.shape), tensor.dtype).items():
            value = shared.get(key)
            if value is None:
                value = left.pop(f"{path}/{key}", None)
            if value is None or value.shape != torch.as_tensor(expected).shape:
                raise FinetuneError(
                    f"the checkpoint is damaged: its optimizer has no {key} for {path}; {fix}"
                )
            optimizer.state[tensor][key] = _restored(key, value, expected, kind, device)
            if on_device and not value.ndim:  # where its kernels read it
                optimizer.state[tensor][key] = value.to(device)
    if left:
        raise FinetuneError(
            f"the checkpoint is damaged: its optimizer has {next(iter(left))}, which the adapter "
            f"does not; {fix}"
        )


def _restored(
    key: str, value: Tensor, expected: Tensor | int, kind: Optimizer, device: torch.device
) -> Tensor | int:
    """Return an entry of a state, of a saved value, where the optimizer keeps it."""
    if isinstance(expected, int):
        return int(value)
    value = value.contiguous()  # a rank's part of a column-sharded one is a view
    if not expected.is_meta:
        return value
    if kind.is_offloaded and value.ndim and key not in SHARED_KEYS:
        return host_copy(value, device)
    return value.to(device)


def _cut(
    saved: Mapping[str, Tensor], shards: AdapterShards, names: Iterable[str]
) -> dict[str, Tensor]:
    """Cut the state of a rank's shards out of a whole adapter's; other entries stay.

    Entries of other shapes, such as the number of steps, are the same for all shards.
    """
    tensors = {entry: value for entry, value in saved.items() if not shards.has(_parted(entry)[0])}
    by_key: dict[str, dict[str, Tensor]] = {}
    for entry in saved.keys() - tensors.keys():
        path, key = _parted(entry)
        by_key.setdefault(key, {})[path] = saved[entry]
    for key, wholes in by_key.items():
        alike = {p: v for p, v in wholes.items() if tuple(v.shape) != shards.whole_shape(p)}
        parts = shards.cut({path: wholes[path] for path in wholes.keys() - alike.keys()})
        parts |= {n: alike[p].clone() for n in names if (p := shards.path_of(n)) in alike}
        tensors |= {f"{name}/{key}": value for name, value in parts.items()}
    return tensors


def _parted(entry: str) -> tuple[str, str]:
    """Return the path and the key of an entry of saved states."""
    path, _, key = entry.rpartition("/")
    return path, key
