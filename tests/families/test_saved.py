"""Every family from a directory that transformers saved, against what it reads there itself."""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path
from typing import Any

import pytest
import torch
import transformers

import pcg.compiler as compiler
from tests.support import oracle
from tests.support.families import FAMILIES, Family
from tests.support.prompts import LENGTHS, TOLERANCE, prompts


@dataclass(frozen=True)
class Form:
    """How a model is saved: its dtype, the bytes of a file, and whether the head is tied.

    Attributes:
        tolerance: relative error of logits that rounding explains.
    """

    dtype: torch.dtype
    shard: str
    is_tied: bool | None
    tolerance: float


FORMS = {
    "sharded": Form(torch.float32, "20KB", None, TOLERANCE),
    "bfloat16": Form(torch.bfloat16, "5GB", None, 2e-2),
    "tied": Form(torch.float16, "20KB", True, 4e-3),
    "untied": Form(torch.float32, "5GB", False, TOLERANCE),
}
IN_ALL_FORMS = ("gpt2", "gpt_neox", "llama3.2")
"""Families that the default run compiles in all forms; the others are sharded there, or slow."""
CASES = [
    pytest.param(
        family,
        form,
        id=f"{family}-{form}",
        marks=() if family.name in IN_ALL_FORMS else pytest.mark.slow,
    )
    for family in FAMILIES
    for form in FORMS
]


@pytest.mark.parametrize(("family", "form"), CASES)
def test_logits_of_a_saved_model(family: Family, form: str, tmp_path: Path) -> None:
    saved = FORMS[form]
    changes = {} if saved.is_tied is None else {"tie_word_embeddings": saved.is_tied}
    model = oracle.random_model(family.config(2, **changes), saved.dtype)
    oracle.save_model(model, tmp_path, saved.shard)
    executor = compiler.compile(tmp_path)
    reread = _reread(tmp_path, model)
    for sequence in prompts(LENGTHS):
        expected = oracle.logits(reread, sequence).float()
        found = executor.logits(sequence)
        assert found.dtype is saved.dtype
        assert oracle.relative_error(found.float(), expected) < saved.tolerance


def _reread(directory: Path, model: Any) -> Any:
    """The model that transformers reads, with the attention of the one that was saved."""
    attention = model.config._attn_implementation
    loaded = transformers.AutoModelForCausalLM.from_pretrained(
        directory, dtype="auto", attn_implementation=attention
    )
    return loaded.eval()
