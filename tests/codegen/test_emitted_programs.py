"""Emitted source stays as it is, to the byte, until it is changed on purpose.

`tests/support/emitted_programs.py` says how to renew what is pinned.
"""

from __future__ import annotations

import difflib
import inspect
from itertools import islice

import pytest
from transformers.models.llama import modeling_llama

from tests.support.emitted_programs import CASES, Case, pinned

SHOWN = 40
"""Lines of a difference that a failure shows."""
OTHER_ROTARY = "inv_freq_expanded" in inspect.getsource(modeling_llama.LlamaRotaryEmbedding)
"""Older transformers compute rotary angles by a product of matrices."""


@pytest.mark.skipif(OTHER_ROTARY, reason="pinned with another transformers")
@pytest.mark.parametrize(
    "case",
    [pytest.param(case, marks=() if case in CASES[:4] else pytest.mark.slow) for case in CASES],
    ids=str,
)
def test_emitted_source_is_the_pinned_one(case: Case) -> None:
    for kind, source in case.sources().items():
        before = pinned()[str(case)][kind]
        if source != before:
            lines = difflib.unified_diff(
                before.splitlines(), source.splitlines(), "pinned", f"{kind}.py", n=1, lineterm=""
            )
            pytest.fail("\n".join(["the emitted source changed:", *islice(lines, SHOWN)]))


def test_every_program_is_pinned() -> None:
    assert pinned().keys() == {str(case) for case in CASES}
