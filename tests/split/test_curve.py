"""Connections are encrypted, each end knows the other, and who does not fit is told."""

import socket
import threading
from contextlib import contextmanager

import pytest

from pcg.errors import ServeError, SplitError
from pcg.serve.engine.options import ServeOptions
from pcg.split.base.options import BaseOptions
from pcg.split.client.connect import connect
from pcg.split.client.noise import Privacy
from pcg.split.curve import BaseCurve, ClientCurve
from tests.support.split_base import KEY, listening_base

zmq = pytest.importorskip("zmq")
auth = pytest.importorskip("zmq.auth")


@pytest.fixture
def folder(tmp_path):
    """Certificates of a base, and of a client that the base knows."""
    (tmp_path / "known").mkdir()
    auth.create_certificates(tmp_path, "base")
    auth.create_certificates(tmp_path / "known", "alice")
    for path in tmp_path.rglob("*.key_secret"):
        path.chmod(0o600)
    return tmp_path


@contextmanager
def tapped(where):
    """A wire to an address that keeps what is sent to it."""
    host, _, port = where.rpartition(":")
    heard = bytearray()
    listening = socket.create_server(("127.0.0.1", 0))
    ends = []

    def pump(one, other, keeps):
        try:
            while data := one.recv(2**16):
                if keeps:
                    heard.extend(data)
                other.sendall(data)
            other.shutdown(socket.SHUT_WR)
        except OSError:  # the other end has gone
            pass

    def accept():
        try:
            client, _ = listening.accept()
        except OSError:  # closed
            return
        base = socket.create_connection((host, int(port)))
        ends.extend((client, base))
        pumps = [
            threading.Thread(target=pump, args=args)
            for args in ((client, base, True), (base, client, False))
        ]
        for thread in pumps:
            thread.start()
        for thread in pumps:
            thread.join()

    thread = threading.Thread(target=accept)
    thread.start()
    try:
        yield f"127.0.0.1:{listening.getsockname()[1]}", heard
    finally:
        listening.close()
        for end in ends:
            end.close()
        thread.join(60)


def test_what_crosses_the_wire_is_encrypted(whole, folder):
    expected = whole.generate([[5, 6, 7]], max_new_tokens=3, temperature=0)[0].token_ids
    heard = {}
    for name, at_base, at_client in (
        ("clear", {}, {}),
        ("curve", {"curve_key": folder / "base.key_secret"}, {"curve_server": folder / "base.key"}),
    ):
        with (
            listening_base(whole, **at_base) as where,
            tapped(where) as (through, heard[name]),
            connect(through, api_key=KEY, transport="tcp", **at_client) as split,
        ):
            found = split.generate([[5, 6, 7]], max_new_tokens=3, temperature=0)[0]
            assert found.token_ids == expected
    for text in (KEY.encode(), b"q_proj", b"float32"):
        assert text in heard["clear"]
        assert text not in heard["curve"]
    assert len(heard["curve"]) > len(heard["clear"])


def test_a_base_may_know_its_clients(whole, folder, caplog):
    at_base = {"curve_key": folder / "base.key_secret", "curve_clients": folder / "known"}
    server = (folder / "base.key").read_text().partition('public-key = "')[2][:40]
    with listening_base(whole, **at_base) as where:
        own = folder / "known" / "alice.key_secret"
        options = {"api_key": KEY, "curve_server": server}
        with connect(where, curve_key=own, **options) as split:
            assert split.generate([[5, 6]], max_new_tokens=1)
        with pytest.raises(SplitError, match="does not know this client's CURVE key"):
            connect(where, **options)
        assert "a CURVE key that is not known" in caplog.text
        with pytest.raises(SplitError, match="the key is none of this base's"):
            connect(where, curve_key=own, **{**options, "api_key": "another-key"})
        assert "a client at alice has a wrong key" in caplog.text


def test_ends_that_do_not_fit_are_told(whole, folder):
    auth.create_certificates(folder, "another")
    with listening_base(whole, curve_key=folder / "base.key_secret") as where:
        with pytest.raises(SplitError, match="is another than the one given"):
            connect(where, api_key=KEY, curve_server=folder / "another.key")
        with pytest.raises(SplitError, match="it is encrypted by CURVE; give"):
            connect(where, api_key=KEY)
    with listening_base(whole) as where, pytest.raises(SplitError, match="was started without"):
        connect(where, api_key=KEY, curve_server=folder / "base.key")


def test_nothing_goes_to_other_machines_in_clear(folder):
    for host in ("0.0.0.0", "::", "10.1.2.3", "base.example", "127.0.0.1.example", "127.0.0"):
        with pytest.raises(SplitError, match="--curve-key, or --plaintext"):
            BaseOptions(host=host)
        assert BaseOptions(host=host, plaintext=True).curve is None
        with pytest.raises(SplitError, match=r"give its CURVE key by curve_server=…, or plaintext"):
            connect(f"{host}:8300", api_key=KEY)
    for host in ("127.0.0.1", "127.1.2.3", "localhost", "::1"):
        assert BaseOptions(host=host).curve is None
    with pytest.raises(SplitError, match="CURVE key of 127"):
        connect("127.0.0.1:8300", curve_key=folder / "known" / "alice.key_secret")
    assert ServeOptions(split_port=1, split_plaintext=True).split_plaintext
    with pytest.raises(ServeError, match="give split_port, too"):
        ServeOptions(split_curve_key=folder / "base.key_secret")
    assert Privacy("10.1.2.3:1", effects_curve_server="k" * 40).effects_curve_server


def test_certificates_that_are_none_are_refused(folder):
    secret, public = folder / "base.key_secret", folder / "base.key"
    with pytest.raises(SplitError, match="has no secret key"):
        BaseCurve.read(public, None)
    with pytest.raises(SplitError, match="is no certificate"):
        BaseCurve.read(folder / "nothing", None)
    with pytest.raises(SplitError, match="no folder"):
        BaseCurve.read(secret, public)
    (folder / "empty").mkdir()
    with pytest.raises(SplitError, match="has no certificate"):
        BaseCurve.read(secret, folder / "empty")
    with pytest.raises(SplitError, match="curve_clients is for encrypted"):
        BaseOptions(curve_clients=folder / "known")
    other = (folder / "known" / "alice.key").read_text().partition('public-key = "')[2][:40]
    own = public.read_text().partition('public-key = "')[2][:40]
    (folder / "mixed").write_text(secret.read_text().replace(own, other))
    (folder / "mixed").chmod(0o600)
    with pytest.raises(SplitError, match="not its secret key's"):
        BaseCurve.read(folder / "mixed", None)
    secret.chmod(0o644)
    with pytest.raises(SplitError, match="others may read"):
        BaseCurve.read(secret, None)
    for wrong in ("x" * 40 + "y", " " * 40, folder / "nothing"):
        with pytest.raises(SplitError, match=r"40 characters|no certificate"):
            ClientCurve.read(wrong, None)
