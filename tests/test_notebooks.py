"""Tables of objects in notebooks, and the JSON schema of reports: read by other libraries."""

from __future__ import annotations

import dataclasses
from typing import Any
from xml.etree import ElementTree

import msgspec
import pytest

import pcg
from pcg.explain.report.report import Report
from pcg.runtime.data.example import Example
from tests.support import compiled, oracle
from tests.support.families import BY_NAME
from tests.support.prompts import prompts


def facts_of(value: Any) -> tuple[str | None, dict[str | None, str | None]]:
    """The caption and the rows of an object's table."""
    table = ElementTree.fromstring(value._repr_html_())
    rows = {row[0].text: row[1].text for row in table.iter("tr")}
    return table.findtext("caption"), rows


@pytest.fixture(scope="module")
def report() -> Report:
    return pcg.explain(BY_NAME["llama3"].config(2), "lora", tp=2, gpus="H100")


def test_executors_results_and_jobs() -> None:
    executor = compiled.executor(oracle.random_model(BY_NAME["llama3"].config(2)))
    data = [Example(s, s) for s in prompts((9, 7))]
    options: dict[str, Any] = {"peft": "lora", "max_steps": 2, "batch_size": 1}
    result = executor.finetune(data, adapter="<mine>", progress=False, **options)
    caption, facts = facts_of(executor)
    assert (caption, facts["layers"], facts["adapters"]) == ("llama of pcg", "2", "<mine>")
    caption, facts = facts_of(result)
    assert (caption, facts["steps"]) == ("Adapter <mine>", "2 of 2 (completed)")
    first, last = result.losses[0], result.losses[-1]
    assert facts["loss"] == f"{first:.4f} → {last:.4f}"
    with executor.engine().start() as engine:
        job = engine.finetune(data, "other", **options)
        job.wait(60)
        caption, facts = facts_of(job)
    assert (caption, facts["state"], facts["step"]) == ("Job other", "succeeded", "2")


def test_reports(report: Report) -> None:
    caption, facts = facts_of(report)
    assert caption == "llama, LoRA r16 on all-linear, batch 1 × 1,024 tokens"
    number, unit = str(facts["total"]).split()
    assert unit == "GiB"
    assert float(number) == pytest.approx(report.memory_bytes["total"] / 2**30, 0.02)


def test_json_has_its_schema(report: Report) -> None:
    jsonschema = pytest.importorskip("jsonschema")
    schema, content = Report.json_schema(), report.to_json()
    jsonschema.Draft202012Validator.check_schema(schema)
    jsonschema.validate(content, schema)
    assert msgspec.convert(content, Report) == report
    names = schema["$defs"]["ReportData"]["properties"]
    assert names.keys() == {each.name for each in dataclasses.fields(Report)} == content.keys()
    with pytest.raises(jsonschema.ValidationError):
        jsonschema.validate(content | {"tp": "2"}, schema)
