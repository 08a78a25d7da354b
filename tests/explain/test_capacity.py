"""Answers for choosing a machine: GPUs that hold a step, plans of ranks, cuts for split clients."""

import functools
import json
from functools import cache
from html import unescape

import peft
import pytest

import pcg
from pcg.errors import AdapterError, CostModelError, UnsupportedError
from pcg.explain.explain_split import explain_split
from pcg.explain.parallel_report import strategies, token_regions
from pcg.parallel.base_plan import COLUMN
from pcg.parallel.costs.accelerators import ACCELERATORS, RESERVED_BYTES
from pcg.source import resolve
from tests.support import tiny_llama
from tests.support.families import BY_NAME
from tests.support.parallelized import attached, costs, search_layer

LLAMA = "meta-llama/Llama-3.1-8B"
GPT2 = "openai-community/gpt2-xl"
OPTIONS = {"--batch": int, "--seq": int, "--tp": int, "--memory-budget": float}


def short(model, layers=2):
    config = resolve(model).config
    return {**config, "n_layer" if "n_layer" in config else "num_hidden_layers": layers}


def options_of(advice):
    """The keywords of options as they are written in advice."""
    words = advice.split()
    return {
        flag.strip("-").replace("-", "_"): OPTIONS[flag](value)
        for flag, value in zip(words[::2], words[1::2], strict=True)
    }


def test_the_total_is_of_finetuning_alone_and_serving_adds_its_cache():
    alone = pcg.explain(short("facebook/opt-6.7b"), batch=8, seq=512)
    serving = pcg.explain(short("facebook/opt-6.7b"), batch=8, seq=512, serve_tokens=1000)
    assert alone.memory_bytes["kv_cache"] == 0
    assert alone.formulas["kv_cache"] == "0"
    cache = 1000 * 2 * 2 * 4096 * 2  # keys and values of two layers, in half precision
    assert serving.memory_bytes["kv_cache"] == cache
    copies = serving.memory_bytes["served_adapters"]
    assert copies > alone.memory_bytes["served_adapters"] == 0
    assert serving.memory_bytes["total"] == alone.memory_bytes["total"] + cache + copies
    assert alone.kept_bytes == 0
    assert "KV cache    = 32768000" in serving.to_text()
    assert "KV cache  " not in alone.to_text().partition("bytes, for B")[2]


def test_windows_that_a_job_leaves_are_told_where_they_are_recorded():
    """Beside requests on one GPU, but of a budget in bytes, whose steps may be planned anew."""
    config = short(LLAMA)
    report = pcg.explain(config, batch=2, seq=64, serve_tokens=100)
    windows = report.stage("token-level")
    both = report.memory_bytes["adapters"] + report.memory_bytes["gradients"]
    layer = max(moment.workspace_bytes for moment in report.timeline if moment.label != "loss")
    assert report.kept_bytes == windows.bytes + layer + both
    assert "beside other jobs: 0.07 GiB that a job which has ended may keep" in report.to_text()
    found = pcg.explain(config, batch=2, seq=64, serve_tokens=100, memory_budget="1GiB")
    assert found.kept_bytes == 0
    assert "has ended" not in found.to_text()


def test_without_adapters_the_cache_is_that_of_the_batch():
    config = short(LLAMA)
    row = 2 * 2 * 8 * 128 * 2
    assert pcg.explain(config, None, batch=2, seq=64).memory_bytes["kv_cache"] == 128 * row
    assert pcg.explain(config, None, serve_tokens=7).memory_bytes["kv_cache"] == 7 * row


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"serve_tokens": -1}, "serve_tokens=-1; use an int of at least 0"),
        ({"serve_tokens": 1.5}, "serve_tokens=1.5; use an int of at least 0"),
        ({"device": "tpu"}, "device='tpu'; use cuda or cpu"),
        ({"device": "cpu", "gpus": ["L4"]}, "leave one of them out"),
    ],
)
def test_options_out_of_range_are_refused(options, message):
    with pytest.raises(UnsupportedError, match=message):
        pcg.explain(short(LLAMA), **options)


def test_a_gpu_and_a_method_are_named_as_on_the_command_line():
    report = pcg.explain(short(LLAMA), "none", gpus="H100, L4")
    assert [fit.gpu for fit in report.fits] == ["H100", "L4"]
    assert report.parameters["trainable"] == 0
    with pytest.raises(UnsupportedError, match="'A100'; did you mean A100-40 or A100-40-PCIE"):
        pcg.explain(short(LLAMA), gpus="A100")
    with pytest.raises(AdapterError, match="'qlora' is neither one of lora, "):
        pcg.explain(short(LLAMA), "qlora")


def test_a_step_that_no_machine_could_hold_is_explained_without_eager():
    report = pcg.explain(short(LLAMA), batch=10**9)
    assert "eager" not in {row["stage"] for row in report.to_json()["activations"]}
    assert any("1,024,000,000,000 tokens are more than" in note for note in report.notes)


def test_longest_sequences_stop_at_the_positions_of_the_model():
    (fit,) = pcg.explain(short(GPT2), gpus=["H200"]).fits
    assert (fit.largest_seq, fit.least_largest_seq) == (1024, 1024)
    # Falcon's configuration leaves out the positions, which transformers has as a default.
    (fit,) = pcg.explain(short("tiiuae/falcon-7b"), gpus=["H200"]).fits
    assert fit.largest_seq == 2048


def test_sequences_beyond_the_positions_are_said():
    note = "seq: 4,096 tokens are beyond the 1,024 positions of this model"
    report = pcg.explain(short(GPT2), seq=4096)
    assert note in report.notes
    assert note in report.to_text()
    assert note in report.to_html()
    assert pcg.explain(short(GPT2), seq=1024).notes == ()


def test_gpus_that_hold_the_step_are_named():
    report = pcg.explain(short(LLAMA, 32), batch=4)
    total = report.memory_bytes["total"]
    holding = [n for n, gpu in ACCELERATORS.items() if gpu.memory_bytes - RESERVED_BYTES >= total]
    assert 0 < len(holding) < len(ACCELERATORS)
    assert report.gpus == tuple(holding)
    assert f"fits  {holding[0]}, {holding[1]}" in report.to_text()
    assert report.to_json()["gpus"] == holding
    assert f"A rank fits {', '.join(holding)}." in report.to_html()


@pytest.fixture(scope="module")
def crowded():
    """A step that fits no L4, and less of it does."""
    return pcg.explain(short(LLAMA, 16), batch=32, seq=2048, gpus=["L4", "T4"])


def test_pages_and_json_have_the_fits_and_the_advice(crowded):
    found = json.loads(json.dumps(crowded.to_json()))["fits"]
    assert [one["gpu"] for one in found] == ["L4", "T4"]
    page, text = unescape(crowded.to_html()), crowded.to_text()
    for fit, row in zip(crowded.fits, found, strict=True):
        assert row["largest_batch"] == fit.largest_batch
        assert row["advice"] == list(fit.advice)
        for advice in fit.advice:
            assert f"<code>{advice}</code>" in page
            assert f"to make it fit: {advice}" in text
        assert f"{fit.largest_batch:,}" in page


def test_advice_names_batch_budget_and_ranks_and_each_fits(crowded):
    advice = crowded.fits[0].advice
    named = {word for option in advice for word in option.split() if word.startswith("--")}
    assert named == {"--batch", "--memory-budget", "--seq", "--tp"}
    assert any(option.startswith("--batch") and "--memory-budget" in option for option in advice)
    for option in advice:
        asked = {"batch": 32, "seq": 2048, **options_of(option)}
        total = pcg.explain(short(LLAMA, 16), **asked).memory_bytes["total"]
        assert total <= crowded.fits[0].usable_bytes, option


def test_weights_that_are_too_large_take_ranks():
    (fit,) = pcg.explain(short(LLAMA, 32), gpus=["T4"]).fits
    assert fit.advice == ("--tp 2",)
    asked = pcg.explain(short(LLAMA, 32), tp=2).memory_bytes["total"]
    assert asked <= fit.usable_bytes


@cache
def searches():
    """Of the two blocks of Gemma-2, whose attention differs."""
    state = attached("gemma2")
    pairs = zip(state.training.blocks, state.base.blocks, strict=True)
    return tuple(search_layer(block, plain, 2, costs(2)) for block, plain in pairs)


def test_blocks_that_differ_are_all_told():
    first, second = searches()
    same = strategies((first, second), (first.plan(), second.plan()))
    assert set(same) == {site.name for site in first.sites}
    site = first.sites[0]
    best = second.plan()
    other = second.force(best, second.sites[0], dict.fromkeys(second.sites[0].weights, COLUMN))
    found = strategies((first, second), (first.plan(), other))
    assert found[f"{first.graph.name}/{site.name}"] == same[site.name]
    assert found[f"{second.graph.name}/{site.name}"] == "FlexLLM 3, S-LoRA"
    assert site.name not in found
    assert found.items() >= {n: s for n, s in same.items() if n != site.name}.items()


def test_regions_say_the_context_of_their_costs():
    asked = []

    def searches_at(tokens, context):
        asked.append((tokens, context))
        return searches()

    (row,) = token_regions(searches_at, 100)
    assert asked == [(4**power, min(4**power, 100)) for power in range(9)]
    assert (row["from_tokens"], row["to_tokens"]) == (1, 65_536)
    assert (row["from_context"], row["to_context"]) == (1, 100)


@pytest.mark.slow
def test_the_text_has_every_context():
    """Also at degrees that divide neither the width nor the vocabulary."""
    report = pcg.explain(BY_NAME["falcon-40b"].config(2), tp=2, seq=48, find_region=True)
    assert report.to_json()["parallel"]["context"] == 48
    assert "for 48 tokens in sequences of 48" in report.to_text()
    text = report.to_text(formulas=True)
    assert "best strategies, as asked, in sequences of 48 tokens at most" in text


def test_batches_of_an_optimizer_step_are_said():
    config = BY_NAME["llama3"].config(2)
    options = {"tp": 2, "seq": 48, "batch": 1}
    one, many = (
        pcg.explain(config, gradient_accumulation_steps=batches, **options) for batches in (1, 8)
    )
    assert many.to_json()["parallel"]["gradient_accumulation_steps"] == 8
    assert "once an optimizer step, of 8 batches" in many.to_text()
    assert "of which each of its 8 batches pays a part" in many.to_html()
    assert "batches" not in one.to_text()


def test_requests_that_are_served_beside_have_a_plan_of_their_own():
    config = BY_NAME["llama3"].config(2)
    report = pcg.explain(config, tp=2, seq=48, serve_tokens=64)
    (block,) = report.to_json()["parallel"]["serving"]
    assert len(block["sites"]) == 7
    steps = {step["tokens"]: step for step in block["steps"]}
    assert [*steps] == [1, 4, 16, 64, 256, 2048]
    assert steps[256]["bytes"] == 256 * steps[1]["bytes"] > 0
    assert steps[2048]["layer_us"] > steps[1]["layer_us"]
    text = report.to_text()
    assert "serving plan, the best of all these steps together" in text
    assert "2,048 tokens" in text
    assert "serving" not in pcg.explain(config, tp=2, seq=48).to_json()["parallel"]


def test_launches_of_the_host_are_said_of_gpus():
    """Steps over ranks are not recorded; a CPU has no launches to wait for."""
    config = BY_NAME["llama3"].config(2)
    on = {device: pcg.explain(config, tp=2, seq=48, device=device) for device in ("cuda", "cpu")}
    text = "takes 1 ms to launch a step that decodes, as none is recorded over ranks"
    assert text in on["cuda"].to_text()
    assert text not in on["cpu"].to_text()
    assert on["cuda"].to_json()["parallel"]["host_ms"] == pytest.approx(0.87)
    assert on["cpu"].to_json()["parallel"]["host_ms"] is None


QV = peft.LoraConfig(r=4, target_modules=["q_proj", "v_proj"])


@functools.cache
def report():
    return explain_split(tiny_llama.config(), QV, link="5,1", seq=16, batch=2, client="a100-80")


def test_json_has_the_pieces_and_the_numbers_of_each_step():
    found = json.loads(json.dumps(report().to_json()))
    assert found["link"] == {"name": "5 ms, 1 Gbit/s", "latency_s": 5e-3, "bytes_per_s": 125e6}
    assert (found["base"], found["client"], found["privacy"]) == ("H100", "A100-80", False)
    assert list(found["steps"]) == ["decode", "prefill", "training"]
    tokens = {name: step["tokens"] for name, step in found["steps"].items()}
    assert tokens == {"decode": 2, "prefill": 32, "training": 32}
    for step in found["steps"].values():
        for name in ("round_trips", "sent_bytes", "returned_bytes", "seconds"):
            assert step[name] == pytest.approx(
                sum(graph["count"] * graph[name] for graph in step["graphs"])
            )
            assert step["fixed"][name] == pytest.approx(
                sum(graph["count"] * graph["fixed"][name] for graph in step["graphs"])
            )
            assert step[name] <= step["fixed"][name]
        assert step["tokens_per_s"] == pytest.approx(step["tokens"] / step["seconds"])
        for graph in step["graphs"]:
            inputs = [one for piece in graph["pieces"] for one in piece["inputs"]]
            sent = sum(one["bytes_per_token"] for one in inputs) * step["tokens"]
            assert sent == pytest.approx(graph["sent_bytes"])
            assert len(graph["pieces"]) == graph["round_trips"]
    block = found["steps"]["decode"]["graphs"][1]
    assert block["pieces"][0]["nodes"] == ["q_proj", "k_proj", "v_proj"]
    assert block["pieces"][0]["inputs"] == [{"value": "input_layernorm", "bytes_per_token": 128.0}]
    assert "attention" in block["client"]
    back = found["steps"]["training"]["graphs"][-2]["pieces"]
    assert [piece["direction"] for piece in back] == ["forward", "forward", "backward", "backward"]
    assert [one["weight"] for one in found["held"]] == ["model.embed_tokens.weight"]


def test_links_are_compared_each_with_its_own_cut():
    rows = report().to_json()["links"]
    assert [row["link"] for row in rows] == ["shared", "lan", "wan", "5 ms, 1 Gbit/s"]
    speeds = [row["decode_tokens_per_s"] for row in rows]
    assert speeds[0] > speeds[1] > speeds[3] > speeds[2]
    for row in rows:
        assert row["decode_tokens_per_s"] > row["fixed_decode_tokens_per_s"]
        assert row["training_tokens_per_s"] > row["fixed_training_tokens_per_s"]
    own = report().to_json()["steps"]["decode"]["tokens_per_s"]
    assert rows[3]["decode_tokens_per_s"] == own


def test_text_shows_pieces_with_what_crosses():
    lines = report().to_text().splitlines()
    assert max(map(len, lines)) <= 100
    assert "base H100, client A100-80, link 5 ms, 1 Gbit/s: 5 ms a round trip, 1 Gbit/s" in lines
    place = lines.index(
        next(line for line in lines if line.startswith("decode: block_0, 2 layers"))
    )
    assert "2 round trips for 7" in lines[place]
    assert lines[place + 1 : place + 4] == [
        "  1 base   q_proj, k_proj, v_proj",
        "    takes  input_layernorm 128 bytes a token",
        "    gives  q_proj 128, k_proj 64, v_proj 64 bytes a token; forward, 5.018 ms",
    ]
    assert any(line.startswith("    again  ") for line in lines)


def test_the_page_has_the_pieces_and_stands_alone():
    html = report().to_html()
    assert "Pieces: training" in html
    assert "<code>q_proj, k_proj, v_proj</code>" in html
    assert "http" not in html


def test_a_model_without_adapters_has_no_training():
    found = explain_split(tiny_llama.config(), None, seq=16)
    assert list(found.steps) == ["decode", "prefill"]
    assert found.links[0].training is None
    assert found.to_json()["links"][0]["training_tokens_per_s"] is None
    assert "no adapters" in found.to_text()


def test_privacy_names_what_the_client_holds():
    found = explain_split(tiny_llama.config(), QV, seq=16, privacy=True)
    (held,) = found.to_json()["held"]
    assert held == {"weight": "model.embed_tokens.weight", "bytes": 512 * 32 * 4}
    assert "the client holds  model.embed_tokens.weight" in found.to_text()
    assert "linear operators alone" in found.to_html()


def test_what_is_not_known_is_refused_before_tracing():
    with pytest.raises(UnsupportedError, match="link='far'"):
        explain_split(tiny_llama.config(), QV, link="far")
    with pytest.raises(CostModelError, match="did you mean H100"):
        explain_split(tiny_llama.config(), QV, base="H10")
    with pytest.raises(UnsupportedError, match="batch=0"):
        explain_split(tiny_llama.config(), QV, batch=0)
