"""`pcg run`: generate completions of prompts, each with its own adapter, in one batch."""

from __future__ import annotations

import math
import sys
import time
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import asdict, dataclass, replace
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import typer

from pcg.errors import UnsupportedError
from pcg.options import CompileOptions
from pcg.runtime.sampling.sampling_params import SamplingParams
from pcg.runtime.training.options import ChatOptions
from pcg.units import counted

from .options.console import err, out, print_json
from .options.executors import PlaceOptions, degree_of, on_ranks, open_executor
from .options.fields import Given, Json, Only, Runnable, flags_of
from .options.method import Method

if TYPE_CHECKING:
    from pcg.runtime.executor import Executor
    from pcg.runtime.requests.request import Chunk, Completion
    from pcg.runtime.sampling.logprobs import TokenLogprobs


@dataclass(frozen=True)
class Prompt:
    """A prompt and the name of its adapter; None selects the base model."""

    text: str
    adapter: str | None


def wait_completions(chunks: Iterator[Chunk], prompts: Sequence[Prompt]) -> list[Completion]:
    """Collect the final completion of each prompt, in the order of the prompts."""
    completions = {
        chunk.index: chunk.completion for chunk in chunks if chunk.completion is not None
    }
    return [completions[index] for index in range(len(prompts))]


def stream_completions(chunks: Iterator[Chunk], prompts: Sequence[Prompt]) -> list[Completion]:
    """Print each prompt and its completion as it is generated, in the order of the prompts.

    Text of a later prompt is buffered until all earlier prompts have finished.
    """
    waiting: list[list[str]] = [[] for _ in prompts]
    completions: dict[int, Completion] = {}
    current = 0
    for count, chunk in enumerate(chunks):
        if not count:  # the first chunk shows that the prompts were accepted
            _head(prompts, current)
        waiting[chunk.index].append(chunk.text)
        if chunk.completion is not None:
            completions[chunk.index] = chunk.completion
        while current < len(prompts):
            _text("".join(waiting[current]))
            waiting[current].clear()
            if current not in completions:
                break
            _text("\n")
            current += 1
            if current < len(prompts):
                _head(prompts, current)
    return [completions[index] for index in range(len(prompts))]


def _head(prompts: Sequence[Prompt], index: int) -> None:
    """Print the prompt, dim; with several prompts, print a title with its adapter first."""
    prompt = prompts[index]
    console = out()
    if len(prompts) > 1:
        if index:
            console.print()
        console.print(f"── {index + 1} · {prompt.adapter or 'base'} ──", style="bold cyan")
    typer.secho(prompt.text, dim=True, nl=False)  # rich would expand tabs


def _text(text: str) -> None:
    sys.stdout.write(text)
    sys.stdout.flush()


def _logprobs(name: str, tokens: Sequence[TokenLogprobs | None] | None) -> dict[str, Any]:
    """Return requested log probabilities as JSON; null marks a token without one."""
    if tokens is None:
        return {}
    return {name: [None if token is None else _as_json(token) for token in tokens]}


def _as_json(token: TokenLogprobs) -> dict[str, Any]:
    top = [(text, None if math.isinf(value) else value) for text, value in token.top]
    return {**asdict(token), "top": top}


def summary_of(
    model: str, prompts: Sequence[Prompt], completions: list[Completion], seconds: float
) -> dict[str, Any]:
    """Return the completions as JSON, in the order of the prompts."""
    tokens = sum(len(completion.token_ids) for completion in completions)
    return {
        "model": model,
        "completions": [
            {
                "prompt": prompt.text,
                "adapter": prompt.adapter,
                "text": completion.text,
                "token_ids": list(completion.token_ids),
                "finish_reason": completion.finish_reason,
                "stop_reason": completion.stop_reason,
                "prompt_tokens": completion.prompt_tokens,
                "index": completion.index,
                **_logprobs("logprobs", completion.logprobs),
                **_logprobs("prompt_logprobs", completion.prompt_logprobs),
            }
            for prompt, completion in zip(prompts, completions, strict=True)
        ],
        "tokens": tokens,
        "seconds": round(seconds, 4),
        "tokens_per_s": round(tokens / seconds, 1),
    }


FRESH = "default"
"""Name of the fresh adapter that `--peft` adds."""
SERVING = (
    "tp", "ep", "costs", "tp_plan", "sequence_parallel", "dtype", "backend", "adapter_copies",
    "attention", "packed_weights", "latent_cache", "quantization", "labels",
)  # fmt: skip
"""Compile options that also apply to serving."""


@dataclass(frozen=True, kw_only=True)
class PromptOptions(ChatOptions):
    """The prompts and the adapters of a command.

    Attributes:
        prompt: a prompt. Repeatable.
        prompt_file: a file whose whole text is a prompt; - is standard input. Repeatable.
        adapter: an adapter to load, in peft's format, as NAME=PATH or NAME=HUB_ID. Repeatable.
        use: the adapter of all prompts, or, given once per prompt, of each prompt; base selects
            none. Required if several adapters are loaded.
        chat: treat a prompt as a user message and apply the chat template.
    """

    prompt: Sequence[str] = ()
    prompt_file: Sequence[str] = ()
    adapter: Mapping[str, Path] | None = None
    use: Sequence[str] = ()
    chat: bool = False

    def prompts(self, fresh: bool) -> list[Prompt]:
        """Return the prompts, each with the name of its adapter.

        Args:
            fresh: True if `--peft` adds a fresh adapter to the loaded adapters.
        Raises:
            typer.BadParameter: no prompt, or an ambiguous choice of adapters.
        """
        if not self.chat and (self.chat_template or self.chat_template_kwargs):
            raise typer.BadParameter("it is of chats; add --chat", param_hint="--chat-template")
        texts = [*self.prompt, *map(_read, self.prompt_file)]
        if not texts:
            raise typer.BadParameter(
                "give a prompt, by this or by --prompt-file", param_hint="--prompt"
            )
        names = [*(self.adapter or {}), *([FRESH] if fresh else [])]
        used = _used(self.use, names, len(texts))
        return [Prompt(text, name) for text, name in zip(texts, used, strict=True)]


def run_command(
    program: Runnable,
    asked: PromptOptions,
    sampling: Given[SamplingParams],
    method: Method,
    compiling: Annotated[Given[CompileOptions], Only(SERVING)],
    place: PlaceOptions,
    json: Json = False,
) -> None:
    """Generate completions of prompts, each with its own adapter, in one batch.

    --peft adds a fresh adapter of that method, called default.
    """
    for name in ("logprobs", "prompt_logprobs"):
        if name in sampling.values and not json:
            raise typer.BadParameter(
                "--json alone prints them; add it", param_hint=flags_of(name)[0]
            )
    prompts = asked.prompts(method.is_given)
    degree = degree_of(program, compiling.values, place)
    fresh = method.one() if method.is_given else None
    compiled = {**compiling.values, "tp": degree}
    act = partial(complete, program, prompts, asked, fresh, sampling.values, compiled, place, json)
    on_ranks(degree * place.groups, act)


def complete(
    program: str,
    prompts: Sequence[Prompt],
    asked: PromptOptions,
    fresh: Any,
    sampling: Mapping[str, Any],
    compiling: Mapping[str, Any],
    place: PlaceOptions,
    json: bool,
) -> None:
    """Generate and print the completions on this rank; `fresh` configures the fresh adapter."""
    from pcg.ir.program.program import labels_of

    executor = open_executor(program, asked.adapter, compiling, place)
    if fresh is not None:
        executor.add_adapter(FRESH, fresh)
    texts = [item.text for item in prompts]
    if labels_of(executor.program.config):
        if unread := [flags_of(name)[0] for name in (*sampling, *["chat"] * asked.chat)]:
            raise UnsupportedError(
                f"{', '.join(unread)}: a sequence classifier answers a text by labels; leave "
                f"{'it' if len(unread) == 1 else 'them'} out"
            )
        _classify(executor, prompts, json)
        return
    inputs: Sequence[Any] = texts
    if asked.chat:
        inputs = [_chat(executor, item, asked) for item in prompts]
    started = time.perf_counter()
    names = [item.adapter for item in prompts]
    generated = executor.generate(inputs, names, stream=True, **sampling)
    count = sampling.get("n", 1)
    chunks = (replace(chunk, index=chunk.index * count + chunk.choice) for chunk in generated)
    # With `echo` the completion's text already contains the prompt.
    is_shown_twice = bool(sampling.get("echo")) and not json
    # A chat's answer begins a line; a completion continues the prompt.
    end = "\n" if asked.chat and not json else ""
    shown = [replace(item, text="" if is_shown_twice else item.text + end) for item in prompts]
    prompts = [item for item in shown for _ in range(count)]
    show = wait_completions if json else stream_completions
    completions = show(chunks, prompts)
    seconds = time.perf_counter() - started
    if json:
        print_json(summary_of(executor.program.name, prompts, completions, seconds))
        return
    tokens = sum(len(completion.token_ids) for completion in completions)
    reasons = {"stop": "ended", "length": "cut at --max-new-tokens or the model's positions"}
    ends = ", ".join(dict.fromkeys(reasons[completion.finish_reason] for completion in completions))
    digits = 0 if tokens > 9 * seconds else 1
    err().print(
        f"{counted(tokens, 'token')}, {tokens / seconds:,.{digits}f} tokens/s; {ends}",
        style="dim",
        soft_wrap=True,
    )


def _classify(executor: Executor, prompts: Sequence[Prompt], json: bool) -> None:
    """Print the probability of each label of a sequence classifier, the likeliest first."""
    shares = executor.classify([p.text for p in prompts], [p.adapter for p in prompts])
    if json:
        rows = zip(prompts, shares, strict=True)
        each = [{"prompt": p.text, "adapter": p.adapter, "labels": labels} for p, labels in rows]
        print_json({"model": executor.program.name, "classifications": each})
        return
    for prompt, labels in zip(prompts, shares, strict=True):
        ordered = sorted(labels.items(), key=lambda item: -item[1])
        out().print(prompt.text, markup=False, highlight=False)
        out().print("  " + ", ".join(f"{label} {share:.3f}" for label, share in ordered))


def _read(name: str) -> str:
    try:
        return sys.stdin.read() if name == "-" else Path(name).read_text(encoding="utf-8")
    except OSError as error:
        raise typer.BadParameter(f"{name}: {error.strerror}", param_hint="--prompt-file") from error
    except UnicodeDecodeError as error:
        raise typer.BadParameter(
            f"{name}: byte {error.start} is not UTF-8", param_hint="--prompt-file"
        ) from error


def _used(use: Sequence[str], adapters: Sequence[str], count: int) -> list[str | None]:
    if not use:
        if len(adapters) > 1:
            raise typer.BadParameter(
                f"say which of {', '.join(adapters)} to use, once for all prompts or once for each",
                param_hint="--use",
            )
        return [next(iter(adapters), None)] * count
    if len(use) not in (1, count):
        raise typer.BadParameter(
            f"given {len(use)} times for {counted(count, 'prompt')}; give it once, or once for "
            "each",
            param_hint="--use",
        )
    for name in use:
        if name not in adapters and name != "base":
            known = ", ".join(["base", *adapters])
            raise typer.BadParameter(
                f"no adapter is called {name!r}; there are: {known}", param_hint="--use"
            )
    names = [None if name == "base" and name not in adapters else name for name in use]
    return names * count if len(names) == 1 else names


def _chat(executor: Executor, prompt: Prompt, asked: ChatOptions) -> list[int]:
    if executor.tokenizer is None:
        raise typer.BadParameter("the model has no tokenizer.json", param_hint="--chat")
    tokenizer = executor.chat_tokenizer(prompt.adapter, asked.chat_template)
    return tokenizer.encode_chat([{"role": "user", "content": prompt.text}], **asked.variables())
