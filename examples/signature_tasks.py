"""Four tasks on the signature of a Python function, whose answers a reader can check at a glance.

    def save_image(path, width=640, strict=True):

    docstring        \"\"\"Save the image.\"\"\"
    javascript   function saveImage(path, width = 640, strict = true) {
    typed        def save_image(path, width: int = 640, strict: bool = True):
    unittest     def test_save_image(self):

Signatures are drawn from lists of verbs, nouns and values; a model this small learns to copy and
join these words, and few others. A fifth of the functions' names, chosen by their SHA-256, is held
out: no adapter is trained on a name that it is evaluated on.
"""

import hashlib
import random
from collections.abc import Callable, Sequence
from dataclasses import dataclass

import pcg


def _words(text: str) -> tuple[str, ...]:
    return tuple(text.split())


HELD_OUT_PERCENT = 20
VERBS = _words("""add build check clear close compare convert copy count create decode delete encode
    extract find format get handle insert load make merge move open parse print process read
    register remove rename replace reset save search send set split start stop store update
    validate write""")
NOUNS = _words("""account address archive attribute buffer cache character client code column
    command connection database date directory email entry event field file folder graph header
    image index item key label line list message method module name node number object option order
    package page password path price record report request response result row server session
    socket string table task text title token tree user value version warning word""")
FLAGS = _words("atomic binary force lazy quiet recursive strict verbose")
NUMBERS = _words("count depth height level limit offset size start stop width")
VALUES = _words("0 1 2 3 4 5 8 10 12 16 20 24 32 48 50 64 80 100 128 200 256 300 500 512 640 800")
STRINGS = _words("encoding mode prefix suffix")
TEXTS = _words("ascii utf-8 r w rb wb rgb gray tmp old new a b")


@dataclass(frozen=True)
class Parameter:
    """One parameter of a function: its name, and its default as Python text, "" for none."""

    name: str
    default: str = ""


@dataclass(frozen=True)
class Signature:
    """A function's verb, noun and parameters."""

    verb: str
    noun: str
    parameters: tuple[Parameter, ...]

    @property
    def name(self) -> str:
        """The function's name in Python."""
        return f"{self.verb}_{self.noun}"

    @property
    def prompt(self) -> str:
        """The signature as a line of Python."""
        parts = (f"{p.name}={p.default}" if p.default else p.name for p in self.parameters)
        return f"def {self.name}({', '.join(parts)}):"

    @property
    def held_out(self) -> bool:
        """True if nothing may be trained on a function of this name."""
        digest = hashlib.sha256(self.name.encode()).digest()
        return int.from_bytes(digest[:8], "big") % 100 < HELD_OUT_PERCENT


def draw_signature(rng: random.Random) -> Signature:
    """Draw a signature with one positional parameter and up to two with defaults."""
    parameters = [Parameter(rng.choice(NOUNS))]
    for kind in rng.sample(("flag", "number", "string"), rng.choice((0, 1, 1, 2))):
        if kind == "flag":
            parameters.append(Parameter(rng.choice(FLAGS), rng.choice(("True", "False"))))
        elif kind == "number":
            parameters.append(Parameter(rng.choice(NUMBERS), rng.choice(VALUES)))
        else:
            parameters.append(Parameter(rng.choice(STRINGS), f'"{rng.choice(TEXTS)}"'))
    return Signature(rng.choice(VERBS), rng.choice(NOUNS), tuple(parameters))


def docstring(signature: Signature) -> str:
    """A docstring made of the function's name."""
    return f'    """{signature.verb.capitalize()} the {signature.noun}."""'


def javascript(signature: Signature) -> str:
    """The same signature in JavaScript, with names in camel case."""
    parts = (
        f"{p.name} = {p.default.replace('True', 'true').replace('False', 'false')}"
        if p.default
        else p.name
        for p in signature.parameters
    )
    name = signature.verb + signature.noun.capitalize()
    return f"function {name}({', '.join(parts)}) {{"


def typed(signature: Signature) -> str:
    """The same signature with the types of its defaults."""
    parts = (
        f"{p.name}: {_type_of(p.default)} = {p.default}" if p.default else p.name
        for p in signature.parameters
    )
    return f"def {signature.name}({', '.join(parts)}):"


def unittest(signature: Signature) -> str:
    """The first line of a test of the function."""
    return f"def test_{signature.name}(self):"


def _type_of(default: str) -> str:
    if default in ("True", "False"):
        return "bool"
    return "str" if default.startswith('"') else "int"


TASKS: dict[str, Callable[[Signature], str]] = {
    "docstring": docstring,
    "javascript": javascript,
    "typed": typed,
    "unittest": unittest,
}


def examples(
    task: str, count: int, *, held_out: bool = False, seed: int = 0
) -> list[dict[str, str]]:
    """Draw prompts with a task's answers, as rows that `finetune` takes.

    Args:
        task: a key of TASKS.
        count: the number of rows.
        held_out: True draws from the names that are never trained on.
        seed: the random generator's seed.
    """
    rng, rows = random.Random(f"{seed} {held_out}"), []
    while len(rows) < count:
        signature = draw_signature(rng)
        if signature.held_out == held_out:
            rows.append({"prompt": signature.prompt, "completion": "\n" + TASKS[task](signature)})
    return rows


def answered_right(
    executor: pcg.Executor, rows: Sequence[dict[str, str]], adapter: str | Sequence[str] | None
) -> int:
    """Count the rows that an executor answers exactly, with greedy tokens, in one batch.

    Args:
        executor: it serves the adapters.
        rows: prompts with their answers, as `examples` draws them.
        adapter: one name for all, a name for each row, or None for the base alone.
    """
    completions = executor.generate([row["prompt"] for row in rows], adapter, max_new_tokens=48)
    return sum(
        completion.text == row["completion"]
        for completion, row in zip(completions, rows, strict=True)
    )
