"""A service with default options that the tests of HTTP share, and OpenAI's client of a server."""

from __future__ import annotations

from collections.abc import Iterator

import openai
import pytest

from pcg.serve.http.service import Service
from tests.support import job_client, serving


@pytest.fixture(scope="session")
def service() -> Iterator[Service]:
    with serving.service_of() as service:
        yield service


@pytest.fixture(scope="module")
def client(server: serving.Served) -> Iterator[openai.OpenAI]:
    """A client of the module's server."""
    with job_client.client_of(server.url) as client:
        yield client
