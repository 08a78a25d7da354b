"""The outbox: results of requests on their way from the engine's process to the server."""

from __future__ import annotations

from collections.abc import Callable

from pcg.runtime.requests.request import Chunk
from pcg.runtime.requests.stream import Stream, Wakes
from pcg.serve.engine.channel import Channel
from pcg.serve.engine.messages import ChunkData, Refused, Report, Step, encode
from pcg.serve.engine.translation import data_of, fault_of


class Outbox:
    """Sends chunks, all of a step in one message, and the errors of requests that end without."""

    def __init__(self, channel: Channel) -> None:
        self._channel = channel
        self._chunks: list[ChunkData] = []
        self._reports: list[bytes] = []
        self._streams: dict[int, SentStream] = {}

    def open(
        self, number: int, cancel: Callable[[Stream], None], request_id: str | None
    ) -> SentStream:
        """Return the stream of the request of that number."""
        stream = self._streams[number] = SentStream(self, number, cancel, request_id)
        return stream

    def cancel(self, number: int) -> None:
        """End a request, if it has not ended."""
        stream = self._streams.get(number)
        if stream is not None:
            stream.cancel()

    def add(self, stream: SentStream, chunk: Chunk) -> None:
        """Send a chunk with the others of its step, on the engine's thread."""
        self._chunks.append(data_of(stream.number, chunk, knows_prompt=stream.has_sent_prompt))
        if chunk.prompt_logprobs is not None:
            stream.has_sent_prompt = True

    def report(self, report: Report, wakes: Wakes | None) -> None:
        """Send a report, on the engine's thread.

        Args:
            wakes: sends it now; None to send it with the next chunks, or the next report that is.
        """
        self._reports.append(encode(report))
        if wakes is not None:
            wakes.call(self.flush)

    def flush(self) -> None:
        """Send the chunks of the step."""
        messages, self._reports = self._reports, []
        if self._chunks:
            chunks, self._chunks = self._chunks, []
            messages.append(encode(Step(chunks)))
        self._channel.send(*messages)

    def refuse(self, number: int, error: BaseException) -> None:
        """Send why a request ends without a last chunk; from any thread."""
        self._channel.send(encode(Refused(number, fault_of(error))))

    def forget(self, number: int) -> None:
        self._streams.pop(number, None)


class SentStream(Stream):
    """A stream that is read in another process.

    Attributes:
        number: the server's number of the request.
        has_sent_prompt: True once the logprobs of the prompt were sent.
    """

    def __init__(
        self,
        outbox: Outbox,
        number: int,
        cancel: Callable[[Stream], None],
        request_id: str | None,
    ) -> None:
        super().__init__(cancel, request_id)
        self.number = number
        self.has_sent_prompt = False
        self._outbox = outbox

    def put(self, chunk: Chunk, wakes: Wakes) -> None:
        self._outbox.add(self, chunk)
        wakes.call(self._outbox.flush)
        if chunk.is_last or chunk.error is not None:
            self.is_over = True
            self._outbox.forget(self.number)

    def fail(self, error: BaseException) -> None:
        if not self.is_over:
            self.is_over = True
            self._outbox.forget(self.number)
            self._outbox.refuse(self.number, error)
