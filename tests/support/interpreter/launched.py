"""The launches of a program, compiled as on a GPU that is not there.

    for code in launched("tests.support.model_steps:of_lora", 90, model): …

calls a function in another process, which is this file and has no interpreter. Tensors there are
the stand-in's (`stand_in.py`); a launch is specialised by what it is given and compiled, all by
Triton itself, and then not run. So what kernels would have made is zeros.
"""

from __future__ import annotations

import importlib
import json
import os
import subprocess
import sys
from contextlib import AbstractContextManager
from dataclasses import asdict
from typing import Any
from unittest.mock import patch

from tests.support.interpreter.gpu_code import Code, code_of


def launched(function: str, architecture: int = 90, *arguments: str) -> list[Code]:
    """The machine code of every kernel that a function launches, as it is specialised there.

    Args:
        function: its module and name, with a colon between them.
        architecture: the GPU's, as 90.
        arguments: the function's.
    Raises:
        RuntimeError: it fails, or a launch does not compile; the message says why.
    """
    environment = os.environ | {"TRITON_INTERPRET": "0", "TRITON_DEFAULT_FP_FUSION": "1"}
    command = [
        sys.executable,
        "-m",
        "tests.support.interpreter.launched",
        function,
        str(architecture),
        *arguments,
    ]
    ran = subprocess.run(command, capture_output=True, text=True, env=environment)
    if ran.returncode:
        raise RuntimeError(ran.stderr)
    return [Code(**found) for found in json.loads(ran.stdout.splitlines()[-1])]


# ------------------------------------------------------------------------- the other process


class GpuDriver:
    """A GPU as Triton asks for it."""

    def __init__(self, architecture: int) -> None:
        self._architecture = architecture

    def get_current_target(self) -> Any:
        from triton.backends.compiler import GPUTarget

        return GPUTarget("cuda", self._architecture, 32)

    def get_current_device(self) -> int:
        return 0

    def get_current_stream(self, device: int) -> int:
        return 0


def zeros_for_kernels() -> AbstractContextManager[Any]:
    """Have zeros for what kernels would compute, which do not run, and for products."""
    import torch
    from torch.utils._python_dispatch import TorchDispatchMode

    from tests.support.interpreter.tape import EMPTY

    aten = torch.ops.aten
    products = {aten.addmm.default, aten.bmm.default, aten.mm.default}

    class Zeros(TorchDispatchMode):
        def __torch_dispatch__(
            self, operator: Any, _: Any, args: Any = (), kwargs: Any = None
        ) -> Any:
            if operator in products:
                left, right = args[-2:]
                return left.new_zeros((*left.shape[:-1], right.shape[-1]))
            found = operator(*args, **(kwargs or {}))
            return found.zero_() if operator in EMPTY else found

    return Zeros()


def _main(function: str, architecture: int, *arguments: str) -> None:
    import torch
    from triton.runtime import driver
    from triton.runtime.jit import JITFunction

    from tests.support.interpreter.stand_in import Graph, tensors_on_cuda
    from tests.support.interpreter.streams import ORDER

    driver.set_active(GpuDriver(architecture))
    ORDER.is_watched = False
    Graph.replay = lambda self: None  # type: ignore[method-assign]
    run, made = JITFunction.run, {}

    def compiled(self: Any, *args: Any, grid: Any, warmup: bool, **kwargs: Any) -> Any:
        kernel = run(self, *args, grid=grid, warmup=True, **kwargs)
        made[id(kernel)] = self.__name__, kernel
        return kernel

    def capability(device: object = None) -> tuple[int, int]:
        return divmod(architecture, 10)

    module, name = function.split(":")
    with (
        patch.object(JITFunction, "run", compiled),
        tensors_on_cuda(),
        patch.object(torch.cuda, "get_device_capability", capability),
        zeros_for_kernels(),
    ):
        getattr(importlib.import_module(module), name)(*arguments)
    print(json.dumps([asdict(code_of(n, kernel, architecture)) for n, kernel in made.values()]))


if __name__ == "__main__":
    _main(sys.argv[1], int(sys.argv[2]), *sys.argv[3:])
