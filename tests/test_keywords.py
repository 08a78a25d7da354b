"""Functions that take a dataclass's fields as keywords."""

from __future__ import annotations

import ast
import dataclasses
import inspect
import re
from collections.abc import Iterator
from dataclasses import dataclass, field
from pathlib import Path

import pytest

import pcg
from pcg.errors import FinetuneError, UnsupportedError
from pcg.keywords import NAMES, check_names, field_docs, takes
from pcg.options import CompileOptions
from pcg.peft.lora import LoraConfig
from pcg.runtime.sampling.sampling_params import SamplingFields, SamplingParams
from pcg.runtime.training.options import FinetuneArguments
from pcg.serve.engine.options import ServeOptions
from pcg.train.grpo.options import GrpoOptions
from pcg.train.grpo.train import GRPO_KEYS
from pcg.train.sft import SFT_KEYS

ROOT = Path(__file__).parents[1]


@dataclass(frozen=True, kw_only=True)
class Options:
    """Options.

    Attributes:
        width: width of the page,
            in characters.
        first, last: pages to print.
    """

    width: int = 80
    first: int | None = None
    last: int | None = None


@dataclass(frozen=True)
class Arguments(Options):
    """Arguments.

    Attributes:
        path: the file.
        width: width of the paper.
    """

    path: str
    copies: int = field(default=1, kw_only=True)


@takes(Arguments, FinetuneError)
def show(given: Arguments) -> tuple[str, int]:
    """Print a file.

    Returns:
        Its path, and the width.
    """
    return given.path, given.width


class Printer:
    @takes(Options)
    def set(self, given: Options) -> tuple[Printer, Options]:
        """Set the printer up."""
        return self, given


def test_fields_are_parameters() -> None:
    assert show("a") == show(path="a") == ("a", 80)
    assert show("a", width=60) == ("a", 60)
    printer = Printer()
    assert printer.set(last=3) == (printer, Options(last=3))
    names = ["path", "width", "first", "last", "copies"]
    assert list(inspect.signature(show).parameters) == names
    assert list(inspect.signature(printer.set).parameters) == names[1:4]


def test_fields_are_documented_with_the_function() -> None:
    assert field_docs(Options)["width"] == "width of the page, in characters."
    assert show.__doc__ == (
        "Print a file.\n\nArgs:\n    path: the file.\n    width: width of the paper.\n"
        "    first: pages to print.\n    last: pages to print.\n"
        "Returns:\n    Its path, and the width.\n"
    )


def test_a_wrong_name_is_refused_with_the_closest() -> None:
    with pytest.raises(FinetuneError, match=r"unknown option 'widht', did you mean 'width'\?"):
        show("a", widht=3)  # type: ignore[call-arg]
    with pytest.raises(UnsupportedError, match=r"'dtpye', did you mean 'dtype'\?"):
        pcg.compile("model", dtpye="float32")  # type: ignore[call-arg]
    with pytest.raises(TypeError, match="missing a required argument: 'path'"):
        show()  # type: ignore[call-arg]


@pytest.mark.parametrize(
    ("name", "known", "hint"),
    [
        ("lr", FinetuneArguments, "the name here is 'learning_rate'"),
        ("num_train_epochs", FinetuneArguments, "the name here is 'epochs'"),
        ("per_device_train_batch_size", FinetuneArguments, "the name here is 'batch_size'"),
        ("lr_scheduler_type", FinetuneArguments, "the name here is 'schedule'"),
        ("schedule", GrpoOptions, "the name here is 'lr_scheduler_type'"),
        ("eval_steps", FinetuneArguments, "the name here is 'eval_every'"),
        ("lora_r", FinetuneArguments, 'give peft a recipe, such as {"peft_type": "LORA"'),
        ("max_tokens", SamplingParams, "the name here is 'max_new_tokens'"),
        ("max_tokens", GrpoOptions, "the name here is 'max_completion_length'"),
        ("load_in_4bit", CompileOptions, "give quantization nf4"),
        ("tensor_parallel_size", CompileOptions, "the name here is 'tp'"),
        ("torch_dtype", CompileOptions, "the name here is 'dtype'"),
    ],
)
def test_names_of_other_libraries_lead_to_ours(name: str, known: type, hint: str) -> None:
    with pytest.raises(UnsupportedError, match=f"unknown option '{name}'; {re.escape(hint)}"):
        check_names([name], [field.name for field in dataclasses.fields(known)])


def test_our_names_are_options() -> None:
    owners = (*SFT_KEYS, *GRPO_KEYS, FinetuneArguments, SamplingParams, LoraConfig, ServeOptions)
    ours = {field.name for owner in owners for field in dataclasses.fields(owner)}
    ours |= inspect.signature(pcg.compile).parameters.keys()
    assert not NAMES.keys() - ours


def test_public_functions_document_each_of_their_options() -> None:
    for function in (pcg.compile, pcg.explain):
        for name in inspect.signature(function).parameters:
            assert f"\n    {name}: " in (function.__doc__ or ""), name


def test_sampling_fields_are_those_of_sampling_params() -> None:
    assert SamplingFields.__annotations__.keys() == SamplingParams.__dataclass_fields__.keys()


def test_no_public_function_takes_untyped_options() -> None:
    """Other keywords than an operator's attributes and a template's variables have types."""
    files = [*(ROOT / "pcg").rglob("*.py"), *(ROOT / "cli").rglob("*.py")]
    found = [
        f"{path.relative_to(ROOT)}: {function.name}"
        for path in sorted(files)
        for function in public_functions(ast.parse(path.read_text("utf-8")))
        if function.args.kwarg is not None
        and function.args.kwarg.arg not in ("attributes", "variables")
        and ast.unparse(function.args.kwarg.annotation or ast.Name("Any")) == "Any"
    ]
    collectives = "pcg/kernels/torch/collectives.py"  # whose wrapper takes what each of them takes
    assert [name for name in found if not name.startswith(collectives)] == []


def public_functions(tree: ast.AST) -> Iterator[ast.FunctionDef | ast.AsyncFunctionDef]:
    """The public functions of a module and of its public classes."""
    for node in ast.iter_child_nodes(tree):
        kinds = ast.ClassDef | ast.FunctionDef | ast.AsyncFunctionDef
        if not isinstance(node, kinds) or node.name.startswith("_"):
            continue
        if isinstance(node, ast.ClassDef):
            yield from public_functions(node)
        else:
            yield node
