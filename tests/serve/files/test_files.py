"""Files by the real openai client: kept, listed, read, deleted, and bounded for each tenant."""

import hashlib

import httpx2
import openai
import pytest

from pcg.serve.files.files import Files
from tests.support import serving

LINES = b'{"prompt": "a", "completion": "b"}\n'


@pytest.fixture(scope="module")
def server(tmp_path_factory):
    folder = tmp_path_factory.mktemp("served")
    both, reader = {"scopes": ["infer", "train"]}, {"scopes": ["infer"], "tenant": "one"}
    keys = serving.keys_file(folder, one=both, other=both, reader=reader)
    bounds = {"max_file_mib": 2.0, "tenant_files": 8, "tenant_files_gib": 5 / 1024}
    own = {"data_dir": folder / "data", "api_keys": keys, "max_body_mib": 0.125}
    with serving.on_a_port(**own, **bounds) as server:
        yield server


def client_of(server, key):
    return openai.OpenAI(base_url=f"{server.url}/v1", api_key=f"key-of-{key}", max_retries=0)


@pytest.fixture
def client(server):
    with client_of(server, "one") as client:
        yield client
        for file in list(client.files.list()):
            client.files.delete(file.id)


def contents(server):
    """How many contents there are on the disk."""
    folder = server.service.part(Files).store.folder
    assert not list((folder / "incoming").iterdir())
    return sum(1 for _ in (folder / "files").glob("*/*"))


def test_a_file_and_its_life(server, client):
    content = LINES * 20_000  # beyond what other bodies may have
    made = client.files.create(file=("train.jsonl", content), purpose="fine-tune")
    assert (made.bytes, made.filename, made.purpose) == (len(content), "train.jsonl", "fine-tune")
    assert made.id.startswith("file-")
    assert made.expires_at is None
    assert client.files.wait_for_processing(made.id).status == "processed"
    assert client.files.retrieve(made.id) == made
    assert client.files.content(made.id).content == content
    assert client.files.delete(made.id).deleted
    with pytest.raises(openai.NotFoundError, match="No such File object"):
        client.files.retrieve(made.id)
    with pytest.raises(openai.NotFoundError):
        client.files.content(made.id)
    assert contents(server) == 0


def test_lists_and_their_pages(client):
    made = [
        client.files.create(file=(f"{n}.txt", b"x"), purpose="evals" if n == 2 else "user_data").id
        for n in range(5)
    ]
    assert [one.id for one in client.files.list()] == made[::-1]
    assert [one.id for one in client.files.list(order="asc", limit=2)] == made
    page = client.files.list(limit=2, order="asc", after=made[0])
    assert ([one.id for one in page.data], page.has_more) == (made[1:3], True)
    assert [one.id for one in client.files.list(purpose="evals")] == [made[2]]
    for one in client.files.list(limit=1):  # pages go on behind what was deleted
        client.files.delete(one.id)
    assert not list(client.files.list())


def test_what_another_tenant_keeps_is_not_there(server, client):
    made = client.files.create(file=("a.jsonl", LINES), purpose="fine-tune")
    with client_of(server, "other") as other:
        assert not list(other.files.list())
        for ask in (other.files.retrieve, other.files.content, other.files.delete):
            with pytest.raises(openai.NotFoundError):
                ask(made.id)
        same = other.files.create(file=("a.jsonl", LINES), purpose="fine-tune")
        other.files.delete(same.id)
    assert client.files.content(made.id).content == LINES  # though the content was the same one
    with client_of(server, "reader") as reader:
        for ask in (reader.files.retrieve, reader.files.content, reader.files.delete):
            with pytest.raises(openai.PermissionDeniedError, match="lacks the scope 'train'"):
                ask(made.id)


def test_bounds(server, client):
    with pytest.raises(openai.APIStatusError, match="more than 2097152 bytes") as large:
        client.files.create(file=("a", b"x" * 2**21 + b"x"), purpose="user_data")
    assert (large.value.status_code, large.value.code) == (413, "file_too_large")
    for n in range(2):
        client.files.create(file=(f"{n}", bytes([n]) * 2**21), purpose="user_data")
    with pytest.raises(openai.RateLimitError, match="too many bytes") as bytes_:
        client.files.create(file=("2", b"z" * 2**21), purpose="user_data")
    assert bytes_.value.code == "insufficient_quota"
    assert bytes_.value.response.headers["x-should-retry"] == "false"
    for n in range(6):
        client.files.create(file=(f"{n}", b"x"), purpose="user_data")
    with pytest.raises(openai.RateLimitError, match="too many files, at most 8"):
        client.files.create(file=("9", b"x"), purpose="user_data")
    assert contents(server) == 3


def test_a_life_that_ends(server, client, monkeypatch):
    made = client.files.create(
        file=("a", b"x"), purpose="batch", expires_after={"anchor": "created_at", "seconds": 3600}
    )
    assert made.expires_at == made.created_at + 3600
    later = made.created_at + 3600
    monkeypatch.setattr("pcg.serve.files.files.now", lambda: later)
    with pytest.raises(openai.NotFoundError):
        client.files.retrieve(made.id)
    assert not list(client.files.list())
    assert contents(server) == 1
    client.files.create(file=("b", b"y"), purpose="batch")
    assert contents(server) == 1  # that of b


@pytest.mark.parametrize(
    ("fields", "said"),
    [
        ({}, "Missing required parameter: 'purpose'"),
        ({"purpose": "holiday"}, "'holiday' is not one of"),
        ({"purpose": "batch", "colour": "red"}, "Unrecognized request argument supplied: colour"),
        ({"purpose": "batch", "expires_after[anchor]": "created_at"}, "must be an integer"),
        ({"purpose": "batch", "expires_after[seconds]": "3600"}, "must be 'created_at'"),
        (
            {
                "purpose": "batch",
                "expires_after[anchor]": "created_at",
                "expires_after[seconds]": "1",
            },
            "must be 3600 to 2592000",
        ),
        ({"purpose": "x" * 5000}, "more than 4096 bytes"),
    ],
)
def test_forms_that_cannot_be(server, client, fields, said):
    with server.client(serving.headers_of("one")) as plain:
        reply = plain.post("/v1/files", data=fields, files={"file": ("a", b"x")})
    assert reply.status_code == 400
    assert said in reply.json()["error"]["message"]
    assert contents(server) == 0


FORM = b'--b\r\ncontent-disposition: form-data; name="file"; filename="a"\r\n\r\nx'


@pytest.mark.parametrize(
    ("body", "kind", "said"),
    [
        (b"{}", "application/json", "multipart/form-data"),
        (b"", "multipart/form-data; boundary=b", "ends before its last boundary"),
        (FORM, "multipart/form-data; boundary=b", "ends before its last boundary"),
        (FORM + b"\r\n" + FORM + b"\r\n--b--", "multipart/form-data; boundary=b", "two parts"),
        (b"--other\r\n\r\n", "multipart/form-data; boundary=b", "cannot be read"),
        (FORM + b"\r\n--b--" + b"E" * 2**21, "multipart/form-data; boundary=b", "after its end"),
        (b"--b\r\n\r\nx\r\n--b--", "multipart/form-data; boundary=b", "supplied: "),
        (b"x", "multipart/form-data; boundary=" + "b" * 5000, "cannot be read"),
    ],
)
def test_bodies_that_are_no_forms(server, client, body, kind, said):
    sent = {**serving.headers_of("one"), "content-type": kind}
    reply = httpx2.post(f"{server.url}/v1/files", headers=sent, content=body)
    assert reply.status_code == 400
    assert said in reply.json()["error"]["message"]
    assert contents(server) == 0


def test_parameters_of_lists_that_cannot_be(server):
    with server.client(serving.headers_of("one")) as plain:
        for query in ("limit=0", "limit=10001", "order=up"):
            reply = plain.get(f"/v1/files?{query}")
            assert reply.status_code == 400
            assert reply.json()["error"]["param"] == query.partition("=")[0]


def test_uploads(server, client):
    content = LINES * 20_000
    begun = client.uploads.create(
        bytes=len(content), filename="u.jsonl", mime_type="text/jsonl", purpose="fine-tune"
    )
    assert (begun.status, begun.file) == ("pending", None)
    halves = [content[400_000:], content[:400_000]]
    parts = [client.uploads.parts.create(begun.id, data=half).id for half in halves]
    again = client.uploads.parts.create(begun.id, data=halves[0]).id  # its answer was lost
    with pytest.raises(openai.BadRequestError, match="The parts have 1000000 bytes"):
        client.uploads.complete(begun.id, part_ids=[*parts, again])
    with pytest.raises(openai.BadRequestError, match="The MD5 of the parts is"):
        client.uploads.complete(begun.id, part_ids=parts[::-1], md5="0" * 32)
    with pytest.raises(openai.BadRequestError, match="the upload 700000"):
        client.uploads.complete(begun.id, part_ids=parts[:1])
    with pytest.raises(openai.BadRequestError, match="no part part_x"):
        client.uploads.complete(begun.id, part_ids=["part_x"])
    with pytest.raises(openai.BadRequestError, match="twice"):
        client.uploads.complete(begun.id, part_ids=parts[:1] * 2)
    with pytest.raises(openai.BadRequestError, match="4 parts have 700001 bytes"):
        client.uploads.parts.create(begun.id, data=b"x")
    with client_of(server, "other") as other, pytest.raises(openai.NotFoundError):
        other.uploads.complete(begun.id, part_ids=parts[::-1])
    done = client.uploads.complete(
        begun.id, part_ids=parts[::-1], md5=hashlib.md5(content, usedforsecurity=False).hexdigest()
    )
    assert done.status == "completed"
    assert client.files.content(done.file.id).content == content
    assert contents(server) == 1
    with pytest.raises(openai.BadRequestError, match="is completed, not pending"):
        client.uploads.cancel(begun.id)


def test_uploads_that_end_otherwise(server, client, monkeypatch):
    fields = {"filename": "u", "mime_type": "text/plain", "purpose": "user_data"}
    with pytest.raises(openai.APIStatusError, match="at most 2097152"):
        client.uploads.create(bytes=2**21 + 1, **fields)
    begun = [client.uploads.create(bytes=2**21, **fields) for _ in range(2)]
    with pytest.raises(openai.RateLimitError, match="too many bytes"):  # their room is promised
        client.uploads.create(bytes=2**21, **fields)
    for one in begun:
        client.uploads.parts.create(one.id, data=one.id.encode())
    # 5 MiB are all that the tenant may keep: a part has the room that its upload was promised.
    rest = client.uploads.create(bytes=2**20, **fields)
    client.uploads.parts.create(rest.id, data=b"r" * 2**20)
    client.uploads.cancel(rest.id)
    assert contents(server) == 2
    assert client.uploads.cancel(begun[0].id).status == "cancelled"
    assert contents(server) == 1
    late = begun[1].expires_at
    for place in ("files.now", "routes.now"):
        monkeypatch.setattr(f"pcg.serve.files.{place}", lambda: late)
    with pytest.raises(openai.BadRequestError, match="is expired, not pending"):
        client.uploads.parts.create(begun[1].id, data=b"x")
    client.files.create(file=("a", b"x"), purpose="user_data")
    assert contents(server) == 1


def test_chunked_uploads_of_the_client(server, client, tmp_path):
    (tmp_path / "data.jsonl").write_bytes(LINES * 9)
    made = client.uploads.upload_file_chunked(
        file=tmp_path / "data.jsonl", mime_type="text/jsonl", purpose="fine-tune", part_size=100
    )
    assert client.files.content(made.file.id).content == LINES * 9


def test_a_server_that_keeps_nothing_says_so():
    with serving.service_of() as service:
        reply = serving.ask(service, "GET", "/v1/files")
    assert reply.status_code == 400
    assert "--data-dir" in reply.json()["error"]["message"]


def test_files_are_there_after_a_start(tmp_path):
    with serving.on_a_port(data_dir=tmp_path) as server, server.client() as plain:
        form = {"data": {"purpose": "fine-tune"}, "files": {"file": ("a.jsonl", LINES)}}
        made = plain.post("/v1/files", **form).json()
    with serving.on_a_port(data_dir=tmp_path) as server, server.client() as plain:
        assert plain.get("/v1/files").json()["data"] == [made]
        assert plain.get(f"/v1/files/{made['id']}/content").content == LINES


def test_few_uploads_that_are_over_are_told_of(server, client, monkeypatch):
    """Who begins and cancels uploads for ever fills no database."""
    monkeypatch.setattr("pcg.serve.files.files.MOST_OVER", 2)
    made = [
        client.uploads.create(bytes=9, filename="a", mime_type="b", purpose="fine-tune").id
        for _ in range(4)
    ]
    for id in made[:3]:
        client.uploads.cancel(id)
    last = client.uploads.create(bytes=9, filename="a", mime_type="b", purpose="fine-tune")
    query = "SELECT id FROM uploads WHERE tenant = 'one' AND status != 'pending'"
    read = server.service.part(Files).store.database.read
    assert [id for (id,) in read(lambda one: one.execute(query).fetchall()).result()] == made[1:3]
    for id in (made[3], last.id):
        assert client.uploads.cancel(id).status == "cancelled"
