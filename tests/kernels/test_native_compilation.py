"""Where and how native kernels are compiled, and that PyTorch's products run without them."""

from __future__ import annotations

import logging
import subprocess
import sys
from pathlib import Path

import pytest

from pcg.errors import UnsupportedError
from pcg.kernels import sgmv
from pcg.native_library import _compiler, load

SOURCE = """extern "C" int answer(int threads) {
  int sum = 0;
#pragma omp parallel for num_threads(threads) reduction(+ : sum)
  for (int i = 0; i < 42; i++) sum++;
  return sum;
}
"""


def _has_compiler() -> bool:
    try:
        return bool(_compiler())
    except UnsupportedError:
        return False


pytestmark = pytest.mark.skipif(not _has_compiler(), reason="there is no C++ compiler")


@pytest.fixture
def source(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    cache = tmp_path / "cache"
    cache.mkdir(mode=0o700)
    monkeypatch.setenv("XDG_CACHE_HOME", str(cache))
    path = tmp_path / "answer.cpp"
    path.write_text(SOURCE, encoding="utf-8")
    return path


def libraries(source: Path) -> list[Path]:
    return sorted((source.parent / "cache" / "pcg" / "kernels").iterdir())


def test_a_library_is_compiled_once_and_again_when_its_source_changes(source: Path) -> None:
    assert load(source).answer(2) == 42
    (first,) = libraries(source)
    compiled = first.stat().st_mtime_ns
    assert load(source).answer(1) == 42
    assert first.stat().st_mtime_ns == compiled
    source.write_text(SOURCE.replace("42", "43"), encoding="utf-8")
    assert load(source).answer(1) == 43
    assert len(libraries(source)) == 2


def test_a_damaged_library_is_compiled_again(source: Path) -> None:
    load(source)
    (first,) = libraries(source)
    first.unlink()
    first.write_bytes(b"\x7fELF, and no more")
    code = (
        "import sys, pathlib; import torch; from pcg.native_library import load\n"
        "print(load(pathlib.Path(sys.argv[1])).answer(1))"
    )
    done = subprocess.run([sys.executable, "-c", code, str(source)], capture_output=True, text=True)
    assert done.stdout.strip() == "42", done.stderr
    assert libraries(source) == [first]


def test_no_code_is_run_from_where_others_write(source: Path) -> None:
    folder = source.parent / "cache" / "pcg" / "kernels"
    folder.mkdir(parents=True)
    folder.chmod(0o777)
    with pytest.raises(UnsupportedError, match=r"others can write in .*XDG_CACHE_HOME"):
        load(source)
    folder.chmod(0o700)
    (source.parent / "cache").chmod(0o777)
    with pytest.raises(UnsupportedError, match="others can write in"):
        load(source)
    assert libraries(source) == []


def test_what_a_compiler_says_is_told(source: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    source.write_text("this is no C++;", encoding="utf-8")
    with pytest.raises(UnsupportedError, match=r"fails: .*error"):
        load(source)
    assert libraries(source) == []  # and nothing half made
    monkeypatch.setenv("CXX", "no-such-compiler")
    with pytest.raises(UnsupportedError, match=r"no C\+\+ compiler no-such-compiler"):
        load(source)


def test_a_cache_that_cannot_be_made_is_named(
    source: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("XDG_CACHE_HOME", str(source))  # a file
    with pytest.raises(UnsupportedError, match="cannot be made"):
        load(source)


def test_without_a_compiler_pytorch_multiplies_and_it_is_said_once(
    source: Path, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    import torch

    monkeypatch.setenv("CXX", "")
    sgmv._kernel.cache_clear()
    try:
        with caplog.at_level(logging.WARNING, "pcg.kernels"):
            found = [sgmv.is_native(torch.device("cpu"), torch.float32) for _ in range(3)]
    finally:
        sgmv._kernel.cache_clear()
    assert found == [False] * 3
    (record,) = caplog.records
    assert "CXX is empty" in record.getMessage()
