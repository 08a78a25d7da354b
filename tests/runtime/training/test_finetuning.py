"""Finetuning against transformers + peft + torch.optim, and what stops it.

Long because every option and every way a job can end is a test of its own.
"""

import copy
import dataclasses
import json
import signal
import warnings
from pathlib import Path
from typing import Any

import peft
import pytest
import tokenizers
import torch
import transformers

from pcg.errors import DataError, FinetuneError, FinetuneInterrupted
from pcg.keywords import field_docs
from pcg.runtime.data.example import IGNORED, Example
from pcg.runtime.data.order import Batches
from pcg.runtime.executor import Executor
from pcg.runtime.text.tokenizer import Tokenizer
from pcg.runtime.training.options import FinetuneOptions
from pcg.runtime.training.schedules import make_schedule
from tests.support import compiled

VOCABULARY, POSITIONS = 100, 32
CONFIGS = {
    "llama": transformers.LlamaConfig(
        hidden_size=32, intermediate_size=64, num_hidden_layers=2, num_attention_heads=4,
        num_key_value_heads=2, vocab_size=VOCABULARY, max_position_embeddings=POSITIONS,
    ),
    "gpt2": transformers.GPT2Config(
        n_embd=32, n_head=4, n_layer=2, vocab_size=VOCABULARY, n_positions=POSITIONS,
        bos_token_id=0, eos_token_id=0,
    ),
}  # fmt: skip
LORA = {"peft_type": "LORA", "r": 4, "lora_alpha": 8, "target_modules": "all-linear"}


def base_model(family: str) -> Any:
    torch.manual_seed(0)
    model = transformers.AutoModelForCausalLM.from_config(CONFIGS[family]).eval()
    for parameter in model.parameters():
        parameter.data += torch.randn_like(parameter) * 0.1
    return model


def examples(count: int, seed: int = 0, longest: int = 16) -> list[Example]:
    """Return random examples of different lengths; the first third of each is a prompt."""
    torch.manual_seed(seed)
    made = []
    for _ in range(count):
        ids = torch.randint(2, VOCABULARY - 1, (int(torch.randint(4, longest + 1, ())),)).tolist()
        prompt = len(ids) // 3
        made.append(Example(ids, [IGNORED] * prompt + ids[prompt:]))
    return made


@pytest.fixture(scope="module")
def model() -> Any:
    return base_model("llama")


@pytest.fixture(scope="module")
def shared(model: Any) -> Executor:
    return compiled.executor(model)


def tensors(executor: Executor, name: str = "a") -> dict[str, torch.Tensor]:
    return {k: v.clone() for k, v in executor.training_runner(name).parameters.items()}


def assert_same_bits(one: dict[str, torch.Tensor], other: dict[str, torch.Tensor]) -> None:
    assert one.keys() == other.keys()
    assert all(torch.equal(one[key], other[key]) for key in one)


# ------------------------------------------------------------------------------- the reference


SAVED = {"target_modules": ["q_proj", "embed_tokens"], "modules_to_save": ["lm_head", "norm"]}


def reference(
    base: Any, executor: Executor, recipe: dict[str, Any], data: list[Example], **options: Any
) -> tuple[dict[str, torch.Tensor], list[float]]:
    """The same job in peft's eager model, from the executor's fresh adapter `a`."""
    fields = {key: value for key, value in recipe.items() if key != "peft_type"}
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        wrapped = peft.get_peft_model(copy.deepcopy(base), peft.LoraConfig(**fields)).eval()
    by_name = dict(wrapped.named_parameters())
    ours = executor.training_runner("a").parameters
    theirs, keys = {}, {}
    for path, tensor in ours.items():
        if path.endswith(".weight"):
            module = path.removesuffix(".weight")
            key = f"base_model.model.{module}.modules_to_save.default.weight"
        elif ":embedding" in path:
            matrix = path.replace(":embedding.lora", ".lora_embedding")
            key = f"base_model.model.{matrix}.default"
        elif path.endswith("bias"):
            key = f"base_model.model.{path}"
            key = key if key in by_name else key.replace(".bias", ".base_layer.bias")
        else:
            key = f"base_model.model.{path}.default.weight"
        theirs[path], keys[path] = by_name[key], key
        theirs[path].data.copy_(tensor)
    trained = {name for name, parameter in by_name.items() if parameter.requires_grad}
    assert len(trained) == len(ours)

    decay, steps, group = options["weight_decay"], options["max_steps"], options["group"]
    decayed = transformers.Trainer.get_decay_parameter_names(None, wrapped)
    groups: dict[bool, list[Any]] = {True: [], False: []}
    for path, key in keys.items():
        groups[key in decayed].append(theirs[path])
    optimizer = torch.optim.AdamW(
        [
            {"params": groups[True], "weight_decay": decay},
            {"params": groups[False], "weight_decay": 0.0},
        ],
        lr=options["learning_rate"],
        betas=(0.9, 0.95),
    )
    schedule = transformers.get_scheduler(options["schedule"], optimizer, options["warmup"], steps)
    batches = Batches(data, batch_size=options["batch_size"], seed=3)
    losses: list[float] = []
    while len(losses) < steps:
        parts = list(batches)
        for start in range(0, len(parts), group):
            if len(losses) == steps:
                break
            step = parts[start : start + group]
            count = sum(example.targets for batch in step for example in batch)
            total = 0.0
            for batch in step:
                loss = torch.zeros(())
                for example in batch:
                    ids, labels = torch.tensor([example.ids]), torch.tensor(example.labels)
                    loss = loss + torch.nn.functional.cross_entropy(
                        wrapped(ids).logits[0, :-1], labels[1:], reduction="sum"
                    )
                (loss / count).backward()
                total += loss.item()
            torch.nn.utils.clip_grad_norm_(list(theirs.values()), options["clip"])
            optimizer.step()
            schedule.step()
            optimizer.zero_grad()
            losses.append(total / count)
    return {path: parameter.detach() for path, parameter in theirs.items()}, losses


@pytest.mark.parametrize(
    ("family", "recipe", "schedule", "steps", "group"),
    [
        pytest.param("llama", LORA, "linear", 10, 2, marks=pytest.mark.slow),
        ("llama", {**LORA, "use_dora": True}, "linear", 10, 2),
        ("gpt2", {**LORA, "bias": "all", "use_rslora": True}, "cosine", 10, 3),
        ("llama", {**LORA, **SAVED}, "linear", 4, 1),
        (
            "gpt2",
            {**LORA, "target_modules": ["c_attn"], "bias": "lora_only", "layers_to_transform": [1]},
            "constant_with_warmup",
            4,
            1,
        ),
    ],
)
def test_same_weights_as_peft_and_torch(
    family: str, recipe: dict[str, Any], schedule: str, steps: int, group: int, request: Any
) -> None:
    """Accumulation over an epoch's end, clipping, warmup and decay, within 1e-5 in fp32."""
    if family == "llama":
        base, executor = request.getfixturevalue("model"), request.getfixturevalue("executor")
    else:
        base = base_model(family)
        executor = compiled.executor(base, None)
    data = examples(14)
    executor.add_adapter("a", recipe)
    options = {"learning_rate": 2e-2, "weight_decay": 0.1, "batch_size": 3, "schedule": schedule}
    clip = 0.5 if group > 1 else 0.05
    wanted, losses = reference(
        base, executor, recipe, data, warmup=3, max_steps=steps, group=group, clip=clip, **options
    )
    clipped = []
    result = executor.finetune(
        data, "a", seed=3, max_steps=steps, gradient_accumulation_steps=group, betas=(0.9, 0.95),
        warmup_steps=3, max_grad_norm=clip, **options,
        on_step=lambda record: clipped.append(record.gradient_norm > clip),
    )  # fmt: skip
    assert result.losses == pytest.approx(losses, rel=1e-5)
    assert any(clipped)
    assert steps < 10 or result.losses[-1] < 0.95 * result.losses[0]
    for path, tensor in tensors(executor).items():
        known = torch.ones(len(tensor), dtype=torch.bool)
        if path.endswith("c_attn.bias"):
            # Attention is the same whatever the keys' bias: its gradient is rounding, which Adam
            # blows up to whole steps.
            known[32:64] = False
        error = (tensor - wanted[path])[known].norm() / wanted[path][known].norm()
        assert error < 1e-5, (path, error)


def test_the_served_adapter_is_the_trained_one(executor: Executor, tmp_path: Path) -> None:
    """During and after; the caller's tensors stay, and nothing of training is left on ours."""
    mine = executor.add_adapter("a", LORA)
    before = [tensor.clone() for tensor in mine.tensors]
    prompt = [5, 6, 7, 8]
    logits = [executor.logits(prompt, "a")]
    executor.finetune(
        examples(8), "a", batch_size=4, learning_rate=1e-2,
        on_step=lambda record: logits.append(executor.logits(prompt, "a")),
    )  # fmt: skip
    assert all(torch.equal(a, b) for a, b in zip(mine.tensors, before, strict=True))
    assert len(logits) == 3
    assert not torch.equal(logits[0], logits[1])
    assert not torch.equal(logits[1], logits[2])
    for tensor in executor.adapters["a"].tensors:
        assert tensor.grad is None
        assert not tensor.requires_grad
    executor.save_adapter("a", tmp_path / "saved")
    executor.add_adapter("copy", tmp_path / "saved")
    assert torch.equal(executor.logits(prompt, "copy"), executor.logits(prompt, "a"))
    assert torch.equal(executor.logits(prompt, "a"), logits[-1])


def test_a_new_adapter_is_made(executor: Executor) -> None:
    executor.finetune(examples(4), "plain", max_steps=1)
    assert executor.adapters["plain"].recipe.rank == 16
    executor.finetune(examples(4), "mine", max_steps=1, peft=LORA)
    assert executor.adapters["mine"].recipe.rank == 4
    executor.finetune(examples(4), "mine", max_steps=1, peft=peft.LoraConfig(
        r=4, lora_alpha=8, target_modules="all-linear"))  # fmt: skip
    with pytest.raises(FinetuneError, match=r"rank 5.*rank 4"):
        executor.finetune(examples(4), "mine", max_steps=1, peft={**LORA, "r": 5})


def test_evaluation_early_stop_and_the_best_adapter(executor: Executor) -> None:
    """Learning noise by heart makes other noise less likely, so that it stops."""
    held_out = examples(6, seed=1)
    result = executor.finetune(
        examples(6), "a", peft=LORA, max_steps=60, batch_size=3, learning_rate=3e-2,
        schedule="constant", eval_data=held_out, eval_every=2, eval_at_start=True, patience=3,
    )  # fmt: skip
    assert result.stopped == "early"
    assert result.restored
    steps, losses = zip(*result.eval_losses, strict=True)
    assert steps == tuple(range(0, result.steps + 1, 2))
    assert result.best_loss == min(losses)
    assert result.best_step == steps[losses.index(min(losses))] == result.steps - 6
    total, targets = executor.training_runner("a").evaluate(held_out)
    assert total / targets == pytest.approx(result.best_loss, rel=1e-6)


# ------------------------------------------------------------------------------- data in files


class Words:
    """A tokenizer of the words w0, w1, …"""

    @staticmethod
    def make() -> Tokenizer:
        vocabulary = {f"w{index}": index for index in range(VOCABULARY)}
        backend = tokenizers.Tokenizer(tokenizers.models.WordLevel(vocabulary, unk_token="w0"))
        backend.pre_tokenizer = tokenizers.pre_tokenizers.WhitespaceSplit()
        return Tokenizer(backend, {}, eos_id=1, eos_ids=(1,))


def write_lines(path: Path, rows: list[dict[str, str]]) -> Path:
    path.write_text("".join(json.dumps(row) + "\n" for row in rows), encoding="utf-8")
    return path


@pytest.fixture
def with_words(executor: Executor, monkeypatch: pytest.MonkeyPatch) -> Executor:
    monkeypatch.setattr(executor.state, "tokenizer", Words.make())
    return executor


def test_files(with_words: Executor, tmp_path: Path) -> None:
    rows = [{"prompt": f"w{i} w3 ", "completion": f"w{i} w4 w5"} for i in range(10, 20)]
    file = write_lines(tmp_path / "train.jsonl", rows)
    result = with_words.finetune(file, "a", epochs=1, batch_size=5)
    assert result.targets == 10 * 4
    same = with_words.finetune(rows, "b", epochs=1, batch_size=5)
    assert same.losses == result.losses
    text = tmp_path / "book.txt"
    text.write_text("w5 w6 w7 " * 30)  # 90 words and an end: more than the model's positions
    assert with_words.finetune(text, "c").tokens == 91


@pytest.mark.parametrize(
    ("data", "message"),
    [
        ([], "no examples"),
        ([Example([], [])], r"data\[0\] has no token to learn"),
        ([Example([1, 2], [1, 2]), Example([1, 2], [1, -100])], r"data\[1\] has no token to learn"),
        ([Example([1, 100], [1, 100])], r"data\[0\] has the token 100.*vocabulary of 100"),
        ([Example([1, 2], [1, -7])], r"data\[0\] has the token -7"),
        ([Example([1, 2], [1])], "2 tokens and 1 labels"),
        ([Example([1] * 33, [1] * 33)], "33 tokens, more than the model's 32 positions"),
        ([Example([1, 2], [1, 2]), {"text": "x"}], r"data\[1\] is a dict among examples"),
    ],
)
def test_bad_examples(with_words: Executor, data: list[Any], message: str) -> None:
    with pytest.raises(DataError, match=message):
        with_words.finetune(data, "a")
    assert not with_words.adapters


def test_text_needs_a_tokenizer(executor: Executor) -> None:
    with pytest.raises(FinetuneError, match=r"tokenizer\.json"):
        executor.finetune([{"text": "hello"}], "a")


# ------------------------------------------------------------------------------- what stops it


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"learning_rte": 1}, "unknown option 'learning_rte', did you mean 'learning_rate'"),
        ({"epochs": 1, "max_steps": 1}, "epochs=1 and max_steps=1"),
        ({"epochs": 0}, "epochs=0; use an int of at least 1"),
        ({"epochs": 0.5}, "epochs=0.5"),
        ({"batch_size": True}, "batch_size=True"),
        ({"gradient_accumulation_steps": None}, "gradient_accumulation_steps=None"),
        ({"learning_rate": 0}, "learning_rate=0; use a number above 0"),
        ({"learning_rate": float("nan")}, "learning_rate=nan"),
        ({"weight_decay": -0.1}, "weight_decay=-0.1; use a number of at least 0"),
        ({"max_grad_norm": 0}, "None turns clipping off"),
        ({"betas": (0.9,)}, "betas"),
        ({"betas": (0.9, 1.0)}, r"betas=\(0.9, 1.0\)"),
        ({"schedule": "cosin"}, "unknown schedule 'cosin'"),
        ({"warmup_steps": 9, "max_steps": 8}, "warmup_steps=9 exceeds total_steps=8"),
        ({"warmup_steps": 2, "warmup_ratio": 0.1}, "say the same thing"),
        ({"max_length": 1}, "max_length=1"),
        ({"seed": "x"}, "seed='x'"),
        ({"shuffle": 1}, "shuffle=1"),
        ({"patience": 2}, "patience=2 has no effect without eval_data"),
        ({"save_every": 2}, "save_every=2 has no effect without checkpoint_dir"),
        ({"resume": True}, "resume=True needs checkpoint_dir"),
        ({"resume": "yes"}, "resume='yes'"),
        ({"min_delta": 0.1, "eval_data": [1]}, "min_delta=0.1 has no effect without patience"),
    ],
)
def test_bad_options(executor: Executor, options: dict[str, Any], message: str) -> None:
    with pytest.raises(FinetuneError, match=message):
        executor.finetune("nothing.jsonl", "a", **options)


def test_defaults_are_documented() -> None:
    names = [field.name for field in dataclasses.fields(FinetuneOptions)]
    assert field_docs(FinetuneOptions).keys() == set(names)
    for name in names:
        assert f"\n    {name}: " in (Executor.finetune.__doc__ or "")


def test_not_a_number_names_the_line(with_words: Executor, tmp_path: Path) -> None:
    rows = [{"text": f"w{i} w3 w4"} for i in range(10, 18)]
    rows[5]["text"] = "w99 w3 w4"
    file = write_lines(tmp_path / "train.jsonl", rows)
    store, name = with_words.state.weight_store, "model.embed_tokens.weight"
    row = store.whole(name, dict(store.frozen())[name])[99]
    before, seen = row.clone(), [{}]
    row.fill_(float("nan"))
    try:
        with pytest.raises(FinetuneError, match=r"train.jsonl line 6, in a batch of 2") as error:
            with_words.finetune(
                file, "a", batch_size=2, shuffle=False, learning_rate=1e-3, schedule="constant",
                on_step=lambda record: seen.append(tensors(with_words)),
            )  # fmt: skip
    finally:
        row.copy_(before)
    assert "the loss is nan in step 3 at a learning rate of 0.001" in str(error.value)
    assert len(seen) == 3
    assert_same_bits(tensors(with_words), seen[-1])
    assert all(tensor.grad is None for tensor in with_words.adapters["a"].tensors)


def test_divergence_asks_for_a_lower_rate(executor: Executor) -> None:
    with pytest.raises(FinetuneError, match=r"in step \d+ .*lower learning_rate=1e\+30"):
        executor.finetune(
            examples(8), "a", learning_rate=1e30, schedule="constant", max_steps=9, shuffle=False
        )


def test_interrupt_within_an_update_waits(
    executor: Executor, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Ctrl-C while AdamW changes the adapter: the step is done whole."""
    data = examples(8)
    whole = executor.finetune(data, "whole", peft=LORA, batch_size=4, schedule="constant")
    real = torch.optim.AdamW.step

    def interrupted(self: Any, closure: Any = None) -> None:
        signal.raise_signal(signal.SIGINT)
        real(self, closure)

    monkeypatch.setattr(torch.optim.AdamW, "step", interrupted)
    with pytest.raises(
        FinetuneInterrupted, match=r"after step 1 of .*Give checkpoint_dir"
    ) as error:
        executor.finetune(data, "a", peft=LORA, batch_size=4, schedule="constant")
    assert (error.value.step, error.value.checkpoint) == (1, None)
    monkeypatch.undo()
    once = executor.finetune(data, "b", peft=LORA, batch_size=4, schedule="constant", max_steps=1)
    assert once.losses == whole.losses[:1]
    assert_same_bits(tensors(executor, "a"), tensors(executor, "b"))


# ---------------------------------------------------------------------------------------- schedules

RATE, STEPS = 2e-3, 57


def oracle(name, warmup, specific=None):
    """Multipliers of transformers' schedule, steps 0 … STEPS + 4."""
    optimizer = torch.optim.SGD([torch.nn.Parameter(torch.zeros(1))], lr=RATE)
    scheduler = transformers.get_scheduler(
        name,
        optimizer,
        num_warmup_steps=warmup,
        num_training_steps=STEPS,
        scheduler_specific_kwargs=specific,
    )
    multipliers = []
    for _ in range(STEPS + 5):
        multipliers.append(scheduler.get_last_lr()[0] / RATE)
        optimizer.step()
        scheduler.step()
    return multipliers


def ours(name, **options):
    schedule = make_schedule(name, total_steps=STEPS, **options)
    return [schedule(step) for step in range(STEPS + 5)]


@pytest.mark.parametrize("warmup", [0, 1, 10])
@pytest.mark.parametrize(
    ("name", "options", "theirs", "specific"),
    [
        ("constant_with_warmup", {}, "constant_with_warmup", None),
        ("linear", {}, "linear", None),
        ("cosine", {}, "cosine", None),
        ("cosine", {"min_lr_ratio": 0.1}, "cosine_with_min_lr", {"min_lr_rate": 0.1}),
        ("cosine_with_restarts", {"cycles": 3}, "cosine_with_restarts", {"num_cycles": 3}),
        (
            "polynomial",
            {"power": 2.0, "min_lr_ratio": 0.25},
            "polynomial",
            {"power": 2.0, "lr_end": 0.25 * RATE},
        ),
        ("linear", {"min_lr_ratio": 0.25}, "polynomial", {"lr_end": 0.25 * RATE}),
    ],
)
def test_multipliers_are_those_of_transformers(name, options, theirs, specific, warmup):
    expected = oracle(theirs, warmup, specific)
    # Past the last step their cosine swings back up; ours stays.
    end = STEPS + 1 if name == "cosine" else None
    got = ours(name, warmup_steps=warmup, **options)
    assert got[:end] == pytest.approx(expected[:end], abs=1e-9)


def test_constant():
    assert ours("constant") == oracle("constant", 0)
    assert make_schedule("constant")(10**9) == 1.0


def test_warmup_ratio_is_that_of_the_trainer():
    arguments = transformers.TrainingArguments(warmup_steps=0.1)
    steps = arguments.get_warmup_steps(STEPS)
    assert steps == 6
    assert ours("linear", warmup_ratio=0.1) == ours("linear", warmup_steps=steps)


@pytest.mark.parametrize(
    ("name", "options", "words"),
    [
        ("cosin", {}, "unknown schedule 'cosin'; use one of constant, "),
        ("linear", {"total_steps": None}, "needs total_steps"),
        ("linear", {"total_steps": 0}, "at least 1 step"),
        ("linear", {"warmup_steps": 1, "warmup_ratio": 0.1}, "give one of them"),
        ("linear", {"warmup_steps": 11}, "warmup_steps=11 exceeds total_steps=10"),
        ("linear", {"warmup_steps": -1}, "warmup_steps=-1 is below 0"),
        ("linear", {"warmup_ratio": 1.5}, "outside"),
        ("linear", {"min_lr_ratio": 2.0}, "outside"),
        ("linear", {"cycles": 2}, "no effect on 'linear'"),
        ("linear", {"power": 2.0}, "no effect on 'linear'"),
        ("polynomial", {"power": 0.0}, "above 0"),
        ("cosine_with_restarts", {"cycles": 0}, "at least 1"),
        ("constant", {"warmup_steps": 1}, "use 'constant_with_warmup'"),
        ("constant", {"min_lr_ratio": 0.1}, "never decays"),
        ("constant_with_warmup", {"total_steps": None, "warmup_ratio": 0.1}, "needs total_steps"),
    ],
)
def test_wrong_options(name, options, words):
    with pytest.raises(FinetuneError, match=words):
        make_schedule(name, **{"total_steps": 10, **options})
