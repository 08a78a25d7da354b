"""The model state that an executor, its engines and its finetuning jobs share.

Programs are compiled for adapters at new sites, and for steps larger than planned. A memory budget
in bytes holds for every step, and the bytes that a plan saves grow with the step's tokens, so that
a step that would save more than the budget is planned for its own size, or refused:

    saved(plan, tokens) <= budget    the plan runs
    otherwise                        a new plan for this number of tokens
"""

from __future__ import annotations

import dataclasses
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from functools import cached_property, partial
from typing import Protocol, TypeAlias, TypeVar
from weakref import WeakSet

import sympy
import torch
from torch import Tensor

from pcg.errors import (
    AdapterConflictError,
    AdapterError,
    AdapterNotFoundError,
    EngineError,
    GenerationError,
    PcgError,
    UnsupportedError,
    as_pcg_error,
)
from pcg.ir.analysis.storages import SEQUENCES
from pcg.ir.program.program import ModelGraph, Program, Serving, Training, is_classifier
from pcg.ir.program.saved_memory import saved_memory, window_memory
from pcg.ir.types import CONTEXT, TORCH_NAMES
from pcg.kernels.batch import Span
from pcg.kernels.devices import downloaded, own_memory, uploaded_list
from pcg.options import PLAIN_LOSS, LossForm
from pcg.peft.adapter import Adapter, check_finite, check_name, check_replaced, new_adapter
from pcg.peft.recipe import SEQ_CLS, Recipe
from pcg.peft.registry import is_saved, learning_labels, recipe_from
from pcg.ranks.agreement import check_same, serving_text, training_text
from pcg.ranks.group import Ranks
from pcg.ranks.mesh import SINGLE_MESH, RankMesh
from pcg.ranks.stages import StageLink, cut_stages
from pcg.runtime.adapters.padded_tables import PaddedTables
from pcg.runtime.adapters.ragged_tables import RaggedTables
from pcg.runtime.adapters.served_bytes import served_dtype
from pcg.runtime.adapters.sites import model_sources, served_sources, trained_sources
from pcg.runtime.adapters.stacked_weights import ServedWeights
from pcg.runtime.adapters.versions import AdapterVersion, Versions
from pcg.runtime.memory.host_memory import bound_shape_caches
from pcg.runtime.memory.kv_cache import KvCache, stage_kv_types
from pcg.runtime.memory.pool import pages_for
from pcg.runtime.memory.recurrent_states import check_whole_sequences, recurrent_types
from pcg.runtime.model.base_weights import (
    TensorSource,
    WeightStore,
    replaced_of_base,
    saved_adapter,
)
from pcg.runtime.model.batch import Batch, whole_sequences
from pcg.runtime.model.runner import ModelRunner
from pcg.runtime.model.self_test import self_tests
from pcg.runtime.sampling.grammars import Grammars
from pcg.runtime.text.tokenizer import Tokenizer, adapter_template
from pcg.source import adapter_directory
from pcg.units import shown


class Specialiser(Protocol):
    """Compiles a program for other sites or steps; provided by the compiler.

    `step` is the number of sequences and of tokens per sequence for which the memory budget is
    planned; by default the program's options. `form` is that of the loss.
    """

    def serving(self, program: Program, recipes: Sequence[Recipe]) -> Serving: ...

    def training(
        self,
        program: Program,
        recipe: Recipe,
        windows: bool = False,
        step: tuple[int, int] | None = None,
        form: LossForm = PLAIN_LOSS,
    ) -> Training: ...


@dataclass(frozen=True)
class ServingProgram:
    """A program for serving, ready to run.

    `sources` are the adapter parameters that the program reads.
    """

    serving: Serving
    sources: frozenset[str]
    runner: ModelRunner
    tables: PaddedTables


@dataclass(frozen=True)
class _SizedTraining:
    training: Training
    tokens: int
    windows: bool

    @cached_property
    def _saved_bytes(self) -> sympy.Expr:
        account = window_memory if self.windows else saved_memory
        return account(self.training.model, self.training).total

    def holds(self, sequences: int, seq: int, limit_bytes: int) -> bool:
        """Return True if a step of this program saves at most `limit_bytes`."""
        at = {SEQUENCES: sequences, CONTEXT: seq}
        return sequences * seq <= self.tokens or self._saved_bytes.subs(at) <= limit_bytes


class TrainingPrograms:
    """Training programs by adapter sites and step, compiled on first use."""

    def __init__(self, program: Program, specialiser: Specialiser, ranks: Ranks) -> None:
        self._program = program
        self._specialiser = specialiser
        self._ranks = ranks
        self._planned_tokens = program.options.batch * program.options.seq
        self._by_key: dict[frozenset[str], list[_SizedTraining]] = {}
        if program.training is not None:
            model = program.training.model
            planned = _SizedTraining(program.training, self._planned_tokens, windows=False)
            self._by_key[model_sources(model) | _dropouts_of(model)] = [planned]

    def get(
        self,
        adapter: Adapter,
        windows: bool,
        step: tuple[int, int] | None = None,
        form: LossForm = PLAIN_LOSS,
    ) -> Training:
        """Return the program for an adapter's sites, for windows or for whole sequences.

        Args:
            step: the number of sequences in a step and of tokens per sequence, for a memory budget
                in bytes; by default the step that the program was compiled for.
        Raises:
            MemoryBudgetError: the step needs more than the budget.
        """
        key = trained_sources(adapter) | _dropouts(adapter.recipe.dropout)
        if windows:
            key |= {"windows"}
        if form != PLAIN_LOSS:
            key |= {str(form)}
        planned = self._by_key.setdefault(key, [])
        if not planned:
            planned.append(self._specialised(adapter, windows, None, form))
        limit = self._program.options.budget.size_bytes
        if step is None or limit is None:
            return planned[0].training
        for sized in planned:
            if sized.holds(*step, limit):
                return sized.training
        planned.append(self._specialised(adapter, windows, step, form))
        return planned[-1].training

    def _specialised(
        self, adapter: Adapter, windows: bool, step: tuple[int, int] | None, form: LossForm
    ) -> _SizedTraining:
        parts = windows, step, form
        training = self._specialiser.training(self._program, adapter.recipe, *parts)
        check_same(self._ranks, "the program", {"the training program": training_text(training)})
        tokens = self._planned_tokens if step is None else step[0] * step[1]
        return _SizedTraining(training, tokens, windows)


def _dropouts(p: float) -> frozenset[str]:
    return frozenset({f"dropout {p:g}"} if p else ())


def _dropouts_of(model: ModelGraph) -> frozenset[str]:
    nodes = [node for graph in model.graphs for node in graph.nodes if node.op == "dropout"]
    return frozenset().union(*(_dropouts(float(node.attribute("p"))) for node in nodes))  # type: ignore[arg-type]


Result = TypeVar("Result")


class StateListener(Protocol):
    """Receives changes of the state; every engine over it is a listener."""

    def use_program(self, program: ServingProgram) -> None:
        """Switch to another serving program."""

    def forget(self, adapter: Adapter, *, is_gone: bool) -> None:
        """Drop data of a changed adapter; if `is_gone`, no later request can name it."""


class EngineThread(Protocol):
    """The thread of an engine's steps, which has exclusive use of the model."""

    def run(self, act: Callable[[], Result]) -> Result:
        """Run a function between two steps, and wait for it."""


NamedAdapter: TypeAlias = str | Adapter | None
"""An adapter's name, or a served adapter; None for the base."""


class ModelState:
    """A program with weights, adapters, a tokenizer, and the programs specialised for adapters.

    Each rank of a group has a state, and all states receive the same calls in the same order;
    adapters are whole in each rank's memory.

    Attributes:
        mesh: this rank's groups of ranks.
        stages: the layers of each pipeline stage; `stage` is this rank's stage.
        base_name: the base's hub id or path, which adapters name; empty if unknown.
        free_before: free memory of a GPU before the weights were read, bytes; 0 for other devices.
        adapter_dtype: the dtype of adapters in training.
        grammars: compiles the guides of requests.
        versions: the versions of adapters.
        most_rank: the maximum rank of created or loaded adapters; None for no maximum.
        tests_adapters: test that the weights of loaded adapters have an effect (`self_tests`).
        engine_thread: the thread that runs an engine over this state; None without a thread.
    """

    def __init__(
        self,
        program: Program,
        weights: TensorSource,
        specialiser: Specialiser,
        tokenizer: Tokenizer | None,
        has_own_tokenizer: bool,
        base_name: str,
        device: torch.device,
        mesh: RankMesh = SINGLE_MESH,
    ) -> None:
        check_whole_sequences(program.serving.model, mesh.sizes.cp)
        bound_shape_caches()
        self.free_before = own_memory(device)
        self.program = program
        self.mesh = mesh
        self.stages = cut_stages(program.base, mesh.sizes.pp)
        self.stage = self.stages[mesh.stage]
        self.base_name = base_name
        self.set_tokenizer(tokenizer, is_own=has_own_tokenizer)
        self.device = device
        self.weight_store = WeightStore(program, weights, device, mesh.tp, mesh.parts)
        self.engine_thread: EngineThread | None = None
        self._specialiser = specialiser
        self.versions = Versions(device, collects=mesh.world.size > 1)
        self._adapters: dict[str, Adapter] = {}
        self._unsettled: dict[str, Callable[[], None]] = {}
        self._trained: set[str] = set()
        self._listeners: WeakSet[StateListener] = WeakSet()
        self._linear = self.weight_store.linear()
        self._served = ServedWeights(self._linear, program.base.module_shapes())
        self.adapter_dtype = program.base.adapter_dtype
        self._trainings = TrainingPrograms(program, specialiser, mesh.world)
        self.most_rank: int | None = None
        self.tests_adapters = False
        self._tested: set[tuple[object, ...]] = set()
        self._copies_dtype = served_dtype(program.options, program.base, device)
        self.serving = self._bind(program.serving)

    def _bind(self, serving: Serving) -> ServingProgram:
        model, layers = serving.model, self.stage.own(serving.model)
        link = StageLink.of(model, self.stages, self.mesh, self.device)
        weights = self.weight_store.bind(layers, serves=True)
        runner = ModelRunner(serving, weights, self.ranks, self.mesh.alike, link)
        return ServingProgram(serving, model_sources(model), runner, self._tables(model))

    def _tables(self, model: ModelGraph) -> PaddedTables:
        layers = self.stage.own(model)
        kind: Callable[..., PaddedTables] = PaddedTables
        if self.program.options.backend == "triton":
            layers = model  # stages count equal pages for an adapter
            kind = partial(RaggedTables, defers=self.mesh.sizes.pp == self.mesh.sizes.cp == 1)
        return kind(layers, self._served, self.device, self.ranks, lora_dtype=self._copies_dtype)

    def set_tokenizer(self, tokenizer: Tokenizer | None, *, is_own: bool = False) -> None:
        """Replace the tokenizer, with the tokens that end output and the compiler of guides.

        Args:
            is_own: the tokenizer's files name all tokens that end the model's output.
        """
        eos = self.program.config.get("eos_token_id")
        named = () if eos is None else (eos,) if isinstance(eos, int) else eos
        ends = () if tokenizer is None else tokenizer.eos_ids
        self.eos_ids = frozenset(ends if is_own else (*ends, *named))
        if tokenizer is not None:
            tokenizer = dataclasses.replace(tokenizer, eos_ids=tuple(sorted(self.eos_ids)))
        self.tokenizer = tokenizer
        self.grammars = Grammars(tokenizer, self.program.base.vocabulary, self.eos_ids)

    def add_listener(self, listener: StateListener) -> None:
        """Notify a weakly referenced listener of new programs and changed adapters."""
        self._listeners.add(listener)

    def check_no_engine(self, what: str, fix: str) -> None:
        """Raise an EngineError if an engine runs on a thread."""
        if self.engine_thread is not None:
            raise EngineError(
                f"an engine runs on this executor's thread, and {what} would run the model beside "
                f"it; {fix}"
            )

    # ------------------------------------------------------------------------------- facts

    @property
    def ranks(self) -> Ranks:
        """The ranks with the other shards of the weights."""
        return self.mesh.tp

    @property
    def world(self) -> Ranks:
        """All ranks, which receive the same calls."""
        return self.mesh.world

    @property
    def max_positions(self) -> int | None:
        return self.program.max_positions

    @property
    def vocabulary(self) -> int:
        """The number of logits per token."""
        return self.program.base.vocabulary

    @property
    def adapters(self) -> Mapping[str, Adapter]:
        """The adapters by name, with whole tensors."""
        for name in list(self._unsettled):
            self.settle_adapter(name)
        return dict(self._adapters)

    # ------------------------------------------------------------------------------- adapters

    def adapter(self, name: str) -> Adapter:
        """Return an adapter. AdapterNotFoundError: no adapter has the name."""
        check_name(name)
        self.settle_adapter(name)
        try:
            return self._adapters[name]
        except KeyError:
            known = ", ".join(sorted(self._adapters)) or "none"
            text = f"there is no adapter {name!r}; there are: {known}"
            raise AdapterNotFoundError(text) from None

    def adapters_of(
        self, count: int, adapter: NamedAdapter | Sequence[NamedAdapter]
    ) -> list[Adapter | None]:
        """Return the adapter of each of `count` prompts; see `Executor.generate`."""
        if adapter is None or isinstance(adapter, str | Adapter):
            names: Sequence[NamedAdapter] = [adapter] * count
        elif isinstance(adapter, Sequence):
            names = adapter
        else:
            raise GenerationError(
                f"adapter={shown(adapter)}; use a name, a list of one for each prompt, or None"
            )
        if len(names) != count:
            raise GenerationError(
                f"{len(names)} adapters for {count} prompts; give one name, or one for each"
            )
        return [
            self.adapter(named) if isinstance(named, str) else self.versions.checked(named)
            for named in names
        ]

    def check_free(
        self, name: str, *, replace: bool = False, expected_version: int | None = None
    ) -> None:
        """Check that an adapter may be added; see `Executor.add_adapter`.

        Raises:
            AdapterConflictError: the name is in use or has another version, or a job trains it.
        """
        check_name(name)
        self._check_untrained(name)
        present = self._adapters.get(name)
        self.versions.check_free(name, present, replace=replace, expected_version=expected_version)

    def begin_training(self, name: str) -> Callable[[], None]:
        """Reserve the name for the job that trains it; return a function that releases it."""
        check_name(name)
        self._check_untrained(name)
        self._trained.add(name)
        return lambda: self._trained.discard(name)

    def is_trained(self, name: str) -> bool:
        """Return True while a job trains an adapter of that name."""
        return name in self._trained

    def _check_untrained(self, name: str) -> None:
        if name in self._trained:
            raise AdapterConflictError(
                f"a job trains adapter {name!r}, and serves its result under that name; cancel the "
                "job, or wait for its end"
            )

    def make_adapter(self, name: str, path_or_config: object = "lora", *, seed: int = 0) -> Adapter:
        """Load or create an adapter without serving it; see `Executor.add_adapter`."""
        check_name(name)
        try:
            adapter = self._made_adapter(name, path_or_config, seed)
            if self.most_rank is not None and adapter.rank > self.most_rank:
                raise AdapterError(
                    f"adapter {name!r} has rank {adapter.rank}, and the engine serves up to "
                    f"{self.most_rank}; raise --max-lora-rank, or Limits(lora_rank=…) of the engine"
                )
            return adapter
        except PcgError:
            raise
        except Exception as error:  # recipes and files of others may raise any error
            raise as_pcg_error(error, f"making adapter {name!r}", AdapterError) from error

    def recipe(self, config: object) -> Recipe:
        """Return the recipe of a new adapter; see `Executor.add_adapter`."""
        recipe = recipe_from(config)
        return learning_labels(recipe) if is_classifier(self.program.config) else recipe

    def _made_adapter(self, name: str, path_or_config: object, seed: int) -> Adapter:
        base, model_type = self.program.base, str(self.program.config["model_type"])
        if is_saved(path_or_config):
            adapter = saved_adapter(
                path_or_config, name, self.program, self.weight_store, self.base_name
            )
            check_finite(self.on_host(adapter), path_or_config)
            template = adapter_template(adapter_directory(path_or_config))
            adapter = dataclasses.replace(adapter, chat_template=template)
            self._served.check_range(adapter, self._copies_dtype)
        else:
            fresh = new_adapter(
                name,
                self.recipe(path_or_config),
                base.module_shapes(),
                seed=seed,
                output_layer=base.output_module,
                model_type=model_type,
                base_weights=self._linear,
            )
            adapter = dataclasses.replace(
                fresh,
                replaced=replaced_of_base(fresh, self.weight_store),
                base_model_name=self.base_name,
            )
            if is_classifier(self.program.config):
                adapter = dataclasses.replace(adapter, extra={"task_type": SEQ_CLS})
            check_replaced(adapter, base)
        adapter.recipe.bypasses_in(base, model_type)  # as later programs, of other adapters, too
        return self.on_host(adapter)

    def put_adapter(self, adapter: Adapter, program: ServingProgram | None = None) -> Adapter:
        """Serve an adapter from memory, as the next version of its name.

        Running requests keep their version.

        Args:
            program: the result of `program_for`; None compiles a program if necessary.
        """
        adapter = dataclasses.replace(adapter)
        if not served_sources(adapter) <= self.serving.sources:
            served = [served_sources(each) for each in (adapter, *self.versions.alive())]
            if program is None or not frozenset().union(*served) <= program.sources:
                program = self.program_for(adapter)
            self.serving = program
            for listener in self._listeners:
                listener.use_program(program)
        self._served.changed(adapter)
        self.versions.begin(adapter)
        before = self._adapters.get(adapter.name)
        self._adapters[adapter.name] = adapter
        if before is not None:
            self.versions.end(before)
            self._tell_changed(before, is_gone=True)
        return adapter

    def check_copies(self, adapter: Adapter) -> None:
        """Refuse an adapter that overflows the dtype of its copies. AdapterError: names it."""
        if self._copies_dtype is not None:
            self._served.check_range(adapter, self._copies_dtype)

    def program_for(self, adapter: Adapter) -> ServingProgram:
        """Return a program that serves an adapter and the current requests' adapters; thread-safe.

        A program is compiled only if the current program does not read the whole adapter.
        """
        if served_sources(adapter) <= self.serving.sources:
            return self.serving
        recipes = [served_adapter.recipe for served_adapter in (*self.versions.alive(), adapter)]
        serving = self._specialiser.serving(self.program, recipes)
        check_same(self.world, "the program", {"the serving program": serving_text(serving)})
        return self._bind(serving)

    def self_tests(self, adapter: Adapter, program: ServingProgram) -> Iterator[Callable[[], None]]:
        """Return the parts of an adapter's self-test; see `pcg.runtime.model.self_test`.

        There are none for an adapter with the modules and shapes of a tested one, as the test
        depends on nothing else.
        """
        shapes = (tuple(tensor.shape) for tensor in adapter.tensors)
        key = (program.sources, served_sources(adapter), *shapes)
        if not self.tests_adapters or key in self._tested:
            return
        tables = self._tables(program.serving.model)
        known, model = self.program.base.tokens, program.serving.model
        logits, decoded = (
            partial(compute, program.runner, tables)
            for compute in (self.logits, self._decoded_logits)
        )
        yield from self_tests(adapter, model, known, logits, decoded)
        self._tested.add(key)

    def logits(
        self,
        runner: ModelRunner,
        tables: PaddedTables,
        sequences: Sequence[Sequence[int]],
        adapters: Sequence[Adapter | None],
    ) -> list[Tensor]:
        """Compute the logits [S_i, V] of whole sequences, each with its own adapter.

        Ranks that share the tokens compute their own tokens' logits, and gather all logits.
        """
        order = tables.order(adapters)
        wanted, chosen = [sequences[i] for i in order], [adapters[i] for i in order]
        virtual = [0 if item is None else item.prompt_tokens for item in chosen]
        batch = whole_sequences(wanted, self.device, virtual, cp=self.mesh.cp)
        sizes = [span.length for span in batch.spans]
        bound = tables.bind([chosen[span.number] for span in batch.spans], sizes)
        logits = runner.logits(batch, bound)
        if batch.parts is not None:
            (logits,) = batch.parts.gathered(logits)
        lengths = [count + len(item) for item, count in zip(wanted, virtual, strict=True)]
        parts = [part[count:] for part, count in zip(logits.split(lengths), virtual, strict=True)]
        by_index = dict(zip(order, parts, strict=True))
        return [by_index[i] for i in range(len(sequences))]

    def _decoded_logits(
        self,
        runner: ModelRunner,
        tables: PaddedTables,
        sequences: Sequence[Sequence[int]],
        adapters: Sequence[Adapter | None],
    ) -> list[Tensor]:
        """Compute the logits [V] of last tokens, decoded after the base filled a cache.

        The sequences have equal lengths, of two tokens at least.
        """
        order = tables.order(adapters)
        count, context = len(order), len(sequences[0]) - 1
        pages = pages_for(context + 1)
        cache = KvCache(
            stage_kv_types(runner.model, self.stages, self.mesh.stage),
            pages * count,
            self.device,
            in_pages=self.program.options.backend == "triton",
            states=recurrent_types(self.stage.own(runner.model)),
            slots=count,
        )
        owners = [cache.pool.open(str(i)) for i in order]
        for owner in owners:
            cache.pool.take_slot(owner)
            cache.pool.extend(owner, pages)

        def run(start: int, stop: int, chosen: Sequence[Adapter | None]) -> Tensor:
            ids = [token for i in order for token in sequences[i][start:stop]]
            size = stop - start
            spans = [Span(i * size, size, start, owner) for i, owner in enumerate(owners)]
            batch = Batch(uploaded_list(ids, torch.int64, self.device), spans, cache)
            return runner.logits(batch, tables.bind(chosen, [size] * count))

        run(0, context, [None] * count)
        logits = run(context, context + 1, [adapters[i] for i in order])
        by_index = dict(zip(order, logits, strict=True))
        return [by_index[i] for i in range(count)]

    def remove_adapter(self, name: str) -> None:
        """Remove an adapter. AdapterError: no adapter has the name, or a job trains it."""
        adapter = self.adapter(name)
        self._check_untrained(name)
        self.serving.tables.forget(adapter)
        self._tell_changed(adapter, is_gone=True)
        self._unsettled.pop(name, None)
        del self._adapters[name]
        self.versions.end(adapter, is_removed=True)

    def refresh_adapter(self, name: str, settle: Callable[[], None] | None = None) -> None:
        """Serve an adapter's tensors after a change in place, as the next version.

        Args:
            settle: over ranks, gathers the trained tensors; called before their next use.
        """
        if settle is not None and self.mesh.model.size > 1:
            self._unsettled[name] = settle
        adapter = self._adapters[name]
        if name not in self._unsettled:
            self.check_copies(adapter)
        self._served.changed(adapter)
        self.versions.begin(adapter)
        self.serving.tables.forget(adapter)
        self._tell_changed(adapter, is_gone=False)

    def settle_adapter(self, name: str) -> None:
        """Gather an adapter's trained tensors, unless they are already gathered."""
        settle = self._unsettled.pop(name, None)
        if settle is not None:
            settle()

    def answering(self, adapter: Adapter) -> AdapterVersion | None:
        """Return the version of an adapter for a request; None if the adapter was never served."""
        return self.versions.answer(adapter, hashes=self.engine_thread is not None)

    def _tell_changed(self, adapter: Adapter, *, is_gone: bool) -> None:
        for listener in self._listeners:
            listener.forget(adapter, is_gone=is_gone)

    def on_host(self, adapter: Adapter) -> Adapter:
        """Return the adapter in the adapters' dtype, in host memory."""
        return self._moved(adapter, torch.device("cpu"))

    def for_training(self, adapter: Adapter) -> Adapter:
        """Return the adapter on the device of training; over ranks, in host memory."""
        is_whole = self.mesh.model.size == 1
        return self._moved(adapter, self.device) if is_whole else self.on_host(adapter)

    def _moved(self, adapter: Adapter, device: torch.device) -> Adapter:
        dtype = getattr(torch, TORCH_NAMES[self.adapter_dtype])
        tensors = (*adapter.tensors, *adapter.shared.values())
        if all(tensor.dtype is dtype and tensor.device == device for tensor in tensors):
            return dataclasses.replace(adapter)
        if device.type == "cuda" or not any(tensor.is_cuda for tensor in tensors):
            return adapter.map(lambda tensor: tensor.to(device, dtype))
        # Queue all copies to pinned memory, and wait once for the last copy.
        moved = adapter.map(lambda tensor: downloaded(tensor.to(dtype)))
        torch.cuda.current_stream(self.device).record_event().synchronize()
        return moved

    def training(
        self,
        adapter: Adapter,
        windows: bool,
        step: tuple[int, int] | None = None,
        form: LossForm = PLAIN_LOSS,
    ) -> Training:
        """Return the program that trains an adapter, for windows or for whole sequences.

        Args:
            step: the number of sequences in a step and of tokens per sequence, for a memory budget
                in bytes; by default the step that the program was compiled for.
            form: the form of the loss.
        Raises:
            MemoryBudgetError: the step needs more than the budget.
            UnsupportedError: the adapter's encoder was not saved with it.
        """
        recipe = adapter.recipe
        if recipe.encoder is not None and not adapter.encoder:
            raise UnsupportedError(
                f"adapter {adapter.name!r} cannot be trained: {recipe.method} trains "
                f"{recipe.encoder}, of which a saved adapter holds what it made alone; "
                "train a fresh one, or go on from a checkpoint"
            )
        return self._trainings.get(adapter, windows, step, form)
