"""Supervised finetuning: configuration files, and every door to one adapter."""

from __future__ import annotations

from functools import partial
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file
from tinker import types
from torch import Tensor
from torch.nn.functional import cross_entropy
from transformers import AutoTokenizer

import pcg
from pcg.errors import DataError, FinetuneError
from pcg.evaluation import evaluate
from pcg.runtime.data.example import Example
from pcg.runtime.data.order import Batches
from pcg.runtime.executor import Executor
from pcg.runtime.training.options import FinetuneOptions
from pcg.runtime.training.schedules import make_schedule
from pcg.runtime.training.training_data import training_data, with_own_template
from pcg.serve.files.files import Files
from pcg.train.config_file import ConfigFile, OutputOptions, read_config
from pcg.train.grpo import GrpoOptions, train_grpo
from pcg.train.grpo.rollouts import read_prompts
from pcg.train.preference.dpo import dpo
from pcg.train.preference.kto import KtoArguments, kto
from pcg.train.preference.options import DpoArguments
from pcg.train.sft import SFT_KEYS, SftOptions
from tests.support import compiled, serving, text_model, tinker_client
from tests.support import preference_oracle as peft_model
from tests.support.job_client import ROWS, begin, client_of, ended


def read(folder: Path, text: str, *settings: str) -> ConfigFile:
    path = folder / "sft.yaml"
    path.write_text(text)
    return read_config(path, SFT_KEYS, settings)


def test_values_have_the_types_of_their_fields(tmp_path: Path) -> None:
    text = "model: m\noutput: out\ndata: a.jsonl\nlearning_rate: 1e-3\nbetas: [0, 0.99]\n"
    config = read(tmp_path, text + "max_grad_norm: null\npeft: {r: 8, target_modules: [q_proj]}\n")
    options = config.make(SftOptions)
    assert options.data == (tmp_path / "a.jsonl",)
    assert options.learning_rate == 0.001  # which YAML 1.1 reads as a text
    assert config.values["betas"] == (0.0, 0.99)
    assert options.max_grad_norm is None
    output = config.make(OutputOptions)
    assert output.output == tmp_path / "out"
    assert output.peft == {"r": 8, "target_modules": ["q_proj"]}


def test_a_chat_template_is_a_path_or_a_text(tmp_path: Path) -> None:
    (tmp_path / "chat.jinja").write_text("of the file")
    text = "model: m\noutput: out\ndata: a.jsonl\nchat_template_kwargs: {enable_thinking: false}\n"
    for written, source in (
        ("chat.jinja", "of the file"),
        ("'{{ bos_token }}'", "{{ bos_token }}"),
    ):
        config = read(tmp_path, f"{text}chat_template: {written}\n")
        template = config.make(SftOptions).template()
        assert template is not None
        assert template.sources == {"default": source}
        assert config.values["chat_template_kwargs"] == {"enable_thinking": False}


OWN = "{% for m in messages %}{{ m.role }} says {{ m.content }}.\n{% endfor %}"
CHATS = [
    {
        "prompt": [{"role": "user", "content": f"what is {i}?"}],
        "completion": [{"role": "assistant", "content": f"it is {i}"}],
    }
    for i in range(4)
]


@pytest.mark.parametrize("method", ["sft", "dpo", "kto", "grpo"])
def test_an_adapter_keeps_the_template_that_rendered_its_chats(tmp_path: Path, method: str) -> None:
    """In memory, in its folder as transformers reads it, and in runs that go on from there."""
    executor: Any = compiled.executor(text_model.save_text_model(tmp_path / "model"), None)

    def trained(**options: Any) -> Any:
        for name in executor.adapters:
            executor.remove_adapter(name)
        if method == "grpo":
            more = {"num_generations": 2, "batch_size": 4, "max_completion_length": 2}
            template = {"chat_template": options.pop("chat_template", None)}
            settings = GrpoOptions(**more, **template, max_steps=1)  # type: ignore[arg-type]
            rows = [{"prompt": row["prompt"]} for row in CHATS]
            prompts = read_prompts(rows, executor.tokenizer, with_own_template(
                settings, executor.state, "a", options["peft"]
            ))  # fmt: skip
            train_grpo(executor, rows, lambda prompts, **_: [0.0] * len(prompts), settings,
                       adapter="a", **options)  # fmt: skip
            return sum(len(prompt.ids) for prompt in prompts)
        options |= {"adapter": "a", "max_steps": 1, "batch_size": 4, "progress": False}
        if method == "sft":
            return executor.finetune(CHATS, **options).tokens
        if method == "kto":
            rows = [{**row, "label": True} for row in CHATS]
            return kto(executor, KtoArguments(rows, **options)).tokens
        other = [{"role": "assistant", "content": "no"}]
        pairs = [
            {"prompt": row["prompt"], "chosen": row["completion"], "rejected": other}
            for row in CHATS
        ]
        return dpo(executor, DpoArguments(pairs, **options)).tokens

    plain = trained(peft=PEFT)
    assert executor.adapters["a"].chat_template is None
    tokens = trained(peft=PEFT, chat_template=OWN)
    assert tokens != plain
    assert executor.adapters["a"].chat_template == OWN
    executor.save_adapter("a", tmp_path / "saved")
    shown = AutoTokenizer.from_pretrained(tmp_path / "saved").apply_chat_template(
        CHATS[0]["prompt"], tokenize=False
    )
    assert shown == "user says what is 0?.\n"
    assert trained(peft=str(tmp_path / "saved")) == tokens
    assert executor.adapters["a"].chat_template == OWN
    if method == "sft":  # whose losses are those of `evaluate`, of each with its own
        both, own, base = (
            evaluate(executor, CHATS, **more)
            for more in ({}, {"adapters": ["a"], "chat_template": OWN}, {"adapters": [None]})
        )
        assert both == [*base, *own]
        assert base[0].tokens != own[0].tokens


def test_a_start_is_a_path_near_the_file_or_a_hub_id(tmp_path: Path) -> None:
    (tmp_path / "mine").mkdir()
    for name, start in (("mine", str(tmp_path / "mine")), ("owner/adapter", "owner/adapter")):
        config = read(tmp_path, f"model: m\noutput: out\ndata: a.jsonl\nstart_from: {name}\n")
        assert OutputOptions.of(config).start_from == start


def test_data_are_near_the_file_or_hub_ids_and_evaluations_have_names(tmp_path: Path) -> None:
    (tmp_path / "own").mkdir()
    (tmp_path / "own" / "rows").mkdir()
    text = "model: m\noutput: out/new\ndata: [own/rows, owner/rows, 'x/*.jsonl', x/a.csv]\n"
    for named in ("'a=x.jsonl, b=owner/rows'", "{a: x.jsonl, b: [owner/rows]}"):
        values = read(tmp_path, f"{text}eval_data: {named}\n").values
        assert values["output"] == tmp_path / "out" / "new"
        own = [tmp_path / name for name in ("own/rows", "x/*.jsonl", "x/a.csv")]
        assert values["data"] == (own[0], Path("owner/rows"), *own[1:])
        assert values["eval_data"] == {"a": (tmp_path / "x.jsonl",), "b": (Path("owner/rows"),)}
    with pytest.raises(DataError, match="eval_data has the name 'a' twice"):
        read(tmp_path, f"{text}eval_data: a=x.jsonl,a=y.jsonl\n")


def test_settings_take_the_place_of_values(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    text = "model: m\noutput: out\ndata: a.jsonl\npeft: {r: 8, lora_alpha: 16}\n"
    config = read(
        tmp_path, text, "peft.r=4", "learning_rate=1e-4", "output=other", "data=[b.txt, c.txt]"
    )
    assert config.values["peft"] == {"r": 4, "lora_alpha": 16}
    assert config.values["learning_rate"] == 1e-4
    assert config.values["output"] == Path("other")  # of the working directory, as in a shell
    assert config.values["data"] == (Path("b.txt"), Path("c.txt"))


@pytest.mark.parametrize(
    ("text", "settings", "message"),
    [
        ("learning_rat: 1", (), "unknown option 'learning_rat', did you mean 'learning_rate'"),
        ("model: m", ("ouput=x",), r"--set ouput=x: unknown option 'ouput', did you mean 'output'"),
        ("learning_rate: fast", (), r"learning_rate='fast'; use a number"),
        ("formatting_func: f", (), "it is a function, for executor.finetune in Python"),
        ("batch_size: 2.5", (), r"batch_size=2\.5; use a whole number or null"),
        ("shuffle: 1", (), "shuffle=1; use true or false"),
        ("betas: [0.9]", (), r"betas=\[0\.9\]; use a list of 2 values or null"),
        ("empty: skip", (), "empty='skip'; use error or drop"),
        ("seed: 1\nseed: 2", (), r"line 2 is not YAML: 'seed' is given twice"),
        ("peft: {r: 1, r: 2}", (), "'r' is given twice"),
        ("- 1", (), "has to be an object"),
        ("", (), "has to be an object"),
        ("a: [1", (), "is not YAML"),
        ("a: !!python/object/apply:os.system ['true']", (), "is not YAML: could not determine"),
        ("model: m", ("seed",), "--set seed; use key=value"),
        ("model: m", ("seed.x=3",), "seed="),
    ],
)
def test_refused_by_name(
    tmp_path: Path, text: str, settings: tuple[str, ...], message: str
) -> None:
    with pytest.raises(FinetuneError, match=message):
        read(tmp_path, text, *settings)


def test_a_field_that_is_missing(tmp_path: Path) -> None:
    with pytest.raises(FinetuneError, match=r"sft\.yaml has no 'data'; give it a value"):
        read(tmp_path, "model: m\noutput: out\n").make(SftOptions)


# -------------------------------------------------------------------------------------------- doors

PEFT = {"peft_type": "LORA", "r": 4, "lora_alpha": 32, "target_modules": "all-linear"}
"""What Tinker's protocol makes of a rank without the head."""
WEIGHTS = "adapter_model.safetensors"
EPOCHS, BATCH, RATE, SEED = 2, 2, 0.01, 7
STEPS = EPOCHS * len(ROWS) // BATCH


def batches(executor: Executor) -> list[list[Example]]:
    """The examples of each step, in the order of a seed."""
    data = training_data(ROWS, FinetuneOptions(), executor.state)
    order = Batches(data.examples, batch_size=BATCH, seed=SEED)
    return [batch for _ in range(EPOCHS) for batch in order]


def rates() -> list[float]:
    schedule = make_schedule("linear", total_steps=STEPS)
    return [RATE * schedule(step) for step in range(STEPS)]


def by_library(executor: Executor, path: Path) -> None:
    options = {"epochs": EPOCHS, "batch_size": BATCH, "learning_rate": RATE, "seed": SEED}
    executor.finetune(ROWS, "library", peft=PEFT, progress=False, **options)
    executor.save_adapter("library", path)


def by_trainer(executor: Executor, path: Path) -> None:
    with executor.trainer("trainer", peft=PEFT, seed=SEED) as trainer:
        for batch, rate in zip(batches(executor), rates(), strict=True):
            share = 1 / sum(example.targets for example in batch)
            data = [
                pcg.Datum(
                    list(one.ids[:-1]), list(one.labels[1:]), weights=[share] * (len(one.ids) - 1)
                )
                for one in batch
            ]
            trainer.forward_backward(data)
            trainer.optim_step(learning_rate=rate, grad_clip_norm=1.0)
        trainer.snapshot()
    executor.save_adapter("trainer", path)


def by_peft(executor: Executor, path: Path) -> None:
    executor.add_adapter("start", PEFT, seed=SEED)
    executor.save_adapter("start", path.with_name("start"))
    wrapped = peft_model.with_adapter(serving.model_directory(), path.with_name("start"))
    parameters = [one for one in wrapped.parameters() if one.requires_grad]
    optimizer = torch.optim.AdamW(parameters, weight_decay=0.0)
    for batch, rate in zip(batches(executor), rates(), strict=True):
        optimizer.zero_grad()
        for one in batch:
            logits = wrapped(torch.tensor([list(one.ids)]), use_cache=False).logits[0, :-1]
            labels = torch.tensor(list(one.labels)[1:])
            loss = cross_entropy(logits, labels, ignore_index=-100, reduction="sum")
            (loss / sum(example.targets for example in batch)).backward()
        torch.nn.utils.clip_grad_norm_(parameters, 1.0)
        optimizer.param_groups[0]["lr"] = rate
        optimizer.step()
    wrapped.save_pretrained(path, save_embedding_layers=False)


def by_job(server: serving.Served, path: Path) -> None:
    """A job of OpenAI's API; its adapter stands in the folder of the server's data."""
    with client_of(server.url) as client:
        own = {"extra_body": {"pcg": {"peft": PEFT, "learning_rate": RATE}}}
        job = ended(client, begin(client, EPOCHS, seed=SEED, **own).id)
    assert job.status == "succeeded", job.error
    path.symlink_to(server.service.part(Files).store.folder / "jobs" / job.id / "model")


def by_tinker(executor: Executor, server: serving.Served, path: Path) -> None:
    """The real client of Tinker's protocol."""
    adam = {"beta1": 0.9, "beta2": 0.999, "eps": 1e-8, "weight_decay": 0.0, "grad_clip_norm": 1.0}
    with tinker_client.client(server.url) as client:
        lora = {"rank": PEFT["r"], "seed": SEED, "train_unembed": False}
        model = client.create_lora_training_client(serving.MODEL, **lora).result()
        for batch, rate in zip(batches(executor), rates(), strict=True):
            share = 1 / sum(example.targets for example in batch)
            data = []
            for one in batch:
                labels = list(one.labels[1:])
                inputs = {
                    "target_tokens": [max(label, 0) for label in labels],
                    "weights": [share if label >= 0 else 0.0 for label in labels],
                }
                tokens = types.ModelInput.from_ints(list(one.ids[:-1]))
                data.append(types.Datum(model_input=tokens, loss_fn_inputs=inputs))
            model.forward_backward(data, "cross_entropy")
            model.optim_step(types.AdamParams(learning_rate=rate, **adam)).result()
        saved = model.save_weights_for_sampler("end").result()
    path.symlink_to(tinker_client.folder_of(server, saved.path))


@pytest.mark.slow
def test_every_door_ends_in_the_same_adapter(tmp_path: Path) -> None:
    executor = serving.make_executor(adapters=0)
    by_library(executor, tmp_path / "library")
    by_trainer(executor, tmp_path / "trainer")
    by_peft(executor, tmp_path / "peft")
    make = partial(serving.make_executor, adapters=0)
    keys = {"api_key": (serving.KEY, tinker_client.KEY), "kv_cache_gib": 0.1}
    with serving.on_a_port(make, data_dir=tmp_path / "data", **keys) as server:
        by_job(server, tmp_path / "job")
        by_tinker(executor, server, tmp_path / "tinker")

    def tensors(name: str) -> dict[str, Tensor]:
        found: dict[str, Tensor] = load_file(tmp_path / name / WEIGHTS)
        return found

    expected, start = tensors("peft"), tensors("start")
    assert any((tensor - start[name]).abs().max() > 1e-2 for name, tensor in expected.items())
    for door in ("library", "trainer", "job", "tinker"):
        found = tensors(door)
        assert found.keys() == expected.keys()
        for name, tensor in found.items():
            torch.testing.assert_close(
                tensor, expected[name], rtol=0, atol=1e-5, msg=lambda m, d=door: f"{d}: {m}"
            )
