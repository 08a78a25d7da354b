"""What crosses between the server and its engine's process: bytes, errors, names and reports."""

from __future__ import annotations

import asyncio
import gc
import os
import socket
import threading
from threading import Event
from types import SimpleNamespace
from typing import ClassVar

import msgspec
import pytest
import torch

import pcg.errors
from pcg.errors import AdapterConflictError, FinetuneInterrupted, GenerationError
from pcg.runtime.adapters.versions import AdapterVersion, VersionName
from pcg.runtime.admission.limits import Limits
from pcg.runtime.engine.commands import Numbers, settled
from pcg.runtime.metrics.status import EngineNumbers, JobStatus
from pcg.runtime.text.tokenizer import Tokenizer
from pcg.serve.engine.channel import Channel
from pcg.serve.engine.messages import (
    AdapterData,
    Report,
    ToEngine,
    ToServer,
    Watch,
    decoder,
    encode,
    error_of,
    fault_of,
    plain,
    plain_state,
)
from pcg.serve.engine.process import RemoteAdapters
from pcg.serve.engine.reports import Reports, WatchedNumbers
from pcg.serve.metrics.engine_metrics import EngineMetrics
from pcg.serve.metrics.families import Served
from tests.support import serving
from tests.support.prompts import prompts
from tests.support.small_engine import DATA, LORA, OPTIONS, make_engine, make_executor
from tests.support.waiting import until


@pytest.fixture
def ends():
    ours, theirs = map(Channel, socket.socketpair())
    yield ours, theirs
    ours.close()


def page_of(numbers, jobs):
    """The page of such numbers, but for what tells of this process and of the time."""

    class Client:
        adapters: ClassVar = {"a": None}
        facts = SimpleNamespace(pid=os.getpid())

        def call(self, command):
            return settled(lambda: numbers if isinstance(command, Numbers) else jobs)

    page = asyncio.run(EngineMetrics(Client(), Served("tiny", 128, 8)).page()).decode()
    lines = page.splitlines()
    own = [line for line in lines if line.startswith(("vllm:", "pcg:"))]
    return [line for line in own if not line.startswith("vllm:lora_requests_info")]


def serve_some(engine):
    job = engine.finetune(DATA, "mine", peft=LORA, **OPTIONS)
    for ids in prompts((9, 21)):
        engine.submit(ids, "a", n=2, max_new_tokens=6, ignore_eos=True, ttft_slo_s=60.0).wait(60)
    job.wait(60)


def test_a_page_of_metrics_is_that_of_the_engine_itself():
    with make_engine(make_executor(), 64, Limits(tpot_slo_s=30.0)).start() as engine:
        serve_some(engine)
        numbers, jobs = engine.numbers(), engine.jobs()
        crossed = (decoder(EngineNumbers)(encode(numbers)), decoder(list[JobStatus])(encode(jobs)))
        expected = page_of(numbers, jobs)
    assert crossed[1] == jobs
    assert crossed[0].jobs == numbers.jobs
    assert any('adapter="a"' in line for line in expected)
    assert page_of(*crossed) == expected


def test_errors_keep_their_class_and_text():
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


def test_a_version_is_released_once_nothing_names_it():
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


def test_a_tokenizer_that_crossed_is_the_same():
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


MIB = 2**20


@pytest.mark.parametrize("is_blocking", [True, False])
def test_more_than_the_socket_holds_comes_whole(is_blocking):
    """An event loop of libuv makes the sockets that it watches ones that never wait."""
    ends = socket.socketpair()
    ours, theirs = map(Channel, ends)
    os.set_blocking(ours.fileno(), is_blocking)
    sent = [bytes([index]) * (size * MIB) for index, size in enumerate((16, 1, 8))]
    for one in sent:
        ours.send(one)  # nobody reads yet
    found = []

    def read():
        while len(found) < len(sent):
            found.extend(theirs.read(waits=True) or ())

    reader = threading.Thread(target=read, daemon=True)
    reader.start()
    reader.join(60)
    assert [len(one) for one in found] == [len(one) for one in sent]
    assert found == sent
    ours.send(b"later")
    assert theirs.read(waits=True) == [b"later"]
    theirs.close()
    ours.send(b"x" * 4 * MIB)  # to one that is gone
    ours.close()


class Crossing:
    """An engine's reports on their way to who watches them, without processes between.

    Attributes:
        asked: messages to the engine.
        came: reports to the server; some come with the next one that is sent by itself.
    """

    def __init__(self, engine):
        self.asked = []
        self.came = []
        self._held = []
        self.watched = WatchedNumbers(self._post)
        self._reports = Reports(engine, self._send)

    def _post(self, message):
        self.asked.append(decoder(ToEngine)(message))
        self._reports.watch(self.asked[-1])

    def _send(self, report, wakes):
        self._held.append(encode(report))
        if wakes is not None:
            held, self._held = self._held, []
            self.came += map(decoder(ToServer), held)
            for one in self.came[-len(held) :]:
                self.watched.take(one)

    def numbers(self):
        """The numbers, once a first report has come."""
        until(lambda: self.watched.numbers() is not None)
        found = self.watched.numbers()
        assert found is not None
        return found


@pytest.fixture
def running():
    executor = make_executor()
    executor.add_adapter("second", LORA)
    with make_engine(executor, 64, Limits(running=2, tokens=24)).start() as engine:
        yield engine


def state_of(numbers):
    adapters = numbers.totals.adapters
    return plain_state(numbers), dict(adapters.resident), dict(adapters.waiting)


def test_the_state_is_that_of_the_engine_whenever_a_step_begins(running, monkeypatch):
    """Steps may be long: who asks while one runs sees what it admitted. Pages come with its end."""
    crossing, start = Crossing(running), running.engine.device.start
    assert state_of(crossing.numbers()) == state_of(running.numbers())
    pairs = []

    def compared(*arguments):
        pairs.append((state_of(crossing.numbers()), state_of(running.numbers())))
        return start(*arguments)

    monkeypatch.setattr(running.engine.device, "start", compared)
    all_came = Event()
    running.call(all_came.wait)
    streams = [
        running.submit(ids, adapter, max_new_tokens=20, ignore_eos=True)
        for ids, adapter in zip(prompts((9, 21, 30)), ("a", None, "second"), strict=True)
    ]
    all_came.set()
    for stream in streams:
        stream.wait(60)
    assert state_of(crossing.numbers()) == state_of(running.numbers())
    for told, true in pairs:
        told[0]["free_pages"] = true[0]["free_pages"]
    assert [told for told, _ in pairs] == [true for _, true in pairs]
    assert max(told[0]["running"] for told, _ in pairs) == 2
    assert max(told[2].get("second", 0) for told, _ in pairs) == 1


def test_totals_are_whole_with_the_last_chunk(running):
    crossing = Crossing(running)
    crossing.numbers()
    job = running.finetune(DATA, "mine", peft=LORA, **OPTIONS)
    job.wait(60)
    for count, ids in enumerate(prompts((9, 21, 30)), 1):
        running.submit(ids, "a", n=2, max_new_tokens=6, ignore_eos=True).wait(60)
        numbers = crossing.numbers()
        assert numbers.totals.output_tokens == count * 2 * 6
        assert plain(numbers.totals) == plain(running.numbers().totals)
    assert crossing.watched.jobs() == running.jobs()
    came = len(crossing.came)
    running.run(lambda: None)
    assert len(crossing.came) == came  # nothing changed


def test_nothing_is_reported_to_nobody(running):
    crossing = Crossing(running)
    running.submit([1, 2, 3], "a", max_new_tokens=6, ignore_eos=True).wait(60)
    assert crossing.came == []
    assert crossing.numbers().totals.output_tokens == 6


def test_who_stops_asking_is_told_no_more_and_believes_nothing_old():
    now_s, posted = [100.0], list[Watch]()
    watched = WatchedNumbers(lambda one: posted.append(decoder(Watch)(one)), lambda: now_s[0])

    def report(time_s, running, **parts):
        return Report(time_s, {**STATE, "running": running}, **parts)

    first = {"resident": {}, "waiting": {}, "totals": {"output_tokens": 5}}
    assert watched.numbers() is None
    now_s[0] = 101.0
    assert watched.numbers() is None
    assert posted == []  # who asks now and then has the engine asked
    now_s[0] = 101.5
    assert watched.numbers() is None
    assert watched.jobs() is None
    assert posted == [Watch(105.5, True)]
    watched.take(report(101.6, 1, **first, jobs=[]))
    found = watched.numbers()
    assert (found.running, found.totals.output_tokens, watched.jobs()) == (1, 5, [])
    now_s[0] = 103.5
    watched.take(report(103.4, 2))
    found = watched.numbers()
    assert (found.running, found.totals.output_tokens) == (2, 5)
    assert posted[1:] == [Watch(107.5, False)]
    now_s[0] = 107.5
    assert watched.jobs() is None
    assert watched.numbers() is None
    now_s[0] = 107.6
    assert watched.numbers() is None
    assert posted[2:] == [Watch(111.6, True)]
    watched.take(report(107.5, 3))
    assert watched.numbers() is None  # it was under way when nobody watched
    watched.take(report(107.7, 4, **first, jobs=[]))
    found = watched.numbers()
    assert found.running == 4


STATE = {
    "waiting": 0, "preparing": 0, "running": 0, "waiting_tokens": 0, "jobs": {}, "pages": 9,
    "free_pages": 9, "adapters": 0, "shares_prefixes": True, "late": {},
}  # fmt: skip


def test_what_is_no_report_is_refused():
    with pytest.raises(msgspec.ValidationError):
        decoder(ToServer)(encode(["report", 1.0, {}, {"a": "many"}]))
