"""A server whose template has tools, with 1,024 positions, which tests of several APIs share."""

from __future__ import annotations

from collections.abc import Iterator
from functools import partial

import pytest

from tests.support import chat_templates, serving, tiny_llama


@pytest.fixture(scope="session")
def server(tmp_path_factory: pytest.TempPathFactory) -> Iterator[serving.Served]:
    template = tmp_path_factory.mktemp("template") / "hermes.jinja"
    template.write_text(chat_templates.HERMES)
    model = tiny_llama.save(tmp_path_factory.mktemp("model"), max_position_embeddings=1024)
    load = partial(serving.make_executor, directory=model)
    with serving.on_a_port(load, chat_template=template) as server:
        yield server
