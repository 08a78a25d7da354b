"""`pcg run`: what it prints, and bad models, programs, adapters and prompts."""

import json
import shutil

import pytest
from safetensors.torch import load_file, save_file

import pcg.compiler as compiler
from tests.support.command_line import assert_one_error, output_of, run

PROMPT = "def add(a, b):"


def test_run_a_program_and_a_model(program, model):
    options = ("--prompt", PROMPT, "--max-new-tokens", "8")
    text = output_of("run", program, *options)
    assert text.startswith(PROMPT)
    assert text == output_of("run", model, *options)


def test_a_model_is_compiled_once(model, adapter, tmp_path, monkeypatch):
    monkeypatch.setattr(compiler, "cache_folder", lambda name: tmp_path / name)
    compiled = []
    work = compiler._compiled
    monkeypatch.setattr(
        compiler, "_compiled", lambda *args, **more: compiled.append(args) or work(*args, **more)
    )
    options = ("run", model, "-p", PROMPT, "-n", "4", "--ignore-eos")
    first = output_of(*options)
    assert output_of(*options) == first
    assert len(compiled) == 1
    adapted = output_of(*options, "--adapter", f"loud={adapter}")
    assert output_of(*options, "--adapter", f"loud={adapter}") == adapted != first
    assert output_of(*options, "--dtype", "float64") != ""
    assert len(compiled) == 3
    monkeypatch.setattr(compiler, "MOST_CACHED", 1)
    for folder in (tmp_path / "programs").iterdir():
        (folder / "manifest.json").write_text("damaged")
    assert output_of(*options) == first
    assert len(compiled) == 4
    assert len(list((tmp_path / "programs").iterdir())) == 1


def test_run_prints_one_object(program, adapter, tmp_path):
    (tmp_path / "prompt.txt").write_text("line one\nline two\n")
    text = output_of(
        *("run", program, "-p", PROMPT, "--prompt-file", tmp_path / "prompt.txt"),
        *("--prompt-file", "-", "--adapter", f"loud={adapter}"),
        *("--use", "loud", "--use", "base", "--use", "loud"),
        *("--max-new-tokens", "6", "--ignore-eos", "--json"),
        input=PROMPT,
    )
    result = json.loads(text)
    one, two, three = result["completions"]
    assert [c["adapter"] for c in (one, two, three)] == ["loud", None, "loud"]
    assert two["prompt"] == "line one\nline two\n"
    assert one["token_ids"] == three["token_ids"]
    assert {c["finish_reason"] for c in result["completions"]} == {"length"}
    assert result["tokens"] == 18
    base = json.loads(output_of("run", program, "-p", PROMPT, "-n", "6", "--ignore-eos", "--json"))
    assert base["completions"][0]["token_ids"] != one["token_ids"]


def test_run_uses_its_only_adapter(program, adapter):
    options = ("-p", PROMPT, "-n", "4", "--json")
    result = json.loads(output_of("run", program, "--adapter", f"loud={adapter}", *options))
    assert result["completions"][0]["adapter"] == "loud"


def test_run_streams_several_prompts_in_order(program):
    options = ("-p", PROMPT, "-p", "The quick", "-n", "6", "--seed", "3", "--temperature", "1")
    lines = output_of("run", program, *options).splitlines()
    assert [line for line in lines if line.startswith("── ")] == [
        "── 1 · base ──",
        "── 2 · base ──",
    ]


def test_run_prints_several_continuations_and_logprobs(program):
    options = ("-p", PROMPT, "-p", "The quick", "-n", "4", "--ignore-eos", "--seed", "3")
    drawn = (*options, "--temperature", "1", "--n", "2")
    found = json.loads(output_of("run", program, *drawn, "--json", "--logprobs", "1", "--echo"))
    done = found["completions"]
    assert [(one["prompt"], one["index"]) for one in done] == [
        *((PROMPT, 0), (PROMPT, 1)),
        *(("The quick", 0), ("The quick", 1)),
    ]
    for one in done:
        assert one["text"].startswith(one["prompt"])
        assert [token["token_id"] for token in one["logprobs"]] == one["token_ids"]
        assert one["prompt_logprobs"][0] is None
        assert len(one["prompt_logprobs"]) == one["prompt_tokens"]
    cut = ("--logprobs-mode", "processed_logprobs", "--logprobs", "3", "--top-k", "2")
    printed = output_of("run", program, *drawn, "--json", *cut)
    assert "Infinity" not in printed
    places = [place for one in json.loads(printed)["completions"] for place in one["logprobs"]]
    assert all(place["top"][2][1] is None and place["top"][1][1] < 0 for place in places)
    printed = output_of("run", program, *drawn)
    assert printed == output_of("run", program, *drawn, "--echo")
    assert all(one["text"] in printed for one in done)


def test_run_applies_the_chat_template(program):
    options = ("-p", "what is it?", "-n", "2", "--json")
    plain, chat = (
        json.loads(output_of("run", program, *options, *more))["completions"][0]["prompt_tokens"]
        for more in ((), ("--chat",))
    )
    assert chat > plain


@pytest.mark.parametrize(
    ("args", "message"),
    [
        ((), "give a prompt"),
        (("-p", "x", "--adapter", "loud"), "use NAME=PATH"),
        (("-p", "x", "--adapter", "a=x", "--adapter", "a=y"), "a is given twice"),
        (("-p", "x", "--adapter", "a=x", "--adapter", "b=y"), "say which of a, b to use"),
        (("-p", "x", "--use", "mine"), "no adapter is called 'mine'; there are: base"),
        (("-p", "x", "--use", "base", "--use", "base"), "given 2 times for 1 prompt"),
        (("--prompt-file", "nothing.txt"), "No such file"),
        (("-p", "x", "--logprobs", "1"), "--json alone prints them"),
        (("-p", "x", "--dtype", "float32"), "chosen by pcg compile"),
        (("-p", "x", "--backend", "torch"), "backend is chosen by pcg compile"),
    ],
)
def test_run_usage(program, args, message):
    result = run("run", program, *args)
    assert result.exit_code == 2
    assert message in " ".join(result.stderr.replace("│", " ").split())
    assert result.stdout == ""


def test_run_takes_options_of_programs_for_programs_alone(model):
    for option in (("--weights", "x"), ("--trust-edits",)):
        result = run("run", model, "-p", "x", *option)
        assert result.exit_code == 2
        assert "is not a compiled program" in " ".join(result.stderr.replace("│", " ").split())


@pytest.mark.parametrize(
    ("config", "message"),
    [
        (None, "has no config.json; give a Hugging Face model directory"),
        ({"model_type": "nonesuch"}, "'nonesuch'"),
    ],
)
def test_bad_models(model, tmp_path, config, message):
    bad = shutil.copytree(model, tmp_path / "bad")
    (bad / "config.json").unlink()
    if config is not None:
        (bad / "config.json").write_text(json.dumps(config))
    assert_one_error(run("run", bad, "-p", "x"), message)


def for_another_base(adapter, directory):
    other = shutil.copytree(adapter, directory / "other")
    weights = other / "adapter_model.safetensors"
    tensors = load_file(weights)
    wide = {name: t.repeat(1, 2) if "lora_A" in name else t for name, t in tensors.items()}
    save_file(wide, weights)
    (other / "SHA256SUMS").unlink()
    return other


def test_bad_adapters(program, adapter, tmp_path):
    for path, message in (
        (tmp_path / "nothing", "is not there; give the directory of a saved adapter"),
        (for_another_base(adapter, tmp_path), "model.layers.0.mlp.down_proj"),
    ):
        assert_one_error(run("run", program, "-p", "x", "--adapter", f"a={path}"), message)


@pytest.mark.parametrize(
    ("prompt", "message"),
    [("", "prompt 0 is empty"), ("fox " * 400, "the model has 256 positions")],
)
def test_bad_prompts(program, prompt, message):
    assert_one_error(run("run", program, "-p", prompt), message)
    assert_one_error(run("run", program, "-p", prompt), message)


def test_bad_sampling(program):
    assert_one_error(run("run", program, "-p", "x", "--top-p", "1.5"), "--top-p=1.5")


def test_bad_programs(program, tmp_path):
    bad = shutil.copytree(program, tmp_path / "bad")
    (bad / "serving.py").write_text((bad / "serving.py").read_text() + "# mine\n")
    assert_one_error(run("run", bad, "-p", "x"), "accept it: --trust-edits")
    assert output_of("run", bad, "-p", "x", "-n", "1", "--trust-edits")
    (bad / "plan.json").unlink()
    assert_one_error(run("run", bad, "-p", "x", "--trust-edits"), "plan.json is missing")


def test_labels_are_printed_and_options_of_text_are_refused(model):
    options = ("run", model, "-p", PROMPT, "--labels", "text", "--labels", "code")
    (row,) = json.loads(output_of(*options, "--json"))["classifications"]
    assert row["labels"].keys() == {"text", "code"}
    assert sum(row["labels"].values()) == pytest.approx(1)
    assert_one_error(run(*options, "--chat", "-n", "4"), "--max-new-tokens, --chat")
