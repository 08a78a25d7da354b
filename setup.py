"""The list of packages; everything else about the distribution is in pyproject.toml.

It is computed here because the folder `cli` is installed as `pcg_cli`, a name that cannot collide,
and a renamed folder cannot be found by the declarative form.
"""

from setuptools import find_packages, setup

library = find_packages(include=["pcg", "pcg.*"])
command_line = [f"pcg_{name}" for name in find_packages(include=["cli", "cli.*"])]
setup(packages=[*library, *command_line], package_dir={"pcg_cli": "cli"})
