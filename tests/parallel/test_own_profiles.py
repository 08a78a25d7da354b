"""Ranks whose device has no data sheet measure it once, together; links are those of each tier."""

from __future__ import annotations

import os
import socket
import subprocess
import sys
from pathlib import Path

import pytest
import torch

from pcg.errors import CostModelError
from pcg.parallel.costs import catalog
from pcg.parallel.costs.catalog import find_cost_model, own_profile
from pcg.parallel.costs.device_profile import CollectiveTime, DeviceProfile, OperatorTime
from pcg.parallel.costs.work import Work
from tests.support.threads import ThreadRanks, run_ranks

LINEAR = OperatorTime(Work("linear", True, "f32", "", 1.0, 1e6, 1e3), 1e-5)


def exchange(degree: int, seconds: float) -> CollectiveTime:
    return CollectiveTime("all_reduce", 2**20, degree, seconds)


def test_an_unknown_device_is_measured_at_first_use(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Once, by all ranks, who have the first one's numbers; the next time it is in the cache."""
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path))
    measured: list[int] = []

    def exchanges_between(
        ranks: ThreadRanks, device: torch.device, *, quick: bool
    ) -> tuple[tuple[CollectiveTime, ...], str]:
        measured.append(ranks.rank)
        return (exchange(ranks.size, 1e-3 * (1 + ranks.rank)),), "gloo"

    def measure_operators(device: torch.device, dtype: str, **_: object) -> tuple[OperatorTime]:
        assert dtype == "bf16"
        return (LINEAR,)

    monkeypatch.setattr(catalog, "exchanges_between", exchanges_between)
    monkeypatch.setattr(catalog.operator_profiler, "measure_operators", measure_operators)

    def act(ranks: ThreadRanks) -> str:
        return own_profile(ranks, None, {"torch_dtype": "bfloat16"})  # type: ignore[arg-type]

    first, again = run_ranks(2, act), run_ranks(2, act)
    assert len({*first, *again}) == 1
    assert sorted(measured) == [0, 1]
    model = find_cost_model(first[0])
    assert model.collective_seconds("all_reduce", 2**20, 2) == pytest.approx(1e-3)


def test_a_group_has_the_link_of_as_many_ranks(tmp_path: Path) -> None:
    """Within a machine of 4 ranks, and over two of them."""
    exchanges = (exchange(4, 1e-3), exchange(8, 1e-1))
    DeviceProfile("toy", {}, (LINEAR,), exchanges, "nccl").save(tmp_path / "toy.json")
    model = find_cost_model(tmp_path / "toy.json")
    assert model.collective_seconds("all_reduce", 2**20, 4) == pytest.approx(1e-3)
    assert model.collective_seconds("all_reduce", 2**20, 8) == pytest.approx(1e-1)
    # Two ranks are on one machine, and five are not.
    assert model.collective_seconds("all_reduce", 2**20, 2) < 1e-3
    assert model.collective_seconds("all_reduce", 2**20, 5) > 1e-2
    with pytest.raises(CostModelError, match="collectives of 8 ranks, so all_reduce over 9"):
        model.collective_seconds("all_reduce", 2**20, 9)


@pytest.mark.dist
@pytest.mark.slow
def test_a_profile_of_machines_under_torchrun(tmp_path: Path) -> None:
    """Four processes that believe to be on two machines."""
    path = tmp_path / "profile.json"
    with socket.socket() as free:
        free.bind(("127.0.0.1", 0))
        port = free.getsockname()[1]
    command = [
        *(sys.executable, "-m", "torch.distributed.run", "--nnodes", "2", "--nproc-per-node", "2"),
        *("--rdzv-backend", "c10d", "--rdzv-endpoint", f"127.0.0.1:{port}"),
        *("-m", "cli", "profile", "--device", "cpu", "--quick", "-o", str(path)),
    ]
    environment = {
        **os.environ,
        "OMP_NUM_THREADS": "1",
        "XDG_CACHE_HOME": str(tmp_path / "cache"),
    }
    machines = [subprocess.Popen(command, env=environment) for _ in range(2)]
    assert [machine.wait(300) for machine in machines] == [0, 0]
    model = find_cost_model(path)
    assert model.collective_seconds("all_reduce", 2**20, 2) > 0
    assert model.collective_seconds("all_reduce", 2**20, 4) > 0
