"""Entry point of the command `pcg`; torch is imported only by the commands that need it."""

import gc


def main() -> None:
    """Run the command line and exit with its status."""
    # What imports create lives until the end. At the default (700, 10, 10), collections that look
    # at it again and again are a quarter of a command's time.
    gc.set_threshold(50_000, 20, 20)
    from .application import app

    app(prog_name="pcg")


__all__ = ["main"]
