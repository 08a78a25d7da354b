"""What crosses between the server and its engine's process: bytes, numbers, errors and names."""

from __future__ import annotations

import asyncio
import gc
import os
import socket
from collections.abc import Iterator
from concurrent.futures import Future
from pathlib import Path
from types import SimpleNamespace
from typing import ClassVar

import pytest
import torch

import pcg.errors
from pcg.errors import AdapterConflictError, FinetuneInterrupted, GenerationError
from pcg.runtime.adapters.versions import AdapterVersion, VersionName
from pcg.runtime.admission.limits import Limits
from pcg.runtime.engine.async_engine import AsyncEngine
from pcg.runtime.engine.commands import Command, Numbers, settled
from pcg.runtime.metrics.status import EngineNumbers, JobStatus
from pcg.runtime.text.tokenizer import Tokenizer
from pcg.serve.engine.channel import Channel
from pcg.serve.engine.messages import (
    AdapterData,
    decoder,
    encode,
    error_of,
    fault_of,
)
from pcg.serve.engine.process import RemoteAdapters
from pcg.serve.metrics.engine_metrics import EngineMetrics
from pcg.serve.metrics.families import Served
from tests.support import serving
from tests.support.prompts import prompts
from tests.support.small_engine import DATA, LORA, OPTIONS, make_engine, make_executor


@pytest.fixture
def ends() -> Iterator[tuple[Channel, Channel]]:
    ours, theirs = map(Channel, socket.socketpair())
    yield ours, theirs
    ours.close()


def test_what_the_socket_does_not_take_comes_later_and_in_order(
    ends: tuple[Channel, Channel],
) -> None:
    ours, theirs = ends
    sent = [bytes([index]) * 300_000 for index in range(40)]
    ours.send(*sent[:20])  # nobody reads yet, and this does not wait
    for message in sent[20:]:
        ours.send(message)
    found: list[bytes] = []
    while len(found) < len(sent):
        some = theirs.read(waits=True)
        assert some is not None
        found += some
    assert found == sent
    assert theirs.read(waits=False) == []
    theirs.close()
    assert ours.read(waits=True) is None
    ours.send(b"nobody hears it")


def page_of(numbers: EngineNumbers, jobs: list[JobStatus]) -> list[str]:
    """The page of such numbers, but for what tells of this process and of the time."""

    class Client:
        adapters: ClassVar = {"a": None}
        facts = SimpleNamespace(pid=os.getpid())

        def call(self, command: Command) -> Future:
            return settled(lambda: numbers if isinstance(command, Numbers) else jobs)

    page = asyncio.run(EngineMetrics(Client(), Served("tiny", 128, 8)).page()).decode()  # type: ignore[arg-type]
    lines = page.splitlines()
    own = [line for line in lines if line.startswith(("vllm:", "pcg:"))]
    return [line for line in own if not line.startswith("vllm:lora_requests_info")]


def serve_some(engine: AsyncEngine) -> None:
    job = engine.finetune(DATA, "mine", peft=LORA, **OPTIONS)
    for ids in prompts((9, 21)):
        engine.submit(ids, "a", n=2, max_new_tokens=6, ignore_eos=True, ttft_slo_s=60.0).wait(60)
    job.wait(60)


def test_a_page_of_metrics_is_that_of_the_engine_itself() -> None:
    with make_engine(make_executor(), 64, Limits(tpot_slo_s=30.0)).start() as engine:
        serve_some(engine)
        numbers, jobs = engine.numbers(), engine.jobs()
        crossed = (
            decoder(EngineNumbers)(encode(numbers)),
            decoder(list[JobStatus])(encode(jobs)),
        )
        expected = page_of(numbers, jobs)
    assert crossed[1] == jobs
    assert crossed[0].jobs == numbers.jobs
    assert any('adapter="a"' in line for line in expected)
    assert page_of(*crossed) == expected


def test_errors_keep_their_class_and_text() -> None:
    for error in (AdapterConflictError("two"), GenerationError("n=0; use 1")):
        again = error_of(decoder(type(fault_of(error)))(encode(fault_of(error))))
        assert (type(again), str(again)) == (type(error), str(error))
    interrupted = error_of(fault_of(FinetuneInterrupted("go on", 3)))
    assert type(interrupted) is pcg.errors.FinetuneError
    out_of_memory = error_of(
        fault_of(torch.OutOfMemoryError("none left"))
    )  # not pcg's, of a request
    assert not isinstance(out_of_memory, pcg.errors.PcgError)
    assert str(out_of_memory) == "OutOfMemoryError: none left"


def test_a_version_is_released_once_nothing_names_it() -> None:
    remote = RemoteAdapters()
    first, second = (AdapterData(AdapterVersion("a", number), 8, 0) for number in (1, 2))
    remote.put(first)
    running = remote.here["a"]
    remote.put(second)
    assert remote.known(first) is running
    gc.collect()
    assert not remote.take_released()
    del running
    assert remote.take_released() == [VersionName("a", 1)]
    remote.remove("a")
    assert remote.take_released() == [VersionName("a", 2)]


def test_a_tokenizer_that_crossed_is_the_same() -> None:
    tokenizer = Tokenizer.load(serving.model_directory())
    again = decoder(Tokenizer)(encode(tokenizer))
    text = "Ein schöner Tag für Äpfel 😀 <|im_end|>"
    for special in (True, False):
        assert again.encode(text, special) == tokenizer.encode(text, special)
    chat = [{"role": "user", "content": "what is it?"}]
    assert again.template().render(chat) == tokenizer.template().render(chat)
    ids = tokenizer.encode(text)
    assert again.decode(ids) == tokenizer.decode(ids)
    named = ("bos_id", "eos_id", "eos_ids", "pad_id", "special_tokens")
    assert [getattr(again, name) for name in named] == [getattr(tokenizer, n) for n in named]


def test_paths_of_jobs_cross() -> None:
    assert decoder(Path)(encode(Path("a") / "b")) == Path("a/b")
