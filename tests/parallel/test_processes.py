"""Ranks that are processes: torchrun over gloo, and what becomes of ranks when one dies."""

from __future__ import annotations

import json
from pathlib import Path

import pytest
import torch

from pcg.peft.adapter_files import read_adapter
from pcg.ranks.group import COLLECTIVES
from tests.support import tiny_llama
from tests.support.parameters import mostly_slow
from tests.support.ranked import (
    check_same,
    make_executor,
    make_program,
    predicted_memory,
    work,
    worst_error,
)
from tests.support.started_ranks import SCRIPT, free_port, start

pytestmark = pytest.mark.dist


@pytest.mark.slow
@pytest.mark.parametrize("words", [(), ("sequence-parallel",)], ids=["sums", "parts of tokens"])
def test_a_job_under_torchrun(words: tuple[str, ...], tmp_path: Path) -> None:
    options = ["--nproc-per-node", "2", "--rdzv-backend", "c10d", "--rdzv-endpoint", "127.0.0.1:0"]
    options += ["--local-addr", "127.0.0.1"]
    options += [SCRIPT, "job", str(tmp_path), *words]
    torchrun = start("-m", "torch.distributed.run", *options)
    executor = make_executor(make_program("qwen2", 1), "qwen2")
    expected = work(executor)
    _, errors = torchrun.communicate(timeout=400)
    assert torchrun.returncode == 0, errors
    config = executor.program.config
    layers, hidden = config["num_hidden_layers"], config["hidden_size"]
    program = make_program("qwen2", 2, sequence_parallel=bool(words))
    predicted = predicted_memory(program, "qwen2", "a")
    # Two sums a layer and one of the embedding, of 8 tokens in fp32, by a ring of two ranks.
    sums, logits = (2 * layers + 1) * 8 * hidden * 4, 8 * config["vocab_size"] // 2 * 4
    expected_bytes = dict.fromkeys(COLLECTIVES, 0) | {"all_reduce": sums, "all_gather": logits}
    if words:  # a half of each sum, and the other where its parts are joined
        halves = {"all_gather": sums // 2 + logits, "reduce_scatter": sums // 2}
        expected_bytes |= {"all_reduce": 0, **halves}
    for rank in range(2):
        outcome, sent, memory, steps = torch.load(tmp_path / f"rank-{rank}.pt", weights_only=False)
        assert worst_error(outcome, expected) < 1e-5
        assert sent == expected_bytes
        assert memory == predicted
        # All ranks stopped after the step in which one was interrupted, and went on from there.
        assert steps == (2, 2, 4)
    check_same(read_adapter(tmp_path / "adapter", "b"), executor.adapters["b"])


@pytest.mark.slow
@pytest.mark.parametrize(
    ("name", "tp", "ep"),
    [
        ("mixtral", 2, 2),
        ("mixtral", 4, 4),
        ("mixtral", 4, 2),
        ("gpt_oss", 4, 2),
        ("glm4_moe", 4, 2),
    ],
)
def test_ranks_with_some_of_the_experts(name: str, tp: int, ep: int, tmp_path: Path) -> None:
    """Tokens go to experts that a rank has alone; others' products are summed over the ranks."""
    given = [f"output={tmp_path}", f"name={name}", f"tp={tp}", f"ep={ep}", f"ranks={tp}"]
    started = start(SCRIPT, "launch", "work_with_experts", *given)
    expected = work(make_executor(make_program(name, 1), name))
    _, errors = started.communicate(timeout=400)
    assert started.returncode == 0, errors
    for rank in range(tp):
        found, messages = torch.load(tmp_path / f"{rank}.pt", weights_only=False)
        assert worst_error(found, expected) < 1e-5
        assert (messages["all_to_all"] > 0) == (ep == tp)


@pytest.mark.parametrize(
    "act", mostly_slow(["lose_one", "lose_one_meanwhile"], "lose_one_meanwhile")
)
def test_a_rank_that_dies_ends_the_others_with_its_number(act: str) -> None:
    port = free_port()
    ranks = [
        start(
            SCRIPT, act,
            RANK=rank, WORLD_SIZE=2, MASTER_ADDR="127.0.0.1", MASTER_PORT=port,
        )
        for rank in range(2)
    ]  # fmt: skip
    ranks[1].communicate(timeout=400)
    _, errors = ranks[0].communicate(timeout=400)
    assert ranks[0].returncode == 1
    assert "RankLostError: rank 1 of 2 ended" in errors
    assert "rank 0 was in an all-reduce" in errors


@pytest.mark.slow
@pytest.mark.parametrize(
    ("act", "message"),
    [
        ("lose_one", "ParallelError: rank 1 of 2 was ended by SIGKILL, and the others with it"),
        ("differ", "some differ from rank 0: rank 1 in costs (A10G, not H100). Give all ranks"),
        ("fail_on_one", "WeightsError: model.safetensors cannot be read here (on rank 1 of 2)"),
        ("break_on_one", "ZeroDivisionError: integer division or modulo by zero (on rank 1 of 2)"),
    ],
)
def test_a_launched_rank_that_fails_says_why(act: str, message: str) -> None:
    launcher = start(SCRIPT, "launch", act)
    _, errors = launcher.communicate(timeout=400)
    assert launcher.returncode == 1
    assert message in errors
    if act.endswith("on_one"):  # where it was raised
        assert f"in {act}\n" in errors.partition("direct cause")[0]


@pytest.mark.slow
def test_ctrl_c_at_ranks_says_where_the_job_goes_on(tmp_path: Path) -> None:
    launcher = start(SCRIPT, "launch", "interrupted", f"folder={tmp_path}")
    _, errors = launcher.communicate(timeout=400)
    assert (
        "FinetuneInterrupted: finetuning 'a' was interrupted after step 2 of 4; run the" in errors
    )
    (checkpoint,) = (path for path in tmp_path.glob("step-*"))
    assert f"to go on from {checkpoint}" in errors


@pytest.mark.slow
def test_the_peak_of_a_ranks_step_is_predicted() -> None:
    launcher = start(SCRIPT, "launch", "predict_peaks")
    _, errors = launcher.communicate(timeout=240)
    assert launcher.returncode == 0, errors


@pytest.mark.slow
def test_pcg_starts_the_ranks_itself(tmp_path: Path) -> None:
    tiny_llama.save(tmp_path / "model")
    compiled = start("-m", "pcg_cli", "compile", str(tmp_path / "model"), "--tp", "2",
                     "-o", str(tmp_path / "program"))  # fmt: skip
    compiled.communicate(timeout=400)
    assert compiled.returncode == 0
    prompt = ("--prompt", "hello", "-n", "8", "--ignore-eos", "--json")
    found = []
    for where in ("program", "model"):
        run = start("-m", "pcg_cli", "run", str(tmp_path / where), *prompt)
        output, errors = run.communicate(timeout=400)
        assert run.returncode == 0, errors
        found.append(json.loads(output)["completions"])
    assert found[0] == found[1]
    refused = start("-m", "pcg_cli", "run", str(tmp_path / "program"), "--tp", "4", *prompt)
    _, errors = refused.communicate(timeout=400)
    assert refused.returncode == 2
    assert "Invalid value for --tp" in errors
