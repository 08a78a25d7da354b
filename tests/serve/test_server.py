"""The server on a port: from the first request to the drain."""

import contextlib
import json
import os
import socket
import ssl
import subprocess
import sys
from concurrent.futures import ThreadPoolExecutor
from functools import partial
from pathlib import Path
from threading import Event, Thread

import httpx2
import pytest

from pcg.errors import GenerationError, PcgError, ServeError
from pcg.keys import digest_of
from pcg.runtime.admission.fair_share import FairShare
from pcg.runtime.admission.policies import EarlyAbort, Fcfs
from pcg.serve import server
from pcg.serve.engine.client import local_client
from pcg.serve.engine.options import ServeOptions
from pcg.serve.listening import Listener, listen, url_of
from pcg.serve.openai.sampling import GenerationConfig
from pcg.serve.server import serve
from tests.support import serving
from tests.support.step_gate import StepGate
from tests.support.waiting import until


@pytest.mark.parametrize("secure", [False, True])
def test_who_asks_while_the_model_loads_is_told(tmp_path, secure):
    """Everywhere, with a body that nobody reads; then the server takes requests at the port."""
    (tmp_path / "pem").write_text(CERTIFICATES[0])
    further = {"ssl_certfile": tmp_path / "pem"} if secure else {}
    options = ServeOptions(**{**serving.OPTIONS, **further})
    found = []
    gate, listener = Event(), Listener(options)

    def load():
        assert gate.wait(60)
        return serving.make_executor()

    engine = partial(local_client, load)
    with (
        ThreadPoolExecutor(1) as thread,
        httpx2.Client(base_url=listener.url, verify=False, timeout=60) as client,
    ):
        ended = thread.submit(
            serve, options, engine, lambda _: None, found.append, listener=listener
        )
        try:
            for method, path in (("GET", "/health"), ("HEAD", "/health"), ("POST", "/v1/x")):
                reply = client.request(method, path, content=b" " * 2**20)
                assert reply.status_code == 503
                assert int(reply.headers["retry-after"]) > 0
            assert reply.json()["error"]["code"] == "starting"
        finally:
            gate.set()
        until(lambda: bool(found) or ended.done())
        assert client.get("/health").json() == {"status": "running"}
        client.close()
        found[0].drain()
        assert ended.result(60)


def test_it_listens_before_torch_is_imported():
    code = "import sys, pcg_cli.application, pcg.serve.listening; sys.exit('torch' in sys.modules)"
    subprocess.run([sys.executable, "-c", code], check=True)


def test_a_drain_gives_up_what_does_not_end_in_time():
    """A stream ends by an error, and a reply that was not begun is one."""
    body = {
        "model": serving.MODEL,
        "prompt": [1, 2, 3],
        "max_tokens": 100,
        "ignore_eos": True,
        "n": 64,
    }
    with (
        serving.on_a_port(shutdown_timeout_s=0.05) as served,
        served.client() as client,
        served.client() as other,
        ThreadPoolExecutor(1) as thread,
    ):
        gate = StepGate(served.service.client.engine.engine)
        gate.let(2)
        begun = {**body, "stream": True}
        with client.stream("POST", "/v1/completions", json=begun) as reply:
            lines = reply.iter_lines()
            next(lines)
            whole = thread.submit(other.post, "/v1/completions", json=body)
            numbers = served.service.client.engine.numbers
            until(lambda: numbers().waiting + numbers().running >= 65)
            served.server.drain()
            *_, error, _, done, _ = lines
        assert done == "data: [DONE]"
        assert json.loads(error.removeprefix("data: "))["error"]["code"] == "timed_out"
        assert whole.result(60).status_code == 503


CERTIFICATES = (
    """\
-----BEGIN CERTIFICATE-----
MIIBeDCCAR2gAwIBAgIUXhRuubbPDoiLOHLwS+mN4354tXswCgYIKoZIzj0EAwIw
EDEOMAwGA1UEAwwFdGVzdDEwIBcNMjYxMTI4MDMwMzQ4WhgPMjEyNjExMDQwMzAz
NDhaMBAxDjAMBgNVBAMMBXRlc3QxMFkwEwYHKoZIzj0CAQYIKoZIzj0DAQcDQgAE
/jZY8W6ynujGo2gJbrZRQNPUnH5hc9ZA/80EcOB60jC2jlrw6iYWXM4nsP9aZElX
W8WP7CNn38hzHNPWhXU2vqNTMFEwHQYDVR0OBBYEFF2ypb14Pd/pP2Jj5Pj4z3Q5
TvtkMB8GA1UdIwQYMBaAFF2ypb14Pd/pP2Jj5Pj4z3Q5TvtkMA8GA1UdEwEB/wQF
MAMBAf8wCgYIKoZIzj0EAwIDSQAwRgIhALOch0GQM8pK4TkKZFWHBvmTnkGFzASK
HX7wd6awXDUDAiEA8/d1E3Pv3kKUopQg5KTNN1wyjMH91QU4bvI1CNxup30=
-----END CERTIFICATE-----
-----BEGIN PRIVATE KEY-----
MIGHAgEAMBMGByqGSM49AgEGCCqGSM49AwEHBG0wawIBAQQgZBinKHJTkULO3Qi6
SBTbJsAUmYb89nsmSD4CD2vjrNGhRANCAAT+NljxbrKe6MajaAlutlFA09ScfmFz
1kD/zQRw4HrSMLaOWvDqJhZcziew/1pkSVdbxY/sI2ffyHMc09aFdTa+
-----END PRIVATE KEY-----
""",
    """\
-----BEGIN CERTIFICATE-----
MIIBdjCCAR2gAwIBAgIUDvbghG5b3Q2JfWklAeX/UBK2hIwwCgYIKoZIzj0EAwIw
EDEOMAwGA1UEAwwFdGVzdDIwIBcNMjYxMTI4MDMwMzQ4WhgPMjEyNjExMDQwMzAz
NDhaMBAxDjAMBgNVBAMMBXRlc3QyMFkwEwYHKoZIzj0CAQYIKoZIzj0DAQcDQgAE
ZKeCe54/sg+kTnt9I+oA+4rtMW+7wwb4/q7iQDOzqa96+9Q4ltU5KM8alBFnuCR1
k6XM4aZG4qUmi0OrkUIx1KNTMFEwHQYDVR0OBBYEFNbAwYhDLxiIggTDyWERJO1I
hUpEMB8GA1UdIwQYMBaAFNbAwYhDLxiIggTDyWERJO1IhUpEMA8GA1UdEwEB/wQF
MAMBAf8wCgYIKoZIzj0EAwIDRwAwRAIgAulYtt9rKHdzWMOD6Ia8FSGzeZsihyDa
4ojEZWjGDxoCIF3Sf6fLLoUY2+adnbBgy/WujOIcqDg/Zm9q3y7pg38D
-----END CERTIFICATE-----
-----BEGIN PRIVATE KEY-----
MIGHAgEAMBMGByqGSM49AgEGCCqGSM49AwEHBG0wawIBAQQgNSXAHS5rXf/mt8sP
hiav+R/vsS/jtRNTmQwzpIM4TzGhRANCAARkp4J7nj+yD6ROe30j6gD7iu0xb7vD
Bvj+ruJAM7Opr3r71DiW1TkozxqUEWe4JHWTpczhpkbipSaLQ6uRQjHU
-----END PRIVATE KEY-----
""",
)
"""Two certificates of a curve, each with its key; nobody else has them."""


def keys_of(*names):
    """A file of keys."""
    digests = {name: digest_of(f"key-of-{name}").hex() for name in names}
    return json.dumps(
        [{"name": name, "sha256": one, "scopes": ["infer"]} for name, one in digests.items()]
    )


def test_keys_certificates_and_defaults_are_read_again_while_streams_go_on(tmp_path, caplog):
    keys, pem, generation = (tmp_path / name for name in ("keys", "pem", "generation_config.json"))
    keys.write_text(keys_of("a"))
    pem.write_text(CERTIFICATES[0])
    generation.write_text('{"temperature": 0.5}')
    options = {"api_keys": keys, "ssl_certfile": pem, "generation_config": str(tmp_path)}
    with serving.on_a_port(**options) as served:
        address = ("127.0.0.1", int(served.url.rpartition(":")[2]))

        def served_pem():
            return ssl.get_server_certificate(address)

        context = ssl.create_default_context()
        context.check_hostname, context.verify_mode = False, ssl.CERT_NONE
        base = {"base_url": served.url, "verify": context, "timeout": 60}
        with (
            httpx2.Client(**base, headers=serving.headers_of("a")) as client,
            httpx2.Client(**base, headers=serving.headers_of("b")) as other,
        ):

            def statuses():
                return tuple(one.get("/v1/models").status_code for one in (client, other))

            assert statuses() == (200, 401)
            gate = StepGate(served.service.client.engine.engine)
            gate.let(8)
            body = {"prompt": "a", "max_tokens": 100, "ignore_eos": True, "stream": True}
            with client.stream("POST", "/v1/completions", json=body) as reply:
                lines = reply.iter_lines()
                next(lines)
                keys.write_text("[]")
                served.server.reload()
                until(lambda: "nothing was reloaded" in caplog.text)
                assert "at least one" in caplog.text
                assert statuses() == (200, 401)
                keys.write_text(keys_of("b"))
                pem.write_text(CERTIFICATES[1])
                generation.write_text('{"temperature": 0.25}')
                served.server.reload()
                until(lambda: served.service.part(GenerationConfig).defaults.temperature == 0.25)
                gate.open()
                assert list(lines)[-2:] == ["data: [DONE]", ""]
            assert statuses() == (401, 200)
            assert CERTIFICATES[1].startswith(served_pem())


def test_files_that_cannot_be_read_again_hold_neither_the_next_time_nor_the_end(
    tmp_path, caplog, monkeypatch
):
    """A pipe that nobody writes to."""
    monkeypatch.setattr(server, "_READING_S", 0.05)
    keys = tmp_path / "keys"
    keys.write_text(keys_of("a"))
    with serving.on_a_port(api_keys=keys) as served:
        keys.unlink()
        os.mkfifo(keys)
        served.server.reload()
        until(lambda: "could not be read within 0.05 s" in caplog.text)
        keys.unlink()
        keys.write_text(keys_of("b", "c"))
        monkeypatch.setattr(server, "_READING_S", 30.0)
        served.server.reload()
        until(lambda: len(served.service.keys) == 2)
        keys.unlink()
        os.mkfifo(keys)
        served.server.reload()


@pytest.mark.parametrize(
    ("options", "text"),
    [
        ({"lora_modules": ("a=nowhere",)}, r"--lora-modules a=nowhere: adapter_config\.json is"),
        ({"lora_modules": ("a=x", "a=y")}, "'a' twice"),
        ({"lora_modules": ('{"name": "a"}',)}, "use NAME=PATH, or"),
        ({"lora_roots": ("nowhere",)}, "nowhere is not a folder"),
        ({"chat_template": Path("none.jinja")}, r"none\.jinja cannot be read"),
        ({"ssl_certfile": Path("none.pem")}, r"none\.pem cannot be used"),
        ({"port": 1, "host": "no such host."}, "is not an address"),
    ],
)
def test_what_is_not_there_is_known_before_the_model_is_loaded(options, text):
    def engine(*_):
        raise AssertionError("the model was loaded")

    with pytest.raises(PcgError, match=text):
        serve(ServeOptions(**{**serving.OPTIONS, **options}), engine, print)


def test_a_port_that_is_taken():
    with socket.socket() as other:
        other.bind(("127.0.0.1", 0))
        other.listen()
        port = other.getsockname()[1]
        with pytest.raises(ServeError, match=f"port {port} of 127.0.0.1 is in use"):
            listen("127.0.0.1", port)
    with pytest.raises(ServeError, match="is not an address"):
        listen("no such host.", 0)


@pytest.mark.parametrize(
    ("field", "value"),
    [
        ("port", -1),
        ("max_num_seqs", 0),
        ("kv_cache_gib", 0.0),
        ("max_logprobs", -1),
        ("kv_cache_gib", float("inf")),
        ("gpu_memory_utilization", 0.0),
        ("gpu_memory_utilization", 1.5),
        ("gpu_memory_utilization", float("nan")),
        ("tpot_slo_ms", 0.0),
    ],
)
def test_options_out_of_range(field, value):
    with pytest.raises(ServeError, match=field):
        ServeOptions(**{field: value})


def test_a_policy_is_chosen_by_its_name():
    assert isinstance(ServeOptions().engine(2).policy, FairShare)
    assert isinstance(ServeOptions(policy="early-abort").engine(2).policy, EarlyAbort)
    with pytest.raises(ServeError, match="tenant_seqs=2 needs policy='fair-share'"):
        ServeOptions(policy="fcfs", tenant_seqs=2)


def test_a_policy_may_be_a_class_of_a_user(tmp_path, monkeypatch):
    (tmp_path / "newest.py").write_text(
        "from pcg.runtime.admission.policies import Fcfs\nclass Newest(Fcfs): pass\n"
    )
    monkeypatch.syspath_prepend(tmp_path)
    policy = ServeOptions(policy="newest:Newest").engine(1).policy
    assert (type(policy).__name__, isinstance(policy, Fcfs)) == ("Newest", True)
    for name, message in {
        "last": "policy='last'; use fair-share, fcfs, .* or MODULE:CLASS",
        "newest:Fcsf": "has no attribute 'Fcsf'",
        "newest:__name__": "of a subclass of pcg.runtime.admission.policy.Policy",
        "oldest:Oldest": "No module named 'oldest'; add the module's folder to PYTHONPATH",
    }.items():
        with pytest.raises(GenerationError, match=message):
            ServeOptions(policy=name)


@pytest.mark.parametrize("restarts", [True, False])
def test_a_server_whose_engine_ends_opens_another_one(restarts, monkeypatch):
    """On the same port, with the same key; a drain ends it for good."""
    monkeypatch.setattr(server, "LEAST_S", 0.0)
    executor, said, texts, statuses = serving.make_executor(), [], [], []
    reloaded = GenerationConfig("reloaded")

    def ready(running):
        Thread(target=use, args=(running,)).start()

    def use(running):
        url = url_of(running.servers[0].sockets[0], is_secure=False)
        with httpx2.Client(base_url=url, headers=serving.HEADERS, timeout=60) as client:
            body = {"model": serving.MODEL, "prompt": [1, 2, 3], "max_tokens": 4, "temperature": 0}
            texts.append((url, client.post("/v1/completions", json=body).json()["choices"]))
        if len(texts) == 1:
            running.service.add(reloaded)
            running.service.client.engine.call(broken)
        else:
            assert running.service.part(GenerationConfig) is reloaded
            running.drain()

    def broken():
        raise SystemExit("broken on purpose")  # nothing that a call may raise

    @contextlib.contextmanager
    def engine(*given):
        if texts:
            statuses.append(httpx2.get(f"{texts[0][0]}/health", timeout=60).status_code)
        with local_client(lambda: executor, *given) as client:
            yield client

    options = ServeOptions(**serving.OPTIONS)
    assert server.serve(options, engine, said.append, ready, restarts=restarts) is restarts
    assert len(texts) == 1 + restarts
    assert statuses == [503] * restarts
    assert texts[0] == texts[-1]
    assert ("The engine starts again." in said) is restarts
