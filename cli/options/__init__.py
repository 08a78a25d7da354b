"""Command-line options, built from the fields of dataclasses."""
