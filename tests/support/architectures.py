"""Small configurations of transformers' causal LMs beside the named families of `families`."""

from __future__ import annotations

import json
import random
from collections.abc import Mapping
from typing import Any

from transformers import CONFIG_MAPPING, MODEL_FOR_CAUSAL_LM_MAPPING

from pcg.source import COMPOSITES

CAUSAL_LMS: tuple[str, ...] = tuple(
    sorted({config.model_type for config in MODEL_FOR_CAUSAL_LM_MAPPING})
)
"""Every model type of the installed transformers that has a causal LM."""

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
        "emb_dim", "embedding_dim", "input_embedding_size", "output_embedding_size", "lru_width",
        "attention_hidden_size",
    ),
    "96": (
        "intermediate_size", "ffn_dim", "dff", "n_inner", "ffn_hidden_size", "d_inner", "dim_ff",
        "intermediate_size_mlp", "dense_intermediate_size", "shared_intermediate_size",
    ),
    "48": (
        "moe_intermediate_size", "shared_expert_intermediate_size", "expert_ffn_hidden_size",
        "shared_experts_intermediate_size", "moe_shared_expert_intermediate_size",
    ),
    "32": ("q_lora_rank",),
    "24": ("qk_head_dim",),
    "4": (
        "num_attention_heads", "n_head", "n_heads", "num_heads", "num_experts",
        "num_local_experts", "n_routed_experts", "moe_num_experts", "attention_heads",
        "swa_num_attention_heads",
    ),
    "2": (
        "num_key_value_heads", "swa_num_key_value_heads", "num_experts_per_tok", "moe_topk",
        "moe_k", "num_experts_per_token", "pad_token_id",
    ),
    "1": (
        "eos_token_id", "n_group", "topk_group", "num_expert_group", "first_k_dense_replace",
        "n_shared_experts",
    ),
    "0": ("bos_token_id", "num_kv_shared_layers"),
    "8": ("rotary_dim", "qk_rope_head_dim"),
    "16": (
        "head_dim", "swa_head_dim", "dim_head", "d_head", "kv_lora_rank", "qk_nope_head_dim",
        "v_head_dim",
    ),
    "128": ("vocab_size", "vocab_size_per_layer_input"),
}  # fmt: skip
_BOUNDS: Mapping[str, tuple[str, ...]] = {
    "64": ("max_position_embeddings", "n_positions", "n_ctx", "max_seq_len"),
    "8": ("attention_chunk_size",),
    "5": ("sliding_window", "window_size"),
}
"""Sizes beyond which a sequence is attended to, or placed, differently."""
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
        name: int(size)
        for sizes in (_SIZES, _BOUNDS)
        for size, names in sizes.items()
        for name in names
        if name in known
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


_TOWER = {
    "depth": 1, "embed_dim": 32, "hidden_size": 32, "image_size": 28, "intermediate_size": 32,
    "mlp_ratio": 2, "num_attention_heads": 2, "num_heads": 2, "num_hidden_layers": 1,
    "num_layers": 1, "out_hidden_size": 64, "patch_size": 14,
}  # fmt: skip
_LATENT = (
    "axk1", "axk2", "bailing_hybrid", "deepseek_v2", "deepseek_v3", "deepseek_v32",
    "dots3_note_text", "glm4_moe_lite", "glm_moe_dsa", "hy_v4",
    "kimi_linear", "minicpm3", "sarvam_mla", "youtu",
)  # fmt: skip
_OF_KIND: Mapping[str, Mapping[str, Any]] = {
    # Latent vectors are expanded to all heads.
    **{kind: {"num_key_value_heads": 4} for kind in _LATENT},
    "cohere_compass_text": {
        "layer_types": ["sliding_attention", "full_attention"] * 2,
        "rope_parameters": {
            "sliding_attention": {"rope_type": "default", "rope_theta": 1e4},
            "full_attention": None,
        },
    },
    "bamba": {"mamba_n_heads": 8, "mamba_d_head": 16, "attn_layer_indices": [1, 3]},
    "dbrx": {
        "attn_config": {"kv_n_heads": 2, "clip_qkv": 8.0, "rope_theta": 1e4},
        "ffn_config": {"ffn_hidden_size": 96, "moe_num_experts": 4, "moe_top_k": 2},
    },
    "dots3_note": {
        "audio_config": {"adapter_out_dim": 64, "num_hidden_layers": 1},
        "vision_config": {
            **_TOWER,
            "adapter_in_dim": 32,
            "adapter_out_dim": 64,
            "mlp_layer_types": ["dense"],
        },
    },
    "dory": {  # its files have attention and MLP as layers of their own
        "layer_types": ["sliding_attention", "mlp", "full_attention", "mlp"] * 2,
        "n_input_layers": 2,
        "n_output_layers": 2,
        "n_recurrent_layers": 4,
        "num_hidden_layers": 8,
    },
    "emu3": {"vocabulary_map": {"<image>": 3}, "vq_config": {"base_channels": 32}},
    "gemma3n_text": {
        "hidden_size_per_layer_input": 8,
        "intermediate_size": [96] * 4,
        "laurel_rank": 8,
        "layer_types": ["sliding_attention", "full_attention"] * 2,
        "num_kv_shared_layers": 2,
    },
    "gemma4_text": {
        "global_head_dim": 24,
        "hidden_size_per_layer_input": 8,
        "layer_types": ["sliding_attention", "full_attention"] * 2,
        "num_kv_shared_layers": 2,
        "use_double_wide_mlp": True,
    },
    "granitemoehybrid": {
        "layer_types": ["linear_attention", "full_attention"] * 2,
        "mamba_n_heads": 8,
        "mamba_d_head": 16,
    },
    "hrm_text": {"num_layers_per_stack": 2},
    "jamba": {"attn_layer_offset": 1, "attn_layer_period": 2, "mamba_dt_rank": 8},
    "lfm2": {"layer_types": ["conv", "full_attention"] * 2},
    "lfm2_moe": {"layer_types": ["conv", "full_attention"] * 2},
    "llama4_text": {"attention_chunk_size": 8},  # far beyond any test by default
    "mamba2": {"num_heads": 8, "head_dim": 16},
    "qwen4_exp_text": {
        "indexer_budget": 8,
        "indexer_compress_ratio": 2,
        "indexer_head_dim": 16,
        "indexer_kv_heads": 1,
        "indexer_n_heads": 2,
    },
    "xmod": {"default_language": "en_XX"},
    "xlstm": {"num_blocks": 4},
    "minimax_m3_vl_text": {
        "layer_types": ["full_attention", "minimax_m3_sparse"] * 2,
        "index_n_heads": 2,
    },
    "zamba": {
        "attention_head_dim": 32,
        "attention_hidden_size": 128,
        "mamba_dt_rank": 8,
        "num_key_value_heads": 4,
    },
    "zamba2": {
        "adapter_rank": 8,
        "attention_head_dim": 32,
        "attention_hidden_size": 128,
        "hybrid_layer_ids": [1, 3],
        "mamba_d_state": 24,
        "mamba_headdim": 16,
        "num_key_value_heads": 4,
        "use_shared_attention_adapter": True,
    },
    "zaya": {"num_experts_per_tok": 1},
    "reformer": {"attn_layers": ["local", "lsh"] * 2, "axial_pos_embds_dim": [16, 48]},
}
"""Fields without which transformers cannot build the model, or builds one as no checkpoint is."""

_NEEDED: Mapping[str, Mapping[str, Any]] = {
    "gemma4_assistant": {
        "text_config": {"hidden_size_per_layer_input": 0, "vocab_size_per_layer_input": 0}
    },
}
"""Fields without which transformers' own defaults contradict one another."""


IN_OUT: Mapping[str, tuple[str, str]] = {
    "llama4_text": ("experts.gate_up_proj", "experts.down_proj"),
    "recurrent_gemma": ("rg_lru.input_gate_weight", "rg_lru.recurrent_gate_weight"),
}
"""Parameters [E, in, out] by kind, of modules without `is_transposed`: peft swaps their dims."""


def default_config(kind: str, layers: int = 4) -> dict[str, Any]:
    """The config.json of an architecture's defaults, windows and positions included, made small.

    Lists of layers have each of the default's kinds in turn. A composite's text_config is that of
    its type.
    """
    made = CONFIG_MAPPING[kind](**_NEEDED.get(kind, {}))
    own: dict[str, Any] = json.loads(made.to_json_string())
    if kind in COMPOSITES:
        own["text_config"] = default_config(made.get_text_config().model_type, layers)
        tower = own.get("vision_config") or {}
        sizes = {name: size for name, size in _TOWER.items() if type(tower.get(name)) is int}
        own["vision_config"] = {**tower, **sizes}
        return {**own, **_OF_KIND.get(kind, {}), "dtype": "float32"}
    for name in ("per_layer_config", "time_step_limit"):  # of all layers; infinite
        own.pop(name, None)
    count = next((own[name] for name in _LAYERS if own.get(name)), None)
    by_layer = {}
    for name, value in own.items():
        if isinstance(value, list) and len(value) == count:
            kinds = [json.loads(text) for text in dict.fromkeys(map(json.dumps, value))]
            by_layer[name] = (kinds * layers)[:layers]
    sizes = small_config(kind, layers) if kind not in _NEEDED else {}
    if own.get("head_dim") and own["head_dim"] == own.get("qk_rope_head_dim"):
        sizes["head_dim"] = sizes["qk_rope_head_dim"]  # of the rotary part alone
    bounds = {name: own[name] for names in _BOUNDS.values() for name in names if name in own}
    return {**own, **sizes, **bounds, **by_layer, **_OF_KIND.get(kind, {}), "dtype": "float32"}
