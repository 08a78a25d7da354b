"""The version of pcg, which the distribution has, too."""

__version__ = "0.1.0"
