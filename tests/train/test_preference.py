"""Training on preferences against transformers and peft; beside an engine, resumed, refused."""

from __future__ import annotations

import json
import math
import threading
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file

from pcg.errors import AdapterNotFoundError, DataError, FinetuneError, FinetuneInterrupted
from pcg.runtime.data.example import IGNORED
from pcg.runtime.executor import Executor
from pcg.runtime.training.training_data import training_data
from pcg.train.preference.dpo import dpo
from pcg.train.preference.options import DpoArguments
from pcg.train.preference.run import PreferenceRun
from tests.support import compiled, tiny_llama
from tests.support import preference_oracle as oracle

WEIGHTS = "adapter_model.safetensors"
LORA = {"peft_type": "LORA", "r": 4, "lora_alpha": 8, "target_modules": ["q_proj", "down_proj"]}
TEXTS = [
    {"prompt": f"say {i}:", "chosen": f" {i} it is", "rejected": " no" * (i % 3 + 1)}
    for i in range(6)
]
CHATS = [
    {
        "prompt": [{"role": "user", "content": f"what is {i}?"}],
        "chosen": [{"role": "assistant", "content": f"it is {i}, sir"}],
        "rejected": [{"role": "assistant", "content": "go away"}],
    }
    for i in range(6)
]


@pytest.fixture(scope="module")
def model(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return tiny_llama.save(tmp_path_factory.mktemp("models") / "tiny")


@pytest.fixture(scope="module")
def executor(model: Path) -> Executor:
    return compiled.executor(model, dtype="float32")


@pytest.fixture(scope="module")
def start(executor: Executor, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """An adapter that is not the base, to start from."""
    path = tmp_path_factory.mktemp("adapters") / "start"
    made = executor.add_adapter("start", LORA)
    generator = torch.Generator().manual_seed(1)
    for weights in made.weights.values():
        weights.b.normal_(std=0.1, generator=generator)
    executor.save_adapter("start", path)
    executor.remove_adapter("start")
    return path


def train(executor: Executor, rows: list[Any], **options: Any) -> Any:
    """A run of four steps of two pairs each; the adapter is removed before."""
    for name in set(executor.adapters) - {"other"}:
        executor.remove_adapter(name)
    given = {"adapter": "a", "batch_size": 2, "max_steps": 4, "shuffle": False, **options}
    return dpo(executor, DpoArguments(rows, **{"learning_rate": 2e-3, **given}))


@pytest.mark.parametrize("rows", [TEXTS, CHATS], ids=["texts", "chats"])
def test_a_run_is_that_of_trl_with_peft(
    executor: Executor, model: Path, start: Path, tmp_path: Path, rows: list[dict[str, Any]]
) -> None:
    result = train(executor, rows, peft=start, reference="base")
    wrapped = oracle.with_adapter(model, start)
    batches = [rows[:2], rows[2:4], rows[4:], rows[:2]]
    expected = oracle.train(wrapped, model, batches, [2e-3 * (1 - i / 4) for i in range(4)])
    for found, by_peft in zip(result.history, expected, strict=True):
        assert found == pytest.approx(by_peft, rel=1e-4, abs=1e-5)
    executor.save_adapter("a", tmp_path / "ours")
    wrapped.save_pretrained(tmp_path / "peft", save_embedding_layers=False)
    ours, theirs = (load_file(tmp_path / name / WEIGHTS) for name in ("ours", "peft"))
    assert ours.keys() == theirs.keys()
    for name, tensor in ours.items():
        torch.testing.assert_close(tensor, theirs[name], rtol=1e-5, atol=1e-5)
    moved = load_file(start / WEIGHTS)
    assert any((tensor - moved[name]).abs().max() > 1e-3 for name, tensor in ours.items())


def test_tokens_are_those_of_the_template(executor: Executor, model: Path) -> None:
    """Of TRL's rows with and without a prompt, and of OpenAI's, the same examples are made."""
    openai = [
        {
            "input": {"messages": row["prompt"], "tools": []},
            "preferred_output": row["chosen"],
            "non_preferred_output": row["rejected"],
        }
        for row in CHATS
    ]
    implicit = [{key: row["prompt"] + row[key] for key in ("chosen", "rejected")} for row in CHATS]
    made = [
        training_data(rows, DpoArguments(rows), executor.state, rows="pairs").examples
        for rows in (CHATS, openai, implicit)
    ]
    assert made[0] == made[1] == made[2]
    expected = [one for row in CHATS for one in oracle.tokens_of(model, row)]
    for example, (ids, begin, end) in zip(made[0], expected, strict=True):
        assert list(example.ids) == ids
        learned = [i for i, label in enumerate(example.labels) if label != IGNORED]
        assert learned == list(range(begin, end))


def test_a_run_beside_an_engine_is_the_same(executor: Executor, tmp_path: Path) -> None:
    alone = train(executor, CHATS, peft=LORA, eval_data=CHATS[:3], eval_at_start=True)
    executor.save_adapter("a", tmp_path / "alone")
    executor.remove_adapter("a")
    with executor.engine(kv_cache_bytes=2**20).start() as running:
        stream = running.submit([5, 8, 13], max_new_tokens=40, ignore_eos=True)
        beside = train(executor, CHATS, peft=LORA, eval_data=CHATS[:3], eval_at_start=True)
        assert len(stream.wait().token_ids) == 40
        executor.save_adapter("a", tmp_path / "beside")
    assert [step for step, _ in beside.evaluations] == [0, 3, 4]
    for one, other in zip(alone.history, beside.history, strict=True):
        for name, value in one.items():
            if name != "rewards/accuracies":  # the first step's margins are rounding
                assert value == pytest.approx(other[name], rel=1e-4, abs=1e-5)
    first, last = (dict(beside.evaluations)[step] for step in (0, 4))
    assert first["loss"] == pytest.approx(0.6931, abs=1e-4)
    assert last["rewards/margins"] > first["rewards/margins"]
    ours, others = (load_file(tmp_path / name / WEIGHTS) for name in ("alone", "beside"))
    for name, tensor in ours.items():
        torch.testing.assert_close(tensor, others[name], rtol=1e-4, atol=1e-5)


def test_a_run_that_is_stopped_goes_on_to_the_same_bits(executor: Executor, tmp_path: Path) -> None:
    whole = train(executor, TEXTS, peft=LORA, seed=3, shuffle=True)
    executor.save_adapter("a", tmp_path / "whole")
    executor.remove_adapter("a")
    given = {"adapter": "a", "peft": LORA, "batch_size": 2, "max_steps": 4, "seed": 3}
    more = {
        "learning_rate": 2e-3,
        "checkpoint_dir": tmp_path / "job",
        "save_every": 1,
        "record": tmp_path / "record",
    }
    run = PreferenceRun(
        executor,
        DpoArguments(TEXTS, on_step=lambda step: run.stop() if step.step == 2 else None,
                     **given, **more),
    )  # fmt: skip
    with pytest.raises(FinetuneInterrupted, match="after step 2 of 4") as caught:
        run.run()
    assert caught.value.step == 2
    with pytest.raises(FinetuneError, match=r"another run: beta was 0\.1, is 0\.2"):
        dpo(executor, DpoArguments(TEXTS, beta=0.2, **given, **more))
    resumed = dpo(executor, DpoArguments(TEXTS, resume=True, **given, **more))
    assert resumed.resumed_from == 2
    assert resumed.history == whole.history
    executor.save_adapter("a", tmp_path / "again")
    files = [tmp_path / name / WEIGHTS for name in ("whole", "again")]
    assert files[0].read_bytes() == files[1].read_bytes()
    assert sorted(path.name for path in (tmp_path / "job").iterdir()) == [
        "latest",
        "step-00000003",
        "step-00000004",
    ]
    lines = (tmp_path / "record" / "metrics.jsonl").read_text().splitlines()
    rows = [json.loads(line) for line in lines]
    assert [row["step"] for row in rows] == [1, 2, 3, 4]
    assert rows[3]["rewards/margins"] == whole.history[3]["rewards/margins"]
    facts = json.loads((tmp_path / "record" / "run.json").read_text())
    assert (facts["kind"], facts["status"]) == ("dpo", "completed")


def test_references(executor: Executor, start: Path) -> None:
    """An adapter by its name, and the start: at first all rewards are 0."""
    executor.add_adapter("other", start)
    for reference in ("other", "start"):
        result = train(executor, TEXTS, peft=start, max_steps=2, reference=reference)
        assert result.history[0]["rewards/chosen"] == pytest.approx(0, abs=1e-5)
        assert result.history[1]["rewards/margins"] > 0
    by_base = train(executor, TEXTS, peft=start, max_steps=1, reference="base")
    assert abs(by_base.history[0]["rewards/chosen"]) > 1e-4
    executor.remove_adapter("other")
    with pytest.raises(AdapterNotFoundError, match="reference='other'"):
        train(executor, TEXTS, reference="other")


def test_an_adapter_is_held_to_its_start_by_default(executor: Executor, start: Path) -> None:
    """A new adapter, a saved one, and one that is there: the first loss is ln 2, as TRL's."""
    fresh = train(executor, TEXTS, max_steps=2)
    further = dpo(executor, DpoArguments(TEXTS, adapter="a", batch_size=2, max_steps=1))
    saved = train(executor, TEXTS, peft=start, max_steps=1)
    for result in (fresh, further, saved):
        assert result.history[0]["loss"] == pytest.approx(math.log(2), abs=1e-5)
        assert result.history[0]["rewards/chosen"] == pytest.approx(0, abs=1e-5)


def test_a_run_is_cancelled_from_another_thread(executor: Executor) -> None:
    began, goes_on = threading.Event(), threading.Event()

    def hold(_: Any) -> None:
        began.set()
        assert goes_on.wait(60)

    errors: list[BaseException] = []
    with executor.engine(kv_cache_bytes=2**20).start():
        given = DpoArguments(TEXTS, adapter="b", peft=LORA, max_steps=50, on_step=hold)
        run = PreferenceRun(executor, given)

        def act() -> None:
            try:
                run.run()
            except FinetuneError as error:
                errors.append(error)

        thread = threading.Thread(target=act)
        thread.start()
        assert began.wait(60)
        run.cancel()
        goes_on.set()
        thread.join(60)
    assert "was cancelled" in str(errors[0])
    assert "b" not in executor.adapters


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"beta": 0}, "beta=0; use a number above 0"),
        ({"loss_type": "dpop"}, "loss_type='dpop'; use some of sigmoid, hinge"),
        ({"loss_type": "exo_pair"}, "label_smoothing=0 makes the term exo_pair infinite"),
        ({"discopop_tau": 1.0}, r"discopop_tau=1 has no effect on sigmoid; leave it out"),
        ({"loss_type": ("sft", "sft")}, "names a term twice"),
        ({"loss_weights": (1.0, 2.0)}, "a number of at least 0 for each of the 1 terms"),
        ({"label_smoothing": 0.5}, r"label_smoothing=0\.5; use a number in \[0, 0\.5\)"),
        ({"label_smoothing": 0.1, "loss_type": "ipo"}, "has no effect on ipo"),
        ({"patience": 2, "eval_data": TEXTS}, "training on preferences has no patience"),
        ({"data_format": "chat"}, "has no data_format"),
        ({"eval_data": "a=a.jsonl,b=b.jsonl"}, "eval_data names a, b; preferences are evaluated"),
    ],
)
def test_options_that_cannot_be(options: dict[str, Any], message: str) -> None:
    with pytest.raises(FinetuneError, match=message):
        DpoArguments(TEXTS, **options)


@pytest.mark.parametrize(
    ("row", "message"),
    [
        ({"prompt": "a", "chosen": "b"}, r"line 2: missing key 'rejected'"),
        ({"prompt": "a", "chosen": "b", "rejected": "b"}, "line 2: both outputs are alike"),
        ({"prompt": "a", "chosen": ["b"], "rejected": "c"}, "line 2: 'prompt' is"),
        ({"input": {}, "preferred_output": [], "non_preferred_output": []}, "with 'messages'"),
        ({"preferred_output": []}, "line 2: missing key 'input'"),
        ({"prompt": "a", "chosen": "", "rejected": "c"}, "line 2: nothing to learn"),
        (
            {
                "input": {"messages": [{"role": "user", "content": "a"}]},
                "preferred_output": [{"role": "user", "content": "b"}],
                "non_preferred_output": [{"role": "assistant", "content": "c"}],
            },
            "line 2: 'preferred_output'.0. is from 'user'",
        ),
        ("text", "line 2: the row is"),
    ],
)
def test_rows_that_cannot_be(executor: Executor, tmp_path: Path, row: Any, message: str) -> None:
    path = tmp_path / "pairs.jsonl"
    path.write_text("".join(json.dumps(one) + "\n" for one in (TEXTS[0], row)))
    with pytest.raises(DataError, match=message):
        dpo(executor, DpoArguments(path))
