"""What the compiler's calls are given: checked, and as its own types."""

from __future__ import annotations

import importlib.util
import os
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any

from pcg.errors import ParallelError, UnsupportedError
from pcg.ir.types import TORCH_NAMES
from pcg.parallel.costs.model import SHEETS
from pcg.peft.reader import read_adapter
from pcg.peft.recipe import Recipe
from pcg.peft.registry import is_shorthand, recipe_from

if TYPE_CHECKING:
    import torch


def recipes_of(peft: object) -> dict[str, Recipe]:
    """The recipes that `peft` names; one without a name is called `default`."""
    if peft is None:
        return {}
    if isinstance(peft, Mapping) and not is_recipe(peft):
        return {str(name): _recipe(value) for name, value in peft.items()}
    return {"default": _recipe(peft)}


def is_recipe(peft: Mapping[Any, Any]) -> bool:
    """Whether it is one recipe, and not recipes by name."""
    return "peft_type" in peft


def _recipe(value: object) -> Recipe:
    if isinstance(value, str | os.PathLike) and not is_shorthand(value):
        return read_adapter(value, "adapter").recipe
    return recipe_from(value)


def costs_name(costs: str | os.PathLike[str] | None, gpus: Sequence[str] = ()) -> str:
    """The sheet or the profile asked for; else the first GPU that has a sheet, else an H100."""
    if costs is None:
        return next((name for name in gpus if name.upper() in map(str.upper, SHEETS)), "H100")
    path = Path(costs).expanduser()
    return str(path.resolve()) if path.is_file() else os.fspath(costs)


def check_degree(
    tp: object,
    costs: object = None,
    tp_plan: object = None,
    sequence_parallel: bool = False,
    gradient_accumulation_steps: object = 1,
) -> None:
    """Refuse what is no number of ranks, and what is said of ranks where there is one.

    Raises:
        ParallelError: it is so; names the fix.
    """
    if type(tp) is not int or tp < 1:
        raise ParallelError(f"tp={tp!r}; use an int of at least 1")
    steps = gradient_accumulation_steps
    if type(steps) is not int or steps < 1:
        raise ParallelError(f"gradient_accumulation_steps={steps!r}; use an int of at least 1")
    of_ranks = (
        ("costs", costs),
        ("tp_plan", tp_plan),
        ("gradient_accumulation_steps", None if steps == 1 else steps),
    )
    for name, given in of_ranks:
        if tp == 1 and given is not None:
            raise ParallelError(
                f"{name}={given!r} has no effect with tp=1, where nothing is parallelized; give "
                f"tp=2 or more (--tp 2), or leave {name} out"
            )
    if sequence_parallel and tp == 1:
        raise ParallelError(
            "sequence_parallel=True shares norms and residuals over ranks, and tp=1 is one rank; "
            "use tp=2 or more, or leave it out"
        )


BACKENDS = ("torch", "triton")


def check_backend(backend: object) -> None:
    """UnsupportedError: programs are emitted for no such backend, or it is not installed."""
    if backend not in BACKENDS:
        raise UnsupportedError(f"backend={backend!r}; use one of {', '.join(BACKENDS)}")
    if backend == "triton" and importlib.util.find_spec("triton") is None:
        raise UnsupportedError(
            "backend='triton' needs the package triton, which exists for Linux alone; install it, "
            "or use backend='torch'"
        )


def check_device(backend: str, device: torch.device) -> None:
    """UnsupportedError: a backend's programs do not run on a device."""
    if backend == "triton" and device.type != "cuda" and not _interprets():
        raise UnsupportedError(
            "the program is compiled for Triton, which runs on NVIDIA GPUs, and its device is "
            f"{device.type}; compile it for PyTorch (--backend torch), or set TRITON_INTERPRET=1 "
            "to run its kernels on the CPU, slowly: it is meant for tests"
        )


def _interprets() -> bool:
    """Whether Triton runs kernels in its interpreter."""
    return os.environ.get("TRITON_INTERPRET", "").lower() in ("1", "true", "yes", "on", "y")


def adapter_dtype(base: str) -> str:
    """Dtype of adapters over a base: fp32 over half precision, as peft has it."""
    return "f64" if base == "f64" else "f32"


def dtype_name(dtype: object) -> str | None:
    """A dtype, of torch or by name, as torch's name of it; None for None."""
    if dtype is None:
        return None
    name = str(dtype).removeprefix("torch.")
    if name not in TORCH_NAMES.values():
        raise UnsupportedError(f"dtype={name!r}; use one of float32, bfloat16, float16, float64")
    return name
