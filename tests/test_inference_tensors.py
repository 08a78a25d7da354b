"""Nothing that is made under `torch.inference_mode` outlives it.

Training can neither write such a tensor nor save it for backward, and fails at a place that has
nothing to do with the one that has made it. So after each scene of one process, in which all kinds
of work follow each other, no object has one but those that are listed here with a reason.
"""

import gc
import sys
from itertools import chain
from types import FrameType

import pytest
import torch

import pcg
from pcg.kernels.torch import base_operators
from pcg.kernels.torch.host_recorder import HostRecording
from pcg.runtime.data.example import Example
from pcg.split import zeromq
from tests.support import serving
from tests.support.live_tensors import new_tensors
from tests.support.split_base import KEY, listening_base

TARGETS = ["q_proj", "down_proj"]
RECIPES = {
    "lora": {"peft_type": "LORA", "r": 4, "target_modules": "all-linear"},
    "dora": {"peft_type": "LORA", "r": 4, "target_modules": TARGETS, "use_dora": True},
    "ia3": {"peft_type": "IA3", "target_modules": TARGETS, "feedforward_modules": ["down_proj"]},
    "vera": {"peft_type": "VERA", "r": 4, "target_modules": TARGETS},
    "loha": {"peft_type": "LOHA", "r": 2, "target_modules": TARGETS},
    "prefix": {"peft_type": "PREFIX_TUNING", "num_virtual_tokens": 3},
    "prompt": {"peft_type": "PROMPT_TUNING", "num_virtual_tokens": 3},
}
PROMPTS = [[3, 4, 5, 6] * 8, [7, 8, 9]]
LONG = [list(range(3, 120))] * 3
"""More than the memory that a client and its base share at first."""
ROWS = [Example(one, one) for one in (list(range(3, 40)), [9, 3, 5])]
JOB = {"max_steps": 2, "batch_size": 2, "learning_rate": 1e-2}


def listed():
    """The tensors that may outlive the mode, each with its reason."""
    return [
        # It stands for the very `sin` that it was made of, and no other step has that.
        *([] if base_operators._last_signed is None else base_operators._last_signed),
        # The memory of recorded steps, which their replays alone read and write.
        *(
            value
            for recording in gc.get_objects()
            if isinstance(recording, HostRecording)
            for value in recording._kept
        ),
    ]


def locals_of_threads():
    """What functions that run now have in variables."""
    for top in sys._current_frames().values():
        frame = top
        while frame is not None:
            yield from frame.f_locals.values()
            frame = frame.f_back


def outliving(tensors):
    """Tensors of inference mode that some object has, and what has them."""
    known = set(map(id, chain(listed(), locals_of_threads())))
    found = [one for one in tensors if one.is_inference() and id(one) not in known]
    if found:
        gc.unfreeze()  # objects that are older than the scene are looked at, too
    return [f"{tuple(one.shape)} of {' of '.join(holders(one))}" for one in found]


def holders(tensor):
    """The objects on one way from a tensor up to something that has a name."""
    seen = {id(tensor)}
    for _ in range(6):
        every = [one for one in gc.get_referrers(tensor) if type(one).__module__ != "builtins"]
        every += [one for one in gc.get_referrers(tensor) if type(one) in (dict, list, tuple)]
        every = [one for one in every if id(one) not in seen and not isinstance(one, FrameType)]
        if not every:
            return
        tensor = every[0]
        seen.add(id(tensor))
        yield type(tensor).__qualname__


@pytest.fixture
def check():
    with new_tensors() as live:

        def look(scene):
            assert outliving(live()) == [], scene

        yield look


def tried(executor, check, where, recipes=RECIPES):
    """Each recipe is served first, and then trained with what serving has left."""
    for name in recipes:
        executor.add_adapter(name, RECIPES[name], seed=1)
        executor.generate(PROMPTS, name, max_new_tokens=3)
        check(f"{where} serves {name}")
        executor.finetune(ROWS, name, **JOB)
        executor.logits(PROMPTS[0], adapter=name)
        check(f"{where} trains {name}")
        executor.remove_adapter(name)


def test_a_planted_tensor_is_found():
    with new_tensors() as live:
        kept = Example((1,), (1,)), {"planted": torch.ones(1)}
        assert outliving(live()) == []
        with torch.inference_mode():
            kept[1]["planted"] = torch.ones(3)
        (found,) = outliving(live())
        assert found.startswith("(3,) of ")


def test_an_engine_keeps_none(check, tmp_path):
    executor = serving.make_executor(adapters=2)
    tried(executor, check, "an executor")
    executor.embed(PROMPTS)
    executor.generate(PROMPTS, "lora-0", max_new_tokens=3, temperature=1, seed=1, logprobs=2)
    executor.save_adapter("lora-0", tmp_path / "saved")
    check("an executor")
    with executor.engine(kv_cache_bytes=2**19).start() as engine:
        job = engine.finetune(ROWS, "job", peft=RECIPES["dora"], publish_every=1, **JOB)
        streams = [engine.submit(one, "lora-1", max_new_tokens=9) for one in PROMPTS * 2]
        engine.add_adapter("loaded", tmp_path / "saved").result(60)
        streams += [engine.submit(one, "loaded", max_new_tokens=9) for one in PROMPTS]
        for stream in streams:
            stream.wait()
        job.wait()
        check("an engine")
        engine.remove_adapter("loaded").result(60)
        with executor.trainer("trained", peft=RECIPES["lora"]) as trainer:
            trainer.forward_backward([pcg.Datum(one) for one in PROMPTS])
            trainer.optim_step(learning_rate=1e-2)
            trainer.snapshot()
        executor.generate(PROMPTS, "trained", max_new_tokens=3)
        check("an engine beside a trainer")
    executor.finetune(ROWS, "lora-0", **JOB)
    check("an executor whose engine is closed")


@pytest.mark.parametrize("privacy", [None, pcg.Privacy("base", pool=8, uses=2)])
def test_a_split_client_keeps_none(check, monkeypatch, privacy):
    for module, name in ((zeromq, "_FIRST_BYTES"), (zeromq, "LEAST_BYTES")):
        monkeypatch.setattr(module, name, 2**14)
    whole = serving.make_executor(adapters=0)
    with listening_base(whole) as where:
        split = pcg.connect(where, api_key=KEY, privacy=privacy, lost_s=60)
        split.generate(LONG, max_new_tokens=2)
        check("a client of larger messages")
        tried(split, check, "a split client", ("dora",))
        split.finetune(ROWS, "x", peft=RECIPES["lora"], **JOB)
    with listening_base(whole, port=int(where.rpartition(":")[2])):
        split.generate(PROMPTS, "x", max_new_tokens=2)
        check("a client whose base is new")
        split.finetune(ROWS, "x", **JOB)
        split.close()
