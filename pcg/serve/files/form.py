"""Read forms with a file as streams: the file is written to disk, not held in memory."""

from __future__ import annotations

from collections.abc import Callable, Collection
from dataclasses import dataclass, field

from fastapi import Request
from python_multipart.exceptions import FormParserError
from python_multipart.multipart import MultipartParser, parse_options_header
from starlette.requests import ClientDisconnect

from pcg.serve.files.files import Files
from pcg.serve.http.caller import Caller
from pcg.serve.http.errors import ApiError
from pcg.serve.http.service import Service
from pcg.serve.store.contents import Incoming

_WRITTEN_BYTES = 2**20
"""Bytes per write, on a thread."""
_FIELD_BYTES = 2**12
_FIELDS = 16


@dataclass
class Form:
    """A form.

    Attributes:
        content: the file; the caller drops it unless it is stored.
        fields: the other fields.
        filename: the file's name.
    """

    content: Incoming
    fields: dict[str, str] = field(default_factory=dict)
    filename: str | None = None


class _Reader:
    """Receives the parser's events."""

    def __init__(self, file: str, names: Collection[str]) -> None:
        self.fields: dict[str, str] = {}
        self.filename: str | None = None
        self.unwritten: list[bytes] = []
        self.unwritten_bytes = 0
        self.is_over = False
        self._file = file
        self._names = frozenset(names)
        self._headers: dict[bytes, bytes] = {}
        self._header = self._value = b""
        self._name = ""
        self._text = bytearray()

    def on_part_begin(self) -> None:
        self._headers = {}
        self._text = bytearray()

    def on_header_field(self, data: bytes, start: int, end: int) -> None:
        self._header += data[start:end]

    def on_header_value(self, data: bytes, start: int, end: int) -> None:
        self._value += data[start:end]

    def on_header_end(self) -> None:
        self._headers[self._header.lower()] = self._value
        self._header = self._value = b""

    def on_headers_finished(self) -> None:
        _, options = parse_options_header(self._headers.get(b"content-disposition"))
        self._name = options.get(b"name", b"").decode("utf-8", "replace")
        if self._name == self._file:
            if self.filename is not None:
                raise ApiError(400, f"The form has two parts '{self._file}'.", param=self._file)
            self.filename = options.get(b"filename", b"").decode("utf-8", "replace")
            return
        if self._name not in self._names:
            message = f"Unrecognized request argument supplied: {self._name[:64]}"
            raise ApiError(400, message, param=self._name[:64])
        if self._name in self.fields or len(self.fields) >= _FIELDS:
            raise ApiError(400, f"The form has '{self._name}' twice.", param=self._name)

    def on_part_data(self, data: bytes, start: int, end: int) -> None:
        if self._name == self._file:
            self.unwritten.append(data[start:end])
            self.unwritten_bytes += end - start
            return
        self._text += data[start:end]
        if len(self._text) > _FIELD_BYTES:
            message = f"'{self._name}' has more than {_FIELD_BYTES} bytes."
            raise ApiError(400, message, param=self._name)

    def on_part_end(self) -> None:
        if self._name != self._file:
            self.fields[self._name] = self._text.decode("utf-8", "replace")

    def on_end(self) -> None:
        self.is_over = True

    def take(self) -> bytes:
        taken, self.unwritten, self.unwritten_bytes = b"".join(self.unwritten), [], 0
        return taken

    @property
    def callbacks(self) -> dict[str, object]:
        return {name: getattr(self, name) for name in dir(self) if name.startswith("on_")}


async def read_form(
    request: Request,
    service: Service,
    files: Files,
    caller: Caller,
    receive: Callable[[int], None],
    *,
    file: str,
    names: Collection[str],
) -> Form:
    """Read a form with a file in its part `file`.

    Args:
        receive: counts and limits the bytes of the file.
        names: names of the other fields.
    Raises:
        ApiError: the form is invalid or too large.
        StoreFullError: there is no room.
    """
    kind, options = parse_options_header(request.headers.get("content-type"))
    boundary = options.get(b"boundary")
    if kind != b"multipart/form-data" or not boundary:
        raise ApiError(400, "Send the body as content-type: multipart/form-data.")
    reader, behind = _Reader(file, names), 0
    content = await service.beside(caller, files.store.contents.begin)
    try:
        parser = MultipartParser(boundary, reader.callbacks)  # type: ignore[arg-type]
        async for part in request.stream():
            parser.write(part)
            behind += len(part) if reader.is_over else 0
            if behind > _WRITTEN_BYTES:
                raise ApiError(400, "The form has data after its end.", code="invalid_form")
            if reader.unwritten_bytes >= _WRITTEN_BYTES:
                receive(reader.unwritten_bytes)
                await service.beside(caller, content.write, reader.take())
        receive(reader.unwritten_bytes)
        await service.beside(caller, content.write, reader.take())
        if not reader.is_over:
            raise ApiError(400, "The form ends before its last boundary.", code="invalid_form")
        if reader.filename is None:
            raise ApiError(400, f"Missing required parameter: '{file}'.", param=file)
        await service.beside(caller, content.finish)
    except BaseException as error:
        content.drop()
        if isinstance(error, FormParserError):
            message = f"The form cannot be read: {error}"
            raise ApiError(400, message, code="invalid_form") from None
        if isinstance(error, ClientDisconnect):
            raise ApiError(400, "The client disconnected before the end of its body.") from None
        raise
    return Form(content, reader.fields, reader.filename)
