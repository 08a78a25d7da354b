"""The executor: a compiled program with weights, adapters and a tokenizer."""

from __future__ import annotations

import os
import tempfile
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import replace
from functools import partial
from pathlib import Path
from typing import Any, Literal, TypeVar, Unpack, cast, get_args, overload

import torch
from torch import Tensor

from pcg.errors import AdapterError, FinetuneError, GenerationError, UnsupportedError
from pcg.files import expanded, is_there, write_text
from pcg.ir.program.program import Program, labels_of, short_positions
from pcg.ir.types import TORCH_NAMES
from pcg.kernels.devices import on_device
from pcg.keywords import takes
from pcg.pages import fact_table
from pcg.peft.adapter import Adapter
from pcg.peft.adapter_files import has_adapter, write_adapter, write_template
from pcg.peft.arithmetic import CombineArguments, combined
from pcg.peft.model_card import NAME as CARD
from pcg.peft.model_card import model_card
from pcg.ranks.agreement import agreed, check_call, check_same
from pcg.ranks.group import Ranks, run_on_first
from pcg.runtime.engine.async_engine import AsyncEngine
from pcg.runtime.engine.engine import Engine
from pcg.runtime.engine.options import EngineArguments
from pcg.runtime.engine.rank_commands import put_adapter
from pcg.runtime.model.state import ModelState, NamedAdapter, ServingProgram
from pcg.runtime.requests.plain import adapter_facts, sequence_facts
from pcg.runtime.requests.request import (
    Chunk,
    Completion,
    Pooling,
    Request,
    RequestFields,
    classifying,
    completions_of,
    label_probabilities,
    make_request,
    make_requests,
)
from pcg.runtime.sampling.sampling_params import SamplingFields
from pcg.runtime.text.chat import ChatTemplate, Message
from pcg.runtime.text.tokenizer import Tokenizer
from pcg.runtime.training.finetuning import finetune
from pcg.runtime.training.options import FinetuneArguments, FinetuneResult
from pcg.runtime.training.runner import TrainingRunner, training_runner
from pcg.runtime.training.trainer.datum import TrainerArguments
from pcg.runtime.training.trainer.trainer import Trainer, trainer_here
from pcg.source import push_adapter
from pcg.value_checks import check_padding


def whole_logits(
    state: ModelState,
    sequences: Sequence[Sequence[int]],
    adapter: NamedAdapter | Sequence[NamedAdapter],
) -> list[Tensor]:
    """Compute the logits of all tokens of whole sequences; see `Executor.logits`."""
    adapters = state.adapters_of(len(sequences), adapter)
    check_same(state.world, "logits", sequence_facts(sequences, adapters))
    short = short_positions(state.program.config)
    for i, sequence in enumerate(sequences):
        if not sequence:
            raise GenerationError(f"sequence {i} has no tokens; give at least one")
        if short is not None and len(sequence) > short:
            raise UnsupportedError(
                f"sequence {i} has {len(sequence)} tokens; beyond {short}, the model has other "
                "rotary frequencies or sparse attention, which pcg does not compute; use a shorter "
                "sequence"
            )
        check_padding(sequence, f"sequence {i}", state.program.padding, UnsupportedError)
    return state.logits(state.serving.runner, state.serving.tables, sequences, adapters)


Result = TypeVar("Result")


NO_TOKENIZER = (
    "the model has no tokenizer; put a tokenizer.json into its directory (in Python, set "
    "executor.tokenizer)"
)


class Executor:
    """Serves and finetunes many adapters over one frozen base model.

    `pcg.compile` and `pcg.load` return an executor. Each rank of a group has an executor, and all
    executors receive the same calls in the same order.
    """

    def __init__(self, state: ModelState) -> None:
        self.state = state

    def _repr_html_(self) -> str:
        """Return the model and its adapters as a table, which notebooks show."""
        base = self.program.base
        facts = {
            "layers": len(base.layers),
            "dtype": TORCH_NAMES[base.dtype],
            "device": self.device,
            "ranks": self.ranks.size,
            "adapters": ", ".join(self.adapters) or "none",
        }
        return fact_table(f"{self.program.config['model_type']} of pcg", facts)

    @property
    def program(self) -> Program:
        return self.state.program

    @property
    def serving(self) -> ServingProgram:
        """The current serving program, with its weights."""
        return self.state.serving

    @property
    def ranks(self) -> Ranks:
        return self.state.world

    @property
    def device(self) -> torch.device:
        """The device of the weights."""
        return self.state.device

    @property
    def tokenizer(self) -> Tokenizer | None:
        """The model's tokenizer; None without a tokenizer.json."""
        return self.state.tokenizer

    @tokenizer.setter
    def tokenizer(self, tokenizer: Any) -> None:
        """Replace the tokenizer by that of a directory, of a hub id, or of transformers.

        Raises:
            EngineError: an engine runs.
            ModelNotFoundError, ConfigError: the tokenizer cannot be read.
        """
        self.state.check_no_engine("another tokenizer", "set it before the engine starts")
        self.state.set_tokenizer(None if tokenizer is None else Tokenizer.of(tokenizer))

    @property
    def max_positions(self) -> int | None:
        """The number of positions of the model; None if its configuration names no bound."""
        return self.state.max_positions

    @property
    def adapters(self) -> Mapping[str, Adapter]:
        """The adapters by name."""
        return self.state.adapters

    @property
    def adapter_dtype(self) -> str:
        """Dtype of adapters: fp32 over a half-precision base, as in peft, else the base's."""
        return self.state.adapter_dtype

    # ------------------------------------------------------------------------------- generation

    @overload
    def generate(  # type: ignore[overload-overlap]  # a text is a sequence of texts, too
        self,
        prompts: str,
        adapter: str | None = ...,
        *,
        stream: Literal[False] = ...,
        **sampling: Unpack[SamplingFields],
    ) -> Completion: ...
    @overload
    def generate(
        self,
        prompts: Sequence[str] | Sequence[Sequence[int]],
        adapter: str | Sequence[str | None] | None = ...,
        *,
        stream: Literal[False] = ...,
        **sampling: Unpack[SamplingFields],
    ) -> list[Completion]: ...
    @overload
    def generate(
        self,
        prompts: str | Sequence[str] | Sequence[Sequence[int]],
        adapter: str | Sequence[str | None] | None = ...,
        *,
        stream: Literal[True],
        **sampling: Unpack[SamplingFields],
    ) -> Iterator[Chunk]: ...
    def generate(
        self,
        prompts: str | Sequence[str] | Sequence[Sequence[int]],
        adapter: str | Sequence[str | None] | None = None,
        *,
        stream: bool = False,
        **sampling: Unpack[SamplingFields],
    ) -> Completion | list[Completion] | Iterator[Chunk]:
        """Continue prompts, each with its own adapter, in a batch without padding.

        If an engine runs on a thread, that engine serves the prompts, and chunks are ordered by
        prompt.

        Args:
            prompts: a text, texts, or lists of token ids.
            adapter: a name for all prompts, a name for each prompt, or None for the base.
            stream: return an iterator over chunks of text.
            sampling: the fields of `SamplingParams` (max_new_tokens, temperature, top_k, top_p,
                seed, stop, …); a list gives each prompt its own parameters. With a seed, prompt i
                samples with seed + i.
        Returns:
            A completion for a single text, else a list of completions in order of prompts; with n
                above 1, the n continuations of the first prompt, then those of the second, ….
        Raises:
            GenerationError: an empty prompt, a prompt longer than the model's positions, bad
                options, or non-finite logits.
            EngineError: the caller is a callback of a running engine, which would wait for itself.
            AdapterError: no adapter has that name.
        """
        single = isinstance(prompts, str)
        several = [prompts] if isinstance(prompts, str) else prompts
        chunks = self._served(make_requests(self.state, several, adapter, sampling))
        if stream:
            return chunks
        completions = completions_of(chunks)
        return completions[0] if single and len(completions) == 1 else completions

    def classify(
        self, texts: str | Sequence[str], adapter: str | Sequence[str | None] | None = None
    ) -> list[dict[str, float]]:
        """Return the probability of each label of a sequence classifier, for each text.

        Args:
            texts: a text, texts, or lists of token ids.
            adapter: a name for all texts, a name for each, or None for the base.
        Raises:
            GenerationError: the model is no sequence classifier, or as in `generate`.
        """
        labels = labels_of(self.program.config)
        if not labels:
            raise GenerationError(
                "the model is a causal LM; compile it with labels=[…], or give a checkpoint of a "
                "sequence classifier"
            )
        several = [texts] if isinstance(texts, str) else texts
        requests = make_requests(self.state, several, adapter, classifying(len(labels)))
        each = map(label_probabilities, completions_of(self._served(requests)))
        return [dict(zip(labels, probabilities, strict=True)) for probabilities in each]

    @overload
    def chat(
        self,
        messages: Sequence[Message],
        adapter: str | None = ...,
        *,
        stream: Literal[False] = ...,
        chat_template: str | os.PathLike[str] | None = ...,
        chat_template_kwargs: Mapping[str, Any] | None = ...,
        **sampling: Unpack[SamplingFields],
    ) -> Completion: ...
    @overload
    def chat(
        self,
        messages: Sequence[Message],
        adapter: str | None = ...,
        *,
        stream: Literal[True],
        chat_template: str | os.PathLike[str] | None = ...,
        chat_template_kwargs: Mapping[str, Any] | None = ...,
        **sampling: Unpack[SamplingFields],
    ) -> Iterator[Chunk]: ...
    def chat(
        self,
        messages: Sequence[Message],
        adapter: str | None = None,
        *,
        stream: bool = False,
        chat_template: str | os.PathLike[str] | None = None,
        chat_template_kwargs: Mapping[str, Any] | None = None,
        **sampling: Unpack[SamplingFields],
    ) -> Completion | Iterator[Chunk]:
        """Answer a conversation, rendered by the chat template of the adapter or of the model.

        Args:
            messages: {"role", "content"} in order; the last is usually the user's.
            adapter: a name, or None for the base.
            stream: return an iterator over chunks of text.
            chat_template: the template, instead of the adapter's: a file, or its text.
            chat_template_kwargs: variables of the template, such as enable_thinking.
            sampling: as in `generate`, with n=1.
        Raises:
            ConfigError: the template cannot be used.
            GenerationError: no tokenizer or template, a refused message, or as in `generate`.
            AdapterError: no adapter has that name.
        """
        if sampling.get("n", 1) != 1:
            raise GenerationError(f"n={sampling['n']}; a chat has one answer, use generate")
        tokenizer = self.chat_tokenizer(adapter, chat_template)
        ids = tokenizer.encode_chat(messages, **(chat_template_kwargs or {}))
        if stream:
            return self.generate([ids], adapter, stream=True, **sampling)
        (completion,) = self.generate([ids], adapter, **sampling)
        return completion

    def chat_tokenizer(
        self, adapter: str | None = None, chat_template: str | os.PathLike[str] | None = None
    ) -> Tokenizer:
        """Return the tokenizer with the template that renders chats with an adapter.

        The tokens that end an answer stay those of the model.

        Args:
            chat_template: the template, instead of the adapter's: a file, or its text.
        Raises:
            ConfigError, GenerationError, AdapterError: see `chat`.
        """
        if self.tokenizer is None:
            raise GenerationError(NO_TOKENIZER)
        if chat_template is not None:
            return replace(self.tokenizer, chat_template=ChatTemplate.read(chat_template))
        template = None if adapter is None else self.state.adapter(adapter).chat_template
        return self.tokenizer if template is None else self.tokenizer.with_template(template)

    def embed(
        self,
        prompts: str | Sequence[str] | Sequence[Sequence[int]],
        adapter: str | Sequence[str | None] | None = None,
        *,
        pooling: Pooling = "last",
        normalize: bool = False,
        truncate_prompt_tokens: int | None = None,
    ) -> Tensor:
        """Compute the last hidden states of prompts, each with its own adapter, in a batch.

        The last hidden state is the head's input after the last norm, as transformers'
        `last_hidden_state`. If an engine runs on a thread, that engine computes the states together
        with its requests.

        Args:
            prompts: a text, texts, or lists of token ids.
            adapter: a name for all prompts, a name for each prompt, or None for the base.
            pooling: "last" for the state of the last token, "mean" for the mean over the prompt's
                tokens; virtual tokens of the adapter do not count.
            normalize: divide each state by its norm.
            truncate_prompt_tokens: keep only this number of a prompt's last tokens.
        Returns:
            [hidden] for a single text, else [prompts, hidden]; fp32, in host memory.
        Raises:
            GenerationError: see `generate`; or non-finite states.
            AdapterError: no adapter has that name.
            ProgramError: the program was compiled by an older pcg without embeddings.
        """
        several = [prompts] if isinstance(prompts, str) else prompts
        if not several:
            raise GenerationError("there are no prompts to embed; give at least one")
        if pooling not in get_args(Pooling):
            raise GenerationError(f"pooling={pooling!r}; use 'last' or 'mean'")
        sampling = {"max_new_tokens": 0, "truncate_prompt_tokens": truncate_prompt_tokens}
        plain = make_requests(self.state, several, adapter, sampling)
        requests = [replace(item, pooling=pooling, normalize=normalize) for item in plain]
        completions = completions_of(self._served(requests))
        states = torch.stack([cast("Tensor", item.embedding) for item in completions])
        return states[0] if isinstance(prompts, str) else states

    def _served(self, requests: Sequence[Request]) -> Iterator[Chunk]:
        """Serve requests by the engine that runs on a thread, or by a temporary engine."""
        running = cast("AsyncEngine | None", self.state.engine_thread)
        return self._run(requests) if running is None else running.stream_all(requests)

    def _run(self, requests: Sequence[Request]) -> Iterator[Chunk]:
        """Serve requests by a temporary engine."""
        with on_device(self.device):
            engine = Engine.for_requests(self.state, requests)
        for request in requests:
            engine.submit(request)
        engine.wait_prepared()
        while not engine.is_idle:
            for chunk in engine.step():
                if chunk.error is not None:
                    raise chunk.error
                yield chunk

    @takes(EngineArguments)
    def engine(self, options: EngineArguments) -> Engine:
        """Create an engine, which serves requests and trains adapters at the same time.

        Raises:
            EngineError: an engine already runs on a thread.
            UnsupportedError: the mesh has replicas.
        """
        self.state.mesh.check_no_replicas("an engine")
        self.state.check_no_engine("a second engine", "close the first one, or use that")
        with on_device(self.device):
            return Engine(self.state, options)

    @property
    def _driving(self) -> AsyncEngine | None:
        """The engine with a thread that broadcasts calls to all ranks; None without."""
        return cast("AsyncEngine | None", self.state.engine_thread) if self.ranks.size > 1 else None

    def _between_steps(self, act: Callable[[], Result]) -> Result:
        """Run a function now, or between two steps of the engine that runs on a thread."""
        running = self.state.engine_thread
        if running is not None:
            return running.run(act)
        with on_device(self.device):
            return act()

    def request(
        self,
        prompt: str | Sequence[int],
        adapter: NamedAdapter = None,
        **fields: Unpack[RequestFields],
    ) -> Request:
        """Create a request for an engine.

        Args:
            prompt: text, or token ids.
            adapter: the adapter's name, for its current version; or an adapter object of
                `adapters`, even if it was replaced; None for the base.
            fields: the tenant and the times of `Request`, and the fields of `SamplingParams`.
        Raises:
            GenerationError: an empty prompt, text without a tokenizer, or bad options.
            AdapterError: no adapter has that name.
        """
        return make_request(self.state, prompt, adapter, fields)

    def logits(
        self, input_ids: Tensor | Sequence[int] | Sequence[Sequence[int]], adapter: Any = None
    ) -> Any:
        """Compute the logits of every token.

        Args:
            input_ids: [S] or [B, S], or lists of tokens of any lengths. The adapter adds virtual
                tokens, which get no logits.
            adapter: a name for all sequences, a name for each, or None for the base.
        Returns:
            [S, V] for a single sequence, [B, S, V] for a tensor [B, S], else a list of [S_i, V].
        Raises:
            UnsupportedError: LongRoPE would rotate a sequence of this length by other factors.
        """
        if isinstance(input_ids, Tensor):
            rows = input_ids.reshape(-1, input_ids.shape[-1]).tolist()
            flat = torch.cat(self.logits(rows, adapter))
            return flat.reshape(*input_ids.shape, -1)
        if not input_ids or isinstance(input_ids[0], int):
            return self.logits([cast("Sequence[int]", input_ids)], adapter)[0]
        sequences = cast("Sequence[Sequence[int]]", input_ids)
        return self._between_steps(lambda: whole_logits(self.state, sequences, adapter))

    # ------------------------------------------------------------------------------- adapters

    def add_adapter(
        self,
        name: str,
        path_or_config: object = "lora",
        *,
        seed: int = 0,
        replace: bool = False,
        expected_version: int | None = None,
    ) -> Adapter:
        """Load an adapter from a directory in peft's format, or create one from a recipe.

        Args:
            path_or_config: a directory, "lora", a peft LoraConfig, or a dict of its fields.
            replace: replace an existing adapter by the next version; running requests keep their
                version. If the new adapter cannot be loaded, the old adapter stays.
            expected_version: number of the only version to replace; 0 for a new name.
        Raises:
            AdapterConflictError: the name is in use, has another version than expected, or a job
                trains the adapter.
            AdapterError: the files are damaged, or the adapter fits another base.
            UnsupportedError: the adapter has a feature that pcg does not support.
        """
        if (driving := self._driving) is not None:
            add_there = partial(driving.add_adapter, replace=replace, seed=seed)
            return add_there(name, path_or_config, expected_version=expected_version).result()

        def add() -> Adapter:
            def make() -> Adapter:
                self.state.check_free(name, replace=replace, expected_version=expected_version)
                return self.state.make_adapter(name, path_or_config, seed=seed)

            return put_adapter(self.state, name, make)

        return self._between_steps(add)

    @takes(CombineArguments, AdapterError)
    def combine_adapters(self, arguments: CombineArguments) -> Adapter:
        """Add a LoRA adapter that combines others, as peft's `add_weighted_adapter`.

        Raises:
            AdapterConflictError: the name is in use, or a job trains the adapter.
            AdapterError: no adapter has a name, or an argument is out of its range.
            UnsupportedError: an adapter is no plain LoRA on linear modules.
        """
        state, name = self.state, arguments.name
        if self._driving is not None:
            state.check_no_engine("combine_adapters over ranks", "close it first")

        def make() -> Adapter:
            state.check_free(name, replace=arguments.replace)
            adapters = [state.on_host(state.adapter(each)) for each in arguments.adapters]
            return combined(arguments, adapters, state.program.base.module_shapes())

        return self._between_steps(lambda: put_adapter(state, name, make))

    def remove_adapter(self, name: str) -> None:
        """Remove an adapter. AdapterError: no adapter has the name."""
        if (driving := self._driving) is not None:
            driving.remove_adapter(name).result()
            return
        check_call(self.ranks, f"remove_adapter({name!r})")
        self._between_steps(lambda: self.state.remove_adapter(name))

    def save_adapter(self, name: str, path: str | Path, *, overwrite: bool = False) -> None:
        """Write an adapter in peft's format, with the tokenizer and a model card.

        Args:
            overwrite: replace the adapter that the directory has.
        Raises:
            AdapterError: no adapter has the name, the directory has an adapter, or it cannot be
                written.
        """
        adapter, directory = self.state.adapter(name), expanded(path)

        def write() -> None:
            if has_adapter(directory) and not overwrite:
                raise AdapterError(
                    f"{path} has a saved adapter; give another directory, or overwrite=True"
                )
            write_adapter(adapter, path)
            if not is_there(card := directory / CARD):
                write_text(card, model_card(adapter))
            if self.tokenizer is not None:
                self.tokenizer.save(directory)
            write_template(adapter, directory)

        if (driving := self._driving) is not None:
            driving.check_open()
            write()
            return
        check_call(self.ranks, f"save_adapter({name!r})")
        run_on_first(self.ranks, write)

    def push_to_hub(
        self,
        name: str,
        repo: str,
        *,
        private: bool | None = None,
        token: str | None = None,
        message: str = "Upload an adapter",
    ) -> str:
        """Upload an adapter, as `save_adapter` writes it; return the address of the commit.

        Args:
            repo: the hub's OWNER/NAME; created if it does not exist.
            private: create a private repository; None for the owner's default.
            token: the hub's token; by default that of `hf auth login` or HF_TOKEN.
            message: the message of the commit.
        Raises:
            AdapterError: no adapter has the name, or the hub refuses the upload.
        """
        urls: list[str] = []

        def push() -> None:
            options: dict[str, Any] = {"private": private, "token": token}
            urls.append(push_adapter(directory, repo, message=message, **options))

        with tempfile.TemporaryDirectory() as directory:
            self.save_adapter(name, directory)
            run_on_first(self.ranks, push)
        return "".join(urls)

    def refresh_adapter(self, name: str) -> None:
        """Serve an adapter's tensors after a change in place, as the next version."""

        def refresh() -> None:
            adapter = partial(self.state.adapter, name)
            agreed(self.ranks, f"refresh_adapter({name!r})", adapter, adapter_facts)
            self.state.refresh_adapter(name)

        self._between_steps(refresh)

    # ------------------------------------------------------------------------------- finetuning

    @takes(FinetuneArguments, FinetuneError)
    def finetune(self, arguments: FinetuneArguments) -> FinetuneResult:
        """Train an adapter over the frozen base; the executor serves the adapter as it changes.

        Returns:
            The losses and other facts of the job, including the part before a resume.
        Raises:
            DataError: unusable data; names file and line.
            FinetuneError: bad options, a non-finite loss, or a checkpoint that cannot be saved or
                belongs to another job.
            FinetuneInterrupted: Ctrl-C; the adapter has the state of the last complete step.
            UnsupportedError: the recipe has a feature that pcg does not train.
            EngineError: an engine runs on a thread; call its `finetune`.
        """
        self.state.check_no_engine("Executor.finetune", "call finetune of that engine")
        with on_device(self.device):
            return finetune(self.state, arguments, self.generate)

    @takes(TrainerArguments, FinetuneError)
    def trainer(self, arguments: TrainerArguments) -> Trainer:
        """Create a trainer, which trains an adapter by commands.

        `Trainer.snapshot` publishes the adapter. If an engine runs on a thread, commands run
        together with the engine's requests; `AsyncEngine.trainer` returns an asynchronous trainer.

        Raises:
            AdapterConflictError: a job or trainer already trains an adapter of that name.
            FinetuneError: bad options.
            UnsupportedError: the recipe has a feature that pcg does not train; or several ranks.
        """
        self.state.mesh.check_alone("trainers")
        running = cast("AsyncEngine | None", self.state.engine_thread)
        if running is None:
            return trainer_here(self.state, arguments)
        beside = running.begin_trainer(arguments)
        try:
            beside.created.wait()
        except BaseException:
            beside.end()
            raise
        return Trainer(arguments.name, lambda command: beside.run(command).wait(), beside.end)

    def training_runner(self, name: str) -> TrainingRunner:
        """Return a runner of losses and gradients of an adapter, which moves to the device."""
        self.state.mesh.check_no_parts("a training runner")
        self.state.check_no_engine("a training runner", "close it first")
        check_call(self.ranks, f"training_runner({name!r})")
        adapter = self.state.adapter(name)
        here = self.device.type if self.state.mesh.model.size == 1 else "cpu"
        if any(tensor.device.type != here for tensor in adapter.tensors):
            adapter = self.state.put_adapter(self.state.for_training(adapter))
        return training_runner(self.state, adapter)
