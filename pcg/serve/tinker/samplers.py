"""Sampling sessions, and their replies.

Requests of samples as the engine takes them, and their results.

Sampling sessions, and the requests of samples that they take.

A request is a promise (`pcg.serve.tinker.futures`): what a crash interrupts is sampled again once
the server is back. The adapter of a checkpoint is loaded when something is first sampled from it,
and may be unloaded for others meanwhile.
"""

from __future__ import annotations

import asyncio
import time
from collections.abc import Sequence
from functools import partial
from pathlib import Path
from typing import Any

import numpy as np

from pcg.errors import AdapterConflictError, EngineError, QueueFullError
from pcg.runtime.adapters.cache import ServedAdapter
from pcg.runtime.requests.request import Completion, RequestFields
from pcg.runtime.sampling.logprobs import TokenLogprobs
from pcg.serve.adapters.catalog import Catalog, ServedModel
from pcg.serve.http.caller import Caller
from pcg.serve.http.errors import ApiError
from pcg.serve.http.service import Service
from pcg.serve.store.tables import new_key
from pcg.serve.tinker import future_records
from pcg.serve.tinker import sampler_records as records
from pcg.serve.tinker.folders import adapter_name, checkpoint_origin
from pcg.serve.tinker.future_records import PROTOBUF, FutureRecord
from pcg.serve.tinker.proto import SampledTokens, SampleResult, TopLogprobs, encode_sample
from pcg.serve.tinker.sampler_records import SamplerRecord
from pcg.serve.tinker.sampling_wire import SampleBody, SamplingSessionBody
from pcg.serve.tinker.session_records import SessionRecord
from pcg.serve.tinker.tinker import Tinker

# ------------------------------------------------------------------------------------------ results


_NO_LOGPROB = -99999.0
_LEAST = float(np.finfo(np.float32).min)


def fields_of(body: SampleBody, room: int) -> RequestFields:
    """Return the fields of the engine's request.

    Log-probabilities are the model's own, before temperature and filters, as forward_backward has
    them.

    Args:
        room: the most tokens that the prompt and its output may have together.
    """
    params, stop = body.sampling_params, body.sampling_params.stop
    new = params.max_tokens
    found: RequestFields = {
        "max_new_tokens": max(1, room - len(body.prompt)) if new is None else new,
        "temperature": params.temperature,
        "top_k": params.top_k if params.top_k > 0 else None,
        "top_p": params.top_p if params.top_p < 1 else None,
        "seed": params.seed,
        "n": body.num_samples,
        "logprobs": body.topk_sample_logprobs,
        "logprobs_mode": "raw_logprobs",
        "ignore_eos": stop == [],
    }
    if body.is_of_prompt():
        found["prompt_logprobs"] = body.topk_prompt_logprobs
        found["prompt_draws"] = body.prompt_alt_tokens_k
        if body.target_prompt_logprobs is not None:
            found["prompt_targets"] = body.target_prompt_logprobs.rows
    if isinstance(stop, str):
        found["stop"] = (stop,)
    elif stop and isinstance(stop[0], int):
        found["stop_token_ids"] = tuple(stop)
    elif stop:
        found["stop"] = tuple(stop)  # type: ignore[arg-type]
    return found


def encoded(body: SampleBody, completions: Sequence[Completion]) -> bytes:
    """Return the result of a request as its client reads it.

    Raises:
        ApiError: a continuation was given up.
    """
    if any(one.finish_reason not in ("stop", "length") for one in completions):
        raise ApiError(503, "The server gave the request up.")
    k = body.topk_sample_logprobs
    sequences = [
        SampledTokens(
            one.token_ids,
            [number(found.logprob) for found in one.logprobs or ()],
            one.finish_reason,
            _top(one.logprobs or (), k) if k else None,
        )
        for one in completions
    ]
    prompt: dict[str, Any] = {}
    of_prompt = completions[0].prompt_logprobs
    if of_prompt is not None:
        kept = _last(of_prompt, body.prompt_logprobs_last_n)
        if body.prompt_logprobs:
            prompt["prompt_logprobs"] = [
                np.nan if one is None else number(one.logprob) for one in kept
            ]
        if body.topk_prompt_logprobs:
            prompt["top_prompt"] = _top(kept, body.topk_prompt_logprobs)
        prompt |= _further(body, of_prompt)
    cached = completions[0].cached_tokens
    return encode_sample(SampleResult(sequences, cached_tokens=cached, **prompt))


def _further(body: SampleBody, found: Sequence[TokenLogprobs | None]) -> dict[str, Any]:
    """Return the log-probabilities of further tokens of the prompt's places, as far as asked."""
    targets, draws = body.target_prompt_logprobs, body.prompt_alt_tokens_k
    rows = [() if one is None else one.top for one in found[1:]]
    told: dict[str, Any] = {}
    if targets is not None:
        asked = zip(rows, targets.rows, strict=True)
        flat = [
            number(logprob)
            for row, ids in asked
            for _, logprob in row[len(row) - draws - len(ids) : len(row) - draws]
        ]
        array = np.array(flat, np.float32)
        told["target_prompt_logprobs"] = array
        starts, columns = targets.sparse_crow_indices, targets.sparse_col_indices
        if starts is None or columns is None:
            told["target_prompt_logprobs"] = array.reshape(targets.shape)
        else:
            told["target_cells"] = targets.shape, starts, columns
    if draws:
        drawn = [row[len(row) - draws :] for row in rows]
        tokens = np.array([[token for token, _ in row] for row in drawn], np.int64)
        logprobs = np.array([[number(x) for _, x in row] for row in drawn], np.float32)
        shape = len(rows), draws
        told["alternatives"] = tokens.reshape(shape), logprobs.reshape(shape)
    return told


def _last(
    found: Sequence[TokenLogprobs | None], count: int | None
) -> Sequence[TokenLogprobs | None]:
    """Return log-probabilities of which all but the last so many are none."""
    if count is None:
        return found
    return [*[None] * (len(found) - count), *found[-count:]]


def _top(found: Sequence[TokenLogprobs | None], k: int) -> TopLogprobs:
    """Return the likeliest tokens of some places as arrays, [places, k]."""
    tokens = np.zeros((len(found), k), np.int32)
    logprobs = np.full((len(found), k), _NO_LOGPROB, np.float32)
    for row, one in enumerate(found):
        for column, (token, logprob) in enumerate(() if one is None else one.top[:k]):
            tokens[row, column], logprobs[row, column] = token, number(logprob)
    return TopLogprobs(tokens, logprobs)


def number(logprob: float) -> float:
    """Return a log-probability as a float32 can hold it, without infinities."""
    return max(logprob, _LEAST)


# ----------------------------------------------------------------------------------------- samplers


SAMPLE = "sample"
"""The kind of requests of samples."""
_FIRST_WAIT_S, _LONGEST_WAIT_S = 0.05, 2.0
"""The times between two attempts to have a full queue take a request, seconds."""


class Samplers:
    """The sampling sessions of all tenants; for one event loop."""

    def __init__(self, service: Service, catalog: Catalog, tinker: Tinker) -> None:
        self._service = service
        self._catalog = catalog
        self._tinker = tinker
        self._loading: dict[str, asyncio.Task[ServedAdapter]] = {}
        tinker.sessions.on_end.append(self._session_ended)

    async def _session_ended(self, session: SessionRecord) -> None:
        """Remove the weights that were saved for sampling sessions alone."""
        folders = await self._tinker.futures.write(
            lambda one: records.end(one, session.id), may_use_reserve=True
        )
        for folder in folders:
            await asyncio.to_thread(self._tinker.models.folders.remove, folder)

    def begin(self) -> None:
        """Go on with the requests that were not done when the server ended."""
        self._tinker.do(self._go_on())

    async def _go_on(self) -> None:
        pending = await self._tinker.futures.read(lambda one: future_records.pending(one, SAMPLE))
        for id, tenant in pending:
            future = await self._tinker.futures.retrieve(tenant, id, 0)
            assert future.request is not None
            body = SampleBody.model_validate_json(future.request)
            self._tinker.do(self._sample(future, Caller("", tenant, frozenset()), body))

    # ------------------------------------------------------------------------------- sessions

    async def create(self, tenant: str, body: SamplingSessionBody) -> SamplerRecord:
        """Open a sampling session; one of the number that is there is returned.

        Raises:
            ApiError: there is no such session, base or checkpoint.
        """
        self._tinker.sessions.find(tenant, body.session_id)
        base, folder = await self._source(tenant, body.base_model, body.model_path)
        record = SamplerRecord(
            new_key("smp-"),
            tenant,
            body.session_id,
            body.sampling_session_seq_id,
            base,
            body.model_path,
            folder,
            int(time.time()),
        )
        return await self._tinker.futures.write(lambda one: records.insert(one, record))

    async def find(self, tenant: str, id: str) -> SamplerRecord:
        """Return a tenant's sampling session. ApiError: 404, there is none."""
        found = await self._tinker.futures.read(
            lambda one: records.SAMPLERS.find(one, id=id, tenant=tenant)
        )
        if found is None:
            raise ApiError(404, f"There is no sampling session {id[:128]}.")
        return found

    async def _source(
        self, tenant: str, base_model: str | None, path: str | None
    ) -> tuple[str, str | None]:
        """Return the base's name, and the folder of an adapter if a checkpoint is named."""
        names = self._catalog.names
        if base_model is not None and base_model not in names:
            raise ApiError(
                404,
                f"There is no base model {base_model[:128]}; this server has {names[0]}.",
                param="base_model",
            )
        if path is None:
            if base_model is None:
                raise ApiError(400, "Give a base_model or a model_path.", param="base_model")
            return base_model, None
        found = await self._tinker.futures.read(lambda one: records.checkpoint(one, path, tenant))
        if found is None:
            raise ApiError(404, f"There is no checkpoint {path[:256]}.", param="model_path")
        folder, base = found
        if base not in names:
            raise ApiError(
                400,
                f"{path[:256]} is of the base {base[:128]}, and this server has {names[0]}.",
                param="model_path",
            )
        return base_model or base, folder

    # ------------------------------------------------------------------------------- samples

    async def sample(self, caller: Caller, body: SampleBody, given: bytes) -> FutureRecord:
        """Promise samples, and begin with them; a request of the same number is the first one.

        Args:
            given: the body as it came.
        Raises:
            ApiError: there is no such sampling session, or too much waits already.
        """
        session, stream, seq = "", new_key("one-"), 0
        if body.sampling_session_id is not None and body.seq_id is not None:
            record = await self.find(caller.tenant, body.sampling_session_id)
            self._tinker.sessions.find(caller.tenant, record.session)
            session, stream, seq = record.session, record.id, body.seq_id
        key = new_key("seq-")
        answer = {"sample_sequence_ids": [f"{key}-{i}" for i in range(body.num_samples)]}
        future, is_new = await self._tinker.futures.promise(
            caller.tenant, session, stream, seq, SAMPLE, given, answer
        )
        if is_new:
            self._tinker.do(self._sample(future, caller, body))
        return future

    async def _sample(self, future: FutureRecord, caller: Caller, body: SampleBody) -> None:
        """Sample, and keep what comes of it; what the end of the server interrupts stays as is."""
        futures = self._tinker.futures
        forget = partial(records.forget_request, future=future.id)
        try:
            model = await self._model(caller.tenant, body)
            fields = fields_of(body, await self._service.room(model))
            wait_s = _FIRST_WAIT_S
            while True:
                try:
                    (asked,) = await self._service.submit(
                        caller, model, [body.prompt], fields, new_key("smp-")
                    )
                    completions = await asked.stream.completions()
                    break
                except QueueFullError:  # it is promised, so that it waits here
                    await asyncio.sleep(wait_s)
                    wait_s = min(2 * wait_s, _LONGEST_WAIT_S)
            result = await asyncio.to_thread(encoded, body, completions)
            await futures.resolve(future, result, PROTOBUF, forget)
        except EngineError:
            return
        except Exception as error:
            await futures.fail_by(future, error, forget)

    async def _model(self, tenant: str, body: SampleBody) -> ServedModel:
        """Return the model to sample from."""
        if body.sampling_session_id is not None:
            record = await self.find(tenant, body.sampling_session_id)
            folder = record.folder
            if record.path is not None:  # which may be gone, or its owner's alone, meanwhile
                _, there = await self._source(tenant, None, record.path)
                if there != folder:
                    raise ApiError(404, f"{record.path} was saved anew; open another session.")
        else:
            _, folder = await self._source(tenant, body.base_model, body.model_path)
        base = self._catalog.base
        if folder is None:
            return base
        adapter = await self._adapter(tenant, folder)
        return ServedModel(adapter.name, adapter, None, adapter.name, base.name, base.created_s)

    async def _adapter(self, tenant: str, folder: str) -> ServedAdapter:
        """Return the adapter of a folder of the store's, which is loaded if need be."""
        loader = self._catalog.loader
        name = adapter_name(tenant, folder)
        there = loader.adapters.get(name)
        if there is not None:
            loader.used(name)
            return there
        task = self._loading.get(name)
        if task is None:
            task = asyncio.create_task(self._load(name, self._tinker.store.folder / folder))
            self._loading[name] = task
            task.add_done_callback(lambda _: self._loading.pop(name, None))
        return await asyncio.shield(task)

    async def _load(self, name: str, path: Path) -> ServedAdapter:
        loader = self._catalog.loader
        try:
            return await loader.load(name, path, checkpoint_origin())
        except AdapterConflictError:  # somebody else loaded it meanwhile
            there = loader.adapters.get(name)
            if there is None:
                raise
            return there
