"""pcg: compile, serve and finetune many adapters over one frozen language model.

    import pcg
    executor = pcg.compile("model directory", peft="lora")
    executor.generate("def main(", max_new_tokens=32)

Names are imported on first use (PEP 562), so that `import pcg` takes milliseconds instead of
torch's seconds. Errors other than their root are in `pcg.errors`.
"""

import sys
from importlib import import_module
from types import ModuleType
from typing import TYPE_CHECKING, Any

from pcg.errors import PcgError
from pcg.peft import METHODS
from pcg.version import __version__

if TYPE_CHECKING:
    from pcg.compiler import compile, load, trace
    from pcg.explain.explain import explain
    from pcg.gguf_adapter import export
    from pcg.merged_checkpoint import merge
    from pcg.peft.adalora import AdaLoraConfig
    from pcg.peft.bitfit import BitFitConfig
    from pcg.peft.bottleneck import BottleneckConfig
    from pcg.peft.ia3 import IA3Config
    from pcg.peft.loha import LoHaConfig
    from pcg.peft.lora import LoraConfig
    from pcg.peft.prefix import PrefixTuningConfig
    from pcg.peft.prompt import PromptEncoderConfig, PromptTuningConfig
    from pcg.peft.vera import VeraConfig
    from pcg.plan.plan import plan
    from pcg.quantized_checkpoint import quantize
    from pcg.runtime.admission.backlog import QueueLimits
    from pcg.runtime.admission.limits import Limits
    from pcg.runtime.engine.async_engine import AsyncEngine
    from pcg.runtime.engine.engine import Engine
    from pcg.runtime.executor import Executor
    from pcg.runtime.sampling.sampling_params import SamplingParams
    from pcg.runtime.training.callbacks import TrainingCallback
    from pcg.runtime.training.trainer.datum import Datum
    from pcg.split.client.connect import connect
    from pcg.split.client.noise import Privacy

__all__ = [
    "AdaLoraConfig",
    "AsyncEngine",
    "BitFitConfig",
    "BottleneckConfig",
    "Datum",
    "Engine",
    "Executor",
    "IA3Config",
    "Limits",
    "LoHaConfig",
    "LoraConfig",
    "PcgError",
    "PrefixTuningConfig",
    "Privacy",
    "PromptEncoderConfig",
    "PromptTuningConfig",
    "QueueLimits",
    "SamplingParams",
    "TrainingCallback",
    "VeraConfig",
    "__version__",
    "compile",
    "connect",
    "explain",
    "export",
    "load",
    "merge",
    "plan",
    "quantize",
    "trace",
]

_HOMES = {
    "AsyncEngine": "pcg.runtime.engine.async_engine",
    "Datum": "pcg.runtime.training.trainer.datum",
    "Engine": "pcg.runtime.engine.engine",
    "Executor": "pcg.runtime.executor",
    "Limits": "pcg.runtime.admission.limits",
    "Privacy": "pcg.split.client.noise",
    "QueueLimits": "pcg.runtime.admission.backlog",
    "SamplingParams": "pcg.runtime.sampling.sampling_params",
    "TrainingCallback": "pcg.runtime.training.callbacks",
    "compile": "pcg.compiler",
    "connect": "pcg.split.client.connect",
    "export": "pcg.gguf_adapter",
    "load": "pcg.compiler",
    "merge": "pcg.merged_checkpoint",
    "quantize": "pcg.quantized_checkpoint",
    **{name: f"pcg.peft.{file}" for name, file in METHODS.items()},
}


def __getattr__(name: str) -> Any:
    if name not in _HOMES:
        raise AttributeError(f"module 'pcg' has no attribute {name!r}")
    value = getattr(import_module(_HOMES[name]), name)
    globals()[name] = value
    return value


def __dir__() -> list[str]:
    return sorted({*globals(), *__all__})


def _over_package(home: str, name: str) -> property:
    """Return a property for a function that shares its name with one of pcg's packages.

    The import system's assignments of the package have no effect on it. `from pcg.trace import …`
    uses the package's full name and still works.
    """
    return property(lambda _: getattr(import_module(home), name), lambda *_: None)


class _Pcg(ModuleType):
    trace = _over_package("pcg.compiler", "trace")
    explain = _over_package("pcg.explain.explain", "explain")
    plan = _over_package("pcg.plan.plan", "plan")


sys.modules[__name__].__class__ = _Pcg
