"""Parsing of a config.json by transformers, and refusal of unsupported models, with the cause.

All numbers must be in the configuration: no size is a default of transformers.

A refusal of the tracer names an operator and a module, which are far from the cause: "aten.copy_ in
model.layers.0.self_attn" of multi-head latent attention. A field of the configuration, or the
refusal, identifies a cause, which precedes them in the message. docs/models.md lists the causes and
their models; `python -m tests.support.model_table` writes that list.
"""

from __future__ import annotations

import itertools
import json
import math
import re
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import nn

from pcg.errors import ConfigError, PcgError, TraceError, UnsupportedError
from pcg.ir.program.program import first_position, is_classifier, labels_of, short_positions
from pcg.source import COMPOSITE, COMPOSITES
from pcg.units import shown

# ------------------------------------------------------------------------------------------- causes


_MOST_DETAIL = 200
"""Maximum number of characters of a tracer's refusal in a message of one line."""


@dataclass(frozen=True)
class Cause:
    """A cause for which models are refused.

    Attributes:
        name: the cause, contained in a refusal's message; no other cause's name contains it.
        why: the reason, as the second half of a sentence.
        fields: a pattern that identifies it in the configuration, as JSON with sorted keys.
        refusal: a pattern that identifies it in a tracer's refusal.
    """

    name: str
    why: str
    fields: str = ""
    refusal: str = ""

    def is_shown(self, config: str, refusal: str) -> bool:
        return any(
            pattern and re.search(pattern, text)
            for pattern, text in ((self.fields, config), (self.refusal, refusal))
        )


ENCODER_DECODER = Cause("encoder-decoder", "pcg compiles decoder-only causal LMs")
MULTIMODAL = Cause(
    "more than a language model",
    "pcg takes that of some composites",
    fields=r'"vision_config": \{',
)
LENGTH_DEPENDENT_ROPE = Cause(
    "rotary frequencies that change with the length",
    "pcg does rope types that are a function of the position",
    refusal=r"aten\.max\.default in \S*rotary",
)
POSITIONS = Cause(
    "positions computed from the tokens",
    "a padding token counts for none; pcg gives each token its position",
)

CAUSES: tuple[Cause, ...] = (
    ENCODER_DECODER,
    LENGTH_DEPENDENT_ROPE,
    Cause(
        "two attentions in one layer",
        "the KV cache has one entry for each layer and token",
        fields=r'"zero_expert_num": \d',
    ),
    Cause(
        "sparse attention",
        "a token attends to computed tokens; pcg has causal attention to all, a window or a chunk",
        fields=r'"index_topk(_blocks)?": [1-9]|"lsh"|"indexer_budget"',
    ),
    Cause(
        "another recurrence",
        "pcg computes short convolutions, delta rules, Mamba, RG-LRU and lightning attention",
        fields=r'"linear_attention"',
        refusal=r"mixes tokens by aten\.|\d times on \d+ tokens, in a loop",
    ),
    Cause(
        "attention to later tokens",
        "pcg compiles causal LMs",
        fields=r'"attn_type": "bi"|"causal": false',
        refusal="attends to later tokens",
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
        "pcg has causal attention, windows, chunks and ALiBi",
        refusal="has an attention that pcg cannot raise",
    ),
    POSITIONS,
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
"""All causes, the most informative first; the first matching cause is reported."""


def cause_of(message: str) -> Cause | None:
    """Return the cause named in a refusal's message."""
    return next((cause for cause in CAUSES if cause.name in message), None)


def with_cause(error: PcgError, name: str, config: Mapping[str, Any]) -> PcgError:
    """Add the cause to a refusal of the tracer; an unknown cause leaves it unchanged.

    Args:
        error: the refusal; its class takes a message.
        name: the model's type or class.
        config: the contents of its config.json.
    """
    refusal = str(error)
    if cause_of(refusal) is not None:
        return error
    fields = json.dumps(config, sort_keys=True, default=str)
    cause = next((cause for cause in CAUSES if cause.is_shown(fields, refusal)), None)
    if cause is None:
        return error
    detail = refusal.removeprefix("cannot trace ").removeprefix(f"{name}: ").partition("; ")[0]
    detail = detail if len(detail) <= _MOST_DETAIL else f"{detail[: _MOST_DETAIL - 1]}…"
    return type(error)(f"cannot trace {name}: {cause.name} ({cause.why}); {detail}")


# ------------------------------------------------------------------------------------- config sizes


_NEEDED = ("hidden_size", "num_attention_heads", "num_hidden_layers")
_SIZES = (
    *_NEEDED,
    "head_dim",
    "intermediate_size",
    "max_position_embeddings",
    "num_key_value_heads",
    "vocab_size",
)
_MOST_LAYERS = 1024
"""Maximum number of layers. Models have up to a few hundred; transformers builds each of them."""
_OTHER_NAMES: Mapping[str, Sequence[str]] = {"hidden_size": ("n_embed",)}
"""Names in checkpoints that `attribute_map` lacks: BLOOM's."""


def check_sizes(fields: Mapping[str, Any], config_class: Any) -> None:
    """Refuse impossible sizes before transformers reads them.

    Raises:
        ConfigError: a size is less than 1, or no whole number; or there are too many layers.
    """
    for name in _SIZES:
        for key in _names_of(name, config_class):
            value = fields.get(key)
            values = value if isinstance(value, list) else [value]  # of each layer
            for size in values:
                if size is not None and (type(size) is not int or size < 1):
                    raise ConfigError(
                        f"config.json has {key}={size!r}; it has to be an int above 0"
                    )
                if name == "num_hidden_layers" and size is not None and size > _MOST_LAYERS:
                    raise ConfigError(
                        f"config.json has {key}={shown(size)}; pcg takes at most {_MOST_LAYERS}"
                    )


def check_finite(fields: Mapping[str, Any], within: str = "") -> None:
    """Refuse infinite numbers and NaN, which Python reads from JSON.

    Lists may contain them: Mamba's `time_step_limit` ends in infinity.

    Raises:
        ConfigError: a field has such a number, also within an object such as `rope_parameters`.
    """
    for key, value in fields.items():
        if isinstance(value, float) and not math.isfinite(value):
            raise ConfigError(f"config.json has {within}{key}={value}; it has to be finite")
        if isinstance(value, Mapping) and not within:
            check_finite(value, f"{key}.")


def check_named(fields: Mapping[str, Any], config: Any) -> None:
    """Refuse a configuration that would take sizes from transformers' defaults.

    Raises:
        ConfigError: the model's hidden size, heads or layers are missing.
    """
    missing = []
    for name in _NEEDED:
        names = _names_of(name, type(config))
        is_given = any(fields.get(key) is not None for key in names)
        is_derived = isinstance(getattr(type(config), name, None), property)
        if not (is_given or is_derived) and getattr(config, name, None) is not None:
            missing.append(names[0])
    if missing:
        raise ConfigError(
            f"config.json of this {config.model_type} names no {' and no '.join(missing)}, and the "
            "default of transformers would be another model's; add what is missing"
        )


def _names_of(name: str, config_class: Any) -> list[str]:
    """Return the names of a size in a configuration, its class's first."""
    mapped = getattr(config_class, "attribute_map", {}).get(name, name)
    return list(dict.fromkeys((mapped, name, *_OTHER_NAMES.get(name, ()))))


# ------------------------------------------------------------------------------------- model config


_LENGTH_DEPENDENT_ROPE = ("dynamic", "longrope")
"""Types that transformers' `dynamic_rope_update` in modeling_rope_utils.py adapts to the length.

From a configuration, pcg compiles `longrope` up to the positions of its short factors."""


def parse_config(config: Mapping[str, Any]) -> Any:
    """Return the transformers configuration of the contents of a config.json.

    Raises:
        ConfigError: a size is missing, or a number or the dtype is invalid.
        TraceError: transformers does not know or refuses it.
        UnsupportedError: pcg does not compile such a model; says why.
    """
    from transformers import CONFIG_MAPPING, AutoConfig

    fields = _decoded(dict(config))
    model_type = str(fields.pop("model_type", ""))
    fields.pop("quantization_config", None)  # the format of weights changes no graph
    if model_type not in CONFIG_MAPPING:
        if "auto_map" in fields:
            raise UnsupportedError(
                f"model_type {model_type!r} comes with code of its own (auto_map), which pcg does "
                "not run; use a model that transformers implements"
            )
        raise TraceError(f"transformers knows no model_type {model_type!r}; is it up to date?")
    check_sizes(fields, CONFIG_MAPPING[model_type])
    check_finite(fields)
    _check_dtype(fields)
    try:
        parsed = AutoConfig.for_model(model_type, **fields)
    except Exception as error:
        raise TraceError(
            f"transformers refuses the configuration of this {model_type}: {in_one_line(error)}"
        ) from error
    if not getattr(parsed, "is_encoder_decoder", False) and class_of(parsed) is None:
        raise UnsupportedError(
            f"{model_type} is no causal LM in transformers; pcg compiles causal LMs"
        )
    if getattr(parsed, "attention_type", None) == "block_sparse":
        parsed.attention_type = "original_full"  # as BigBird up to `short_positions`
    is_known = short_positions(fields) is not None
    _check_supported(parsed, _LENGTH_DEPENDENT_ROPE[:1] if is_known else _LENGTH_DEPENDENT_ROPE)
    if COMPOSITE not in fields:  # its composite's own defaults, which transformers leaves out
        check_named(fields, parsed)
    return parsed


def class_of(config: Any) -> Any:
    """Return transformers' class for a configuration: a causal LM, or the classifier that it names.

    None if transformers has none.
    """
    from transformers import CONFIG_MAPPING, MODEL_FOR_CAUSAL_LM_MAPPING

    if is_classifier(config.to_dict()):
        return check_classifier(config)
    if type(config) in MODEL_FOR_CAUSAL_LM_MAPPING:
        return MODEL_FOR_CAUSAL_LM_MAPPING[type(config)]
    family = type(config).__module__.split(".")[-2]
    # A composite's causal LM may take the configuration of its language model.
    if family not in CONFIG_MAPPING or CONFIG_MAPPING[family] not in MODEL_FOR_CAUSAL_LM_MAPPING:
        return None
    causal_lm = MODEL_FOR_CAUSAL_LM_MAPPING[CONFIG_MAPPING[family]]
    return causal_lm if causal_lm.config_class is type(config) else None


def check_classifier(config: Any) -> Any:
    """Return transformers' sequence classifier of a configuration.

    Raises:
        UnsupportedError: there is none, or its loss or its head are of another kind.
    """
    from transformers import MODEL_FOR_SEQUENCE_CLASSIFICATION_MAPPING
    from transformers.modeling_layers import GenericForSequenceClassification

    kind = MODEL_FOR_SEQUENCE_CLASSIFICATION_MAPPING.get(type(config), None)
    if kind is None or not issubclass(kind, GenericForSequenceClassification):
        raise UnsupportedError(
            f"the sequence classifier of {config.model_type} has a head of its own; pcg takes "
            "those with a linear head on the last token, as of Llama, Qwen and Gemma"
        )
    problem = getattr(config, "problem_type", None)
    if config.num_labels < 2 or problem not in (None, "single_label_classification"):
        raise UnsupportedError(
            f"a sequence classifier with {config.num_labels} labels and problem_type={problem!r}; "
            "pcg takes those that choose one of several labels"
        )
    names = labels_of(config.to_dict())
    if len(set(names)) < len(names):
        raise UnsupportedError(
            f"id2label names two labels alike: {shown(list(names))}; rename them there, or by "
            "labels=[…] (--labels)"
        )
    return kind


def with_labels(config: Mapping[str, Any], labels: Sequence[str]) -> dict[str, Any]:
    """Return the configuration of a sequence classifier over the layers of a causal LM.

    Raises:
        UnsupportedError: transformers has no classifier of the model's type, or the checkpoint's
            head has another number of labels.
    """
    from transformers.models.auto.modeling_auto import (
        MODEL_FOR_SEQUENCE_CLASSIFICATION_MAPPING_NAMES as NAMES,
    )

    model_type = config.get("model_type")
    if model_type not in NAMES:
        raise UnsupportedError(
            f"labels={shown(list(labels))}: transformers has no sequence classifier of "
            f"{model_type!r}; use a model of another type, or learn the labels as "
            "texts of completions"
        )
    present = labels_of(config)
    if present and len(present) != len(labels):
        raise UnsupportedError(
            f"labels={shown(list(labels))} names {len(labels)} classes, and the checkpoint's head "
            f"has {len(present)}: {shown(list(present))}; name as many, or start from the causal LM"
        )
    numbered = {str(number): label for number, label in enumerate(labels)}
    numbers = {label: number for number, label in enumerate(labels)}
    named = {"architectures": [NAMES[model_type]], "id2label": numbered, "label2id": numbers}
    return {**config, **named}


def _decoded(value: Any) -> Any:
    """Return the fields of a config.json; decode transformers' {"__float__": "Infinity"}."""
    if isinstance(value, dict):
        if list(value) == ["__float__"]:
            return float(value["__float__"])
        return {key: _decoded(item) for key, item in value.items()}
    return [_decoded(item) for item in value] if isinstance(value, list) else value


def _check_dtype(fields: Mapping[str, Any]) -> None:
    for key in ("dtype", "torch_dtype"):
        value = fields.get(key)
        if value in (None, "auto"):
            continue
        dtype = getattr(torch, value.removeprefix("torch."), None) if type(value) is str else value
        if not (isinstance(dtype, torch.dtype) and dtype.is_floating_point):
            raise ConfigError(
                f"config.json has {key}={shown(value)}; use a floating-point one, as 'bfloat16'"
            )


def positions_of(config: Any) -> int | None:
    """Return the number of positions of a transformers configuration; None if unbounded.

    They are at most `short_positions`; RoBERTa's are those of tokens.
    """
    fields = config.to_dict()
    positions = short_positions(fields)
    positions = positions or getattr(config, "max_position_embeddings", None)
    positions = positions or getattr(config, "max_seq_len", None)
    return positions - first_position(fields) if type(positions) is int else None


def in_one_line(error: BaseException, first: bool = False) -> str:
    """Return an error's message in one line, or only its first line; its type without a message."""
    lines = [" ".join(line.split()) for line in str(error).strip().splitlines()]
    text = lines[0] if first and lines else " ".join(lines)
    return text or type(error).__name__


def check_module(model: nn.Module) -> None:
    """Refuse a module that would trace to a different model.

    Raises:
        UnsupportedError: says why, and the alternative.
    """
    name = type(model).__name__
    if hasattr(model, "_orig_mod"):
        raise UnsupportedError("the model is wrapped by torch.compile; give model._orig_mod")
    if hasattr(model, "peft_config"):
        raise UnsupportedError(
            "the model is wrapped by peft already; give the base model, and its adapter by "
            "peft={name: directory}"
        )
    config = getattr(model, "config", None)
    if not hasattr(config, "to_dict"):
        raise UnsupportedError(
            f"{name} has no transformers configuration as model.config; give a causal LM, a "
            "transformers.PreTrainedModel"
        )
    for path, module in model.named_modules():
        if isinstance(module, torch.jit.ScriptModule):
            raise UnsupportedError(
                f"{path} is a module of torch.jit, whose code cannot be traced; give the module "
                "that it was made of"
            )
        if type(module).__module__.startswith("torch.ao.nn."):
            raise UnsupportedError(
                f"{path} is quantized ({type(module).__module__}.{type(module).__name__}); give "
                "the model with unquantized weights"
            )
    _check_supported(config)


def check_positions(model: nn.Module) -> None:
    """Refuse a model that computes positions from the tokens, unless as RoBERTa does."""
    config: Any = model.config
    if first_position(config.to_dict()):
        return
    for path, module in model.named_modules():
        if hasattr(type(module), "create_position_ids_from_input_ids"):
            raise UnsupportedError(f"{path} has {POSITIONS.name}; {POSITIONS.why}")


def _check_supported(config: Any, refused_rope: Sequence[str] = _LENGTH_DEPENDENT_ROPE) -> None:
    kind = config.model_type or type(config).__name__
    if getattr(config, "is_encoder_decoder", False):
        raise UnsupportedError(f"{kind} is an {ENCODER_DECODER.name}; {ENCODER_DECODER.why}")
    text = config.get_text_config()
    if text is not config:
        raise UnsupportedError(
            f"{kind} is {MULTIMODAL.name}; pcg takes the language models of files of "
            f"{', '.join(sorted(COMPOSITES))}"
        )
    quantization = getattr(config, "quantization_config", None)
    if quantization:
        raise UnsupportedError(
            f"this {kind} in memory is quantized (quantization_config={quantization}); give the "
            "checkpoint's directory or hub id instead of the module"
        )
    for rope_type in _rope_types(getattr(config, "rope_parameters", None)):
        if rope_type in refused_rope:
            raise UnsupportedError(
                f"this {kind} has rope_type={rope_type!r}, {LENGTH_DEPENDENT_ROPE.name}; "
                f"{LENGTH_DEPENDENT_ROPE.why}"
            )


def _rope_types(parameters: object) -> set[str]:
    if not isinstance(parameters, Mapping):
        return set()
    rope_type = parameters.get("rope_type")
    rope_types = {str(rope_type)} if rope_type else set()
    return rope_types.union(*map(_rope_types, parameters.values()))


def renamings_of(model: nn.Module) -> tuple[tuple[str, str], ...]:
    """Return the patterns in names of a model's checkpoints, and their replacements.

    They are those of transformers, applied in order, each at its first match. A tensor with the
    rows of several has a replacement with the rows of each, such as `q_proj[0:64],k_proj[64:96]`.
    Tensors that are otherwise split, joined or reordered have none.
    """
    from transformers.conversion_mapping import get_checkpoint_conversion_mapping

    kinds = type(model).__name__, getattr(model.config, "model_type", "")
    rules = next(filter(None, map(get_checkpoint_conversion_mapping, kinds)), ())
    composite = getattr(model.config, COMPOSITE, "")
    path = COMPOSITES.get(composite)
    outer = get_checkpoint_conversion_mapping(composite) or () if path else ()
    # Without its composite, a language model's paths lack the prefix.
    read = ("WeightRenaming",) if path else ("WeightRenaming", "PrefixChange")
    renamings = []
    for rule in (*outer, *rules):
        pattern, *others = rule.source_patterns
        if type(rule).__name__ in read and not others:
            target = rule.target_patterns[0].replace(r"\.", ".")
            renamings.append((_name_pattern(pattern), target))
        elif [type(each).__name__ for each in getattr(rule, "operations", ())] == ["Split"]:
            replacement = _with_rows(model, pattern, rule.target_patterns)
            renamings.append((_name_pattern(pattern), replacement))
    if path:  # of files with a causal LM in the place of its base model
        renamings.append((rf"^{re.escape(path)}\.model\.", f"{path}."))
    return tuple(renamings)


def _with_rows(model: nn.Module, source: str, targets: Sequence[str]) -> str:
    """Return the replacement of a tensor that has the rows of several, in order."""
    sizes = dict.fromkeys(targets, 0)
    for name, parameter in model.named_parameters():
        sizes |= {target: len(parameter) for target in targets if f".{target}." in name}
    stops = itertools.accumulate(sizes.values())
    prefix = source.rpartition(".")[0]
    parts = (
        f"{target.rpartition('.')[2]}[{stop - sizes[target]}:{stop}]"
        for target, stop in zip(targets, stops, strict=True)
    )
    return f"{prefix}{'.' * bool(prefix)}{','.join(parts)}"


def _name_pattern(pattern: str) -> str:
    """Return a pattern of transformers as a regular expression that ends with a part of a name."""
    return pattern.replace("*.", r".*\.") + (r"(?!\w)" if pattern[-1].isalnum() else "")
