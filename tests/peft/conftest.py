"""Adapters of every method, made once for all tests."""

from __future__ import annotations

from collections.abc import Mapping

import pytest

from tests.support.peft_cases import Models, make_models


@pytest.fixture(scope="session")
def models(tmp_path_factory: pytest.TempPathFactory) -> Mapping[str, Models]:
    """The models of each family, made when they are asked for."""

    class Made(dict[str, Models]):
        def __missing__(self, family: str) -> Models:
            self[family] = make_models(family, tmp_path_factory.mktemp("saved"))
            return self[family]

    return Made()
