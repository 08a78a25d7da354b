"""Checks of programs and engines on a device: a GPU, or the stand-in for one."""

from __future__ import annotations

import gc
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any
from unittest.mock import patch

import pytest
import torch

import pcg.compiler as compiler
from pcg.runtime.admission.limits import Limits
from pcg.runtime.data.example import Example
from pcg.runtime.engine.device.device import SideStream
from pcg.runtime.model.step_graphs import EAGER_STEPS, CudaRecorder
from pcg.runtime.sampling.sampling import UNDRAWN, Sampler, sample
from pcg.runtime.sampling.sampling_params import SamplingParams
from pcg.runtime.training import bound_training
from pcg.runtime.training.recorded.loss_graphs import UpdateGraphs
from pcg.runtime.training.recorded.warm_job import WarmJob
from pcg.runtime.training.recorded.window_graphs import WindowGraphs
from pcg.runtime.training.warm_jobs import record_jobs
from pcg.runtime.training.work_units import Reading
from tests.support import oracle
from tests.support.families import BY_NAME
from tests.support.prompts import prompts
from tests.support.recorded_steps import Step, Steps, executor_of

DEVICE = "cuda"


def whole_programs(name: str, tmp_path: Path) -> None:
    family = BY_NAME[name]
    base = oracle.random_model(family.config(2))
    wrapped = oracle.with_adapter(base, "all-linear", rank=4, excluded=family.excluded)
    oracle.save(wrapped, tmp_path / "a")
    executor = compiler.compile(
        base, {"a": str(tmp_path / "a")}, backend="triton", device=torch.device(DEVICE)
    )
    sequences, adapters = prompts((13, 7, 9)), [None, "a", "a"]
    found = executor.logits(sequences, adapters)
    for logits, sequence, adapter in zip(found, sequences, adapters, strict=True):
        expected = oracle.logits(base if adapter is None else wrapped, sequence)
        assert oracle.relative_error(logits.cpu(), expected) < 1e-5
    runner = executor.training_runner("a")
    targets = sum(len(sequence) - 1 for sequence in sequences)
    loss = runner.forward_backward([Example(s, s) for s in sequences], targets)
    expected_loss, gradients = oracle.loss_and_gradients(wrapped, sequences)
    assert loss == pytest.approx(expected_loss, rel=1e-5)
    for path, parameter in runner.parameters.items():
        error = (parameter.grad.cpu() - gradients[path]).norm() / gradients[path].norm()
        assert error < 1e-5, path


def rows_of_adapters() -> None:
    """LoRA at q and v of a joined product, and bottlenecks, in one batch; PyTorch's on the CPU."""
    base = oracle.random_model(BY_NAME["llama3"].config(2))
    of_lora = {"peft_type": "LORA", "target_modules": ["q_proj", "v_proj"]}
    of_bottleneck = {"peft_type": "BOTTLENECK", "variant": "houlsby"}
    recipes: dict[str, dict[str, Any]] = {
        "r4": {**of_lora, "r": 4},
        "r40": {**of_lora, "r": 40},
        "narrow": {**of_bottleneck, "bottleneck_size": 5},
        "wide": {**of_bottleneck, "bottleneck_size": 72, "non_linearity": "gelu"},
    }
    found = []
    for backend, device in (("torch", "cpu"), ("triton", DEVICE)):
        executor = compiler.compile(base, backend=backend, device=device)
        for seed, (name, recipe) in enumerate(recipes.items()):
            generator = torch.Generator().manual_seed(seed)
            for tensor in executor.add_adapter(name, recipe, seed=seed).tensors:
                tensor.add_(torch.randn(tensor.shape, generator=generator), alpha=0.05)
            executor.refresh_adapter(name)
        names = [None, *recipes, "r4"]
        logits = [executor.logits(prompts(n), names) for n in ((13, 1, 7, 2, 9, 5), (1,) * 6)]
        found.append([one.cpu() for batch in logits for one in batch])
    for expected, ours in zip(*found, strict=True):
        assert oracle.relative_error(ours, expected) < 1e-5


DECODED = [
    Step([5, 6, 7], [3, 600, 17], [None, "r4", "r20"]),
    Step([9, 8, 5, 1], [1100, 0, 47, 15], ["r20", "r1", None, "r20"]),
    Step([9, 8, 5], [16, 0, 31], [None, None, None]),
    Step([1] * 19, list(range(0, 95, 5)), ["r4", "r20", "r1", None] * 4 + ["r1"] * 3),
]
MIXED = [
    Step([[5, 6, 7, 8], 9, list(range(3, 20))], [3, 530, 0], [None, "r4", "r20"], [1, 2]),
    Step([list(range(3, 30))], [16], ["r1"]),
]
"""With chunks of prompts."""


def recorded_steps() -> None:
    """Each twice: as it is recorded, and replayed for what came between."""
    executor = executor_of(2, DEVICE)
    steps = Steps(executor, CudaRecorder(executor.device), pages=200)
    for step in (*DECODED, *MIXED) * 2:
        expected, found = steps.both(step)
        assert found is not None
        torch.testing.assert_close(found, expected, rtol=1e-4, atol=1e-4)
    assert (steps.graphs.recorded, steps.graphs.replayed) == (len(DECODED) + len(MIXED), 12)


def a_step_waits_for_nothing() -> None:
    """Recorded or not, until the tokens are read; by any way of choosing them."""
    executor = executor_of(2, DEVICE)
    steps = Steps(executor, CudaRecorder(executor.device), pages=200)
    for step in (MIXED[0], DECODED[0]):
        steps.both(step)  # compiles, records
    mixed, ordered = steps.in_order(MIXED[0]), steps.in_order(DECODED[0])
    params = [
        SamplingParams(temperature=0.7, top_k=20, min_p=0.01),
        SamplingParams(repetition_penalty=1.2),
        SamplingParams(temperature=1.3, top_p=0.9),
    ]
    samplers = [Sampler(each, (1, 2, 3)) for each in params]
    torch.cuda.synchronize()
    torch.cuda.set_sync_debug_mode("error")
    try:
        assert steps.graphs.run(*mixed) is not None
        recorded = steps.graphs.run(*ordered)
        logits = steps.eager(ordered)
        chosen = sample(logits, samplers, steps.runner.drawing)
    finally:
        torch.cuda.set_sync_debug_mode("default")
    assert recorded is not None
    assert torch.equal(recorded.tokens, recorded.logits.argmax(-1))
    assert UNDRAWN not in chosen.tolist()


def an_engine_replays_its_steps() -> None:
    executor = executor_of(2, DEVICE)
    names = [None, "r4", "r20", "ia3"]

    def served(records: bool, count: int) -> list[list[int]]:
        engine = executor.engine(kv_cache_bytes=2**22)
        graphs = engine.device.graphs
        assert graphs is not None
        if not records:
            graphs.recorder = None
        tokens: list[list[int]] = [[] for _ in range(count)]
        for ids, name in zip(prompts((5, 14, 3, 9))[:count], names, strict=False):
            engine.submit(executor.request(ids, name, max_new_tokens=20, ignore_eos=True))
        while not engine.is_idle:
            for chunk in engine.step():
                assert chunk.token_id is not None
                tokens[chunk.index].append(chunk.token_id)
        if records and count == 3:
            assert graphs.recorded == 1
            assert graphs.replayed == 19 - EAGER_STEPS  # of 20 one has prompts
        else:
            assert graphs.recorded == graphs.replayed == 0
        return tokens

    # With the fourth, whose adapter is not of LoRA, no graph serves.
    for count in (3, 4):
        assert served(True, count) == served(False, count)


def backward_units_run_beside_the_forward(backend: str) -> None:
    """On a stream of their own; the adapter is that of a run alone."""
    base = oracle.random_model(BY_NAME["llama3"].config(1, max_position_embeddings=128))
    recipe = {"peft_type": "LORA", "r": 4, "target_modules": ["q_proj", "down_proj"]}
    data = [Example(s, s) for s in prompts((13, 7))]
    options = {"max_steps": 2, "batch_size": 2, "learning_rate": 0.01}
    found = []
    for served in (0, 2):
        executor = compiler.compile(base, backend=backend, device=DEVICE)
        engine = executor.engine(Limits(tokens=20, tpot_slo_s=0.5), kv_cache_bytes=2**20)
        side = engine.device.side
        assert side is not None
        beside: list[float] = []
        join = side.join

        def joined(join: Callable[[], list[float]] = join, seen: list[float] = beside) -> Any:
            seconds = join()
            seen += seconds
            return seconds

        side.join = joined
        job = engine.finetune(data, "trained", peft=recipe, **options)
        for prompt in prompts((9, 4))[:served]:
            engine.submit(executor.request(prompt, None, max_new_tokens=6, ignore_eos=True))
        while not engine.is_idle:
            engine.step()
            engine.check_integrity()
        if job.error is not None:
            raise job.error
        assert beside
        assert all(seconds > 0 for seconds in beside)
        found.append([tensor.cpu() for tensor in executor.adapters["trained"].tensors])
    for one, other in zip(*found, strict=True):
        torch.testing.assert_close(one, other, rtol=1e-3, atol=1e-5)


def windows_are_recorded() -> None:
    """The adapter is that of an eager run; the host waits once a step, to read its numbers.

    So it does while it records, too.
    """
    base = oracle.random_model(BY_NAME["llama3"].config(1, max_position_embeddings=128))
    recipe = {"peft_type": "LORA", "r": 4, "target_modules": ["q_proj", "down_proj"]}
    data = [Example(s, s) for s in prompts((19, 9))]
    found = []
    for is_recorded in (False, True):
        executor = compiler.compile(base, backend="triton", device=DEVICE)
        engine = executor.engine(Limits(tokens=20), kv_cache_bytes=2**20)
        job = engine.finetune(
            data, "trained", peft=recipe, max_steps=5, batch_size=2, learning_rate=0.01
        )
        replayed: list[int] = []
        step = UpdateGraphs.step

        def ended(*of: Any, step: Any = step, replayed: Any = replayed) -> None:
            step(*of)
            replayed.append(1)

        def numbers(*of: Any, read: Any = Reading.read) -> Any:
            with waiting():
                return read(*of)

        def joined(*of: Any, join: Any = SideStream.join) -> Any:
            with waiting():  # for the time that parts took
                return join(*of)

        recorder_for = CudaRecorder if is_recorded else _no_recorder
        with (
            patch.object(SideStream, "join", joined),
            patch.object(bound_training, "recorder_for", recorder_for),
            patch.object(UpdateGraphs, "step", ended),
            patch.object(Reading, "read", numbers),
        ):
            engine.step()  # begins the job
            torch.cuda.synchronize()
            torch.cuda.set_sync_debug_mode("error")
            try:
                while job.error is None and (job.record is None or job.record.step < 4):
                    engine.step()
            finally:
                torch.cuda.set_sync_debug_mode("default")
            while not engine.is_idle:
                engine.step()
        if job.error is not None:
            raise job.error
        assert len(replayed) == (5 if is_recorded else 0)
        gc.collect()
        # With the last job goes what its windows keep.
        assert not any(type(one) is WindowGraphs for one in gc.get_objects())
        found.append([tensor.cpu() for tensor in executor.adapters["trained"].tensors])
    for one, other in zip(*found, strict=True):
        torch.testing.assert_close(one, other, rtol=1e-3, atol=1e-5)


def jobs_find_windows_that_are_recorded() -> None:
    """A job of the recipe that the program or an engine was told of, and the next one like it."""
    base = oracle.random_model(BY_NAME["llama3"].config(1, max_position_embeddings=128))
    recipe = {"peft_type": "LORA", "r": 4, "target_modules": ["q_proj", "down_proj"]}
    of_program: dict[str, Any] = {"peft": {"mine": recipe}, "batch": 2, "seq": 19}
    found, made, record = [], list[int](), CudaRecorder.record

    def recorded(*of: Any) -> Any:
        made.append(1)
        return record(*of)

    for is_warm in (False, True):
        executor = compiler.compile(base, backend="triton", device=DEVICE, **of_program)
        engine = executor.engine(Limits(tokens=20), kv_cache_bytes=2**20)
        with (
            patch.object(CudaRecorder, "record", recorded),
            patch.object(bound_training, "recorder_for", CudaRecorder if is_warm else _no_recorder),
        ):
            if is_warm:
                # The engine is told of smaller steps of the recipe that the program names.
                jobs = [WarmJob(recipe, 1, 7)]
                cache = engine.device.cache
                count = record_jobs(executor.state, cache, 20, engine.runners, jobs)
                # Three windows of 16 tokens; a loss of 16, with gradients and without.
                assert count == len(made) == 3 * 3 + 2
            for number, name in enumerate(("first", "second")):
                made.clear()
                data = [Example(s, s) for s in prompts((19 - number, 9))]
                options = {"max_steps": 2, "batch_size": 2, "learning_rate": 0.01, "seed": number}
                job = engine.finetune(data, name, peft=recipe, **options)
                while not engine.is_idle:
                    engine.step()
                if job.error is not None:
                    raise job.error
                assert len(made) == (2 if is_warm else 0)  # the update is of each job's own
        adapters = [executor.adapters[name] for name in ("first", "second")]
        found.append([tensor.cpu() for adapter in adapters for tensor in adapter.tensors])
    for one, other in zip(*found, strict=True):
        torch.testing.assert_close(one, other, rtol=1e-3, atol=1e-5)


def a_copy_to_the_host_waits_once() -> None:
    """However many tensors an adapter has that is published."""
    base = oracle.random_model(BY_NAME["llama3"].config(1))
    state = compiler.compile(base, backend="triton", device=DEVICE).state
    recipe = {"peft_type": "LORA", "r": 4, "target_modules": ["q_proj", "down_proj"]}
    adapter = state.for_training(state.make_adapter("a", recipe))
    waits: list[int] = []

    def synchronize(*of: Any, wait: Any = torch.cuda.Event.synchronize) -> None:
        waits.append(1)
        with waiting():
            wait(*of)

    torch.cuda.set_sync_debug_mode("error")
    try:
        with patch.object(torch.cuda.Event, "synchronize", synchronize):
            found = state.on_host(adapter)
    finally:
        torch.cuda.set_sync_debug_mode("default")
    assert waits == [1]
    for ours, theirs in zip(found.tensors, adapter.tensors, strict=True):
        assert ours.device.type == "cpu"
        assert torch.equal(ours, theirs.cpu())


def _no_recorder(device: torch.device) -> None:
    """The recorder of a device that records nothing."""


@contextmanager
def waiting() -> Iterator[None]:
    """Let the host wait for the device."""
    mode = torch.cuda.get_sync_debug_mode()
    torch.cuda.set_sync_debug_mode("default")
    try:
        yield
    finally:
        torch.cuda.set_sync_debug_mode(mode)


def adapters_are_copied_from_the_host_beside_steps(backend: str) -> None:
    base = oracle.random_model(BY_NAME["llama3"].config(2, max_position_embeddings=128))
    tokens = []
    for device in ("cpu", DEVICE):
        used = "torch" if device == "cpu" else backend
        executor = compiler.compile(base, backend=used, device=device)
        for number in range(12):
            fields = {"r": 4 + number, "target_modules": "all-linear"}
            adapter = executor.add_adapter(
                f"a{number}", {"peft_type": "LORA", **fields}, seed=number
            )
            for weights in adapter.weights.values():
                assert weights.a.device.type == "cpu"
                weights.b.normal_(0, 0.1, generator=torch.Generator().manual_seed(number))
        engine = executor.engine(Limits(running=3), kv_cache_bytes=2**24)
        done = {}
        for number, prompt in enumerate(prompts((9, 4, 17, 5, 8, 3, 5, 6, 7, 2, 3, 4))):
            engine.submit(
                executor.request(prompt, f"a{number}", max_new_tokens=6 + number, ignore_eos=True)
            )
        while not engine.is_idle:
            for chunk in engine.step():
                if chunk.completion is not None:
                    done[chunk.index] = chunk.completion.token_ids
        tokens.append(done)
    assert tokens[0] == tokens[1]
