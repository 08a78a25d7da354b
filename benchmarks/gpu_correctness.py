"""Whether kernels, programs and engines are right on the device: before anything is timed.

The checks are those of the tests (`tests/support/on_device.py`), against transformers and peft, and
kernels in bf16 against fp64. They run once with the assembler (ptxas) that Triton takes, and once
with the newest other one where that is newer, each in processes of its own
(`pcg/kernels/triton/ptxas.py`). What is timed afterwards uses the first one that is right.
"""

from __future__ import annotations

import tempfile
from collections.abc import Callable, Iterator, Sequence
from functools import partial
from pathlib import Path
from typing import Any

from gpu_case import Bench, Case, Row, Setting

SECONDS = (90, 60)
"""Time for the checks with the first assembler, and with another."""


class Once:
    """A timer that only runs what it is given."""

    def median_us(self, run: Callable[[], object], captured: bool = False, times: int = 1) -> float:
        run()
        return 1.0


def settings(bench: Bench) -> Iterator[Setting]:
    """Kernels in bf16, then programs, then engines."""
    for name, check in (*kernel_checks(bench), *program_checks(bench)):
        yield name, partial(_checked, name, check)


def _checked(name: str, check: Callable[[], object]) -> Row:
    check()
    return Row("correctness", name, target="right", reached=1.0, met=True)


def kernel_checks(bench: Bench) -> Iterator[tuple[str, Callable[[], object]]]:
    """The cases that check what they time, in bf16, and the loss and its gradient."""
    import gpu_kernels
    import gpu_lora
    import gpu_training

    once = Bench(Once(), bench.ceilings, device=bench.device)
    for ranks in gpu_lora.CHECKED_RANKS:
        yield f"LoRA of ranks {', '.join(map(str, ranks))}", partial(_check_lora, once, ranks)
    for batch, tokens, keys in gpu_kernels.CHECKED_ATTENTION:
        name = f"attention of {batch} × {tokens} tokens on {keys} keys"
        yield name, partial(gpu_kernels.check_attention, once, batch, tokens, keys)
    yield "loss", partial(gpu_kernels.check_loss, once)
    yield "adapters' gradients", partial(gpu_training.check_backward, once)


def _check_lora(bench: Bench, ranks: Sequence[int]) -> None:
    import gpu_lora

    for batch in (1, 16):
        gpu_lora.LoraLayer(bench, "skewed", batch, ranks).check(peers=False)


def program_checks(bench: Bench) -> Iterator[tuple[str, Callable[[], object]]]:
    """Whole programs and engines."""
    from tests.support import on_device

    yield "a program in bf16", partial(check_in_bf16, bench)
    for name in ("llama3", "gemma2"):
        yield f"a program of {name}", partial(_in_folder, partial(on_device.whole_programs, name))
    yield "rows of adapters", on_device.rows_of_adapters
    yield "recorded steps", on_device.recorded_steps
    yield "an engine that replays", on_device.an_engine_replays_its_steps
    yield (
        "backward beside serving",
        partial(on_device.backward_units_run_beside_the_forward, "triton"),
    )
    yield (
        "copies of adapters beside steps",
        partial(on_device.adapters_are_copied_from_the_host_beside_steps, "triton"),
    )


def _in_folder(check: Callable[[Path], object]) -> None:
    with tempfile.TemporaryDirectory() as folder:
        check(Path(folder))


def check_in_bf16(bench: Bench) -> None:
    """Logits and gradients are as near to fp64 as transformers' and peft's in bf16.

    Raises:
        AssertionError: they are further off than 1.2 times theirs, and than bf16's precision.
    """
    import torch

    import pcg
    from pcg.runtime.data.example import Example
    from tests.support import oracle
    from tests.support.families import BY_NAME

    config = BY_NAME["llama3"].config(1)
    base = oracle.random_model(config, torch.bfloat16)
    theirs = oracle.with_adapter(base, "all-linear", rank=4)
    exact = oracle.with_adapter(oracle.random_model(config, torch.float64), "all-linear", rank=4)
    exact.load_state_dict(theirs.state_dict())
    with tempfile.TemporaryDirectory() as folder:
        oracle.save(theirs, Path(folder))
        options: dict[str, Any] = {"backend": "triton", "device": torch.device(bench.device)}
        executor = pcg.compile(base, {"a": folder}, **options)
    sequences = [[5, 6, 7, 8, 9], [3, 2]]
    for ours, sequence in zip(executor.logits(sequences, ["a", "a"]), sequences, strict=True):
        right = oracle.logits(exact, sequence)
        _check_as_near("logits", ours.cpu(), oracle.logits(theirs, sequence), right)
    runner = executor.training_runner("a")
    targets = sum(len(sequence) - 1 for sequence in sequences)
    runner.forward_backward([Example(s, s) for s in sequences], targets)
    _, of_theirs = oracle.loss_and_gradients(theirs, sequences)
    _, right_gradients = oracle.loss_and_gradients(exact, sequences)
    for path, parameter in runner.parameters.items():
        found = parameter.grad.cpu()
        _check_as_near(path, found, of_theirs[path], right_gradients[path], 2.0)


def _check_as_near(what: str, ours: Any, theirs: Any, right: Any, times: float = 1.2) -> None:
    errors = [float((x.double() - right).norm() / right.norm()) for x in (ours, theirs)]
    if not errors[0] <= max(times * errors[1], 2**-7):
        raise AssertionError(f"{what}: off by {errors[0]:.1e} of the norm, peft by {errors[1]:.1e}")


def cases() -> list[Case]:
    """The checks, with each assembler."""
    import torch

    from pcg.kernels.triton import CHOICE
    from pcg.kernels.triton.ptxas import assemblers

    major, minor = torch.cuda.get_device_capability()
    return [
        Case(f"correctness, {one.name}", seconds, settings, {CHOICE: one.path})
        for one, seconds in zip(assemblers(10 * major + minor), SECONDS, strict=False)
    ]
