"""Whatever a stranger's file holds, what comes of it is a PcgError, and never another exception.

One part of a good file is replaced, removed or added, or its bytes are damaged; it is then read by
the door that reads such files. What a door accepts is read as it is in a run.
"""

import contextlib
import hashlib
import json
import shutil

import pytest
import torch
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st
from safetensors.torch import load_file, save_file

import pcg.compiler as compiler
from pcg.errors import FinetuneError, GenerationError, PcgError
from pcg.files import SUMS, seal
from pcg.ir.program.folder import options_of, save_program
from pcg.parallel.costs.catalog import find_cost_model
from pcg.parallel.costs.device_profile import DeviceProfile
from pcg.peft.adapter_files import read_adapter
from pcg.runtime.data.dataset import ReadOptions
from pcg.runtime.data.example import ModelSizes
from pcg.runtime.data.sources import gather
from pcg.runtime.model.weights import Checkpoint
from pcg.runtime.text.tokenizer import Tokenizer
from pcg.runtime.training.training_data import load_here
from pcg.simulate.workload import Workload, read_public_trace
from pcg.source import resolve
from pcg.trace.model_config import parse_config
from tests.support.hostile import DIGITS, NESTED, PATHS, damaged, mangled, text_of
from tests.support.small_job import examples, job, make_model
from tests.support.text_model import CHATS, ROWS, save_text_model

SIZES, LONG = ModelSizes(512, 512, 64), ModelSizes(512, 512, None)
ANY = ReadOptions()
FUZZ = settings(max_examples=20, suppress_health_check=[HealthCheck.function_scoped_fixture])
LONG_FUZZ = settings(FUZZ, max_examples=6)


@contextlib.contextmanager
def only_ours():
    """Let a PcgError be what comes of it."""
    with contextlib.suppress(PcgError):
        yield


@pytest.fixture(scope="module")
def good(tmp_path_factory):
    """A model, an adapter, a program and a job's checkpoints."""
    directory = tmp_path_factory.mktemp("good")
    save_text_model(directory / "model")
    executor = compiler.compile(directory / "model", peft="lora")
    fields = {
        "peft_type": "LORA",
        "r": 4,
        "target_modules": ["q_proj"],
        "rank_pattern": {"q_proj": 2},
    }
    executor.add_adapter("a", fields)
    executor.save_adapter("a", directory / "adapter")
    save_program(compiler.compile_program(directory / "model", "lora"), directory / "program")
    return directory


@pytest.fixture(scope="module")
def trained(tmp_path_factory):
    executor = compiler.compile(make_model(), None)
    directory = tmp_path_factory.mktemp("job")
    job(executor, directory, max_steps=4, epochs=None, data=examples(10))
    executor.remove_adapter("a")
    return executor, directory


def document(path):
    return json.loads(path.read_text())


def copied(source, tmp_path):
    target = tmp_path / source.name
    shutil.rmtree(target, ignore_errors=True)
    shutil.copytree(source, target)
    return target


# ------------------------------------------------------------------------------- files of a model


@FUZZ
@given(st.data())
def test_configurations(good, tmp_path, data):
    (tmp_path / "config.json").write_text(
        text_of(data.draw(mangled(document(good / "model" / "config.json"))))
    )
    with only_ours():
        parse_config(resolve(tmp_path).config)


@FUZZ
@given(st.data())
@pytest.mark.parametrize("file", ["tokenizer_config.json", "config.json"])
def test_tokenizers(good, tmp_path, file, data):
    model = copied(good / "model", tmp_path)
    (model / file).write_text(text_of(data.draw(mangled(document(model / file)))))
    with only_ours():
        tokenizer = Tokenizer.load(model)
        tokenizer.encode_chat([{"role": "user", "content": "Hello"}])


@FUZZ
@given(st.data())
@pytest.mark.parametrize("file", ["model/model.safetensors", "adapter/adapter_model.safetensors"])
def test_tensors(good, tmp_path, file, data):
    source = good / file
    place = copied(source.parent, tmp_path)
    content = source.read_bytes()
    start = 8 + int.from_bytes(content[:8], "little")
    (place / source.name).write_bytes(data.draw(damaged(content[:start])) + content[start:])
    with only_ours():
        if place.name == "adapter":
            read_adapter(place, "a")
        else:
            Checkpoint.open(resolve(place, weights=True))


# ------------------------------------------------------------------------------- adapters


@FUZZ
@given(st.data())
def test_adapters(good, tmp_path, data):
    adapter = copied(good / "adapter", tmp_path)
    config = document(adapter / "adapter_config.json")
    (adapter / "adapter_config.json").write_text(text_of(data.draw(mangled(config))))
    (adapter / SUMS).unlink()
    with only_ours():
        read_adapter(adapter, "a")


@FUZZ
@given(st.data())
def test_recipes(trained, good, data):
    config = document(good / "adapter" / "adapter_config.json")
    executor, _ = trained
    with only_ours():
        executor.state.make_adapter("a", data.draw(mangled(config)))


# ------------------------------------------------------------------------------- programs


@LONG_FUZZ
@given(st.data())
@pytest.mark.parametrize("file", ["plan.json", "config.json", "manifest.json"])
def test_programs(good, tmp_path, file, data):
    """With the manifest's hash of what the file now is."""
    program = copied(good / "program", tmp_path)
    content = text_of(data.draw(mangled(document(program / file)))).encode()
    (program / file).write_bytes(content)
    if file != "manifest.json":
        manifest = document(program / "manifest.json")
        manifest["files"][file] = hashlib.sha256(content).hexdigest()
        (program / "manifest.json").write_text(json.dumps(manifest))
    with only_ours():
        options_of(program)
    with only_ours():
        compiler.load(program, weights=good / "model")


# ------------------------------------------------------------------------------- data and jobs


@FUZZ
@given(st.data())
@pytest.mark.parametrize("rows", [ROWS, CHATS], ids=["texts", "chats"])
def test_rows(good, tmp_path, rows, data):
    tokenizer, found = Tokenizer.load(good / "model"), data.draw(mangled(rows))
    path = tmp_path / "train.jsonl"
    path.write_text("".join(text_of(row) + "\n" for row in found))
    for source in ((path,), found):
        with only_ours():
            load_here(tokenizer, source, ReadOptions(), SIZES)


@FUZZ
@given(st.data())
def test_states_of_jobs(trained, tmp_path, data):
    executor, source = trained
    directory = copied(source, tmp_path)
    state = directory / (directory / "latest").read_text().strip() / "trainer_state.json"
    state.write_text(text_of(data.draw(mangled(document(state)))))
    seal(state.parent)
    with only_ours():
        job(executor, directory, max_steps=4, epochs=None, data=examples(10))
    for name in executor.adapters:
        executor.remove_adapter(name)


@pytest.mark.parametrize("what", ["optimizer", "adapter_model"])
@pytest.mark.parametrize("value", [float("nan"), float("inf")])
def test_a_job_does_not_go_on_from_what_is_not_finite(trained, tmp_path, what, value):
    executor, source = trained
    directory = copied(source, tmp_path)
    file = directory / (directory / "latest").read_text().strip() / f"{what}.safetensors"
    tensors = load_file(file)
    name = next(n for n, tensor in tensors.items() if tensor.is_floating_point() and tensor.ndim)
    tensors[name].view(-1)[0] = value
    save_file(tensors, file)
    seal(file.parent)
    for other in directory.glob("step-*"):
        if other != file.parent:  # from which it would go on
            shutil.rmtree(other)
    with pytest.raises(FinetuneError, match="NaN or infinity"):
        job(executor, directory, max_steps=4, epochs=None, data=examples(10))
    assert not executor.adapters


# ------------------------------------------------------------------------------- measurements


@FUZZ
@given(st.data())
def test_profiles_and_traces(tmp_path, data):
    profile = {
        "format": 1, "device": "CPU", "versions": {}, "backend": "gloo", "exchanges": [],
        "points": [{"op": "linear", "seconds": 1.0}],
    }  # fmt: skip
    (tmp_path / "profile.json").write_text(text_of(data.draw(mangled(profile))))
    row = {"time_s": 1.0, "prompt_tokens": 1, "output_tokens": 2, "adapter": "a"}
    (tmp_path / "trace.jsonl").write_text(text_of(data.draw(mangled(row))))
    with only_ours():
        DeviceProfile.load(tmp_path / "profile.json")
    with only_ours():
        Workload.load(tmp_path / "trace.jsonl")


# ------------------------------------------------------------------------------- names and paths

DOORS = {
    "resolve": lambda _, path: resolve(path),
    "compile": lambda _, path: compiler.compile(path),
    "load": lambda _, path: compiler.load(path),
    "add_adapter": lambda executor, path: executor.add_adapter("b", path),
    "name": lambda executor, path: executor.add_adapter(f"../{path}", "lora"),
    "save_adapter": lambda executor, path: executor.save_adapter("mine", path),
    "data": lambda executor, path: executor.finetune(f"{path}.jsonl", "mine"),
    "checkpoints": lambda executor, path: executor.finetune(
        examples(2), "mine", max_steps=1, checkpoint_dir=path
    ),
    "costs": lambda _, path: find_cost_model(path),
    "tokenizer": lambda _, path: Tokenizer.load(path),
    "trace": lambda _, path: Workload.load(path),
    "public trace": lambda _, path: read_public_trace(path),
    "tp_plan": lambda _, path: compiler.compile_program("llama-2-7b", tp=2, tp_plan=path),
}


@pytest.mark.parametrize("door", DOORS)
@pytest.mark.parametrize("path", PATHS, ids=["long", "deep", "half", "zero", "device"])
def test_paths(trained, door, path):
    executor, _ = trained
    executor.add_adapter("mine", "lora")
    try:
        with pytest.raises(PcgError) as caught:
            DOORS[door](executor, path)
        assert len(str(caught.value)) < 8_000
    finally:
        for name in executor.adapters:
            executor.remove_adapter(name)


@pytest.mark.parametrize("content", [NESTED, f'{{"a": {DIGITS}}}', '{"a": 1', "[]", "\ufffd", ""])
def test_json_that_is_none(good, tmp_path, content):
    for name in ("config.json", "adapter_config.json", "manifest.json", "tokenizer_config.json"):
        (tmp_path / name).write_text(content)
    shutil.copy(good / "model" / "tokenizer.json", tmp_path)
    doors = [
        lambda: resolve(tmp_path / "config.json"),
        lambda: read_adapter(tmp_path, "a"),
        lambda: compiler.load(tmp_path),
        lambda: Tokenizer.load(tmp_path),
        lambda: DeviceProfile.load(tmp_path / "config.json"),
    ]
    for door in doors:
        with pytest.raises(PcgError, match=r"damaged|not an object|is not a|model_type"):
            door()


def test_a_long_word_is_no_file(good):
    found = load_here(Tokenizer.load(good / "model"), gather(["a" * 300 + ".b"]), ANY, LONG)
    assert len(found) == 1


def test_half_a_character_in_a_prompt(good):
    executor = compiler.compile(good / "model")
    with pytest.raises(GenerationError, match=r"lone surrogate, U\+D800, at character 5"):
        executor.generate("half \ud800", max_new_tokens=1)
    with pytest.raises(PcgError):
        executor.generate("whole", "half \ud800", max_new_tokens=1)
    assert torch.isfinite(executor.logits([1, 2])).all()
