"""`pcg serve --split-port`: one copy of the weights serves HTTP, and clients of split execution."""

import threading

import pytest
import torch

import pcg
from pcg.errors import ServeError, SplitError
from pcg.runtime.data.example import Example
from pcg.serve.engine.options import ServeOptions
from pcg.split.base.shared_base import SharedBase
from pcg.split.messages import LINEAR, Piece
from tests.support import oracle, serving
from tests.support.live_tensors import live_bytes, memory_of, new_tensors
from tests.support.prompts import TOLERANCE
from tests.support.waiting import until

LORA = pcg.LoraConfig(r=4, target_modules="all-linear")
ROWS = [Example(one, one) for one in ([3, 4, 5, 6, 7, 8], [9, 3, 5])]
TRAINING = {"peft": LORA, "max_steps": 2, "batch_size": 2, "learning_rate": 1e-2, "seed": 3}
PROMPT = [3, 4, 5]
BODY = {"model": serving.MODEL, "prompt": PROMPT, "temperature": 0, "ignore_eos": True}


def where_of(served):
    address = served.service.client.facts.split_address
    assert address is not None
    return address


def test_http_and_split_clients_are_served_by_one_engine():
    alone = serving.make_executor(adapters=0)
    expected = alone.generate([PROMPT], max_new_tokens=8, temperature=0)[0]
    alone.finetune(ROWS, adapter="x", **TRAINING)
    with (
        serving.on_a_port(split_port=0) as served,
        served.client() as http,
        pcg.connect(where_of(served), api_key=serving.KEY) as split,
    ):
        asked = []

        def ask():
            body = {**BODY, "max_tokens": 48}
            reply = http.post("/v1/completions", json=body)
            asked.append(reply.json()["choices"][0]["text"])

        thread = threading.Thread(target=ask)
        thread.start()
        split.finetune(ROWS, adapter="x", **TRAINING)
        found = split.generate([PROMPT], max_new_tokens=8, temperature=0)[0]
        thread.join(60)
        ask()
        assert asked[0] == asked[1] != ""
        assert found.token_ids == expected.token_ids
        pairs = zip(split.adapters["x"].tensors, alone.adapters["x"].tensors, strict=True)
        for one, other in pairs:
            assert oracle.relative_error(one, other) < TOLERANCE


@pytest.mark.slow
def test_a_split_client_is_served_beside_requests_that_miss_their_slo():
    """They leave no time at all, for as long as the client runs."""
    is_over = threading.Event()
    with (
        serving.on_a_port(split_port=0, tpot_slo_ms=0.01, max_num_seqs=2) as served,
        served.client() as http,
        pcg.connect(where_of(served), api_key=serving.KEY, lost_s=10) as split,
    ):
        body = {**BODY, "max_tokens": 100, "stream": True}

        def stream():
            while not is_over.is_set():
                with http.stream("POST", "/v1/completions", json=body) as reply:
                    for _ in reply.iter_lines():
                        begun.set()

        begun = threading.Event()
        threads = [threading.Thread(target=stream) for _ in range(3)]
        for thread in threads:
            thread.start()
        try:
            assert begun.wait(60)
            assert len(split.generate([PROMPT], max_new_tokens=2)[0].token_ids) == 2
            split.finetune(ROWS, adapter="x", **TRAINING)
        finally:
            is_over.set()
            for thread in threads:
                thread.join(60)


def test_the_weights_are_held_once():
    executor = serving.make_executor(adapters=0)
    store, model = executor.state.weight_store, executor.program.base
    weights = store.size_bytes
    holders = [one for _, _, one in store.bind(model).holders(model)]
    held = {memory_of(tensor) for one in holders for tensor in vars(one).values()}
    with executor.engine(kv_cache_bytes=2**20).start() as engine, new_tensors() as live:
        base = SharedBase(executor, engine)
        for name, weight in base.multiplied.items():
            base.run(Piece(LINEAR, (name,)), [torch.zeros(4, weight.shape[1])])
        assert sum(tensor.nbytes for tensor in base.multiplied.values()) > weights / 2
        assert store.size_bytes == weights
        assert live_bytes([one for one in live() if memory_of(one) not in held]) < weights / 100


def test_keys_and_scopes_are_those_of_the_server(tmp_path):
    scopes = {"serves": {"scopes": ["infer"]}, "reads": {"scopes": ["metrics"]}}
    file = serving.keys_file(tmp_path, **scopes)
    with serving.on_a_port(api_key=(), api_keys=file, split_port=0) as served:
        where = where_of(served)
        with pytest.raises(SplitError, match="none of this base's"):
            pcg.connect(where, api_key="no-such-key")
        with pytest.raises(SplitError, match="neither of the scopes infer and train"):
            pcg.connect(where, api_key="key-of-reads")
        with pcg.connect(where, api_key="key-of-serves") as split:
            assert len(split.generate([PROMPT], max_new_tokens=2)[0].token_ids) == 2
            with pytest.raises(SplitError, match="scope train"):
                split.finetune(ROWS, adapter="x", **TRAINING)


def test_a_drain_waits_for_split_clients():
    with serving.on_a_port(split_port=0) as served:
        split = pcg.connect(where_of(served), api_key=serving.KEY)
        served.server.drain()
        until(lambda: served.service.client.health().state.value == "draining")
        assert len(split.generate([PROMPT], max_new_tokens=2)[0].token_ids) == 2
        split.close()


def test_ports_that_cannot_be_are_refused():
    with pytest.raises(ServeError, match="split_port=-1"):
        ServeOptions(split_port=-1)
    with pytest.raises(ServeError, match="use two"):
        ServeOptions(port=8000, split_port=8000)
