"""The report of `pcg.explain`: its schema, its sums, its text, and what it costs."""

import json
import os
import subprocess
import sys

import peft
import pytest
import sympy

import pcg
import pcg.compiler as compiler
from pcg.errors import UnsupportedError
from pcg.explain import explain as explaining
from pcg.explain.report.report import bar, comparison
from pcg.explain.report.report_data import KINDS
from pcg.peft.lora import LoraConfig
from pcg.runtime.memory.host_memory import SLACK
from pcg.source import resolve
from pcg.units import gib, rounded
from tests.support import tiny_llama
from tests.support.architectures import default_config

LLAMA = "meta-llama/Llama-3.1-8B"
SCHEMA = {
    "model", "architecture", "peft", "tp", "batch", "seq", "dtype", "parameters", "memory_bytes",
    "activations", "formulas", "saved", "parallel",
}  # fmt: skip


@pytest.fixture(scope="module")
def report():
    return pcg.explain(LLAMA, batch=2, seq=512)


def at(formula, batch, seq):
    names = {name: sympy.Symbol(name, integer=True, positive=True) for name in ("B", "S", "tp")}
    values = {names["B"]: batch, names["S"]: seq, names["tp"]: 1}
    return int(sympy.sympify(formula, locals=names).subs(values))


def test_json_has_the_schema(report):
    fields = json.loads(json.dumps(report.to_json()))
    assert set(fields) >= SCHEMA
    assert set(fields["memory_bytes"]) == {*KINDS, "total"}
    assert fields["parallel"] == {"base": [], "bypass": []}
    assert [stage["stage"] for stage in fields["activations"]] == [
        "eager", "pruned", "rematerialized", "compressed", "token-level", "checkpointing",
    ]  # fmt: skip
    row = fields["saved"][0]
    assert row.keys() >= {
        "tensor", "op", "shape", "dtype", "bytes", "formula", "needed_by", "decision", "reason",
    }  # fmt: skip
    decisions = {row["decision"] for row in fields["saved"]}
    assert decisions == {"save", "recompute", "drop"}
    assert fields["pareto"][0]["recompute_flops_ratio"] == 0


def test_labels_replace_the_head():
    """The head of labels is LoRA's to train; nothing is as large as the vocabulary."""
    config = tiny_llama.config()
    causal, of_labels = (pcg.explain(config, "lora", **x) for x in ({}, {"labels": ["a", "b"]}))
    width, rows = config["hidden_size"], config["vocab_size"]
    assert of_labels.parameters["base"] == causal.parameters["base"] - (rows - 2) * width
    assert of_labels.parameters["trainable"] == causal.parameters["trainable"] + 2 * width
    assert of_labels.to_json()["memory_bytes"]["total"] < causal.to_json()["memory_bytes"]["total"]


def test_parameters_and_memory_of_llama(report):
    assert report.parameters["base"] == 8_030_261_248
    # r · (in + out) of q, k, v, o, gate, up and down, in each layer
    h, kv, f = 4096, 1024, 14336
    assert report.parameters["trainable"] == 32 * 16 * (2 * 2 * h + 2 * (h + kv) + 3 * (h + f))
    memory = report.memory_bytes
    # and the frequencies of positions, in fp32
    assert memory["weights"] == 2 * report.parameters["base"] + 4 * 64
    assert memory["adapters"] == memory["gradients"] == 4 * report.parameters["trainable"]
    # two moments of each number, and a count of steps for A and B of each module
    assert memory["optimizer"] == 8 * report.parameters["trainable"] + 4 * 32 * 7 * 2
    assert memory["kv_cache"] == 0
    assert memory["total"] == sum(memory[kind] for kind in KINDS)


def test_formulas_give_the_numbers(report):
    memory = report.memory_bytes
    assert at(report.formulas["activations"], 2, 512) == memory["activations"]
    assert at(report.formulas["total"], 2, 512) == memory["total"]
    for kind, formula in report.formulas.items():
        assert at(formula, 2, 512) == memory[kind]
    for row in report.saved:
        assert at(row.formula, 2, 512) == row.bytes
        assert bool(row.needed_by) == (row.decision != "drop")
        assert row.reason


def test_rows_add_up_to_the_stage(report):
    eager, pruned, rematerialized, compressed, windows, checkpointing = report.activations
    sizes = [checkpointing.bytes, windows.bytes, compressed.bytes, rematerialized.bytes]
    sizes += [pruned.bytes, eager.bytes]
    assert sizes == sorted(sizes)
    kept = [row for row in report.saved if row.decision in ("save", "compress")]
    assert sum(row.bytes * row.layers for row in kept) == compressed.bytes
    in_layers = [row for row in kept if row.tensor.startswith("block_0.")]
    assert sum(row.bytes for row in in_layers) == compressed.bytes_per_block
    assert {row.layers for row in in_layers} == {31}


def test_relu_is_kept_as_bits():
    report = pcg.explain(_short("facebook/opt-6.7b"), peft.LoraConfig(target_modules=["q_proj"]))
    decided = {row.tensor: row for row in report.saved if row.layers == 1}
    assert decided["block_0.relu_signs"].decision == "compress"
    assert decided["block_0.relu"].decision == "drop"
    assert decided["block_0.relu"].bytes == 16 * decided["block_0.relu_signs"].bytes


@pytest.mark.parametrize("budget", [0, 0.5, "120MB"])
def test_a_budget_is_kept(budget):
    config = _short(LLAMA)
    plain, tight = (pcg.explain(config, memory_budget=b) for b in (None, budget))
    kept = {stage.stage: stage for stage in tight.activations}["compressed"]
    assert kept.recompute_flops_ratio > 0
    assert kept.bytes < plain.memory_bytes["activations"]
    assert (plain.pareto, plain.memory_bytes["weights"]) == (
        tight.pareto,
        tight.memory_bytes["weights"],
    )
    if budget == 0:
        assert kept.bytes == tight.pareto[-1].bytes
    if budget == "120MB":
        assert kept.bytes <= 120_000_000


@pytest.mark.parametrize(
    ("budget", "message"),
    [("1MB", "is less than the least"), (-1, "from 0"), ("much", "from 0"), (True, "from 0")],
)
def test_a_budget_that_cannot_be_kept_is_refused(budget, message):
    with pytest.raises(pcg.PcgError, match=message):
        pcg.explain(_short(LLAMA), memory_budget=budget)


def test_text_fits_a_terminal(report):
    text = report.to_text()
    assert max(map(len, text.splitlines())) <= 100
    for word in ("Llama-3.1-8B", "8.03 B", "eager", "pruned", "workspace", "total", "B*S"):
        assert word in text
    assert "block_0.x" not in text
    assert "block_0.x" in report.to_text(tensors=True)


def test_without_adapters():
    report = pcg.explain(_short(LLAMA), None)
    assert report.peft is None
    assert report.activations == ()
    assert report.parameters["trainable"] == 0
    for kind in ("adapters", "gradients", "optimizer", "activations"):
        assert report.memory_bytes[kind] == 0
    assert report.memory_bytes["workspace"] > 0


def test_several_adapters_add_up():
    small = peft.LoraConfig(r=8, target_modules=["q_proj"])
    large = peft.LoraConfig(r=16, target_modules=["q_proj", "down_proj"])
    config = _short(LLAMA)
    one, two, both = (
        pcg.explain(config, recipes) for recipes in (small, large, {"a": small, "b": large})
    )
    trainable = one.parameters["trainable"] + two.parameters["trainable"]
    assert both.parameters["trainable"] == trainable
    assert both.activations[1].bytes == two.activations[1].bytes
    assert "2 adapters" in str(both.peft)


def test_a_mixture_of_experts_says_what_it_counts():
    lora = peft.LoraConfig(target_modules=["q_proj", "v_proj"])
    report = pcg.explain("mistralai/Mixtral-8x7B-v0.1", lora)
    assert report.parameters["base"] == 46_702_792_704
    stages = {stage.stage: stage.bytes for stage in report.activations}
    assert report.memory_bytes["activations"] == stages["compressed"] < 0.65 * stages["eager"]
    least = pcg.explain("mistralai/Mixtral-8x7B-v0.1", lora, memory_budget=0.0)
    assert least.memory_bytes["activations"] < stages["eager"] / 4
    assert {"block_0.topk_indices", "block_0.div"} <= {one.tensor for one in report.saved}
    at_other = at(report.formulas["activations"], 3, 2000)
    other = pcg.explain("mistralai/Mixtral-8x7B-v0.1", lora, batch=3, seq=2000)
    assert at_other == other.memory_bytes["activations"]
    one, two = (report, pcg.explain("mistralai/Mixtral-8x7B-v0.1", lora, tp=2))
    every = pcg.explain("mistralai/Mixtral-8x7B-v0.1", "lora", tp=2).parallel["bypass"]
    sites = [choice["site"] for choice in every]
    assert len(sites) == len(set(sites)) == 7  # with the router and both parameters of experts
    # The router and the norms are whole on each rank; all else, the experts among it, is halved.
    whole = 32 * (8 * 4096 + 2 * 4096) * 2 + 4096 * 2 + 4 * 64
    weights = [each.memory_bytes["weights"] for each in (one, two)]
    assert 2 * (weights[1] - whole) == weights[0] - whole


def test_vectors_over_ranks_are_named_as_they_are_held():
    """Ranks hold parts of some biases and of sinks; a bias of a sum over ranks is on the first."""
    report = pcg.explain(default_config("gpt_oss", 1), "lora", tp=2)
    found = {line[2:19].strip(): line[19:] for line in report.to_text().splitlines()}
    assert found["row-parallel"] == "o_proj, down_proj"
    assert found["in parts"] == "q_proj.bias, k_proj.bias, v_proj.bias, sinks"
    assert found["on one rank"] == "o_proj.bias, down_proj_bias"


def test_ranks_above_the_number_of_kv_heads_hold_little_more_than_their_share():
    """Llama-3.1-70B has 8 KV heads: of 16 ranks each holds one, as a second one does."""
    one, many = (pcg.explain("meta-llama/Llama-3.1-70B", None, tp=tp) for tp in (1, 16))
    weights = [report.memory_bytes["weights"] for report in (one, many)]
    norms = (2 * 80 + 1) * 8192 * 2 + 4 * 64
    assert weights[1] - norms <= 1.02 * (weights[0] - norms) / 16


def test_what_a_process_on_a_cpu_has_beside_a_gpus_memory_is_named():
    options = {"device": "cpu", "dtype": "float32"}
    whole, half = (pcg.explain(_short(LLAMA), memory_budget=b, **options) for b in (1, 0.5))
    step = sum(whole.memory_bytes[kind] for kind in ("gradients", "activations", "workspace"))
    assert whole.allocator_bytes == round(SLACK * step)
    assert half.allocator_bytes == pcg.explain(_short(LLAMA)).allocator_bytes == 0
    assert "holes in the allocator's heap" in whole.to_text()
    assert "holes" not in half.to_text()
    assert "holes of the allocator" in whole.to_html()


@pytest.mark.parametrize(
    ("options", "message"),
    [({"batch": 0}, "batch=0"), ({"seq": -1}, "seq=-1"), ({"batch": True}, "batch=True")],
)
def test_what_cannot_be_explained_is_refused(options, message):
    with pytest.raises(UnsupportedError, match=message):
        pcg.explain(LLAMA, **options)


TRAINED = {
    "lora": 2 * 16 * (2 * (4096 + 4096) + 2 * (4096 + 1024) + 3 * (4096 + 14336)),
    "dora": 2 * (16 * (2 * (4096 + 4096) + 2 * (4096 + 1024) + 3 * (4096 + 14336))
                 + 3 * 4096 + 2 * 1024 + 2 * 14336),
    "adalora": 2 * 12 * (2 * 8193 + 2 * 5121 + 3 * 18433),
    "ia3": 2 * (1024 + 1024 + 14336),
    "vera": 2 * (7 * 256 + 3 * 4096 + 2 * 1024 + 2 * 14336),
    "loha": 2 * 2 * 8 * (2 * 8192 + 2 * 5120 + 3 * 18432),
    "houlsby": 2 * 2 * (2 * 64 * 4096 + 64 + 4096),
    "parallel": 2 * (2 * 64 * 4096 + 64 + 4096),
}  # fmt: skip


def test_every_method_is_accounted_for():
    reports = explaining.compare(_short(LLAMA), dict(zip(TRAINED, TRAINED, strict=True)))
    assert {name: r.parameters["trainable"] for name, r in reports.items()} == TRAINED
    for report in reports.values():
        stages = [stage.stage for stage in report.activations]
        assert {"eager", "pruned", "rematerialized", "compressed"} <= set(stages)
        assert report.memory_bytes["activations"] > 0
    text = comparison(reports)
    assert max(map(len, text.splitlines())) <= 100
    assert all(name in text for name in TRAINED)
    assert reports["lora"] == pcg.explain(_short(LLAMA), "lora")


def test_what_fits_a_gpu():
    config = _short(LLAMA)
    (fit,) = pcg.explain(config, batch=32, seq=2048, gpus=["l4"]).fits
    assert not fit.fits
    assert 0 < fit.largest_batch < 32
    assert fit.largest_batch < fit.least_largest_batch

    def total(**options):
        return pcg.explain(config, **options).memory_bytes["total"]

    assert total(batch=fit.largest_batch, seq=2048) <= fit.usable_bytes
    assert total(batch=fit.largest_batch + 1, seq=2048) > fit.usable_bytes
    assert total(batch=32, seq=fit.largest_seq) <= fit.usable_bytes
    assert total(batch=32, seq=fit.largest_seq + 1) > fit.usable_bytes
    least = {"seq": 2048, "memory_budget": 0}
    assert total(batch=fit.least_largest_batch, **least) <= fit.usable_bytes
    assert total(batch=fit.least_largest_batch + 1, **least) > fit.usable_bytes
    (word, budget), *_ = (option.split() for option in fit.advice)
    assert word == "--memory-budget"
    assert total(batch=32, seq=2048, memory_budget=budget) <= fit.usable_bytes


def test_the_region_of_a_plan():
    config = _short(LLAMA)

    def plan(seq):
        """What is decided of each tensor, and in how many layers."""
        report = pcg.explain(config, seq=seq, memory_budget=0.4)
        return [(row.tensor, row.decision, row.layers) for row in report.saved]

    low, high = pcg.explain(config, memory_budget=0.4, find_region=True).region or (0, 0)
    assert low <= 1024 <= high
    assert plan(low) == plan(1024) == plan(high)
    assert plan(high + 1) != plan(high)
    assert low == 1 or plan(low - 1) != plan(low)


def _numbers(report, **symbols):
    """The report's formulas at these numbers."""
    values = {sympy.Symbol(name, integer=True, positive=True): n for name, n in symbols.items()}
    return {
        name: int(sympy.sympify(text, locals={s.name: s for s in values}).subs(values))
        for name, text in report.formulas.items()
    }


@pytest.mark.parametrize(
    ("name", "budget"), [(LLAMA, 0.4), pytest.param("facebook/opt-6.7b", 1, marks=pytest.mark.slow)]
)
def test_formulas_in_the_rank(name, budget):
    config = _short(name)

    def report(rank, **options):
        recipe = LoraConfig(r=rank, target_modules="all-linear")
        return pcg.explain(config, recipe, memory_budget=budget, **options)

    found = report(8, find_region=True)
    low, high = found.rank_region or (0, 0)
    assert low <= 8 <= high
    for rank in {low, 8, min(high, 64)}:
        assert _numbers(found, B=1, S=1024, r=rank) == report(rank).memory_bytes
    kept = [[(row.tensor, row.decision) for row in report(r).saved] for r in (low, 8, high)]
    assert kept[0] == kept[1] == kept[2]
    assert "rank r" in found.to_text(formulas=True)


def test_ranks_that_differ_give_no_formula_in_the_rank():
    recipe = LoraConfig(r=8, target_modules="all-linear", rank_pattern={"q_proj": 4})
    report = pcg.explain(_short(LLAMA), recipe, find_region=True)
    assert report.region is not None
    assert report.rank_region is None
    assert _numbers(report, B=1, S=1024) == report.memory_bytes


def test_an_unknown_gpu_is_refused():
    with pytest.raises(UnsupportedError, match=r"'H20'.*did you mean H200\?.*L40S"):
        pcg.explain(LLAMA, gpus=["H20"])


def test_numbers_as_people_read_them():
    assert [gib(size) for size in (0, 2**20, 2**30, 5 * 2**40)] == [
        "0",
        "0.0010",
        "1.00",
        "5,120.00",
    ]
    assert [rounded(n) for n in (12, 41_943_040, 8_030_261_248)] == ["12", "41.94 M", "8.03 B"]
    assert bar(1, 10**6) == "▏"
    assert bar(0, 10) == ""
    assert bar(1, 2, 4) == "██"


@pytest.mark.slow
def test_the_whole_process_is_small():
    """Its peak is of the weights' types alone; benchmarks/startup.py has times."""
    # Not ru_maxrss, which a child inherits from the process that starts it.
    code = (
        "import pcg; pcg.explain('meta-llama/Llama-3.1-70B')\n"
        "print(open('/proc/self/status').read().split('VmHWM:')[1].split()[0])"
    )
    ended = subprocess.run(
        [sys.executable, "-c", code],
        check=True,
        capture_output=True,
        env={**os.environ, "PYTHONPATH": os.getcwd(), "HF_HUB_OFFLINE": "1"},
    )
    assert int(ended.stdout) * 1024 <= 2**30


def test_depth_costs_no_nodes():
    """Every pass sees as many nodes in 80 layers as in 4; benchmarks/startup.py has times."""
    deep = dict(resolve("meta-llama/Llama-3.1-70B").config)
    nodes = []
    for config in (deep, {**deep, "num_hidden_layers": 4}):
        found = {}
        compiler.compile_program(
            config, observe=lambda r, found=found: found.update({r.name: r.nodes})
        )
        nodes.append(found)
    assert nodes[0] == nodes[1]


def _short(model):
    return {**resolve(model).config, "num_hidden_layers": 2}
