"""Weights of a base: held once, published, those of the client's files, and saved programs."""

import mmap
import os
import shutil
from pathlib import Path

import pytest
import torch
from safetensors.torch import load_file, save_file
from transformers import LlamaConfig, LlamaForCausalLM

import pcg
import pcg.compiler as compiler
from pcg import LoraConfig
from pcg.errors import PcgError, SplitError
from pcg.split.base.base_executor import BaseExecutor
from pcg.split.base.shared_base import SharedBase
from pcg.split.client import connect as connecting
from pcg.split.shared_memory import PublishedTensors, SharedMemory, published_tensor
from tests.support import oracle, serving
from tests.support.families import BY_NAME
from tests.support.live_tensors import live_bytes, new_tensors, reached
from tests.support.split_base import EXAMPLES, KEY, PROMPTS, listening_base, running_base, undivided

pytestmark = pytest.mark.skipif(not hasattr(os, "memfd_create"), reason="needs Linux")
GIVEN = {
    "small": torch.arange(7, dtype=torch.float64),
    "large": torch.arange(3 * 4000, dtype=torch.bfloat16).view(3, 4000),
    "last": torch.randn(5, 2),
}


def test_a_published_tensor_is_mapped_and_what_a_client_writes_is_its_own():
    published = PublishedTensors(GIVEN)
    for name, tensor in GIVEN.items():
        place = published.place(published.tensors[name])
        found = published_tensor(place, tensor.dtype, tuple(tensor.shape))
        assert torch.equal(found, tensor)
        found.zero_()
        assert torch.equal(published.tensors[name], tensor)
        assert torch.equal(published_tensor(place, tensor.dtype, tuple(tensor.shape)), tensor)
    assert published.place(torch.ones(3)) is None
    published.close()


def test_nobody_can_write_what_was_published():
    published = PublishedTensors(GIVEN)
    place = published.place(published.tensors["last"])
    descriptor = os.open(f"/proc/self/fd/{place['descriptor']}", os.O_RDWR)
    with pytest.raises(PermissionError):
        mmap.mmap(descriptor, place["bytes"])
    for change in (lambda: os.write(descriptor, b"0"), lambda: os.ftruncate(descriptor, 0)):
        with pytest.raises(PermissionError):
            change()
    os.close(descriptor)
    published.close()


@pytest.mark.parametrize(
    ("change", "message"),
    [
        ({"at": 2**30}, "is not in memory"),
        ({"at": 3}, "is not in memory"),
        ({"at": -64}, "is no place"),
        ({"at": True}, "is no place"),
        ({"process": "../1"}, "is no place"),
        ({"bytes": 4096 * 1000}, "bytes, not"),
        ({"descriptor": 10**6}, "cannot be mapped"),
    ],
)
def test_an_impossible_place_is_refused(change, message):
    published = PublishedTensors(GIVEN)
    place = {**(published.place(published.tensors["last"]) or {}), **change}
    with pytest.raises(SplitError, match=message):
        published_tensor(place, torch.float32, (5, 2))
    published.close()


@pytest.mark.parametrize("kind", ["file", "unsealed"])
def test_no_file_of_the_users_is_opened_for_a_base(tmp_path, kind):
    secret = tmp_path / "secret"
    secret.write_bytes(bytes(mmap.PAGESIZE))
    if kind == "file":
        descriptor = os.open(secret, os.O_RDWR)
    else:
        descriptor = os.memfd_create("pcg-base")
        os.ftruncate(descriptor, mmap.PAGESIZE)
    place = {"process": os.getpid(), "descriptor": descriptor, "bytes": mmap.PAGESIZE, "at": 0}
    try:
        with pytest.raises(SplitError, match="cannot be mapped"):
            published_tensor(place, torch.float32, (5, 2))
        with pytest.raises(OSError, match="no memory of a base"):
            SharedMemory.attach(os.getpid(), descriptor, mmap.PAGESIZE)
    finally:
        os.close(descriptor)
    assert secret.read_bytes() == bytes(mmap.PAGESIZE)


@pytest.mark.parametrize("transport", ["shared-memory", "tcp"])
def test_clients_share_a_bases_embedding_by_memory_alone(transport, monkeypatch):
    model = oracle.random_model(BY_NAME["llama3"].config(1))
    expected = compiler.compile(model, verify=False).logits([5, 6, 7])
    monkeypatch.setattr("pcg.split.base.base_executor.LEAST_BYTES", 2048)
    with (
        listening_base(compiler.compile(model, verify=False, packed_weights=False)) as where,
        pcg.connect(where, api_key=KEY, transport=transport) as split,
    ):
        assert oracle.relative_error(split.logits([5, 6, 7]), expected) < 1e-5
        mapped = Path("/proc/self/maps").read_text().count("memfd:pcg-base")
        assert mapped == (2 if transport == "shared-memory" else 1)  # one is the base's


Q = "model.layers.0.self_attn.q_proj.weight"


def test_new_adapters_leave_the_weights_where_a_base_has_them():
    sizes = {"hidden_size": 256, "intermediate_size": 512, "vocab_size": 200}
    model = LlamaForCausalLM(LlamaConfig(**sizes, num_hidden_layers=2, num_attention_heads=4))
    grown = dict[str, int]()
    with new_tensors() as live:
        whole = compiler.compile(model, verify=False, packed_weights=False)
        base = BaseExecutor(whole)  # as that of `pcg serve --split-port`
        bound = live_bytes(live())
        # What serving multiplies by as one differs: q, k and v, or some of them.
        for targets in (["k_proj"], ["q_proj", "v_proj"], ["up_proj"]):
            name = " ".join(targets)
            whole.add_adapter(name, pcg.LoraConfig(r=1, target_modules=targets))
            whole.generate([[3, 4, 5]], name, max_new_tokens=2)
            grown[name] = live_bytes(live()) - bound
    assert bound >= base.size_bytes
    assert max(grown.values()) < base.multiplied[Q].nbytes, grown


def test_clients_have_no_weights_to_share():
    model = oracle.random_model(BY_NAME["llama3"].config(1))
    whole = compiler.compile(model, verify=False)
    with (
        running_base(whole) as base,
        base.connect(cut="linear") as split,
        split.engine().start() as engine,
        pytest.raises(SplitError, match="leave split_port out"),
    ):
        SharedBase(split, engine)


NORM = "model.norm.weight"
EMBEDDING = "model.embed_tokens.weight"
UP = "model.layers.1.mlp.up_proj.weight"


@pytest.mark.parametrize("changed", [(), (NORM,), (UP,), (EMBEDDING, NORM)])
def test_files_are_those_of_the_base(tmp_path, changed):
    own = shutil.copytree(serving.model_directory(), tmp_path / "own")
    (file,) = own.glob("*.safetensors")
    tensors = load_file(file)
    for name in changed:
        tensors[name].view(-1)[7].neg_()  # of one element, one bit
    save_file(tensors, file, {"format": "pt"})
    whole = pcg.compile(serving.model_directory())
    with running_base(whole) as base:
        if not changed:
            with base.connect(model=own) as split:
                assert split.generate([[5, 6]], max_new_tokens=1)
            return
        rest = f" and {len(changed) - 1} more" if len(changed) > 1 else ""
        with pytest.raises(SplitError, match=f"differ in {changed[0]}{rest} of"):
            base.connect(model=own)
        assert base.loop.clients <= 1


RECIPE = LoraConfig(r=2, target_modules=["q_proj", "v_proj"])


@pytest.fixture(scope="module")
def whole():
    return undivided("llama3", 2)


@pytest.fixture(scope="module")
def base(whole):
    with running_base(whole) as base:
        yield base


@pytest.fixture(scope="module")
def saved(base, tmp_path_factory):
    folder = tmp_path_factory.mktemp("saved") / "program"
    with base.connect(peft={"x": RECIPE}, link="5,1") as client:
        client.save_program(folder)
    return folder


def results(client):
    client.finetune(EXAMPLES, "x", max_steps=2, learning_rate=0.1)
    done = client.generate(PROMPTS, "x", max_new_tokens=4, temperature=0)
    return [list(one.token_ids) for one in done], client.adapters["x"].tensors


def test_a_loaded_program_is_not_compiled_and_computes_the_same(base, saved, monkeypatch):
    with base.connect(peft={"x": RECIPE}, link="5,1") as client:
        tokens, trained = results(client)
        calls = client.caller.moved.calls
    monkeypatch.setattr(connecting, "compile_program", None)
    with base.connect(peft={"x": RECIPE}, link="5,1", program=saved) as client:
        again, theirs = results(client)
        assert client.caller.moved.calls <= calls  # the searched cut, too
    assert again == tokens
    assert all(map(torch.equal, theirs, trained))


@pytest.mark.parametrize(
    ("given", "message"),
    [
        ({"cut": "linear"}, "each product has to be a call"),
        ({"privacy": "base"}, "each product has to be a call"),
        ({"model": {"model_type": "llama"}}, "a program has its model"),
        ({"peft": "lora"}, "has its recipes"),
        ({"memory_budget": 0.5}, "leave memory_budget out"),
        ({"program": "nowhere"}, "nowhere"),
    ],
)
def test_what_a_program_does_not_do_is_refused(base, saved, given, message):
    with pytest.raises(PcgError, match=message):
        base.connect(**{"program": saved, **given})


def test_a_program_of_another_model_is_refused(saved):
    other = compiler.compile(oracle.random_model(BY_NAME["llama3"].config(1)), verify=False)
    with running_base(other) as base, pytest.raises(PcgError, match="num_hidden_layers=2, not 1"):
        base.connect(program=saved)


LENGTHS = (100, 2500)


def test_a_base_has_nothing_of_a_context_however_long_it_is(monkeypatch):
    config = {**BY_NAME["llama3"].config(1), "max_position_embeddings": 4096}
    model = oracle.random_model(config)
    whole = compiler.compile(model, verify=False, packed_weights=False)
    calls = []
    held = []
    with running_base(whole) as base, base.connect(link="lan") as split:
        run = base.loop.base.run

        def watched(piece, inputs):
            found = run(piece, inputs)
            calls.append((len(found[0]), sum(one.nbytes for one in (*found, *inputs))))
            return found

        monkeypatch.setattr(base.loop.base, "run", watched)
        in_flight = []
        for length in LENGTHS:
            prompt = [5 + index % 90 for index in range(length)]
            calls.clear()
            done = split.generate([prompt], max_new_tokens=3, temperature=0, ignore_eos=True)
            assert list(done[0].token_ids) == oracle.greedy(model, prompt, 3)
            held.append(live_bytes(reached([base.loop], [])))
            assert max(rows for rows, _ in calls) == length
            decoding = calls[-2 * 3 :]  # a layer takes two calls, and the head one
            assert {rows for rows, _ in decoding} == {1}
            in_flight.append([size for _, size in decoding])
    assert in_flight[0] == in_flight[1]  # a token takes the same after any context
    assert held[0] == held[1]
