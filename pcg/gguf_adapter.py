"""`pcg.export`: write an adapter as a GGUF file, which llama.cpp adds to a GGUF model of the base.

    blk.<layer>.<module>.weight.lora_a    A [rank, in]
    blk.<layer>.<module>.weight.lora_b    B [out, rank]    rows of q and k in llama.cpp's order

    y = W x + alpha / rank · B (A x)

Methods whose served form is LoRA are written: LoRA, AdaLoRA, VeRA and LoHa. The file has a single
alpha, so that B holds the rest of a module's scale.

Source: llama.cpp, src/llama-adapter.cpp and convert_lora_to_gguf.py.
"""

from __future__ import annotations

import os
from collections.abc import Iterator, Mapping
from dataclasses import dataclass, field
from pathlib import Path

import torch
from torch import Tensor

from pcg.checkpoint_writer import free_file
from pcg.compiler import compile_program
from pcg.errors import UnsupportedError, WeightsError
from pcg.files import replacing
from pcg.gguf_model import ARCHITECTURES, module_in_file
from pcg.ir.program.program import Program
from pcg.keywords import takes
from pcg.merged_checkpoint import adapter_of_base
from pcg.peft.adapter import Adapter
from pcg.peft.weights import Around
from pcg.runtime.model.base_weights import linear_parameters
from pcg.runtime.model.gguf_weights import open_weights
from pcg.source import resolve

_ARCHITECTURES: Mapping[str, str] = {
    "mistral": "llama",
    **{each.model_type: name for name, each in ARCHITECTURES.items()},
}
"""GGUF's architecture by transformers' model type."""
_HEADS = {"q_proj": "num_attention_heads", "k_proj": "num_key_value_heads"}
"""Fields with the heads of modules whose rows llama.cpp has in another order."""


@dataclass(frozen=True)
class ExportArguments:
    """Arguments of `export`.

    Attributes:
        model: directory or hub id of the base, or its GGUF file.
        adapter: directory or hub id of an adapter, or an adapter of an executor.
        output: the file to write.
        format: the layout of the file, gguf.
        overwrite: replace an existing file.
    """

    model: str | os.PathLike[str]
    adapter: str | os.PathLike[str] | Adapter
    output: str | os.PathLike[str]
    format: str = field(default="gguf", kw_only=True)
    overwrite: bool = field(default=False, kw_only=True)


@takes(ExportArguments)
def export(arguments: ExportArguments) -> Path:
    """Write an adapter as a GGUF file for llama.cpp, and return its path.

    Raises:
        UnsupportedError: llama.cpp has no such adapter, or pcg does not know the architecture.
        AdapterError: the adapter cannot be read, or does not fit the base.
        WeightsError: the file exists, or cannot be written.
        ModuleNotFoundError: the package gguf is not installed.
    """
    import gguf

    if arguments.format != "gguf":
        raise UnsupportedError(
            f"format={arguments.format!r}: adapters are exported to gguf; for safetensors, merge "
            "them (pcg merge), or save them (save_adapter)"
        )
    target = free_file(arguments.output, "the adapter", overwrite=arguments.overwrite)
    source = resolve(arguments.model, weights=True)
    architecture = _ARCHITECTURES.get(str(source.config["model_type"]))
    if architecture is None:
        raise UnsupportedError(
            f"{source.name} is a {source.config['model_type']}; pcg writes GGUF adapters of "
            f"{', '.join(_ARCHITECTURES)}: merge the adapter (pcg merge), and convert the model"
        )
    program = compile_program(arguments.model, None)
    weights = open_weights(source, program)
    adapter = adapter_of_base(arguments.adapter, program, weights, source.location)
    weights.release()
    alpha = float(adapter.rank)
    tensors = list(_tensors(adapter, program, architecture, alpha))
    with replacing(target, WeightsError) as beside:
        writer = gguf.GGUFWriter(beside, architecture)
        writer.add_type(gguf.GGUFType.ADAPTER)
        writer.add_string(gguf.Keys.Adapter.TYPE, "lora")
        writer.add_float32(gguf.Keys.Adapter.LORA_ALPHA, alpha)
        for name, tensor in tensors:
            writer.add_tensor(name, tensor.float().contiguous().numpy())
        writer.write_header_to_file()
        writer.write_kv_data_to_file()
        writer.write_tensors_to_file()
        writer.close()
    return target


def _tensors(
    adapter: Adapter, program: Program, architecture: str, alpha: float
) -> Iterator[tuple[str, Tensor]]:
    """Yield the tensors of an adapter's file by name."""
    if adapter.replaced:
        raise UnsupportedError(_refusal("trained biases or modules_to_save"))
    shapes, linear = program.base.module_shapes(), linear_parameters(program.base)
    for path, weights in adapter.weights.items():
        name = module_in_file(path)
        if name is None or weights.served.keys() != {"lora_A", "lora_B"}:
            raise UnsupportedError(_refusal(f"{adapter.recipe.title} at {path or 'the prompt'}"))
        if linear[path][0] != f"{path}.weight":
            raise UnsupportedError(_refusal(f"one at {path}, which is tied to the embedding"))
        around = Around(lambda: torch.empty(0), adapter.shared, shapes[path])  # LoRA reads no base
        down, up = (weights.served[kind](around) for kind in ("lora_A", "lora_B"))
        up = up.t() * (weights.rank / alpha)
        kind = path.rpartition(".")[2]
        if ARCHITECTURES[architecture].permutes and kind in _HEADS:
            heads = int(program.config.get(_HEADS[kind]) or program.config[_HEADS["q_proj"]])
            pairs = up.reshape(heads, 2, len(up) // heads // 2, -1)
            up = pairs.transpose(1, 2).reshape(up.shape)
        yield f"{name}.weight.lora_a", down
        yield f"{name}.weight.lora_b", up


def _refusal(what: str) -> str:
    return (
        f"llama.cpp's adapters have LoRA on linear modules alone, without {what}; merge the "
        "adapter (pcg merge), and convert the model"
    )
