"""Weight formats by name, and the format that a checkpoint's quantization_config describes."""

from __future__ import annotations

import functools
import logging
import re
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from pcg.errors import UnsupportedError
from pcg.formats.blocks4 import Blocks4
from pcg.formats.format import Format
from pcg.formats.fp4 import Fp4
from pcg.formats.fp8 import BlockFp8, Fp8
from pcg.formats.gguf import GGUF_FORMATS
from pcg.formats.int4 import Int4, gptq_name, int4_format
from pcg.formats.int8 import Int8

_LOG = logging.getLogger("pcg.formats")
_FIXED: tuple[Format, ...] = (
    Blocks4("nf4", nests=True),
    Blocks4("nf4", nests=False),
    Blocks4("fp4", nests=True),
    Blocks4("fp4", nests=False),
    Int8("int8", rounds_inputs=True),
    Int8("int8_weight", rounds_inputs=False),
    Int4(128),
    Int4(64),
    Int4(32),
    Int4(0),
    Fp8(),
    BlockFp8(),
    Fp4("mxfp4"),
    Fp4("nvfp4"),
    *GGUF_FORMATS,
)


class _Formats(dict[str, Format]):
    """Formats by name; those of 4-bit integers have any size of a group."""

    def __missing__(self, name: str) -> Format:
        format_ = int4_format(name)
        if format_ is None:
            raise KeyError(name)
        self[name] = format_
        return format_

    def __contains__(self, name: object) -> bool:
        return super().__contains__(name) or (
            isinstance(name, str) and int4_format(name) is not None
        )


FORMATS: Mapping[str, Format] = _Formats({format_.name: format_ for format_ in _FIXED})


EXPERT_PARTS: Mapping[str, tuple[tuple[str, ...], ...]] = {
    "gate_up_proj": (("gate_proj", "up_proj"), ("w1", "w3")),
    "up_proj": (("up_proj",),),
    "down_proj": (("down_proj",), ("w2",)),
}
"""The separate matrices of experts for a fused parameter, in order of output features."""


@dataclass(frozen=True)
class StoredFormat:
    """The formats of a quantized checkpoint, and the modules that are stored in them.

    Attributes:
        name: of the format, or of all of them.
        skipped: patterns of modules in floating point; None for the library's default, which skips
            the head.
        targets: patterns of modules in the format, as compressed-tensors has them; None for all.
        layers_only: True if modules outside the layers are in floating point.
        by_module: the format of each linear module by path, None for floating point, if modules may
            differ.
        holds: what is stored in the format: "linear" modules, "experts", or "all".
    """

    name: str
    skipped: tuple[str, ...] | None = None
    targets: tuple[str, ...] | None = None
    layers_only: bool = False
    by_module: Mapping[str, str | None] | None = None
    holds: str = "all"

    def of(self, module: str, is_head: bool, is_in_layer: bool) -> str | None:
        """Return the format of a linear module, by its path; None for floating point."""
        if self.by_module is not None:
            return self.by_module.get(module)
        if self.holds == "experts" or (is_head and self.skipped is None):
            return None
        if self.layers_only and not is_in_layer:
            return None
        return self._of_any([module])

    def of_experts(self, parameter: str) -> str | None:
        """Return the format of a parameter of experts, by its path; None for floating point.

        A pattern names it, or a matrix of the first expert, such as `experts.0.w1`.
        """
        if self.holds == "linear" or self.by_module is not None:
            return None
        module, _, name = parameter.rpartition(".")
        parts = [part for parts in EXPERT_PARTS.get(name, ()) for part in parts]
        return self._of_any([parameter, *(f"{module}.0.{part}" for part in parts)])

    def _of_any(self, paths: Sequence[str]) -> str | None:
        """Return the format of a matrix with several paths."""

        def is_any(matches: Callable[[str, str], bool], patterns: Sequence[str]) -> bool:
            return any(matches(path, pattern) for path in paths for pattern in patterns)

        if self.targets is None:
            return None if is_any(_is_skipped, self.skipped or ()) else self.name
        is_held = is_any(_is_target, self.targets) and not is_any(_is_target, self.skipped or ())
        return self.name if is_held else None


def _is_target(module: str, pattern: str) -> bool:
    """Match a linear module as `match_name` and `_match_class` of compressed-tensors do."""
    if pattern.startswith("re:"):
        return re.match(pattern.removeprefix("re:"), module) is not None
    return pattern in (module, "Linear", "Module")


def _is_skipped(module: str, pattern: str) -> bool:
    """Match a module as `should_convert_module` of transformers does."""
    start = re.match(rf"(?:{pattern})(?:(?<=\.)|(?=\.|$))", module)
    return start is not None or module.endswith(pattern)


_UNREAD: Mapping[str, Mapping[str, tuple[object, ...]]] = {
    "gptq": {
        "modules_in_block_to_quantize": (None, []),
        "dynamic": (None, {}),
        "rotation": (None,),
        "lm_head": (None, False),
        "is_marlin_format": (None, False),
        "checkpoint_format": (None, "gptq", "gptq_v2"),
        "pack_dtype": (None, "int32"),
    },
    "awq": {
        "version": (None, "gemm", "GEMM"),
        "format": (None, "gemm", "GEMM"),
        "checkpoint_format": (None, "gemm", "GEMM"),
        "zero_point": (None, True),
        "backend": (None, "auto", "autoawq", "gptqmodel"),
        "modules_in_block_to_quantize": (None, []),
        "pack_dtype": (None, "int32"),
    },
    "compressed-tensors": {
        "sparsity_config": (None, {}),
        "transform_config": (None, {}),
    },
    "fp8": {
        "weight_block_size": ([128, 128],),
        "modules_to_convert": (None, []),
        "scale_fmt": (None, "float"),
    },
    "bitsandbytes": {"llm_int8_has_fp16_weight": (None, False)},
}
"""Settings that change numbers or layouts, by method, and their values that pcg reads."""
_AWQ_SCALES_ACTIVATIONS = (
    "RefinedWebModel", "bloom", "falcon", "gpt_bigcode", "gpt_neox", "gptj", "mpt", "starcoder2",
)  # fmt: skip
"""Model types with scales of activations in AWQ: transformers' AWQ_SCALES_MAPPINGS."""


def stored_format(config: Mapping[str, Any]) -> StoredFormat | None:
    """Return the format of a model's checkpoint by its config.json; None for a float checkpoint.

    Raises:
        UnsupportedError: pcg does not read the format; names it.
    """
    settings = config.get("quantization_config")
    if not settings:
        return None
    method = str(settings.get("quant_method", "bitsandbytes" if "load_in_4bit" in settings else ""))
    for key, values in _UNREAD.get(method, {}).items():
        if settings.get(key) not in values:
            read = " or ".join(repr(value) for value in values if value not in (None, [], {}))
            raise UnsupportedError(
                f"this checkpoint of {method} has {key}={settings.get(key)!r}, which pcg does not "
                f"read{f'; it reads {read}' if read else ''}; use another checkpoint, or float "
                "weights with quantization=FORMAT"
            )
    skipped = settings.get("modules_to_not_convert")
    if method == "bitsandbytes" and settings.get("load_in_4bit"):
        nests = bool(settings.get("bnb_4bit_use_double_quant"))
        code = settings.get("bnb_4bit_quant_type", "fp4")
        skipped = settings.get("llm_int8_skip_modules")
        name = code if nests else f"{code}_single"
        return StoredFormat(name, _patterns(skipped), holds="linear")
    if method == "bitsandbytes" and settings.get("load_in_8bit"):
        patterns = _patterns(settings.get("llm_int8_skip_modules"))
        return StoredFormat("int8_weight", patterns, holds="linear")
    if method == "mxfp4":
        return StoredFormat("mxfp4", _patterns(skipped), holds="experts")
    if method == "gptq":
        return StoredFormat(gptq_name(settings), (), layers_only=True)
    if method == "awq":
        if config.get("model_type") in _AWQ_SCALES_ACTIVATIONS:
            raise UnsupportedError(
                f"AWQ scales the activations of {config['model_type']}, which pcg does not do; use "
                "float weights with quantization=FORMAT"
            )
        # AWQ skips the head besides its list.
        return StoredFormat(gptq_name(settings), (*(_patterns(skipped) or ()), "lm_head"))
    if method == "fp8":
        return StoredFormat("fp8_block", _patterns(skipped))
    if method == "compressed-tensors":
        return _compressed(settings)
    if method == "gguf":
        return _of_gguf(settings["formats"], int(config["num_hidden_layers"]))
    raise UnsupportedError(
        f"this checkpoint is quantized by {method or 'an unnamed method'} "
        f"(quantization_config={dict(settings)}), which pcg does not read; use one of "
        f"{', '.join(FORMATS)}, or float weights with quantization=FORMAT"
    )


def _of_gguf(formats: Mapping[str, Any], layers: int) -> StoredFormat:
    """Return the formats of a GGUF file, from a name or a list of names, one a layer, by site."""
    by_module: dict[str, str | None] = {}
    for site, names in formats.items():
        paths = dict.fromkeys(site.format(layer=layer) for layer in range(layers))
        of_layers = names if isinstance(names, list) else [names] * len(paths)
        by_module.update(zip(paths, of_layers, strict=True))
    distinct = {name for name in by_module.values() if name is not None}
    return StoredFormat(" and ".join(sorted(distinct)), by_module=by_module)


def _patterns(names: Sequence[str] | None) -> tuple[str, ...] | None:
    """Return patterns of modules. UnsupportedError: one is no regular expression."""
    if names is None:
        return None
    for name in names:
        try:
            re.compile(name.removeprefix("re:"))
        except (AttributeError, re.error) as error:
            raise UnsupportedError(
                f"quantization_config skips {name!r}, which is no pattern of modules ({error}); "
                "repair config.json"
            ) from error
    return tuple(names)


@functools.cache
def _note_exact(names: tuple[str, ...]) -> None:
    _LOG.warning(
        "the checkpoint's %s may be stored in fewer bits, and pcg computes them in the model's "
        "dtype, which is slower and more exact",
        " and ".join(names),
    )


def _compressed(settings: Mapping[str, Any]) -> StoredFormat:
    """Return the format of a checkpoint of compressed-tensors, with a single group of modules."""
    groups = list((settings.get("config_groups") or {}).values())
    weights = groups[0].get("weights") or {} if len(groups) == 1 else {}
    kind = str(settings.get("format") or groups[0].get("format") if groups else "")
    bits, strategy = weights.get("num_bits"), weights.get("strategy")
    name = None
    if kind == "pack-quantized" and bits == 4 and strategy in ("group", "channel"):
        size = weights.get("group_size") if strategy == "group" else 0
        name = Int4(int(size or 0), weights.get("actorder") in ("group", True)).name
    elif kind == "float-quantized" and bits == 8 and strategy in ("channel", "tensor"):
        name = "fp8"
    elif kind in ("mxfp4-pack-quantized", "nvfp4-pack-quantized"):
        name = kind.partition("-")[0]
    if name is None:
        raise UnsupportedError(
            f"this checkpoint of compressed-tensors has {len(groups)} groups of modules, of format "
            f"{kind or 'none'} with {bits} bits by {strategy}; pcg reads a single group of "
            "modules in pack-quantized (4 bits), float-quantized, mxfp4 or nvfp4"
        )
    rounded = {
        "inputs": groups[0].get("input_activations"),
        "outputs": groups[0].get("output_activations"),
        "keys and values": settings.get("kv_cache_scheme"),
    }
    if names := tuple(name for name, scheme in rounded.items() if scheme):
        _note_exact(names)
    targets = _patterns(groups[0].get("targets") or ())
    return StoredFormat(name, _patterns(settings.get("ignore") or ()), targets)
