"""`pcg quantize`: write a float checkpoint in a weight format."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated

import typer

from pcg.units import size_text

from .options.console import busy, err, print_json
from .options.fields import Json, Model


def quantize_command(
    model: Model,
    format: Annotated[
        str,
        typer.Option(
            "--format", help="Weight format, such as nf4, int8_weight or fp8_block.", metavar="NAME"
        ),
    ],
    output: Annotated[
        Path, typer.Option("--output", "-o", help="New folder of the model.", metavar="DIR")
    ],
    max_shard_size: Annotated[
        str, typer.Option(help="Largest size of a file.", metavar="SIZE")
    ] = "2GB",
    json: Json = False,
) -> None:
    """Quantize a float checkpoint, in a layout that transformers reads.

    Matrices of the layers' linear modules are quantized; embeddings, the head and norms stay in
    floating point. Config and tokenizer are copied.
    """
    with busy(f"quantizing {model}"):
        from pcg.quantized_checkpoint import quantize

        folder = quantize(model, format, output, max_shard_size=max_shard_size)
    files = {path.name: path.stat().st_size for path in folder.glob("*.safetensors")}
    if json:
        summary = {"output": str(folder), "format": format, "files": files}
        print_json({**summary, "bytes": sum(files.values())})
        return
    size = size_text(sum(files.values()))
    err().print(f"{model} → {folder}: {format}, {size}", soft_wrap=True, highlight=False)
    err().print(f'run it: pcg run {folder} --prompt "…"', style="dim", soft_wrap=True)
