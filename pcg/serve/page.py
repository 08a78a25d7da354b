"""GET /: a page of what a key may see of the server's state, with a box to try an adapter.

Nothing in it is of the server: without a key it shows a form, and what it shows later comes from
the routes that need a key. The policy lets a browser run the page's own script alone.
"""

from __future__ import annotations

from functools import cache

from fastapi import APIRouter
from fastapi.responses import HTMLResponse

from pcg.pages.environment import page_environment
from pcg.serve.http.wire import page_headers

router = APIRouter(include_in_schema=False)


@cache
def live_page() -> str:
    """Return the whole page, which refers to no other file."""
    return page_environment("pcg.serve").get_template("live.html").render()


@router.get("/")
async def page() -> HTMLResponse:
    """Return the page, which asks for a key before it asks the server for anything."""
    return HTMLResponse(live_page(), headers=page_headers(live_page(), is_live=True))
