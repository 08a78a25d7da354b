"""The causes for which pcg refuses to compile a causal LM, in the words of who knows the model.

A refusal of the tracer names an operator and a module, which are far from the cause: "aten.copy_ in
model.layers.0.self_attn" of multi-head latent attention. A cause is found by a field of the
configuration that shows it, or by the refusal, and is told before them. docs/models.md lists the
causes and their models; `python -m tests.support.model_table` writes that part of it.
"""

from __future__ import annotations

import json
import re
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

from pcg.errors import PcgError

_MOST_DETAIL = 200
"""Characters of a tracer's own refusal that stay in a message of one line."""


@dataclass(frozen=True)
class Cause:
    """A cause for which models are refused.

    Attributes:
        name: the cause, which a refusal's message contains; no other cause's name contains it.
        why: the reason in a sentence's second half.
        fields: a pattern of the configuration, as JSON with sorted keys, that shows it.
        refusal: a pattern of a tracer's refusal that shows it.
    """

    name: str
    why: str
    fields: str = ""
    refusal: str = ""

    def is_shown(self, config: str, refusal: str) -> bool:
        """Return whether a configuration or a refusal shows the cause."""
        return any(
            pattern and re.search(pattern, text)
            for pattern, text in ((self.fields, config), (self.refusal, refusal))
        )


ENCODER_DECODER = Cause("encoder-decoder", "pcg compiles decoder-only causal LMs")
MULTIMODAL = Cause(
    "more than a language model",
    "pcg compiles its text_config alone",
    fields=r'"vision_config": \{',
)
LENGTH_DEPENDENT_ROPE = Cause(
    "rotary frequencies that change with the length",
    "pcg does rope types that are a function of the position",
    refusal=r"aten\.max\.default in \S*rotary",
)

CAUSES: tuple[Cause, ...] = (
    ENCODER_DECODER,
    LENGTH_DEPENDENT_ROPE,
    Cause(
        "two attentions in one layer",
        "the KV cache has one entry for each layer and token",
    ),
    Cause(
        "sparse attention",
        "a token attends to tokens that are computed; pcg has causal attention to all or a window",
        fields=r'"index_topk(_blocks)?": [1-9]|"attention_type": "block_sparse"|"lsh"',
    ),
    Cause(
        "recurrent or convolutional state",
        "pcg compiles models that mix tokens by attention alone",
        fields=r'"linear_attention"',
        refusal=r"mixes tokens by aten\.|\d times on \d+ tokens, in a loop",
    ),
    Cause(
        "multi-head latent attention",
        "keys and values are expanded from a latent vector that the cache would hold",
        fields=r'"kv_lora_rank": [1-9]',
    ),
    Cause(
        "chunked attention",
        "a token attends within its chunk; pcg has causal attention to all or a window",
        fields=r'"chunked_attention"',
    ),
    Cause(
        "per-layer input embeddings",
        "each layer reads its slice of a second embedding of the tokens",
        fields=r'"hidden_size_per_layer_input": [1-9]',
    ),
    Cause(
        "experts in another form",
        "pcg's experts are down(silu(gate) * up), without biases",
        fields=r'"moe_num_experts": [1-9].*"moe_top_k"',
        refusal=r"its experts have biases|takes experts that are down|experts\.router",
    ),
    Cause(
        "expert routing by groups",
        "experts are chosen within the best groups; pcg's routers go by scores alone",
        fields=r'"topk_group": [1-9]',
    ),
    Cause(
        "expert routing by corrected scores",
        "experts are chosen by corrected scores and weighted by plain ones",
        refusal=r"aten\.gather\.default in \S*(gate|router)",
    ),
    Cause(
        "attention to later tokens",
        "pcg compiles causal LMs",
        fields=r'"attn_type": "bi"|"causal": false',
        refusal="attends to later tokens",
    ),
    Cause(
        "embeddings of token types",
        "an encoder run as a decoder; pcg's models read tokens and positions alone",
        fields=r'"type_vocab_size": \d',
    ),
    MULTIMODAL,
    Cause(
        "layers that run several times",
        "the KV cache has one entry for each layer and token",
        fields=r'"H_cycles": \d',
    ),
    Cause(
        "patches of bytes",
        "one transformer reads bytes, another one patches of them",
        fields=r'"patcher_config": \{',
    ),
    Cause(
        "an attention bias computed from the tokens",
        "pcg's attention has masks, windows and ALiBi, which depend on positions alone",
        refusal="its scores depend on a weight",
    ),
    Cause(
        "an attention in another form",
        "pcg has causal attention, windows and ALiBi",
        refusal="has an attention that pcg cannot raise",
    ),
    Cause(
        "positions computed from the tokens",
        "pcg gives each token its position",
        refusal=r"in \S*embed_positions",
    ),
    Cause(
        "a computation that changes with the number of tokens",
        "pcg's graphs are the same for every length",
        refusal="what it computes changes with the number of tokens",
    ),
    Cause(
        "a branch on the values of tensors",
        "pcg's graphs have no branches",
        refusal="it branches on the values of tensors",
    ),
    Cause(
        "an operator outside the table",
        "pcg compiles operators that treat each token by itself",
        refusal=r"not in the operator table",
    ),
)
"""Every cause, those first that explain more; the first that is shown is told."""


def cause_of(message: str) -> Cause | None:
    """Return the cause that a refusal's message names."""
    return next((cause for cause in CAUSES if cause.name in message), None)


def with_cause(error: PcgError, name: str, config: Mapping[str, Any]) -> PcgError:
    """Return a refusal of the tracer that names its cause; the refusal itself if none is known.

    Args:
        error: the refusal, of a class that is made from its message.
        name: the model's type or class.
        config: the contents of its config.json.
    """
    told = str(error)
    if cause_of(told) is not None:
        return error
    fields = json.dumps(config, sort_keys=True, default=str)
    cause = next((cause for cause in CAUSES if cause.is_shown(fields, told)), None)
    if cause is None:
        return error
    detail = told.removeprefix("cannot trace ").removeprefix(f"{name}: ").partition("; ")[0]
    detail = detail if len(detail) <= _MOST_DETAIL else f"{detail[: _MOST_DETAIL - 1]}…"
    return type(error)(f"cannot trace {name}: {cause.name} ({cause.why}); {detail}")
