"""Cut finetuning slices out of Python's standard library, as JSONL of one {"text": ...} a line.

    python examples/slices.py --out DIR [--limit N]

    unittest     methods of test classes, under the line that opens their class
    docstrings   functions with a docstring: signature, docstring and body
    asyncio      the source of asyncio and of its tests, in pieces

Each slice becomes `<slice>.train.jsonl` and `<slice>.held_out.jsonl`. A file is on the side where
`stdlib_corpus.py` puts it, so no held-out document was pretrained on; what is in the train file,
the checkpoint has seen about once among everything else, and finetuning specializes it. Documents
come in the order of their hashes: the first N are a fair sample, and equal on every machine with
the same Python.
"""

import argparse
import ast
import hashlib
import json
import textwrap
import warnings
from collections.abc import Callable, Iterator
from pathlib import Path

from stdlib_corpus import TABLE_PREFIXES, SourceFile, read_stdlib

# At most about 400 tokens: the checkpoint's tokenizer makes a token of 3.6 bytes on average, and of
# 3 in dense code. One document in a hundred is longer in tokens.
MAX_CHARS = 1100
# A document below this is one line or two, and says nothing about the slice.
MIN_CHARS = 120

ASYNCIO_PREFIXES = ("asyncio/", "test/test_asyncio/")


def unittest_documents(file: SourceFile) -> Iterator[str]:
    """Yield each test class as its opening line and as many whole methods as fit."""
    if not _is_test(file):
        return
    for node in ast.walk(_parse(file)):
        if not isinstance(node, ast.ClassDef):
            continue
        methods = [m for m in node.body if isinstance(m, ast.FunctionDef | ast.AsyncFunctionDef)]
        if not any(method.name.startswith("test") for method in methods):
            continue
        bases = ", ".join(ast.unparse(base) for base in node.bases)
        opening = f"class {node.name}({bases}):" if bases else f"class {node.name}:"
        bodies = [textwrap.indent(text, "    ") for m in methods if (text := _source(file, m))]
        yield from _join(bodies, before=opening + "\n")


def docstring_documents(file: SourceFile) -> Iterator[str]:
    """Yield each function that has a docstring, at the left margin, outside of the tests."""
    # The corpus keeps only the top of generated tables, which need not parse.
    if _is_test(file) or file.path.startswith(TABLE_PREFIXES):
        return
    for node in ast.walk(_parse(file)):
        if isinstance(node, ast.FunctionDef | ast.AsyncFunctionDef) and ast.get_docstring(node):
            text = _source(file, node)
            if text:
                yield text


def asyncio_documents(file: SourceFile) -> Iterator[str]:
    """Yield pieces of asyncio's files, cut where blank lines are."""
    if file.path.startswith(ASYNCIO_PREFIXES):
        paragraphs = [part.strip("\n") for part in file.text.split("\n\n")]
        yield from _join([part for part in paragraphs if part])


SLICES: dict[str, Callable[[SourceFile], Iterator[str]]] = {
    "unittest": unittest_documents,
    "docstrings": docstring_documents,
    "asyncio": asyncio_documents,
}


def build_slice(name: str, files: list[SourceFile]) -> tuple[list[str], list[str]]:
    """Return the slice's train and held-out documents, each in hash order, without repeats.

    A held-out document that some train file repeats word for word is left out of both.

    Args:
        name: a key of SLICES.
        files: the corpus, as `read_stdlib` returns it.
    """
    sides: tuple[set[str], set[str]] = (set(), set())
    for file in files:
        for text in SLICES[name](file):
            if MIN_CHARS <= len(text) <= MAX_CHARS:
                sides[file.held_out].add(text)
    repeated = sides[0] & sides[1]
    train, held_out = (sorted(side - repeated, key=_hash) for side in sides)
    return train, held_out


def write_jsonl(path: Path, documents: list[str]) -> None:
    """Write one {"text": ...} object a line."""
    lines = (json.dumps({"text": text}, ensure_ascii=False) + "\n" for text in documents)
    path.write_text("".join(lines), encoding="utf-8", errors="backslashreplace")


def _is_test(file: SourceFile) -> bool:
    return any(part in ("test", "tests", "idle_test") for part in file.path.split("/")[:-1])


def _parse(file: SourceFile) -> ast.Module:
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")  # invalid escapes of the test suite
        return ast.parse(file.text)


def _source(file: SourceFile, node: ast.FunctionDef | ast.AsyncFunctionDef) -> str | None:
    """The function's lines with its decorators, at the left margin; None when they do not fit it.

    A string with lines left of the function's own margin keeps `dedent` from working.
    """
    first = min([node.lineno, *(decorator.lineno for decorator in node.decorator_list)])
    lines = file.text.split("\n")[first - 1 : node.end_lineno]
    text = textwrap.dedent("\n".join(lines))
    return None if text.startswith((" ", "\t")) else text


def _join(parts: list[str], before: str = "") -> Iterator[str]:
    """Join neighbours by blank lines, `before` first, into texts of at most MAX_CHARS."""
    text = ""
    for part in parts:
        if text and len(text) + 2 + len(part) > MAX_CHARS - len(before):
            yield f"{before}{text}"
            text = ""
        text = f"{text}\n\n{part}" if text else part
    if text:
        yield f"{before}{text}"


def _hash(text: str) -> str:
    return hashlib.sha256(text.encode(errors="backslashreplace")).hexdigest()


def main() -> None:
    """Write the six files."""
    parser = argparse.ArgumentParser(description=(__doc__ or "").partition("\n")[0])
    parser.add_argument("--out", type=Path, required=True, help="folder of the JSONL files")
    parser.add_argument("--limit", type=int, help="documents to keep of each file")
    args = parser.parse_args()
    args.out.mkdir(parents=True, exist_ok=True)
    files = read_stdlib()
    for name in SLICES:
        for side, documents in zip(("train", "held_out"), build_slice(name, files), strict=True):
            kept = documents[: args.limit]
            write_jsonl(args.out / f"{name}.{side}.jsonl", kept)
            print(f"{name}.{side}.jsonl: {len(kept)} of {len(documents)} documents")


if __name__ == "__main__":
    main()
