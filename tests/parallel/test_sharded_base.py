"""A base in parts over replicas gives what a whole one gives, and takes the bytes predicted."""

from __future__ import annotations

import itertools
from pathlib import Path
from typing import Any

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

import pcg.compiler as compiler
from pcg.errors import ParallelError, ProgramError, UnsupportedError
from pcg.explain import explain as explaining
from pcg.ir.program.layer_order import ROOMS, GatherOrder, layers_of_pass
from pcg.ranks.mesh import MeshSizes, RankMesh
from pcg.runtime.model.weights import Checkpoint
from pcg.runtime.training.options import StepRecord
from pcg.source import resolve
from tests.support import oracle
from tests.support.families import BY_NAME
from tests.support.meshes import check_close, train
from tests.support.ranked import (
    SEQUENCES,
    make_executor,
    make_program,
)
from tests.support.started_ranks import SCRIPT, start
from tests.support.threads import run_mesh

SHARDED: dict[str, Any] = {"layers": ROOMS + 2, "packed_weights": False}
"""More layers than are gathered at a time, and products that are computed alike."""
TWO = MeshSizes(dp=2)


@pytest.mark.parametrize("tp", [1, pytest.param(2, marks=pytest.mark.slow)])
@pytest.mark.parametrize("replicas", [2, pytest.param(3, marks=pytest.mark.slow)])
def test_bytes_that_a_rank_holds_and_sends_are_those_explained(tp: int, replicas: int) -> None:
    program = make_program("llama3", tp, **{**SHARDED, "layers": 5})
    options = {"dtype": "float32", "packed_weights": False, "device": "cpu", "tp": tp}
    report = explaining.explain(program.config, "lora", shard_base=replicas, **options)
    whole = explaining.explain(program.config, "lora", **options)
    assert report.memory_bytes["weights"] < whole.memory_bytes["weights"]
    assert f"the layers are in {replicas} parts" in report.to_text()
    assert whole.gathered == {}

    def run(mesh: RankMesh) -> tuple[int, list[int]]:
        executor = make_executor(program, "llama3", mesh, True)
        sent = []

        def note(record: StepRecord) -> None:
            sent.append(mesh.data.moved_bytes["all_gather"])

        train(executor, eval_data=None, on_step=note, epochs=3)
        return executor.state.weight_store.size_bytes, sent

    for held, sent in run_mesh(MeshSizes(dp=replicas, tp=tp), run):
        assert held == report.memory_bytes["weights"]
        steps = {after - before for before, after in itertools.pairwise(sent)}
        assert steps == {report.gathered["sent_bytes"]}


def test_a_replica_reads_its_part_alone(tmp_path: Path) -> None:
    model = oracle.random_model(BY_NAME["gpt2"].config(3))
    model.save_pretrained(tmp_path)
    source = resolve(tmp_path, weights=True)
    program = make_program("gpt2", 1, layers=3)

    def read(mesh: RankMesh) -> tuple[int, int]:
        weights = Checkpoint.open(source, program.base_prefix, program.renamings)
        compiler.make_executor(program, weights, None, None, "cpu", mesh.sharing(True))
        return weights.read_bytes, len(weights.unused())

    sizes = {name: tensor.nbytes for name, tensor in model.named_parameters()}  # tied ones once
    of_layers = sum(size for name, size in sizes.items() if ".h." in name)
    found = run_mesh(TWO, read)
    assert all(unused < len(sizes) for _, unused in found)
    outside = sum(sizes.values()) - of_layers
    assert sum(size for size, _ in found) == of_layers + 2 * outside
    assert max(size for size, _ in found) <= of_layers // 2 + outside + 3 * 16


def test_layers_that_recompute_their_inputs() -> None:
    """Replicas whose sequences differ in number and length train by one plan, which is planned."""
    options = {**SHARDED, "layers": 5, "memory_budget": 38_000}
    program = make_program("llama3", 1, **options)
    assert program.training is not None
    assert program.training.restored
    assert len(layers_of_pass(program.training, trains=True)) > 2 * options["layers"]
    expected = train(make_executor(program, "llama3"), eval_data=None)
    run = lambda mesh: train(make_executor(program, "llama3", mesh, True), eval_data=None)  # noqa: E731
    for found in run_mesh(TWO, run):
        check_close(found, expected)


def test_the_first_replica_chooses_tokens_for_all() -> None:
    """Replicas whose samples differ would run other steps, and wait for each other."""
    program = make_program("llama3", 1, **SHARDED)

    def run(mesh: RankMesh) -> list[tuple[int, ...]]:
        executor = make_executor(program, "llama3", mesh, True)
        with pytest.raises(UnsupportedError, match="an engine over dp=2"):
            executor.engine()
        # Without a seed each process draws its own.
        done = executor.generate(SEQUENCES, "a", temperature=1.5, max_new_tokens=8)
        return [c.token_ids for c in done]

    first, second = run_mesh(TWO, run)
    assert first == second


def test_a_base_is_shared_by_replicas_alone() -> None:
    program = make_program("llama3", 1)
    with pytest.raises(ParallelError, match=r"shard_base=True gives .*give dp=2 or more"):
        make_executor(program, "llama3", None, True)

    def differ(mesh: RankMesh) -> None:
        make_executor(program, "llama3", mesh, mesh.world.rank == 0)

    with pytest.raises(ParallelError, match=r"agree on the base.*shard_base \(False, not True\)"):
        run_mesh(TWO, differ)


@given(st.lists(st.lists(st.integers(0, 4), max_size=12), max_size=4))
def test_a_layer_is_in_its_room_when_it_runs(passes: list[list[int]]) -> None:
    order, rooms = GatherOrder(), [-1] * ROOMS
    for layers in passes:
        order.follow(layers)
        running = None
        for layer in layers:
            room, gathered = order.take(layer)
            for one, place in gathered:
                assert one == layer or place != room  # not over the one that runs
                assert one not in rooms
                rooms[place] = one
            assert rooms[room] == layer
            running = layer
        assert running is None or running in rooms


def test_another_order_is_refused() -> None:
    order = GatherOrder()
    order.follow([0, 1])
    order.take(0)
    with pytest.raises(ProgramError, match="layer 2 runs where layer 1 is due"):
        order.take(2)
    training = make_program("llama3", 1, layers=3).training
    assert training is not None
    assert layers_of_pass(training, trains=True) == [0, 1, 2, 2, 1, 0]
    assert layers_of_pass(training, trains=False) == [0, 1, 2]


@pytest.mark.slow
@pytest.mark.dist
def test_processes_hold_and_give_what_is_predicted(tmp_path: Path) -> None:
    """Two processes over gloo: the bytes that are alive, and what the job gives."""
    model = oracle.random_model(BY_NAME["qwen2"].config(SHARDED["layers"]))
    model.save_pretrained(tmp_path / "model")
    started = start(SCRIPT, "launch", "share_base", f"output={tmp_path}")
    report = explaining.explain(
        str(tmp_path / "model"), "lora", shard_base=2, packed_weights=False, device="cpu",
        dtype="float32",
    )  # fmt: skip
    executor = compiler.compile(
        str(tmp_path / "model"), None, dtype="float32", device="cpu", packed_weights=False
    )
    logits = executor.logits(SEQUENCES)
    expected = train(executor, "new", peft="lora", eval_data=None)
    _, errors = started.communicate(timeout=400)
    assert started.returncode == 0, errors
    for rank in range(2):
        live, sent, found, trained = torch.load(tmp_path / f"rank-{rank}.pt")
        assert live == report.memory_bytes["weights"]
        assert sent == report.gathered["sent_bytes"]
        for a, b in zip(found, logits, strict=True):
            assert (a - b).norm() <= 1e-6 * b.norm()
        check_close(trained, expected)
