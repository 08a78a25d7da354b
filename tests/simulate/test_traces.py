"""Trace files: what is written is read back, and what is wrong is named with its line."""

import pytest
from hypothesis import given
from hypothesis import strategies as st

from pcg.errors import BenchmarkError
from pcg.simulate.distributions import Between, Poisson, Skewed
from pcg.simulate.synthetic import assign_adapters, synthetic
from pcg.simulate.workload import TimedRequest, Workload, read_public_trace

REQUESTS = st.builds(
    TimedRequest,
    time_s=st.floats(0, 1e9),
    adapter=st.none() | st.text(),
    prompt_tokens=st.integers(1, 10**6),
    output_tokens=st.integers(1, 10**6),
    tenant=st.none() | st.text(),
)


@given(requests=st.lists(REQUESTS, min_size=1, max_size=20))
def test_round_trip(tmp_path_factory, requests):
    workload = Workload(tuple(sorted(requests, key=lambda one: one.time_s)))
    path = tmp_path_factory.mktemp("trace") / "trace.jsonl"
    workload.save(path)
    assert Workload.load(path) == workload


def test_a_line_is_what_the_docs_say(tmp_path):
    path = tmp_path / "trace.jsonl"
    Workload((TimedRequest(0.25, "adapter-3", 310, 64), TimedRequest(0.5, None, 1, 2, "b"))).save(
        path
    )
    assert path.read_text() == (
        '{"time_s": 0.25, "adapter": "adapter-3", "prompt_tokens": 310, "output_tokens": 64}\n'
        '{"time_s": 0.5, "prompt_tokens": 1, "output_tokens": 2, "tenant": "b"}\n'
    )
    path.write_text("\n" + path.read_text().replace("0.25", "0"))
    assert [one.time_s for one in Workload.load(path)] == [0, 0.5]


GOOD = '{"time_s": 1.0, "prompt_tokens": 1, "output_tokens": 2}\n'


@pytest.mark.parametrize(
    ("line", "message"),
    [
        ("{", "is damaged at line 1, column 2: .*; write one object a line"),
        ("[1]", "not an object; write {'time_s', 'prompt_tokens', 'output_tokens'}"),
        ('{"time_s": 2}', "no 'prompt_tokens'; it has 'time_s'"),
        (GOOD.replace("1.0", "0.5"), r"time_s=0\.5 is before the last, 1\.0; sort the lines"),
        (GOOD.replace("1.0", '"2"'), "time_s='2' is not a number"),
        (GOOD.replace("1.0", "true"), "time_s=True is not a number"),
        (GOOD.replace("1.0", "NaN"), "time_s=nan; use a finite number of at least 0"),
        (GOOD.replace(": 1,", ": 0,"), "prompt_tokens=0; use a whole number of at least 1"),
        (GOOD.replace(": 2}", ": 2.5}"), r"output_tokens=2\.5; use a whole number"),
        (GOOD.replace("}", ', "adapter": 3}'), "adapter=3 is not a string"),
        (GOOD.replace("}", ', "adaptor": "x"}'), "unknown key 'adaptor'; use time_s, adapter"),
        ("\xff", "is damaged: byte 0 is not UTF-8"),
    ],
)
def test_errors_name_the_line(tmp_path, line, message):
    path = tmp_path / "trace.jsonl"
    path.write_bytes(GOOD.encode() + b"\n" + line.strip().encode("latin-1") + b"\n")
    with pytest.raises(BenchmarkError, match=rf"trace\.jsonl line 3:? {message}"):
        Workload.load(path)


def test_no_file_and_no_requests(tmp_path):
    with pytest.raises(BenchmarkError, match="no trace file"):
        Workload.load(tmp_path / "none.jsonl")
    (tmp_path / "empty.jsonl").write_text("\n")
    with pytest.raises(BenchmarkError, match="holds no requests"):
        Workload.load(tmp_path / "empty.jsonl")


def test_order_is_checked():
    with pytest.raises(BenchmarkError, match=r"request 1 comes at 1\.0 s, before request 0"):
        Workload((TimedRequest(2.0, None, 1, 1), TimedRequest(1.0, None, 1, 1)))


@given(seed=st.integers(0, 1000), rate=st.floats(0.1, 1000.0))
def test_at_rate(seed, rate):
    found = synthetic(Poisson(3.0), Between(1, 9), Between(1, 9), seed=seed, requests=50)
    pressed = found.at_rate(rate)
    assert len(pressed) / pressed.duration_s == pytest.approx(rate)
    assert [one.prompt_tokens for one in pressed] == [one.prompt_tokens for one in found]
    ratio = pressed.requests[0].time_s / found.requests[0].time_s
    assert ratio == pytest.approx(pressed.duration_s / found.duration_s)


def test_part():
    found = Workload(tuple(TimedRequest(float(i), None, i + 1, 1) for i in range(10)))
    part = found.part(3.0, 6.0)
    assert [(one.time_s, one.prompt_tokens) for one in part] == [(0.0, 4), (1.0, 5), (2.0, 6)]
    with pytest.raises(
        BenchmarkError, match=r"no request from 10 s to 11 s; .* last comes at 9\.0 s"
    ):
        found.part(10, 11)
    with pytest.raises(BenchmarkError, match="no rate"):
        found.part(3.0, 4.0).at_rate(1.0)


def test_azure(tmp_path):
    path = tmp_path / "azure.csv"
    path.write_text(
        "TIMESTAMP,ContextTokens,GeneratedTokens\r\n"
        "2023-11-16 18:17:03.9799600,4808,10\r\n"
        "2023-11-16 18:17:04.0319600,3180,8\r\n"
        "2023-11-16 23:59:59.9799600,110,27\r\n"
        "2023-11-17 00:00:00.0000000,110,0\r\n"
    )
    found = read_public_trace(path)
    assert [one.time_s for one in found] == pytest.approx([0.0, 0.052, 20576.0])
    assert [one.prompt_tokens for one in found] == [4808, 3180, 110]
    assert [one.output_tokens for one in found] == [10, 8, 27]
    # Of 2024: with a time zone.
    path.write_text(
        "TIMESTAMP,ContextTokens,GeneratedTokens\n"
        "2024-05-10 00:00:00.009930+00:00,2162,5\n"
        "2024-05-10 00:00:00.017335+00:00,2399,6\n"
    )
    assert [one.time_s for one in read_public_trace(path)] == pytest.approx([0.0, 0.007405])


def test_burstgpt(tmp_path):
    path = tmp_path / "burst.csv"
    path.write_text(
        "Timestamp,Model,Request tokens,Response tokens,Total tokens,Log Type\n"
        "5,ChatGPT,472,18,490,Conversation log\n"
        "118,GPT-4,417,276,693,Conversation log\n"
        "45,ChatGPT,1087,230,1317,Conversation log\n"
        "1106,ChatGPT,0,0,0,Conversation log\n"
    )
    found = read_public_trace(path)
    assert [(one.time_s, one.prompt_tokens, one.output_tokens) for one in found] == [
        (0.0, 472, 18),
        (40.0, 1087, 230),
        (113.0, 417, 276),
    ]
    assert len(assign_adapters(found.at_rate(2.0), Skewed(), seed=0).adapters) == 2


@pytest.mark.parametrize(
    ("text", "message"),
    [
        ("a,b\n1,2\n", r"has columns a, b; a trace has one of: TIMESTAMP, ContextTokens"),
        ("", "has columns none"),
        ("Timestamp,Request tokens,Response tokens\n1,2,3\nx,2,3\n", "line 3: could not convert"),
        ("Timestamp,Request tokens,Response tokens\n1,2\n", "line 2: "),
        ("TIMESTAMP,ContextTokens,GeneratedTokens\nyesterday,2,3\n", "line 2: Invalid isoformat"),
        ("TIMESTAMP,ContextTokens,GeneratedTokens\n", "holds no requests"),
    ],
)
def test_public_traces_that_are_none(tmp_path, text, message):
    path = tmp_path / "trace.csv"
    path.write_text(text)
    with pytest.raises(BenchmarkError, match=message):
        read_public_trace(path)
