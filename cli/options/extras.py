"""The extras of pcg's distribution, and the extra that a missing module belongs to."""

from __future__ import annotations

import importlib.metadata
from collections.abc import Mapping

from packaging.requirements import Requirement
from packaging.utils import canonicalize_name

MODULES: Mapping[str, str] = {"google": "protobuf", "multipart": "python-multipart", "zmq": "pyzmq"}
"""Distributions whose modules have another name."""
DEVELOPMENT = ("dev", "docs")


def extras() -> dict[str, list[Requirement]]:
    """Return the requirements of each extra on this platform; empty if pcg is not installed."""
    try:
        metadata = importlib.metadata.metadata("pcg")
    except importlib.metadata.PackageNotFoundError:
        return {}
    requirements = [Requirement(text) for text in metadata.get_all("Requires-Dist", [])]
    return {
        extra: [
            requirement
            for requirement in requirements
            if requirement.marker is not None
            and requirement.marker.evaluate({"extra": extra})
            and not requirement.marker.evaluate({"extra": ""})
        ]
        for extra in metadata.get_all("Provides-Extra", [])
        if extra not in DEVELOPMENT
    }


def lacking(requirements: list[Requirement]) -> list[str]:
    """Return the requirements that are not installed in a version that pcg supports."""
    return [
        f"{requirement.name}{requirement.specifier}"
        for requirement in requirements
        if not _is_installed(requirement)
    ]


def _is_installed(requirement: Requirement) -> bool:
    try:
        version = importlib.metadata.version(requirement.name)
    except importlib.metadata.PackageNotFoundError:
        return False
    return requirement.specifier.contains(version, prereleases=True)


def install_line(module: str) -> str:
    """Return the pip command that installs a module, by pcg's extra if it belongs to one."""
    top = module.partition(".")[0]
    name = canonicalize_name(MODULES.get(top, top))
    for extra, requirements in extras().items():
        if any(canonicalize_name(requirement.name) == name for requirement in requirements):
            return f"pip install 'pcg[{extra}]'"
    return f"pip install {name}"
