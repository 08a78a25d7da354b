"""The command `pcg`. Nothing here imports torch before a command needs it."""


def main() -> None:
    """Run the command line; exits with its status."""
    from .application import app

    app(prog_name="pcg")


__all__ = ["main"]
