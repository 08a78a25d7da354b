"""`pcg explain`, and the options of methods."""

import dataclasses
import json
import re

import pytest

from cli.options.fields import flags_of, kind_of
from cli.options.method import ALIASES, Method
from pcg.explain import explain as explaining
from pcg.explain import explain_split as splitting
from pcg.ir.program.folder import load_program
from pcg.peft.lora import LoraConfig
from pcg.peft.registry import SHORTHANDS
from tests.support.command_line import assert_one_error, output_of, run


class FakeReport:
    def to_text(self, tensors=False, formulas=False):
        return f"the text, {tensors=}"

    def to_json(self):
        return {"model": "tiny"}


def test_explain_passes_its_options_on(model, monkeypatch):
    calls = []

    def explain(*args, **options):
        calls.append((args, options))
        return FakeReport()

    monkeypatch.setattr(explaining, "explain", explain)
    assert output_of("explain", model) == "the text, tensors=False\n"
    assert calls.pop()[0] == (str(model), "lora")
    options = ["--rank", "4", "--targets", "q_proj", "--tp", "2", "--batch", "3", "--seq", "64"]
    options += ["--memory-budget", "8GiB", "--dtype", "float16", "--gpu", "L4"]
    options += ["--optimizer", "rprop", "--optimizer-option", "etas=[0.5, 1.1]"]
    text = output_of("explain", model, *options, "--json")
    assert json.loads(text) == {"model": "tiny"}
    ((_, recipe), sizes) = calls.pop()
    assert recipe == LoraConfig(r=4, lora_alpha=8, target_modules=("q_proj",))
    assert sizes == {
        "tp": 2, "batch": 3, "seq": 64, "dtype": "float16", "memory_budget": "8GiB",
        "gpus": ("L4",), "optimizer": "rprop", "optimizer_options": {"etas": [0.5, 1.1]},
    }  # fmt: skip
    output_of("explain", model, "--peers")
    assert calls.pop()[1]["peers"] is True
    assert output_of("explain", model, "--peft", "none", "--tensors") == "the text, tensors=True\n"
    assert calls.pop()[0][1] is None


def test_sequence_parallelism_takes_ranks(model, program, tmp_path):
    refused = run("explain", model, "--sequence-parallel")
    assert_one_error(refused, "--tp=1 is one rank; use --tp=2 or more")
    report = json.loads(output_of("explain", model, "--tp", "2", "--sequence-parallel", "--json"))
    assert report["parallel"]["sequence_parallel"] is True
    folder = tmp_path / "program"
    run("compile", model, "--tp", "2", "--sequence-parallel", "-o", folder)
    assert load_program(folder).options.sequence_parallel
    other = run("run", program, "--sequence-parallel", "--prompt", "hello")
    assert other.exit_code == 2
    assert "--sequence-parallel" in other.stderr


def test_explain_a_model_that_ships():
    report = json.loads(output_of("explain", "llama-3.2-1b", "--seq", "64", "--json"))
    assert report["model"] == "meta-llama/Llama-3.2-1B"
    assert report["parameters"]["base"] == 1_235_814_400
    assert_one_error(run("explain", "llama-3.2-1b", "--targets", "q_porj"), "did you mean q_proj")


def test_finetune_takes_every_field_of_every_method():
    """Each field's option is there, and a method refuses those that it does not have."""
    options = {option.name for option in Method.options()}
    for word, recipe in SHORTHANDS.items():
        names = {field.name for field in dataclasses.fields(recipe)}
        assert names <= options
        other = next(name for name in sorted(options - names) if name not in ("peft", *ALIASES))
        refused = run("explain", "llama-3.2-1b", "--peft", word, *as_given(other))
        assert refused.exit_code == 2
        message = " ".join(refused.stderr.replace("│", " ").split())
        assert f"--peft {word} does not have it; it has" in message
        assert flags_of(other)[0] in message


def as_given(name):
    """An option with a value, if it takes one."""
    (option,) = (option for option in Method.options() if option.name == name)
    kind = kind_of(option.hint)
    value = "a=1" if "=" in (kind.metavar or "") else "1"
    return flags_of(name)[:1] if kind.is_flag else (flags_of(name)[0], value)


@pytest.mark.parametrize(
    ("options", "expected"),
    [
        ("--peft dora --r 8", {"r": 8, "lora_alpha": 16, "use_dora": True}),
        ("--peft dora --dropout 0.1", {"r": 16, "lora_alpha": 32, "lora_dropout": 0.1}),
        ("--rank 8 --alpha 8", {"r": 8, "lora_alpha": 8, "use_dora": False}),
        (
            "--rank-pattern q_proj=4 --use-rslora",
            {"rank_pattern": {"q_proj": 4}, "use_rslora": True},
        ),
        ("--init-lora-weights false", {"init_lora_weights": False}),
        ("--init-lora-weights gaussian", {"init_lora_weights": "gaussian"}),
        ("--targets q_proj,v_proj", {"target_modules": ("q_proj", "v_proj")}),
        ("--target-parameters a.b,c", {"target_parameters": ("a.b", "c")}),
        ("--targets .*_proj", {"target_modules": ".*_proj"}),
        ("--targets q_proj --layers-to-transform 0,1", {"layers_to_transform": (0, 1)}),
        ("--peft vera --no-save-projection", {"save_projection": False}),
        ("--peft prefix --num-virtual-tokens 3", {"num_virtual_tokens": 3}),
        ("--peft pfeiffer --bottleneck-size 8", {"variant": "pfeiffer", "bottleneck_size": 8}),
    ],
)
def test_fields_of_methods(model, monkeypatch, options, expected):
    recipes = []

    def explain(model, peft):
        recipes.append(peft)
        return FakeReport()

    monkeypatch.setattr(explaining, "explain", explain)
    output_of("explain", model, *options.split())
    found = dataclasses.asdict(recipes[0])
    assert {name: found[name] for name in expected} == expected


def test_a_cut_is_shown_instead_of_memory(model, monkeypatch):
    calls = []

    def explain_split(*args, **options):
        calls.append((args, options))
        return FakeReport()

    monkeypatch.setattr(splitting, "explain_split", explain_split)
    assert output_of("explain", model, "--split") == "the text, tensors=False\n"
    assert calls.pop() == ((str(model), "lora"), {})
    options = ["--link", "5,2.5", "--client", "L40S", "--privacy", "--seq", "64"]
    assert json.loads(output_of("explain", model, "--split", "--json", *options)) == {
        "model": "tiny"
    }
    expected = {"link": "5,2.5", "client": "L40S", "privacy": True, "seq": 64}
    assert calls.pop() == ((str(model), "lora"), expected)


@pytest.mark.parametrize(
    ("options", "message"),
    [
        (["--link", "lan"], "--link: it has no effect without --split"),
        (["--split", "--tp", "2"], "--tp: it has no effect with --split"),
        (["--split", "--tensors"], "it goes with neither --tensors nor --compare"),
    ],
)
def test_options_of_a_cut_go_with_it_alone(model, options, message):
    result = run("explain", model, *options)
    assert result.exit_code == 2
    assert message.rpartition(": ")[2] in " ".join(result.stderr.split())


def test_methods_side_by_side_on_a_page(model, tmp_path):
    """The page's rows have the words of the text's lines."""
    page = tmp_path / "page.html"
    text = output_of("explain", model, "--compare", "lora,ia3", "--gpu", "H100", "--html", page)
    shown = page.read_text("utf-8")
    for name in ("lora", "ia3"):
        (line,) = (line for line in text.splitlines() if line.startswith(f"{name} "))
        cells = "".join(f'<td class="n">{cell}</td>' for cell in re.split(r" {2,}", line)[1:7])
        assert f'<th scope="row">{name}</th>{cells}' in shown
    (holds,) = (line for line in text.splitlines() if " holds " in line)
    assert f"<p>{holds}</p>" in shown
