"""Options of the commands, made of the fields of dataclasses."""
