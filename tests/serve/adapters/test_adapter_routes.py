"""Adapters as models over HTTP: loaded, replaced, unloaded, found by name, and each its owner's.

Long because each route has every way in which it can be asked wrongly.
"""

import asyncio
import json
import shutil
from pathlib import Path

import pytest

from pcg.keys import Keys
from pcg.peft.adapter_files import WEIGHTS
from tests.support import serving
from tests.support.step_gate import StepGate

KEYS = Keys(
    [
        serving.key("op"),
        serving.key("a", tenant="team"),
        serving.key("a-infer", "infer", tenant="team"),
        serving.key("b", "infer", "train"),
        serving.key("b-admin", tenant="b"),
    ]
)
TEXT = "Hello, how are"


@pytest.fixture(scope="module")
def saved(tmp_path_factory):
    """Adapters `zero`, `one` and `two` in a folder, which answer differently."""
    executor = serving.make_executor(adapters=3)
    folder = tmp_path_factory.mktemp("adapters")
    for index, name in enumerate(("zero", "one", "two")):
        executor.save_adapter(f"lora-{index}", folder / name)
    return folder


@pytest.fixture(scope="module")
def texts(saved):
    """The library's continuations by each."""
    executor = serving.make_executor(adapters=0)
    for name in ("zero", "one", "two"):
        executor.add_adapter(name, saved / name)
    found = {
        n: executor.generate(TEXT, n, max_new_tokens=8).text for n in (None, "zero", "one", "two")
    }
    assert len(set(found.values())) == 4
    return found


@pytest.fixture
def root(saved, tmp_path):
    return Path(shutil.copytree(saved, tmp_path / "root"))


@pytest.fixture
def service(root):
    with make_service(root) as service:
        yield service


def make_service(root, executor=None, **options):
    executor = executor or serving.make_executor(adapters=0)
    return serving.service_of(executor, KEYS, lora_roots=(str(root),), **options)


class Caller:
    """Asks a service with one key."""

    def __init__(self, service, key):
        self._service = service
        self._headers = serving.headers_of(key)

    def __call__(self, method, path, **options):
        headers = {**self._headers, **options.pop("headers", {})}
        return serving.ask(self._service, method, path, headers, **options)

    def load(self, name, path, **fields):
        body = {"lora_name": name, "lora_path": str(path), **fields}
        return self("POST", "/v1/load_lora_adapter", json=body)

    def unload(self, name, **fields):
        return self("POST", "/v1/unload_lora_adapter", json={"lora_name": name, **fields})

    def models(self):
        return [model["id"] for model in self("GET", "/v1/models").json()["data"]]

    def complete(self, model):
        body = {"model": model, "prompt": TEXT, "max_tokens": 8, "temperature": 0}
        return self("POST", "/v1/completions", json=body)

    def text(self, model):
        found = self.complete(model)
        assert found.status_code == 200, found.text
        return str(found.json()["choices"][0]["text"])


def error_of(reply, status):
    assert reply.status_code == status, reply.text
    error = reply.json()["error"]
    assert set(error) == {"message", "type", "param", "code"}
    return error


def test_loaded_replaced_and_unloaded(service, texts, root):
    ask = Caller(service, "op")
    done = ask.load("sql", "zero")
    assert (done.status_code, done.headers["content-type"]) == (200, "text/plain; charset=utf-8")
    assert done.text == "Success: LoRA adapter 'sql' added successfully."
    assert done.headers["x-adapter-version"] == "1"
    assert ask.text("sql") == texts["zero"]
    error = error_of(ask.load("sql", root / "one"), 400)
    assert error["message"] == (
        "The lora adapter 'sql' has already been loaded. If you want to load the adapter in "
        "place, set 'load_inplace' to true."
    )
    assert (error["type"], error["code"]) == ("InvalidUserInput", 400)
    again = ask.load("sql", root / "one", load_inplace=True)
    assert (again.status_code, again.headers["x-adapter-version"]) == (200, "2")
    assert again.headers["x-adapter-digest"] != done.headers["x-adapter-digest"]
    assert ask.text("sql") == texts["one"]
    card = ask("GET", "/v1/models/sql").json()
    assert card["version"] == 2
    assert card["digest"] == again.headers["x-adapter-digest"]
    assert (card["root"], card["parent"], card["max_model_len"]) == (
        str(root / "one"),
        "tiny",
        None,
    )
    (base, _) = ask("GET", "/v1/models").json()["data"]
    assert (base["id"], base["parent"], base["version"], base["max_model_len"]) == (
        "tiny",
        None,
        None,
        128,
    )
    assert base["permission"][0]["object"] == "model_permission"
    gone = ask.unload("sql", lora_int_id=7)
    assert (gone.status_code, gone.text) == (
        200,
        "Success: LoRA adapter 'sql' removed successfully.",
    )
    assert error_of(ask.complete("sql"), 404)["message"] == "The model `sql` does not exist."
    error = error_of(ask.unload("sql"), 404)
    assert (error["message"], error["type"]) == (
        "The lora adapter 'sql' cannot be found.",
        "NotFoundError",
    )
    assert ask.load("sql", "two").headers["x-adapter-version"] == "3"
    assert ask.text("sql") == texts["two"]


def test_replies_say_which_version_answered(service):
    ask = Caller(service, "op")
    ask.load("sql", "zero")
    loaded = ask.load("sql", "one", load_inplace=True)
    prompt = {"model": "sql", "max_tokens": 2}
    chat = {**prompt, "messages": [{"role": "user", "content": TEXT}]}
    for path, body in {
        "completions": {**prompt, "prompt": TEXT},
        "chat/completions": chat,
        "responses": {"model": "sql", "max_output_tokens": 16, "input": TEXT},
        "embeddings": {"model": "sql", "input": TEXT},
    }.items():
        for more in ({}, {"stream": True}) if path != "embeddings" else ({},):
            reply = ask("POST", f"/v1/{path}", json={**body, **more})
            assert reply.status_code == 200, reply.text
            for name in ("x-adapter-version", "x-adapter-digest"):
                assert reply.headers[name] == loaded.headers[name]
            if "completions" in path:
                assert '"system_fingerprint":"sql@2"' in reply.text
    of_base = ask("POST", "/v1/completions", json={"model": "tiny", "prompt": TEXT})
    assert of_base.json()["system_fingerprint"] == "tiny"
    assert "x-adapter-version" not in of_base.headers


def test_a_version_that_somebody_else_replaced(service):
    ask = Caller(service, "op")
    assert ask.load("sql", "zero", expected_version=0).status_code == 200
    assert ask.load("sql", "one", expected_version=1).status_code == 200
    for version in (0, 1, 3):
        error = error_of(ask.load("sql", "two", expected_version=version), 409)
        assert error["code"] == "conflict"
        assert "there is sql@2" in error["message"]
    assert "@op" not in error["message"]


def test_what_cannot_be_loaded(service, root, texts):
    ask = Caller(service, "op")
    missing = "Both 'lora_name' and 'lora_path' must be provided."
    for body in (
        {},
        {"lora_name": "x"},
        {"lora_path": "zero"},
        {"lora_name": "", "lora_path": "zero"},
    ):
        error = error_of(ask("POST", "/v1/load_lora_adapter", json=body), 400)
        assert (error["message"], error["type"]) == (missing, "InvalidUserInput")
    for name in ("tiny", "..", "a/../b", "@op/x", " x", "a\\b", "x" * 300, "a\x00b"):
        assert error_of(ask.load(name, "zero"), 400)["type"] == "InvalidUserInput", name
    error = error_of(
        ask(
            "POST",
            "/v1/load_lora_adapter",
            json={"lora_name": "x", "lora_path": "zero", "nonsense": 1},
        ),
        400,
    )
    assert "nonsense" in error["message"]
    (root / "pickled").mkdir()
    shutil.copy(root / "zero" / "adapter_config.json", root / "pickled")
    (root / "pickled" / "adapter_model.bin").write_bytes(b"cos\nsystem\n(S'false'\ntR.")
    error = error_of(ask.load("x", "pickled"), 400)
    assert "pickle" in error["message"]
    assert str(root) not in error["message"]
    shutil.copytree(root / "zero", root / "cut")
    whole = (root / "cut" / WEIGHTS).read_bytes()
    (root / "cut" / WEIGHTS).write_bytes(whole[:-100])
    assert ask.load("good", "zero").status_code == 200
    error = error_of(ask.load("good", "cut", load_inplace=True), 400)
    assert str(root) not in error["message"]
    assert ask.text("good") == texts["zero"]
    for path in (
        "/v1/load_lora_adapter",
        "/v1/unload_lora_adapter",
        "/load_lora_adapter",
        "/unload_lora_adapter",
    ):
        for key in ("b", "a-infer"):
            assert Caller(service, key)("POST", path, json={}).status_code == 403


def test_paths_outside_the_roots_do_not_exist(service, root, saved):
    """Whether they are there or not: the replies say the same."""
    (root / "link").symlink_to(saved / "zero")
    (root / "inside").symlink_to(root / "zero")
    shutil.copytree(root / "zero", root / "part")
    (root / "part" / WEIGHTS).unlink()
    (root / "part" / WEIGHTS).symlink_to(saved / "zero" / WEIGHTS)
    ask = Caller(service, "op")
    outside = [
        saved / "zero",
        "/etc",
        "/nothing/there",
        "..",
        ".",
        "../root/../../etc",
        f"../{root.name}x",
        "none",
        "link",
        "part",
        "a\x00b",
        "x/" * 2000,
        "~",
        "http://example.com/adapter",
    ]
    for path in outside:
        error = error_of(ask.load("x", path), 404)
        assert error["message"].startswith("No adapter found for '"), path
        assert error["message"].endswith("not a folder of a saved adapter under --lora-roots.")
    for name in ("link", "part", "..", ".", "../root/zero", "root", "/etc", "zero/", "zero\x00"):
        assert Caller(service, "a").complete(name).status_code == 404, name
    assert ask.load("x", "inside").status_code == 200


def test_each_tenant_has_its_own(service, texts, root):
    """Names never meet nor show; the operator's are everyone's."""
    op, a, b = (Caller(service, key) for key in ("op", "a", "b-admin"))
    assert a.load("mine", "zero").status_code == 200
    assert b.models() == ["tiny"]
    assert error_of(b.complete("mine"), 404) == error_of(b.complete("none"), 404) | {
        "message": "The model `mine` does not exist."
    }
    assert b.unload("mine").status_code == 404
    assert b("GET", "/v1/models/mine").status_code == 404
    assert b("DELETE", "/v1/models/mine").status_code == 404
    for name in ("@team/mine", "@team%2Fmine"):
        assert b.complete(name).status_code == 404
    assert b.load("mine", "one").headers["x-adapter-version"] == "1"  # tells nothing of others
    assert (a.text("mine"), b.text("mine")) == (texts["zero"], texts["one"])
    assert Caller(service, "a-infer").text("mine") == texts["zero"]
    assert op.load("all", "two", shared=True).status_code == 200
    assert [one.models() for one in (op, a, b)] == [["tiny", "all"], *[["tiny", "all", "mine"]] * 2]
    assert b.text("all") == texts["two"]
    root_of = (
        a("GET", "/v1/models/all").json()["root"],
        Caller(service, "b")("GET", "/v1/models/all").json()["root"],
    )
    assert root_of == ("two", "all")  # paths are for administrators and owners
    assert op.load("given", "zero", owner="b").status_code == 200
    assert (b.text("given"), a.complete("given").status_code) == (texts["zero"], 404)
    assert error_of(op.load("x", "zero", owner="b", shared=True), 400)
    listing = b("POST", "/unload_lora_adapter", json={"lora_name": "none"}).json()
    assert listing["loaded_adapters"].keys() == {"all", "given", "mine"}


def test_deleted_by_its_owner(service):
    a, b = Caller(service, "a"), Caller(service, "b")
    for name in ("team/x", "ft:tiny:org::1"):
        assert a.load(name, "zero").status_code == 200
        assert a("GET", f"/v1/models/{name}").json()["id"] == name
        assert a.text(name)
        assert Caller(service, "a-infer")("DELETE", f"/v1/models/{name}").status_code == 403
        done = a("DELETE", f"/v1/models/{name}")
        assert done.json() == {"id": name, "object": "model", "deleted": True}
        assert a("GET", f"/v1/models/{name}").status_code == 404
    assert a.load("all", "zero", shared=True).status_code == 200
    assert error_of(b("DELETE", "/v1/models/all"), 403)["code"] == "insufficient_permissions"
    assert b("DELETE", "/v1/models/tiny").status_code == 403
    assert Caller(service, "op")("DELETE", "/v1/models/all").status_code == 200


def test_names_under_a_root_are_loaded_when_they_are_named(service, texts, root):
    """Once for all requests that wait; nobody needs to be an administrator."""
    loads = []
    make = service.client.executor.state.make_adapter

    def counted(name, *args, **options):
        loads.append(name)
        return make(name, *args, **options)

    service.client.executor.state.make_adapter = counted

    async def many():
        async with serving.client_of(service, serving.headers_of("a-infer")) as client:
            body = {"model": "one", "prompt": TEXT, "max_tokens": 2}
            asked = [client.post("/v1/completions", json=body) for _ in range(12)]
            return [reply.status_code for reply in await asyncio.gather(*asked)]

    assert asyncio.run(many()) == [200] * 12
    assert loads == ["one"]
    b = Caller(service, "b")
    assert b.text("one") == texts["one"]
    assert b.models() == ["tiny", "one"]
    (root / "broken").mkdir()
    shutil.copy(root / "zero" / "adapter_config.json", root / "broken")
    (root / "broken" / WEIGHTS).write_bytes(b"{}")
    for _ in range(3):
        error = error_of(b.complete("broken"), 400)
        assert str(root) not in error["message"]
    assert loads == ["one", "broken"]
    for name in ("none", "", "zero/x", "x" * 5000):
        assert b.complete(name).status_code == 404


def test_the_least_recently_used_gives_way(root, texts):
    """Those that are found again; what somebody loaded by name stays."""
    with make_service(root, max_cpu_loras=2) as service:
        op, b = Caller(service, "op"), Caller(service, "b")
        for name in ("zero", "one", "zero", "two", "one", "zero", "two"):
            assert b.text(name) == texts[name]
            assert len(service.client.executor.adapters) <= 2
        assert op.load("kept", "one", shared=True).status_code == 200
        for name in ("zero", "one", "two", "kept"):
            assert b.text(name) == texts["one" if name == "kept" else name]
        assert op.load("kept too", "two").status_code == 200
        error = error_of(op.load("third", "one"), 503)
        assert "--max-cpu-loras is 2" in error["message"]
        assert b.complete("zero").status_code == 503
        assert op.load("kept", "zero", load_inplace=True).status_code == 200

        async def storm():
            async with serving.client_of(service, serving.headers_of("b")) as client:
                names = ["zero", "one", "two", "kept"] * 6
                bodies = (
                    {"model": n, "prompt": TEXT, "max_tokens": 8, "temperature": 0} for n in names
                )
                return await asyncio.gather(
                    *(client.post("/v1/completions", json=body) for body in bodies)
                )

        assert op.unload("kept too").status_code == 200
        replies = asyncio.run(storm())
        right = {**texts, "kept": texts["zero"]}
        for reply in replies:
            assert reply.status_code == 200, reply.text
            found = reply.json()
            assert found["choices"][0]["text"] == right[found["model"]]
        assert len(service.client.executor.adapters) <= 2


def test_static_modules(root, texts):
    asked = [
        f"first={root / 'zero'}",
        json.dumps({"name": "second", "path": str(root / "one"), "base_model_name": "llama"}),
    ]
    with serving.service_of(serving.make_executor(adapters=0), KEYS, lora_modules=asked) as service:
        b, op = Caller(service, "b"), Caller(service, "op")
        assert b.models() == ["tiny", "first", "second"]
        assert (b.text("first"), b.text("second")) == (texts["zero"], texts["one"])
        assert b("GET", "/v1/models/second").json()["parent"] == "llama"
        assert op.load("again", root / "zero").status_code == 200
        for path in (root / "two", root, ".", "/a\x00b", "zero"):
            assert op.load("other", path).status_code == 404
        assert op.load("first", root / "one", load_inplace=True).status_code == 200
        assert b.text("first") == texts["one"]
        assert b.complete("zero").status_code == 404  # modules' folders are no roots


def test_chats_have_the_template_of_the_adapters_folder(root):
    """Unless the operator gives one; a template that does not compile is no adapter's."""
    (root / "one" / "chat_template.jinja").write_text("{{ messages[0].content }} the dog")
    (root / "two" / "chat_template.jinja").write_text("{{ messages")
    asked = [f"{name}={root / name}" for name in ("zero", "one")]
    messages = [{"role": "user", "content": "Hello"}]
    fixed = root / "fixed.jinja"
    fixed.write_text("{{ messages[0].content }}")
    for options in ({}, {"chat_template": fixed}):
        executor = serving.make_executor(adapters=0)
        with serving.service_of(executor, KEYS, lora_modules=asked, **options) as service:
            ask = Caller(service, "op")

            def tokens(model, ask=ask):
                body = {"model": model, "messages": messages}
                return ask("POST", "/tokenize", json=body).json()["tokens"]

            own = executor.tokenizer.encode("Hello the dog", add_special_tokens=False)
            assert (tokens("one") == own) == (not options)
            assert tokens("zero") == tokens("tiny") != own
            body = {"model": "one", "messages": messages, "max_tokens": 1}
            reply = ask("POST", "/v1/chat/completions", json=body).json()
            assert reply["usage"]["prompt_tokens"] == len(tokens("one"))
    with make_service(root) as service:
        refused = Caller(service, "op").load("x", root / "two")
        assert refused.status_code == 400
        assert "chat template" in refused.json()["error"]["message"]


def test_sglangs_endpoints(service, texts):
    ask = Caller(service, "op")
    load = lambda path: ask(  # noqa: E731
        "POST", "/load_lora_adapter", json={"lora_name": "x", "lora_path": path, "pinned": True}
    )
    done = load("zero")
    assert (done.status_code, done.json()) == (
        200,
        {"success": True, "error_message": "", "loaded_adapters": {"x": "zero"}},
    )
    assert ask.text("x") == texts["zero"]
    again = load("one")
    assert again.status_code == 400
    assert again.json()["success"] is False
    assert "has already been loaded" in again.json()["error_message"]
    gone = ask("POST", "/unload_lora_adapter", json={"lora_name": "x"})
    assert gone.json() == {"success": True, "error_message": "", "loaded_adapters": {}}
    assert ask("POST", "/unload_lora_adapter", json={"lora_name": "x"}).status_code == 400


def test_streams_that_are_open_end_on_their_version(root):
    """The tokens are the library's; a reply that begins after the load is the new one's, whole."""
    library = serving.make_executor(adapters=0)
    expected = []
    for name in ("zero", "one"):
        library.add_adapter(name, root / name)
        done = library.generate(TEXT * 10, name, max_new_tokens=60, ignore_eos=True)
        expected.append(list(done.token_ids))
    body = {
        "model": "sql",
        "prompt": TEXT * 10,
        "max_tokens": 60,
        "temperature": 0,
        "ignore_eos": True,
        "return_token_ids": True,
    }
    load = {"lora_name": "sql", "lora_path": "one", "load_inplace": True}
    with serving.on_a_port(
        lambda: serving.make_executor(adapters=0),
        lora_modules=(f"sql={root / 'zero'}",),
        lora_roots=(str(root),),
    ) as server:
        engine = server.service.client.engine.engine
        gate = StepGate(engine)
        gate.let()
        with server.client() as client, server.client() as other:
            with client.stream("POST", "/v1/completions", json={**body, "stream": True}) as reply:
                lines = (line for line in reply.iter_lines() if line.startswith("data: {"))
                events = [json.loads(next(lines).removeprefix("data: "))]
                assert other.post("/v1/load_lora_adapter", json=load).status_code == 200
                assert engine.scheduler.running
                gate.open()
                new = other.post("/v1/completions", json={**body, "max_tokens": 12}).json()
                events += [json.loads(line.removeprefix("data: ")) for line in lines]
            again = other.post("/v1/completions", json=body).json()
    tokens = [token for one in events for token in one["choices"][0]["token_ids"]]
    assert tokens == expected[0]
    assert {one["system_fingerprint"] for one in events} == {"sql@1"}
    assert new["choices"][0]["token_ids"] == expected[1][:12]
    assert again["choices"][0]["token_ids"] == expected[1]
    assert new["system_fingerprint"] == again["system_fingerprint"] == "sql@2"
    assert new["usage"]["prompt_tokens_details"]["cached_tokens"] == 0
    assert again["usage"]["prompt_tokens_details"]["cached_tokens"] > 0
