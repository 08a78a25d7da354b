"""The report of a cut: what it says of a model, as JSON, text and a page."""

import functools
import json

import peft
import pytest

from pcg.errors import CostModelError, UnsupportedError
from pcg.explain.explain_split import explain_split
from pcg.explain.report.split_report import SplitReport
from tests.support import tiny_llama

QV = peft.LoraConfig(r=4, target_modules=["q_proj", "v_proj"])


@functools.cache
def report() -> SplitReport:
    return explain_split(tiny_llama.config(), QV, link="5,1", seq=16, batch=2, client="a100-80")


def test_json_has_the_pieces_and_the_numbers_of_each_step() -> None:
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


def test_links_are_compared_each_with_its_own_cut() -> None:
    rows = report().to_json()["links"]
    assert [row["link"] for row in rows] == ["shared", "lan", "wan", "5 ms, 1 Gbit/s"]
    speeds = [row["decode_tokens_per_s"] for row in rows]
    assert speeds[0] > speeds[1] > speeds[3] > speeds[2]
    for row in rows:
        assert row["decode_tokens_per_s"] > row["fixed_decode_tokens_per_s"]
        assert row["training_tokens_per_s"] > row["fixed_training_tokens_per_s"]
    own = report().to_json()["steps"]["decode"]["tokens_per_s"]
    assert rows[3]["decode_tokens_per_s"] == own


def test_text_shows_pieces_with_what_crosses() -> None:
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


def test_the_page_has_the_pieces_and_stands_alone() -> None:
    html = report().to_html()
    assert "Pieces: training" in html
    assert "<code>q_proj, k_proj, v_proj</code>" in html
    assert "http" not in html


def test_a_model_without_adapters_has_no_training() -> None:
    found = explain_split(tiny_llama.config(), None, seq=16)
    assert list(found.steps) == ["decode", "prefill"]
    assert found.links[0].training is None
    assert found.to_json()["links"][0]["training_tokens_per_s"] is None
    assert "no adapters" in found.to_text()


def test_privacy_names_what_the_client_holds() -> None:
    found = explain_split(tiny_llama.config(), QV, seq=16, privacy=True)
    (held,) = found.to_json()["held"]
    assert held == {"weight": "model.embed_tokens.weight", "bytes": 512 * 32 * 4}
    assert "the client holds  model.embed_tokens.weight" in found.to_text()
    assert "linear operators alone" in found.to_html()


def test_what_is_not_known_is_refused_before_tracing() -> None:
    with pytest.raises(UnsupportedError, match="link='far'"):
        explain_split(tiny_llama.config(), QV, link="far")
    with pytest.raises(CostModelError, match="did you mean H100"):
        explain_split(tiny_llama.config(), QV, base="H10")
    with pytest.raises(UnsupportedError, match="batch=0"):
        explain_split(tiny_llama.config(), QV, batch=0)
