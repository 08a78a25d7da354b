"""`python -m pcg_cli`, the same as `pcg`."""

from . import main

main()
