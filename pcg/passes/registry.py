"""Passes by name, over graphs in text IR: for `pcg opt`, and for tests of passes.

    raise,fuse_linears                     passes in order, separated by commas
    localize{degree=4}                     options of a pass in braces
    split_cache_append{sizes=(64,128)}     several values of an option in parentheses

A file holds any number of graphs. A graph pass runs over each graph. A model pass needs graphs
named @prologue, @block_… and @epilogue. `differentiate` adds a backward to each graph, which
gradient passes need. Passes that need more than graphs are refused.
"""

from __future__ import annotations

import dataclasses
import difflib
import itertools
import operator
import re
import types
import typing
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

from pcg.errors import PassError
from pcg.ir.analysis.verifier import verify
from pcg.ir.graph import Graph
from pcg.ir.parser import parse_graphs
from pcg.ir.printer import print_graphs
from pcg.ir.program.interfaces import check_model
from pcg.ir.program.program import ModelGraph
from pcg.passes import pipeline  # noqa: F401
from pcg.passes.graphs.differentiate import Differentiate, Differentiated, GradientPass
from pcg.passes.graphs.fold import Fold
from pcg.passes.graphs.pass_base import GraphPass, ModelPass, Named, Pass, run_pass
from pcg.passes.graphs.raise_operators import RaiseOperators, raise_graph

_KINDS: tuple[type[Pass[Any, Any]], ...] = (GraphPass, ModelPass, GradientPass)
PASSES: tuple[type[Pass[Any, Any]], ...] = tuple(
    sorted(
        (Differentiate, Fold, *(each for kind in _KINDS for each in kind.__subclasses__())),
        key=operator.attrgetter("name"),
    )
)
"""Passes that run over graphs in text, sorted by name; the import of the pipeline defines them."""

REFUSED: dict[str, str] = {
    "trace": "it needs a model's configuration, not a graph",
    "quantize_weights": "it needs the format of a checkpoint",
    "attach": "it needs recipes of adapters",
    "plan_base": "it plans a model without adapters beside one with them",
    "shard": "it searches over a model without adapters beside one with them",
    "parallelize": "it plans a model without adapters beside one with them",
    "add_loss": "it needs a model to train",
    "place": "it needs costs of two devices and of the link between them",
    "rematerialize": "it spreads a memory budget over all layers of a model",
    "fuse": "it is several passes, for serving others than for training",
    "functions": "it needs a model that serves and one that trains",
    "emit": "it needs a model that serves and one that trains",
}
"""Passes of the pipeline that need more than graphs, with the reason."""


@dataclass(frozen=True)
class GraphFile:
    """The graphs of a file; differentiated graphs include their backward."""

    items: tuple[Graph | Differentiated, ...]

    @property
    def every(self) -> tuple[Graph, ...]:
        """All graphs in order, each backward after its forward."""
        pairs = ((i,) if isinstance(i, Graph) else (i.graph, i.backward) for i in self.items)
        return tuple(itertools.chain.from_iterable(pairs))

    @property
    def graphs(self) -> Named:
        names = [graph.name for graph in self.every]
        return {
            name if names.count(name) == 1 else f"{name}.{place}": graph
            for place, (name, graph) in enumerate(zip(names, self.every, strict=True))
        }

    def check(self) -> None:
        model = _model(self)
        if model is not None:
            check_model(model)
        for item in self.items:
            if isinstance(item, Differentiated):
                item.check()


@dataclass(frozen=True)
class OnFile(Pass[GraphFile, GraphFile]):
    """A pass over the graphs of a file."""

    inner: Pass[Any, Any]

    @property
    def name(self) -> str:  # type: ignore[override]
        return self.inner.name

    def run(self, before: GraphFile) -> GraphFile:
        inner = self.inner
        if isinstance(inner, GradientPass):
            if not any(isinstance(item, Differentiated) for item in before.items):
                raise PassError(
                    f"pass {self.name!r} needs graphs with their backward; put 'differentiate' "
                    "before it"
                )
            items = (i if isinstance(i, Graph) else inner.run(i) for i in before.items)
            return GraphFile(tuple(items))
        model = _model(before)
        if isinstance(inner, RaiseOperators) and model is None:
            return GraphFile(tuple(map(raise_graph, before.every)))
        if isinstance(inner, ModelPass):
            if model is None:
                names = ", ".join(f"@{graph.name}" for graph in before.every)
                raise PassError(
                    f"pass {self.name!r} needs the graphs of a model, @prologue, @block_… and "
                    f"@epilogue; the file has {names}"
                )
            return GraphFile(inner.run(model).graphs)
        if isinstance(inner, Fold):
            if len(before.every) != 1:
                raise PassError(
                    f"pass 'fold' needs the one graph of a model; the file has {len(before.every)}"
                )
            return GraphFile(inner.run(before.every[0]).graphs)
        return GraphFile(tuple(inner.run(graph) for graph in before.every))


def _model(file: GraphFile) -> ModelGraph | None:
    """Return the model that a file's graphs form, or None."""
    graphs = file.every
    names = [graph.name for graph in graphs]
    if len(names) < 3 or (names[0], names[-1]) != ("prologue", "epilogue"):
        return None
    if not all(name.startswith("block_") for name in names[1:-1]):
        return None
    return ModelGraph(graphs[0], graphs[1:-1], tuple(range(len(graphs) - 2)), graphs[-1])


def run_text(text: str, passes: str | None) -> str:
    """Run passes over text IR; None runs no pass.

    Raises:
        PassError: a pass is unknown, refused or failed.
        IrError: the text is not valid IR.
    """
    graphs = parse_graphs(text)
    for graph in graphs:
        verify(graph)
    GraphFile(graphs).check()
    return print_graphs(graphs if passes is None else run_graphs(graphs, passes))


def run_graphs(graphs: Sequence[Graph], passes: str) -> tuple[Graph, ...]:
    """Run passes over graphs; see `run_text` for arguments and errors."""
    file = GraphFile(tuple(graphs))
    for step in parse_passes(passes):
        file = run_pass(OnFile(step), file)
    return file.every


# ------------------------------------------------------------------------------- names and options

_PASS = re.compile(r"\s*([\w-]+)\s*(?:\{([^{}]*)\})?\s*(,|$)")
_OPTION = re.compile(r"\s*(\w+)\s*=\s*(\([^()]*\)|[^,()\s]+)\s*(,|$)")


def parse_passes(text: str) -> tuple[Pass[Any, Any], ...]:
    """Parse a list of passes such as `fold,raise,localize{degree=4}`.

    Raises:
        PassError: a wrong name, option or value; lists the right ones.
    """
    passes: list[Pass[Any, Any]] = []
    position = 0
    while position < len(text) or not passes:
        match = _PASS.match(text, position)
        if match is None:
            raise PassError(
                f"expected a pass at {text[position:]!r}; write them as raise,localize{{degree=4}}"
            )
        passes.append(_pass(match[1], match[2] or ""))
        position = match.end()
    return tuple(passes)


def _pass(name: str, options: str) -> Pass[Any, Any]:
    by_name = {kind.name: kind for kind in PASSES}
    if name in REFUSED:
        raise PassError(
            f"pass {name!r} does not run over graphs in text: {REFUSED[name]}; use pcg compile "
            f"MODEL --print-after {name}"
        )
    if name not in by_name:
        close = difflib.get_close_matches(name, [*by_name, *REFUSED], n=2)
        hint = f" (did you mean {' or '.join(close)}?)" if close else ""
        raise PassError(f"there is no pass {name!r}{hint}; the passes are {', '.join(by_name)}")
    return by_name[name](**_options(by_name[name], options))


def _options(kind: type[Pass[Any, Any]], text: str) -> dict[str, Any]:
    hints = options_of(kind)
    values: dict[str, Any] = {}
    position = 0
    while text[position:].strip():
        match = _OPTION.match(text, position)
        if match is None:
            raise PassError(
                f"pass {kind.name!r}: expected an option at {text[position:]!r}; write it as "
                "name=value, or name=(value,value)"
            )
        option, value = match[1], match[2]
        if option not in hints:
            known = ", ".join(hints) or "none"
            raise PassError(f"pass {kind.name!r} has no option {option!r}; it has {known}")
        values[option] = _value(f"{kind.name}{{{option}=…}}", value, hints[option])
        position = match.end()
    fields = dataclasses.fields(kind)
    required = [f.name for f in fields if f.default is f.default_factory is dataclasses.MISSING]
    missing = [name for name in required if name not in values]
    if missing:
        raise PassError(
            f"pass {kind.name!r} needs {', '.join(missing)}; write {kind.name}{{{missing[0]}=…}}"
        )
    return values


def options_of(kind: type[Pass[Any, Any]]) -> dict[str, Any]:
    """Return the types of a pass's options by name."""
    hints = typing.get_type_hints(kind)
    return {field.name: hints[field.name] for field in dataclasses.fields(kind)}


def _value(where: str, text: str, hint: Any) -> Any:
    if isinstance(hint, types.UnionType):
        hint = next(option for option in typing.get_args(hint) if option is not types.NoneType)
    if typing.get_origin(hint) is tuple:
        words = (word.strip() for word in text.strip("()").split(","))
        return tuple(_value(where, word, typing.get_args(hint)[0]) for word in words if word)
    try:
        return hint(text)
    except ValueError:
        raise PassError(f"{where}: {text!r} is no {hint.__name__}") from None
