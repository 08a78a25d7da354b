"""Every causal LM of transformers runs as transformers runs it, or is refused by its cause."""

from __future__ import annotations

import re

import pytest
import transformers

import pcg.compiler as compiler
from pcg.errors import PcgError
from pcg.trace.model_config import CAUSES, cause_of
from tests.support.architectures import CAUSAL_LMS, default_config
from tests.support.model_table import DOCUMENT, EXPLAINS, RUNS, outcome, outcome_of, table, written
from tests.support.parameters import mostly_slow

TEXT = DOCUMENT.read_text("utf-8")
WRITTEN = written()
VERSION = re.compile(r"(?<=of transformers )[\d.]+")
FIRST = {
    name: kind
    for kind, name in reversed(WRITTEN.items())
    if name not in (RUNS, EXPLAINS) and kind in CAUSAL_LMS
}
"""One model type of each cause."""
DENSE_GRANITE = {
    "layer_types": ["attention"] * 4,
    "num_local_experts": 0,
    "position_embedding_type": "rope",
}


def test_the_example_of_the_document_runs(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.chdir(DOCUMENT.parents[1])
    blocks = re.findall(r"^```python\n(.*?)^```$", TEXT, re.MULTILINE | re.DOTALL)
    (example,) = (block for block in blocks if "memory_bytes" in block)
    exec(compile(example, "models.md", "exec"), {})
    assert "'kv_cache'" in capsys.readouterr().out


def test_the_document_is_of_the_table_of_causes() -> None:
    made, there = (VERSION.sub("", text) for text in (table(WRITTEN), TEXT))
    assert made in there


@pytest.mark.skipif(transformers.__version__ not in TEXT, reason="another transformers")
def test_the_document_has_every_causal_lm() -> None:
    assert sorted(WRITTEN) == sorted(CAUSAL_LMS)


@pytest.mark.parametrize("name", mostly_slow(FIRST, *list(FIRST)[::3]))
def test_a_refusal_names_its_cause_in_one_line(name: str) -> None:
    with pytest.raises(PcgError) as refused:
        compiler.compile_program(default_config(FIRST[name]))
    message = str(refused.value)
    found = cause_of(message)
    assert found is not None
    assert found.name == name or transformers.__version__ not in TEXT
    assert "\n" not in message
    assert len(message) <= 400
    assert "TORCH_LOGS" not in message


def test_names_of_causes_tell_them_apart() -> None:
    for cause in CAUSES:
        assert cause_of(f"cannot trace a model: {cause.name}") is cause


@pytest.mark.parametrize(
    "kind", mostly_slow([k for k in ("granitemoe", "flint") if k in CAUSAL_LMS], "flint")
)
def test_checkpoints_with_names_of_their_own(kind: str) -> None:
    assert outcome(kind, [24]) == RUNS


def test_granite_4_without_experts_and_recurrence() -> None:
    assert outcome_of({**default_config("granitemoehybrid"), **DENSE_GRANITE}, [24]) == RUNS


@pytest.mark.slow
@pytest.mark.parametrize("kind", CAUSAL_LMS)
def test_it_is_transformers_own_or_refused_as_documented(kind: str) -> None:
    assert outcome(kind) == WRITTEN[kind]
