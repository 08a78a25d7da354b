"""Configuration files: what a key may be, where its paths begin, and what is refused."""

from __future__ import annotations

from pathlib import Path

import pytest

from pcg.errors import FinetuneError
from pcg.train.config_file import ConfigFile, OutputOptions, read_config
from pcg.train.sft import SFT_KEYS, SftOptions


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
