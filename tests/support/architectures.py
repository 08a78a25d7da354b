"""Small configurations of transformers' causal LMs beside the named families of `families`."""

from __future__ import annotations

import random
from collections.abc import Mapping
from typing import Any

from transformers import CONFIG_MAPPING

ARCHITECTURES: tuple[str, ...] = (
    "arcee", "bert-generation", "biogpt", "bitnet", "bloom", "codegen", "cohere", "cohere2",
    "cohere2_moe", "ctrl", "cwm", "doge", "ernie4_5", "exaone4", "falcon", "flex_olmo", "flint",
    "gemma", "gemma2", "gemma3_text", "glm", "glm4", "gpt-sw3", "gpt2", "gpt_bigcode", "gpt_neo",
    "gpt_neox", "gptj", "granite", "granite_swa", "helium", "hunyuan_v1_dense", "hunyuan_v1_moe",
    "hyperclovax", "internlm3", "iquestcoder", "jais2", "lfm2", "llama", "mellum", "ministral",
    "ministral3", "mistral", "mixtral", "modernbert-decoder", "moshi", "mpt", "nanochat",
    "nemotron", "olmo", "olmo2", "olmo3", "olmoe", "opt", "persimmon", "phi", "phi3",
    "phi4_multimodal", "qwen2", "qwen2_moe", "qwen3",
)  # fmt: skip
"""Model types of transformers that pcg compiles."""

_SIZES: Mapping[str, tuple[str, ...]] = {
    "64": (
        "hidden_size", "d_model", "n_embd", "n_embed", "embedding_size", "word_embed_proj_dim",
        "max_position_embeddings", "n_positions", "n_ctx", "max_seq_len",
    ),
    "96": ("intermediate_size", "ffn_dim", "dff", "n_inner", "ffn_hidden_size"),
    "48": ("moe_intermediate_size", "shared_expert_intermediate_size"),
    "4": (
        "num_attention_heads", "n_head", "n_heads", "num_heads", "num_experts",
        "num_local_experts", "n_routed_experts",
    ),
    "2": ("num_key_value_heads", "num_experts_per_tok", "moe_topk", "pad_token_id"),
    "1": ("eos_token_id", "n_group", "topk_group", "first_k_dense_replace", "n_shared_experts"),
    "0": ("bos_token_id", "num_kv_shared_layers"),
    "8": ("rotary_dim", "attention_chunk_size"),
    "5": ("sliding_window", "window_size"),
    "16": ("head_dim",),
    "128": ("vocab_size",),
}  # fmt: skip
_LAYERS = ("num_hidden_layers", "n_layer", "n_layers", "num_layers")
_BY_LAYER = ("layer_types", "mlp_layer_types")
_FLAGS = (
    "attention_bias", "mlp_bias", "qk_layernorm", "qkv_bias", "tie_word_embeddings", "use_bias",
    "use_parallel_residual", "use_qk_norm", "use_qkv_bias",
)  # fmt: skip


def small_config(kind: str, layers: int, draw: random.Random | None = None) -> dict[str, Any]:
    """The config.json of a small model; drawn, its flags and heads are any."""
    made = CONFIG_MAPPING[kind]()
    known = {name for name in vars(made) if name not in made.attribute_map}
    fields: dict[str, Any] = {
        name: int(size) for size, names in _SIZES.items() for name in names if name in known
    }
    fields |= {name: layers for name in _LAYERS if name in known}
    fields |= {name: None for name in _BY_LAYER if name in known}
    if "is_decoder" in known:
        fields["is_decoder"] = True
    if kind == "gpt_neo":
        fields["attention_types"] = [[["global"], layers]]
    if draw is not None:
        for name in _FLAGS:
            if name in known and draw.random() < 0.3:
                fields[name] = draw.random() < 0.5
        if "num_key_value_heads" in known:
            fields["num_key_value_heads"] = draw.choice([1, 2, 4])
    return {"model_type": kind, **fields}
