"""Commands under torchrun: as many ranks as it has started, and never copies."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
import typer

from cli.options.executors import PlaceOptions, check_alone, degree_of, shards_and_replicas


@pytest.fixture
def torchrun(monkeypatch: pytest.MonkeyPatch) -> None:
    for name, value in {"RANK": "1", "LOCAL_RANK": "1", "WORLD_SIZE": "4"}.items():
        monkeypatch.setenv(name, value)


def asked(**compiling: Any) -> int:
    return degree_of("a/model", compiling, PlaceOptions())


@pytest.mark.usefixtures("torchrun")
def test_without_tp_there_are_as_many_ranks_as_processes() -> None:
    assert asked() == 4
    assert asked(tp=4) == 4


@pytest.mark.usefixtures("torchrun")
def test_copies_are_refused() -> None:
    with pytest.raises(typer.BadParameter, match=r"started 4 .* takes 1, each .* give --tp 4"):
        asked(tp=1)
    with pytest.raises(typer.BadParameter, match=r"started 4 processes, and this takes 2$"):
        asked(tp=2)
    with pytest.raises(typer.BadParameter, match=r"started 4 .* takes 1, each"):
        degree_of("split://host:8300", {}, PlaceOptions())
    with pytest.raises(typer.BadParameter, match="which would each run all of pcg train sft"):
        check_alone("pcg train sft")


@pytest.mark.usefixtures("torchrun")
@pytest.mark.parametrize(
    ("dp", "compiling", "expected"),
    [
        (None, {}, (4, 1)),
        (None, {"tp": 2}, (2, 2)),
        (None, {"tp": 1}, (1, 4)),
        (2, {}, (2, 2)),
        (4, {"tp": 1}, (1, 4)),
    ],
)
def test_replicas_are_the_processes_that_shards_leave(
    dp: int | None, compiling: dict[str, int], expected: tuple[int, int]
) -> None:
    assert shards_and_replicas("a/model", compiling, PlaceOptions(), dp) == expected


@pytest.mark.usefixtures("torchrun")
@pytest.mark.parametrize(
    ("dp", "cp", "compiling", "expected"),
    [(None, 2, {}, (2, 1)), (None, 2, {"tp": 1}, (1, 2)), (2, 2, {}, (1, 2)), (1, 4, {}, (1, 1))],
)
def test_parts_of_sequences_take_processes(
    dp: int | None, cp: int, compiling: dict[str, int], expected: tuple[int, int]
) -> None:
    assert shards_and_replicas("a/model", compiling, PlaceOptions(cp=cp), dp) == expected
    with pytest.raises(typer.BadParameter, match=r"started 4 processes, and this takes 3"):
        shards_and_replicas("a/model", {"tp": 1}, PlaceOptions(cp=3), 1)


@pytest.mark.usefixtures("torchrun")
def test_other_numbers_of_replicas_are_refused() -> None:
    for dp, tp in ((2, 4), (3, 1), (None, 3)):
        with pytest.raises(typer.BadParameter, match=r"started 4 processes, and this takes"):
            shards_and_replicas("a/model", {"tp": tp}, PlaceOptions(), dp)


def test_without_torchrun_there_is_one_rank_unless_more_are_asked_for() -> None:
    assert (asked(), asked(tp=2)) == (1, 2)
    check_alone("pcg train sft")


@pytest.mark.usefixtures("torchrun")
def test_a_program_takes_the_ranks_that_it_was_compiled_for(tmp_path: Path) -> None:
    from pcg.compiler import compile_program
    from pcg.ir.program.folder import save_program
    from tests.support.families import BY_NAME

    save_program(compile_program(BY_NAME["llama3"].config(1), tp=2), tmp_path / "program")
    with pytest.raises(typer.BadParameter, match=r"started 4 processes, and this takes 2$"):
        degree_of(str(tmp_path / "program"), {}, PlaceOptions())


def test_more_stages_than_layers_start_no_ranks(tmp_path: Path) -> None:
    (tmp_path / "config.json").write_text(json.dumps({"model_type": "gpt2", "n_layer": 3}))
    with pytest.raises(typer.BadParameter, match=r"4 stages need a layer each, and .* has 3"):
        degree_of(str(tmp_path), {}, PlaceOptions(pp=4))
    assert degree_of(str(tmp_path), {}, PlaceOptions(pp=3)) == 1
