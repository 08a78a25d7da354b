"""Entry point of the command `pcg`; torch is imported only by the commands that need it."""


def main() -> None:
    """Run the command line and exit with its status."""
    from .application import app

    app(prog_name="pcg")


__all__ = ["main"]
