"""`pcg run`: continue prompts, each with its own adapter, in one batch."""

from __future__ import annotations

import sys
import time
from collections.abc import Sequence
from pathlib import Path
from typing import Annotated, Any

import typer

from .arguments import (
    Device,
    Dtype,
    Json,
    ModelBackend,
    Ranks,
    Runnable,
    SequenceParallel,
    TrustEdits,
    WeightsPlace,
    adapters_of,
)
from .completions import (
    Prompt,
    print_completions,
    stream_completions,
    summary_of,
    wait_completions,
)
from .console import count_text, err, print_json
from .executors import on_ranks, open_executor, ranks_of

SAMPLING = "Sampling"


def run_command(
    program: Runnable,
    prompt: Annotated[
        list[str] | None, typer.Option("--prompt", "-p", help="Repeatable.", metavar="TEXT")
    ] = None,
    prompt_file: Annotated[
        list[str] | None,
        typer.Option(
            help="A file that is one prompt as a whole; - is standard input. Repeatable.",
            metavar="FILE",
        ),
    ] = None,
    adapter: Annotated[
        list[str] | None,
        typer.Option(help="An adapter to load, in peft's format. Repeatable.", metavar="NAME=PATH"),
    ] = None,
    use: Annotated[
        list[str] | None,
        typer.Option(
            help="The adapter of all prompts; or, once for each prompt, of that one. base is none. "
            "Needed where several are loaded.",
            metavar="NAME",
        ),
    ] = None,
    chat: Annotated[
        bool, typer.Option("--chat", help="A prompt is a message: apply the chat template.")
    ] = False,
    max_new_tokens: Annotated[
        int, typer.Option("--max-new-tokens", "-n", rich_help_panel=SAMPLING, metavar="N")
    ] = 128,
    temperature: Annotated[
        float, typer.Option(help="0 is greedy.", rich_help_panel=SAMPLING, metavar="T")
    ] = 0.0,
    top_k: Annotated[
        int | None,
        typer.Option(help="Of the K likeliest.", rich_help_panel=SAMPLING, metavar="K"),
    ] = None,
    top_p: Annotated[
        float | None,
        typer.Option(
            help="Of the likeliest up to this probability.", rich_help_panel=SAMPLING, metavar="P"
        ),
    ] = None,
    min_p: Annotated[
        float | None,
        typer.Option(
            help="Of those at least P times as likely as the likeliest.",
            rich_help_panel=SAMPLING,
            metavar="P",
        ),
    ] = None,
    repetition_penalty: Annotated[
        float,
        typer.Option(help="Above 1 repeats less.", rich_help_panel=SAMPLING, metavar="X"),
    ] = 1.0,
    seed: Annotated[
        int | None,
        typer.Option(help="Prompt i samples with N + i.", rich_help_panel=SAMPLING, metavar="N"),
    ] = None,
    stop: Annotated[
        list[str] | None,
        typer.Option(help="Text to end at. Repeatable.", rich_help_panel=SAMPLING, metavar="TEXT"),
    ] = None,
    ignore_eos: Annotated[
        bool,
        typer.Option("--ignore-eos", help="Go on after the end token.", rich_help_panel=SAMPLING),
    ] = False,
    stream: Annotated[bool, typer.Option("--stream", help="Print text as it is made.")] = False,
    json: Json = False,
    tp: Ranks = None,
    sequence_parallel: SequenceParallel = False,
    weights: WeightsPlace = None,
    dtype: Dtype = None,
    backend: ModelBackend = None,
    device: Device = None,
    trust_edits: TrustEdits = False,
) -> None:
    """Continue prompts, each with its own adapter, in one batch."""
    if json and stream:
        raise typer.BadParameter("it does not go with --json", param_hint="--stream")
    adapters = adapters_of(adapter or [])
    texts = [*(prompt or []), *map(_read, prompt_file or [])]
    if not texts:
        raise typer.BadParameter(
            "give a prompt, by this or by --prompt-file", param_hint="--prompt"
        )
    prompts = [
        Prompt(text, name)
        for text, name in zip(texts, _used(use or [], adapters, len(texts)), strict=True)
    ]
    degree = ranks_of(program, tp, sequence_parallel)
    arguments = {
        "program": program,
        "adapters": adapters,
        "prompts": prompts,
        "chat": chat,
        "stream": stream,
        "json": json,
        "place": {
            "weights": weights,
            "dtype": dtype,
            "backend": backend,
            "device": device,
            "trust_edits": trust_edits,
            "tp": degree,
            "sequence_parallel": sequence_parallel,
        },
        "sampling": {
            "max_new_tokens": max_new_tokens,
            "temperature": temperature,
            "top_k": top_k,
            "top_p": top_p,
            "min_p": min_p,
            "repetition_penalty": repetition_penalty,
            "seed": seed,
            "stop": tuple(stop or ()),
            "ignore_eos": ignore_eos,
        },
    }
    on_ranks(degree, complete, arguments)


def complete(
    program: str,
    adapters: dict[str, Path],
    prompts: list[Prompt],
    chat: bool,
    stream: bool,
    json: bool,
    place: dict[str, Any],
    sampling: dict[str, Any],
) -> None:
    """Continue the prompts and print what comes.

    Args:
        program: folder or model.
        adapters: to load, by name.
        prompts: with the name of the adapter of each.
        chat: apply the chat template.
        stream: print text as it is made.
        json: print one object.
        place: how to open the program.
        sampling: options of `Executor.generate`.
    """
    executor = open_executor(program, adapters, **place)
    inputs: Sequence[Any] = [item.text for item in prompts]
    if chat:
        inputs = [_chat(executor.tokenizer, item.text) for item in prompts]
    started = time.perf_counter()
    names = [item.adapter for item in prompts]
    chunks = executor.generate(inputs, names, stream=True, **sampling)
    show = stream_completions if stream else wait_completions if json else print_completions
    done = show(chunks, prompts)
    seconds = time.perf_counter() - started
    tokens = sum(len(completion.token_ids) for completion in done)
    if json:
        print_json(summary_of(executor.program.name, prompts, done, tokens, seconds))
        return
    reasons = {"stop": "ended", "length": "cut at --max-new-tokens or the model's positions"}
    ends = ", ".join(dict.fromkeys(reasons[completion.finish_reason] for completion in done))
    err().print(
        f"{count_text(tokens, 'token')}, {tokens / seconds:,.0f} tokens/s; {ends}",
        style="dim",
        soft_wrap=True,
    )


def _read(name: str) -> str:
    try:
        return sys.stdin.read() if name == "-" else Path(name).read_text(encoding="utf-8")
    except OSError as error:
        raise typer.BadParameter(f"{name}: {error.strerror}", param_hint="--prompt-file") from error
    except UnicodeDecodeError as error:
        raise typer.BadParameter(
            f"{name}: byte {error.start} is not UTF-8", param_hint="--prompt-file"
        ) from error


def _used(use: list[str], adapters: dict[str, Path], count: int) -> list[str | None]:
    """The adapter of each prompt."""
    if not use:
        if len(adapters) > 1:
            raise typer.BadParameter(
                f"say which of {', '.join(adapters)} to use, once for all prompts or once for each",
                param_hint="--use",
            )
        return [next(iter(adapters), None)] * count
    if len(use) not in (1, count):
        raise typer.BadParameter(
            f"given {len(use)} times for {count_text(count, 'prompt')}; give it once, or once for "
            "each",
            param_hint="--use",
        )
    for name in use:
        if name not in adapters and name != "base":
            there = ", ".join(["base", *adapters])
            raise typer.BadParameter(
                f"no adapter is called {name!r}; there are: {there}", param_hint="--use"
            )
    names = [None if name == "base" and name not in adapters else name for name in use]
    return names * count if len(names) == 1 else names


def _chat(tokenizer: Any, text: str) -> list[int]:
    if tokenizer is None:
        raise typer.BadParameter("the model has no tokenizer.json", param_hint="--chat")
    ids: list[int] = tokenizer.encode_chat([{"role": "user", "content": text}])
    return ids
