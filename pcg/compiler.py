"""The compiler: from a model's configuration and PEFT recipes to a program.

    trace → fold → raise → attach → differentiate → emit

The order stands in `PIPELINE` and nowhere else. Each pass takes the compilation so far and returns
it with its own result filled in; the verifier runs on every graph after every pass.
"""

from __future__ import annotations

import dataclasses
import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any

from pcg.codegen.emit import emit_serving, emit_training
from pcg.errors import PassError, PcgError
from pcg.ir.graph import Graph
from pcg.ir.printer import print_graphs
from pcg.ir.program import ModelGraph, Program, Serving, Training, TrainingGraph
from pcg.ir.verifier import verify
from pcg.passes.attach import Bypasses, attach
from pcg.passes.fold import fold
from pcg.passes.raise_ import raise_model
from pcg.passes.train import train_block, train_epilogue
from pcg.trace import Trace, trace

if TYPE_CHECKING:
    from pcg.runtime.executor import Executor


@dataclass(frozen=True)
class Compilation:
    """What the passes have made so far.

    Attributes:
        name: of the model.
        config: its config.json.
        bypasses: where bypass networks attach, by a function of the model's linear sites.
        dtype: asked for; None for the configuration's own.
        trains: whether to build what finetunes.
    """

    name: str
    config: Mapping[str, Any]
    bypasses: Callable[[ModelGraph], Bypasses]
    dtype: str | None = None
    trains: bool = True
    whole: bool = False
    traced: Trace | None = None
    base: ModelGraph | None = None
    serving_model: ModelGraph | None = None
    training_model: ModelGraph | None = None
    training_blocks: tuple[TrainingGraph, ...] = ()
    training_epilogue: tuple[Graph, Graph, tuple[str, ...]] | None = None
    serving: Serving | None = None
    training: Training | None = None

    def graphs(self) -> tuple[Graph, ...]:
        """The graphs that the last pass made, for printing and verifying."""
        if self.training_epilogue is not None and self.training_model is not None:
            blocks = [g for t in self.training_blocks for g in (t.forward, t.backward)]
            return (self.training_model.prologue, *blocks, self.training_epilogue[0])
        model = self.serving_model or self.base
        if model is not None:
            return model.graphs
        return (self.traced.graph,) if self.traced else ()


# ------------------------------------------------------------------------------------ the passes


def _trace(state: Compilation) -> Compilation:
    return dataclasses.replace(state, traced=trace(state.config, state.dtype, state.whole))


def _fold(state: Compilation) -> Compilation:
    traced = _made(state.traced)
    return dataclasses.replace(state, base=fold(traced.graph, traced.layers_path, traced.schedule))


def _raise(state: Compilation) -> Compilation:
    return dataclasses.replace(state, base=raise_model(_made(state.base)))


def _attach(state: Compilation) -> Compilation:
    base = _made(state.base)
    bypasses = state.bypasses(base)
    open_ranks = dataclasses.replace(bypasses, ranks=dict.fromkeys(bypasses.ranks))
    serving = attach(base, open_ranks)
    training = attach(base, bypasses) if state.trains and (bypasses.ranks or bypasses.biases) else None
    return dataclasses.replace(state, serving_model=serving, training_model=training)


def _differentiate(state: Compilation) -> Compilation:
    model = state.training_model
    if model is None:
        return state
    blocks = tuple(train_block(block) for block in model.blocks)
    return dataclasses.replace(
        state, training_blocks=blocks, training_epilogue=train_epilogue(model)
    )


def _emit(state: Compilation) -> Compilation:
    model = _made(state.serving_model)
    serving = Serving(model, emit_serving(state.name, model))
    training = None
    if state.training_model is not None:
        epilogue, loss, trained = _made(state.training_epilogue)
        source = emit_training(
            state.name, state.training_model, state.training_blocks, epilogue, loss
        )
        training = Training(
            state.training_model, state.training_blocks, epilogue, trained, source
        )
    return dataclasses.replace(state, serving=serving, training=training)


PIPELINE: tuple[tuple[str, Callable[[Compilation], Compilation]], ...] = (
    ("trace", _trace),
    ("fold", _fold),
    ("raise", _raise),
    ("attach", _attach),
    ("differentiate", _differentiate),
    ("emit", _emit),
)


def _made(value: Any) -> Any:
    if value is None:
        raise PassError("a pass ran before the one whose result it needs")
    return value


# ------------------------------------------------------------------------------------ running them


@dataclass(frozen=True)
class PassRecord:
    """What one pass did: its time, and how many nodes its graphs have."""

    name: str
    seconds: float
    nodes: int
    graphs: tuple[Graph, ...]

    def text(self) -> str:
        """Its graphs as text IR."""
        return print_graphs(self.graphs)


def run_passes(
    state: Compilation,
    observe: Callable[[PassRecord], None] | None = None,
    *,
    first: str = "trace",
    last: str = "emit",
) -> Compilation:
    """Run the pipeline from one pass to another.

    Args:
        state: where to begin.
        observe: told of each pass as it ends.
        first: the first pass to run; what earlier ones make must be in the state.
        last: the last pass to run.
    Raises:
        PassError: a pass failed; it carries the graphs that the pass got.
    """
    names = [name for name, _ in PIPELINE]
    for name, run in PIPELINE[names.index(first) : names.index(last) + 1]:
        started = time.perf_counter()
        before = state.graphs()
        try:
            state = run(state)
            for graph in state.graphs():
                verify(graph)
        except PcgError:
            raise
        except Exception as error:
            text = print_graphs(before) if before else ""
            raise PassError(f"pass {name!r} failed on {state.name}: {error!r}", text) from error
        if observe is not None:
            graphs = state.graphs()
            nodes = sum(len(graph.nodes) for graph in graphs)
            observe(PassRecord(name, time.perf_counter() - started, nodes, graphs))
    return state


def dump_to(directory: str | Path) -> Callable[[PassRecord], None]:
    """An observer that writes each pass's text IR to `<n>-<pass>.pcg` in a directory."""
    folder = Path(directory)
    folder.mkdir(parents=True, exist_ok=True)
    names = [name for name, _ in PIPELINE]

    def observe(record: PassRecord) -> None:
        path = folder / f"{names.index(record.name)}-{record.name}.pcg"
        path.write_text(record.text(), encoding="utf-8")

    return observe
