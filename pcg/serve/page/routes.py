"""GET /: the page, without any data of the server."""

from __future__ import annotations

from fastapi import APIRouter
from fastapi.responses import HTMLResponse

from pcg.serve.page.page import live_page, security_headers

router = APIRouter(include_in_schema=False)


@router.get("/")
async def page() -> HTMLResponse:
    """Return the page, which asks for a key before it asks the server for anything."""
    return HTMLResponse(live_page(), headers=security_headers())
