"""Commands whose model is at a base executor, by split://HOST:PORT."""

import json

import pytest

from pcg.split.base.base_executor import tokenizer_files
from tests.support import serving
from tests.support.command_line import assert_one_error, output_of, run
from tests.support.split_base import KEY, listening_base

pytest.importorskip("zmq")


@pytest.fixture(scope="module")
def where():
    files = tokenizer_files(serving.model_directory())
    with listening_base(serving.make_executor(adapters=0), files) as where:
        yield f"split://{where}"


@pytest.fixture(autouse=True)
def key(monkeypatch):
    monkeypatch.setenv("PCG_API_KEY", KEY)


def test_run_and_finetune_by_a_base(where, tmp_path):
    data = tmp_path / "rows.jsonl"
    data.write_text("\n".join(json.dumps({"text": text}) for text in ("a b c d e", "d e a")))
    job = ("--data", data, "--adapter", "x", "--peft", "lora", "--max-steps", "2", "--seed", "3")
    for name, model in (("here", serving.model_directory()), ("there", where)):
        output_of("finetune", model, *job, "-o", tmp_path / name)
    options = ("-p", "a b", "-n", "8", "--ignore-eos", "--json")
    found = [
        json.loads(output_of("run", model, "--adapter", f"x={tmp_path / name}", *options))
        for name, model in (("here", serving.model_directory()), ("there", where))
    ]
    ids = [one["completions"][0]["token_ids"] for one in found]
    assert len(ids[0]) == 8
    assert ids[0] == ids[1]


def test_what_a_client_does_not_have_is_refused(where, monkeypatch):
    for options, message in (
        (("--backend", "triton"), "a client of a base executor has no backend"),
        (("--tp", "2"), "runs on one rank"),
        (("--weights", "here"), "is not a compiled program"),
    ):
        refused = run("run", where, "-p", "a", *options)
        assert refused.exit_code == 2
        assert message in " ".join(refused.stderr.replace("│", " ").split())
    refused = run("run", f"{where}?colour=red", "-p", "a")
    assert refused.exit_code == 2
    assert "has no colour" in " ".join(refused.stderr.replace("│", " ").split())
    for behind, message in (
        ("?transport=tcp&transport=auto", "given twice"),
        ("?transport=", "is no option of a connection"),
        ("?plaintext=yes", "use true or false"),
    ):
        refused = run("run", f"{where}{behind}", "-p", "a")
        assert refused.exit_code == 2
        assert message in " ".join(refused.stderr.replace("│", " ").split())
    for address in ("split://", "split://[::1", f"{where}/path", f"{where}#part"):
        assert_one_error(run("run", address, "-p", "a"), "is no address of a base executor")
    missing = run("run", f"{where}/?program=a+b%26%23", "-p", "a")
    assert_one_error(missing, "a+b&#")
    monkeypatch.setenv("PCG_API_KEY", "another-key")
    assert_one_error(run("run", where, "-p", "a"), "the key is none of this base's")


def test_a_base_of_a_base_is_refused(where):
    for arguments, message in (
        (("serve", where, "--split-port", "0"), "split clients connect there"),
        (("serve-base", where), "is a base executor already"),
    ):
        refused = run(*arguments)
        assert refused.exit_code == 2
        assert message in " ".join(refused.stderr.replace("│", " ").split())


def test_the_program_of_a_client_is_compiled_and_run(where, tmp_path):
    output_of("compile", where, "--peft", "lora", "-o", tmp_path / "program")
    options = ("-p", "a b", "-n", "4", "--ignore-eos", "--json")
    found = [
        json.loads(output_of("run", model, *options))["completions"][0]["token_ids"]
        for model in (where, f"{where}?program={tmp_path / 'program'}")
    ]
    assert len(found[0]) == 4
    assert found[0] == found[1]
    refused = run("compile", where, "--print-after", "fold")
    assert refused.exit_code == 2
    assert "to a folder alone" in " ".join(refused.stderr.replace("│", " ").split())
