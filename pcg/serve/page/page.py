"""The page's text, and the policy that lets a browser run its own script alone.

Nothing in it is of the server: without a key it shows a form, and what it shows later comes from
the routes that need one.
"""

from __future__ import annotations

import base64
import hashlib
import re
from functools import cache

from pcg.pages.environment import page_environment


@cache
def live_page() -> bytes:
    """Return the whole page, which refers to no other file."""
    return page_environment("pcg.serve.page").get_template("live.html").render().encode()


@cache
def security_headers() -> dict[str, str]:
    """Return the headers that go with the page.

    Scripts and styles are allowed by their hashes, so that nothing that would come into the page
    from elsewhere runs, and requests go to this server alone.
    """
    page = live_page().decode()
    return headers_of(page, style=_hash(page, "style"), connect="'self'")


def headers_of(
    page: str, style: str = "'unsafe-inline'", connect: str = "'none'"
) -> dict[str, str]:
    """Return the headers of a page that has one script.

    Args:
        style: the source of its styles; by default any that stand in it.
        connect: the source that it may ask.
    """
    policy = {
        "default-src": "'none'",
        "script-src": _hash(page, "script"),
        "style-src": style,
        "connect-src": connect,
        "base-uri": "'none'",
        "form-action": "'none'",
        "frame-ancestors": "'none'",
    }
    return {
        "content-security-policy": "; ".join(f"{name} {value}" for name, value in policy.items()),
        "referrer-policy": "no-referrer",
        "x-content-type-options": "nosniff",
        "x-frame-options": "DENY",
        "cache-control": "no-cache",
    }


def _hash(page: str, tag: str) -> str:
    """Return the CSP source of the page's one script or style."""
    (inside,) = re.findall(rf"<{tag}>(.*?)</{tag}>", page, re.DOTALL)
    digest = base64.b64encode(hashlib.sha256(inside.encode()).digest()).decode()
    return f"'sha256-{digest}'"
