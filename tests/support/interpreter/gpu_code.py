"""Kernels compiled for GPUs that are not there, and what their machine code is like.

The interpreter takes the place of `triton.jit` in a process for good, so this compiles in another:

    for code in compiled([Kernel("pcg.kernels.…", "shrink", {"x": "*bf16", …}, {…})]): …

which is this file run with the kernels on its standard input.
"""

from __future__ import annotations

import importlib.metadata
import json
import os
import re
import subprocess
import sys
import tempfile
from collections import Counter
from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass, field
from pathlib import Path
from typing import Any

from tests.support.interpreter.loads_under_way import bytes_under_way
from tests.support.interpreter.product_loops import ProductLoop, product_loops

ARCHITECTURES = (80, 90)
"""Ampere and Hopper."""
IS_NEW_TRITON = tuple(map(int, importlib.metadata.version("triton").split(".")[:2])) >= (3, 9)
"""Whether Triton is one that code is held to its best with; 3.6 makes right, but wider code."""
_SHARED_KIB = {80: 164, 90: 228}
"""Shared memory of a processor, of which each program takes 1 KiB beside its own."""


@dataclass(frozen=True)
class Kernel:
    """A kernel, specialised.

    Attributes:
        module: its module: an import path, or Python source.
        name: the function's name.
        signature: type of each argument that is not constant, as `*bf16`, `i32`, `fp32`.
        constants: values of the other arguments.
        odd: integers that 16 does not divide; it divides all others, and all pointers.
        warps: warps of a program.
        stages: stages of its software pipelines.
        registers: the most of a thread, which are used freely; None leaves it to ptxas.
    """

    module: str
    name: str
    signature: Mapping[str, str]
    constants: Mapping[str, object] = field(default_factory=dict)
    odd: Sequence[str] = ()
    warps: int = 4
    stages: int = 3
    registers: int | None = None


@dataclass(frozen=True)
class Code:
    """A kernel's machine code.

    Attributes:
        kernel: its name.
        architecture: 80 or 90.
        registers: registers of a thread.
        stack_bytes: local memory of a thread's frame: spills and indexed arrays.
        shared_bytes: shared memory of a program.
        instructions: how often each stands there, by name with its modifiers, as `LDG.E.128`.
        loops: the instructions of each innermost loop with products of Hopper's tensor cores.
        load_bytes: the most bytes that a thread's loads have under way.
    """

    kernel: str
    architecture: int
    registers: int
    stack_bytes: int
    shared_bytes: int
    instructions: Mapping[str, int]
    loops: Sequence[Sequence[str]] = ()
    load_bytes: int = 0

    @property
    def product_loops(self) -> list[ProductLoop]:
        return [ProductLoop(tuple(loop)) for loop in self.loops]

    def count(self, *names: str) -> int:
        """Instructions whose names have all these as parts, as ("LDG", "128")."""
        wanted = set(names)
        return sum(n for name, n in self.instructions.items() if wanted <= set(name.split(".")))

    def programs(self, warps: int) -> int:
        """How many programs of so many warps a processor runs at once."""
        by_registers = 65_536 // (32 * warps * -(-self.registers // 8) * 8)
        return min(
            by_registers, _SHARED_KIB[self.architecture] * 1024 // (self.shared_bytes + 1024)
        )

    def check_in_registers(self, most: int = 255) -> None:
        """AssertionError: it spills, uses local memory, or takes more registers than that."""
        where = f"{self.kernel} for sm_{self.architecture}"
        assert not self.stack_bytes, f"{where}: a stack of {self.stack_bytes} bytes"
        assert not self.count("LDL"), f"{where}: loads from local memory"
        assert not self.count("STL"), f"{where}: stores to local memory"
        assert self.registers <= most, f"{where}: {self.registers} registers, {most} allowed"


def compiled(kernels: Sequence[Kernel], architectures: Sequence[int] = ARCHITECTURES) -> list[Code]:
    """The machine code of each kernel for each architecture, in a process without interpreter.

    Raises:
        RuntimeError: one does not compile; the message says why.
    """
    asked = json.dumps([[asdict(kernel) for kernel in kernels], list(architectures)])
    environment = {key: value for key, value in os.environ.items() if key != "TRITON_INTERPRET"}
    environment["TRITON_DEFAULT_FP_FUSION"] = "1"  # triton 3.9 warns that the default will change
    command = [sys.executable, "-m", "tests.support.interpreter.gpu_code"]
    ran = subprocess.run(command, input=asked, capture_output=True, text=True, env=environment)
    if ran.returncode:
        raise RuntimeError(ran.stderr)
    return [Code(**found) for found in json.loads(ran.stdout)]


# ------------------------------------------------------------------------- the other process


def _main() -> None:
    kernels, architectures = json.load(sys.stdin)
    found = []
    with tempfile.TemporaryDirectory() as folder:
        for number, fields in enumerate(kernels):
            kernel = Kernel(**fields)
            function = _function(kernel, Path(folder) / f"kernels_{number}.py")
            found += [asdict(_code(kernel, function, one)) for one in architectures]
    print(json.dumps(found))


def _function(kernel: Kernel, path: Path) -> object:
    import importlib
    import importlib.util

    if "\n" not in kernel.module:
        return _jitted(importlib.import_module(kernel.module), kernel.name)
    path.write_text(kernel.module, "utf-8")
    spec = importlib.util.spec_from_file_location(path.stem, path)
    assert spec is not None
    assert spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return _jitted(module, kernel.name)


def _jitted(module: object, name: str) -> object:
    found = getattr(module, name)
    return getattr(found, "kernel", None) or found  # emitted ones carry their launch


def _code(kernel: Kernel, function: object, architecture: int) -> Code:
    import triton
    from triton.backends.compiler import GPUTarget
    from triton.compiler import ASTSource

    names = function.arg_names  # type: ignore[attr-defined]
    signature = {name: kernel.signature.get(name, "constexpr") for name in names}
    aligned = {
        (index,): [["tt.divisibility", 16]]
        for index, name in enumerate(names)
        if name not in kernel.odd and signature[name][0] in "*i"
    }
    constants = {(names.index(name),): value for name, value in kernel.constants.items()}
    source = ASTSource(function, signature, constants, aligned)
    options = {
        "num_warps": kernel.warps,
        "num_stages": kernel.stages,
        "maxnreg": kernel.registers,
    }
    made = triton.compile(source, target=GPUTarget("cuda", architecture, 32), options=options)
    return code_of(kernel.name, made, architecture)


def code_of(name: str, made: Any, architecture: int) -> Code:
    """The machine code of a kernel that Triton compiled."""
    with tempfile.NamedTemporaryFile(suffix=".cubin") as file:
        file.write(made.asm["cubin"])
        file.flush()
        usage = _tool("cuobjdump", "-res-usage", file.name)
        listing = _tool("nvdisasm", "-c", file.name)
    registers = re.search(r"REG:(\d+)", usage)
    stack = re.search(r"STACK:(\d+)", usage)
    assert registers is not None
    assert stack is not None
    instructions = re.findall(
        r"^\s+/\*[0-9a-f]+\*/\s+(?:@!?U?P\w+ )?([A-Z][A-Z0-9_.]+)", listing, re.M
    )
    return Code(
        name,
        architecture,
        int(registers[1]),
        int(stack[1]),
        made.metadata.shared,
        dict(Counter(instructions)),
        product_loops(listing),
        bytes_under_way(listing),
    )


def _tool(name: str, *arguments: str) -> str:
    import triton.backends.nvidia

    path = Path(triton.backends.nvidia.__file__).parent / "bin" / name
    ran = subprocess.run([path, *arguments], capture_output=True, text=True, check=True)
    return ran.stdout


if __name__ == "__main__":
    _main()
