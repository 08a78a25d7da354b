"""Small random configurations of every family, and of the variants that change its graph.

A configuration has fp32 weights and any number of layers; its positions outlast every test.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from typing import Any

from pcg.peft.targets import FAMILY_TARGETS

VOCABULARY = 128
WINDOW = 5
"""Sliding windows are shorter than the test sequences."""

_TOKENS = {"bos_token_id": 0, "eos_token_id": 1, "pad_token_id": 2}
_LLAMA = {
    "hidden_size": 64,
    "intermediate_size": 96,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "vocab_size": VOCABULARY,
    "max_position_embeddings": 64,
    **_TOKENS,
}
_GPT = {"n_embd": 64, "n_head": 4, "vocab_size": VOCABULARY, "n_positions": 64, **_TOKENS}


def _of(base: Mapping[str, Any], **changes: Any) -> dict[str, Any]:
    return {**base, **changes}


@dataclass(frozen=True)
class Family:
    """One architecture with one choice of its options.

    Attributes:
        name: of the test case; the family, and the variant behind a dash.
        model_type: of config.json.
        fields: of config.json, but for the layers.
        usual: modules that LoRA usually goes to; what peft takes by default, where it knows.
        layers_field: name of the number of layers.
        per_layer: fields that hold one entry a layer, made from the number of layers.
        excluded: linear modules that an adapter on all-linear leaves out.
        parameters: parameters that an adapter on all-linear adapts, too, for lack of peft's names.
        extra: a variant whose numbers are checked with 2 layers in the slow run only.
    """

    name: str
    model_type: str
    fields: Mapping[str, Any]
    usual: tuple[str, ...] = ()
    layers_field: str = "num_hidden_layers"
    per_layer: Mapping[str, Callable[[int], Any]] = field(default_factory=dict)
    excluded: tuple[str, ...] = ()
    extra: bool = False
    parameters: tuple[str, ...] = ()

    def config(self, layers: int, **changes: Any) -> dict[str, Any]:
        """Its config.json."""
        made = {name: make(layers) for name, make in self.per_layer.items()}
        return {
            "model_type": self.model_type,
            **self.fields,
            self.layers_field: layers,
            **made,
            **changes,
        }

    @property
    def usual_targets(self) -> tuple[str, ...]:
        return self.usual or FAMILY_TARGETS[self.model_type]

    def __str__(self) -> str:
        return self.name


def _alternate(*kinds: str) -> Callable[[int], list[str]]:
    return lambda layers: [kinds[i % len(kinds)] for i in range(layers)]


def _full_then_sliding(layers: int) -> list[str]:
    return ["full_attention"] + ["sliding_attention"] * (layers - 1)


_SCALED_ROPE = {
    "rope_type": "llama3",
    "rope_theta": 10000.0,
    "factor": 8.0,
    "low_freq_factor": 1.0,
    "high_freq_factor": 4.0,
    "original_max_position_embeddings": 16,
}
_MIXED = {"layer_types": _alternate("sliding_attention", "full_attention")}
_QV = ("q_proj", "v_proj")
_OPT = {
    "hidden_size": 64,
    "ffn_dim": 96,
    "num_attention_heads": 4,
    "vocab_size": VOCABULARY,
    "max_position_embeddings": 64,
    "word_embed_proj_dim": 64,
    **_TOKENS,
}
_EXPERTS = {"num_experts": 4, "num_experts_per_tok": 2, "moe_intermediate_size": 48}
_NEOX = {key: value for key, value in _LLAMA.items() if key != "num_key_value_heads"}
_FALCON = {"hidden_size": 64, "num_attention_heads": 4, "vocab_size": VOCABULARY, **_TOKENS}
_MPT = {"d_model": 96, "n_heads": 6, "vocab_size": VOCABULARY, "max_seq_len": 64, **_TOKENS}
_BLOOM = {"hidden_size": 96, "n_head": 6, "vocab_size": VOCABULARY, **_TOKENS}
_GEMMA = _of(_LLAMA, head_dim=24, query_pre_attn_scalar=20, sliding_window=WINDOW)

_DELTA = {
    "linear_num_value_heads": 4,
    "linear_num_key_heads": 2,
    "linear_key_head_dim": 16,
    "linear_value_head_dim": 24,
    "head_dim": 24,
}
_LINEAR_THEN_FULL = {"layer_types": _alternate("linear_attention", "full_attention")}
_LATENT = _of(
    _LLAMA,
    num_key_value_heads=4,
    q_lora_rank=32,
    kv_lora_rank=24,
    qk_nope_head_dim=16,
    qk_rope_head_dim=8,
    v_head_dim=20,
)
_GROUPED = {
    "n_routed_experts": 8,
    "moe_intermediate_size": 48,
    "n_group": 4,
    "topk_group": 2,
    "num_experts_per_tok": 3,
}
_MLA = ("q_b_proj", "kv_b_proj")
_MAMBA = {"mamba_n_heads": 8, "mamba_d_head": 16, "mamba_n_groups": 2, "mamba_d_state": 24}
_OUT = ("out_proj",)
"""Modules of Mamba layers that peft does not adapt."""

_PER_LAYER = {
    "head_dim": 8,
    "hidden_size_per_layer_input": 8,
    "sliding_window": WINDOW,
    "vocab_size_per_layer_input": VOCABULARY,
}
"""Embeddings of each layer."""
_SHARING = {**_MIXED, "num_kv_shared_layers": lambda layers: layers // 3}
"""The last of three or more layers reads keys and values of another."""

FAMILIES: tuple[Family, ...] = (
    Family("llama2", "llama", _of(_LLAMA, num_key_value_heads=4)),
    Family("llama3", "llama", _of(_LLAMA, rope_theta=500000.0)),
    Family("llama3.1", "llama", _of(_LLAMA, rope_scaling=_SCALED_ROPE)),
    Family("llama3.2", "llama", _of(_LLAMA, rope_scaling=_SCALED_ROPE, tie_word_embeddings=True)),
    Family("llama-biases", "llama", _of(_LLAMA, attention_bias=True, mlp_bias=True), extra=True),
    Family("mistral", "mistral", _of(_LLAMA, sliding_window=None), extra=True),
    Family("mistral-window", "mistral", _of(_LLAMA, sliding_window=WINDOW)),
    Family("qwen2", "qwen2", _LLAMA),
    Family(
        "qwen2.5-windows",
        "qwen2",
        _of(_LLAMA, use_sliding_window=True, sliding_window=WINDOW, max_window_layers=1),
    ),
    Family(
        "qwen2.5-layer_types",
        "qwen2",
        _of(_LLAMA, use_sliding_window=True, sliding_window=WINDOW),
        per_layer=_MIXED,
        extra=True,
    ),
    Family("qwen3", "qwen3", _of(_LLAMA, head_dim=24)),
    Family("opt", "opt", _OPT),
    Family("opt-post_norm", "opt", _of(_OPT, do_layer_norm_before=False)),
    Family(
        "opt-projected",
        "opt",
        _of(_OPT, word_embed_proj_dim=32),
        excluded=("project_in", "project_out"),
        extra=True,
    ),
    Family("gpt2", "gpt2", _GPT, layers_field="n_layer"),
    Family(
        "gpt2-scaled_by_layer",
        "gpt2",
        _of(_GPT, scale_attn_by_inverse_layer_idx=True),
        layers_field="n_layer",
    ),
    Family("gptj", "gptj", _of(_GPT, rotary_dim=8), layers_field="n_layer"),
    Family("gpt_neox", "gpt_neox", _of(_NEOX, rotary_pct=0.25)),
    Family("gpt_neox-serial", "gpt_neox", _of(_NEOX, use_parallel_residual=False), extra=True),
    Family("gpt_bigcode", "gpt_bigcode", _GPT, layers_field="n_layer"),
    Family("gpt_bigcode-mha", "gpt_bigcode", _of(_GPT, multi_query=False), layers_field="n_layer"),
    Family("starcoder2", "starcoder2", _of(_LLAMA, sliding_window=WINDOW), _QV),
    Family(
        "granite",
        "granite",
        _of(
            _LLAMA,
            attention_multiplier=0.3,
            embedding_multiplier=1.5,
            residual_multiplier=0.7,
            logits_scaling=2.0,
        ),
        _QV,
    ),
    Family("phi3", "phi3", _LLAMA, ("qkv_proj", "gate_up_proj")),
    Family("phi3-partial", "phi3", _of(_LLAMA, partial_rotary_factor=0.5), ("o_proj",), extra=True),
    Family("phi", "phi", _of(_LLAMA, num_key_value_heads=4), extra=True),
    Family("gemma2", "gemma2", _GEMMA),
    Family("gemma3", "gemma3_text", _GEMMA, per_layer={"layer_types": _full_then_sliding}),
    Family(
        "gemma3n",
        "gemma3n_text",
        _of(
            _LLAMA,
            **_PER_LAYER,
            laurel_rank=8,
        ),
        _QV,
        per_layer={
            **_SHARING,
            "activation_sparsity_pattern": lambda layers: [0.5] + [0.0] * (layers - 1),
            "intermediate_size": lambda layers: [96] * layers,
        },
        excluded=tuple(f"altup_unembed_projections.{i}" for i in range(3)),
        extra=True,
    ),
    Family(
        "gemma4",
        "gemma4_text",
        _of(_LLAMA, **_PER_LAYER, global_head_dim=24, use_double_wide_mlp=True),
        _QV,
        per_layer=_SHARING,
    ),
    Family("falcon-7b", "falcon", _FALCON),
    Family("falcon-40b", "falcon", _of(_FALCON, num_kv_heads=2, new_decoder_architecture=True)),
    Family("falcon-mha", "falcon", _of(_FALCON, multi_query=False, bias=True), extra=True),
    Family(
        "falcon-serial", "falcon", _of(_FALCON, parallel_attn=False, multi_query=False), extra=True
    ),
    Family("mpt", "mpt", _MPT, layers_field="n_layers"),
    Family("bloom", "bloom", _BLOOM, layers_field="n_layer"),
    Family(
        "bloom-post_residual",
        "bloom",
        _of(_BLOOM, apply_residual_connection_post_layernorm=True),
        layers_field="n_layer",
        extra=True,
    ),
    Family("cohere", "cohere", _of(_LLAMA, logit_scale=0.5), _QV),
    Family("cohere-qk_norm", "cohere", _of(_LLAMA, use_qk_norm=True), _QV),
    Family("olmo2", "olmo2", _LLAMA, _QV),
    Family("mixtral", "mixtral", _of(_LLAMA, num_local_experts=4), _QV),
    Family("qwen3_moe", "qwen3_moe", _of(_LLAMA, **_EXPERTS), _QV, extra=True),
    Family(
        "lfm2",
        "lfm2",
        _of(_LLAMA, block_auto_adjust_ff_dim=False),
        ("in_proj", "q_proj", "w1"),
        per_layer={"layer_types": _alternate("conv", "full_attention")},
    ),
    Family(
        "lfm2-biases",
        "lfm2",
        _of(_LLAMA, block_auto_adjust_ff_dim=False, conv_bias=True, conv_L_cache=6),
        ("in_proj", "q_proj", "w1"),
        per_layer={"layer_types": _alternate("full_attention", "conv")},
        extra=True,
    ),
    Family(
        "qwen3.5",
        "qwen3_5_text",
        _of(_LLAMA, **_DELTA),
        ("in_proj_qkv", "in_proj_a", "q_proj"),
        per_layer=_LINEAR_THEN_FULL,
    ),
    Family(
        "qwen3_next",
        "qwen3_next",
        _of(_LLAMA, **_DELTA, **_EXPERTS, shared_expert_intermediate_size=48),
        ("in_proj_qkvz", "in_proj_ba", "q_proj"),
        per_layer=_LINEAR_THEN_FULL,
        extra=True,
    ),
    Family(
        "mamba",
        "mamba",
        {
            "hidden_size": 64,
            "state_size": 8,
            "time_step_rank": 8,
            "residual_in_fp32": False,
            "vocab_size": VOCABULARY,
            **_TOKENS,
        },
        ("in_proj", "x_proj"),
        excluded=_OUT,
    ),
    Family(
        "mamba2",
        "mamba2",
        {
            "hidden_size": 64,
            "num_heads": 8,
            "head_dim": 16,
            "state_size": 24,
            "n_groups": 2,
            "residual_in_fp32": False,
            "vocab_size": VOCABULARY,
            **_TOKENS,
        },
        ("in_proj",),
        excluded=_OUT,
    ),
    Family(
        "bamba",
        "bamba",
        _of(_LLAMA, **_MAMBA),
        ("in_proj", "q_proj"),
        per_layer={"attn_layer_indices": lambda layers: [1]},
        excluded=_OUT,
        extra=True,
    ),
    Family(
        "falcon_h1",
        "falcon_h1",
        _of(_LLAMA, **_MAMBA, mamba_d_ssm=128, ssm_multipliers=[0.5, 0.7, 0.9, 1.1, 1.3]),
        ("in_proj", "q_proj"),
        excluded=_OUT,
    ),
    Family(
        "nemotron_h",
        "nemotron_h",
        _of(
            _LLAMA, head_dim=24, mamba_num_heads=8, mamba_head_dim=16, n_groups=2, ssm_state_size=24
        ),
        ("in_proj", "q_proj"),
        per_layer={"layers_block_type": _alternate("mamba", "attention", "mlp")},
        excluded=_OUT,
    ),
    Family(
        "granite4",
        "granitemoehybrid",
        _of(_LLAMA, **_MAMBA, num_local_experts=0, shared_intermediate_size=96),
        ("in_proj", "q_proj"),
        per_layer=_LINEAR_THEN_FULL,
        excluded=_OUT,
    ),
    Family(
        "gpt_oss",
        "gpt_oss",
        _of(
            _LLAMA,
            num_local_experts=4,
            num_experts_per_tok=2,
            head_dim=16,
            sliding_window=WINDOW,
        ),
        _QV,
        parameters=("mlp.experts.gate_up_proj", "mlp.experts.down_proj", "router.weight"),
    ),
    Family(
        "glm4_moe",
        "glm4_moe",
        _of(_LLAMA, **_GROUPED, first_k_dense_replace=1, head_dim=16),
        _QV,
    ),
    Family(
        "ernie4_5_moe",
        "ernie4_5_moe",
        _of(_LLAMA, moe_num_experts=4, moe_k=2, moe_intermediate_size=48, moe_layer_start_index=1),
        _QV,
        extra=True,
    ),
    Family(
        "minimax_m2",
        "minimax_m2",
        _of(_LLAMA, num_local_experts=4, num_experts_per_tok=2, head_dim=16, rotary_dim=8),
        _QV,
        extra=True,
    ),
    Family("deepseek_v3", "deepseek_v3", _of(_LATENT, **_GROUPED, first_k_dense_replace=1), _MLA),
    Family(
        "deepseek_v2",
        "deepseek_v2",
        _of(_LATENT, **_GROUPED, topk_method="group_limited_greedy", first_k_dense_replace=1),
        _MLA,
        extra=True,
    ),
    Family("glm4_moe_lite", "glm4_moe_lite", _of(_LATENT, **_GROUPED), _MLA, extra=True),
    Family("minicpm3", "minicpm3", _LATENT, _MLA, extra=True),
    Family("stablelm", "stablelm", _LLAMA),
    Family("stablelm-parallel", "stablelm", _of(_LLAMA, use_parallel_residual=True), extra=True),
    Family("stablelm-qk_norm", "stablelm", _of(_LLAMA, qk_layernorm=True, use_qkv_bias=True)),
)

KIMI_DELTA = Family(
    "kimi_linear-delta",
    "kimi_linear",
    _of(_LLAMA, linear_num_heads=4, linear_head_dim=16),
    ("q_proj", "f_a_proj", "g_b_proj"),
    per_layer={
        "layer_types": _alternate("linear_attention"),
        "mlp_layer_types": _alternate("dense"),
    },
)
"""Kimi's delta layers alone, of which transformers generates nothing."""

BY_NAME: Mapping[str, Family] = {family.name: family for family in FAMILIES}
