"""The templates of pages: those of a command's own room, in the frame that all pages share."""

from __future__ import annotations

from jinja2 import ChoiceLoader, Environment, PackageLoader, StrictUndefined

from pcg.units import gib


def page_environment(package: str) -> Environment:
    """Return the environment of the templates in a package's folder, and in this one."""
    environment = Environment(
        loader=ChoiceLoader([PackageLoader(package, "."), PackageLoader("pcg.pages", ".")]),
        autoescape=True,
        undefined=StrictUndefined,
        trim_blocks=True,
        lstrip_blocks=True,
    )
    environment.filters |= {"gib": gib}
    return environment
