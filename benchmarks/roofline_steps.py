"""The steps whose launches the roofline counts, run on a GPU that is not there.

    python benchmarks/roofline_steps.py CONFIG STEP ADAPTERS LAYERS ARCHITECTURE

The engine and the training runner run them as they would on a device: tensors are the tests'
stand-in's (`tests/support/interpreter/stand_in.py`), each launch is specialised and compiled by
Triton itself, and then not run. Weights are zeros. `roofline.py` runs each step in a process.
"""

from __future__ import annotations

import json
import sys
from collections.abc import Callable, Mapping, Sequence
from dataclasses import asdict, dataclass, replace
from pathlib import Path
from types import SimpleNamespace
from typing import Any
from unittest.mock import patch

from gpu_work import Work
from roofline_counts import REPLAY, Launch, counted

ROOT = Path(__file__).parent.parent


@dataclass(frozen=True)
class Sizes:
    """The sizes of the steps.

    Attributes:
        batch: sequences that decode; `keys` each one sees, and the rank of `adapters`.
        prompts: prompts of a prefill, and `prompt_tokens` of each.
        trained: sequences of a finetuning step, and `trained_tokens` of each.
        window: tokens of a recorded window.
        recipe: the LoRA's.
        cache_bytes: room for keys, values and adapters.
    """

    batch: int = 32
    keys: int = 560
    adapters: int = 32
    rank: int = 16
    prompts: int = 8
    prompt_tokens: int = 1024
    trained: int = 4
    trained_tokens: int = 1024
    window: int = 512
    cache_bytes: int = 2**31

    @property
    def recipe(self) -> dict[str, Any]:
        return {
            "peft_type": "LORA",
            "r": self.rank,
            "lora_alpha": 2 * self.rank,
            "target_modules": "all-linear",
        }


class Zeros:
    """A source of weights that are all zero."""

    def load(
        self,
        name: str,
        shape: Any,
        dtype: Any,
        transposed: bool = False,
        device: Any = "cpu",
        ranges: Any = None,
        out: Any = None,
    ) -> Any:
        import torch

        if out is not None:
            return out.zero_()

        if ranges is not None:
            shape = [stop - start for start, stop in ranges]
        return torch.zeros(*shape, dtype=dtype, device=device)

    def shared(self, *_: Any) -> None:
        """None: no weight lies in memory already."""

    def remote(self, *_: Any) -> None:
        """None: no other process multiplies by a weight."""

    def release(self) -> None:
        """Do nothing: no file is open."""


class _Recorder:
    """Counts what a decode step records, as it is recorded."""

    def __init__(self, count: Callable[[Callable[[], None]], list[Launch]]) -> None:
        self._count = count
        self.launches: list[Launch] | None = None

    def record(self, run: Callable[[], None]) -> Callable[[], None]:
        from tests.support.interpreter.streams import ORDER

        run()
        with ORDER.capture():
            self.launches = self._count(run)
        return lambda: None


def executor_of(config: Mapping[str, Any], sizes: Sizes, peft: Any, **options: Any) -> Any:
    """An executor of a model of zeros by the triton backend."""
    from pcg.compiler import compile_program, make_executor

    program = compile_program(
        {**config, "torch_dtype": "bfloat16"}, peft, dtype="bfloat16", backend="triton", **options
    )
    return make_executor(program, Zeros(), peft, None, "cuda")


def _names(executor: Any, sizes: Sizes, count: int) -> list[str | None]:
    for number in range(count):
        executor.add_adapter(f"adapter-{number}", sizes.recipe, seed=number)
    return [f"adapter-{number}" for number in range(count)] or [None]


def _engine(executor: Any, sizes: Sizes, tokens: int) -> Any:
    from pcg.runtime.admission.limits import Limits
    from pcg.simulate.flexllm import InferenceOnly

    return executor.engine(
        Limits(tokens=tokens),
        kv_cache_bytes=sizes.cache_bytes,
        sharing=InferenceOnly(),
        prefix_caching=False,
    )


def _step(engine: Any) -> None:
    for chunk in engine.step():
        if chunk.error is not None:
            raise RuntimeError("a request of the step failed") from chunk.error


Count = Callable[[Callable[[], object]], list[Launch]]


def decode(config: Mapping[str, Any], sizes: Sizes, adapters: int, count: Count) -> list[Launch]:
    """A recorded decode step, each sequence with an adapter of its own where there are any."""
    from pcg.runtime.model.step_graphs import EAGER_STEPS

    executor = executor_of(config, sizes, "lora")
    names = _names(executor, sizes, adapters)
    engine = _engine(executor, sizes, sizes.batch * sizes.keys)
    recorder = engine.device.graphs.recorder = _Recorder(count)
    # The first token comes of the prompt; each step after it sees a key more.
    prompt = [1] * (sizes.keys - EAGER_STEPS - 1)
    for number in range(sizes.batch):
        name = names[number % len(names)]
        request = executor.request(prompt, name, max_new_tokens=64, ignore_eos=True)
        engine.submit(request)
    for _ in range(EAGER_STEPS + 2):
        _step(engine)
    if recorder.launches is None:
        raise RuntimeError(f"no decode step was recorded in {EAGER_STEPS + 2} steps")
    return recorder.launches


def prefill(config: Mapping[str, Any], sizes: Sizes, adapters: int, count: Count) -> list[Launch]:
    """A step of whole prompts, each with an adapter of its own where there are any."""
    executor = executor_of(config, sizes, "lora")
    names = _names(executor, sizes, adapters)
    engine = _engine(executor, sizes, sizes.prompts * sizes.prompt_tokens)
    for name in names:  # adapters come into memory
        engine.submit(executor.request([1], name, max_new_tokens=1))
    while not engine.is_idle:
        _step(engine)
    for number in range(sizes.prompts):
        name = names[number % len(names)]
        prompt = [1] * sizes.prompt_tokens
        engine.submit(executor.request(prompt, name, max_new_tokens=2, ignore_eos=True))
    return count(lambda: _step(engine))


def finetune(config: Mapping[str, Any], sizes: Sizes, adapters: int, count: Count) -> list[Launch]:
    """Forward and backward of a batch of LoRA on all linears."""
    from pcg.runtime.data.example import Example

    batch, tokens = sizes.trained, sizes.trained_tokens
    executor = executor_of(config, sizes, {"mine": sizes.recipe}, batch=batch, seq=tokens)
    runner = executor.training_runner("mine")
    examples = [Example([1] * tokens, [1] * tokens) for _ in range(batch)]

    def step() -> object:
        return runner.forward_backward(examples, batch * (tokens - 1))

    step()  # tables of adapters are copied to the device once
    for tensor in runner.parameters.values():
        tensor.grad = None
    return count(step)


def window(config: Mapping[str, Any], sizes: Sizes, adapters: int, count: Count) -> list[Launch]:
    """A step of a job whose batch is one window, once all of it is recorded.

    Returns the launches of the host, of which some replay graphs, and behind them those of graphs.
    """
    import torch

    from pcg.kernels.sizes import PAGE_TOKENS
    from pcg.runtime.data.example import Example
    from pcg.runtime.memory.kv_cache import KvCache, kv_types
    from pcg.runtime.training import bound_training, step
    from pcg.runtime.training.finetuning import finetune_run
    from pcg.runtime.training.options import JobArguments
    from pcg.runtime.training.publishers import VersionPublisher
    from tests.support.interpreter.streams import ORDER

    tokens = sizes.window
    executor = executor_of(config, sizes, {"mine": sizes.recipe}, batch=1, seq=tokens)
    types = kv_types(executor.serving.runner.model)
    cache = KvCache(types, 2 * tokens // PAGE_TOKENS, executor.device, in_pages=True)
    replayed: list[Launch] = []

    class Graphs:
        def record(self, run: Callable[[], None]) -> Callable[[], None]:
            run()
            with ORDER.capture():
                launches = [replace(one, recorded=True) for one in count(run)]

            def replay() -> None:
                replayed.extend([Launch(REPLAY, Work(0)), *launches])

            return replay

        def apart(self) -> Graphs:
            return self

    def numbers(ranks: Any, values: Any) -> Any:
        count(values.cpu)
        return torch.zeros(len(values))  # nothing is computed

    data = [Example([1] * tokens, [1] * tokens)] * 5
    arguments = JobArguments(data, "mine", peft=sizes.recipe, batch_size=1, learning_rate=1e-4)
    with (
        patch.object(bound_training, "recorder_for", lambda device: Graphs()),
        patch.object(step, "broadcast_from_first", numbers),
    ):
        done: list[Any] = []
        units = finetune_run(VersionPublisher(executor.state), arguments, done.append).work()
        run = _Units(units, cache, tokens).to_step
        for ready in range(1, len(data) - 1):
            run(done, ready)
        replayed.clear()
        launches = count(lambda: run(done, len(data) - 1))  # the last one publishes, too
    return [*launches, *replayed]


class _Units:
    """Runs the units of a job, window by window, layer by layer, with nothing beside them."""

    def __init__(self, units: Any, cache: Any, tokens: int) -> None:
        self._units, self._cache, self._tokens = units, cache, tokens
        self._tables: Sequence[Any] = ()

    def to_step(self, done: Sequence[Any], steps: int) -> None:
        """Run on until so many steps are done."""
        from pcg.runtime.memory.pool import pages_for
        from pcg.runtime.training.work_units import Forward, Pages, Part, Release

        pool = self._cache.pool
        for unit in self._units:
            if isinstance(unit, Pages):
                self._tables = unit.tables = tuple(pool.open("job") for _ in unit.tokens)
                unit.cache = self._cache
                for table, count in zip(unit.tables, unit.tokens, strict=True):
                    pool.extend(table, pages_for(count))
            elif isinstance(unit, Forward):
                unit.whole.begin_window(unit.whole.fitting(self._tokens))
            elif isinstance(unit, Part):
                unit.run()
                if unit.whole.has_unrecorded:
                    unit.whole.record_next()
            elif isinstance(unit, Release):
                for table in self._tables:
                    pool.close(table)
            if len(done) == steps:
                return


STEPS: Mapping[str, Callable[[Mapping[str, Any], Sizes, int, Count], list[Launch]]] = {
    "decode": decode,
    "prefill": prefill,
    "finetune": finetune,
    "window": window,
}


# -------------------------------------------------------------------------------------- processes


class _Driver:
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


def _main(config: str, step: str, adapters: str, layers: str, architecture: str) -> None:
    sys.path.insert(0, str(ROOT))
    import torch
    from triton.runtime import driver

    from tests.support.interpreter.device_tensors import DeviceTensor
    from tests.support.interpreter.stand_in import tensors_on_cuda
    from tests.support.interpreter.streams import ORDER

    fields = {**json.loads(Path(config).read_text()), "num_hidden_layers": int(layers)}
    driver.set_active(_Driver(int(architecture)))
    ORDER.is_watched = False
    major, minor = divmod(int(architecture), 10)
    properties = SimpleNamespace(
        name="stand-in", total_memory=2**37, multi_processor_count=132, major=major, minor=minor
    )

    def count(run: Callable[[], object]) -> list[Launch]:
        before = len(notes)
        run()
        return notes[before:]

    with (
        tensors_on_cuda(),
        patch.object(torch.cuda, "get_device_capability", lambda device=None: (major, minor)),
        patch.object(torch.cuda, "get_device_properties", lambda device=None: properties),
        counted(DeviceTensor, False, lambda: ORDER.is_on_branch) as notes,
    ):
        found = STEPS[step](fields, Sizes(), int(adapters), count)
    print(json.dumps([asdict(launch) for launch in found]))


if __name__ == "__main__":
    _main(*sys.argv[1:])
