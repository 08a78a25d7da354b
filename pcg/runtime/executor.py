"""The executor: a compiled program with weights, adapters and a tokenizer, ready to use.

Long because it is the library's one front: half of it are signatures and docstrings of its calls.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Callable, Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any, Literal, cast, overload
from weakref import WeakSet

import torch
from torch import Tensor

from pcg.errors import AdapterError, GenerationError, UnsupportedError
from pcg.ir.program.program import ModelGraph, Program, Serving
from pcg.ir.types import TORCH_NAMES
from pcg.parallel.ranks.group import ALONE, Ranks, on_first
from pcg.parallel.ranks.same_program import check_same, serving_text
from pcg.peft.adapter import Adapter, check_biases, check_fits, new_adapter, with_shared
from pcg.peft.reader import read_adapter
from pcg.peft.registry import is_shorthand, recipe_from
from pcg.peft.writer import write_adapter
from pcg.runtime.adapters.padded_tables import PaddedTables
from pcg.runtime.adapters.ragged_tables import RaggedTables
from pcg.runtime.adapters.served_weights import ServedWeights
from pcg.runtime.engine.program_engine import ProgramEngine
from pcg.runtime.engine.request import Chunk, Completion, Request
from pcg.runtime.engine.scheduler import Limits
from pcg.runtime.model.base_weights import BaseWeights, TensorSource, WeightStore
from pcg.runtime.model.batch import whole_sequences
from pcg.runtime.model.runner import ModelRunner
from pcg.runtime.model.sampling_params import SamplingParams
from pcg.runtime.model.specialised import (
    ServingProgram,
    Specialiser,
    TrainingPrograms,
    model_sources,
    served_sources,
)
from pcg.runtime.text.tokenizer import Tokenizer
from pcg.runtime.training.finetuning import finetune
from pcg.runtime.training.options import Data, FinetuneOptions
from pcg.runtime.training.result import FinetuneResult, OnStep
from pcg.runtime.training.runner import TrainingRunner


class Executor:
    """Serves and finetunes many adapters over one frozen base model.

    Made by `pcg.compile` or `pcg.load`. Over ranks there is one on each, and all of them are called
    alike, in the same order; adapters are whole in each one's memory.
    """

    def __init__(
        self,
        program: Program,
        weights: TensorSource,
        specialiser: Specialiser,
        tokenizer: Tokenizer | None,
        eos_ids: frozenset[int],
        device: torch.device,
        ranks: Ranks = ALONE,
    ) -> None:
        self.program = program
        self.ranks = ranks
        self.tokenizer = tokenizer
        self.device = device
        self._specialiser = specialiser
        self._eos_ids = eos_ids
        self._adapters: dict[str, Adapter] = {}
        self._stale: dict[str, Callable[[], None]] = {}
        self._engines: WeakSet[ProgramEngine] = WeakSet()
        self.weight_store = WeightStore(program, weights, device, ranks)
        self._linear = self.weight_store.linear()
        self._served = ServedWeights(self._linear, program.base.module_shapes())
        self._trainings = TrainingPrograms(program, specialiser, ranks)
        self._use(self._bound(program.serving))

    def _bound(self, serving: Serving) -> ServingProgram:
        weights = self.weight_store.bind(serving.model)
        runner = ModelRunner(serving, weights, self.ranks)
        stacks = self._stacks_of(serving.model)
        return ServingProgram(serving, model_sources(serving.model), weights, runner, stacks)

    def _stacks_of(self, model: ModelGraph) -> PaddedTables:
        made = RaggedTables if self.program.backend == "triton" else PaddedTables
        return made(model, self._served, self.device, self.ranks)

    def _use(self, program: ServingProgram) -> None:
        self._serving = program
        self._weights, self._runner, self._stacks = program.weights, program.runner, program.stacks
        for engine in self._engines:
            engine.device.use(self._runner, self._stacks)

    # ------------------------------------------------------------------------------- facts

    @property
    def adapters(self) -> Mapping[str, Adapter]:
        """The adapters by name."""
        for name in list(self._stale):
            self.settle_adapter(name)
        return dict(self._adapters)

    @property
    def weights_bytes(self) -> int:
        """Bytes of the base's weights as this rank holds them."""
        return self.weight_store.size_bytes

    @property
    def base_weights(self) -> BaseWeights:
        """The frozen base's weights and constants."""
        return self._weights

    @property
    def max_positions(self) -> int | None:
        """Positions that the model has; None where its configuration names no bound."""
        config = self.program.config
        for name in ("max_position_embeddings", "n_positions", "max_seq_len"):
            if isinstance(config.get(name), int):
                return int(config[name])
        return None

    # ------------------------------------------------------------------------------- generation

    @overload
    def generate(
        self,
        prompts: str,
        adapter: str | None = ...,
        *,
        stream: Literal[False] = ...,
        **sampling: Any,
    ) -> Completion: ...
    @overload
    def generate(
        self,
        prompts: Sequence[str] | Sequence[Sequence[int]],
        adapter: str | Sequence[str | None] | None = ...,
        *,
        stream: Literal[False] = ...,
        **sampling: Any,
    ) -> list[Completion]: ...
    @overload
    def generate(
        self,
        prompts: str | Sequence[str] | Sequence[Sequence[int]],
        adapter: str | Sequence[str | None] | None = ...,
        *,
        stream: Literal[True],
        **sampling: Any,
    ) -> Iterator[Chunk]: ...
    def generate(
        self,
        prompts: str | Sequence[str] | Sequence[Sequence[int]],
        adapter: str | Sequence[str | None] | None = None,
        *,
        stream: bool = False,
        **sampling: Any,
    ) -> Completion | list[Completion] | Iterator[Chunk]:
        """Continue prompts, each with its own adapter, in one batch without padding.

        Args:
            prompts: one text, texts, or lists of token ids.
            adapter: one name for all, a name for each prompt, or None for the base.
            stream: return an iterator over chunks of text as they are made.
            sampling: the fields of `SamplingParams` (max_new_tokens, temperature, top_k, top_p,
                seed, stop, …); a list gives each prompt its own. With a seed, prompt i of several
                samples with seed + i.
        Returns:
            A completion for one text, else a list of them in the order of the prompts.
        Raises:
            GenerationError: an empty prompt, one longer than the model's positions, or bad options.
            AdapterError: there is no adapter of that name.
        """
        single = isinstance(prompts, str)
        requests = self._requests(
            [prompts] if isinstance(prompts, str) else prompts, adapter, sampling
        )
        chunks = self._run(requests)
        if stream:
            return chunks
        done: list[Completion | None] = [None] * len(requests)
        for chunk in chunks:
            if chunk.completion is not None:
                done[chunk.index] = chunk.completion
        completions = [completion for completion in done if completion is not None]
        return completions[0] if single else completions

    def _run(self, requests: Sequence[Request]) -> Iterator[Chunk]:
        """Serve requests to their ends, and nothing beside them."""
        engine = ProgramEngine.for_requests(self, requests)
        for request in requests:
            engine.submit(request)
        while not engine.is_idle:
            yield from engine.step()

    def engine(self, limits: Limits | None = None, **options: Any) -> ProgramEngine:
        """An engine that serves requests and trains adapters at the same time.

        Args:
            limits: of a step; the promises among them are kept.
            options: `kv_cache_bytes`, `policy`, `sharing`, `job_share` and others, as
                `ProgramEngine` takes them.
        """
        return ProgramEngine(self, limits, **options)

    def request(
        self,
        prompt: str | Sequence[int],
        adapter: str | None = None,
        *,
        tenant: str = "",
        ttft_slo_s: float | None = None,
        tpot_slo_s: float | None = None,
        timeout_s: float | None = None,
        **sampling: Any,
    ) -> Request:
        """A request as an engine takes it.

        Args:
            prompt: text, or token ids.
            adapter: name; None for the base. What it is now serves the request to its end.
            tenant: as in `Request`, with the times that follow.
            sampling: the fields of `SamplingParams`, as `generate` takes them.
        Raises:
            GenerationError: an empty prompt, text without a tokenizer, or bad options.
            AdapterError: there is no adapter of that name.
        """
        return dataclasses.replace(
            self._requests([prompt], adapter, sampling)[0],
            tenant=tenant,
            ttft_slo_s=ttft_slo_s,
            tpot_slo_s=tpot_slo_s,
            timeout_s=timeout_s,
        )

    def register(self, engine: ProgramEngine) -> None:
        """Have an engine hear when the program is compiled anew, and when adapters change."""
        self._engines.add(engine)

    @property
    def serving(self) -> tuple[ModelRunner, PaddedTables]:
        """The program that serves, and what makes adapters ready for it."""
        return self._runner, self._stacks

    @property
    def eos_ids(self) -> frozenset[int]:
        """Tokens that end a sequence."""
        return self._eos_ids

    def _requests(
        self,
        prompts: Sequence[str | Sequence[int]],
        adapter: str | Sequence[str | None] | None,
        sampling: Mapping[str, Any],
    ) -> list[Request]:
        adapters = self._adapters_of(len(prompts), adapter)
        return [
            Request(
                tuple(self._encode(prompt, index)),
                SamplingParams.of(sampling, index, len(prompts)),
                adapters[index],
            )
            for index, prompt in enumerate(prompts)
        ]

    def _adapters_of(
        self, count: int, adapter: str | Sequence[str | None] | None
    ) -> list[Adapter | None]:
        """The adapter of each of so many prompts."""
        names = [adapter] * count if adapter is None or isinstance(adapter, str) else list(adapter)
        if len(names) != count:
            raise GenerationError(
                f"{len(names)} adapters for {count} prompts; give one name, or one for each"
            )
        return [None if name is None else self._adapter(name) for name in names]

    def _encode(self, prompt: str | Sequence[int], index: int) -> Sequence[int]:
        if not isinstance(prompt, str):
            return prompt
        if self.tokenizer is None:
            raise GenerationError(
                "the model came without a tokenizer.json; put one into its directory, or give "
                "prompts as lists of token ids"
            )
        if not prompt:
            raise GenerationError(f"prompt {index} is empty; give at least one character")
        return self.tokenizer.encode(prompt)

    def logits(
        self, input_ids: Tensor | Sequence[int] | Sequence[Sequence[int]], adapter: Any = None
    ) -> Any:
        """Logits of every token.

        Args:
            input_ids: [S] or [B, S], or lists of tokens of any lengths. Virtual tokens are not
                among them, and get no logits.
            adapter: one name for all, a name for each sequence, or None for the base.
        Returns:
            [S, V] for one sequence, [B, S, V] for a tensor of them, else a list of [S_i, V].
        """
        if isinstance(input_ids, Tensor):
            rows = input_ids.reshape(-1, input_ids.shape[-1]).tolist()
            flat = torch.cat(self.logits(rows, adapter))
            return flat.reshape(*input_ids.shape, -1)
        if not input_ids or isinstance(input_ids[0], int):
            return self.logits([cast("Sequence[int]", input_ids)], adapter)[0]
        sequences = cast("Sequence[Sequence[int]]", input_ids)
        adapters = self._adapters_of(len(sequences), adapter)
        order = self._stacks.order(adapters)
        for i, sequence in enumerate(sequences):
            if not sequence:
                raise GenerationError(f"sequence {i} has no tokens; give at least one")
        chosen = [adapters[i] for i in order]
        virtual = [0 if one is None else one.prompt_tokens for one in chosen]
        batch = whole_sequences([sequences[i] for i in order], self.device, virtual)
        sizes = [span.length for span in batch.spans]
        bound = self._stacks.bind(chosen, sizes)
        parts = self._runner.logits(batch, bound).split(sizes)
        own = [part[count:] for part, count in zip(parts, virtual, strict=True)]
        by_index = dict(zip(order, own, strict=True))
        return [by_index[i] for i in range(len(sequences))]

    # ------------------------------------------------------------------------------- adapters

    def add_adapter(self, name: str, path_or_config: object = "lora", *, seed: int = 0) -> Adapter:
        """Load an adapter from a directory in peft's format, or make a fresh one from a recipe.

        Args:
            name: to use it by.
            path_or_config: a directory, "lora", a peft LoraConfig, or a dict of its fields.
            seed: of a fresh adapter's weights.
        Raises:
            AdapterError: the name is taken, the files are damaged, or it fits another base.
            UnsupportedError: it has a feature that pcg does not do; it is named.
        """
        self.check_free(name)
        return self.put_adapter(self.make_adapter(name, path_or_config, seed=seed))

    def check_free(self, name: str) -> None:
        """AdapterError: there is an adapter of that name."""
        if name in self._adapters:
            raise AdapterError(f"there is an adapter {name!r} already; remove it first")

    def make_adapter(self, name: str, path_or_config: object = "lora", *, seed: int = 0) -> Adapter:
        """The same without using it: see `add_adapter`."""
        base = self.program.base
        modules = base.module_shapes()
        if isinstance(path_or_config, Path) or (
            isinstance(path_or_config, str) and not is_shorthand(path_or_config)
        ):
            adapter = read_adapter(path_or_config, name)
            check_fits(adapter, modules, self.program.name, base.output_module)
            adapter = with_shared(adapter, modules)
            check_biases(adapter, self._base_biases(adapter))
        else:
            fresh = new_adapter(
                name,
                recipe_from(path_or_config),
                modules,
                seed=seed,
                output_layer=base.output_module,
                model_type=str(self.program.config["model_type"]),
                base_weights=self._linear,
            )
            biases = self._base_biases(fresh)
            adapter = dataclasses.replace(fresh, biases=biases, base_model_name=self.program.name)
            check_biases(adapter, adapter.biases)
        return self.held(adapter)

    def put_adapter(self, adapter: Adapter, ready: ServingProgram | None = None) -> Adapter:
        """Use an adapter that is in memory, in place of one of that name.

        Args:
            adapter: to use.
            ready: what `program_for` found for it before; None compiles it now, if need be.
        """
        adapter = dataclasses.replace(adapter)
        before = dict(self._adapters)
        self._adapters[adapter.name] = adapter
        try:
            if not served_sources(adapter) <= self._serving.sources:
                served = [served_sources(other) for other in self._adapters.values()]
                if ready is None or not frozenset().union(*served) <= ready.sources:
                    ready = self.program_for(adapter)
                self._use(ready)
        except BaseException:
            self._adapters = before
            raise
        self._served.changed(adapter)
        if adapter.name in before:
            self._tell_engines(before[adapter.name])
        return adapter

    def program_for(self, adapter: Adapter) -> ServingProgram:
        """A program that serves an adapter beside those that are there; on any thread.

        It is the one that there is where that does.
        """
        if served_sources(adapter) <= self._serving.sources:
            return self._serving
        others = {**self._adapters, adapter.name: adapter}
        recipes = [other.recipe for other in others.values()]
        serving = self._specialiser.serving(self.program, recipes)
        check_same(self.ranks, {"the serving program": serving_text(serving)})
        return self._bound(serving)

    def remove_adapter(self, name: str) -> None:
        """Forget an adapter. AdapterError: there is none of that name."""
        adapter = self._adapter(name)
        self._stacks.forget(adapter)
        self._tell_engines(adapter)
        self._stale.pop(name, None)
        del self._adapters[name]

    def save_adapter(self, name: str, path: str | Path) -> None:
        """Write an adapter in peft's format; a good one at that path is replaced whole or not."""
        adapter = self._adapter(name)
        on_first(self.ranks, lambda: write_adapter(adapter, path))

    def _adapter(self, name: str) -> Adapter:
        self.settle_adapter(name)
        try:
            return self._adapters[name]
        except KeyError:
            there = ", ".join(sorted(self._adapters)) or "none"
            raise AdapterError(f"there is no adapter {name!r}; there are: {there}") from None

    def held(self, adapter: Adapter) -> Adapter:
        """The adapter in the program's adapter dtype, in the host's memory, as thousands are."""
        return self._moved(adapter, torch.device("cpu"))

    def trainable(self, adapter: Adapter) -> Adapter:
        """The same where it is trained: on this device; over ranks, which train pieces, as held."""
        return self._moved(adapter, self.device) if self.ranks.size == 1 else self.held(adapter)

    def _moved(self, adapter: Adapter, device: torch.device) -> Adapter:
        dtype = getattr(torch, TORCH_NAMES[self.adapter_dtype])
        tensors = (*adapter.tensors, *adapter.shared.values())
        if all(tensor.dtype is dtype and tensor.device == device for tensor in tensors):
            return dataclasses.replace(adapter)
        return adapter.map(lambda tensor: tensor.to(device, dtype))

    def _base_biases(self, adapter: Adapter) -> dict[str, Tensor]:
        """The base's biases that a fresh adapter trains, as they are."""
        biases: dict[str, Tensor] = {}
        for source, parameter in self.weight_store.frozen():
            module, _, kind = source.rpartition(".")
            if kind == "bias" and adapter.recipe.trains_bias(module, adapter.weights):
                biases[module] = self.weight_store.whole(source, parameter).clone()
        return biases

    @property
    def adapter_dtype(self) -> str:
        """Dtype of adapters: fp32 over a half-precision base, as peft has it, else the base's."""
        return "f64" if self.program.dtype == "f64" else "f32"

    def refresh_adapter(self, name: str, settle: Callable[[], None] | None = None) -> None:
        """Use an adapter's tensors as they are now, after they were changed in place.

        Args:
            name: of the adapter.
            settle: writes the tensors, which is done when they are next asked for; over ranks they
                exchange what they have trained.
        """
        if settle is not None and self.ranks.size > 1:
            self._stale[name] = settle
        self._served.changed(self._adapters[name])
        self._stacks.forget(self._adapters[name])
        self._tell_engines(self._adapters[name])

    def _tell_engines(self, adapter: Adapter) -> None:
        """Have engines drop what they keep of an adapter as it was."""
        for engine in self._engines:
            engine.forget(adapter)

    def settle_adapter(self, name: str) -> None:
        """Write an adapter's tensors, if they are yet to be."""
        settle = self._stale.pop(name, None)
        if settle is not None:
            settle()

    # ------------------------------------------------------------------------------- finetuning

    def finetune(
        self,
        data: Data,
        adapter: str = "default",
        *,
        peft: object = None,
        on_step: OnStep | None = None,
        **options: Any,
    ) -> FinetuneResult:
        """Train an adapter over the frozen base; the executor serves it as it changes.

        Args:
            data: a .jsonl or .txt file, rows, or `Example`s that are tokens already.
            adapter: its name; one that is not there is made.
            peft: the recipe of a new one, as `add_adapter` takes it; None is the one that the
                program was compiled for under that name, else "lora".
            on_step: told of each step when it is done, evaluated and saved.
            options: the fields of `FinetuneOptions` (epochs, batch_size, learning_rate, eval_data,
                checkpoint_dir, resume, …).
        Returns:
            The losses, and what else the job did; of all of it, where it was resumed.
        Raises:
            DataError: data that cannot be used, with file and line.
            FinetuneError: bad options, a loss that is no number, a checkpoint that cannot be saved
                or is of another job.
            FinetuneInterrupted: Ctrl-C; the adapter is as after the last whole step.
            UnsupportedError: a feature of the recipe that pcg does not train.
        """
        return finetune(self, data, adapter, FinetuneOptions.of(options), peft, on_step)

    def training_runner(self, name: str) -> TrainingRunner:
        """What computes losses and gradients of an adapter, which stays on this device."""
        adapter = self._adapter(name)
        here = self.device.type if self.ranks.size == 1 else "cpu"
        if any(tensor.device.type != here for tensor in adapter.tensors):
            adapter = self.put_adapter(self.trainable(adapter))
        return self.training_runner_of(adapter)

    def training_runner_of(self, adapter: Adapter, windows: bool = False) -> TrainingRunner:
        """The same of an adapter that need not be one of this executor's.

        Args:
            adapter: to train.
            windows: whether sequences go through the KV cache, window by window; as whole ones, by
                default.
        """
        name = adapter.name
        if adapter.recipe.encoder is not None and not adapter.encoder:
            raise UnsupportedError(
                f"adapter {name!r} cannot be trained: {adapter.recipe.method} trains "
                f"{adapter.recipe.encoder}, of which a saved adapter holds what it made alone; "
                "train a fresh one, or go on from a checkpoint"
            )
        training = self._trainings.of(adapter, windows)
        return TrainingRunner(training, self.weight_store.bind(training.model), adapter, self.ranks)
