"""An adapter's optimizer, its state as tensors by name, and states in host memory.

Names of states are "<parameter>/<key>", or "<key>" for a tensor that all parameters share.

States in host memory are pinned where the parameters are on a GPU. An update takes the parameters
in turn:

    device state = copy of host state
    w, device state = step(w, g, device state)
    host state = copy of device state

All operations are queued on the device's stream, so that the device holds the states of a single
parameter at a time. The results equal the optimizer's own step over all parameters bit for bit, as
optimizers update each parameter separately. Scalars and shared tensors are not moved.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from typing import Any

import torch
from torch import Tensor

from pcg.errors import FinetuneError
from pcg.ir.module_paths import is_embedding, is_swapped
from pcg.runtime.adapters.adapter_shards import AdapterShards
from pcg.runtime.training.torch_optimizers import SHARED_KEYS, Optimizer


class HostStates:
    """Holds the states of an optimizer in host memory between updates."""

    def __init__(self, optimizer: torch.optim.Optimizer) -> None:
        self._optimizer = optimizer
        parameters = [p for group in optimizer.param_groups for p in group["params"]]
        self._device: torch.device = parameters[0].device
        for parameter in parameters:
            self._keep(parameter, {})  # some optimizers create states before the first step

    def step(self) -> None:
        """Update all parameters, with the states of a single parameter on the device at a time."""
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
        """Copy a parameter's states to the device; return the states in host memory."""
        state = self._optimizer.state.get(parameter, {})
        held = {key: value for key, value in state.items() if _moves(key, value)}
        for key, value in held.items():
            state[key] = value.to(self._device, non_blocking=True, copy=True)
        return held

    def _keep(self, parameter: Tensor, held: dict[str, Tensor]) -> None:
        """Copy a parameter's states to host memory, into the original tensors if any."""
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
    """Return a copy in host memory, pinned for a GPU."""
    copied = torch.empty_like(value, device="cpu", pin_memory=device.type == "cuda")
    return copied.copy_(value, non_blocking=True)


Parameters = Mapping[str, Tensor]

_FUSED = ("adam", "adamw", "sgd")
"""Optimizers with fused kernels for all parameters."""
_CAPTURABLE = ("adadelta", "adamax", "asgd", "nadam", "radam", "rmsprop", "rprop")
"""Optimizers that can keep the learning rate and the step count on a GPU."""
_CAPTURED_ON = ("cuda",)


def make_optimizer(
    parameters: Parameters, optimizer: Optimizer, learning_rate: float
) -> torch.optim.Optimizer:
    """Create the optimizer of an adapter's parameters.

    Biases do not decay, as decay would shrink the base's values. With a ratio of LoRA+, groups of
    matrices B and of vectors have it as `ratio`, and other groups have none (Hayou et al., 2024).

    Raises:
        FinetuneError: an option is out of range, or the optimizer does not support a parameter.
    """
    check_parameters(parameters, optimizer)
    by_kind: dict[tuple[bool, bool], list[Tensor]] = {}
    # A pipeline stage may have no parameters.
    for path, tensor in (parameters or {"": torch.zeros(0, 0)}).items():
        has_ratio = optimizer.ratio != 1.0 and (_is_b(path) or tensor.ndim == 1)
        is_norm = path.endswith(".weight") and tensor.ndim == 1  # of `modules_to_save`
        by_kind.setdefault((_is_bias(path) or is_norm, has_ratio), []).append(tensor)
    groups: list[dict[str, Any]] = []
    for (is_bias, has_ratio), tensors in sorted(by_kind.items(), key=lambda item: item[0]):
        groups.append({"params": tensors, "is_bias": is_bias})
        if is_bias and "weight_decay" in optimizer.options:
            groups[-1]["weight_decay"] = 0.0
        if has_ratio:
            groups[-1] |= {"ratio": optimizer.ratio, "lr": learning_rate * optimizer.ratio}
    optimizer_class: Any = optimizer.torch_class
    # Fused steps are recorded, but the first step of a dampened momentum differs from later steps.
    is_fused = optimizer.name in _FUSED and not optimizer.options.get("dampening")
    is_fused = is_fused and _is_plain(parameters.values())
    device = _device_of(parameters)
    # Capturable steps round differently, so steps that are not recorded use them as well.
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
    if is_fused and device.type == "cpu":  # these kernels do not increment tensor versions
        result.register_step_post_hook(_count_versions)
    if has_device_rate(result):
        rates = {rate: _rate(rate, device) for rate in {g["lr"] for g in result.param_groups}}
        for group in result.param_groups:
            group["lr"] = rates[group["lr"]]
    return result


def _count_versions(optimizer: torch.optim.Optimizer, *_: object) -> None:
    for group in optimizer.param_groups:
        torch.autograd.graph.increment_version(group["params"])


def check_parameters(parameters: Parameters, optimizer: Optimizer) -> None:
    """Raise a FinetuneError for a parameter that an optimizer does not support."""
    for path, tensor in parameters.items():
        optimizer.check_dtype(tensor.dtype)
        if optimizer.takes_matrices_alone and tensor.ndim != 2:
            raise FinetuneError(
                f"optimizer {optimizer.name!r} takes only matrices, and {path} is "
                f"{list(tensor.shape)}; use adamw, or leave it out of the recipe"
            )
        if optimizer.takes_matrices_alone and is_swapped(path.rpartition(".")[0]):
            raise FinetuneError(
                f"optimizer {optimizer.name!r} has a rate by the shape of a matrix, and {path} is "
                "one whose dims peft exchanges; use adamw"
            )
    if optimizer.ratio != 1.0 and any(is_embedding(p.rpartition(".")[0]) for p in parameters):
        raise FinetuneError(
            f"loraplus_lr_ratio={optimizer.ratio:g} with LoRA on an embedding, which peft trains "
            "at a rate of its own; leave the ratio, or the embedding, out"
        )
    if optimizer.ratio != 1.0 and not any(map(_is_b, parameters)):
        raise FinetuneError(
            f"loraplus_lr_ratio={optimizer.ratio:g} is the rate of LoRA's matrices B, and the "
            "recipe has none; leave it out"
        )


def _device_of(parameters: Parameters) -> torch.device:
    return next((tensor.device for tensor in parameters.values()), torch.device("cpu"))


def has_device_rate(optimizer: torch.optim.Optimizer) -> bool:
    """Return True if an optimizer keeps rate and step counts on the parameters' device."""
    return bool(optimizer.defaults.get("fused") or optimizer.defaults.get("capturable"))


def _is_plain(tensors: Iterable[Tensor]) -> bool:
    """Return True if torch's fused kernels can update the tensors.

    A fused step takes a third of the time of separate operators on CPUs, and a few launches on a
    GPU. Fused kernels ignore strides, so parameters, gradients and states need equal strides.
    """
    return all(
        t.is_contiguous() and (t.is_cuda or (t.is_cpu and t.dtype == torch.float32))
        for t in tensors
    )


def _rate(rate: float, device: torch.device) -> Tensor:
    """Return a learning rate as a tensor on the device."""
    dtype = torch.float32 if device.type == "cuda" else torch.float64
    return torch.full((), rate, dtype=dtype, device=device)


def set_rate(optimizer: torch.optim.Optimizer, rate: float) -> None:
    """Set the learning rate of the next update, without waiting for the device."""
    for group in optimizer.param_groups:
        of_group = rate * group.get("ratio", 1.0)
        if isinstance(group["lr"], Tensor):
            group["lr"].fill_(of_group)
        else:
            group["lr"] = of_group


def check_optimizer(optimizer: Optimizer, learning_rate: float) -> None:
    """Raise a FinetuneError with the library's message if an option is out of range."""
    make_optimizer({"lora_B": torch.zeros(1, 1)}, optimizer, learning_rate)


def _is_b(path: str) -> bool:
    """Return whether a matrix is a B of peft's, also by peft's names of swapped experts."""
    return path.endswith("lora_A" if is_swapped(path.rpartition(".")[0]) else "lora_B")


def _is_bias(path: str) -> bool:
    return "bias" in path.rpartition(".")[2]  # also an LSTM's, such as bias_ih_l0


def optimizer_tensors(
    optimizer: torch.optim.Optimizer, parameters: Parameters, shards: AdapterShards | None = None
) -> dict[str, Tensor]:
    """Return the state of whole tensors by name; empty before the first step.

    `shards` are the shards that contain the parameters; None for whole parameters.
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
        elif shards is not None:  # a scalar, equal in all shards of a parameter
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
    """Load the states that `optimizer_tensors` returned after a step.

    Raises:
        FinetuneError: the state does not fit the parameters.
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
            if on_device and not value.ndim:  # kernels read scalars on the device
                optimizer.state[tensor][key] = value.to(device)
    if left:
        raise FinetuneError(
            f"the checkpoint is damaged: its optimizer has {next(iter(left))}, which the adapter "
            f"does not; {fix}"
        )


def _restored(
    key: str, value: Tensor, expected: Tensor | int, kind: Optimizer, device: torch.device
) -> Tensor | int:
    """Return an entry of a state from a saved value, in the optimizer's type and memory."""
    if isinstance(expected, int):
        return int(value)
    value = value.contiguous()  # a rank's part of a column-sharded tensor is a view
    if not expected.is_meta:
        return value
    if kind.is_offloaded and value.ndim and key not in SHARED_KEYS:
        return host_copy(value, device)
    return value.to(device)


def _cut(
    saved: Mapping[str, Tensor], shards: AdapterShards, names: Iterable[str]
) -> dict[str, Tensor]:
    """Cut the state of a rank's shards out of a whole adapter's state; keep other entries.

    Entries of other shapes, such as the number of steps, are equal for all shards.
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
