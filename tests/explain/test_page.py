"""The report as an HTML page: what it holds, that it escapes, and that a browser shows it well."""

import dataclasses
import json
import re
import subprocess
import sys
from html import unescape
from html.parser import HTMLParser

import peft
import pytest
from typer.testing import CliRunner

import pcg
from cli.application import app
from pcg.explain.report.layer_graph import layered
from pcg.explain.report.report_data import KINDS, GpuCapacity, Stage
from pcg.ir.operators.base import Operator
from pcg.ir.operators.experts import ExpertLinear
from pcg.source import resolve
from tests.support.browser import browser_path

LLAMA = "meta-llama/Llama-3.1-8B"
VOID = {"input", "meta"}
SECTIONS = ["memory", "stages", "timeline", "pareto", "tensors", "graph", "formulas"]


@pytest.fixture(scope="module")
def report():
    return pcg.explain(short(LLAMA, 6), batch=2, seq=512, memory_budget=0.3)


@pytest.fixture(scope="module")
def page(report):
    return Page(report.to_html())


def short(model, layers=2):
    return {**resolve(model).config, "num_hidden_layers": layers}


class Page(HTMLParser):
    """Elements as (tag, attributes), and text; fails where tags do not match."""

    def __init__(self, html):
        super().__init__()
        self.html = html
        self.elements = []
        self.text = ""
        self._open = []
        self.feed(html)
        self.close()
        assert self._open == []

    def handle_starttag(self, tag, attrs):
        self.elements.append((tag, dict(attrs)))
        if tag not in VOID:
            self._open.append(tag)

    def handle_endtag(self, tag):
        assert self._open.pop() == tag

    def handle_data(self, data):
        if self._open[-1:] not in (["style"], ["script"]):
            self.text += data

    def of(self, tag):
        return [attributes for name, attributes in self.elements if name == tag]


# --------------------------------------------------------------------------------------- the data


def test_moments_agree_with_the_memory(report):
    kept, workspace = (report.memory_bytes[kind] for kind in ("activations", "workspace"))
    moments = report.timeline
    assert [moment.label for moment in moments] == [
        *(f"forward {i}" for i in range(6)),
        "loss",
        *(f"backward {i}" for i in reversed(range(6))),
    ]
    assert max(moment.kept_bytes for moment in moments) == kept
    peak = max(moment.kept_bytes + moment.workspace_bytes for moment in moments)
    assert peak == kept + workspace
    assert min(moment.workspace_bytes for moment in moments) > 0
    forward = [moment.kept_bytes for moment in moments[:6]]
    assert forward == sorted(forward)
    # A layer frees what it kept as it reads it, so that counts as its workspace.
    assert [moment.kept_bytes for moment in moments[7:-1]] == forward[-2::-1]


def test_a_layer_that_trains_nothing_has_no_backward():
    head = peft.LoraConfig(target_modules=["lm_head"])
    labels = [moment.label for moment in pcg.explain(short(LLAMA), head).timeline]
    assert labels == ["forward 0", "forward 1", "loss"]


def test_the_graph_is_of_the_tensors(report):
    names = [node.name for node in report.graph]
    assert len(set(names)) == len(names)
    for index, node in enumerate(report.graph):
        assert set(node.inputs) <= set(names[:index])
        assert "reshape" not in node.op
    most = max(row.layers for row in report.saved)
    rows = {row.tensor.partition(".")[2]: row for row in report.saved if row.layers == most}
    decided = {node.name: node.decision for node in report.graph if node.name in rows}
    assert len(decided) >= len(names) - 2  # all but what the layers share
    assert decided == {name: rows[name].decision for name in decided}


# --------------------------------------------------------------------------------------- the page


def test_it_needs_no_other_file(page):
    assert page.html.startswith("<!DOCTYPE html>")
    for tag, attributes in page.elements:
        assert tag not in ("link", "img", "iframe", "object", "base")
        assert not {"src", "srcset", "data", "xlink:href"} & set(attributes)
        assert (attributes.get("href") or "#").startswith("#")
    assert not re.search(r"https?://|url\(|@import|\bfetch\b|\bimport\(", page.html)


def test_it_shows_all_of_the_report(page, report):
    assert [attributes["id"] for attributes in page.of("section")] == SECTIONS
    rows = [attributes for attributes in page.of("tr") if "data-tensor" in attributes]
    assert [row["data-tensor"] for row in rows] == [row.tensor for row in report.saved]
    assert [row["data-decision"] for row in rows] == [row.decision for row in report.saved]
    for row in report.saved:
        for text in (row.tensor.partition(".")[2], row.reason, row.formula, row.dtype):
            assert text in page.text
    for text in (
        *(stage.stage for stage in report.activations),
        *(kind for kind in KINDS if kind != "kv_cache"),
        *(moment.label for moment in report.timeline),
        *(node.name for node in report.graph),
        *report.formulas.values(),
        *report.notes,
        report.architecture,
        "chosen plan",
        "batch 2 × 512 tokens",
    ):
        assert text in page.text


def test_names_in_it_are_unique_and_figures_have_words(page):
    ids = [attributes["id"] for _, attributes in page.elements if "id" in attributes]
    assert len(set(ids)) == len(ids)
    for link in page.of("a"):
        assert str(link["href"]).removeprefix("#") in ids
    tags = [tag for tag, _ in page.elements]
    for index, (tag, attributes) in enumerate(page.elements):
        if tag == "svg" and attributes.get("role") == "img":
            assert tags[index + 1] == "title"
    assert tags.count("caption") == tags.count("table")


def test_it_says_how_to_show_on_a_phone_and_in_the_dark(page):
    (viewport,) = [m for m in page.of("meta") if m.get("name") == "viewport"]
    assert viewport["content"] == "width=device-width, initial-scale=1"
    assert "prefers-color-scheme: dark" in page.html
    assert "@media print" in page.html


def test_every_way_to_train_is_a_point(report):
    more = Stage("torch-partitioner", report.activations[0].bytes // 2, 1, 0.02)
    page = Page(dataclasses.replace(report, activations=(*report.activations, more)).to_html())
    for name in ("eager", "checkpointing", "torch-partitioner", "chosen plan"):
        assert f">{name}</text>" in page.html
    for name in ("pruned", "rematerialized"):
        assert f">{name}</text>" not in page.html


def test_gpus_have_their_largest_steps_and_advice(report):
    small = GpuCapacity(
        "L4", 24 << 30, 23 << 30, False, 0, 3, 4_321, 5, ("--seq 3", "a larger GPU")
    )
    page = Page(dataclasses.replace(report, fits=(small,)).to_html())
    assert [attributes["id"] for attributes in page.of("section")][1] == "fits"
    assert "4,321" in page.text
    assert "does not fit" in page.text
    assert re.search(r"To make it fit on L4:\s+--seq 3\s*, or a larger GPU", page.text)


def test_names_are_escaped(report):
    evil = '<script>alert("1")</script>&amp;'
    row = dataclasses.replace(report.saved[0], tensor=f"{evil}.{evil}", reason=evil)
    node = dataclasses.replace(report.graph[0], name=evil)
    page = Page(
        dataclasses.replace(
            report, model=evil, notes=(evil,), saved=(row,), graph=(node,), peft=evil
        ).to_html()
    )
    assert len(page.of("script")) == 1
    assert "<script>alert" not in page.html
    assert page.text.count(evil) >= 6


def test_without_adapters():
    page = Page(pcg.explain(short(LLAMA), None).to_html())
    assert [section["id"] for section in page.of("section")] == ["memory", "formulas"]
    assert "no adapters" in page.text


def test_a_model_that_pcg_does_not_train(monkeypatch):
    monkeypatch.setattr(ExpertLinear, "gradient", Operator.gradient)
    report = pcg.explain(short("mistralai/Mixtral-8x7B-v0.1"))
    page = Page(report.to_html())
    assert (report.timeline, report.graph) == ((), ())
    ids = [section["id"] for section in page.of("section")]
    assert ids == ["memory", "stages", "formulas", "notes"]
    assert "no gradient" in page.text


def test_a_method_that_peft_does_not_have_is_measured_as_the_paper_writes_it():
    houlsby = pcg.explain(short(LLAMA), "houlsby")
    saved = {stage.stage: stage.bytes for stage in houlsby.activations}
    assert saved["eager"] > saved["pruned"] > 0
    assert "eager saves" in Page(houlsby.to_html()).text


def test_only_the_page_imports_what_draws_it():
    code = "import sys, pcg.explain.report.report, pcg_cli.explain; print(*sys.modules)"
    ended = subprocess.run([sys.executable, "-c", code], check=True, capture_output=True, text=True)
    assert not [name for name in ended.stdout.split() if name == "pcg.explain.report.page"]


# --------------------------------------------------------------------------------------- its parts


def test_a_layout_puts_nodes_under_what_they_read_and_apart():
    inputs = {
        "x": [], "scale": [], "a": ["x"], "b": ["x"], "c": ["a", "b"], "d": ["c", "scale", "x"],
    }  # fmt: skip
    widths = dict.fromkeys(inputs, 40.0)
    made = layered(inputs, widths, 10.0)
    assert made.ranks == {"x": 0, "a": 1, "b": 1, "c": 2, "scale": 2, "d": 3}
    for one in inputs:
        for other in inputs:
            if one < other and made.ranks[one] == made.ranks[other]:
                assert abs(made.centres[one] - made.centres[other]) >= 50 - 1e-6
    assert len(made.paths["x", "d"]) == 4
    places = [*made.centres.values(), *(place for path in made.paths.values() for place in path)]
    assert all(0 <= place <= made.width for place in places)


# -------------------------------------------------------------------------------------- the command


def run(*args):
    return CliRunner().invoke(app, ["explain", "llama-3.2-1b", "--seq", "64", *args])


def test_the_command_writes_it(tmp_path):
    path = tmp_path / "report.html"
    result = run("--html", str(path))
    assert result.exit_code == 0
    assert "Llama-3.2-1B" in result.stdout
    assert re.search(rf"^wrote {re.escape(str(path))} \(\d+\.\d KiB\)$", result.stdout, re.M)
    assert Page(path.read_text(encoding="utf-8")).of("section")
    result = run("--html", str(path), "--json")
    assert json.loads(result.stdout)["timeline"]
    assert "wrote" in result.stderr
    assert list(tmp_path.iterdir()) == [path]


def test_the_command_refuses_places_that_cannot_be(tmp_path):
    for path, message in ((tmp_path, "is a directory"), (tmp_path / "no" / "a.html", "make it")):
        result = run("--html", str(path))
        assert result.exit_code == 1
        assert message in result.stderr
        assert result.stdout == ""
    assert list(tmp_path.iterdir()) == []


# --------------------------------------------------------------------------------------- a browser

CHECK = """
<script>
const found = {errors: []};
addEventListener("error", (event) => found.errors.push(event.message));
const output = () => document.querySelector(".filter output").textContent;
const visible = () => [...document.querySelectorAll("tr[data-decision]")]
  .filter((row) => row.getClientRects().length).map((row) => row.dataset.decision);
addEventListener("load", () => {
  found.wide = document.documentElement.scrollWidth;
  found.view = innerWidth;
  found.start = [output(), visible().length];
  for (const box of document.querySelectorAll(".filter [type=checkbox]")) {
    box.checked = box.value === "save";
  }
  const form = document.querySelector(".filter");
  form.dispatchEvent(new Event("input"));
  found.save = [output(), [...new Set(visible())], visible().length];
  form.elements.words.value = "no such words";
  form.dispatchEvent(new Event("input"));
  const groups = [...document.querySelectorAll(".tensors .group")];
  found.none = [visible().length, groups.filter((row) => row.getClientRects().length).length];
  const hit = document.querySelector("#timeline .point");
  hit.dispatchEvent(new PointerEvent("pointerover", {bubbles: true}));
  found.readout = document.querySelector("#timeline .readout").textContent;
  found.sticking = [...document.querySelectorAll("main *")].filter((e) => !e.closest(".scroll") &&
    !e.closest("svg") && e.getBoundingClientRect().right > innerWidth + 1).map((e) => e.outerHTML);
  parent.postMessage(JSON.stringify(found), "*");
});
</script>
"""


FRAME = """<!DOCTYPE html>
<script>addEventListener("message", (event) => { document.title = event.data; });</script>
<iframe src="page.html" width="360" height="800" style="border: 0"></iframe>
"""


@pytest.fixture(scope="module")
def browser():
    return browser_path()


def shown(browser, place, hash_=""):
    """The document after its scripts have run."""
    ended = subprocess.run(
        [
            browser, "--headless=new", "--no-sandbox", "--disable-gpu", "--dump-dom",
            "--virtual-time-budget=5000", f"--user-data-dir={place.parent / 'profile'}",
            f"{place.as_uri()}{hash_}",
        ],
        check=True, capture_output=True, text=True, timeout=120,
    )  # fmt: skip
    return ended.stdout


def test_a_phone_shows_it(browser, report, tmp_path):
    # The check stands before the page's own script, to see its errors.
    html = report.to_html().replace("<script>", f"{CHECK}<script>", 1)
    (tmp_path / "page.html").write_text(html, encoding="utf-8")
    # In a frame, because a browser's window may be no narrower than 500 pixels.
    (tmp_path / "frame.html").write_text(FRAME, encoding="utf-8")
    dom = shown(browser, tmp_path / "frame.html")
    title = re.search(r"<title>(\{.*?\})</title>", dom)
    found = json.loads(unescape(title[1]))
    count = len(report.saved)
    saved = sum(row.decision == "save" for row in report.saved)
    assert found["errors"] == []
    assert found["wide"] <= found["view"] == 360
    assert found["sticking"] == []
    assert found["start"] == [f"{count} of {count} tensors", count]
    assert found["save"] == [f"{saved} of {count} tensors", ["save"], saved]
    assert found["none"] == [0, 0]
    assert found["readout"].startswith("forward 0: ")


def test_the_address_chooses_the_filter(browser, report, tmp_path):
    (tmp_path / "page.html").write_text(report.to_html(), encoding="utf-8")
    dom = shown(browser, tmp_path / "page.html", "#show=recompute,drop")
    count = sum(row.decision in ("recompute", "drop") for row in report.saved)
    assert f"<output>{count} of {len(report.saved)} tensors</output>" in dom
