"""Keys: files of hashes, tenants, and what is refused."""

import hashlib
import json

import pytest

from pcg.errors import ServeError
from pcg.keys import VARIABLE, Keys, Scope, open_keys
from pcg.serve.engine.options import ServeOptions
from tests.support import serving

SHA = hashlib.sha256(b"secret-1").hexdigest()


@pytest.fixture(autouse=True)
def no_key_of_the_environment(monkeypatch):
    monkeypatch.delenv(VARIABLE, raising=False)


def written(tmp_path, content):
    path = tmp_path / "keys.json"
    path.write_text(json.dumps(content), encoding="utf-8")
    return path


def test_a_file_holds_hashes(tmp_path):
    ci = {"name": "ci", "sha256": SHA, "scopes": ["infer", "train"], "tenant": "research"}
    path = written(tmp_path, [ci, {"name": "b", "sha256": "00" * 32, "scopes": ["admin"]}])
    keys, made = open_keys((), path)
    assert made is None
    found = keys.find("secret-1")
    assert (found.name, found.tenant, found.scopes) == ("ci", "research", {"infer", "train"})
    assert keys.find("secret-2") is None
    assert (len(keys), keys.tenants) == (2, 2)
    both, _ = open_keys(("secret-22",), path)
    everything = both.find("secret-22")
    assert (everything.tenant, everything.scopes) == ("default", frozenset(Scope))


def test_without_keys_one_is_made(monkeypatch):
    keys, made = open_keys((), None)
    again, other = open_keys((), None)
    assert made is not None
    assert made != other
    assert keys.find(made) is not None
    assert again.find(made) is None
    monkeypatch.setenv(VARIABLE, "from-outside")
    keys, made = open_keys((), None)
    assert made is None
    assert keys.find("from-outside") is not None


@pytest.mark.parametrize(
    ("entry", "text"),
    [
        ({"sha256": SHA, "scopes": ["infer"]}, "name=None"),
        ({"name": "a", "sha256": "secret-1", "scopes": ["infer"]}, "64 hexadecimal"),
        ({"name": "a", "sha256": SHA, "scopes": []}, "scopes"),
        ({"name": "a", "sha256": SHA, "scopes": ["all"]}, "infer, train, admin"),
        ({"name": "a", "sha256": SHA, "scopes": "infer"}, "scopes"),
        ({"name": "a/b", "sha256": SHA, "scopes": ["infer"]}, "name"),
        ({"name": "a", "sha256": SHA, "scopes": ["infer"], "tenant": ""}, "tenant"),
        ({"name": "a", "sha256": SHA, "scopes": ["infer"], "key": "x"}, "sha256"),
        ("secret-1", "must be an object"),
    ],
)
def test_files_that_cannot_be(tmp_path, entry, text):
    with pytest.raises(ServeError, match=text):
        open_keys((), written(tmp_path, [entry]))


def test_keys_that_cannot_be(tmp_path):
    for content in ([], {}, "a"):
        with pytest.raises(ServeError, match="must be a list"):
            open_keys((), written(tmp_path, content))
    with pytest.raises(ServeError, match="cannot be read"):
        open_keys((), tmp_path / "none.json")
    for key in ("short", "with space", "ünïcödé-key"):
        with pytest.raises(ServeError, match="at least 8"):
            open_keys((key,), None)
    with pytest.raises(ServeError, match="two keys have the name 'a'"):
        Keys([serving.key("a"), serving.key("a")])
    entry = {"name": "ci", "sha256": SHA, "scopes": ["infer"]}
    with pytest.raises(ServeError, match="'ci' and 'cd' have the same value"):
        open_keys((), written(tmp_path, [entry, {**entry, "name": "cd"}]))


def test_a_tenant_cannot_take_all_that_runs():
    options = ServeOptions(max_num_seqs=9, max_queue=100)
    assert (options.queue_of(1), options.queue_of(2)) == (100, 25)
    assert ServeOptions(tenant_queue=7).queue_of(3) == 7
