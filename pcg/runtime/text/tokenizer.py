"""The tokenizer of a model directory: text to ids and back, special tokens, chat template.

A thin layer over the `tokenizers` library. `tokenizer.json` determines the conversion of text to
ids, including special tokens of the post-processor. Other data is read from the same directory:

    bos, eos, pad           tokenizer_config.json, special_tokens_map.json; else the ids in
                            generation_config.json, config.json
    tokens that end output  eos, and ids in generation_config.json (else config.json)
    chat template           chat_template.jinja, else tokenizer_config.json "chat_template"
"""

import os
import shutil
import tempfile
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field, replace
from functools import partial
from pathlib import Path
from typing import Any, Self

import tokenizers

from pcg.errors import AdapterError, ConfigError, GenerationError, ModelNotFoundError
from pcg.files import is_directory, is_file, read_json, read_text, shown_path
from pcg.runtime.text.chat import ChatTemplate, Message
from pcg.runtime.text.output_text import StreamDecoder
from pcg.source import TEMPLATE, tokenizer_directory
from pcg.units import shown

Json = Mapping[str, Any]

_NAMED = ("bos", "eos", "unk", "sep", "pad", "cls", "mask")
_REPAIR = "; repair or download it again"
_LONG = 10_000
"""Number of characters or tokens beyond which batch calls are used, as conversions take more than
some milliseconds, and the library releases Python's lock only in batch calls."""
FILES = ("tokenizer.json", "tokenizer_config.json", "special_tokens_map.json")
_ID_FILES = ("generation_config.json", "config.json")


@dataclass(frozen=True)
class Encoding:
    """Tokens of a text, each with its range of characters [start, end).

    The range is empty for a token without text, and (0, 0) for a token of the post-processor.
    """

    ids: list[int]
    offsets: list[tuple[int, int]]


@dataclass(frozen=True)
class Tokenizer:
    """Text to ids and back.

    Attributes:
        backend: the `tokenizers.Tokenizer`, without truncation and padding.
        special_tokens: texts of the named special tokens, such as "bos_token": "<s>".
        eos_ids: all tokens that end a model's output.
        source: the directory, or the transformers tokenizer; None without files.
    """

    backend: tokenizers.Tokenizer
    special_tokens: Mapping[str, str]
    bos_id: int | None = None
    eos_id: int | None = None
    eos_ids: tuple[int, ...] = ()
    pad_id: int | None = None
    chat_template: ChatTemplate | None = None
    source: Any = field(default=None, compare=False)

    @classmethod
    def of(cls, tokenizer: Any) -> Self:
        """Return the tokenizer of a directory, of a hub id, or of a transformers tokenizer.

        Raises:
            ModelNotFoundError: there is no such directory or model, or no tokenizer.json.
            ConfigError: a file is damaged.
        """
        if isinstance(tokenizer, cls):
            return tokenizer
        if isinstance(tokenizer, str | os.PathLike):
            return cls.load(tokenizer_directory(tokenizer, downloads=True) or Path(tokenizer))
        if not hasattr(tokenizer, "save_pretrained"):
            raise ConfigError(
                f"a {type(tokenizer).__name__} is no tokenizer; give a directory, a hub id, or a "
                "tokenizer of transformers"
            )
        with tempfile.TemporaryDirectory() as directory:
            tokenizer.save_pretrained(directory)
            return replace(cls.load(directory), source=tokenizer)

    def save(self, directory: Path) -> None:
        """Write the tokenizer's files into a directory, as `AutoTokenizer` reads them."""
        if isinstance(self.source, Path):
            if self.source.resolve() == directory.resolve():
                return
            (directory / TEMPLATE).unlink(missing_ok=True)  # of an adapter that is replaced
            for name in (*FILES, TEMPLATE):
                if is_file(self.source / name):
                    shutil.copyfile(self.source / name, directory / name)
        elif self.source is not None:
            self.source.save_pretrained(directory)

    @classmethod
    def load(cls, directory: str | Path, chat_template: str | Path | None = None) -> Self:
        """Read the tokenizer of a model directory.

        Args:
            chat_template: replaces the model's own: a path to a file, or the template's text.
        Raises:
            ModelNotFoundError: tokenizer.json is missing.
            ConfigError: a file is damaged, or the chat template does not compile.
        """
        directory = Path(directory)
        path = directory / "tokenizer.json"
        if not is_file(path):
            raise ModelNotFoundError(
                f"no tokenizer.json in {shown_path(directory)}; save one beside the weights with "
                "AutoTokenizer.from_pretrained(model).save_pretrained(directory)"
            )
        try:
            backend = tokenizers.Tokenizer.from_file(str(path))
        except Exception as error:  # the library raises bare Exception
            raise ConfigError(f"{path} is not a tokenizer: {error}") from error
        backend.no_truncation()
        backend.no_padding()
        config = _read_json(directory / "tokenizer_config.json")
        texts = _special_texts(config, _read_json(directory / "special_tokens_map.json"))
        _mark_special(backend, texts)
        files = {name: _read_json(directory / name) for name in _ID_FILES}
        eos_id = _first(_named_id(backend, texts, "eos_token", files))
        output_ends = _ids_of("eos_token_id", files)
        return cls(
            backend=backend,
            special_tokens=texts,
            bos_id=_first(_named_id(backend, texts, "bos_token", files)),
            eos_id=eos_id,
            eos_ids=tuple(sorted({*output_ends, *(() if eos_id is None else (eos_id,))})),
            pad_id=_first(_named_id(backend, texts, "pad_token", files)),
            chat_template=_find_template(directory, config, chat_template),
            source=directory,
        )

    @property
    def vocab_size(self) -> int:
        """Number of tokens, including added tokens; the model's embedding may be larger."""
        return int(self.backend.get_vocab_size(with_added_tokens=True))

    def encode(self, text: str, add_special_tokens: bool = True) -> list[int]:
        """Encode text; `add_special_tokens` adds the post-processor's tokens, usually a bos.

        Raises:
            GenerationError: the text has a lone surrogate, which UTF-8 cannot encode.
        """
        ids: list[int] = self._encoded(text, add_special_tokens).ids
        return ids

    def encode_with_offsets(self, text: str, add_special_tokens: bool = True) -> Encoding:
        """Encode text, with the range of each token; raises the errors of `encode`."""
        encoding = self._encoded(text, add_special_tokens)
        return Encoding(encoding.ids, encoding.offsets)

    def _encoded(self, text: str, add_special_tokens: bool) -> Any:
        check_characters(text)
        if len(text) > _LONG:
            return self.backend.encode_batch([text], add_special_tokens=add_special_tokens)[0]
        return self.backend.encode(text, add_special_tokens=add_special_tokens)

    def decode(self, ids: Sequence[int], skip_special_tokens: bool = True) -> str:
        """Decode tokens; invalid UTF-8 becomes U+FFFD."""
        if len(ids) > _LONG:
            texts = self.backend.decode_batch([list(ids)], skip_special_tokens=skip_special_tokens)
            return str(texts[0])
        return str(self.backend.decode(list(ids), skip_special_tokens=skip_special_tokens))

    def stream(
        self, prompt_ids: Sequence[int] = (), skip_special_tokens: bool = True
    ) -> StreamDecoder:
        """Decode a sequence token by token; see `StreamDecoder`."""
        # Call the library directly, as each step decodes a token of every sequence.
        decode = partial(self.backend.decode, skip_special_tokens=skip_special_tokens)
        return StreamDecoder(decode, prompt_ids)

    def end_texts(self) -> tuple[str, ...]:
        """Return the texts of special tokens that may end a turn, except bos, longest first."""
        added = self.backend.get_added_tokens_decoder()
        bos = self.bos_id if self.bos_id not in self.eos_ids else None
        texts = (token.content for index, token in added.items() if token.special and index != bos)
        return tuple(sorted(texts, key=lambda text: (-len(text), text)))

    def stop_texts(self) -> tuple[str, ...]:
        """Return the texts of the tokens that end a model's output, eos first."""
        ids = sorted(self.eos_ids, key=lambda index: (index != self.eos_id, index))
        return tuple(filter(None, map(self.backend.id_to_token, ids)))

    def template(self) -> ChatTemplate:
        """Return the chat template. GenerationError: the model has no chat template."""
        if self.chat_template is None:
            raise GenerationError(
                "the model has no chat template, so messages cannot become text; put a "
                "chat_template.jinja beside tokenizer.json, give a chat_template, or use plain "
                "prompts"
            )
        return self.chat_template

    def with_template(self, source: str) -> Self:
        return replace(self, chat_template=ChatTemplate({"default": source}))

    def render_chat(
        self, messages: Sequence[Message], *, add_generation_prompt: bool = True, **variables: Any
    ) -> str:
        """Render messages as the text that the model reads.

        Args:
            add_generation_prompt: end with the header of the assistant's next message.
            variables: `tools`, JSON schemas of functions, and other variables of the template, such
                as enable_thinking=False.
        Raises:
            GenerationError: no template, or the template refuses the messages.
        """
        variables = {**self.special_tokens, **variables}
        return self.template().render(
            messages, add_generation_prompt=add_generation_prompt, **variables
        )

    def reads_parts(self) -> bool:
        """Return True if the chat template supports lists of text parts as contents."""
        texts = ("the first part", "the second part")
        message = {"role": "user", "content": [{"type": "text", "text": text} for text in texts]}
        try:
            rendered = self.render_chat([message], add_generation_prompt=False)
        except GenerationError:
            return False
        # A template that supports only text would render the list in Python's notation.
        return all(text in rendered for text in texts) and "'type'" not in rendered

    def encode_chat(self, messages: Sequence[Message], **variables: Any) -> list[int]:
        """Encode the text of `render_chat`; the template writes the special tokens itself."""
        return self.encode(self.render_chat(messages, **variables), add_special_tokens=False)


def check_characters(text: str) -> None:
    """Refuse lone surrogates, which JSON allows but UTF-8 cannot encode.

    Raises:
        GenerationError: names the surrogate and its place.
    """
    try:
        if not text.isascii():
            text.encode()
    except UnicodeEncodeError as error:
        code = ord(text[error.start])
        raise GenerationError(
            f"the text has a lone surrogate, U+{code:04X}, at character {error.start}; it is half "
            "a character: write the whole one, or leave it out"
        ) from error


def _mark_special(backend: Any, texts: Mapping[str, str]) -> None:
    """Mark the named tokens as special if tokenizer.json does not.

    Decoding can then skip special tokens, and "</s>" in a rendered chat is a single token.
    """
    special = {t.content for t in backend.get_added_tokens_decoder().values() if t.special}
    backend.add_special_tokens(
        [
            tokenizers.AddedToken(text, special=True, normalized=False)
            for text in dict.fromkeys(texts.values())
            if text not in special and backend.token_to_id(text) is not None
        ]
    )


def _named_id(
    backend: Any, texts: Mapping[str, str], name: str, files: Mapping[str, Json]
) -> tuple[int, ...]:
    index = backend.token_to_id(texts[name]) if name in texts else None
    return _ids_of(f"{name}_id", files) if index is None else (int(index),)


def _first(ids: Sequence[int]) -> int | None:
    return ids[0] if ids else None


def _read_json(path: Path) -> Json:
    return read_json(path, ConfigError, _REPAIR) if is_file(path) else {}


def _special_texts(config: Json, special_tokens_map: Json) -> dict[str, str]:
    """Return the texts of the named special tokens; tokenizer_config.json takes precedence.

    A token is written as text, or as an object with the text under "content".
    ConfigError: a text has a lone surrogate.
    """
    texts = {}
    for name in (f"{short}_token" for short in _NAMED):
        token = config[name] if name in config else special_tokens_map.get(name)
        if isinstance(token, Mapping):
            token = token.get("content")
        if isinstance(token, str) and token:
            try:
                check_characters(token)
            except GenerationError as error:
                raise ConfigError(f"{name}={shown(token)}: {error}{_REPAIR}") from error
            texts[name] = token
    return texts


def _ids_of(name: str, files: Mapping[str, Json]) -> tuple[int, ...]:
    for file, content in files.items():
        value = content.get(name)
        if value is None or value == -1:  # some models write -1 for a missing token
            continue
        ids = value if isinstance(value, list) else [value]
        if not all(type(index) is int and index >= 0 for index in ids):
            raise ConfigError(f"{file} has {name}={shown(value)}; expected an id or a list of ids")
        return tuple(ids)
    return ()


def adapter_template(directory: Path) -> str | None:
    """Return the text of the chat template in an adapter's folder; None without.

    Raises:
        AdapterError: the template cannot be read, or does not compile.
    """
    file = directory / TEMPLATE
    if not is_file(file):
        return None
    text = read_text(file, AdapterError)
    try:
        ChatTemplate({"default": text})
    except ConfigError as error:
        raise AdapterError(f"{shown_path(file)}: {error}") from error
    return text


def _find_template(
    directory: Path, config: Json, override: str | Path | None
) -> ChatTemplate | None:
    """Return the chat template: the override, chat_template.jinja, or tokenizer_config.json's.

    ConfigError: the file is missing, or the template is not valid.
    """
    if override is not None:
        return ChatTemplate.read(override)
    sources: dict[str, str] = {}
    template = config.get("chat_template")
    if isinstance(template, str):
        sources["default"] = template
    elif isinstance(template, list):
        try:
            sources = {entry["name"]: entry["template"] for entry in template}
        except (KeyError, TypeError) as error:
            raise ConfigError(
                'tokenizer_config.json: a list in "chat_template" holds objects with "name" and '
                '"template"'
            ) from error
    elif template is not None:
        raise ConfigError(
            f'tokenizer_config.json: "chat_template" is a {type(template).__name__}; expected text'
        )
    named = directory / "additional_chat_templates"
    for path in sorted(named.glob("*.jinja")) if is_directory(named) else []:
        sources[path.stem] = read_text(path, ConfigError)
    file = directory / TEMPLATE
    if is_file(file):
        sources["default"] = read_text(file, ConfigError)
    return ChatTemplate(sources) if sources else None
