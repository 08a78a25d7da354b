"""The quality of weight formats: perplexity and logits of a model whose float weights they store.

The text is the project's documents and licence, in windows; every format sees the same. A model may
be given, as `--model DIR`; by default it is the checkpoint that ships.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from harness import CHECKPOINT, ROOT, case, main

FORMATS = ("int8", "int8_weight", "fp8", "fp8_block", "nf4", "fp4", "int4_g64", "mxfp4", "nvfp4",
           "q8_0", "q4_0", "q4_1")  # fmt: skip


def windows(tokenizer: Any, tokens: int, count: int) -> list[list[int]]:
    """Return windows of the text's tokens."""
    paths = [ROOT / "LICENSE", ROOT / "README.md", *sorted((ROOT / "docs").glob("*.md"))]
    ids = tokenizer.encode("\n".join(path.read_text(encoding="utf-8") for path in paths))
    starts = range(0, min(len(ids) - tokens, tokens * count), tokens)
    return [list(ids[start : start + tokens]) for start in starts]


def logits_of(model: str, texts: Sequence[Sequence[int]], quantization: str | None) -> Any:
    """Return the logits of each window, [T, V] each."""
    import pcg

    executor = pcg.compile(model, dtype="float32", quantization=quantization)
    return [executor.logits([list(text)])[0] for text in texts]


@case("format_quality", "perplexity, relative", tokens=64, count=2)
def format_quality(model: str = str(CHECKPOINT), tokens: int = 256, count: int = 40) -> Any:
    """Measure perplexity, relative to fp32, and the root mean square error of logits."""
    import torch

    import pcg
    from pcg.formats.registry import FORMATS as KNOWN

    texts = windows(pcg.compile(model, dtype="float32").tokenizer, tokens, count)

    def perplexity(logits: Sequence[Any]) -> float:
        losses = [
            torch.nn.functional.cross_entropy(row[:-1], torch.tensor(text[1:]), reduction="sum")
            for row, text in zip(logits, texts, strict=True)
        ]
        return float((sum(losses) / sum(len(text) - 1 for text in texts)).exp())

    exact = logits_of(model, texts, None)
    whole = perplexity(exact)
    rows: dict[str, Any] = {}
    for name in FORMATS:
        found = logits_of(model, texts, name)
        error = sum((a - b).square().sum() for a, b in zip(found, exact, strict=True))
        size = sum(b.square().sum() for b in exact)
        rows[name] = {
            "bits a weight": round(8 * KNOWN[name].size_bytes(4096, 4096) / 4096**2, 3),
            "perplexity, relative": round(perplexity(found) / whole, 5),
            "error of logits": round(float((error / size).sqrt()), 4),
        }
    return {"perplexity in fp32": round(whole, 3), "formats": rows}


if __name__ == "__main__":
    main()
