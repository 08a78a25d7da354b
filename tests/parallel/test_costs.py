"""Costs by hand: the roofline, rings, profiles between their points, and what has no cost.

Long because each kind of cost has its numbers written out.
"""

from __future__ import annotations

import json
import math
from collections.abc import Iterator
from functools import cache
from pathlib import Path

import pytest
import sympy
import torch

from pcg.errors import CostModelError
from pcg.ir.graph import Graph
from pcg.ir.operators import OPERATORS, operator
from pcg.ir.types import TOKENS, Dim, State, TensorType, tensor
from pcg.parallel.costs import collective_profiler
from pcg.parallel.costs.accelerators import (
    SHEETS,
    Achieved,
    DeviceSheet,
    Link,
    of_driver,
)
from pcg.parallel.costs.catalog import find_cost_model, own_sheet
from pcg.parallel.costs.cost_model import CostModel, SheetModel, ring_seconds
from pcg.parallel.costs.device_profile import (
    CollectiveTime,
    DeviceProfile,
    OperatorTime,
    ProfileModel,
    fitted_link,
)
from pcg.parallel.costs.operator_profiler import measure_operators
from pcg.parallel.costs.own_rates import OwnRates, own_rates, rated_model
from pcg.parallel.costs.work import is_free, work_of
from pcg.passes.graphs.differentiate import Differentiate
from pcg.passes.graphs.gradients import Prune
from tests.support.parallelized import sharded

LINK = Link(1e-6, 1e9, "for the test")
SHEET = DeviceSheet(
    product_flops_per_s={"bf16": 1e12, "f32": 1e11},
    vector_flops_per_s={"f32": 1e10},
    memory_bytes_per_s=1e9,
    launch_s=1e-6,
    links={"fast": LINK, "slow": Link(1e-5, 1e6, "for the test")},
    source="for the test",
    launch_source="for the test",
)
WHOLE = Achieved(1, 1, 1, 1)
MODEL = SheetModel("toy", SHEET, achieved=WHOLE)

X = tensor("bf16", TOKENS, 64)
W = tensor("bf16", 64, 64)
ATTENTION = {"scale": 1.0, "softcap": 0.0, "window": 0}


def linear_seconds(model: CostModel, tokens: int, context: int = 8) -> float:
    return model.operator_seconds("linear", (X, W), (X,), {}, tokens, context)


def seconds(model: CostModel, op: str, *inputs: TensorType, **attributes: object) -> float:
    outputs = operator(op).infer(inputs, attributes)  # type: ignore[arg-type]
    return model.operator_seconds(op, inputs, outputs, attributes, 16, 8)  # type: ignore[arg-type]


# ----------------------------------------------------------------------------------- roofline


def test_few_rows_are_bound_by_the_weight() -> None:
    assert linear_seconds(MODEL, 1) == pytest.approx(2 * (64 * 64 + 64 + 64) / 1e9 + 1e-6)


def test_many_rows_of_a_wide_product_are_bound_by_operations() -> None:
    x, w = tensor("bf16", TOKENS, 4096), tensor("bf16", 4096, 4096)
    found = MODEL.operator_seconds("linear", (x, w), (x,), {}, 100_000, 8)
    assert found == pytest.approx(2 * 100_000 * 4096**2 / 1e12 + 1e-6)


def test_shares_of_the_peaks() -> None:
    half = SheetModel("toy", SHEET, achieved=Achieved(0.5, 0.5, 0.5, 0.5))
    assert linear_seconds(half, 1) - 1e-6 == pytest.approx(2 * (linear_seconds(MODEL, 1) - 1e-6))
    whole, shared = (m.collective_seconds("all_gather", 10**9, 2) for m in (MODEL, half))
    assert shared - 1e-6 == pytest.approx(2 * (whole - 1e-6))


def test_embedding_reads_the_rows_that_it_gives() -> None:
    table, ids = tensor("bf16", 32_000, 64), tensor("i64", TOKENS)
    assert seconds(MODEL, "embedding", table, ids) == pytest.approx(
        (8 * 16 + 2 * 2 * 16 * 64) / 1e9 + 1e-6
    )


def test_attention_reads_the_context_where_it_is_longer_than_the_step() -> None:
    q, k = tensor("bf16", TOKENS, 4, 16), tensor("bf16", TOKENS, 2, 16)
    outputs = operator("attention").infer((q, k, k), ATTENTION)

    def moved(tokens: int, context: int) -> float:
        return work_of("attention", (q, k, k), outputs, ATTENTION, tokens, context).moved_bytes

    a_token = 2 * 2 * 64 + 2 * 2 * 32 + 4 * 4
    assert moved(16, 16) == 16 * a_token
    assert moved(32, 16) == 32 * a_token
    assert moved(1, 16) == a_token + 15 * 2 * 2 * 32


def test_experts_read_as_many_weights_as_tokens_choose() -> None:
    types = (
        tensor("bf16", TOKENS, 8),
        tensor("i64", TOKENS, 2),
        tensor("bf16", 16, 4, 8),
        tensor("bf16", 16, 4, 1),
    )
    outputs = (tensor("bf16", TOKENS, 2, 4),)
    weights, a_token = 2 * 16 * (32 + 4), 2 * 8 + 2 * 8 + 2 * 8
    for tokens, share in ((1, 1 / 8), (4, 1 / 2), (8, 1), (64, 1)):
        work = work_of("expert_linear", types, outputs, {}, tokens, 8)
        assert work.moved_bytes == tokens * a_token + share * weights


def test_views_cost_nothing() -> None:
    assert seconds(MODEL, "reshape", X, shape=(-1, 4, 16)) == 0.0
    assert seconds(MODEL, "own_part", X, dim=-1, degree=2) == 0.0
    assert MODEL.operator_seconds("replicate", (X,), (X,), {}, 16, 8) == 0.0


@pytest.mark.parametrize("name", SHEETS)
def test_more_tokens_never_cost_less(name: str) -> None:
    model = find_cost_model(name)
    found = [linear_seconds(model, tokens) for tokens in (1, 2, 8, 64, 1024, 2**16, 2**20)]
    assert found == sorted(found)
    assert found[0] > 0


# ----------------------------------------------------------------------------------- collectives


def test_rings() -> None:
    # Three ranks: twice two steps of a third of the bytes.
    assert ring_seconds("all_reduce", 3e6, 3, LINK) == pytest.approx(4 * (1e-6 + 1e-3))
    assert ring_seconds("all_gather", 3e6, 3, LINK) == pytest.approx(2 * (1e-6 + 1e-3))
    assert MODEL.collective_seconds("all_reduce", 3_000_000, 3) == pytest.approx(4 * (1e-6 + 1e-3))
    assert MODEL.collective_seconds("all_reduce", 3_000_000, 1) == 0.0


def test_a_link_by_name() -> None:
    slow = SheetModel("toy", SHEET, "SLOW", WHOLE)
    assert slow.collective_seconds("all_gather", 2_000_000, 2) == pytest.approx(1.00001)
    with pytest.raises(CostModelError, match="no link 'NVLink 9'; it has NVLink 4, PCIe 5"):
        find_cost_model("H100", "NVLink 9")


def test_two_points_give_their_link() -> None:
    link = Link(2e-4, 7e8, "")
    exchanges = [
        CollectiveTime(kind, size, 4, ring_seconds(kind, size, 4, link))
        for kind in ("all_reduce", "all_gather")
        for size in (1_000, 10_000_000)
    ]
    found = fitted_link(exchanges, "gloo")
    assert found.latency_s == pytest.approx(2e-4)
    assert found.bytes_per_s == pytest.approx(7e8)


def test_a_fit_is_never_negative() -> None:
    falling = [
        CollectiveTime("all_reduce", 10**3, 2, 2e-3),
        CollectiveTime("all_reduce", 10**6, 2, 1e-3),
    ]
    link = fitted_link(falling, "gloo")
    assert link.latency_s >= 0
    assert link.bytes_per_s > 0
    only_bytes = [
        CollectiveTime("all_reduce", 10**6, 2, 1e-3),
        CollectiveTime("all_reduce", 10**7, 2, 2e-2),
    ]
    assert fitted_link(only_bytes, "gloo").latency_s == 0.0


# ----------------------------------------------------------------------------------- no cost


@pytest.mark.parametrize(
    ("op", "types", "message"),
    [
        ("liner", (X, W), "did you mean linear"),
        ("all_reduce", (X,), "ask collective_seconds"),
        ("reduce", (X,), "localize"),
        ("silu", (tensor("f32", TOKENS, sympy.Symbol("r")),), "while r is open"),
        ("silu", (TensorType("f32", (Dim(TOKENS), Dim(8, State.PARTITIONED, 2))),), "one rank"),
    ],
)
def test_what_has_no_cost_is_refused(op: str, types: tuple[TensorType, ...], message: str) -> None:
    with pytest.raises(CostModelError, match=message):
        MODEL.operator_seconds(op, types, types[:1], {}, 16, 8)


def test_numbers_that_cannot_be_are_refused() -> None:
    with pytest.raises(CostModelError, match="at least 1"):
        linear_seconds(MODEL, 0)
    with pytest.raises(CostModelError, match="broadcast"):
        MODEL.collective_seconds("broadcast", 8, 2)
    with pytest.raises(CostModelError, match="0 ranks"):
        MODEL.collective_seconds("all_reduce", 8, 0)


def test_a_dtype_without_a_peak_is_refused() -> None:
    x, w = tensor("f64", TOKENS, 64), tensor("f64", 64, 64)
    with pytest.raises(CostModelError, match="L40S has no peak for linear in f64"):
        find_cost_model("L40S").operator_seconds("linear", (x, w), (x,), {}, 8, 8)


@pytest.mark.parametrize(
    ("name", "message"),
    [
        ("H10", "did you mean H100"),
        ("h100:x", "'x' is no number of ranks a node; use H100:8"),
        ("h100:0", "'0' is no number of ranks a node; use H100:8"),
        ("no/such.json", "pcg profile -o no/such.json makes one"),
        ("abacus", "no device sheet or profile"),
    ],
)
def test_unknown_models_are_refused(name: str, message: str) -> None:
    with pytest.raises(CostModelError, match=message):
        find_cost_model(name)


# ----------------------------------------------------------------------------------- sheets


@pytest.mark.parametrize("name", SHEETS)
def test_a_sheet_has_its_sources(name: str) -> None:
    sheet = SHEETS[name]
    assert find_cost_model(name.lower()).name == name
    assert sheet.source
    assert sheet.launch_source
    assert all(link.source for link in sheet.links.values())
    assert max(sheet.product_flops_per_s.values()) > sheet.product_flops_per_s["f32"]
    assert find_cost_model(name).collective_seconds("all_reduce", 2**20, 4) > 0


@pytest.mark.parametrize(
    ("called", "name"),
    [
        ("NVIDIA L4", "L4"),
        ("NVIDIA A10", "A10"),
        ("NVIDIA A10G", "A10G"),
        ("NVIDIA GeForce RTX 4090", "RTX-4090"),
        ("Tesla T4", "T4"),
        ("NVIDIA RTX A6000", "A6000"),
        ("NVIDIA B200", "B200"),
        ("NVIDIA H100 80GB HBM3", "H100"),
        ("NVIDIA H100 PCIe", "H100-PCIE"),
        ("NVIDIA H100 NVL", "H100-NVL"),
        ("A100-SXM4-40GB", "A100-40"),
        ("NVIDIA A100 80GB PCIe", "A100-80-PCIE"),
        ("AMD Instinct MI300X", "MI300X"),
        ("NVIDIA H100 80GB HBM3 MIG 1g.10gb", None),
        ("NVIDIA GeForce RTX 4090 Laptop GPU", None),
        ("NVIDIA H200 NVL", None),
    ],
)
def test_a_device_has_the_sheet_of_its_own_kind(
    called: str, name: str | None, monkeypatch: pytest.MonkeyPatch
) -> None:
    found = of_driver(called)
    assert (None if found is None else found.name) == name
    monkeypatch.setattr(torch.cuda, "get_device_name", lambda device: called)
    device = torch.device("cuda", 0)
    if name is None:
        with pytest.raises(CostModelError, match=f"{called} has no data sheet here"):
            own_sheet(device)
        return
    assert own_sheet(device) == name
    monkeypatch.setenv("LOCAL_WORLD_SIZE", "4")
    assert own_sheet(device, 4) == name
    assert own_sheet(device, 8) == f"{name}:4"
    assert find_cost_model(own_sheet(device, 8)).name == f"{name}:4"


def test_a_group_over_nodes_has_the_links_of_each_tier() -> None:
    """A ring within a node is NVLink's; over nodes it enters and leaves each by its network."""
    sheet, size = SHEETS["H100"], 2**30
    model = find_cost_model("H100")
    near, network = sheet.links["NVLink 4"], sheet.network
    assert network is not None
    within = 7 * (near.latency_s + size / (8 * 0.8 * near.bytes_per_s))
    assert model.collective_seconds("all_gather", size, 8) == pytest.approx(within)
    steps = 56 * near.latency_s + 7 * network.latency_s
    over = steps + 63 * size / (64 * 0.8 * 8 * network.bytes_per_s)
    assert model.collective_seconds("all_gather", size, 64) == pytest.approx(over)
    # Nodes of fewer ranks have less of a network each.
    four, eight = (find_cost_model(f"h100:{ranks}") for ranks in (4, 8))
    assert eight.collective_seconds("all_reduce", size, 64) == pytest.approx(2 * over)
    assert four.collective_seconds("all_reduce", size, 64) > 1.5 * 2 * over
    assert four.collective_seconds("all_reduce", size, 8) > 1.5 * 2 * within


def test_a_bridge_joins_two() -> None:
    sheet = SHEETS["H100-NVL"]
    model = find_cost_model("H100-NVL")
    bridge, bus = sheet.links["NVLink 4 bridge"], sheet.links["PCIe 5"]
    for degree, link in ((2, bridge), (4, bus), (8, bus)):
        found = model.collective_seconds("all_gather", 2**30, degree)
        assert found == pytest.approx(ring_seconds("all_gather", 2**30 / 0.8, degree, link), 1e-3)


@cache
def local_graphs() -> list[Graph]:
    """Forward and backward of one rank of two."""
    graphs = []
    for name in ("llama3", "gemma2", "bloom", "opt"):
        model = sharded(name, 2).training
        for graph in model.blocks:
            carried = [value.name for value in graph.inputs[: len(graph.outputs)]]
            graphs += [graph, Prune().run(Differentiate(wrt=tuple(carried)).run(graph)).backward]
        graphs += [model.prologue, model.epilogue]
    return graphs


def costs_of(model: CostModel, tokens: int, context: int) -> Iterator[float]:
    """Of every node of the local graphs but collectives."""
    for graph in local_graphs():
        for node in graph.nodes:
            if node.op in ("all_reduce", "all_gather"):
                continue
            inputs = tuple(graph.types[name] for name in node.inputs)
            outputs = tuple(value.type for value in node.outputs)
            attributes = dict(node.attributes)
            yield model.operator_seconds(node.op, inputs, outputs, attributes, tokens, context)


def test_all_that_a_rank_runs_has_a_cost_on_a_sheet() -> None:
    found = list(costs_of(find_cost_model("A100-80"), 64, 32))
    assert len(found) > 400
    assert all(math.isfinite(cost) and cost >= 0 for cost in found)


# ----------------------------------------------------------------------------------- profiles


def point(tokens: int, found: float, features: int = 64) -> OperatorTime:
    x, w = tensor("bf16", TOKENS, features), tensor("bf16", features, features)
    return OperatorTime(work_of("linear", (x, w), (x,), {}, tokens, tokens), found)


def ideal(tokens: int, features: int = 64, slowness: float = 1.0) -> OperatorTime:
    """What a device of 1 GFLOP/s and 1 GB/s would take."""
    work = point(tokens, 1.0, features).work
    return OperatorTime(work, slowness * max(work.flops, work.moved_bytes) / 1e9)


def test_a_measured_shape_costs_what_was_measured() -> None:
    model = ProfileModel(DeviceProfile("toy", {}, (point(4, 3e-5), point(16, 9e-5))))
    assert linear_seconds(model, 4) == 3e-5
    assert linear_seconds(model, 16) == 9e-5


def test_between_points_the_rate_is_kept() -> None:
    """Points twice as slow as the roofline that one very fast point sets."""
    fast = OperatorTime(work_of("silu", (X,), (X,), {}, 4096, 8), 1e-9)
    points = (ideal(16, 256, 2.0), ideal(64, 256, 2.0), ideal(1024, 256, 2.0))
    model = ProfileModel(DeviceProfile("toy", {}, (*points, fast)))
    x, w = tensor("bf16", TOKENS, 256), tensor("bf16", 256, 256)
    between = model.operator_seconds("linear", (x, w), (x,), {}, 256, 8)
    assert between == pytest.approx(ideal(256, 256, 2.0).seconds, rel=1e-3)


def test_between_points_costs_lie_between_and_grow_with_tokens() -> None:
    model = ProfileModel(DeviceProfile("toy", {}, tuple(ideal(4**i) for i in range(7))))
    found = [linear_seconds(model, tokens) for tokens in (4, 6, 8, 16, 40, 64, 200, 1000, 4096)]
    assert found == sorted(found)
    assert found[0] < found[1] < found[3]


def test_a_profile_as_json(tmp_path: Path) -> None:
    exchange = CollectiveTime("all_reduce", 1024, 2, 1e-4)
    profile = DeviceProfile("toy", {"torch": "2"}, (ideal(4), ideal(16)), (exchange,), "gloo")
    path = tmp_path / "deep" / "profile.json"
    profile.save(path)
    assert DeviceProfile.load(path) == profile
    assert json.loads(path.read_text())["device"] == "toy"
    model = find_cost_model(path)
    assert model.name == "toy"
    assert linear_seconds(model, 4) == ideal(4).seconds
    with pytest.raises(CostModelError, match="own link"):
        find_cost_model(path, "NVLink 4")


@pytest.mark.parametrize(
    "text", ["", "[]", "{}", '{"format": 1, "points": []}', '{"format": 1, "points": [{"a": 1}]}']
)
def test_damaged_profiles_are_refused(tmp_path: Path, text: str) -> None:
    path = tmp_path / "profile.json"
    path.write_text(text)
    with pytest.raises(CostModelError, match=r"profile.*make it again"):
        find_cost_model(path)


def test_what_was_not_measured_has_no_cost() -> None:
    model = ProfileModel(DeviceProfile("toy", {}, (ideal(4), ideal(16))))
    with pytest.raises(CostModelError, match=r"silu in bf16 was not measured.*pcg profile"):
        seconds(model, "silu", X)
    with pytest.raises(CostModelError, match="only in bf16; pcg profile --dtype"):
        seconds(model, "linear", tensor("f32", TOKENS, 64), tensor("f32", 64, 64))
    with pytest.raises(CostModelError, match=r"no link.*pcg profile --tp 2"):
        model.collective_seconds("all_reduce", 8, 2)
    exchange = CollectiveTime("all_reduce", 1024, 2, 1e-4)
    linked = ProfileModel(DeviceProfile("toy", {}, (ideal(4),), (exchange,), "gloo"))
    assert linked.collective_seconds("all_reduce", 1024, 2) == pytest.approx(1e-4)
    for kind, degree in (("all_reduce", 4), ("all_gather", 2)):
        with pytest.raises(CostModelError, match=f"pcg profile --tp {degree}"):
            linked.collective_seconds(kind, 8, degree)


@cache
def quick() -> DeviceProfile:
    return DeviceProfile("here", {}, measure_operators(torch.device("cpu"), "f32", quick=True))


def test_every_operator_that_runs_is_measured() -> None:
    kernels = {point.work.kernel.partition("+")[0] for point in quick().points}
    computed = set()
    for name, entry in OPERATORS.items():
        try:
            if entry.executable and not is_free(name):
                computed.add(name)
        except CostModelError:  # collectives, and operators of a typed graph
            continue
    # As what they stand for; what is appended to the cache, as its attention.
    sums = {
        "append",
        "asked_inner",
        "asked_outer",
        "asked_outer_group",
        "asked_sum_tokens",
        "bottleneck_backward",
        "column_norm_part",
        "expand_add_group",
        "expand_add_part",
        "latent_attention",
        "latent_window_backward",
        "linear_cross_entropy",
        "lora_group_backward",
        "lora_linear",
        "lora_linear_backward",
        "pack_rows",
        "shrink_group",
        "unpack_rows",
        "window_attention_backward",
    }
    assert computed - kernels - {"pack_bf16", "unpack_bf16"} == sums  # of bf16, which `quick` lacks


@pytest.mark.parametrize("trains", [False, True])
def test_a_fused_loss_costs_what_its_parts_do(trains: bool) -> None:
    model = ProfileModel(quick())
    x, weight, logits = (
        tensor("f32", TOKENS, 64),
        tensor("f32", 512, 64),
        tensor("f32", TOKENS, 512),
    )
    bias, targets, loss = tensor("f32", 512), tensor("i64", TOKENS), tensor("f32", TOKENS)
    parts = seconds(model, "linear", x, weight, bias)
    parts += seconds(model, "cross_entropy", logits, targets)
    if trains:
        parts += seconds(model, "cross_entropy_backward", loss, logits, targets)
        parts += seconds(model, "linear_backward", logits, weight)
    given = (x, weight, bias, targets, *((loss,) if trains else ()))
    attributes = {"bias": True, "scale": 1.0, "softcap": 0.0}
    assert seconds(model, "linear_cross_entropy", *given, **attributes) == pytest.approx(parts)


def test_all_that_a_rank_runs_has_a_cost_in_a_profile() -> None:
    found = list(costs_of(ProfileModel(quick()), 64, 32))
    assert all(math.isfinite(cost) and cost >= 0 for cost in found)


def test_a_fused_product_costs_its_parts() -> None:
    model = ProfileModel(quick())
    x, w = tensor("f32", TOKENS, 64), tensor("f32", 64, 64)
    a, b = tensor("f32", 8, 64), tensor("f32", 64, 8)
    parts = seconds(model, "linear", x, w) + seconds(model, "shrink", x, a)
    parts += seconds(model, "expand_add", x, tensor("f32", TOKENS, 8), b)
    fused = seconds(model, "lora_linear", x, w, w, a, a, b, b, bias=False, count=2)
    assert fused == pytest.approx(2 * parts)
    given = (x, w, w, a, b)
    some = seconds(model, "lora_linear", *given, adapted=(1,), bias=False, count=2)
    assert some == pytest.approx(parts + seconds(model, "linear", x, w))


def test_gradients_in_one_operator_cost_their_parts() -> None:
    model = ProfileModel(quick())
    x, w, s = tensor("f32", TOKENS, 64), tensor("f32", 64, 64), tensor("f32", TOKENS, 8)
    a, b, bias = tensor("f32", 8, 64), tensor("f32", 64, 8), tensor("f32", 8)
    both = seconds(model, "expand_backward", x, b) + seconds(model, "scaled_outer", x, s, b)
    parts = seconds(model, "linear_backward", x, w) + seconds(model, "shrink_backward", s, a)
    fused = seconds(model, "lora_linear_backward", x, w, a, b, s)
    assert fused == pytest.approx(parts + both)
    inner = seconds(model, "activate", s, bias, function="gelu") + seconds(
        model, "bias_add", s, bias
    )
    inner += seconds(model, "gelu_backward", s, s, approximate="none")
    inner += seconds(model, "sum_tokens", s, bias, dtype="f32")
    fused = seconds(model, "bottleneck_backward", x, b, s, bias, function="gelu")
    assert fused == pytest.approx(inner + both)
    asked = seconds(model, "asked_outer", s, x, of="a")
    assert asked == seconds(model, "outer", s, x)
    for name, given in (("inner", (x, x)), ("sum_tokens", (x,))):
        asked = seconds(model, f"asked_{name}", *given, dtype="f32", of="a")
        assert asked == seconds(model, name, *given, dtype="f32")


@pytest.mark.dist
def test_links_are_measured() -> None:
    exchanges, backend = collective_profiler.measure_collectives(2, torch.device("cpu"), quick=True)
    assert backend == "gloo"
    assert len(exchanges) == 4 * len(collective_profiler.QUICK_SIZES)
    model = ProfileModel(DeviceProfile("here", {}, quick().points, exchanges, backend))
    assert model.collective_seconds("all_reduce", 2**20, 2) > 0
    with pytest.raises(CostModelError, match="--tp 4"):
        model.collective_seconds("all_reduce", 2**20, 4)


def test_one_rank_has_no_link() -> None:
    with pytest.raises(CostModelError, match="at least 2"):
        collective_profiler.measure_collectives(1, torch.device("cpu"))


def test_a_cpu_has_the_rates_that_it_was_measured_at() -> None:
    found = own_rates(torch.device("cpu"), torch.bfloat16)
    assert found is not None
    assert found.product_flops_per_s.keys() == {"f32", "bf16"}
    for rate in (*found.product_flops_per_s.values(), found.memory_bytes_per_s):
        assert math.log2(rate).is_integer()
        assert 1e6 < rate < 1e15
    assert own_rates(torch.device("meta"), torch.float32) is None


def test_a_model_at_measured_rates_is_the_sheet_in_proportion() -> None:
    vector, matrix = tensor("f32", TOKENS, 1024), tensor("f32", 1024, 1024)
    rates = OwnRates({"f32": 2.0**30}, 2.0**40)
    model, sheet = rated_model("CPU", rates), find_cost_model("CPU")
    product = model.operator_seconds("linear", (vector, matrix), (vector,), {}, 1024, 1024)
    assert product == pytest.approx(2 * 1024**3 / 2**30, rel=1e-3)
    slower = [
        one.operator_seconds("add", (vector, vector), (vector,), {}, 2**20, 1)
        for one in (rated_model("CPU", OwnRates({"f32": 2.0**40}, 2.0**30)), sheet)
    ]
    assert slower[0] == pytest.approx(3 * 2**32 / 2**30, rel=1e-3)
    assert slower[0] > slower[1]
    assert rated_model("CPU", None).name == sheet.name
    with pytest.raises(CostModelError):
        rated_model("no such device", None)
