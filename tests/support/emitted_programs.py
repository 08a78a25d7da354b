"""Programs whose emitted source is pinned, and the file of what they were: renew it by

    python -m tests.support.emitted_programs

after emission changed on purpose, and say in the commit what changed in the source, and why.
"""

from __future__ import annotations

import json
import lzma
import re
from dataclasses import dataclass
from functools import cache
from pathlib import Path
from typing import Any

from pcg.compiler import compile_program
from tests.support.families import BY_NAME

PATH = Path(__file__).parents[1] / "codegen" / "emitted_programs.json.xz"
LORA: dict[str, Any] = {"peft_type": "LORA", "r": 4, "target_modules": "all-linear"}
METHODS: dict[str, dict[str, Any]] = {
    "lora": LORA,
    "dora": {**LORA, "use_dora": True},
    "adalora": {
        "peft_type": "ADALORA",
        "total_step": 20,
        "init_r": 4,
        "target_r": 2,
        "target_modules": "all-linear",
    },
    "vera": {"peft_type": "VERA", "r": 4},
    "ia3": {"peft_type": "IA3"},
    "prompt": {"peft_type": "PROMPT_TUNING", "num_virtual_tokens": 3, "task_type": "CAUSAL_LM"},
    "prefix": {"peft_type": "PREFIX_TUNING", "num_virtual_tokens": 3, "task_type": "CAUSAL_LM"},
    "houlsby": {"peft_type": "BOTTLENECK", "variant": "houlsby", "bottleneck_size": 8},
    "bitfit": {"peft_type": "BITFIT"},
}


@dataclass(frozen=True)
class Case:
    """A small model and a method, for one backend and so many ranks."""

    family: str
    method: str
    backend: str
    tp: int = 1

    def __str__(self) -> str:
        return f"{self.family}-{self.method}-{self.backend}-{self.tp}"

    def sources(self) -> dict[str, str]:
        """What is emitted to serve and to train, with the module of kernels left open."""
        program = compile_program(
            BY_NAME[self.family].config(2),
            METHODS[self.method],
            backend=self.backend,
            tp=self.tp,
            dtype="float32" if self.backend == "torch" else "bfloat16",
        )
        assert program.training is not None
        sources = {"serving": program.serving.source, "training": program.training.source}
        return {kind: without_kernel_module(source) for kind, source in sources.items()}


CASES = (
    Case("llama-biases", "lora", "torch"),
    Case("llama-biases", "dora", "triton"),
    Case("gpt2", "adalora", "torch"),
    Case("opt", "vera", "torch"),
    Case("qwen3", "ia3", "triton"),
    Case("gemma2", "lora", "triton"),
    Case("falcon-7b", "prompt", "torch"),
    Case("gpt_neox", "houlsby", "torch"),
    Case("gpt2", "bitfit", "torch"),
    Case("llama3", "prefix", "torch"),
    Case("llama3", "lora", "torch", tp=2),
    Case("llama3.1", "dora", "triton", tp=2),
)


def without_kernel_module(source: str) -> str:
    """Emitted source that does not say which module of pcg its kernels are in."""
    return re.sub(
        r"^from pcg\.\S+ import \w+ as K$", "from pcg import kernels as K", source, flags=re.M
    )


@cache
def pinned() -> dict[str, dict[str, str]]:
    """The source that each program had, by the case's name."""
    found: dict[str, dict[str, str]] = json.loads(lzma.decompress(PATH.read_bytes()))
    return found


def pin(sources: dict[str, dict[str, str]]) -> None:
    """Write the file."""
    PATH.write_bytes(lzma.compress(json.dumps(sources).encode(), preset=9))


if __name__ == "__main__":
    pin({str(case): case.sources() for case in CASES})
    print(f"{PATH}: {len(CASES)} programs, {PATH.stat().st_size} bytes")
