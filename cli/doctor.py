"""`pcg doctor`: abilities of this machine; `pcg models`: configs that ship with pcg."""

from __future__ import annotations

import dataclasses
import importlib.metadata
import json as json_module
import os
import platform
import shutil
import sys
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Annotated, Any

import typer
from packaging.specifiers import SpecifierSet

from pcg.machine_memory import memory
from pcg.units import size_text
from pcg.version import __version__

from .options.console import busy, out, plain, print_json, print_table, table
from .options.executors import FIELDS
from .options.extras import extras, lacking
from .options.fields import Json, complete_model

Families = Annotated[bool, typer.Option("--families", help="List the causal LMs of transformers.")]


def models_command(families: Families = False, json: Json = False) -> None:
    """List the models whose configs ship with pcg.

    These models can be explained and compiled offline.
    """
    from pcg.source import ALIASES, MODEL_TYPES, SHIPPED, shipped

    if families:
        _show_families(json_module.loads(MODEL_TYPES.read_text()), json)
        return
    models = []
    for name in shipped():
        config = json_module.loads((SHIPPED / (name.replace("/", "--", 1) + ".json")).read_text())
        aliases = sorted(alias for alias, target in ALIASES.items() if target == name)
        models.append({"model": name, **_shape(config), "also": aliases})
    if json:
        print_json({"models": models})
        return
    columns = ("model", "type", "layers", "context")
    rows = table(*columns, right=columns[2:])
    for model in models:
        values = {**model, "context": model["positions"]}
        rows.add_row(*(plain(values[column]) for column in columns))
    print_table(rows)
    out().print("\nAny other model: its directory, or its hub id.", style="dim")


def _show_families(content: Mapping[str, Any], json: bool) -> None:
    if json:
        print_json(content)
        return
    out().print(f"causal LMs of transformers {content['transformers']}, by model type")
    for row in content["outcomes"]:
        types = row["model_types"]
        out().print(f"\n{row['outcome']} ({len(types)}): {row['why']}", style="bold", markup=False)
        out().print(", ".join(types), markup=False)


def _shape(config: Mapping[str, Any]) -> dict[str, Any]:
    config = {**config.get("text_config", {}), **config}
    shape = {
        name: next((config[key] for key in keys if key in config), None)
        for name, keys in FIELDS.items()
    }
    # gpt_bigcode and falcon have this flag; falcon's newer architecture ignores it.
    if config.get("multi_query") and not config.get("new_decoder_architecture"):
        shape["kv_heads"] = 1
    return shape


NVIDIA = Path("/proc/driver/nvidia/version")


@dataclass(frozen=True)
class Requirement:
    """A package, its purpose, and the versions that pcg supports, in pip's notation."""

    name: str
    purpose: str
    wanted: str = ""
    required: bool = True

    def accepts(self, version: str) -> bool:
        return SpecifierSet(self.wanted).contains(version, prereleases=True)


REQUIREMENTS = (
    Requirement("torch", "tensors", ">=2.11,<2.16"),
    Requirement("transformers", "tracing", ">=5.17,<6"),
    Requirement("safetensors", "weights"),
    Requirement("tokenizers", "text"),
    Requirement("jinja2", "chat templates", ">=3.1.6"),
    Requirement("sympy", "formulas"),
    Requirement("msgspec", "messages between ranks and processes", ">=0.19"),
    Requirement("networkx", "graphs"),
    Requirement("numpy", "arrays"),
    Requirement("packaging", "versions of packages"),
    Requirement("regex", "names of modules"),
    Requirement("pyyaml", "configurations of training"),
    Requirement("rich", "tables"),
    Requirement("typer", "this command"),
    Requirement("triton", "GPU kernels", required=False),
)


MaybeModel = Annotated[
    str | None,
    typer.Argument(
        help="A model to measure: the size of its weights in this machine's memory.",
        autocompletion=complete_model,
        show_default=False,
        metavar="MODEL",
    ),
]


def doctor_command(model: MaybeModel = None, json: Json = False) -> None:
    """Show the abilities of this machine, and missing packages.

    Exits with 1 if a required package is missing.
    """
    packages = [_package(requirement) for requirement in REQUIREMENTS]
    machine: dict[str, Any] = {}
    problem = None
    try:
        with busy("asking torch"):
            machine = _torch_machine()
    except Exception as error:  # a broken torch is a finding of this command
        problem = f"torch cannot be used ({type(error).__name__}: {error})"
    report = {
        "pcg": __version__,
        "python": platform.python_version(),
        "platform": platform.platform(),
        "packages": packages,
        "extras": {name: {"missing": lacking(of_extra)} for name, of_extra in extras().items()},
        **machine,
        "memory_bytes": memory()._asdict(),
        "disk_bytes": {"free": shutil.disk_usage(Path.cwd()).free},
    }
    if machine:
        with busy("multiplying matrices"):
            from pcg.kernels.torch.product_times import product_times

            report["product_ms"] = product_times()
    report["problems"] = _problems(packages, machine, problem)
    if model is not None and machine:
        report["model"] = weights = _weights(model, machine)
        report["problems"] += _too_large(weights, machine["gpus"], report["memory_bytes"])
    if json:
        print_json(report)
    else:
        _print(report)
    if any(item["required"] for item in report["problems"]):
        raise typer.Exit(1)


def _package(requirement: Requirement) -> dict[str, Any]:
    try:
        version = importlib.metadata.version(requirement.name)
    except importlib.metadata.PackageNotFoundError:
        version = None
    is_ok = version is not None and requirement.accepts(version)
    return {**dataclasses.asdict(requirement), "version": version, "ok": is_ok}


def _torch_machine() -> dict[str, Any]:
    import torch

    from pcg.kernels.attention_libraries import LIBRARIES, choose_libraries, is_ready
    from pcg.kernels.torch.products import has_onednn
    from pcg.kernels.triton.backend import choose_backend, machine_device
    from pcg.options import DTYPES

    gpus = []
    for index in range(torch.cuda.device_count()):
        gpu = torch.cuda.get_device_properties(index)
        capability = f"{gpu.major}.{gpu.minor}"
        gpus.append({"name": gpu.name, "memory_bytes": gpu.total_memory, "capability": capability})
    backend = choose_backend("auto", machine_device())
    is_available = torch.distributed.is_available()
    affinity = getattr(os, "sched_getaffinity", None)  # Linux
    return {
        "cpu": {
            "capability": torch.backends.cpu.get_cpu_capability(),
            "cores": os.cpu_count() if affinity is None else len(affinity(0)),
            "threads": torch.get_num_threads(),
            "packed_dtypes": [name for name in DTYPES if has_onednn(getattr(torch, name))],
        },
        "gpus": gpus,
        "backend": str(backend),
        "ptxas": _ptxas(gpus),
        "attention": {
            "auto": choose_libraries("auto", backend.name, machine_device()),
            "libraries": [
                {
                    "name": library.name,
                    "use": library.use,
                    "ok": is_ready(library),
                    "source": library.source,
                }
                for library in LIBRARIES
            ],
        },
        "cuda": torch.version.cuda,
        "distributed": {
            "gloo": is_available and torch.distributed.is_gloo_available(),
            "nccl": is_available and torch.distributed.is_nccl_available(),
        },
    }


def _ptxas(gpus: list[dict[str, Any]]) -> dict[str, Any] | None:
    """Describe ptxas, Triton's assembler, and the result of its self-test on Hopper.

    None if Triton cannot be imported.
    """
    try:
        from pcg.kernels.triton.ptxas import failure, used_ptxas
    except ImportError:
        return None
    import torch

    hopper = next((i for i, gpu in enumerate(gpus) if gpu["capability"] == "9.0"), None)
    wrong = None if hopper is None else failure(torch.device("cuda", hopper))
    used = used_ptxas(90)  # the self-test may have selected it
    return {
        "path": used.path,
        "version": ".".join(map(str, used.version)),
        "self_test": "no Hopper GPU" if hopper is None else wrong or "passed",
    }


def _weights(model: str, machine: dict[str, Any]) -> dict[str, Any]:
    """Return the size of a model's weights on the default device, and the model's backend."""
    with busy(f"tracing {model}"):
        from pcg.explain.explain import explain

        report = explain(model, None, device="cuda" if machine["gpus"] else "cpu")
    packed = report.packed_bytes
    return {
        "name": report.model,
        "dtype": report.dtype,
        "weights_bytes": report.memory_bytes["weights"] - packed,
        "packed_bytes": packed,
        "backend": _less(machine["backend"], report.backend),
    }


def _less(of_machine: str, of_model: str) -> str:
    return of_model if of_model.startswith("torch") else of_machine


def _too_large(
    weights: dict[str, Any], gpus: list[dict[str, Any]], memory: dict[str, int | None]
) -> list[dict[str, Any]]:
    """Return a problem if a model's weights do not fit this machine."""
    room = max(gpu["memory_bytes"] for gpu in gpus) if gpus else memory["available"]
    plain, packed = weights["weights_bytes"], weights["packed_bytes"]
    if room is None or plain + packed <= room:
        return []
    what = f"the weights of {weights['name']} take {size_text(plain + packed)}"
    fix = "use --tp, a smaller --dtype, or a larger machine"
    if packed and plain <= room:
        what, fix = f"{what} with packed copies", f"use --no-packed-weights: {size_text(plain)}"
    return [_problem(f"{what}, and {size_text(room)} are there", fix, required=False)]


def _problems(
    packages: list[dict[str, Any]], machine: dict[str, Any], problem: str | None
) -> list[dict[str, Any]]:
    problems = []
    for package in packages:
        if package["ok"]:
            continue
        if package["name"] == "triton" and (sys.platform != "linux" or not machine.get("gpus")):
            continue
        state = "is missing" if package["version"] is None else f"is {package['version']}"
        what = f"{package['name']} {state}, for {package['purpose']}"
        fix = f"pip install '{package['name']}{package['wanted']}'"
        problems.append(_problem(what, fix, required=package["required"]))
    if problem is not None and all(p["ok"] for p in packages if p["name"] == "torch"):
        problems.append(_problem(problem, "pip install --force-reinstall torch"))
    if machine and not machine["gpus"] and NVIDIA.exists():
        reason, fix = "torch sees none", "look at nvidia-smi and CUDA_VISIBLE_DEVICES"
        if machine["cuda"] is None:
            reason = "this torch is built without CUDA"
            fix = "install a CUDA build of torch (https://pytorch.org/get-started/locally)"
        problems.append(_problem(f"there is an NVIDIA driver, but {reason}", fix, required=False))
    if machine and machine["gpus"] and not shutil.which("cc") and not shutil.which("gcc"):
        problems.append(
            _problem("no C compiler, which triton needs", "apt install gcc", required=False)
        )
    return problems


def _problem(what: str, fix: str, *, required: bool = True) -> dict[str, Any]:
    return {"what": what, "fix": fix, "required": required}


def _print(report: dict[str, Any]) -> None:
    rows = table("what", "found", "for")
    rows.show_header = False
    rows.add_row("pcg", report["pcg"], "")
    rows.add_row("python", report["python"], report["platform"])
    for package in report["packages"]:
        version = plain(package["version"]) if package["ok"] else f"✗ {plain(package['version'])}"
        rows.add_row(package["name"], version, package["purpose"])
    for name, extra in report["extras"].items():
        lack = f"lacks {', '.join(extra['missing'])}: pip install 'pcg[{name}]'"
        rows.add_row("extra", name, plain(lack if extra["missing"] else "installed"))
    if "cpu" in report:
        cpu = report["cpu"]
        rows.add_row("cpu", cpu["capability"], f"{cpu['cores']} cores, {cpu['threads']} threads")
        dtypes = ", ".join(cpu["packed_dtypes"])
        if dtypes:
            rows.add_row("packed", dtypes, "copies of weights on CPUs")
        for name, times in report["product_ms"].items():
            shown = ", ".join(f"{ms:.2f}" for ms in times.values())
            rows.add_row("product", name, f"{shown} ms of {', '.join(times)} tokens")
        for gpu in report["gpus"]:
            size = size_text(gpu["memory_bytes"])
            rows.add_row("gpu", gpu["name"], f"{size}, capability {gpu['capability']}")
        if not report["gpus"]:
            rows.add_row("gpu", "none", "everything runs on the CPU")
        name, _, reason = report["backend"].partition(": ")
        rows.add_row("backend", name, plain(reason))
        if (ptxas := report["ptxas"]) is not None:
            rows.add_row("ptxas", ptxas["version"], plain(f"self-test: {ptxas['self_test']}"))
        attention = report["attention"]
        missing = [
            f"without {library['name']}: {library['source']}"
            for library in attention["libraries"]
            if not library["ok"]
        ]
        rows.add_row("attention", attention["auto"], plain("\n".join(missing)))
        backends = [name for name, is_there in report["distributed"].items() if is_there]
        rows.add_row("distributed", ", ".join(backends) or "none", "several processes")
    memory = report["memory_bytes"]
    if memory["total"] is not None:
        free, total = size_text(memory["available"]), size_text(memory["total"])
        rows.add_row("memory", f"{free} free", f"of {total}")
    if "model" in report:
        weights = report["model"]
        name = f"{plain(weights['name'])}, {weights['dtype']}"
        rows.add_row("weights", size_text(weights["weights_bytes"]), name)
        if weights["packed_bytes"]:
            copies = "in packed copies; --no-packed-weights"
            rows.add_row("", f"{size_text(weights['packed_bytes'])} more", copies)
        name, _, reason = weights["backend"].partition(": ")
        rows.add_row("", name, plain(reason))
    rows.add_row("disk", f"{size_text(report['disk_bytes']['free'])} free", "in this directory")
    console = out()
    print_table(rows, console)
    console.print()
    for item in report["problems"]:
        style = "bold red" if item["required"] else "yellow"
        console.print(f"{item['what']}\n  {item['fix']}", style=style, soft_wrap=True)
    if not report["problems"]:
        console.print("Nothing is missing.", style="green")
