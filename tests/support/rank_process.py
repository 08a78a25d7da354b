"""What a started rank does: `python -m torch.distributed.run … rank_process.py OUTPUT`."""

from __future__ import annotations

import os
import signal
import sys
from pathlib import Path

import torch

from pcg.errors import FinetuneInterrupted
from pcg.ranks.join import join_group
from pcg.runtime.training.options import StepRecord

DEGREE = 2


def job(output: str, sequence_parallel: bool) -> None:
    """The job of `ranked.py`, what the rank exchanged on the way, and a Ctrl-C on rank 1 alone."""
    from tests.support.ranked import EXAMPLES, JOB, make_executor, make_program, rank_memory, work

    name = "qwen2"
    program = make_program(name, DEGREE, sequence_parallel=sequence_parallel)
    executor = make_executor(program, name)
    sent = dict(executor.ranks.moved_bytes)
    executor.logits([3] * 8)
    now = executor.ranks.moved_bytes
    of_logits = {kind: now[kind] - sent[kind] for kind in now}
    memory = rank_memory(executor, "a")
    outcome = work(executor)
    executor.save_adapter("b", Path(output) / "adapter")
    options = dict(JOB, checkpoint_dir=Path(output) / "checkpoints", eval_data=None)

    def interrupt(record: StepRecord) -> None:
        if executor.ranks.rank == 1 and record.step == 2:
            os.kill(os.getpid(), signal.SIGINT)

    stopped_at = 0
    try:
        executor.finetune(EXAMPLES, "a", on_step=interrupt, **options)
    except FinetuneInterrupted as error:
        stopped_at = error.step
    resumed = executor.finetune(EXAMPLES, "a", resume=True, **options)
    path = Path(output) / f"rank-{executor.ranks.rank}.pt"
    torch.save(
        (outcome, of_logits, memory, (stopped_at, resumed.resumed_from, resumed.steps)), path
    )


def train_over_mesh(output: str, sizes: str, count: str) -> None:
    """Train an adapter of each of the first ones of `CASES` over a mesh such as dp2-tp2."""
    from pcg.ranks.join import join_mesh
    from pcg.ranks.mesh import MeshSizes
    from tests.support.meshes import CASES, train_case

    own = {word[:2]: int(word[2:]) for word in sizes.split("-")}
    mesh = join_mesh(MeshSizes(**own), torch.device("cpu"))
    for case in CASES[: int(count)]:
        trained = train_case(*case, mesh)
        torch.save(trained, Path(output) / f"{'-'.join(case)}-{mesh.world.rank}.pt")


def work_with_experts(output: str, name: str, tp: str, ep: str) -> None:
    """The job of `ranked.py` over ranks with some of the experts."""
    from tests.support.ranked import make_executor, make_program, work

    program = make_program(name, int(tp), ep=int(ep), sequence_parallel=True)
    executor = make_executor(program, name)
    found = work(executor), executor.ranks.messages
    torch.save(found, Path(output) / f"{executor.ranks.rank}.pt")


def train_parts_by_triton(output: str) -> None:
    """Train a step by kernels for Triton, over two ranks that share the tokens."""
    from pcg.ranks.join import join_mesh
    from pcg.ranks.mesh import MeshSizes
    from tests.support.meshes import train
    from tests.support.ranked import make_executor, make_program

    mesh = join_mesh(MeshSizes(cp=2), torch.device("cpu"))
    executor = make_executor(make_program("llama3", 1, backend="triton"), "llama3", mesh)
    trained = train(executor, epochs=1, batch_size=4, eval_data=None)
    torch.save(trained, Path(output) / f"{mesh.world.rank}.pt")


def share_base(output: str) -> None:
    """Load a base in parts, train over it, and write the bytes that are alive and sent."""
    import pcg.compiler as compiler
    from pcg.kernels.torch import base_operators
    from tests.support.live_tensors import REMEMBERED, live_bytes, memory_of, new_tensors, reached
    from tests.support.meshes import train
    from tests.support.ranked import SEQUENCES

    options = {"dtype": "float32", "packed_weights": False, "device": "cpu"}
    with new_tensors() as live:
        executor = compiler.compile(f"{output}/model", None, dp=2, shard_base=True, **options)
        state, constants = executor.state, executor.program.constants.values()
        stop = (state.weight_store, state.program, state.serving.runner)
        roots = [state.serving.tables, state.adapters, base_operators._last_signed, *REMEMBERED]
        theirs = {memory_of(tensor) for tensor in reached(roots, stop)}
        own = [tensor for tensor in live() if memory_of(tensor) not in theirs]
        held = live_bytes([*own, *constants])
    logits = executor.logits(SEQUENCES)
    gathered = state.mesh.data.moved_bytes
    sent: list[int] = []
    note = lambda record: sent.append(gathered["all_gather"])  # noqa: E731
    trained = train(executor, "new", peft="lora", on_step=note, eval_data=None)
    found = (held, sent[2] - sent[1], logits, trained)
    torch.save(found, Path(output) / f"rank-{executor.ranks.rank}.pt")


def lose_one() -> None:
    """Rank 1 is killed while the others wait for it."""
    ranks = join_group(DEGREE, torch.device("cpu"))
    ranks.all_reduce(torch.ones(1))
    if ranks.rank == 1:
        os.kill(os.getpid(), signal.SIGKILL)
    ranks.all_reduce(torch.ones(1))


def lose_one_meanwhile() -> None:
    """Rank 1 is killed while a collective that the others have begun goes on."""
    ranks = join_group(DEGREE, torch.device("cpu"))
    first, second = (
        ranks.begin("all_reduce", torch.ones(1)),
        ranks.begin("all_gather", torch.ones(2)),
    )
    assert (float(first()), torch.stack(second()).tolist()) == (DEGREE, [[1.0, 1.0]] * DEGREE)
    if ranks.rank == 1:
        os.kill(os.getpid(), signal.SIGKILL)
    ranks.begin("all_reduce", torch.ones(1))()


def predict_peaks() -> None:
    """What collectives hold while they go on is in the peak of a step."""
    from tests.support.families import BY_NAME
    from tests.support.measured_memory import peak_error

    for budget, sequence_parallel in ((1.0, False), (0.0, True)):
        options = {"tp": DEGREE, "sequence_parallel": sequence_parallel}
        error = peak_error(BY_NAME["llama3"], "float32", budget, **options)
        assert abs(error) < 0.03, error


def fail_on_one() -> None:
    """Rank 1 ends with an error of its own."""
    from pcg.errors import WeightsError

    ranks = join_group(DEGREE, torch.device("cpu"))
    if ranks.rank == 1:
        raise WeightsError("model.safetensors cannot be read here")
    ranks.all_reduce(torch.ones(1))


def break_on_one() -> None:
    """Rank 1 ends with an error that pcg does not know."""
    ranks = join_group(DEGREE, torch.device("cpu"))
    if ranks.rank == 1:
        _ = 1 // (ranks.rank - 1)
    ranks.all_reduce(torch.ones(1))


def interrupted(folder: str) -> None:
    """Ctrl-C comes to all processes in the middle of a job."""
    from tests.support.ranked import EXAMPLES, JOB, make_executor, make_program

    executor = make_executor(make_program("llama3", DEGREE), "llama3")

    def interrupt(record: StepRecord) -> None:
        if executor.ranks.rank == 1 and record.step == 2:
            for process in (os.getpid(), os.getppid()):
                os.kill(process, signal.SIGINT)

    executor.finetune(EXAMPLES, "a", on_step=interrupt, **{**JOB, "checkpoint_dir": folder})


def differ() -> None:
    """Each rank compiles for a device of its own."""
    from tests.support.ranked import make_executor, make_program

    costs = ("H100", "A10G")[int(os.environ["RANK"])]
    make_executor(make_program("llama3", DEGREE, costs=costs), "llama3")


if __name__ == "__main__":
    if sys.argv[1] == "job":
        job(sys.argv[2], sys.argv[3:] == ["sequence-parallel"])
    elif sys.argv[1] in ("lose_one", "lose_one_meanwhile"):
        globals()[sys.argv[1]]()
    else:
        from pcg.ranks.launch import launch
        from tests.support import rank_process

        given = dict(word.split("=") for word in sys.argv[3:])
        launch(int(given.pop("ranks", DEGREE)), getattr(rank_process, sys.argv[2]), given)
