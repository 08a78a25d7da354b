"""/tinker/api/v1/copy_weights: a checkpoint again, by a path of the caller's own."""

from __future__ import annotations

import hashlib

from fastapi import APIRouter, Request

from pcg.serve.http.errors import UNSUPPORTED, ApiError
from pcg.serve.http.service import LongBodyRoute, ServiceDependency
from pcg.serve.store.tables import new_key
from pcg.serve.tinker.model_records import COPIES
from pcg.serve.tinker.rest_wire import CopiedWeights, CopyBody
from pcg.serve.tinker.session_routes import PREFIX, Trainer
from pcg.serve.tinker.tinker import Tinker

router = APIRouter(prefix=PREFIX, tags=["tinker"], route_class=LongBodyRoute)


@router.post("/copy_weights")
async def copy_weights(
    body: CopyBody, request: Request, service: ServiceDependency, caller: Trainer
) -> CopiedWeights:
    """Copy a checkpoint that the caller may load; one that is asked for again is the first."""
    if "x-tinker-weights-access-token" in request.headers:
        said = "Access tokens of other accounts are not supported; publish the checkpoint."
        raise ApiError(400, said, code=UNSUPPORTED)
    if body.session_id is not None and body.model_seq_id is not None:
        service.part(Tinker).sessions.find(caller.tenant, body.session_id)
        place = body.session_id, body.model_seq_id
    else:  # the client's key is that of all attempts
        given = request.headers.get("x-idempotency-key") or new_key("")
        key = hashlib.sha256(f"{caller.tenant}\0{given}\0{body.source_path}".encode()).hexdigest()
        place = f"{COPIES}{key[:32]}", 0
    models = service.part(Tinker).models
    path = await models.copy(caller.tenant, body.source_path, place, body.ttl_seconds)
    return CopiedWeights(tinker_path=path)
