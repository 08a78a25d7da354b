"""`pcg doctor`: what this machine can do, what is missing, and the command to get it."""

from __future__ import annotations

import importlib.metadata
import os
import platform
import re
import shutil
import sys
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import typer

from pcg.units import size_text
from pcg.version import __version__

from .arguments import Json
from .console import busy, out, plain, print_json, table

NVIDIA = Path("/proc/driver/nvidia/version")


@dataclass(frozen=True)
class Requirement:
    """A package and its versions that pcg takes: from `least`, up to but not `below`."""

    name: str
    least: str | None = None
    below: str | None = None
    purpose: str = ""
    required: bool = True

    @property
    def wanted(self) -> str:
        bounds = [f">={self.least}" if self.least else "", f"<{self.below}" if self.below else ""]
        return ",".join(bound for bound in bounds if bound)

    def accepts(self, version: str) -> bool:
        found = _numbers(version)
        low = self.least is None or found >= _numbers(self.least)
        return low and (self.below is None or found < _numbers(self.below))


REQUIREMENTS = (
    Requirement("torch", "2.11", "2.14", "tensors"),
    Requirement("transformers", "5.17", None, "tracing"),
    Requirement("safetensors", purpose="weights"),
    Requirement("tokenizers", purpose="text"),
    Requirement("jinja2", "3.1.6", None, "chat templates"),
    Requirement("sympy", purpose="formulas"),
    Requirement("networkx", purpose="graphs"),
    Requirement("numpy", purpose="arrays"),
    Requirement("matplotlib", "3.10", None, "plots"),
    Requirement("rich", purpose="tables"),
    Requirement("typer", purpose="this command"),
    Requirement("triton", purpose="GPU kernels", required=False),
    Requirement("peft", purpose="peft configurations in Python", required=False),
)


def doctor_command(json: Json = False) -> None:
    """Show what this machine can do, and what is missing.

    Exits with 1 if something required is.
    """
    packages = [_package(requirement) for requirement in REQUIREMENTS]
    machine: dict[str, Any] = {}
    problem = None
    try:
        with busy("asking torch"):
            machine = _torch_machine()
    except Exception as error:  # a broken torch is what this command is asked about
        problem = f"torch cannot be used ({type(error).__name__}: {error})"
    report = {
        "pcg": __version__,
        "python": platform.python_version(),
        "platform": platform.platform(),
        "packages": packages,
        **machine,
        "memory_bytes": _memory(),
        "disk_bytes": {"free": shutil.disk_usage(Path.cwd()).free},
    }
    report["problems"] = _problems(packages, machine, problem)
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
    return {
        "name": requirement.name,
        "version": version,
        "wanted": requirement.wanted,
        "ok": version is not None and requirement.accepts(version),
        "required": requirement.required,
        "purpose": requirement.purpose,
    }


def _torch_machine() -> dict[str, Any]:
    import torch

    gpus = []
    for index in range(torch.cuda.device_count()):
        gpu = torch.cuda.get_device_properties(index)
        capability = f"{gpu.major}.{gpu.minor}"
        gpus.append({"name": gpu.name, "memory_bytes": gpu.total_memory, "capability": capability})
    there = torch.distributed.is_available()
    return {
        "cpu": {
            "capability": torch.backends.cpu.get_cpu_capability(),
            "cores": len(os.sched_getaffinity(0))
            if hasattr(os, "sched_getaffinity")
            else os.cpu_count(),
            "threads": torch.get_num_threads(),
        },
        "gpus": gpus,
        "cuda": torch.version.cuda,
        "distributed": {
            "gloo": there and torch.distributed.is_gloo_available(),
            "nccl": there and torch.distributed.is_nccl_available(),
        },
    }


def _memory() -> dict[str, int | None]:
    """Memory of the machine, or of the container that we are in where that is less."""
    try:
        text = Path("/proc/meminfo").read_text()
        total, available = (
            int(found[1]) * 1024
            for key in ("MemTotal", "MemAvailable")
            if (found := re.search(rf"^{key}:\s+(\d+)", text, re.MULTILINE))
        )
        limit = Path("/sys/fs/cgroup/memory.max").read_text().strip()
        used = int(Path("/sys/fs/cgroup/memory.current").read_text())
    except (OSError, ValueError):
        return _memory_of_machine()
    if limit.isdecimal() and int(limit) < total:
        return {"total": int(limit), "available": min(available, int(limit) - used)}
    return {"total": total, "available": available}


def _memory_of_machine() -> dict[str, int | None]:
    """Memory of the machine, without Linux's files."""
    try:
        page_bytes = os.sysconf("SC_PAGE_SIZE")
        total = page_bytes * os.sysconf("SC_PHYS_PAGES")
        return {"total": total, "available": page_bytes * os.sysconf("SC_AVPHYS_PAGES")}
    except (AttributeError, OSError, ValueError):
        return {"total": None, "available": None}


def _problems(
    packages: list[dict[str, Any]], machine: dict[str, Any], problem: str | None
) -> list[dict[str, Any]]:
    """Missing things, each with the command to get it."""
    problems = [
        _problem(f"Python {platform.python_version()} is too old", "install Python 3.11 or newer")
    ] * (sys.version_info < (3, 11))
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
        reason = (
            "this torch is built without CUDA" if machine["cuda"] is None else "torch sees none"
        )
        fix = (
            "install a CUDA build of torch (https://pytorch.org/get-started/locally)"
            if machine["cuda"] is None
            else "look at nvidia-smi and CUDA_VISIBLE_DEVICES"
        )
        problems.append(_problem(f"there is an NVIDIA driver, but {reason}", fix, required=False))
    if machine and machine["gpus"] and not shutil.which("cc") and not shutil.which("gcc"):
        problems.append(
            _problem("no C compiler, which triton needs", "apt install gcc", required=False)
        )
    return problems


def _problem(what: str, fix: str, *, required: bool = True) -> dict[str, Any]:
    return {"what": what, "fix": fix, "required": required}


def _numbers(version: str) -> tuple[int, ...]:
    """`2.13.0+cpu` as (2, 13, 0)."""
    found = re.match(r"\d+(\.\d+)*", version)
    return tuple(map(int, found[0].split("."))) if found else ()


def _print(report: dict[str, Any]) -> None:
    rows = table("what", "found", "for")
    rows.show_header = False
    rows.add_row("pcg", report["pcg"], "")
    rows.add_row("python", report["python"], report["platform"])
    for package in report["packages"]:
        version = plain(package["version"]) if package["ok"] else f"✗ {plain(package['version'])}"
        rows.add_row(package["name"], version, package["purpose"])
    if "cpu" in report:
        cpu = report["cpu"]
        rows.add_row("cpu", cpu["capability"], f"{cpu['cores']} cores, {cpu['threads']} threads")
        for gpu in report["gpus"] or [None]:
            if gpu is None:
                rows.add_row("gpu", "none", "everything runs on the CPU")
            else:
                size = size_text(gpu["memory_bytes"])
                rows.add_row("gpu", gpu["name"], f"{size}, capability {gpu['capability']}")
        backends = [name for name, is_there in report["distributed"].items() if is_there]
        rows.add_row("distributed", ", ".join(backends) or "none", "several processes")
    memory = report["memory_bytes"]
    if memory["total"] is not None:
        free, total = size_text(memory["available"]), size_text(memory["total"])
        rows.add_row("memory", f"{free} free", f"of {total}")
    rows.add_row("disk", f"{size_text(report['disk_bytes']['free'])} free", "in this directory")
    console = out()
    console.print(rows)
    console.print()
    for item in report["problems"]:
        style = "bold red" if item["required"] else "yellow"
        console.print(f"{item['what']}\n  {item['fix']}", style=style, soft_wrap=True)
    if not report["problems"]:
        console.print("Nothing is missing.", style="green")
