"""Storage formats of frozen weights, one file each; `pcg.formats.registry` finds them by name."""
