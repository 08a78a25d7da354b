"""Adapters on a transformers model in eager PyTorch: peft's, and plain code for other methods.

peft lacks BitFit, which trains the model's biases, and bottleneck adapters, which follow their
papers' figures: a small network after a module's output, or parallel to an MLP.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch.overrides import TorchFunctionMode

from pcg.errors import UnsupportedError
from pcg.peft.bitfit import BitFitConfig
from pcg.peft.bottleneck import MLP_INPUTS, BottleneckBypass
from pcg.peft.method import Bypass
from pcg.peft.recipe import Recipe

_STEPS = 1000
"""The steps of AdaLoRA's rank schedule; no byte depends on them."""

_FUNCTIONS: Mapping[str, Callable[[Tensor], Tensor]] = {
    "gelu": F.gelu,
    "gelu_new": lambda x: F.gelu(x, approximate="tanh"),
    "relu": F.relu,
    "silu": F.silu,
    "tanh": torch.tanh,
}


def with_peft(model: nn.Module, adapter: Mapping[str, Any]) -> Any:
    """Return a model with peft's adapter of the contents of an adapter_config.json.

    Raises:
        UnsupportedError: peft does not have the method, or is not installed.
    """
    try:
        import peft
    except ImportError as error:
        raise UnsupportedError("peft is not installed: pip install 'pcg[peft]'") from error
    if adapter["peft_type"] not in peft.PeftType.__members__:
        raise UnsupportedError("peft has no such method")
    fields = {**adapter, "inference_mode": False, "task_type": "CAUSAL_LM"}
    with _ParametersStay():
        return peft.get_peft_model(model, peft.PeftConfig.from_peft_type(**fields))


class _ParametersStay(TorchFunctionMode):
    """Mode in which a parameter moved to the meta device stays a parameter.

    peft replaces a parameter by the result of `to`. A copy would be trained regardless of the
    parameter's flag (AdaLoRA's `ranknum`); on a single device `to` copies only to another dtype.
    """

    def __torch_function__(
        self, func: Any, types: Any, args: tuple[Any, ...] = (), kwargs: Any = None
    ) -> Any:
        out = func(*args, **(kwargs or {}))
        if func is Tensor.to and isinstance(args[0], nn.Parameter) and out.dtype == args[0].dtype:
            return nn.Parameter(out, args[0].requires_grad)
        return out


def with_adapter(model: nn.Module, recipe: Recipe, at: Mapping[str, Bypass]) -> Any:
    """Return a model with a recipe's adapter; only the adapter is trained.

    Args:
        model: a transformers model.
        recipe: the adapter's recipe.
        at: the networks of the adapter, by module path; paths missing in the model are ignored.
    Raises:
        UnsupportedError: peft is needed and not installed.
    """
    if isinstance(recipe, BitFitConfig):
        for name, parameter in model.named_parameters():
            parameter.requires_grad_(name.endswith("bias"))
        return model
    bottlenecks = {
        path: bypass for path, bypass in at.items() if isinstance(bypass, BottleneckBypass)
    }
    if not bottlenecks:
        recipe = recipe.for_job(_STEPS)
        return with_peft(model, recipe.config_fields(recipe.target_modules, "", {}))
    model.requires_grad_(False)
    modules = dict(model.named_modules())
    for path, bypass in bottlenecks.items():
        if path in modules:
            _add_bottleneck(modules, path, bypass)
    return model


class _Bottleneck(nn.Module):
    """U σ(D x + d) + u, scaled, in the dtype of x."""

    def __init__(self, features: int, dtype: torch.dtype, bypass: BottleneckBypass) -> None:
        super().__init__()
        assert bypass.size is not None
        self.down = nn.Linear(features, bypass.size, dtype=dtype, device="meta")
        self.up = nn.Linear(bypass.size, features, dtype=dtype, device="meta")
        self._function = _FUNCTIONS[bypass.non_linearity]
        self._scaling = bypass.scaling

    def forward(self, x: Tensor) -> Tensor:
        y: Tensor = self.up(self._function(self.down(x.to(self.down.weight.dtype))))
        return (self._scaling * y).to(x.dtype)


def _add_bottleneck(modules: Mapping[str, nn.Module], path: str, bypass: BottleneckBypass) -> None:
    module: Any = modules[path]
    features = module.nf if hasattr(module, "nf") else module.out_features  # nf: Conv1D's
    dtype = torch.promote_types(module.weight.dtype, torch.float32)  # as peft over half precision
    module.bottleneck = adapter = _Bottleneck(features, dtype, bypass)
    if not bypass.is_parallel:
        module.register_forward_hook(lambda _, __, y: y + adapter(y))
        return
    inputs: list[Tensor] = []
    parent = path.rpartition(".")[0]
    first = next(name for name in MLP_INPUTS if f"{parent}.{name}" in modules)
    modules[f"{parent}.{first}"].register_forward_pre_hook(lambda _, args: inputs.append(args[0]))
    module.register_forward_hook(lambda _, __, y: y + adapter(inputs.pop()))
