"""The templates of pages: those of a command's own room, in the frame that all pages share."""

from __future__ import annotations

from jinja2 import ChoiceLoader, Environment, PackageLoader, StrictUndefined

from pcg.units import gib


def page_environment(package: str) -> Environment:
    """Return the environment of the templates in `package`'s folder `page`, and in this folder."""
    environment = Environment(
        loader=ChoiceLoader([PackageLoader(package, "page"), PackageLoader("pcg.pages", ".")]),
        autoescape=True,
        undefined=StrictUndefined,
        trim_blocks=True,
        lstrip_blocks=True,
    )
    environment.filters |= {"gib": gib}
    return environment
