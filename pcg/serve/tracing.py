"""OpenTelemetry traces of requests, with its conventions for generative AI.

An HTTP request is a span of kind SERVER, `chat sql`, in the trace of the client's `traceparent`. It
contains, for each prompt, spans for waiting, prefill and decoding. Spans have no texts of requests.
They are created from the finished record, so they cost nothing while the request runs, and
OpenTelemetry's thread sends them.

Source: OpenTelemetry's semantic conventions for generative AI, development status. The conventions
have no latencies; their names are vLLM's attributes (vllm/tracing).
"""

from __future__ import annotations

from typing import Any

from opentelemetry.exporter.otlp.proto.http.trace_exporter import OTLPSpanExporter
from opentelemetry.sdk.resources import Resource
from opentelemetry.sdk.trace import TracerProvider
from opentelemetry.sdk.trace.export import BatchSpanProcessor
from opentelemetry.trace import Span, SpanKind, StatusCode, Tracer, set_span_in_context
from opentelemetry.trace.propagation.tracecontext import TraceContextTextMapPropagator

from pcg.runtime.requests.request import Request
from pcg.runtime.requests.stream import Stream
from pcg.serve.http.middleware import LEFT, Record
from pcg.version import __version__

_OPERATIONS = {
    "/v1/chat/completions": "chat",
    "/v1/completions": "text_completion",
    "/v1/embeddings": "embeddings",
    "/v1/responses": "chat",
}
_PROPAGATED = ("traceparent", "tracestate")


class Traces:
    """Sends a trace of every request to a collector, by OTLP over HTTP.

    Args:
        endpoint: the collector's address.
    """

    def __init__(self, endpoint: str) -> None:
        resource = Resource.create({"service.name": "pcg", "service.version": __version__})
        # The server shuts the provider down, not the interpreter's exit.
        self._provider = TracerProvider(resource=resource, shutdown_on_exit=False)
        self._provider.add_span_processor(BatchSpanProcessor(OTLPSpanExporter(endpoint=endpoint)))
        self._tracer = self._provider.get_tracer("pcg.serve", __version__)

    def observe(self, record: Record) -> None:
        headers = {
            name.decode("latin-1"): value.decode("latin-1")
            for name, value in record.scope["headers"]
            if name.decode("latin-1") in _PROPAGATED
        }
        offset_s = record.came_s - record.began_s
        span = self._tracer.start_span(
            _name(record),
            TraceContextTextMapPropagator().extract(headers),
            SpanKind.SERVER,
            _attributes(record),
            start_time=_ns(record.came_s),
        )
        if record.status >= 500 or not record.is_whole:
            span.set_status(StatusCode.ERROR)
        for request, stream in record.requests:
            _add_phases(self._tracer, span, request, stream, offset_s)
        span.end(_ns(record.ended_s + offset_s))

    def close(self) -> None:
        """Send the remaining traces, for a few seconds at most."""
        self._provider.force_flush(5000)
        self._provider.shutdown()


def _name(record: Record) -> str:
    if record.model is None:
        return f"{record.scope['method']} {record.route or 'unknown'}"
    return f"{_operation(record)} {record.model}"


def _operation(record: Record) -> str:
    return _OPERATIONS.get(record.route or "", "text_completion")


def _attributes(record: Record) -> dict[str, Any]:
    attributes: dict[str, Any] = {
        "http.request.method": record.scope["method"],
        "http.response.status_code": record.status,
        "pcg.request_id": record.request_id,
    }
    if record.route is not None:
        attributes["http.route"] = record.route
    if record.status == LEFT:
        attributes["error.type"] = "client_left"
    elif record.status >= 400:
        attributes["error.type"] = str(record.status)
    if record.caller is not None:
        attributes |= {"pcg.key": record.caller.key, "pcg.tenant": record.caller.tenant}
    if record.model is not None:
        attributes |= _of_model(record)
    return attributes


def _of_model(record: Record) -> dict[str, Any]:
    version, (prompt_tokens, output_tokens) = record.version, record.tokens
    answered = record.model if version is None else f"{record.model}@{version.number}"
    attributes = {
        "gen_ai.operation.name": _operation(record),
        "gen_ai.provider.name": "pcg",
        "gen_ai.request.model": record.model,
        "gen_ai.response.model": answered,
        "gen_ai.response.finish_reasons": [c.finish_reason for c in record.completions],
        "gen_ai.usage.input_tokens": prompt_tokens,
        "gen_ai.usage.output_tokens": output_tokens,
        "gen_ai.latency.e2e": record.ended_s - record.began_s,
        "gen_ai.latency.time_to_first_token": record.first_token_s,
        "gen_ai.latency.time_in_queue": record.queued_s,
    }
    if record.requests:
        params = record.requests[0][0].params
        attributes |= {
            "gen_ai.request.max_tokens": params.max_new_tokens,
            "gen_ai.request.temperature": params.temperature,
            "gen_ai.request.top_p": params.top_p,
            "gen_ai.request.top_k": params.top_k,
            "gen_ai.request.frequency_penalty": params.frequency_penalty,
            "gen_ai.request.presence_penalty": params.presence_penalty,
            "gen_ai.request.seed": params.seed,
            "gen_ai.request.choice.count": params.n if params.n > 1 else None,
        }
    return {name: value for name, value in attributes.items() if value is not None}


def _add_phases(
    tracer: Tracer, parent: Span, request: Request, stream: Stream, offset_s: float
) -> None:
    """Add the spans of a prompt's wait, prefill and decoding, as far as they happened."""
    queued_s = next((completion.queued_s for completion in stream.ended), None)
    ended_s = stream.ended_s
    admitted_s = ended_s if queued_s is None else stream.began_s + queued_s
    first_s = stream.first_chunk_s or ended_s
    context = set_span_in_context(parent)
    times = [stream.began_s, admitted_s, first_s, ended_s]
    for name, start_s, end_s in zip(
        ("wait", "prefill", "decode"), times[:-1], times[1:], strict=True
    ):
        if start_s is not None and end_s is not None and end_s > start_s:
            attributes = {"gen_ai.usage.input_tokens": len(request.prompt_ids)}
            span = tracer.start_span(
                name, context, SpanKind.INTERNAL, attributes, start_time=_ns(start_s + offset_s)
            )
            span.end(_ns(end_s + offset_s))


def _ns(seconds: float) -> int:
    return int(seconds * 1e9)
