"""GGUF files of random models, written by the package gguf: one of each architecture pcg reads."""

from __future__ import annotations

import json
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any

import gguf
import numpy as np
import torch

from pcg.formats.registry import FORMATS
from tests.support import oracle, toy_tokenizers

Kind = gguf.GGMLQuantizationType
SMALL: Mapping[str, Any] = {
    "hidden_size": 256,
    "intermediate_size": 512,
    "num_hidden_layers": 2,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "max_position_embeddings": 256,
    "vocab_size": 500,
    "bos_token_id": 0,
    "eos_token_id": 2,
}
_K_HALVES = {Kind.Q4_K: (1, 3), Kind.Q6_K: (209,)}
"""High bytes of the fp16 numbers of a block, which are set so that weights are small."""


def random_gguf(
    path: Path,
    architecture: str = "llama",
    kind_of: Callable[[str], Kind] = lambda name: Kind.Q8_0,
    tokenizer: str = "smollm",
    **changed: Any,
) -> Path:
    """Write a file of a random model with a toy tokenizer and ChatML's template.

    Args:
        kind_of: the type of a matrix, by its name in the file.
        tokenizer: tokenizer.ggml.pre of a byte-level tokenizer, or llama for SentencePiece's.
        changed: fields of the configuration.
    """
    config = {**SMALL, **changed, "model_type": architecture}
    model = oracle.random_model(config)
    layers, heads = config["num_hidden_layers"], config["num_attention_heads"]
    arch = next(key for key, name in gguf.MODEL_ARCH_NAMES.items() if name == architecture)
    names = gguf.get_tensor_name_map(arch, layers)
    writer = gguf.GGUFWriter(path, architecture)
    writer.add_context_length(config["max_position_embeddings"])
    writer.add_embedding_length(config["hidden_size"])
    writer.add_block_count(layers)
    writer.add_vocab_size(config["vocab_size"])
    writer.add_feed_forward_length(config["intermediate_size"])
    writer.add_head_count(heads)
    writer.add_head_count_kv(config["num_key_value_heads"])
    writer.add_layer_norm_rms_eps(model.config.rms_norm_eps)
    writer.add_rope_freq_base(10000.0)
    if architecture == "qwen3":
        writer.add_key_length(config["head_dim"])
        writer.add_value_length(config["head_dim"])
    if tokenizer == "llama":
        _add_sentence_piece(writer)
    else:
        _add_byte_level(writer, tokenizer)
    writer.add_chat_template(toy_tokenizers.CHATML)
    for name, parameter in model.state_dict().items():
        if name == "lm_head.weight" and config.get("tie_word_embeddings"):
            continue
        stem, suffix = name.rsplit(".", 1)
        stored, weight = f"{names.get_name(stem)}.{suffix}", parameter.numpy()
        if architecture == "llama" and ("q_proj" in name or "k_proj" in name):
            of = heads if "q_proj" in name else config["num_key_value_heads"]
            pairs = weight.reshape(of, 2, len(weight) // of // 2, -1)
            weight = pairs.swapaxes(1, 2).reshape(weight.shape)
        kind = kind_of(stored) if weight.ndim > 1 else Kind.F32
        writer.add_tensor(stored, _stored(np.ascontiguousarray(weight), kind), raw_dtype=kind)
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.write_tensors_to_file()
    writer.close()
    return path


def _stored(weight: np.ndarray, kind: Kind) -> np.ndarray:
    if kind not in _K_HALVES:
        return gguf.quants.quantize(weight, kind)
    format_ = FORMATS[kind.name.lower()]  # the package writes none of them
    size = format_.tensors(*weight.shape)["blocks"][0]
    generator = torch.Generator().manual_seed(weight.size)
    blocks = torch.randint(0, 256, size, dtype=torch.uint8, generator=generator)
    blocks.view(-1, format_.block_bytes)[:, _K_HALVES[kind]] = 6
    return blocks.numpy()


def random_adapter(path: Path, rank: int, **config: Any) -> Path:
    """Write a LoRA adapter of the attention's modules of a random Llama of whole heads."""
    writer, width = gguf.GGUFWriter(path, "llama"), config["hidden_size"]
    writer.add_type(gguf.GGUFType.ADAPTER)
    writer.add_string(gguf.Keys.Adapter.TYPE, "lora")
    writer.add_float32(gguf.Keys.Adapter.LORA_ALPHA, float(rank))
    numbers = np.random.default_rng(0)
    for layer in range(config["num_hidden_layers"]):
        for module in ("q", "k", "v", "output"):
            for part, shape in (("a", (rank, width)), ("b", (width, rank))):
                matrix = 0.02 * numbers.standard_normal(shape, dtype=np.float32)
                writer.add_tensor(f"blk.{layer}.attn_{module}.weight.lora_{part}", matrix)
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.write_tensors_to_file()
    writer.close()
    return path


def _add_byte_level(writer: gguf.GGUFWriter, pre: str) -> None:
    content = json.loads(toy_tokenizers.byte_level().to_str())
    vocab, special = content["model"]["vocab"], {t["content"] for t in content["added_tokens"]}
    tokens = sorted(vocab, key=vocab.__getitem__)
    writer.add_tokenizer_model("gpt2")
    writer.add_tokenizer_pre(pre)
    writer.add_token_list(tokens)
    writer.add_token_types([3 if token in special else 1 for token in tokens])
    writer.add_token_merges([" ".join(merge) for merge in content["model"]["merges"]])
    writer.add_bos_token_id(vocab["<|endoftext|>"])
    writer.add_eos_token_id(vocab["<|im_end|>"])
    writer.add_pad_token_id(vocab["<|endoftext|>"])
    writer.add_add_bos_token(False)


def _add_sentence_piece(writer: gguf.GGUFWriter) -> None:
    vocab = json.loads(toy_tokenizers.byte_fallback().to_str())["model"]["vocab"]
    tokens = sorted(vocab, key=vocab.__getitem__)
    writer.add_tokenizer_model("llama")
    writer.add_tokenizer_pre("default")
    writer.add_token_list(tokens)
    writer.add_token_scores([-float(index) for index in range(len(tokens))])
    writer.add_token_types([2, 3, 3, *[6] * 256, *[1] * (len(tokens) - 259)])
    writer.add_bos_token_id(1)
    writer.add_eos_token_id(2)
    writer.add_unk_token_id(0)
