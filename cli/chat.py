"""`pcg chat`: a conversation with a model and its adapters in the terminal."""

from __future__ import annotations

import sys
from collections.abc import Iterator, Mapping
from contextlib import suppress
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import typer

from pcg.errors import AdapterError, GenerationError
from pcg.options import CompileOptions
from pcg.runtime.sampling.sampling_params import SamplingParams
from pcg.runtime.training.options import ChatOptions

from .options.console import err
from .options.executors import PlaceOptions, check_alone, degree_of, open_executor
from .options.fields import Given, Only, Runnable
from .run import SERVING

if TYPE_CHECKING:
    from pcg.runtime.executor import Executor

MOST_NEW_TOKENS = 1024
BASE = "base"
WORDS = """\
/adapter NAME  answer with an adapter; base for none; without a name, list them
/system TEXT   begin again with a system prompt
/clear         begin again
/quit          end, as Ctrl-D does; Ctrl-C stops an answer"""


@dataclass(frozen=True, kw_only=True)
class ConversationOptions(ChatOptions):
    """The adapters and the system prompt of a conversation.

    Attributes:
        adapter: an adapter to load, in peft's format, as NAME=PATH or NAME=HUB_ID. Repeatable.
        use: the adapter that answers first; by default the first that is loaded.
        system: the system prompt.
    """

    adapter: Mapping[str, Path] | None = None
    use: str | None = None
    system: str | None = None


def chat_command(
    model: Runnable,
    asked: ConversationOptions,
    sampling: Given[SamplingParams],
    compiling: Annotated[Given[CompileOptions], Only(SERVING)],
    place: PlaceOptions,
) -> None:
    """Chat with a model; /adapter switches adapters within a conversation.

    Messages are lines of standard input. /help lists the commands.
    """
    check_alone("pcg chat")
    if degree_of(model, compiling.values, place) * place.groups > 1:
        raise typer.BadParameter(
            "a conversation runs on one rank; use pcg serve", param_hint="--tp"
        )
    executor = open_executor(model, asked.adapter, compiling.values, place)
    if executor.tokenizer is None:
        raise GenerationError(f"{model} has no tokenizer.json, which a chat needs")
    rendering = {
        "chat_template": asked.chat_template,
        "chat_template_kwargs": asked.variables(),
    }
    chat = Conversation(
        executor, {"max_new_tokens": MOST_NEW_TOKENS, **rendering, **sampling.values}
    )
    chat.use(asked.use or next(iter(asked.adapter or {}), BASE))
    chat.check_template()
    chat.begin(asked.system)
    with executor.engine().start():  # its prefix cache holds the conversation
        for line in _lines():
            if line in ("/quit", "/exit"):
                break
            chat.take(line)


class Conversation:
    """Messages, the adapter that answers, and sampling parameters."""

    def __init__(self, executor: Executor, sampling: dict[str, Any]) -> None:
        self._executor = executor
        self._sampling = sampling
        self._messages: list[dict[str, str]] = []
        self._system: str | None = None
        self._adapter: str | None = None

    def use(self, name: str) -> None:
        """Answer with an adapter. AdapterError: no adapter has the name."""
        if name != BASE:
            self._executor.state.adapter(name)
        self._adapter = None if name == BASE else name

    def check_template(self) -> None:
        """Refuse a template that cannot be read, and a model without one."""
        chosen = self._sampling["chat_template"]
        self._executor.chat_tokenizer(self._adapter, chosen).template()

    def begin(self, system: str | None) -> None:
        self._system = system
        self._messages = [] if system is None else [{"role": "system", "content": system}]

    def take(self, line: str) -> None:
        """Run a command, or answer a message."""
        word, _, rest = line.partition(" ")
        rest = rest.strip()
        if word == "/adapter" and rest:
            try:
                self.use(rest)
            except AdapterError as error:
                _say(str(error))
        elif word == "/adapter":
            _say(", ".join([BASE, *self._executor.adapters]) + f"; now {self._adapter or BASE}")
        elif word == "/system" and rest:
            self.begin(rest)
        elif word == "/clear":
            self.begin(self._system)
        elif word.startswith("/"):
            _say(WORDS)
        elif line.strip():
            self._answer(line)

    def _answer(self, text: str) -> None:
        self._messages.append({"role": "user", "content": text})
        parts: list[str] = []
        try:
            chunks = self._executor.chat(
                self._messages, self._adapter, stream=True, **self._sampling
            )
            with suppress(KeyboardInterrupt):
                for chunk in chunks:
                    parts.append(chunk.text)
                    sys.stdout.write(chunk.text)
                    sys.stdout.flush()
        except GenerationError as error:  # too long, or refused by the template
            self._messages.pop()
            _say(str(error))
            return
        sys.stdout.write("\n")
        self._messages.append({"role": "assistant", "content": "".join(parts)})


def _lines() -> Iterator[str]:
    """Yield the lines of the terminal, with editing, or of a pipe."""
    is_terminal = sys.stdin.isatty()
    if is_terminal:
        with suppress(ImportError):
            import readline  # noqa: F401  # input() then edits lines
        _say("/help lists the commands")
    while True:
        try:
            yield input("> " if is_terminal else "")
        except EOFError:
            return


def _say(text: str) -> None:
    err().print(text, style="dim", soft_wrap=True, markup=False)
