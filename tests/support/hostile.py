"""Values, paths and documents that a stranger may send, for the doors through which they come."""

from __future__ import annotations

import copy
import itertools
import json
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any

import torch
from hypothesis import strategies as st
from safetensors.torch import save_file

NESTED = "[" * 20_000
"""JSON in more brackets than any parser's stack has room for."""
DIGITS = "1" * 5_000
"""A number with more digits than Python reads."""
PATHS = ("a" * 5_000, "/".join(["b"] * 4_000), "half \ud800", "zero \0", "/dev/null")
"""Names that no file has, or no file of data."""


class Raw:
    """Text that stands in a document as it is, though no value prints so."""

    def __init__(self, text: str) -> None:
        self.text = text

    def __repr__(self) -> str:
        return f"Raw({self.text[:10]!r}…)"


VALUES: tuple[Any, ...] = (
    None, True, -1, 0, 0.5, 2**31, 2**63, 10**400, 1e308, float("nan"), float("inf"), "", "x",
    "half \ud800", "zero \0", "a" * 5_000, "(a+)+$", "1", [], [None], ["x", 1], {},
    {"x": {}}, Raw(NESTED), Raw(DIGITS),
)  # fmt: skip

Keys = tuple[str | int, ...]


def places(value: Any, keys: Keys = ()) -> Iterator[Keys]:
    """The keys of everything in a document, but for itself."""
    if not isinstance(value, dict | list):
        return
    for key, item in value.items() if isinstance(value, dict) else enumerate(value):
        yield (*keys, key)
        yield from places(item, (*keys, key))


def text_of(document: Any) -> str:
    """JSON, with raw texts as they are."""
    raw: list[str] = []

    def hold(value: object) -> str:
        assert isinstance(value, Raw)
        raw.append(value.text)
        return f"raw {len(raw) - 1}"

    text = json.dumps(document, default=hold)
    for index, each in enumerate(raw):
        text = text.replace(f'"raw {index}"', each)
    return text


@st.composite
def mangled(draw: st.DrawFn, document: Any) -> Any:
    """A document with one to three of its parts replaced, removed or added."""
    made = copy.deepcopy(document)
    for _ in range(draw(st.integers(1, 3))):
        keys = draw(st.sampled_from([(), *places(made)]))
        value = draw(st.sampled_from(VALUES))
        if not keys:
            if isinstance(made, dict):
                made[draw(st.sampled_from(["x", "", "half \ud800"]))] = value
            continue
        holder = made
        for key in keys[:-1]:
            holder = holder[key]
        if draw(st.booleans()) or isinstance(holder, list):
            holder[keys[-1]] = value
        else:
            del holder[keys[-1]]
    return made


@st.composite
def damaged(draw: st.DrawFn, content: bytes) -> bytes:
    """Bytes of which some are cut, changed or doubled."""
    at = draw(st.integers(0, len(content)))
    how = draw(st.sampled_from(["cut", "bits", "doubled", "start"]))
    if how == "cut":
        return content[:at]
    if how == "bits":
        return content[:at] + bytes([draw(st.integers(0, 255))]) + content[at + 1 :]
    if how == "doubled":
        return content[:at] + content[at // 2 :]
    return draw(st.binary(min_size=8, max_size=24)) + content[8:]


# ----------------------------------------------------------------------------- over HTTP


def large_bodies(model: str, size: int = 1_000_000) -> list[bytes]:
    """Bodies of completions with very many elements, some of which stand in many brackets."""
    few = size // 8
    fields: list[dict[str, Any]] = [
        {"prompt": [5] * size},
        {"prompt": [1, 2, 3], "logit_bias": {str(place): 1.0 for place in range(few)}},
        {"prompt": [1, 2, 3], **{f"key {place}": 1 for place in range(few)}},
        {"prompt": [1, 2, 3], "stop": ["x"] * few},
        {"prompt": [[1, 2]] * (size // 4)},
        {"prompt": "x " * size},
    ]
    texts = [json.dumps({"model": model, "max_tokens": 1, **one}) for one in fields]
    texts.append(f'{{"model": "{model}", "prompt": [1], "x": {NESTED}')
    return [text.encode() for text in texts]


def bad_fields(model: str) -> list[dict[str, Any]]:
    """Bodies of completions that are refused, or cost as much as a client may ask for."""
    fields: list[dict[str, Any]] = [
        {"temperature": -1}, {"top_k": -2}, {"logprobs": 10**6}, {"n": 10**9}, {"stop": [""] * 99},
        {"logit_bias": {str(10**9): 1}}, {"seed": {}}, {"max_tokens": 10**9}, {"prompt": [-1]},
        {"guided_regex": "(a+)+b" * 90}, {"response_format": {"type": "json_schema"}},
        {"n": 16, "temperature": 1.0}, {"logprobs": 5, "echo": True}, {"user": "x" * 10_000},
    ]  # fmt: skip
    return [{"model": model, "prompt": [1, 2, 3], "max_tokens": 4, **one} for one in fields]


def write_adapters(folder: Path, shapes: Mapping[str, tuple[int, int]], layers: int) -> list[str]:
    """Write adapters of a hostile tenant into a folder; returns their names.

    They are LoRA on the attention of all layers: small ones, more than a server keeps; of ranks up
    to 2,000; with NaN; and DoRA with a scale that no float holds.

    Args:
        shapes: the rows and columns of each of the modules' weights, by name.
    """
    names = {f"small-{place}": 8 for place in range(16)}
    names |= {f"rank-{rank}": rank for rank in (256, 1000, 2000)} | {"nan": 8, "alpha": 8}
    for name, rank in names.items():
        config: dict[str, Any] = {"peft_type": "LORA", "r": rank, "target_modules": [*shapes]}
        config |= {"lora_alpha": 1e300, "use_dora": True} if name == "alpha" else {}
        tensors: dict[str, torch.Tensor] = {}
        for layer, (module, (rows, columns)) in itertools.product(range(layers), shapes.items()):
            place = f"base_model.model.model.layers.{layer}.self_attn.{module}"
            value = float("nan") if name == "nan" else 1e-3
            tensors[f"{place}.lora_A.weight"] = torch.full((rank, columns), value)
            tensors[f"{place}.lora_B.weight"] = torch.full((rows, rank), value)
            if name == "alpha":
                tensors[f"{place}.lora_magnitude_vector"] = torch.ones(rows)
        (folder / name).mkdir(parents=True)
        (folder / name / "adapter_config.json").write_text(json.dumps(config))
        save_file(tensors, folder / name / "adapter_model.safetensors")
    return [*names]
