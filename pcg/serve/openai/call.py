"""A call: what one caller asks of one model, on its way to a reply."""

from __future__ import annotations

import asyncio
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any, Protocol

from fastapi import Request
from starlette.responses import Response

from pcg.runtime.engine.commands import Numbers
from pcg.runtime.requests.request import Completion, RequestFields
from pcg.serve.adapters.catalog import Catalog, ServedModel
from pcg.serve.http.caller import Caller
from pcg.serve.http.service import Prompt, Service, Submitted
from pcg.serve.metrics.load_report import ASKED, load_headers
from pcg.serve.openai.event_stream import Events, EventStream, Sending, all_completions, begun
from pcg.serve.openai.wire import FieldNames


class CallBody(Protocol):
    """The body of a call."""

    model: str | None

    def names(self) -> FieldNames:
        """Return the names of its fields, which the engine has others for."""


@dataclass(frozen=True)
class Call:
    """A request over HTTP for the output of a model.

    Attributes:
        names: the client's names of its fields, which errors have.
    """

    service: Service
    request: Request
    caller: Caller
    model: ServedModel
    names: FieldNames

    @classmethod
    async def of(cls, service: Service, request: Request, caller: Caller, body: CallBody) -> Call:
        """Return a caller's call of the model that its body names, without a name of the base.

        ApiError: there is none of that name.
        """
        catalog, name = service.part(Catalog), body.model
        model = catalog.base if name is None else await catalog.find(caller, name)
        return cls(service, request, caller, model, body.names())

    async def submit(
        self,
        prompts: Sequence[Prompt],
        fields: RequestFields,
        reply_id: str,
        *,
        repeats_ids: bool = False,
    ) -> list[Submitted]:
        """Submit prompts; see `Service.submit`."""
        with self.names.naming():
            return await self.service.submit(
                self.caller, self.model, prompts, fields, reply_id, repeats_ids=repeats_ids
            )

    def head(self, kind: str, reply_id: str, named: str | None) -> dict[str, Any]:
        """Return the fields that a reply and all its events begin with.

        Args:
            kind: the type of object that the reply is.
            reply_id: its id, which begins with a prefix.
            named: what comes behind the prefix instead, if the request says so.
        """
        prefix, _, _ = reply_id.partition("-")
        return {
            "id": f"{prefix}-{named}" if named else reply_id,
            "object": kind,
            "created": int(time.time()),
            "model": self.model.name,
            "system_fingerprint": self.model.fingerprint,
        }

    async def completions(self, submitted: Sequence[Submitted]) -> list[list[Completion]]:
        """Wait for the continuations of all prompts; see `all_completions`."""
        with self.names.naming():
            return await all_completions(self.request, submitted)

    async def stream(self, submitted: Sequence[Submitted], events: Events) -> EventStream:
        """Return a streamed reply, once its first chunks are there; errors as of `begun`."""
        with self.names.naming():
            chunks = await begun(self.request, submitted)
        timeout_s = self.service.options.stream_timeout_s
        sending = Sending(self._beside, self.names.named, timeout_s)
        return EventStream(chunks, events, sending, await self._headers())

    async def reply(self, write: Callable[[], bytes]) -> Response:
        """Return a whole reply, which is written beside the event loop."""
        content = await self._beside(write)
        return Response(content, headers=await self._headers(), media_type="application/json")

    async def _beside(self, write: Callable[[], bytes]) -> bytes:
        return await self.service.beside(self.caller, write)

    async def _headers(self) -> dict[str, str]:
        """Return the headers that say which version answers, and the load if it is asked for."""
        asked = self.request.headers.get(ASKED)
        if asked is None or not self.service.shows_engine(self.caller):
            return self.model.headers
        numbers = await asyncio.wrap_future(self.service.client.call(Numbers()))
        return {**self.model.headers, **load_headers(asked, numbers)}
