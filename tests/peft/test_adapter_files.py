"""Adapter files that are damaged or of another base, and saving that fails halfway."""

import json
import resource
import shutil
import subprocess
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file, save_file

from pcg.errors import AdapterError, UnsupportedError
from pcg.files import SUMS, seal
from pcg.peft import adapter_files as adapter_writer
from pcg.peft.adapter import Adapter, check_fits, new_adapter
from pcg.peft.adapter_files import WEIGHTS, digest_of, read_adapter, write_adapter
from pcg.peft.lora import LoraConfig, LoraWeights
from tests.support.damage import damage
from tests.support.small_engine import make_executor

# ------------------------------------------------------------------------------------ damaged files


@pytest.fixture
def saved(tmp_path: Path) -> Path:
    """An adapter with q and v of one layer."""
    recipe = LoraConfig(target_modules=("q", "v"), r=2)
    adapter = new_adapter("x", recipe, {"a.q": (6, 4), "a.v": (6, 4)})
    write_adapter(replace(adapter, base_model_name="some/base"), tmp_path / "saved")
    return tmp_path / "saved"


def edit(path: Path, **fields: Any) -> None:
    """Rewrite the config as a program does that saves no checksums."""
    (path / SUMS).unlink(missing_ok=True)
    file = path / "adapter_config.json"
    file.write_text(json.dumps({**json.loads(file.read_text()), **fields}))


def change(path: Path, remove: str = "", **tensors: torch.Tensor) -> None:
    """Rewrite the weights; a key is given from behind the prefix, with _ for a dot."""
    (path / SUMS).unlink(missing_ok=True)
    file = path / "adapter_model.safetensors"
    content = {k: v.clone() for k, v in load_file(file).items() if not remove or remove not in k}
    content |= {f"base_model.model.{k}": v for k, v in tensors.items()}
    save_file(content, file)


def test_missing_files(saved: Path, tmp_path: Path) -> None:
    with pytest.raises(AdapterError, match="is not there; give the directory"):
        read_adapter(tmp_path / "none", "x")
    with pytest.raises(AdapterError, match="is a file"):
        read_adapter(saved / "adapter_config.json", "x")
    with pytest.raises(AdapterError, match="adapters within: saved"):
        read_adapter(tmp_path, "x")
    weights = saved / "adapter_model.safetensors"
    weights.rename(saved / "adapter_model.bin")
    with pytest.raises(AdapterError, match=r"only pickled weights .*save_pretrained\(OUT\)"):
        read_adapter(saved, "x")
    (saved / "adapter_model.bin").unlink()
    with pytest.raises(AdapterError, match=r"no adapter_model.safetensors; copy it too"):
        read_adapter(saved, "x")
    (saved / "adapter_config.json").rename(saved / "config.json")
    with pytest.raises(AdapterError, match="it is a model, not an adapter"):
        read_adapter(saved, "x")
    (saved / "config.json").unlink()
    with pytest.raises(AdapterError, match=r"has no adapter_config.json; give"):
        read_adapter(saved, "x")


@pytest.mark.parametrize(
    ("content", "message"),
    [
        (b'{"r": 8,', "damaged at line 1, column"),
        (b"\xff\xfe", "byte 0 is not UTF-8"),
        (b"[1]", "holds a list"),
        (b"null", "holds null"),
        (b"1", "holds a number"),
        (b'{"peft_type": "LORA", "use_qalora": true}', "adapter_config.json: .*use_qalora=True"),
    ],
)
def test_damaged_config(saved: Path, content: bytes, message: str) -> None:
    (saved / "adapter_config.json").write_bytes(content)
    with pytest.raises((AdapterError, UnsupportedError), match=message):
        read_adapter(saved, "x")


@pytest.mark.parametrize("keep", [0, 4, 8, 60, 400, -1])
def test_truncated_weights(saved: Path, keep: int) -> None:
    file = saved / "adapter_model.safetensors"
    content = file.read_bytes()
    file.write_bytes(content[:keep])
    with pytest.raises(AdapterError, match=r"truncated|damaged"):
        read_adapter(saved, "x")
    file.write_bytes(content + b"more")
    with pytest.raises(AdapterError, match=rf"describes {len(content)} bytes, the file has"):
        read_adapter(saved, "x")
    file.write_bytes(b"version https://git-lfs.github.com/spec/v1\noid sha256:0\n")
    with pytest.raises(AdapterError, match="Git LFS pointer"):
        read_adapter(saved, "x")


@pytest.mark.parametrize(
    ("fields", "remove", "tensors", "error", "message"),
    [
        ({}, "v.lora_A", {}, AdapterError, "no a.v.lora_A.weight, the partner"),
        ({}, "v.lora_B", {}, AdapterError, "no a.v.lora_B.weight, the partner"),
        ({}, "", {"a.v.lora_A.weight": torch.zeros(3, 4)}, AdapterError,
         r"tensors \[3, 4\], \[6, 2\]; expected \[3, 4\], \[6, 3\]"),
        ({}, "", {"a.v.lora_A.weight": torch.zeros(2, 4, 1)}, AdapterError, r"tensors \[2, 4, 1\]"),
        ({"r": 4}, "", {}, AdapterError, "rank 2 .* gives it rank 4"),
        ({"target_modules": ["q"]}, "", {}, AdapterError, "a.v, which .* does not target"),
        ({}, "", {"a.q.lora_magnitude_vector": torch.zeros(6)}, AdapterError, "and DoRA, and"),
        ({}, "", {"a.wte.lora_embedding_A": torch.zeros(2, 6)}, AdapterError, "does not target"),
        ({}, "", {"a.embed_tokens.weight": torch.zeros(2, 6)}, UnsupportedError, "vocabulary"),
        ({}, "", {"a.norm.weight": torch.zeros(2)}, AdapterError, "no LoRA weight"),
        ({}, "", {"a.q.bias": torch.zeros(6)}, AdapterError, 'bias="none"'),
        ({"bias": "lora_only"}, "", {"a.o.bias": torch.zeros(6)}, AdapterError, "lora_only"),
        ({"bias": "all"}, "", {"a.q.base_layer.bias": torch.zeros(5)}, AdapterError, r"\[5\]"),
        ({"lora_bias": True}, "", {}, AdapterError, "gives it .* and lora_bias"),
        ({"use_dora": True}, "", {}, AdapterError, "gives it .* and DoRA"),
        ({}, "", {"a.q.lora_B.bias": torch.zeros(6)}, AdapterError, "and lora_bias, and"),
        ({}, "a.", {"a.q.lora_A.weight": torch.zeros(2, 4, dtype=torch.int8)}, UnsupportedError,
         "is I8"),
        ({"bias": "all"}, "a.", {"a.q.bias": torch.zeros(6)}, AdapterError, "no LoRA weights"),
    ],
)  # fmt: skip
def test_config_and_weights_that_do_not_go_together(
    saved: Path,
    fields: dict[str, Any],
    remove: str,
    tensors: dict[str, torch.Tensor],
    error: type[Exception],
    message: str,
) -> None:
    edit(saved, **fields)
    change(saved, remove, **tensors)
    with pytest.raises(error, match=message):
        read_adapter(saved, "x")


def test_biases_of_old_peft(saved: Path) -> None:
    """Before base_layer, peft stored the bias of an adapted module under its own name."""
    edit(saved, bias="lora_only")
    change(saved, **{"a.q.bias": torch.ones(6)})
    assert read_adapter(saved, "x").replaced.keys() == {"a.q.bias"}


def test_another_base(saved: Path) -> None:
    adapter = read_adapter(saved, "mine")
    shapes = {"a.q": (6, 4), "a.v": (6, 4)}
    check_fits(adapter, shapes, "this/base")
    with pytest.raises(AdapterError, match=r"adapts a.v, which is no linear module") as error:
        check_fits(adapter, {"a.q": (6, 4), "a.vv": (6, 4)}, "this/base")
    for part in ("'mine'", "'some/base'", "'this/base'", "did you mean", "another base"):
        assert part in str(error.value)
    with pytest.raises(AdapterError, match=r"tensors \[2, 4\], \[6, 2\] for a.v, .*\[6, 5\] in"):
        check_fits(adapter, {**shapes, "a.v": (6, 5)})
    with pytest.raises(AdapterError, match=r"no weights for 1 of the 3 modules .* b.q"):
        check_fits(adapter, {**shapes, "b.q": (6, 4)})
    edit(saved, bias="lora_only")
    change(saved, **{"a.q.base_layer.bias": torch.ones(6)})
    adapter = read_adapter(saved, "mine")
    check_fits(adapter, shapes)


# ------------------------------------------------------------------------------------------ saving


def snapshot(directory: Path) -> dict[str, bytes]:
    return {
        str(f.relative_to(directory)): f.read_bytes() for f in directory.rglob("*") if f.is_file()
    }


@pytest.mark.parametrize("writer", ["pcg.peft.adapter_files.save_file", "os.fsync"])
def test_a_full_disk_leaves_the_old_files(
    saved: Path, writer: str, monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    before = snapshot(tmp_path)
    adapter = read_adapter(saved, "x")
    other = new_adapter("x", LoraConfig(target_modules=("q",)), {"a.q": (6, 4)}, seed=1)

    def full(*args: object, **kwargs: object) -> None:
        raise OSError(28, "No space left on device")

    monkeypatch.setattr(writer, full)
    with pytest.raises(AdapterError, match="No space left on device; the files there are as they"):
        write_adapter(other, saved)
    with pytest.raises(AdapterError, match="No space left on device; nothing was left there"):
        write_adapter(other, tmp_path / "new")
    assert snapshot(tmp_path) == before
    monkeypatch.undo()
    assert torch.equal(read_adapter(saved, "x").weights["a.q"].a, adapter.weights["a.q"].a)


def test_a_real_write_that_breaks_off(saved: Path, tmp_path: Path) -> None:
    """The kernel refuses to write more than 64 KiB to a file."""
    before = snapshot(tmp_path)
    recipe = LoraConfig(target_modules=("q",))
    big = new_adapter("x", recipe, {"a.q": (1 << 14, 1 << 14)})
    limits = resource.getrlimit(resource.RLIMIT_FSIZE)
    resource.setrlimit(resource.RLIMIT_FSIZE, (1 << 16, limits[1]))
    try:
        with pytest.raises(AdapterError, match="cannot be saved in"):
            write_adapter(big, saved)
    finally:
        resource.setrlimit(resource.RLIMIT_FSIZE, limits)
    assert snapshot(tmp_path) == before


def test_saving_again(saved: Path, tmp_path: Path) -> None:
    """Mapped tensors of the old file stay what they were; other files and an equal config stay."""
    (saved / "optimizer.pt").write_bytes(b"state")
    adapter = read_adapter(saved, "x")
    before = {path: weights.a.clone() for path, weights in adapter.weights.items()}
    config = (saved / "adapter_config.json").stat()
    recipe = adapter.recipe
    other = new_adapter("x", recipe, {"a.q": (6, 4), "a.v": (6, 4)}, seed=5)
    other = replace(other, base_model_name="some/base")
    write_adapter(other, saved)
    assert (saved / "adapter_config.json").stat().st_ino == config.st_ino
    assert torch.equal(adapter.weights["a.q"].a, before["a.q"])
    assert torch.equal(read_adapter(saved, "x").weights["a.q"].a, other.weights["a.q"].a)
    names = [SUMS, "adapter_config.json", "adapter_model.safetensors", "optimizer.pt"]
    assert sorted(file.name for file in saved.iterdir()) == names
    # An adapter may be saved over the very file that its tensors are mapped from.
    write_adapter(adapter, saved)
    assert torch.equal(read_adapter(saved, "x").weights["a.q"].a, before["a.q"])
    link = tmp_path / "link"
    link.symlink_to(tmp_path / "target")
    write_adapter(adapter, link)
    assert link.is_symlink()
    assert (tmp_path / "target" / "adapter_config.json").is_file()


def test_checksums_hold_at_every_instant_of_saving_again(
    saved: Path, monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    """A crash between any two renames leaves an adapter that is read, the old or the new one."""
    (saved / "notes.txt").write_text("mine")
    seal(saved)
    recipe = read_adapter(saved, "x").recipe
    other = new_adapter("x", recipe, {"a.q": (6, 4), "a.v": (6, 4)}, seed=5)
    replace, read = Path.replace, list[Adapter]()

    def and_read(self: Path, target: Path) -> Path:
        found = replace(self, target)
        if target.parent == saved:
            shutil.copytree(saved, tmp_path / f"at-{len(read)}", ignore=lambda *_: [self.parent])
            read.append(read_adapter(tmp_path / f"at-{len(read)}", "x"))
        return found

    monkeypatch.setattr(Path, "replace", and_read)
    write_adapter(other, saved)
    assert len(read) == 4  # both sums, the weights, the config with another base's name
    sums = subprocess.run(["sha256sum", "-c", SUMS], cwd=saved, capture_output=True, text=True)
    assert sums.returncode == 0, sums.stderr
    assert sums.stdout.splitlines() == [
        "adapter_config.json: OK", "adapter_model.safetensors: OK", "notes.txt: OK",
    ]  # fmt: skip


@pytest.mark.parametrize("file", ["adapter_config.json", "adapter_model.safetensors", SUMS])
@pytest.mark.parametrize("how", ["flip", "cut", "empty", "gone"])
def test_no_damage_is_read_as_an_adapter(saved: Path, file: str, how: str) -> None:
    """Each bit of what a file holds, or each length; without checksums an adapter is as peft's."""
    whole, good = (saved / file).read_bytes(), digest_of(read_adapter(saved, "x"))
    places = {"flip": range(0, 8 * len(whole), 37), "cut": range(1, len(whole), 29)}
    for place in places.get(how, [0]):
        damage(saved / file, how, place)
        if file == SUMS and (how == "gone" or place == len(whole) - 1):
            assert digest_of(read_adapter(saved, "x")) == good  # the last line has no end
        else:
            with pytest.raises((AdapterError, UnsupportedError), match=file):
                read_adapter(saved, "x")
        (saved / file).write_bytes(whole)


def test_a_failing_second_rename_is_told(
    saved: Path, monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    replace = Path.replace

    def refuse_config(self: Path, target: Path) -> Path:
        if self.name == "adapter_config.json":
            raise PermissionError(13, "Permission denied")
        return replace(self, target)

    monkeypatch.setattr(Path, "replace", refuse_config)
    other = new_adapter("x", LoraConfig(target_modules=("q",)), {"a.q": (6, 4)})
    with pytest.raises(AdapterError, match=r"adapter_config.json is not: save again"):
        write_adapter(other, saved)
    assert adapter_writer.WEIGHTS in snapshot(saved)


def test_weights_that_are_not_of_the_recipe_are_not_saved(tmp_path: Path) -> None:
    recipe = LoraConfig(target_modules=("q",), r=2, lora_alpha=4)
    a, b = torch.zeros(2, 4), torch.zeros(6, 2)
    with pytest.raises(AdapterError, match=r"scale 3 at a.q, its recipe gives .* scale 2"):
        write_adapter(Adapter("x", recipe, {"a.q": LoraWeights(a, b, 3.0)}), tmp_path / "x")
    with pytest.raises(AdapterError, match=r"a.v, which its recipe does not target"):
        write_adapter(Adapter("x", recipe, {"a.v": LoraWeights(a, b, 2.0)}), tmp_path / "x")
    assert not (tmp_path / "x").exists()


def test_a_file_in_the_way(tmp_path: Path) -> None:
    (tmp_path / "x").write_text("mine")
    adapter = new_adapter("x", LoraConfig(target_modules=("q",)), {"a.q": (6, 4)})
    with pytest.raises(AdapterError, match="cannot be saved in"):
        write_adapter(adapter, tmp_path / "x")
    assert (tmp_path / "x").read_text() == "mine"
    shutil.rmtree(tmp_path, ignore_errors=True)


@pytest.mark.parametrize("value", [float("nan"), float("inf"), 1e39])
def test_weights_that_are_not_finite_are_refused(tmp_path: Path, value: float) -> None:
    """As they are run: 1e39 is finite in the file's fp64, and infinite in the adapters' fp32."""
    executor = make_executor()
    executor.save_adapter("a", tmp_path)
    (tmp_path / SUMS).unlink()
    tensors = load_file(tmp_path / WEIGHTS)
    key = sorted(tensors)[3]
    tensors = {name: tensor.double() for name, tensor in tensors.items()}
    tensors[key][1, 2] = value
    save_file(tensors, tmp_path / WEIGHTS, metadata={"format": "pt"})
    module = key.removeprefix("base_model.model.").rpartition(".lora_")[0]
    with pytest.raises(AdapterError, match=rf"the weights of {module} hold NaN or infinity"):
        executor.add_adapter("b", tmp_path)
    assert "b" not in executor.adapters
