"""The folder of a program: it reads back equal, and whatever is wrong with it is said."""

import contextlib
import dataclasses
import errno
import json
import os
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch

from pcg.compiler import compile_program
from pcg.errors import ProgramError
from pcg.files import exchange
from pcg.ir.program import folder as program_folder
from pcg.ir.program.folder import load_program, options_of, save_program
from pcg.ir.program.manifest import FORMAT, is_program_folder, read_manifest
from pcg.ir.program.program import Program
from pcg.peft.lora import LoraConfig
from pcg.peft.registry import recipe_fields
from tests.support import tiny_llama

LORA = {"peft_type": "LORA"}
RECIPE = LoraConfig(r=4, lora_alpha=8, target_modules=("q_proj", "down_proj"), bias="none")


@pytest.fixture(scope="module")
def program() -> Program:
    return compile_program(tiny_llama.config(), {"mine": RECIPE})


@pytest.fixture
def folder(program: Program, tmp_path: Path) -> Path:
    save_program(program, tmp_path / "program", weights="somewhere", report={"total": 1})
    return tmp_path / "program"


def assert_equal(one: Program, other: Program) -> None:
    assert dataclasses.replace(one, constants={}) == dataclasses.replace(other, constants={})
    assert one.constants.keys() == other.constants.keys()
    for name, tensor in one.constants.items():
        assert tensor.dtype == other.constants[name].dtype
        assert torch.equal(tensor, other.constants[name])


def content_of(folder: Path) -> dict[str, bytes]:
    return {p.name: p.read_bytes() for p in folder.iterdir()}


# -------------------------------------------------------------------------------------- round trip


def test_loaded_program_equals_the_saved_one(program: Program, folder: Path) -> None:
    assert program.constants
    assert_equal(load_program(folder), program)


@pytest.mark.parametrize(
    "changes",
    [
        {
            "model_type": "gemma2",
            "sliding_window": 16,
            "head_dim": 8,
            "query_pre_attn_scalar": 8,
        },
        pytest.param({"model_type": "bloom", "n_layer": 2, "n_head": 4}, marks=pytest.mark.slow),
    ],
    ids=["two kinds of blocks", "constants of ALiBi"],
)
def test_other_models(changes: dict[str, Any], tmp_path: Path) -> None:
    sizes = {**tiny_llama.SIZES, "architectures": None, **changes}
    program = compile_program(sizes, "lora")
    save_program(program, tmp_path / "program")
    assert_equal(load_program(tmp_path / "program"), program)


def test_without_training(tmp_path: Path) -> None:
    program = compile_program(tiny_llama.config(), None)
    save_program(program, tmp_path / "program")
    names = {path.name for path in (tmp_path / "program").iterdir()}
    assert not names & {"training.py", "training.pcg"}
    assert_equal(load_program(tmp_path / "program"), program)


def test_saving_twice_gives_the_same_bytes(program: Program, folder: Path, tmp_path: Path) -> None:
    save_program(program, tmp_path / "again", weights="somewhere", report={"total": 1})
    assert content_of(tmp_path / "again") == content_of(folder)


def test_manifest_says_what_it_was_made_of(folder: Path) -> None:
    manifest = read_manifest(folder)
    assert manifest.format == FORMAT
    assert manifest.versions.keys() == {"pcg", "torch", "transformers"}
    assert manifest.weights == "somewhere"
    assert manifest.recipes == {"mine": recipe_fields(RECIPE)}
    assert manifest.files.keys() | {"manifest.json"} == content_of(folder).keys()
    assert is_program_folder(folder)
    assert not is_program_folder(folder.parent)


def test_plan_lists_what_is_kept(program: Program, folder: Path) -> None:
    plan = json.loads((folder / "plan.json").read_text())
    assert plan["layers"] == [0, 0]
    assert plan["memory_budget"] == 1.0
    assert plan["training"]["layers"] == [0, 1]
    first, block = plan["training"]["plans"]
    assert (first["layers"], block["layers"]) == ([0], [1])
    assert "x" not in {value["value"] for value in first["kept"]}
    kept = {value["value"]: value for value in block["kept"]}
    assert program.training is not None
    assert tuple(kept) == program.training.plans[1].saved
    assert kept["x"] == {
        "value": "x",
        "type": "f32[T, 32]",
        "bytes": "128*T",
        "shared_by_layers": False,
    }
    own = [value for value in kept.values() if not value["shared_by_layers"]]
    # Every kept value of a layer is token-wise here: "<bytes a token>*T".
    total = sum(int(value["bytes"].removesuffix("*T")) for value in own)
    assert block["bytes_per_layer"] == f"{total}*T"


def test_tokenizer_files_come_along(program: Program, tmp_path: Path) -> None:
    source = tiny_llama.save(tmp_path / "model")
    templates = source / "additional_chat_templates"
    templates.mkdir()
    (templates / "tool.jinja").write_text("{{ messages }}")
    save_program(program, tmp_path / "program", tokenizer_directory=source)
    for name in ("tokenizer.json", "tokenizer_config.json", "additional_chat_templates/tool.jinja"):
        assert (tmp_path / "program" / name).read_bytes() == (source / name).read_bytes()
    assert not (tmp_path / "program" / "model.safetensors").exists()
    load_program(tmp_path / "program")


def test_options_of_older_folders(program: Program, folder: Path) -> None:
    """Their plan has the budget as an object with batch and seq, no dtype, and words for none."""
    plan = json.loads((folder / "plan.json").read_text())
    for name in ("dtype", "batch", "seq", "backend", "sequence_parallel"):
        del plan[name]
    plan |= {"costs": "", "tp_plan": {}}
    for budget, written in (((0.5, None), 0.5), ((None, 9), "9B")):
        parts = zip(("share", "size_bytes"), budget, strict=True)
        plan["memory_budget"] = {**dict(parts), "batch": 2, "seq": 8}
        (folder / "plan.json").write_text(json.dumps(plan))
        expected = dataclasses.replace(program.options, memory_budget=written, batch=2, seq=8)
        assert options_of(folder) == expected


# ------------------------------------------------------------------------------------------ saving


def test_a_program_is_replaced_whole(program: Program, folder: Path) -> None:
    save_program(program, folder, weights="elsewhere")
    assert read_manifest(folder).weights == "elsewhere"
    assert not (folder / "report.json").exists()
    assert [path.name for path in folder.parent.iterdir()] == ["program"]


@pytest.mark.parametrize("fails_at", ["write", "exchange", "rename"])
def test_full_disk_leaves_the_old_program(
    program: Program, folder: Path, monkeypatch: pytest.MonkeyPatch, fails_at: str
) -> None:
    before = content_of(folder)
    full = OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))
    if fails_at == "write":
        write, calls = program_folder._write, []

        def some(path: Path, content: bytes) -> None:
            calls.append(path)
            if len(calls) > 3:
                raise full
            write(path, content)

        monkeypatch.setattr(program_folder, "_write", some)
    elif fails_at == "exchange":

        def failing(one: Path, other: Path) -> bool:
            raise full

        monkeypatch.setattr(program_folder, "exchange", failing)
    else:
        rename = Path.rename

        def not_the_new_one(self: Path, target: Path) -> Path:
            if target == folder and not self.name.endswith("-old"):
                raise full
            return rename(self, target)

        monkeypatch.setattr(program_folder, "exchange", lambda *_: False)
        monkeypatch.setattr(Path, "rename", not_the_new_one)
    with pytest.raises(ProgramError, match=r"No space left on device; what was there is as it was"):
        save_program(program, folder, weights="elsewhere")
    monkeypatch.undo()
    assert content_of(folder) == before
    assert [path.name for path in folder.parent.iterdir()] == ["program"]


def test_a_kill_leaves_a_program_and_the_next_save_nothing_else(
    program: Program, folder: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Whenever it comes there is a program; what a killed process cannot remove goes later."""
    is_there: list[bool] = []

    def noting(act: Any) -> Any:
        def noted(*given: Any) -> Any:
            result = act(*given)
            is_there.append(is_program_folder(folder))
            return result

        return noted

    with monkeypatch.context() as patch:
        patch.setattr(program_folder, "exchange", noting(program_folder.exchange))
        patch.setattr(Path, "rename", noting(Path.rename))
        patch.setattr(program_folder.shutil, "rmtree", lambda *_, **__: None)
        save_program(program, folder, weights="elsewhere")
    assert is_there
    assert all(is_there)
    assert read_manifest(folder).weights == "elsewhere"
    (folder.parent / ".program-of-mine").mkdir()
    assert len(list(folder.parent.iterdir())) == 3
    save_program(program, folder)
    assert len(list(folder.parent.iterdir())) == 3  # another process may still write there
    later_s = time.time() + 7200
    monkeypatch.setattr(program_folder.time, "time", lambda: later_s)
    save_program(program, folder)
    assert {path.name for path in folder.parent.iterdir()} == {"program", ".program-of-mine"}


def test_folders_are_exchanged_or_left_as_they_were(tmp_path: Path) -> None:
    for name in ("one", "other"):
        (tmp_path / name).mkdir()
        (tmp_path / name / name).touch()
    swaps = exchange(tmp_path / "one", tmp_path / "other")
    assert (tmp_path / "one" / ("other" if swaps else "one")).exists()
    with pytest.raises(FileNotFoundError) if swaps else contextlib.nullcontext():
        exchange(tmp_path / "none", tmp_path / "one")


def test_what_is_no_program_is_not_replaced(program: Program, tmp_path: Path) -> None:
    (tmp_path / "notes").mkdir()
    (tmp_path / "notes" / "diary.txt").write_text("dear diary")
    with pytest.raises(ProgramError, match=r"not a compiled program \(it has diary.txt\)"):
        save_program(program, tmp_path / "notes")
    with pytest.raises(ProgramError, match="is a file"):
        save_program(program, tmp_path / "notes" / "diary.txt")
    assert (tmp_path / "notes" / "diary.txt").read_text() == "dear diary"


def test_files_of_others_in_a_program_are_kept(program: Program, folder: Path) -> None:
    (folder / "adapters").mkdir()
    (folder / "adapters" / "adapter_model.safetensors").write_text("precious")
    with pytest.raises(ProgramError, match=r"1 other file, such as adapters/adapter_model"):
        save_program(program, folder)
    load_program(folder)


def test_unreadable_program_is_not_replaced(program: Program, folder: Path) -> None:
    (folder / "manifest.json").write_text("{")
    with pytest.raises(ProgramError, match=r"cannot be read .*remove it, or give a new folder"):
        save_program(program, folder)
    assert (folder / "base.pcg").exists()


def test_configuration_that_json_cannot_hold(program: Program, tmp_path: Path) -> None:
    odd = dataclasses.replace(program, config={**program.config, "dtype": torch.float32})
    with pytest.raises(ProgramError, match=r"model's configuration cannot be saved as JSON"):
        save_program(odd, tmp_path / "program")
    assert not list(tmp_path.iterdir())


# ----------------------------------------------------------------------------------------- loading


def set_field(**values: object) -> Callable[[Path], None]:
    def change(folder: Path) -> None:
        path = folder / "manifest.json"
        path.write_text(json.dumps({**json.loads(path.read_text()), **values}))

    return change


def append(name: str, text: str) -> Callable[[Path], None]:
    return lambda folder: (folder / name).write_text((folder / name).read_text() + text)


def write(name: str, content: bytes) -> Callable[[Path], None]:
    def change(folder: Path) -> None:
        (folder / name).write_bytes(content)

    return change


def remove(name: str) -> Callable[[Path], None]:
    return lambda folder: (folder / name).unlink()


@pytest.mark.parametrize(
    ("damage", "message"),
    [
        (remove("manifest.json"), r"has no manifest.json: it is not a program; compile it: pcg"),
        (remove("base.pcg"), r"base.pcg is missing from .*program; compile it"),
        (
            write("manifest.json", b'{"format": 1,'),
            r"is damaged at line 1, column 14",
        ),
        (write("manifest.json", b"\xff{}"), r"damaged: byte 0 is not UTF-8"),
        (write("manifest.json", b"[]"), r"holds a list, not an object"),
        (set_field(format=FORMAT + 1), rf"of format {FORMAT + 1}, written by pcg .*; update pcg"),
        (set_field(format="1"), r"has \"format\": '1'"),
        (set_field(recipes=None), r'"recipes" is damaged'),
        (set_field(renamings=[["a"]]), r'"renamings" is damaged'),
        (set_field(renamings=[["(", "b"]]), r'"renamings" is damaged'),
        (set_field(surprise=1), r'has "surprise", which no manifest has'),
        (set_field(files={}), r"names no base.pcg"),
        (set_field(files={"../x": "00"}), r"names '../x', which is no file of it"),
        (
            append("serving.py", "# mine\n"),
            r"serving.py was edited .*--trust-edits \(trust_ed",
        ),
        (append("report.json", "\n"), r"report.json was edited"),
        (append("plan.json", " "), r"plan.json is damaged or was edited .*only the emitted"),
        (append("training.pcg", "#"), r"training.pcg is damaged or was edited"),
        (write("constants.safetensors", b""), r"constants.safetensors is damaged or was edited"),
    ],
)
def test_damage_is_named(folder: Path, damage: Callable[[Path], None], message: str) -> None:
    damage(folder)
    with pytest.raises(ProgramError, match=message):
        load_program(folder)


def test_no_folder(tmp_path: Path) -> None:
    with pytest.raises(ProgramError, match=r"is not there; compile it: pcg compile MODEL -o"):
        load_program(tmp_path / "nothing")
    (tmp_path / "file").touch()
    with pytest.raises(ProgramError, match="is a file"):
        load_program(tmp_path / "file")


def test_trusted_edits(program: Program, folder: Path) -> None:
    append("serving.py", "# mine\n")(folder)
    loaded = load_program(folder, trust_edits=True)
    assert loaded.serving.source == program.serving.source + "# mine\n"
    append("base.pcg", "# mine\n")(folder)
    with pytest.raises(ProgramError, match=r"base.pcg is damaged or was edited"):
        load_program(folder, trust_edits=True)


@pytest.mark.parametrize(
    ("name", "old", "new", "message"),
    [
        ("plan.json", '"layers": [\n    0', '"layers": [\n    7', "plan.json and the graphs"),
        ("plan.json", '"has_backward": true', '"has_backward": false', "plan.json and the graphs"),
        ("base.pcg", "graph @prologue", "grph @prologue", r"base.pcg is damaged: .*grph"),
    ],
)
def test_files_that_do_not_go_together(
    folder: Path, name: str, old: str, new: str, message: str
) -> None:
    """Hashes that fit and content that does not: what a faulty writer would leave."""
    text = (folder / name).read_text()
    assert old in text
    (folder / name).write_text(text.replace(old, new))
    manifest = json.loads((folder / "manifest.json").read_text())
    digest = program_folder.hashlib.sha256((folder / name).read_bytes()).hexdigest()
    set_field(files={**manifest["files"], name: digest})(folder)
    with pytest.raises(ProgramError, match=rf"(?s)program: {message}"):
        load_program(folder)
