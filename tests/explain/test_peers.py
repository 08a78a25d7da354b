"""torch's min-cut partitioner beside pcg's plans: `pcg explain --peers`.

At every budget of torch's, our layers keep no more than its layers where as many operations are
made again; where it makes more again than our least needs, no more than our least. The front
between two corners is attainable to within one layer. torch's graph has no mask here, which spares
it repeated keys and values.

Where an architecture has no SDPA or an attention of its own, torch may see its two products apart,
and make the scores again without the product with the values. Our attention is one operator, as a
fused kernel is, whose backward reads its output: it makes both again. There the second is allowed.
"""

import json
from html import unescape

import pytest

import pcg
from pcg.explain.baseline_stages import peer_point
from pcg.explain.baselines.peers import BUDGETS, MASKLESS, torch_partitioner
from pcg.ir.analysis.dataflow import graph_flops, node_flops
from pcg.peft.lora import LoraConfig
from pcg.source import resolve
from tests.support.families import BY_NAME, FAMILIES
from tests.support.models import raised, traced

LLAMA = "meta-llama/Llama-3.1-8B"
SEQ = 32
LORA = {"peft_type": "LORA", "r": 4}
METHODS = {
    "all-linear": {**LORA, "target_modules": "all-linear"},
    "usual": {**LORA, "target_modules": None},
    "biases": {**LORA, "bias": "all", "target_modules": None},
    "dora": {**LORA, "target_modules": "all-linear", "use_dora": True},
    "ia3": {"peft_type": "IA3"},
}
QUICK = (("opt", "usual"),)
WINDOWS = ("mistral-window", "qwen2.5-windows", "qwen2.5-layer_types", "phi3-window")
"""torch's attention has a window in its mask alone: it makes more operations than are counted."""
CASES = [
    pytest.param(
        str(family), method, marks=[] if (str(family), method) in QUICK else pytest.mark.slow
    )
    for family in FAMILIES
    for method in METHODS
    if str(family) not in WINDOWS
]


def adapter_of(family, method):
    """adapter_config.json."""
    fields = dict(METHODS[method])
    if fields["peft_type"] == "LORA" and fields["target_modules"] is None:
        fields["target_modules"] = list(BY_NAME[family].usual_targets)
    return fields


@pytest.mark.parametrize(("family", "method"), CASES)
def test_no_more_bytes_than_torch_at_the_same_operations(family, method):
    config, adapter = BY_NAME[family].config(3), adapter_of(family, method)
    try:
        report = pcg.explain(config, adapter, seq=SEQ, dtype="bfloat16")
        models = torch_partitioner(config, "bfloat16", adapter, 1, SEQ, attention=MASKLESS)
    except pcg.PcgError as error:
        pytest.skip(str(error))
    outside = sum(
        row.bytes
        for row in report.saved
        if row.decision in ("save", "compress") and not row.tensor.startswith("block_")
    )
    points = [peer_point(model) for model in models]
    assert [point.budget for point in points] == list(BUDGETS)
    is_apart = traced(family).attention != "sdpa"
    for point in points:
        again = point.recompute_flops_ratio
        ours = report.saved_bytes_at(again + (values_share(family) if again and is_apart else 0.0))
        assert ours is not None
        assert ours - outside <= point.bytes - point.outside_bytes, point


def values_share(family):
    """The product of attention with its values, as a share of the layers' operations."""
    model = raised(family)
    blocks = [model.blocks[index] for index in model.layers]
    products = [(node, block) for block in blocks for node in block.nodes if node.op == "attention"]
    values = sum(node_flops(block, node, SEQ, SEQ) for node, block in products) / 2
    return values / sum(graph_flops(block, SEQ, SEQ) for block in blocks)


def short(model):
    return {**resolve(model).config, "num_hidden_layers": 2}


@pytest.fixture(scope="module")
def report():
    recipe = LoraConfig(r=16, target_modules=("down_proj",))
    return pcg.explain(short(LLAMA), recipe, peers=True)


def test_what_torch_compile_keeps_of_llama(report):
    """The numbers of benchmarks/memory.py, which has dynamo trace the model."""
    stage = report.activations[-1]
    assert (stage.stage, stage.recompute_flops_ratio) == ("torch-partitioner", 0.0)
    assert round(stage.bytes_per_block / 2**20, 1) == 160.2
    assert report.peers[0].bytes == stage.bytes
    (note,) = [note for note in report.notes if note.startswith("torch-partitioner: ")]
    assert f"{12 * 2**20:,} bytes a layer" in note  # 148.2 MiB without mask code


def test_points_stand_in_json_text_and_html(report):
    fields = json.loads(json.dumps(report.to_json()))
    assert [point["budget"] for point in fields["peers"]] == list(BUDGETS)
    assert fields["activations"][-1]["stage"] == "torch-partitioner"
    text = report.to_text()
    assert max(map(len, text.splitlines())) <= 100
    assert "torch's partitioner" in text
    assert "budget 0.25" in text
    html = report.to_html()
    assert html.count("budget 0.25") == 2  # at its mark, and in the table
    assert "torch's partitioner, by budget</text>" in unescape(html)


def test_without_peers_nothing_is_said_of_them():
    report = pcg.explain(short(LLAMA))
    assert report.peers == ()
    assert "torch" not in report.to_text()
    assert "torch's partitioner" not in report.to_html()


@pytest.mark.parametrize(
    ("peft", "why"),
    [
        ("houlsby", "peft has no such method"),
        ("bitfit", "peft has no such method"),
        ("prompt", "trains what comes before the layers"),
        ("prefix", "trains what comes before the layers"),
        ({**LORA, "target_modules": ["q_proj"], "lora_dropout": 0.1}, "dropout=0.1"),
        ({"a": "lora", "b": "ia3"}, "2 adapters"),
    ],
)
def test_what_cannot_be_followed_is_named(peft, why):
    family = "opt-post_norm" if peft == "bitfit" else "llama2"
    report = pcg.explain(BY_NAME[family].config(2), peft, seq=SEQ, peers=True)
    assert report.peers == ()
    assert "torch-partitioner" not in [stage.stage for stage in report.activations]
    (note,) = [note for note in report.notes if note.startswith("torch-partitioner: ")]
    assert why in note


def test_without_adapters_there_is_no_peer():
    report = pcg.explain(BY_NAME["llama2"].config(2), None, peers=True)
    assert (report.peers, report.activations) == ((), ())
