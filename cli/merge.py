"""`pcg merge`, `export`, `push` and `adapters combine`: what becomes of saved adapters."""

from __future__ import annotations

import dataclasses
import shutil
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Annotated, Any, Self

import typer

from pcg.errors import AdapterError
from pcg.files import is_file
from pcg.units import size_text

from .options.console import busy, err, print_json
from .options.fields import Json, Model, Only, Option, OptionGroup, field_options

Adapter = Annotated[
    str, typer.Option("--adapter", help="Directory or hub id of the adapter.", metavar="DIR")
]


def merge_command(
    model: Model,
    adapter: Adapter,
    output: Annotated[
        Path,
        typer.Option(
            "--output", "-o", help="Folder of the merged model, or GGUF file.", metavar="DIR"
        ),
    ],
    dtype: Annotated[
        str | None,
        typer.Option(
            help="Write a quantized base in this float dtype; a GGUF file becomes a folder.",
            metavar="DTYPE",
        ),
    ] = None,
    labels: Annotated[
        list[str] | None,
        typer.Option(help="A label of a sequence classifier, in order. Repeatable."),
    ] = None,
    overwrite: Annotated[bool, typer.Option("--overwrite", help="Replace what is there.")] = False,
    max_shard_size: Annotated[
        str, typer.Option(help="Largest size of a file.", metavar="SIZE")
    ] = "2GB",
    json: Json = False,
) -> None:
    """Merge an adapter into the weights of a model, in a folder that transformers reads.

    The weights keep their dtype or format, and the error of storing them so is printed. Config and
    tokenizer are copied.
    """
    with busy(f"merging {adapter} into {model}"):
        from pcg.merged_checkpoint import merge

        result = merge(
            model,
            adapter,
            output,
            dtype=dtype,
            labels=labels or (),
            overwrite=overwrite,
            max_shard_size=max_shard_size,
        )
    files = [result.path] if result.path.is_file() else result.path.glob("*.safetensors")
    size_bytes = sum(path.stat().st_size for path in files)
    if json:
        print_json({**dataclasses.asdict(result), "path": str(result.path), "bytes": size_bytes})
        return
    err().print(
        f"{model} + {adapter} → {result.path}: {result.matrices} matrices changed by "
        f"{result.relative_change:.2g} of their length, stored with an error of "
        f"{result.relative_error:.2g}; {size_text(size_bytes)}",
        soft_wrap=True,
        highlight=False,
    )
    if not result.keeps_change:
        err().print(
            "warning: storing the weights changes them about as much as the adapter does, and the "
            "merged model may not answer as the adapter does; write floats, such as --dtype "
            "bfloat16, or serve the base with the adapter",
            soft_wrap=True,
        )
    err().print(f'run it: pcg run {result.path} --prompt "…"', style="dim", soft_wrap=True)


def export_command(
    model: Model,
    adapter: Adapter,
    output: Annotated[
        Path, typer.Option("--output", "-o", help="File of the adapter.", metavar="FILE")
    ],
    format: Annotated[
        str, typer.Option("--format", help="Layout of the file.", metavar="NAME")
    ] = "gguf",
    overwrite: Annotated[bool, typer.Option("--overwrite", help="Replace the file.")] = False,
    json: Json = False,
) -> None:
    """Write a LoRA adapter as a GGUF file, which llama.cpp adds to a GGUF file of the model."""
    with busy(f"exporting {adapter}"):
        from pcg.gguf_adapter import export

        path = export(model, adapter, output, format=format, overwrite=overwrite)
    if json:
        print_json({"path": str(path), "bytes": path.stat().st_size})
        return
    size = size_text(path.stat().st_size)
    err().print(f"{adapter} → {path}: {size}", soft_wrap=True, highlight=False)
    err().print(f"run it: llama-cli -m MODEL.gguf --lora {path}", style="dim", soft_wrap=True)


def push_command(
    adapter: Annotated[Path, typer.Argument(help="Directory of the adapter.", metavar="DIR")],
    repo: Annotated[str, typer.Argument(help="Repository of the hub.", metavar="OWNER/NAME")],
    private: Annotated[
        bool | None, typer.Option("--private/--public", help="Visibility of a new repository.")
    ] = None,
    message: Annotated[
        str, typer.Option(help="Message of the commit.", metavar="TEXT")
    ] = "Upload an adapter",
    json: Json = False,
) -> None:
    """Upload a saved adapter, its model card and its tokenizer to the hub.

    The token is that of `hf auth login`, or HF_TOKEN. Checkpoints and records stay.
    """
    from pcg.source import push_adapter

    with busy(f"uploading {adapter}"):
        url = push_adapter(adapter, repo, private=private, message=message)
    if json:
        print_json({"url": url})
    else:
        err().print(f"{adapter} → {url}", soft_wrap=True, highlight=False)


_COMBINING = (
    "weights", "combination_type", "svd_rank", "svd_clamp", "density", "majority_sign_method",
    "seed",
)  # fmt: skip


@dataclass(frozen=True)
class Combining(OptionGroup):
    """The options of `Executor.combine_adapters`."""

    values: Mapping[str, Any]

    @classmethod
    def options(cls) -> list[Option]:
        from pcg.peft.arithmetic import CombineArguments

        return field_options(CombineArguments, Only(_COMBINING))

    @classmethod
    def collect(cls, values: Mapping[str, Any]) -> Self:
        options = {option.name: option for option in cls.options()}
        return cls({name: options[name].value(value) for name, value in values.items()})


def combine_command(
    adapters: Annotated[
        list[str], typer.Argument(help="Directories or hub ids of adapters.", metavar="DIR…")
    ],
    combining: Combining,
    output: Annotated[
        Path, typer.Option("--output", "-o", help="Folder of the new adapter.", metavar="DIR")
    ],
    overwrite: Annotated[bool, typer.Option("--overwrite", help="Replace an adapter.")] = False,
) -> None:
    """Combine LoRA adapters into one, as peft's add_weighted_adapter does.

    The base is not needed. The tokenizer is that of the first adapter.
    """
    from pcg.peft.adapter_files import has_adapter, read_adapter, write_adapter
    from pcg.peft.arithmetic import CombineArguments, combined
    from pcg.runtime.text.tokenizer import FILES
    from pcg.source import TEMPLATE, adapter_directory

    if has_adapter(output) and not overwrite:
        raise AdapterError(f"{output} has a saved adapter; give another directory, or --overwrite")
    with busy("combining"):
        read = [read_adapter(path, str(index)) for index, path in enumerate(adapters)]
        names = [adapter.name for adapter in read]
        paths = dict.fromkeys(path for adapter in read for path in adapter.weights)
        result = combined(CombineArguments(output.name, names, **combining.values), read, paths)
        write_adapter(result, output)
        source = adapter_directory(adapters[0])
        for name in (*FILES, TEMPLATE):
            if is_file(source / name):
                shutil.copyfile(source / name, output / name)
    err().print(f"{len(adapters)} adapters → {output}", soft_wrap=True, highlight=False)
