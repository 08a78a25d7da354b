"""The page of an engine: vLLM's names as routers and boards read them, and adapters."""

import asyncio
import json
import re
from importlib.resources import files
from itertools import count
from threading import Event

import pytest
from prometheus_client.parser import text_string_to_metric_families

from pcg.runtime.admission.limits import Limits
from pcg.runtime.executor import Executor
from pcg.runtime.metrics.report import serving_report
from pcg.serve.engine.client import LocalClient
from pcg.serve.engine.engine_names import Owned
from pcg.serve.engine.options import ServeOptions
from pcg.serve.metrics.engine_metrics import EngineMetrics
from pcg.serve.metrics.families import Served
from tests.support.held_steps import held_steps
from tests.support.prompts import prompts
from tests.support.small_engine import DATA, LORA, OPTIONS, make_engine, make_executor
from tests.support.waiting import until

SERVED = Served("tiny", 128, 8, {"weights": 1000, "kv_cache": 500})
BASE = {"model_name": "tiny", "engine": "0"}
VLLM = {
    "gauge": [
        "num_requests_running", "num_requests_waiting", "num_requests_waiting_by_reason",
        "kv_cache_usage_perc", "cache_config_info", "lora_requests_info",
    ],
    "counter": [
        "num_preemptions", "prompt_tokens", "generation_tokens", "prompt_tokens_cached",
        "prompt_tokens_by_source", "prefix_cache_queries", "prefix_cache_hits", "request_success",
    ],
    "histogram": [
        "time_to_first_token_seconds", "inter_token_latency_seconds",
        "request_time_per_output_token_seconds", "e2e_request_latency_seconds",
        "request_queue_time_seconds", "request_inference_time_seconds",
        "request_prefill_time_seconds", "request_decode_time_seconds", "request_prompt_tokens",
        "request_generation_tokens", "request_max_num_generation_tokens",
        "request_params_max_tokens", "iteration_tokens_total", "request_params_n",
        "request_num_preemptions",
    ],
}  # fmt: skip
"""Names and types of vllm/v1/metrics/loggers.py, without `vllm:`."""


BOARD = [
    "e2e_request_latency_seconds_bucket", "e2e_request_latency_seconds_count",
    "e2e_request_latency_seconds_sum", "generation_tokens_total",
    "inter_token_latency_seconds_bucket", "inter_token_latency_seconds_count",
    "inter_token_latency_seconds_sum", "kv_cache_usage_perc", "num_requests_running",
    "num_requests_waiting", "prompt_tokens_total", "request_decode_time_seconds_sum",
    "request_generation_tokens_bucket", "request_max_num_generation_tokens_sum",
    "request_prefill_time_seconds_sum", "request_prompt_tokens_bucket",
    "request_queue_time_seconds_sum", "request_success_total",
    "time_to_first_token_seconds_bucket", "time_to_first_token_seconds_count",
    "time_to_first_token_seconds_sum",
]  # fmt: skip
"""The series of vLLM's own board, examples/observability/prometheus_grafana/grafana.json."""


def metrics_of(engine, served=SERVED, now_s=None):
    """The metrics of an engine, by a clock; without one, each page comes 1 s after the last."""
    client = LocalClient(Executor(engine.state), engine, ServeOptions())
    return EngineMetrics(client, served, now_s or count(100).__next__)


class Clock:
    """A clock that stands still until the test moves it."""

    def __init__(self):
        self.now_s = 100.0

    def __call__(self):
        return self.now_s


def page_of(metrics):
    return asyncio.run(metrics.page())


def parsed(page):
    """The families of a page, by prometheus_client's own parser; no family comes twice."""
    found = list(text_string_to_metric_families(page.decode()))
    assert len({one.name for one in found}) == len(found)
    for one in found:
        series = [(sample.name, tuple(sorted(sample.labels.items()))) for sample in one.samples]
        assert len(set(series)) == len(series), one.name
    return {one.name: one for one in found}


def value(families, series, **labels):
    """The value of the one series that has these labels beside those that all have."""
    name = next(name for name in families if series.startswith(name) and any(
        one.name == series for one in families[name].samples))  # fmt: skip
    (found,) = [
        one.value
        for one in families[name].samples
        if one.name == series and one.labels == {**BASE, **labels}
    ]
    return found


@pytest.fixture
def running():
    executor = make_executor()
    executor.add_adapter("second", LORA)
    limits = Limits(running=2, tokens=24, ttft_slo_s=60.0, tpot_slo_s=30.0)
    with make_engine(executor, 64, limits).start() as engine:
        yield engine


def test_counts_are_those_of_the_log(running):
    metrics = metrics_of(running)
    streams = [
        running.submit(ids, adapter, max_new_tokens=6, ignore_eos=True)
        for ids, adapter in zip(prompts((9, 21, 30, 9)), ("a", None, "a", "second"), strict=True)
    ]
    job = running.finetune(DATA, "mine", peft=LORA, **OPTIONS)
    for stream in streams:
        stream.wait(60)
    both_came = Event()  # no step begins between the two, in which the request might start
    running.call(both_came.wait)
    gone = running.submit([1, 2], max_new_tokens=90, ignore_eos=True)
    gone.cancel()
    both_came.set()
    gone.wait(60)
    job.wait(60)
    until(lambda: running.numbers().running == running.numbers().waiting == 0)
    report = serving_report(running.engine.log)
    families = parsed(page_of(metrics))
    for kind, names in VLLM.items():
        for name in names:
            family = families[f"vllm:{name}"]
            assert family.type == kind
            shared = {} if name == "lora_requests_info" else BASE
            assert all(shared.items() <= one.labels.items() for one in family.samples)
    series = {one.name: one.labels for family in families.values() for one in family.samples}
    for name in BOARD:
        assert series[f"vllm:{name}"]["model_name"] == "tiny"
    assert value(families, "vllm:prompt_tokens_total") == 9 + 21 + 30 + 9
    assert value(families, "vllm:generation_tokens_total") == 24
    assert value(families, "vllm:request_success_total", finished_reason="length") == 4
    assert value(families, "vllm:request_success_total", finished_reason="abort") == 1
    assert value(families, "vllm:inter_token_latency_seconds_count") == 20
    gaps_s = report.itl.mean_s * report.itl.count
    assert value(families, "vllm:inter_token_latency_seconds_sum") == pytest.approx(gaps_s)
    assert value(families, "vllm:iteration_tokens_total_sum") >= 24
    assert value(families, "vllm:request_generation_tokens_bucket", le="5.0") == 0
    assert value(families, "vllm:request_generation_tokens_bucket", le="10.0") == 4
    ends = [
        one.labels["le"]
        for one in families["vllm:request_prompt_tokens"].samples
        if "le" in one.labels
    ]
    assert ends == ["1.0", "2.0", "5.0", "10.0", "20.0", "50.0", "100.0", "+Inf"]
    a, second = ({"adapter": name, "tenant": ""} for name in ("a", "second"))
    assert value(families, "pcg:adapter_generation_tokens_total", **a) == 12
    assert value(families, "pcg:adapter_prompt_tokens_total", **a) == 39
    assert value(families, "pcg:adapter_requests_total", **second) == 1
    assert value(families, "pcg:adapter_time_to_first_token_seconds_count", **a) == 2
    mine = {"finetune_job": "mine", "tenant": ""}
    assert value(families, "pcg:finetune_step", **mine) == 3
    assert value(families, "pcg:finetune_tokens_total", **mine) == sum(
        report.finetuning_tokens.values()
    )
    assert value(families, "pcg:finetune_loss", **mine) > 0
    assert value(families, "pcg:slo_kept_total", **{"class": "ttft"}) == 4
    assert value(families, "pcg:slo_attainment_ratio", **{"class": "tpot"}) == 1
    assert value(families, "pcg:memory_bytes", kind="weights") == 1000
    assert families["process_resident_memory_bytes"].samples[0].value > 2**20


def picked(page):
    """What llm-d's endpoint picker reads of a page, by the rules of its extractor.

    Of each family it takes the series with the latest time, of adapters that with the largest
    value; names are split at commas and trimmed. A line that begins otherwise than with a plain
    name has it read the whole page, so there may be none.
    """
    series = {}
    for line in page.decode().splitlines():
        if line.startswith("#"):
            assert re.match(r"# (HELP|TYPE) [a-zA-Z_:][a-zA-Z0-9_:]* ", line)
            continue
        found = re.fullmatch(r"([a-zA-Z_:][a-zA-Z0-9_:]*)(?:\{(.*)\})? (\S+)", line)
        assert found is not None, line
        labels = dict(re.findall(r'(\w+)="((?:[^"\\]|\\.)*)"', found[2] or ""))
        series.setdefault(found[1], []).append((labels, float(found[3])))

    def first(name):
        return series[f"vllm:{name}"][0]

    def names(csv):
        return {name.strip() for name in csv.split(",") if name.strip()}

    latest = max(series["vllm:lora_requests_info"], key=lambda one: one[1])[0]
    return {
        "waiting": int(first("num_requests_waiting")[1]),
        "running": int(first("num_requests_running")[1]),
        "kv_usage": first("kv_cache_usage_perc")[1],
        "block_size": int(first("cache_config_info")[0]["block_size"]),
        "blocks": int(first("cache_config_info")[0]["num_gpu_blocks"]),
        "active": names(latest["running_lora_adapters"]),
        "queued": names(latest["waiting_lora_adapters"]),
        "most": int(latest["max_lora"]),
        "series": len(series["vllm:lora_requests_info"]),
    }


def affinity(found, adapter):
    """llm-d's lora-affinity-scorer."""
    if adapter in found["active"]:
        return 1.0
    if len(found["active"]) + len(found["queued"]) < found["most"]:
        return 0.8
    return 0.6 if adapter in found["queued"] else 0.0


def tiers(page, adapter):
    """The versions of an adapter on the device and in the host's memory."""
    samples = parsed(page)["pcg:adapter_resident"].samples
    return {s.labels["tier"]: s.value for s in samples if s.labels["adapter"] == adapter}


def test_an_endpoint_picker_sees_what_is_resident_and_what_waits(running):
    metrics = metrics_of(running)
    idle = picked(page_of(metrics))
    assert idle == {
        "waiting": 0, "running": 0, "kv_usage": 0.0, "block_size": 16, "blocks": 64,
        "active": set(), "queued": set(), "most": 8, "series": 1,
    }  # fmt: skip
    long = {"max_new_tokens": 90, "ignore_eos": True}
    with held_steps(running) as steps:
        streams = [running.submit([1, 2, 3], name, **long) for name in ("a", "a", "second")]
        all_came = running.call(lambda: None)
        steps.run(until=all_came.done)
        steps.run(until=lambda: running.numbers().running == 2)
        busy = picked(page_of(metrics))
        assert (busy["running"], busy["waiting"]) == (2, 1)
        assert "a" in busy["active"]
        assert busy["queued"] == {"second"}
        assert 0 < busy["kv_usage"] < 1
        assert affinity(busy, "a") == 1.0
        for stream in streams:
            stream.cancel()
    for stream in streams:
        stream.wait(60)
    after = picked(page_of(metrics))
    assert (after["running"], after["waiting"]) == (0, 0)
    assert "a" in after["active"]  # it has pages, though no request uses it
    assert after["queued"] == set()
    assert tiers(page_of(metrics), "a") == {"device": 1, "host": 1}
    running.remove_adapter("a").result(60)
    gone = picked(page_of(metrics))
    assert tiers(page_of(metrics), "a") == {"device": 0, "host": 0}
    assert tiers(page_of(metrics), "other")["host"] == 0
    assert "a" not in gone["active"]
    assert gone["series"] == 1


def test_names_of_tenants_are_told_apart_and_series_never_come_twice(running):
    """Tenants may call their adapters alike, or `other`, and versions have one name."""
    owners = {"a": Owned("red", "other"), "second": Owned("blue", "other")}
    running.add_adapter("third", LORA).result(60)
    owners["third"] = Owned("blue", "other")
    served = Served("tiny", 128, 8, owned=lambda name: owners.get(name, Owned("", name)))
    for name in owners:
        running.submit([1, 2, 3], name, max_new_tokens=4, ignore_eos=True).wait(60)
    until(lambda: running.numbers().running == 0)
    families = parsed(page_of(metrics_of(running, served)))
    red, blue = ({"adapter": "other", "tenant": tenant} for tenant in ("red", "blue"))
    assert value(families, "pcg:adapter_generation_tokens_total", **red) == 4
    assert value(families, "pcg:adapter_generation_tokens_total", **blue) == 8
    assert value(families, "pcg:adapter_time_to_first_token_seconds_count", **blue) == 2
    (info,) = families["vllm:lora_requests_info"].samples
    assert info.labels["running_lora_adapters"] == "other"


def test_a_page_is_made_beside_a_step_and_kept_for_a_moment(running):
    clock = Clock()
    metrics = metrics_of(running, now_s=clock)
    with held_steps(running) as steps:
        stream = running.submit([1, 2, 3], "a", max_new_tokens=2, ignore_eos=True)
        steps.until_held()
        first = page_of(metrics)
        clock.now_s += 0.01
        assert page_of(metrics) is first
        clock.now_s += 0.02
        assert page_of(metrics) is not first
        assert steps.done == 0
    stream.wait(60)


def test_the_board_asks_for_what_is_there():
    """Every metric and label in the board's queries is on the page."""
    executor = make_executor()
    with make_engine(executor, 64, Limits(ttft_slo_s=60.0)).start() as engine:
        job = engine.finetune(DATA, "mine", peft=LORA, **OPTIONS)
        engine.submit([1, 2, 3], "a", max_new_tokens=4, ignore_eos=True).wait(60)
        job.wait(60)
        page = page_of(metrics_of(engine))
    labels = {}
    for family in parsed(page).values():
        for sample in family.samples:
            labels.setdefault(sample.name, set()).update(sample.labels)
    board = json.loads((files("pcg.serve.metrics") / "grafana.json").read_text(encoding="utf-8"))
    asked = [
        target["expr"]
        for panel in board["panels"]
        for target in panel.get("targets", ())
    ]  # fmt: skip
    assert len(asked) > 30
    used = set()
    for query in asked:
        names = re.findall(r"\b(?:vllm|pcg):\w+", query)
        assert names, query
        used |= set(names)
        for name in names:
            assert name in labels, query
        for grouping in re.findall(r"by \(([^)]*)\)", query):
            wanted = {one.strip() for one in grouping.split(",")}
            assert all(wanted <= labels[name] for name in names), query
    assert used >= {"vllm:time_to_first_token_seconds_bucket", "pcg:slo_kept_total"}
    ids = [panel["id"] for panel in board["panels"]]
    assert len(set(ids)) == len(ids)
    (model,) = [one for one in board["templating"]["list"] if one["name"] == "model_name"]
    assert model["query"].startswith("label_values(vllm:num_requests_running,")
