"""Training on labelled completions against transformers and peft with TRL's formula."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file

from pcg.errors import DataError, FinetuneError, FinetuneInterrupted
from pcg.runtime.executor import Executor
from pcg.runtime.training.options import StepRecord
from pcg.train.preference.dpo import dpo
from pcg.train.preference.kto import KtoArguments, kto
from pcg.train.preference.options import DpoArguments
from tests.support import compiled, tiny_llama
from tests.support import preference_oracle as oracle

WEIGHTS = "adapter_model.safetensors"
LORA = {"peft_type": "LORA", "r": 4, "lora_alpha": 8, "target_modules": ["q_proj", "down_proj"]}
ROWS = [
    {
        "prompt": f"say {i}:",
        "completion": f" {i} it is" if i % 3 else " no" * (i + 1),
        "label": i % 3 > 0,
    }
    for i in range(6)
]
BETA, DESIRABLE, UNDESIRABLE, RATE = 0.3, 1.5, 0.7, 2e-3


@pytest.fixture(scope="module")
def model(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return tiny_llama.save(tmp_path_factory.mktemp("models") / "tiny")


@pytest.fixture(scope="module")
def executor(model: Path) -> Executor:
    return compiled.executor(model, dtype="float32")


@pytest.fixture(scope="module")
def start(executor: Executor, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """An adapter that is not the base, so that the divergence is not 0."""
    path = tmp_path_factory.mktemp("adapters") / "start"
    generator = torch.Generator().manual_seed(1)
    for weights in executor.add_adapter("start", LORA).weights.values():
        weights.b.normal_(std=0.2, generator=generator)
    executor.save_adapter("start", path)
    executor.remove_adapter("start")
    return path


def train(executor: Executor, rows: Any = ROWS, **options: Any) -> Any:
    """A run of four steps of three outputs each."""
    for name in executor.adapters:
        executor.remove_adapter(name)
    values = {"adapter": "a", "batch_size": 3, "max_steps": 4, "learning_rate": RATE, **options}
    return kto(executor, KtoArguments(rows, beta=BETA, **values))


def mismatched(outputs: list[oracle.Output]) -> list[oracle.Output]:
    """TRL's pairs for the divergence: the completion of the previous output of a batch."""
    others = [outputs[-1], *outputs[:-1]]
    return [
        ([*ids[:begin], *other[first:]], begin, begin + end - first)
        for (ids, begin, _), (other, first, end) in zip(outputs, others, strict=True)
    ]


def by_trl(wrapped: Any, model: Path, is_kto: bool) -> list[dict[str, float]]:
    """Steps of AdamW by the lines of TRL's KTOTrainer."""
    parameters = [each for each in wrapped.parameters() if each.requires_grad]
    optimizer = torch.optim.AdamW(parameters, weight_decay=0.0)
    history = []
    for step in range(4):
        rows = ROWS[3 * (step % 2) :][:3]
        outputs = [
            oracle.tokens_of(model, {**row, "chosen": row["completion"], "rejected": "x"})[0]
            for row in rows
        ]
        others, is_chosen = mismatched(outputs), torch.tensor([row["label"] for row in rows])
        with torch.no_grad(), wrapped.disable_adapter():
            reference, kl_reference = (oracle.sums(wrapped, each) for each in (outputs, others))
        ratios = oracle.sums(wrapped, outputs) - reference
        with torch.no_grad():
            kl = (oracle.sums(wrapped, others) - kl_reference).mean().clamp(min=0)
        kl = kl if is_kto else torch.zeros(())
        chosen = 1 - torch.sigmoid(BETA * (ratios[is_chosen] - kl))
        rejected = 1 - torch.sigmoid(BETA * (kl - ratios[~is_chosen]))
        loss = torch.cat((DESIRABLE * chosen, UNDESIRABLE * rejected)).mean()
        rewards = BETA * ratios.detach()
        history.append(
            {
                "loss": float(loss.detach()),
                "kl": float(kl),
                "rewards/chosen": float(rewards[is_chosen].mean()),
                "rewards/rejected": float(rewards[~is_chosen].mean()),
            }
        )
        optimizer.zero_grad()
        loss.backward()
        torch.nn.utils.clip_grad_norm_(parameters, 1.0)
        optimizer.param_groups[0]["lr"] = RATE * (1 - step / 4)
        optimizer.step()
    return history


@pytest.mark.parametrize("loss_type", ["kto", "apo_zero_unpaired"])
def test_a_run_is_that_of_trl_with_peft(
    executor: Executor, model: Path, start: Path, tmp_path: Path, loss_type: str
) -> None:
    weights = {"desirable_weight": DESIRABLE, "undesirable_weight": UNDESIRABLE}
    result = train(
        executor, peft=start, reference="base", shuffle=False, loss_type=loss_type, **weights
    )
    wrapped = oracle.with_adapter(model, start)
    expected = by_trl(wrapped, model, loss_type == "kto")
    for numbers, by_peft in zip(result.history, expected, strict=True):
        assert {name: numbers[name] for name in by_peft} == pytest.approx(
            by_peft, rel=1e-4, abs=1e-5
        )
    assert any(numbers["kl"] > 0 for numbers in result.history) == (loss_type == "kto")
    executor.save_adapter("a", tmp_path / "ours")
    wrapped.save_pretrained(tmp_path / "peft", save_embedding_layers=False)
    ours, theirs = (load_file(tmp_path / name / WEIGHTS) for name in ("ours", "peft"))
    for name, tensor in ours.items():
        torch.testing.assert_close(tensor, theirs[name], rtol=1e-5, atol=1e-5)


@pytest.mark.parametrize("reference", ["base", "start"])
def test_a_resumed_run_is_the_same(
    executor: Executor, start: Path, tmp_path: Path, reference: str
) -> None:
    """With shuffled batches, whose completions meet other prompts in each epoch."""
    options = {"peft": start, "reference": reference, "eval_data": ROWS[:4], "eval_every": 2}
    whole = train(executor, **options)

    def stop(record: StepRecord) -> None:
        if record.step == 2:
            raise KeyboardInterrupt

    options["checkpoint_dir"] = tmp_path
    with pytest.raises(FinetuneInterrupted):
        train(executor, on_step=stop, **options)
    resumed = train(executor, **options)
    assert resumed.resumed_from == 2
    assert resumed.history == whole.history
    assert resumed.evaluations == whole.evaluations
    assert [step for step, _ in whole.evaluations] == [2, 4]


@pytest.mark.parametrize("method", ["kto", "dpo"])
def test_streamed_rows_are_those_in_memory_and_resume(
    executor: Executor, start: Path, tmp_path: Path, method: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Batches of two files whose examples are drawn, and whose rows processes tokenize."""
    pairs = [{"prompt": f"{i}:", "chosen": f" {i} it is", "rejected": " no"} for i in range(6)]
    rows, act = (ROWS, kto) if method == "kto" else (pairs, dpo)
    files = [tmp_path / "a.jsonl", tmp_path / "b.jsonl"]
    for path, some in zip(files, (rows[:4], rows[4:]), strict=True):
        path.write_text("".join(json.dumps(row) + "\n" for row in some))

    def trained(**options: Any) -> Any:
        for name in executor.adapters:
            executor.remove_adapter(name)
        values: dict[str, Any] = {
            "adapter": "a", "batch_size": 2, "max_steps": 4, "learning_rate": RATE, "peft": start,
            "reference": "base", "max_length": 64, "eval_data": rows[:4], "data": files,
            "probabilities": (0.5, 0.5), "stopping_strategy": "all_exhausted", **options,
        }  # fmt: skip
        kind = KtoArguments if method == "kto" else DpoArguments
        return act(executor, kind(**values))  # type: ignore[operator]

    together = trained()
    whole = trained(streaming=True)
    assert (whole.history, whole.evaluations) == (together.history, together.evaluations)

    def stop(record: StepRecord) -> None:
        if record.step == 2:
            raise KeyboardInterrupt

    monkeypatch.setattr("pcg.runtime.data.streaming.cores", lambda: 0)
    options = {"streaming": True, "checkpoint_dir": tmp_path / "c"}
    with pytest.raises(FinetuneInterrupted):
        trained(on_step=stop, **options)
    assert trained(**options).history == whole.history
    with pytest.raises(FinetuneError, match="'start' needs all rows before the first step"):
        trained(reference="start", streaming=True)


@pytest.mark.parametrize(
    ("rows", "options", "message"),
    [
        ([{"prompt": "a", "completion": "b"}], {}, "give it a 'label'"),
        ([{"prompt": "a", "completion": "b", "label": "good"}], {}, "has 'label' 'good'; use true"),
        ([{**ROWS[0], "weight": 2}], {}, "has 'weight' 2; KTO has no weights of rows"),
        (ROWS, {"batch_size": 1}, "batch_size=1; kto estimates a divergence"),
        (ROWS, {"loss_type": "sigmoid"}, "use 'kto' or 'apo_zero_unpaired'"),
        (ROWS, {"desirable_weight": -1}, "desirable_weight=-1; use a number of at least 0"),
        (ROWS, {"patience": 2, "eval_data": ROWS}, "training on preferences has no patience"),
    ],
)
def test_refusals(executor: Executor, rows: Any, options: dict[str, Any], message: str) -> None:
    with pytest.raises((DataError, FinetuneError), match=message):
        train(executor, rows, peft=LORA, **options)
