"""The text that a server prints when it is ready: what it serves, memory, and a first request."""

from __future__ import annotations

import json

from pcg.serve.service import Service
from pcg.units import counted, size_text


def announcement(service: Service, url: str, made_key: str | None) -> str:
    """Return what a server prints when it takes requests.

    Args:
        url: its address.
        made_key: the key that was made for it; None if the operator gave keys.
    """
    adapters = sorted(service.client.adapters)
    most = service.max_model_len
    length = "" if most is None else f", at most {most:,} tokens a request"
    memory = service.memory
    lines = [
        f"serving {service.catalog.base.name} on {service.client.facts.device}{length}",
        f"adapters: {', '.join(adapters) if adapters else 'none'}",
        f"defaults of sampling: {service.generation}",
        f"memory: {size_text(memory.total)} = {size_text(memory.weights)} weights + "
        f"{size_text(memory.adapters)} adapters + {size_text(memory.kv_cache)} KV cache + "
        f"{size_text(memory.workspace)} workspace"
        f"{f' + {size_text(memory.recorded)} recorded' if memory.recorded else ''}",
    ]
    warmed = service.client.facts.warmed
    if warmed is not None:
        lines.append(
            f"recorded before the first request: {counted(warmed.graphs, 'graph')} of steps in "
            f"{warmed.seconds:.0f} s, {size_text(warmed.size_bytes)}"
        )
    if service.reads_and_deletes:
        lines.append(
            "the disk of --data-dir has no room: what is there is read and deleted, and nothing is "
            "kept until there is"
        )
    lines.append(f"listening at {url}")
    where = service.client.facts.split_address
    if where is not None:
        lines.append(f'split clients: pcg.connect("{where}", api_key=…)')
    if made_key is not None:
        lines.append(f"API key, made for this run: {made_key}")
    else:
        keys = counted(len(service.keys), "key")
        lines.append(f"API keys: {keys}; what follows reads one from PCG_API_KEY")
    return "\n".join([*lines, "", _curl(service, url, made_key)])


def _curl(service: Service, url: str, key: str | None) -> str:
    """Return a command that asks the server for something."""
    body = {"model": service.catalog.base.name, "prompt": "Hello", "max_tokens": 16}
    shown = key or "$PCG_API_KEY"
    unsafe = "-k " if url.startswith("https") else ""
    return (
        f"curl {unsafe}{url}/v1/completions -H 'Content-Type: application/json' \\\n"
        f'  -H "Authorization: Bearer {shown}" \\\n'
        f"  -d '{json.dumps(body)}'"
    )
