"""pcg: compile, serve and finetune many adapters over one frozen language model.

    import pcg
    executor = pcg.compile("model directory", peft="lora")
    executor.generate("def main(", max_new_tokens=32)

Names are found when they are first used (PEP 562), so that `import pcg` takes milliseconds and not
the seconds that torch takes.
"""

import sys
from importlib import import_module
from types import ModuleType
from typing import TYPE_CHECKING, Any

from pcg.errors import (
    AdapterError,
    BenchmarkError,
    CodegenError,
    ConfigError,
    CostModelError,
    DataError,
    EngineError,
    FinetuneError,
    FinetuneInterrupted,
    GenerationError,
    IrError,
    MemoryBudgetError,
    MissingShardError,
    ModelNotFoundError,
    OutOfMemoryError,
    ParallelError,
    ParseError,
    PassError,
    PcgError,
    PickleWeightsError,
    ProgramError,
    RankLostError,
    SourceError,
    TraceError,
    TypeCheckError,
    UnsupportedError,
    VerifyError,
    WeightsError,
)

if TYPE_CHECKING:
    from pcg.compiler import compile, load, trace
    from pcg.explain.explain import explain
    from pcg.peft.lora import LoraConfig
    from pcg.runtime.executor import Executor
    from pcg.runtime.model.sampling_params import SamplingParams

__version__ = "0.1.0"

__all__ = [
    "AdapterError",
    "BenchmarkError",
    "CodegenError",
    "ConfigError",
    "CostModelError",
    "DataError",
    "EngineError",
    "Executor",
    "FinetuneError",
    "FinetuneInterrupted",
    "GenerationError",
    "IrError",
    "LoraConfig",
    "MemoryBudgetError",
    "MissingShardError",
    "ModelNotFoundError",
    "OutOfMemoryError",
    "ParallelError",
    "ParseError",
    "PassError",
    "PcgError",
    "PickleWeightsError",
    "ProgramError",
    "RankLostError",
    "SamplingParams",
    "SourceError",
    "TraceError",
    "TypeCheckError",
    "UnsupportedError",
    "VerifyError",
    "WeightsError",
    "__version__",
    "compile",
    "explain",
    "load",
    "trace",
]

_HOMES = {
    "Executor": "pcg.runtime.executor",
    "LoraConfig": "pcg.peft.lora",
    "SamplingParams": "pcg.runtime.model.sampling_params",
    "compile": "pcg.compiler",
    "explain": "pcg.explain.explain",
    "load": "pcg.compiler",
}


def __getattr__(name: str) -> Any:
    if name not in _HOMES:
        raise AttributeError(f"module 'pcg' has no attribute {name!r}")
    value = getattr(import_module(_HOMES[name]), name)
    globals()[name] = value
    return value


def __dir__() -> list[str]:
    return sorted({*globals(), *__all__})


class _Package(ModuleType):
    """Keeps `pcg.trace` the function; the import system would make it the package of that name.

    `from pcg.trace import …` goes by the package's full name and is not touched.
    """

    @property
    def trace(self) -> Any:
        return import_module("pcg.compiler").trace

    @trace.setter
    def trace(self, package: ModuleType) -> None:
        """Ignore what the import system sets."""


sys.modules[__name__].__class__ = _Package
