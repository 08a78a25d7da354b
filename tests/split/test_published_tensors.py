"""Tensors that a base publishes: clients map them, and nobody can write them."""

from __future__ import annotations

import mmap
import os
import threading
from pathlib import Path

import pytest
import torch

import pcg
import pcg.compiler as compiler
from pcg.errors import SplitError
from pcg.split.base.base_executor import BaseExecutor
from pcg.split.base.base_loop import BaseLoop
from pcg.split.base.options import BaseOptions
from pcg.split.shared_memory import PublishedTensors, SharedMemory, published_tensor
from pcg.split.zeromq import ZeroMqEndpoint
from tests.support import oracle
from tests.support.families import BY_NAME
from tests.support.split_base import KEY

pytestmark = pytest.mark.skipif(not hasattr(os, "memfd_create"), reason="needs Linux")
GIVEN = {
    "small": torch.arange(7, dtype=torch.float64),
    "large": torch.arange(3 * 4000, dtype=torch.bfloat16).view(3, 4000),
    "last": torch.randn(5, 2),
}


def test_a_published_tensor_is_mapped_and_what_a_client_writes_is_its_own() -> None:
    published = PublishedTensors(GIVEN)
    for name, tensor in GIVEN.items():
        place = published.place(published.tensors[name])
        found = published_tensor(place, tensor.dtype, tuple(tensor.shape))
        assert torch.equal(found, tensor)
        found.zero_()
        assert torch.equal(published.tensors[name], tensor)
        assert torch.equal(published_tensor(place, tensor.dtype, tuple(tensor.shape)), tensor)
    assert published.place(torch.ones(3)) is None
    published.close()


def test_nobody_can_write_what_was_published() -> None:
    published = PublishedTensors(GIVEN)
    place = published.place(published.tensors["last"])
    assert place is not None
    descriptor = os.open(f"/proc/self/fd/{place['descriptor']}", os.O_RDWR)
    with pytest.raises(PermissionError):
        mmap.mmap(descriptor, place["bytes"])
    for change in (lambda: os.write(descriptor, b"0"), lambda: os.ftruncate(descriptor, 0)):
        with pytest.raises(PermissionError):
            change()
    os.close(descriptor)
    published.close()


@pytest.mark.parametrize(
    ("change", "message"),
    [
        ({"at": 2**30}, "is not in memory"),
        ({"at": 3}, "is not in memory"),
        ({"at": -64}, "is no place"),
        ({"at": True}, "is no place"),
        ({"process": "../1"}, "is no place"),
        ({"bytes": 4096 * 1000}, "bytes, not"),
        ({"descriptor": 10**6}, "cannot be mapped"),
    ],
)
def test_an_impossible_place_is_refused(change: dict[str, object], message: str) -> None:
    published = PublishedTensors(GIVEN)
    place = {**(published.place(published.tensors["last"]) or {}), **change}
    with pytest.raises(SplitError, match=message):
        published_tensor(place, torch.float32, (5, 2))
    published.close()


@pytest.mark.parametrize("kind", ["file", "unsealed"])
def test_no_file_of_the_users_is_opened_for_a_base(tmp_path: Path, kind: str) -> None:
    secret = tmp_path / "secret"
    secret.write_bytes(bytes(mmap.PAGESIZE))
    if kind == "file":
        descriptor = os.open(secret, os.O_RDWR)
    else:
        descriptor = os.memfd_create("pcg-base")
        os.ftruncate(descriptor, mmap.PAGESIZE)
    place = {"process": os.getpid(), "descriptor": descriptor, "bytes": mmap.PAGESIZE, "at": 0}
    try:
        with pytest.raises(SplitError, match="cannot be mapped"):
            published_tensor(place, torch.float32, (5, 2))
        with pytest.raises(OSError, match="no memory of a base"):
            SharedMemory.attach(os.getpid(), descriptor, mmap.PAGESIZE)
    finally:
        os.close(descriptor)
    assert secret.read_bytes() == bytes(mmap.PAGESIZE)


@pytest.mark.parametrize("transport", ["shared-memory", "tcp"])
def test_clients_share_a_bases_embedding_by_memory_alone(
    transport: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    model = oracle.random_model(BY_NAME["llama3"].config(1))
    expected = compiler.compile(model, verify=False).logits([5, 6, 7])
    monkeypatch.setattr("pcg.split.base.base_executor.LEAST_BYTES", 2048)
    endpoint = ZeroMqEndpoint("127.0.0.1", 0, 2**24)
    base = BaseExecutor(compiler.compile(model, verify=False, packed_weights=False))
    loop = BaseLoop(base, endpoint, BaseOptions(api_key=(KEY,)))
    thread = threading.Thread(target=loop.run)
    thread.start()
    try:
        with pcg.connect(endpoint.where, api_key=KEY, transport=transport) as split:
            assert oracle.relative_error(split.logits([5, 6, 7]), expected) < 1e-5
            mapped = Path("/proc/self/maps").read_text().count("memfd:pcg-base")
            assert mapped == (2 if transport == "shared-memory" else 1)  # one is the base's
    finally:
        loop.stop()
        thread.join(60)
        endpoint.close()
