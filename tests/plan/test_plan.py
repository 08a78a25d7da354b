"""Plans of machines: workloads, memory against `pcg.explain`, prices, and what is not possible."""

import dataclasses
import math
from functools import cache

import pytest

import pcg
from pcg.errors import CostModelError, PcgError, UnsupportedError
from pcg.ir.operators.base import Operator
from pcg.ir.operators.experts import ExpertLinear
from pcg.parallel.costs.accelerators import ACCELERATORS, RESERVED_BYTES
from pcg.parallel.costs.cost_model import SheetModel
from pcg.parallel.costs.device_profile import DeviceProfile, OperatorTime
from pcg.parallel.costs.step_costs import SequenceChunk, StepShape, host_seconds
from pcg.plan.workload import MachineWorkload, Serving, Training, parse_workload
from pcg.simulate.simulated_program import simulated_program
from pcg.source import resolve
from tests.support import tiny_llama
from tests.support.families import BY_NAME

LLAMA = "meta-llama/Llama-3.1-8B"
EXPLAINED = ("weights", "adapters", "gradients", "optimizer", "activations", "workspace")


def usable(gpu):
    return ACCELERATORS[gpu].memory_bytes - RESERVED_BYTES


@cache
def trained(gpu, degrees=(1,)):
    """Finetuning of four layers of Llama-3.1-8B, in steps of many long sequences."""
    config = {**resolve(LLAMA).config, "num_hidden_layers": 4}
    return pcg.plan(config, workload="train:32x4096", gpus=[gpu], tp=degrees, price={gpu: 2.0})


def explained(one, **options):
    config = {**resolve(LLAMA).config, "num_hidden_layers": 4}
    given = {"batch": one.choice.batch, "seq": 4096, "memory_budget": one.choice.budget}
    report = pcg.explain(config, **{**given, **options})
    return dict(report.memory_bytes)


def only(plan, tp=1):
    (found,) = [one for one in plan.front if one.machine.tp == tp and one.machine.replicas == 1]
    return found


def test_memory_is_what_explain_says():
    """The batch is the largest that fits of those that divide a step."""
    one = only(trained("A100-80"))
    assert one.choice.budget == 1
    assert one.choice.batch * one.choice.accumulation == 32
    memory = explained(one)
    assert {kind: one.memory_bytes[kind] for kind in EXPLAINED} == {
        kind: memory[kind] for kind in EXPLAINED
    }
    assert one.memory_bytes["total"] == memory["total"] <= usable("A100-80")
    larger = explained(one, batch=2 * one.choice.batch)["total"]
    assert one.choice.batch == 32 or larger > usable("A100-80")


@pytest.mark.slow
def test_over_ranks_memory_is_what_explain_says():
    one = only(trained("A100-80", (2,)), tp=2)
    memory = explained(one, tp=2, costs="A100-80")
    assert one.memory_bytes["total"] == memory["total"]


@pytest.mark.slow
def test_budgets_are_the_largest_that_fit():
    """If one sequence alone does not fit, some is recomputed, and no more than need be."""
    config = {**resolve(LLAMA).config, "num_hidden_layers": 12}
    plan = pcg.plan(config, workload="train:2x16384", gpus=["A10G"], tp=[1])
    one = plan.chosen or plan.closest
    assert one.is_kept
    assert (one.choice.batch, one.choice.accumulation) == (1, 2)
    assert 0 < one.choice.budget < 1

    def total(budget):
        report = pcg.explain(config, batch=1, seq=16384, memory_budget=budget)
        return report.memory_bytes["total"]

    assert total(one.choice.budget) == one.memory_bytes["total"] <= usable("A10G")
    assert total(one.choice.budget + 0.1) > usable("A10G")
    assert f"--memory-budget {one.choice.budget:g}" in plan.command(one)


def test_a_base_in_parts_where_no_degree_fits():
    """A rank's memory is what `explain --shard-base` says, and the command starts such a job."""
    config = {**resolve(LLAMA).config, "num_hidden_layers": 80}
    found = pcg.plan(config, workload="train:8x1024", gpus=["A10G"], tp=(1,), max_gpus=8)
    assert {one.machine.shard_base for one in found.front} == {True}
    chosen = found.chosen
    replicas = chosen.machine.replicas
    given = {"batch": chosen.choice.batch, "seq": 1024, "memory_budget": chosen.choice.budget}
    memory = pcg.explain(config, shard_base=replicas, **given).memory_bytes
    assert {k: chosen.memory_bytes[k] for k in EXPLAINED} == {k: memory[k] for k in EXPLAINED}
    assert chosen.memory_bytes["total"] <= usable("A10G")
    command = found.command(chosen)
    assert f"--dp {replicas} --shard-base --batch-size {chosen.choice.batch * replicas}" in command
    assert "base" in found.to_text()


def test_replicas_take_parts_of_a_step():
    """Two take as long as one of half the sequences, and the sum of gradients."""
    config = {**resolve(LLAMA).config, "num_hidden_layers": 4}
    given = {"gpus": ["H100"], "tp": (1,)}
    two = pcg.plan(config, workload="train:8x1024", max_gpus=2, **given)
    half = only(pcg.plan(config, workload="train:4x1024", max_gpus=1, **given))
    (both,) = [one for one in two.front if one.machine.gpus == 2]
    assert half.step_s is not None
    assert both.step_s is not None
    assert 0 <= both.step_s - half.step_s < 0.1 * half.step_s
    assert both.finetuning_tokens_per_s == pytest.approx(8 * 1024 / both.step_s)


def test_prices_are_those_of_all_gpus():
    plan = trained("A100-80")
    for one in plan.front:
        assert one.dollars_per_hour == 2.0 * one.machine.gpus
        assert one.finetuning_tokens_per_s is not None
        assert one.step_s is not None
        assert one.finetuning_tokens_per_s == pytest.approx(32 * 4096 / one.step_s)
        row = one.to_json()
        million_s = 1e6 / one.finetuning_tokens_per_s
        wanted = one.dollars_per_hour * million_s / 3600
        assert row["dollars_per_million_finetuned_tokens"] == pytest.approx(wanted)
        assert row["dollars_per_million_output_tokens"] is None
    assert plan.chosen is plan.front[0]


def test_without_prices_nothing_is_said_of_dollars():
    plan = pcg.plan(tiny_llama.config(), workload="train:2x64", gpus=["H100", "L40S"], max_gpus=1)
    assert "$" not in plan.to_text()
    assert "dollars an hour" not in plan.to_html()
    assert all(row["dollars_per_hour"] is None for row in plan.to_json()["front"])
    assert {one.machine.gpu for one in plan.front} == {"H100", "L40S"}  # not compared


def test_one_name_and_a_method_that_has_no_word():
    recipe = pcg.LoraConfig(r=2, target_modules=["q_proj"])
    plan = pcg.plan(tiny_llama.config(), recipe, workload="train:2x64", gpus="H100,L40S", tp=1)
    assert {one.machine.gpu for one in plan.front} == {"H100", "L40S"}
    assert plan.chosen is not None
    assert "--peft ADAPTER --dtype" in plan.command(plan.chosen)
    assert any("ADAPTER stands for the directory" in note for note in plan.notes)


def test_steps_cost_what_the_simulator_takes():
    """One cost model: the seconds of a step are those of the simulated device's graphs."""
    plan = pcg.plan(
        "meta-llama/Llama-3.2-1B", workload="serve:4req/s:200x100", gpus=["A100-80"], tp=[1]
    )
    one = plan.chosen
    assert one.sustained_per_s is not None
    costs = simulated_program("meta-llama/Llama-3.2-1B", "A100-80").costs
    alone_s = costs.step_seconds(StepShape.of([SequenceChunk(1, 250, True)]))
    # Few requests run at once, and their steps also read the others' prompts.
    assert alone_s < one.load.tpot_s < 1.2 * alone_s
    assert one.output_tokens_per_s == 400
    most = one.sustained_per_s
    assert most > 4
    free = pcg.plan(
        "meta-llama/Llama-3.2-1B",
        workload=f"serve:{1.05 * most:.1f}req/s:200x100",
        gpus=["A100-80"],
        tp=[1],
    )
    assert free.chosen.machine.replicas == 2  # one more than what one sustains


def test_steps_over_ranks_take_no_less_than_their_launches():
    """They are not recorded: the host launches 16 layers, which is longer than the device takes."""
    name, load = "meta-llama/Llama-3.2-1B", "serve:4req/s:200x100"
    one, two = (pcg.plan(name, workload=load, gpus=["H100"], tp=[tp]) for tp in (1, 2))
    assert one.chosen.load.tpot_s < host_seconds(16) <= two.chosen.load.tpot_s
    said = "the host launches steps"
    assert not any(said in note for note in one.notes)
    assert any(said in note and "0.43 ms a layer" in note for note in two.notes)


def test_pages_are_those_of_requests_in_flight():
    config = {**tiny_llama.config(), "max_position_embeddings": 4096}
    plan = pcg.plan(config, workload="serve:20req/s:512x128", gpus=["L40S"], tp=[1], max_gpus=1)
    one = plan.chosen
    tokens = math.ceil(one.load.in_flight) * 640
    a_token = 2 * 2 * 2 * 8 * 4  # keys and values, layers, heads, sizes, fp32
    assert one.memory_bytes["kv_cache"] == tokens * a_token
    served = pcg.explain(config, None, batch=256, seq=16, serve_tokens=tokens)
    assert one.memory_bytes["total"] == served.memory_bytes["total"]


def test_the_closest_where_nothing_keeps_the_promises():
    plan = pcg.plan(
        tiny_llama.config(),
        workload="train:1x64,serve:1req/s:32x32",
        gpus=["A10G"],
        tp=[1],
        max_gpus=2,
        tpot_slo_ms=0.001,
    )
    assert (plan.chosen, plan.front, plan.kept) == (None, (), 0)
    closest = plan.closest
    (broken,) = [promise for promise in closest.promises if not promise.is_kept]
    assert broken.name == "tpot"
    assert "no machine keeps what is promised; the closest is" in plan.to_text()
    assert "time per output token" in plan.to_html()
    assert plan.to_json()["closest"]["gpu"] == "A10G"


def test_what_does_not_fit_is_said_with_its_bytes():
    """The weights alone are too large, which is known without a plan over ranks."""
    plan = pcg.plan("meta-llama/Llama-3.1-70B", workload="train:1x1024", gpus=["A10G"], max_gpus=4)
    assert not plan.front
    weights = pcg.explain("meta-llama/Llama-3.1-70B", None, seq=8).memory_bytes["weights"]
    assert plan.closest.memory_bytes["total"] == weights // 4
    assert f"memory {weights / 4 / 2**30:.2f} GiB a rank, at most 21.49 wanted" in plan.to_text()


def test_finetuning_is_promised_too():
    options = {"workload": "train:2x64", "gpus": ["A10G"], "max_gpus": 1}
    free = pcg.plan(tiny_llama.config(), **options)
    assert free.chosen is not None
    most = max(one.throughput for one in free.front)
    kept = pcg.plan(tiny_llama.config(), **options, finetuning_tokens_per_s=0.99 * most)
    assert kept.chosen.throughput >= 0.99 * most
    none = pcg.plan(tiny_llama.config(), **options, finetuning_tokens_per_s=1.01 * most)
    assert none.chosen is None
    assert "tokens/s, at least" in none.to_text()


def experts_plan(**options):
    config = BY_NAME["mixtral"].config(1)
    return config, pcg.plan(config, workload="train:2x64", gpus=["H100"], **options)


def test_experts_are_in_as_many_parts_as_in_explain():
    config, plan = experts_plan(ep=2, max_gpus=2)
    options = {"tp": 2, "ep": 2, "costs": "H100", "batch": plan.chosen.choice.batch, "seq": 64}
    memory = pcg.explain(config, **options).memory_bytes
    assert {kind: plan.chosen.memory_bytes[kind] for kind in EXPLAINED} == {
        kind: memory[kind] for kind in EXPLAINED
    }
    assert [one.machine.tp for one in plan.front] == [2]
    assert "--tp 2 --ep 2 --costs H100" in plan.to_text()


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"tp": [1], "ep": 2}, "ep=2 and tp=1: .*; use tp=2 with it, or leave out ep=2"),
        ({"tp": [4], "ep": 3}, "ep=3 and tp=4: .* in equal parts; use one of 1, 2, 4, or leave"),
        ({"ep": 16}, "ep=16; use degrees from 1 to max_gpus=8"),
    ],
)
def test_parts_of_experts_that_are_refused(options, message):
    with pytest.raises(PcgError, match=message):
        experts_plan(**options)


def test_parts_of_experts_are_refused_without_experts():
    with pytest.raises(PcgError, match=r"ep=\d has no effect for a model without experts"):
        pcg.plan(tiny_llama.config(), workload="train:2x64", gpus=["H100"], ep=2)


@pytest.fixture
def frozen_experts(monkeypatch):
    """Experts through which no gradient flows back, as of operators that have none."""
    monkeypatch.setattr(ExpertLinear, "gradient", Operator.gradient)


@pytest.mark.usefixtures("frozen_experts")
def test_a_model_that_is_not_finetuned_serves():
    config = {**resolve("mistralai/Mixtral-8x7B-v0.1").config, "num_hidden_layers": 2}
    with pytest.raises(
        UnsupportedError, match="pcg does not finetune it: operator 'expert_linear'"
    ):
        pcg.plan(config, workload="train:1x64", gpus=["H100"], tp=[1])
    plan = pcg.plan(config, workload="serve:1req/s", gpus=["H100"], tp=[1])
    assert plan.chosen.is_kept


def test_served_adapters_take_memory_and_time():
    options = {"gpus": ["A100-80"], "tp": [1], "max_gpus": 1}
    config = {**resolve("huggyllama/llama-7b").config, "num_hidden_layers": 4}
    base = pcg.plan(config, workload="serve:10req/s:64x64", **options).chosen
    many = pcg.plan(config, workload="serve:10req/s:64x64", adapters=100, **options).chosen
    assert base.load
    assert many.load
    shapes = [(4096, 4096)] * 4 + [(11008, 4096)] * 2 + [(4096, 11008)]
    size = 4 * sum(2 * 16 * (out + in_) for out, in_ in shapes)
    page_bytes = 16 * 2 * 2 * 4096 * 4  # tokens, keys and values, of two bytes, in four layers
    pages, rest = divmod(many.memory_bytes["served_adapters"], 100 * page_bytes)
    assert not rest
    assert size <= pages * page_bytes < size + 2 * page_bytes
    assert many.load.tpot_s > base.load.tpot_s
    assert base.memory_bytes["served_adapters"] == 0


def test_a_profile_takes_the_place_of_a_sheet(tmp_path, monkeypatch):
    """A device that takes twice what the sheet says, for every operator that is asked for."""
    asked = {}
    on_sheet = SheetModel.work_seconds

    def recorded(model, work):
        return asked.setdefault(work, on_sheet(model, work))

    monkeypatch.setattr(SheetModel, "work_seconds", recorded)
    options = {"workload": "train:2x64", "gpus": ["H100"], "max_gpus": 2}
    sheet = pcg.plan(tiny_llama.config(), **options, tp=[1]).chosen
    points = tuple(
        OperatorTime(dataclasses.replace(work, shapes=f"{place}"), 2 * seconds)
        for place, (work, seconds) in enumerate(asked.items())
    )
    DeviceProfile("a slow H100", {}, points).save(tmp_path / "h100.json")
    plan = pcg.plan(tiny_llama.config(), **options, costs=tmp_path / "h100.json")
    assert sheet.step_s is not None
    assert plan.chosen.step_s is not None
    assert plan.chosen.step_s == pytest.approx(2 * sheet.step_s)
    assert plan.costs["H100"].startswith("measured on a slow H100 by pcg profile")
    # What only ranks run was not measured, nor a link.
    assert "the profile of a slow H100 has no link" in plan.refused[2]
    assert "tp=2 cannot be" in plan.to_text()


@pytest.mark.usefixtures("frozen_experts")
def test_a_model_that_no_degree_finetunes_is_refused_though_one_gpu_is_too_small():
    """As on a larger GPU, and not as one that lacks memory."""
    with pytest.raises(UnsupportedError, match="pcg does not finetune it: operator"):
        pcg.plan("mistralai/Mixtral-8x7B-v0.1", workload="train:4x64", gpus=["H100"], tp=[1, 2])


@pytest.mark.parametrize(
    ("given", "message"),
    [
        ({"workload": "train:99999999999x64"}, "use 65536 at most"),
        ({"max_gpus": 10**9}, "max_gpus=1000000000; use an int from 1 to 4096"),
        ({"max_num_seqs": 10**8}, "max_num_seqs=100000000; use an int from 1 to 65536"),
        ({"optimizer_options": {"weight_decay": 0.1}}, "give weight_decay= to the job"),
    ],
)
def test_what_is_out_of_range_is_refused_before_anything_is_traced(given, message):
    with pytest.raises(UnsupportedError, match=message):
        pcg.plan("openai-community/gpt2-xl", **{"workload": "train:4x64", **given})


def test_a_workload_is_read():
    assert parse_workload("train:4x2048") == MachineWorkload(Training(4, 2048))
    assert parse_workload("serve:2.5req/s") == MachineWorkload(None, Serving(2.5, 161, 338))
    both = parse_workload(" serve:20req/s:512x128 , train:1x8192")
    assert both == MachineWorkload(Training(1, 8192), Serving(20.0, 512, 128))
    words = (
        "finetuning steps of 1 × 8,192 tokens, beside 20 requests/s of 512 tokens, 128 generated"
    )
    assert str(both) == words


@pytest.mark.parametrize(
    ("text", "message"),
    [
        ("train:4", "workload 'train:4'; use train:BATCHxTOKENS, as train:4x2048"),
        ("serve:20", "workload 'serve:20'; use serve:RATEreq/s or serve:RATEreq/s:PROMPTxOUTPUT"),
        ("serve:20req/s:512", "use serve:RATEreq/s or"),
        ("", "workload ''; use train:BATCHxTOKENS"),
        ("tran:4x2048", "workload 'tran:4x2048'; use train:BATCHxTOKENS"),
        ("train:4x20,train:1x20", "has train twice; give it once"),
        ("train:0x20", "sequences a step: 0; use at least 1"),
        ("train:2x1", "tokens of a sequence: 1; use at least 2"),
        ("serve:0req/s", "0 requests a second; use a rate above 0"),
        ("serve:1req/s:8x1", "generated tokens: 1; use at least 2"),
    ],
)
def test_what_is_no_workload(text, message):
    with pytest.raises(PcgError) as found:
        parse_workload(text)
    assert message in str(found.value)
    assert "\n" not in str(found.value)


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"gpus": ["H1000"]}, "no GPU is known as 'H1000'; did you mean H100"),
        ({"price": {"H100": -1.0}}, "price H100=-1.0; use dollars an hour above 0"),
        ({"gpus": ["h100"], "price": {"L40S": 1}}, "of no GPU to choose from; these are H100"),
        ({"max_gpus": 0}, "max_gpus=0; use an int from 1 to 4096"),
        ({"tp": [16]}, "tp=16; use degrees from 1 to max_gpus=8"),
        ({"dtypes": ["nf4"]}, "dtype='nf4'; use one of float32"),
        ({"tpot_slo_ms": 0}, "tpot_slo_ms=0; use a number above 0"),
        ({"costs": "H100"}, "of one device, and 6 GPUs are to choose from"),
        ({"adapters": 2}, "used by requests, and workload 'train:1x64' has none"),
        ({"peft": None}, "needs a method, and there is none; name one"),
        ({"workload": "serve:1req/s", "finetuning_tokens_per_s": 9}, "trains nothing; add train:"),
        ({"workload": "train:1x512"}, "sequences of 512 tokens are beyond the 256 positions"),
        ({"tp": [3]}, "tp=3 does not divide num_attention_heads=4"),
        ({"optimiser": "sgd"}, "unknown option 'optimiser', did you mean 'optimizer'"),
    ],
)
def test_what_is_refused(options, message):
    with pytest.raises(PcgError) as found:
        pcg.plan(tiny_llama.config(), **{"workload": "train:1x64", **options})
    assert message in str(found.value)
    assert "\n" not in str(found.value)


def test_a_file_that_is_no_profile():
    with pytest.raises(CostModelError, match="there is no profile nowhere"):
        pcg.plan(
            tiny_llama.config(), workload="train:1x64", gpus=["H100"], costs="nowhere/profile.json"
        )
