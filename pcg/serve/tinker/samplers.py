"""Sampling sessions and their sample requests.

A request is a future (`futures`); after a crash, an interrupted request is sampled again. The
adapter of a checkpoint is loaded at its first request and may be unloaded later to free a place.
"""

from __future__ import annotations

import asyncio
from collections.abc import Sequence
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
from pcg.serve.store.tables import new_key, now
from pcg.serve.tinker.operations import adapter_name, checkpoint_origin
from pcg.serve.tinker.proto import SampledTokens, encode_sample
from pcg.serve.tinker.records import (
    FUTURES,
    PROTOBUF,
    SAMPLERS,
    FutureRecord,
    SamplerRecord,
    SessionRecord,
    end_samplers,
    find_checkpoint,
    insert_sampler,
)
from pcg.serve.tinker.tinker import Tinker
from pcg.serve.tinker.wire import SampleBody, SamplingSessionBody

SAMPLE = "sample"
"""Verb of sample requests."""
_FIRST_WAIT_S, _LONGEST_WAIT_S = 0.05, 2.0
"""First and longest time between two attempts to submit to a full queue, seconds."""
_NO_LOGPROB = -99999.0
_LEAST = float(np.finfo(np.float32).min)


class Samplers:
    """The sampling sessions of all tenants; for a single event loop."""

    def __init__(self, service: Service, catalog: Catalog, tinker: Tinker) -> None:
        self._service = service
        self._catalog = catalog
        self._tinker = tinker
        self._store = tinker.store
        self._loading: dict[str, asyncio.Task[ServedAdapter]] = {}
        tinker.sessions.on_end.append(self._session_ended)

    async def _session_ended(self, session: SessionRecord) -> None:
        """Remove the weights of the session's ephemeral sampling sessions."""
        for folder in await self._store.remove(end_samplers, session.id):
            await asyncio.to_thread(self._tinker.models.folders.remove, folder)

    def begin(self) -> None:
        self._tinker.do(self._go_on())

    async def _go_on(self) -> None:
        for future in await self._tinker.futures.pending(SAMPLE):
            assert future.request is not None
            body = SampleBody.model_validate_json(future.request)
            self._tinker.do(self._sample(future, Caller("", future.tenant, frozenset()), body))

    # ------------------------------------------------------------------------------- sessions

    async def create(self, tenant: str, body: SamplingSessionBody) -> SamplerRecord:
        """Open a sampling session, or return the existing session with its number.

        Raises:
            ApiError: the session, base or checkpoint does not exist.
        """
        self._tinker.sessions.find(tenant, body.session_id)
        base, folder = await self._source(tenant, body.base_model, body.model_path)
        sampler = SamplerRecord(
            id=new_key("smp-"),
            tenant=tenant,
            session=body.session_id,
            seq=body.sampling_session_seq_id,
            base_model=base,
            path=body.model_path,
            folder=folder,
            created_s=now(),
        )
        return await self._store.write(insert_sampler, sampler)

    async def find(self, tenant: str, id: str) -> SamplerRecord:
        sampler = await self._store.read(SAMPLERS.find, id=id, tenant=tenant)
        if sampler is None:
            raise ApiError(404, f"There is no sampling session {id[:128]}.")
        return sampler

    async def _source(
        self, tenant: str, base_model: str | None, path: str | None
    ) -> tuple[str, str | None]:
        """Return the base's name, and the adapter's folder if a checkpoint is named."""
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
        saved = await self._store.read(find_checkpoint, path, tenant)
        if saved is None:
            raise ApiError(404, f"There is no checkpoint {path[:256]}.", param="model_path")
        base = saved.base_model
        if base not in names:
            raise ApiError(
                400,
                f"{path[:256]} is of the base {base[:128]}, and this server has {names[0]}.",
                param="model_path",
            )
        return base_model or base, saved.folder

    # -------------------------------------------------------------------------------- samples

    async def sample(self, caller: Caller, body: SampleBody, request: bytes) -> FutureRecord:
        """Store a sample request and start it; a repeated number returns the first future.

        Args:
            request: the raw body.
        Raises:
            ApiError: the sampling session does not exist, or too many requests wait.
        """
        session, stream, seq = "", new_key("one-"), 0
        if body.sampling_session_id is not None and body.seq_id is not None:
            sampler = await self.find(caller.tenant, body.sampling_session_id)
            self._tinker.sessions.find(caller.tenant, sampler.session)
            session, stream, seq = sampler.session, sampler.id, body.seq_id
        key = new_key("seq-")
        answer = {"sample_sequence_ids": [f"{key}-{i}" for i in range(body.num_samples)]}
        future, is_new = await self._tinker.futures.promise(
            caller.tenant, session, stream, seq, SAMPLE, request, answer
        )
        if is_new:
            self._tinker.do(self._sample(future, caller, body))
        return future

    async def _sample(self, future: FutureRecord, caller: Caller, body: SampleBody) -> None:
        """Sample and store the result. A request that the server's end interrupts stays pending."""
        futures = self._tinker.futures

        def forget(connection: Any) -> None:
            FUTURES.change(connection, {"request": None}, id=future.id)

        try:
            model = await self._model(caller.tenant, body)
            fields = fields_of(body, await self._service.room(model))
            wait_s = _FIRST_WAIT_S
            while True:
                try:
                    (submitted,) = await self._service.submit(
                        caller, model, [body.prompt], fields, new_key("smp-")
                    )
                    completions = await submitted.stream.completions()
                    break
                except QueueFullError:  # an accepted request must not fail
                    await asyncio.sleep(wait_s)
                    wait_s = min(2 * wait_s, _LONGEST_WAIT_S)
            result = await asyncio.to_thread(encoded, body, completions)
            await futures.resolve(future, result, PROTOBUF, forget)
        except EngineError:
            return
        except Exception as error:
            await futures.fail_by(future, error, forget)

    async def _model(self, tenant: str, body: SampleBody) -> ServedModel:
        if body.sampling_session_id is not None:
            sampler = await self.find(tenant, body.sampling_session_id)
            folder = sampler.folder
            if sampler.path is not None:  # the checkpoint may be deleted or no longer public
                _, newest = await self._source(tenant, None, sampler.path)
                if newest != folder:
                    raise ApiError(404, f"{sampler.path} was saved again; open another session.")
        else:
            _, folder = await self._source(tenant, body.base_model, body.model_path)
        base = self._catalog.base
        if folder is None:
            return base
        adapter = await self._adapter(tenant, folder)
        return ServedModel(adapter.name, adapter, None, adapter.name, base.name, base.created_s)

    async def _adapter(self, tenant: str, folder: str) -> ServedAdapter:
        """Return the adapter of a folder in the store; load it if necessary."""
        loader = self._catalog.loader
        name = adapter_name(tenant, folder)
        adapter = loader.adapters.get(name)
        if adapter is not None:
            loader.used(name)
            return adapter
        task = self._loading.get(name)
        if task is None:
            task = asyncio.create_task(self._load(name, self._store.folder / folder))
            self._loading[name] = task
            task.add_done_callback(lambda _: self._loading.pop(name, None))
        return await asyncio.shield(task)

    async def _load(self, name: str, path: Path) -> ServedAdapter:
        loader = self._catalog.loader
        try:
            return await loader.load(name, path, checkpoint_origin())
        except AdapterConflictError:  # another request has loaded it
            adapter = loader.adapters.get(name)
            if adapter is None:
                raise
            return adapter


# ------------------------------------------------------------------------------ fields and results


def fields_of(body: SampleBody, room: int) -> RequestFields:
    """Return the fields of the engine's request.

    Log-probabilities are the model's, before temperature and filters, as in forward_backward.

    Args:
        room: the most tokens of the prompt and its output together.
    """
    params, stop = body.sampling_params, body.sampling_params.stop
    new = params.max_tokens
    fields: RequestFields = {
        "max_new_tokens": max(1, room - len(body.prompt)) if new is None else new,
        "temperature": params.temperature,
        "top_k": params.top_k if params.top_k > 0 else None,
        "top_p": params.top_p if params.top_p < 1 else None,
        "seed": params.seed,
        "n": body.num_samples,
        "logprobs": body.topk_sample_logprobs,
        "logprobs_mode": "raw_logprobs",
        "ignore_eos": stop == [],
        "routed_experts": body.routed_experts,
    }
    if body.is_of_prompt:
        fields["prompt_logprobs"] = body.topk_prompt_logprobs
        fields["prompt_draws"] = body.prompt_alt_tokens_k
        if body.target_prompt_logprobs is not None:
            fields["prompt_targets"] = body.target_prompt_logprobs.rows
    if isinstance(stop, str):
        fields["stop"] = (stop,)
    elif stop and isinstance(stop[0], int):
        fields["stop_token_ids"] = tuple(stop)
    elif stop:
        fields["stop"] = tuple(stop)  # type: ignore[arg-type]
    return fields


def encoded(body: SampleBody, completions: Sequence[Completion]) -> bytes:
    """Encode the result of a request for its client.

    Raises:
        ApiError: a continuation was cancelled.
    """
    if any(completion.finish_reason not in ("stop", "length") for completion in completions):
        raise ApiError(503, "The server cancelled the request.")
    k = body.topk_sample_logprobs
    sequences = [
        SampledTokens(
            completion.token_ids,
            [_number(token.logprob) for token in completion.logprobs or ()],
            completion.finish_reason,
            _top(completion.logprobs or (), k) if k else None,
            None if routes is None else routes.flatten(1).numpy(),
        )
        for completion in completions
        for routes in [completion.routed_experts]
    ]
    prompt: dict[str, Any] = {}
    of_prompt = completions[0].prompt_logprobs
    if of_prompt is not None:
        last = body.prompt_logprobs_last_n
        hidden = 0 if last is None else len(of_prompt) - last
        shown = [*[None] * hidden, *of_prompt[hidden:]]
        if body.prompt_logprobs:
            prompt["prompt_logprobs"] = [
                np.nan if token is None else _number(token.logprob) for token in shown
            ]
        if body.topk_prompt_logprobs:
            prompt["top_prompt"] = _top(shown, body.topk_prompt_logprobs)
        prompt |= _further(body, of_prompt)
    return encode_sample(sequences, cached_tokens=completions[0].cached_tokens, **prompt)


def _further(body: SampleBody, of_prompt: Sequence[TokenLogprobs | None]) -> dict[str, Any]:
    """Return the requested log-probabilities of target and alternative prompt tokens."""
    targets, draws = body.target_prompt_logprobs, body.prompt_alt_tokens_k
    rows = [() if token is None else token.top for token in of_prompt[1:]]
    further: dict[str, Any] = {}
    if targets is not None:
        flat = [
            _number(logprob)
            for row, ids in zip(rows, targets.rows, strict=True)
            for _, logprob in row[len(row) - draws - len(ids) : len(row) - draws]
        ]
        array = np.array(flat, np.float32)
        starts, columns = targets.sparse_crow_indices, targets.sparse_col_indices
        if starts is None or columns is None:
            further["targets"] = array.reshape(targets.shape)
        else:
            further |= {"targets": array, "target_cells": (targets.shape, starts, columns)}
    if draws:
        drawn = [row[len(row) - draws :] for row in rows]
        tokens = np.array([[token for token, _ in row] for row in drawn], np.int64)
        logprobs = np.array([[_number(x) for _, x in row] for row in drawn], np.float32)
        shape = len(rows), draws
        further["alternatives"] = tokens.reshape(shape), logprobs.reshape(shape)
    return further


def _top(places: Sequence[TokenLogprobs | None], k: int) -> tuple[Any, Any]:
    """Return the top tokens at each position and their log-probabilities, both [positions, k]."""
    tokens = np.zeros((len(places), k), np.int32)
    logprobs = np.full((len(places), k), _NO_LOGPROB, np.float32)
    for row, likeliest in enumerate(places):
        for column, (token, logprob) in enumerate(() if likeliest is None else likeliest.top[:k]):
            tokens[row, column], logprobs[row, column] = token, _number(logprob)
    return tokens, logprobs


def _number(logprob: float) -> float:
    """Clamp a log-probability to the finite range of float32."""
    return max(logprob, _LEAST)
