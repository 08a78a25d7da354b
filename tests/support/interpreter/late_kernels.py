"""What an engine compiles and records after its warm-up, by Triton's own specialisation.

    found = late_kernels()

runs a mixed load in another process, which is this file and has no interpreter. Tensors there are
the stand-in's (`stand_in.py`). A launch is specialised by what it is given, as on a GPU; what is
new is counted as compiled, and neither compiled nor run, so that all tokens are 0.
"""

from __future__ import annotations

import json
import os
import subprocess
import sys
from types import SimpleNamespace
from typing import Any
from unittest.mock import patch

from tests.support.interpreter.launched import GpuDriver, zeros_for_kernels


def late_kernels() -> dict[str, Any]:
    """The kernels compiled for a warm-up, and those and the steps that came later, by kind.

    RuntimeError: the process fails; the message says why.
    """
    environment = os.environ | {"TRITON_INTERPRET": "0"}
    command = [sys.executable, "-m", "tests.support.interpreter.late_kernels"]
    ran = subprocess.run(command, capture_output=True, text=True, env=environment)
    if ran.returncode:
        raise RuntimeError(ran.stderr)
    found: dict[str, Any] = json.loads(ran.stdout.splitlines()[-1])
    return found


def _load(executor: Any) -> dict[str, Any]:
    """Serve requests of several lengths, adapters and ways to choose, which come and go."""
    from pcg.kernels.triton.backend import compiled
    from pcg.runtime.admission.limits import Limits
    from tests.support.prompts import prompts

    compiled()
    engine = executor.engine(Limits(running=6, tokens=48), kv_cache_bytes=2**22, warm_up=True)
    warm = dict(compiled())
    ways: list[dict[str, Any]] = [
        {"temperature": 0.0},
        {"temperature": 0.8, "seed": 1},
        {"temperature": 1.0, "top_p": 0.9, "top_k": 40, "seed": 2},
        {"temperature": 0.0, "repetition_penalty": 1.2},
        {"temperature": 0.0, "logprobs": 2},
    ]
    names = [None, "r4", "r20", "r1"]
    for number, ids in enumerate(prompts((5, 1, 16, 33, 3, 9, 40, 17, 2, 8, 31, 57))):
        own = ways[number % len(ways)]
        new = 3 + number % 5
        engine.submit(
            executor.request(ids, names[number % 4], max_new_tokens=new, ignore_eos=True, **own)
        )
        engine.step()
    while not engine.is_idle:
        engine.step()
    late = {name: count - warm.get(name, 0) for name, count in compiled().items()}
    return {
        "warm": sum(warm.values()),
        "late": engine.device.late,
        "kernels": {name: count for name, count in late.items() if count},
        "replayed": engine.device.graphs.replayed,
        "eager": engine.device.graphs.eager,
    }


def _main() -> None:
    from triton.runtime import driver
    from triton.runtime.jit import JITFunction

    from tests.support.interpreter.stand_in import Graph, tensors_on_cuda
    from tests.support.interpreter.streams import ORDER
    from tests.support.recorded_steps import executor_of

    driver.set_active(GpuDriver(90))
    ORDER.is_watched = False
    Graph.replay = lambda self: None  # type: ignore[method-assign]
    run, compile_ = JITFunction.run, JITFunction._do_compile

    def specialised(self: Any, *args: Any, grid: Any, warmup: bool, **kwargs: Any) -> Any:
        return run(self, *args, grid=grid, warmup=True, **kwargs)

    def noted(self: Any, *args: Any, **kwargs: Any) -> Any:
        self.compile = lambda *_, **__: SimpleNamespace()
        return compile_(self, *args, **kwargs)

    with (
        patch.object(JITFunction, "run", specialised),
        patch.object(JITFunction, "_do_compile", noted),
        tensors_on_cuda(),
        zeros_for_kernels(),
    ):
        print(json.dumps(_load(executor_of(1, "cuda"))))


if __name__ == "__main__":
    _main()
