"""The template environment of a package's pages, with the shared templates."""

from __future__ import annotations

from jinja2 import ChoiceLoader, Environment, PackageLoader, StrictUndefined

from pcg.units import gib


def page_environment(package: str) -> Environment:
    """Return an environment with the templates of a package's folder and of this folder."""
    environment = Environment(
        loader=ChoiceLoader([PackageLoader(package, "."), PackageLoader("pcg.pages", ".")]),
        autoescape=True,
        undefined=StrictUndefined,
        trim_blocks=True,
        lstrip_blocks=True,
    )
    environment.filters |= {"gib": gib}
    return environment
