"""Whatever the mesh of ranks, an executor gives what it gives on one rank.

One rank's numbers are those of transformers and peft (`tests/families`, `tests/peft`).
"""

from __future__ import annotations

import functools
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import Any

import pytest

from pcg.errors import FinetuneInterrupted
from pcg.ir.program.layer_order import ROOMS
from pcg.ir.program.program import Program
from pcg.peft.lora import LoraConfig
from pcg.ranks.mesh import MeshSizes, RankMesh
from pcg.runtime.executor import Executor
from pcg.runtime.training.options import StepRecord
from tests.support.interpreter import bf16
from tests.support.meshes import check_close, train
from tests.support.ranked import (
    METHODS,
    Outcome,
    make_executor,
    make_program,
    method_work,
    work,
    worst_error,
)
from tests.support.threads import run_mesh

bf16.install()
SHARDED = "sharded"
"""Of a mesh: each replica holds a part of the base."""
FAMILIES = ("llama3", "qwen2", "opt", "gpt2", "falcon-7b", "gemma2")
PARTS = {"sequence_parallel": True}
DROPPED = LoraConfig(r=4, lora_dropout=0.5, target_modules="all-linear")
LAST = LoraConfig(
    r=4, lora_dropout=0.5, target_modules=["q_proj", "down_proj"], layers_to_transform=[3]
)


def mesh(text: str) -> MeshSizes:
    """`pp2 tp2` as sizes."""
    return MeshSizes(**{axis[:2]: int(axis[2:]) for axis in text.split()})


@functools.cache
def program(name: str, tp: int, layers: int, options: tuple[tuple[str, Any], ...]) -> Program:
    return make_program(name, tp, layers, **dict(options))


class Setting:
    """A family over a mesh, and on one rank.

    Args:
        name: of the family.
        axes: of the mesh; with SHARDED replicas hold parts of the base.
        options: of the program over the mesh.
    """

    def __init__(self, name: str, axes: str, options: Mapping[str, Any] | None = None) -> None:
        self.name, self.is_sharded = name, SHARDED in axes
        self.sizes = mesh(axes.replace(SHARDED, "").strip())
        # More layers than stages, or than are gathered at a time.
        self.layers = ROOMS + 2 if self.is_sharded else 4 if self.sizes.pp > 1 else 2
        self.alike = {"packed_weights": False} if self.is_sharded else {}
        self.options = {**self.alike, **(options or {})}

    def alone(self, **more: Any) -> Executor:
        options = tuple({**self.alike, **more}.items())
        return make_executor(program(self.name, 1, self.layers, options), self.name)

    def on_ranks(self, run: Callable[[Executor], Any], **more: Any) -> list[Any]:
        options = tuple({**self.options, **more}.items())
        compiled = program(self.name, self.sizes.tp, self.layers, options)

        def on_rank(ranks: RankMesh) -> Any:
            return run(make_executor(compiled, self.name, ranks, self.is_sharded))

        return run_mesh(self.sizes, on_rank)


def cases(*listed: tuple[str, str, Any], slow: Sequence[tuple[str, str, Any]] = ()) -> Any:
    def named(case: tuple[str, str, Any]) -> str:
        return " ".join(str(part) for part in case if part != {})

    return [
        *(pytest.param(*case, id=named(case)) for case in listed),
        *(
            pytest.param(*case, id=named(case), marks=pytest.mark.slow)
            for case in slow
            if case not in listed
        ),
    ]


# ------------------------------------------------------------------------------------------ jobs


@functools.cache
def work_alone(name: str, layers: int, is_sharded: bool) -> Outcome:
    options = (("packed_weights", False),) if is_sharded else ()
    return work(make_executor(program(name, 1, layers, options), name))


@pytest.mark.parametrize(
    ("name", "axes", "options"),
    cases(
        ("llama3", "tp2", {}),
        ("mixtral", "tp2", {}),
        ("mixtral", "tp2", {"ep": 2}),
        ("mixtral", "tp4", {**PARTS, "ep": 4}),
        ("mixtral", "tp4", {"ep": 2}),
        ("gpt_oss", "tp2", {}),
        ("qwen2", "tp4", {}),  # two KV heads, with biases: each pair of ranks shares one
        ("gpt2", "tp4", PARTS),
        ("llama3", "tp2", {**PARTS, "memory_budget": 0.0}),
        ("gpt2", "pp3", {}),
        ("mixtral", "pp2 tp2", {}),
        ("gpt2", f"dp3 {SHARDED}", {}),
        ("llama3", f"dp2 tp2 {SHARDED}", {}),
        slow=[
            ("glm4_moe", "tp4", {}),
            ("gpt_oss", "tp4", PARTS),
            *((name, "tp4", {"ep": 4}) for name in ("gpt_oss", "qwen3_moe", "deepseek_v3")),
            *((name, "tp4", {"ep": 2}) for name in ("gpt_oss", "deepseek_v3", "glm4_moe")),
            ("gpt_oss", "tp4", {**PARTS, "ep": 2}),
            ("qwen3_next", "tp2", {"ep": 2}),
            ("glm4_moe", "tp4", {**PARTS, "ep": 4}),
            ("mixtral", "pp2 tp2", {"ep": 2}),
            ("mixtral", f"dp2 tp2 {SHARDED}", {"ep": 2}),
            ("mixtral", "tp2", {"ep": 2, "backend": "triton"}),
            *((name, f"tp{n}", o) for name in FAMILIES for n in (2, 4) for o in ({}, PARTS)),
            # Attention's kernels know no heads of 24.
            *((name, "tp2", {"backend": "triton"}) for name in FAMILIES if name != "gemma2"),
            ("llama3", "tp2", {**PARTS, "memory_budget": "45KB"}),
            *((name, "pp2", {}) for name in ("llama3", "gemma2")),
            ("qwen3", "pp4", {}),
            ("opt-projected", "pp3", {}),
            *((name, "pp2 tp2", {}) for name in ("bloom", "falcon-7b")),
            *((name, f"dp2 {SHARDED}", {}) for name in ("llama3", "mixtral", "gemma2")),
            *((name, f"dp2 tp2 {SHARDED}", {}) for name in ("qwen2", "mixtral")),
        ],
    ),
)
def test_logits_tokens_gradients_and_what_is_trained(
    name: str, axes: str, options: dict[str, Any]
) -> None:
    """Batches of one sequence leave replicas without any."""
    setting = Setting(name, axes, options)
    expected = work_alone(name, setting.layers, setting.is_sharded)
    for found in setting.on_ranks(work):
        # Sums over shards are rounded otherwise than those of one rank.
        assert worst_error(found, expected) < (1e-6 if setting.sizes.tp == 1 else 1e-5)


@pytest.mark.parametrize(
    ("name", "axes", "options"),
    cases(
        ("gpt2", "dp3", {}),
        ("gemma2", "dp2 tp2", {}),
        ("llama3", "cp3", {}),
        ("bloom", "cp2", {}),
        ("gpt2", "dp2 cp2", {}),
        ("llama3", "cp2", {"memory_budget": "40KiB"}),
        ("gpt2", "pp2 tp2", PARTS),
        ("llama3", "pp2 dp2", {}),
        slow=[
            ("llama3", "dp2", {}),
            ("qwen2", "dp2 tp2", {}),
            *((name, "cp2", {}) for name in ("gpt2", "gemma2", "mistral-window")),
            ("llama3", "cp2 tp2", {}),
            ("llama3", "cp2 tp2", PARTS),
            ("llama3", "cp2", {"memory_budget": 0}),
            ("gpt2", "pp2", {"memory_budget": 0.5}),
            ("llama3", "pp2 cp2", {}),
            ("llama3", "pp2 dp2 tp2", {}),
        ],
    ),
)
def test_batches_of_several_sequences(name: str, axes: str, options: dict[str, Any]) -> None:
    """Batches of 3 and 1 of the four examples: the last one leaves some replicas without any."""
    setting = Setting(name, axes, options)
    expected = train(setting.alone())
    for found in setting.on_ranks(train):
        check_close(found, expected)


@pytest.mark.parametrize(
    ("axes", "recipe"), [("dp2", DROPPED), ("pp3", LAST)], ids=["replicas", "stages"]
)
def test_accumulated_batches_and_their_dropout(axes: str, recipe: LoraConfig) -> None:
    """Dropout is drawn by a sequence's number in its batch; stages below the last train nothing."""
    options = {"gradient_accumulation_steps": 2, "batch_size": 2, "peft": recipe}

    def run(executor: Executor) -> Any:
        return train(executor, "new", **options)

    setting = Setting("llama3", axes)
    expected = run(setting.alone())
    for found in setting.on_ranks(run):
        check_close(found, expected)


# --------------------------------------------------------------------------------------- methods


@pytest.mark.parametrize(
    ("name", "axes", "method"),
    cases(
        ("llama3", "tp4", "prefix"),  # of two KV heads
        ("phi3", "tp2", "loha"),  # whose fused projections are split
        ("falcon-40b", "tp2", "dora and dropout"),
        # Sums scores and Gram matrices over ranks, which share KV heads.
        ("qwen2", "tp4", "adalora"),
        ("gpt2", "tp2 parts", "bitfit"),
        ("llama3", "pp2", "prompt"),  # of which the first stage trains all
        ("llama3", f"dp2 {SHARDED}", "ia3"),
        slow=[
            *((name, axes, method) for method in METHODS
              for name, axes in (("gpt2", "tp2"), ("qwen2", "tp4"), ("opt", "tp2 parts"))),
            *(("qwen2", "tp2 triton", method) for method in METHODS),
            *(("llama3", "tp2", method) for method in ("dora", "loha", "prefix", "ia3")),
            ("llama3", "tp2 parts", "houlsby"),
            ("gpt2", "tp2", "dora and dropout"),
            *(("llama3", "pp2", method)
              for method in ("dora", "ia3", "houlsby", "prefix", "loha", "vera", "parallel")),
            *(("llama3", f"dp2 {SHARDED}", method) for method in ("dora", "vera", "bias")),
        ],
    ),
)  # fmt: skip
def test_a_method_serves_and_trains(name: str, axes: str, method: str) -> None:
    options = {"backend": "triton"} if "triton" in axes else PARTS if "parts" in axes else {}
    setting = Setting(name, axes.replace(" triton", "").replace(" parts", ""), options)

    def run(executor: Executor) -> Any:
        return method_work(executor, METHODS[method])

    expected = run(setting.alone(peft=None))
    for found in setting.on_ranks(run, peft=None):
        for a, b in zip(found, expected, strict=True):
            assert a.shape == b.shape  # AdaLoRA may leave no triplet
            assert (a - b).norm() <= (1e-5 if setting.sizes.tp > 1 else 2e-6) * b.norm()


@pytest.mark.parametrize(
    ("name", "axes", "method"),
    cases(
        ("llama3", "dp2", "adalora"),
        ("llama3", "dp2", "houlsby"),
        ("llama3", "cp2", "dora"),
        ("llama3", "cp2", "prompt"),
        slow=[
            *(("llama3", "dp2", method) for method in ("dora", "ia3", "prefix", "vera")),
            *(("llama3", "cp2", method) for method in ("ia3", "adalora", "houlsby", "prefix")),
        ],
    ),
)
def test_a_method_trains_by_parts_of_a_step(name: str, axes: str, method: str) -> None:
    def run(executor: Executor) -> Any:
        return train(executor, "new", peft=METHODS[method])

    setting = Setting(name, axes)
    expected = run(setting.alone())
    for found in setting.on_ranks(run):
        check_close(found, expected)


# ------------------------------------------------------------------------------- another mesh

ADAFACTOR = {"optimizer": "adafactor", "eps": None}
EIGHT_BITS = {"optimizer": "adamw8bit", "optimizer_options": {"min_8bit_size": 16}}


@pytest.mark.parametrize(
    ("meshes", "method", "options"),
    [
        pytest.param(("tp2", "", ""), "lora", {}, id="tp"),
        pytest.param(("dp2 tp2", "", "dp3"), "lora", {}, id="dp"),
        pytest.param(("cp2", "", ""), "lora", {}, id="cp"),
        pytest.param(("pp2 tp2", "", "pp3"), "lora", {}, id="pp"),
        pytest.param(("pp2", "", "pp3"), "dora", ADAFACTOR, id="adafactor"),
        pytest.param(("pp2", "", "pp3"), "lora", EIGHT_BITS, id="8 bits"),
        pytest.param((f"dp2 {SHARDED}", "", f"dp3 {SHARDED}"), "lora", {}, id=SHARDED),
        pytest.param(("", "tp2", "tp2"), "lora", {}, id="from one", marks=pytest.mark.slow),
    ],
)
def test_a_job_goes_on_at_another_mesh(
    meshes: tuple[str, str, str], method: str, options: dict[str, Any], tmp_path: Path
) -> None:
    """Two steps by the first mesh, one by the second, and the last ones by the third."""
    if options is EIGHT_BITS:
        pytest.importorskip("bitsandbytes")
    given = {"eval_data": None, "peft": METHODS.get(method, method), **options}
    # A setting of stages or parts has its number of layers; the others have as many.
    largest = max((Setting("gpt2", axes) for axes in meshes if axes), key=lambda s: s.layers)
    expected = train(largest.alone(), "new", **given)
    saved = {"checkpoint_dir": tmp_path, "save_every": 1, **given}

    def stop_after(step: int | None) -> Callable[[Executor], Any]:
        def interrupt(record: StepRecord) -> None:
            if record.step == step:
                raise KeyboardInterrupt

        def run(executor: Executor) -> Any:
            if step is None:
                return train(executor, "new", **saved)
            with pytest.raises(FinetuneInterrupted):
                train(executor, "new", on_step=interrupt, **saved)
            return None

        return run

    found: list[Any] = []
    for axes, step in zip(meshes, (2, 3, None), strict=True):
        if axes:
            setting = Setting("gpt2", axes)
            setting.layers, setting.options = largest.layers, largest.alike
            found = setting.on_ranks(stop_after(step))
        else:
            found = [stop_after(step)(largest.alone())]
    for one in found:
        if options is not EIGHT_BITS:
            check_close(one, expected)
        for name, tensor in expected[2].items():  # of 8 bits a rounding may be another number
            assert float((one[2][name] - tensor).norm()) <= 1e-3 * float(tensor.norm())
