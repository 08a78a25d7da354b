"""The server: `pcg serve` with the model and the adapters that ship, and the openai client.

    make serve-demo

The server runs in a process of its own, at a free port of this machine. The client lists the
models, asks the base and every adapter, streams several answers at once, compares embeddings, and
SIGTERM ends the server: what runs then is answered first. It takes about 15 seconds.
"""

from __future__ import annotations

import asyncio
import contextlib
import re
import secrets
import signal
import subprocess
import sys
import threading
import time
from collections.abc import Iterator
from pathlib import Path
from typing import IO

import openai

HERE = Path(__file__).parent
ADAPTERS = ("docstring", "javascript", "typed")
BASE = "stdlib"
PROMPT = "def copy_file(path, recursive=True):"
SIMILAR = ("def read_file(path):", "def load_file(path):", "class HTTPError(Exception):")


def main() -> None:
    """Run the demo from the first request to the last."""
    key = secrets.token_urlsafe(16)
    with server(key) as (process, url):
        with openai.OpenAI(base_url=f"{url}/v1", api_key=key) as client:
            print("\n== models: the base, and adapters over it")
            for model in client.models.list():
                print(f"    {model.id:<12}{getattr(model, 'parent', None) or ''}")
            print(f"\n== completions of  {PROMPT}")
            for name in (BASE, *ADAPTERS):
                reply = client.completions.create(
                    model=name, prompt=PROMPT, max_tokens=40, temperature=0, stop=["\n\n"]
                )
                print(f"    {name:<12}{first_line(reply.choices[0].text)}")
            print("\n== cosines of embeddings")
            first, *others = client.embeddings.create(model=BASE, input=list(SIMILAR)).data
            for text, other in zip(SIMILAR[1:], others, strict=True):
                cosine = sum(a * b for a, b in zip(first.embedding, other.embedding, strict=True))
                print(f"    {SIMILAR[0]} · {text:<28} {cosine:.2f}")
        print("\n== eight streams at once, and SIGTERM while they run")
        asyncio.run(stream_while_ending(process, url, key))


async def stream_while_ending(process: subprocess.Popen[str], url: str, key: str) -> None:
    """Stream from all models, and end the server once the first tokens are there."""
    names = (BASE, *ADAPTERS) * 2
    begun = asyncio.Barrier(len(names) + 1)
    async with openai.AsyncOpenAI(base_url=f"{url}/v1", api_key=key) as client:

        async def stream(name: str) -> int:
            chunks = await client.completions.create(
                model=name, prompt=PROMPT, max_tokens=200, stream=True, extra_body=LONG
            )
            await begun.wait()
            return len([chunk async for chunk in chunks])

        tasks = [asyncio.create_task(stream(name)) for name in names]
        await begun.wait()
        process.send_signal(signal.SIGTERM)
        counts = await asyncio.gather(*tasks)
    print(f"    {len(counts)} answers of {min(counts)} to {max(counts)} parts, none cut off")


LONG = {"ignore_eos": True, "temperature": 0.8, "seed": 1}


@contextlib.contextmanager
def server(key: str) -> Iterator[tuple[subprocess.Popen[str], str]]:
    """Start the server; at the end it has to have ended well."""
    command = [sys.executable, "-m", "pcg_cli", "serve", str(HERE / "checkpoint")]
    command += ["--dtype", "float32", "--port", "0", "--api-key", key, "--served-model-name", BASE]
    command += [f"--lora-modules={name}={HERE / 'adapters' / name}" for name in ADAPTERS]
    command += ["--access-log", "none"]
    shown = " ".join(["pcg", *command[3:]]).replace(key, "$KEY").replace(f"{HERE}/", "examples/")
    print(f"== {shown}", flush=True)
    started = time.perf_counter()
    process = subprocess.Popen(command, stderr=subprocess.PIPE, text=True)
    assert process.stderr is not None
    try:
        url = address(process.stderr)
        print(f"    {time.perf_counter() - started:.1f} s")
        yield process, url
        code = process.wait(60)
        print(f"    the server ended with {code}")
    finally:
        if process.poll() is None:
            process.kill()
    if code:
        raise SystemExit(code)


def address(output: IO[str]) -> str:
    """Print what the server prints until it says where it listens, and the rest on a thread."""

    def show(line: str) -> None:
        print("    " + line, end="", flush=True)

    for line in output:
        show(line)
        found = re.search(r"listening at (\S+)", line)
        if found:
            threading.Thread(target=lambda: [show(rest) for rest in output], daemon=True).start()
            return found[1]
    raise SystemExit("error: the server did not start")


def first_line(text: str) -> str:
    """Return the first line that a model adds below its prompt."""
    return text.lstrip("\n").partition("\n")[0]


if __name__ == "__main__":
    main()
