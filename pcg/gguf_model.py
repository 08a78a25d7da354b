"""A GGUF file as a model: its config.json, its tensors by the model's names, and its tokenizer.

Each architecture of GGUF that pcg reads is an entry of `ARCHITECTURES`. llama.cpp rotates adjacent
rows of q and k where transformers rotates the first half of a head with the second, so files of
some architectures hold the rows of q and k in another order:

    file        r0 r0' r1 r1' …        model        r0 r1 … r0' r1' …        a head's rows

`converted` writes config.json and the tokenizer's files once, into the user's cache.
"""

from __future__ import annotations

import hashlib
import json
import math
import re
import shutil
import struct
import tempfile
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from pcg.errors import UnsupportedError, WeightsError
from pcg.files import cache_folder, is_file
from pcg.gguf_file import GgufHeader, GgufTensor, read_gguf
from pcg.gguf_tokenizer import tokenizer_files
from pcg.units import shown
from pcg.version import __version__

CONFIG = "config.json"
_CONVERSION = 2
"""Raised when `converted` writes other files."""


@dataclass(frozen=True)
class Architecture:
    """An architecture of GGUF, as transformers implements it.

    Attributes:
        model_type: transformers' name.
        class_name: of the causal LM in transformers.
        permutes: True if the rows of q and k are in llama.cpp's order.
        biases: parts of names of the linear modules that have a bias.
        fields: further fields of the configuration.
    """

    model_type: str
    class_name: str
    permutes: bool = False
    biases: tuple[str, ...] = ()
    fields: tuple[tuple[str, object], ...] = ()


_PLAIN = (("attention_bias", False), ("mlp_bias", False))
ARCHITECTURES: Mapping[str, Architecture] = {
    "llama": Architecture("llama", "LlamaForCausalLM", permutes=True, fields=_PLAIN),
    "qwen2": Architecture("qwen2", "Qwen2ForCausalLM", biases=("attn_q", "attn_k", "attn_v")),
    "qwen3": Architecture("qwen3", "Qwen3ForCausalLM", fields=_PLAIN[:1]),
}
_OUTSIDE = {"token_embd": "model.embed_tokens", "output_norm": "model.norm", "output": "lm_head"}
_IN_LAYER = {
    "attn_norm": "input_layernorm",
    "attn_q": "self_attn.q_proj",
    "attn_k": "self_attn.k_proj",
    "attn_v": "self_attn.v_proj",
    "attn_output": "self_attn.o_proj",
    "attn_q_norm": "self_attn.q_norm",
    "attn_k_norm": "self_attn.k_norm",
    "ffn_norm": "post_attention_layernorm",
    "ffn_gate": "mlp.gate_proj",
    "ffn_up": "mlp.up_proj",
    "ffn_down": "mlp.down_proj",
}
_ROPE_FACTORS = "rope_freqs.weight"
_LLAMA3 = {
    "rope_type": "llama3",
    "low_freq_factor": 1.0,
    "high_freq_factor": 4.0,
    "original_max_position_embeddings": 8192,
}
"""Llama 3.1's rope, whose factors the files store in place of these numbers."""


def converted(path: Path) -> Path:
    """Return a folder with the config.json and the tokenizer of a GGUF file, written once.

    Raises:
        UnsupportedError, WeightsError: as `read_gguf`; the architecture or the tokenizer is none
            that pcg reads; or the cache cannot be written.
    """
    path = path.resolve()
    status = path.stat()
    facts = f"{__version__} {_CONVERSION} {path} {status.st_size} {status.st_mtime_ns}"
    folder = cache_folder("gguf") / hashlib.sha256(facts.encode()).hexdigest()[:32]
    if is_file(folder / CONFIG):
        return folder
    header = read_gguf(path)
    files = {CONFIG: _json(config_of(header)), **tokenizer_files(header)}
    try:
        folder.parent.mkdir(parents=True, exist_ok=True)
        beside = Path(tempfile.mkdtemp(prefix=".", dir=folder.parent))
        try:
            for name, text in files.items():
                (beside / name).write_text(text, encoding="utf-8")
            beside.rename(folder)
        except OSError:
            shutil.rmtree(beside, ignore_errors=True)
            if not is_file(folder / CONFIG):  # else another process was faster
                raise
    except OSError as error:
        raise WeightsError(
            f"the configuration and the tokenizer of {path} cannot be written to {folder}: "
            f"{error.strerror}; have XDG_CACHE_HOME name a folder of your own"
        ) from error
    return folder


def _json(content: object) -> str:
    return json.dumps(content, indent=2, ensure_ascii=False) + "\n"


# ------------------------------------------------------------------------------------------ tensors


def architecture_of(header: GgufHeader) -> Architecture:
    """Return a file's architecture. UnsupportedError: pcg does not read it; names the known."""
    name = str(header.metadata.get("general.architecture", "model of no architecture"))
    if name not in ARCHITECTURES or header.metadata.get(f"{name}.expert_count"):
        kind = f"{name} with experts" if name in ARCHITECTURES else shown(name)
        raise UnsupportedError(
            f"{header.path} is a {kind}; pcg reads GGUF files of {', '.join(ARCHITECTURES)} "
            "without experts: give the directory of the original checkpoint"
        )
    return ARCHITECTURES[name]


def tensors_of(header: GgufHeader) -> dict[str, GgufTensor]:
    """Return a file's tensors by the model's names, such as `model.layers.0.mlp.up_proj.weight`.

    UnsupportedError: a tensor has no place in the model; names it.
    """
    architecture = architecture_of(header)
    tensors = {}
    for name, tensor in header.tensors.items():
        match = re.fullmatch(r"(?:blk\.(\d+)\.)?(\w+)\.(weight|bias)", name)
        layer, part, kind = match.groups() if match else (None, "", "")
        module = (_OUTSIDE if layer is None else _IN_LAYER).get(part)
        if name == _ROPE_FACTORS:
            continue
        if module is None or (kind == "bias" and part not in architecture.biases):
            raise UnsupportedError(
                f"{header.path} has a tensor {name}, which transformers' {architecture.class_name} "
                "has not; give the directory of the original checkpoint"
            )
        within = "" if layer is None else f"model.layers.{layer}."
        tensors[f"{within}{module}.{kind}"] = tensor
    return tensors


def module_in_file(path: str) -> str | None:
    """Return the name of a linear module in files, such as blk.0.attn_q; None without one."""
    match = re.fullmatch(r"model\.layers\.(\d+)\.(.+)", path)
    names = {module: name for name, module in (_IN_LAYER if match else _OUTSIDE).items()}
    name = names.get(match[2] if match else path)
    return f"blk.{match[1]}.{name}" if match and name else name


def heads_in_other_order(header: GgufHeader, name: str) -> int:
    """Return the heads of a tensor with rows in llama.cpp's order, by the model's name, else 0."""
    if not architecture_of(header).permutes:
        return 0
    if ".self_attn.q_proj." in name:
        return int(_field(header, "attention.head_count"))
    if ".self_attn.k_proj." in name:
        return int(_kv_heads(header))
    return 0


# ----------------------------------------------------------------------------------------- config


def config_of(header: GgufHeader) -> dict[str, Any]:
    """Return a file's config.json; `quantization_config` has the format of each linear module."""
    architecture = architecture_of(header)
    tensors = tensors_of(header)
    heads, width = _field(header, "attention.head_count"), _field(header, "embedding_length")
    head_dim = header.metadata.get(_key(header, "attention.key_length"), width // heads)
    if header.metadata.get(_key(header, "rope.dimension_count"), head_dim) != head_dim:
        raise UnsupportedError(
            f"{header.path} rotates a part of its heads of {head_dim}, which its architecture in "
            "transformers does not; give the directory of the original checkpoint"
        )
    embedding = tensors.get("model.embed_tokens.weight")
    if embedding is None:
        raise WeightsError(f"{header.path} has no token_embd.weight; copy or download it again")
    config: dict[str, Any] = {
        "architectures": [architecture.class_name],
        "model_type": architecture.model_type,
        "dtype": "float32",
        "hidden_act": "silu",
        "hidden_size": width,
        "intermediate_size": _field(header, "feed_forward_length"),
        "num_hidden_layers": _field(header, "block_count"),
        "num_attention_heads": heads,
        "num_key_value_heads": _kv_heads(header),
        "head_dim": head_dim,
        "max_position_embeddings": _field(header, "context_length"),
        "rms_norm_eps": _shortest(_field(header, "attention.layer_norm_rms_epsilon")),
        "rope_parameters": _rope(header, head_dim),
        "tie_word_embeddings": "lm_head.weight" not in tensors,
        "vocab_size": embedding.shape[0],
        **dict(architecture.fields),
    }
    for name, key in (("bos", "bos"), ("eos", "eos"), ("pad", "padding")):
        if (index := header.metadata.get(f"tokenizer.ggml.{key}_token_id")) is not None:
            config[f"{name}_token_id"] = index
    formats = _formats(tensors, config["num_hidden_layers"])
    if formats:
        config["quantization_config"] = {"quant_method": "gguf", "formats": formats}
    return config


def _formats(tensors: Mapping[str, GgufTensor], layers: int) -> dict[str, Any]:
    """Return the format of each linear module and of the embedding: a name, or one a layer.

    null is a float module.
    """
    formats: dict[str, Any] = {}
    sites = [f"model.layers.{{layer}}.{module}" for module in _IN_LAYER.values()]
    for site in (*sites, "model.embed_tokens", "lm_head"):
        names = [f"{site.format(layer=layer)}.weight" for layer in range(layers)]
        stored = [tensors.get(name) for name in dict.fromkeys(names)]
        of_layers = [None if each is None or each.is_float else each.type for each in stored]
        if any(of_layers):
            formats[site] = of_layers[0] if len(set(of_layers)) == 1 else of_layers
    return formats


def _rope(header: GgufHeader, head_dim: int) -> dict[str, Any]:
    theta = _shortest(header.metadata.get(_key(header, "rope.freq_base"), 10000.0))
    scaling = header.metadata.get(_key(header, "rope.scaling.type"), "none")
    if scaling == "linear":
        factor = _shortest(_field(header, "rope.scaling.factor"))
        return {"rope_type": "linear", "rope_theta": theta, "factor": factor}
    if scaling != "none":
        raise UnsupportedError(
            f"{header.path} has rope scaling {shown(scaling)}; pcg reads linear of GGUF files: "
            "give the directory of the original checkpoint"
        )
    if _ROPE_FACTORS not in header.tensors:
        return {"rope_type": "default", "rope_theta": theta}
    stored = _floats(header, header.tensors[_ROPE_FACTORS])
    known = {**_LLAMA3, "rope_theta": theta, "factor": max(stored)}
    expected = _llama3_factors(theta, head_dim, max(stored))
    if len(stored) != len(expected) or any(
        not math.isclose(a, b, rel_tol=1e-4) for a, b in zip(stored, expected, strict=True)
    ):
        raise UnsupportedError(
            f"{header.path} scales rope by {_ROPE_FACTORS}, and not as Llama 3.1 does; give the "
            "directory of the original checkpoint"
        )
    return known


def _llama3_factors(theta: float, head_dim: int, factor: float) -> list[float]:
    """Return the divisors of the frequencies. Source: transformers, modeling_rope_utils.py."""
    positions, low, high = (
        float(_LLAMA3[name])  # type: ignore[arg-type]
        for name in ("original_max_position_embeddings", "low_freq_factor", "high_freq_factor")
    )
    factors = []
    for dim in range(0, head_dim, 2):
        turns = positions / (2 * math.pi * theta ** (dim / head_dim))
        smooth = min(1.0, max(0.0, (turns - low) / (high - low)))
        factors.append(1 / ((1 - smooth) / factor + smooth))
    return factors


def _floats(header: GgufHeader, tensor: GgufTensor) -> list[float]:
    with header.path.open("rb") as stream:
        stream.seek(tensor.offset)
        return [value for (value,) in struct.iter_unpack("<f", stream.read(tensor.size_bytes))]


def _kv_heads(header: GgufHeader) -> int:
    key = _key(header, "attention.head_count_kv")
    heads = header.metadata.get(key, _field(header, "attention.head_count"))
    if not isinstance(heads, int):
        raise UnsupportedError(
            f"{header.path} has {key}={shown(heads)}; pcg reads files with equal heads in all "
            "layers: give the directory of the original checkpoint"
        )
    return heads


def _key(header: GgufHeader, name: str) -> str:
    return f"{header.metadata['general.architecture']}.{name}"


def _field(header: GgufHeader, name: str) -> Any:
    key = _key(header, name)
    if key not in header.metadata:
        raise WeightsError(f"{header.path} has no {key} in its metadata; convert the model again")
    return header.metadata[key]


def _shortest(value: float) -> float:
    """Return the shortest decimal that fp32 rounds to a value: 1e-05 for 9.999999747378752e-06."""
    for digits in range(1, 10):
        text = f"{value:.{digits}g}"
        if struct.pack("<f", float(text)) == struct.pack("<f", value):
            return float(text)
    return value
