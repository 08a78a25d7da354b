"""The files that a server's options name: a wrong one is known before the model is loaded."""

from __future__ import annotations

from pcg.errors import ConfigError, ServeError
from pcg.files import is_file, read_text, shown_path
from pcg.peft.reader import CONFIG
from pcg.serve.adapters.modules import parse_modules
from pcg.serve.adapters.roots import Roots
from pcg.serve.listening import check_certificate
from pcg.serve.options import ServeOptions


def check_given_files(options: ServeOptions) -> None:
    """Raise an error for a file or a folder that is not there, or not what it should be.

    Raises:
        ServeError: of adapters or the certificate.
        ConfigError: of the chat template.
    """
    if options.ssl_certfile is not None:
        check_certificate(options.ssl_certfile, options.ssl_keyfile)
    for module in parse_modules(options.lora_modules):
        if not is_file(module.path / CONFIG):
            raise ServeError(
                f"--lora-modules {module.name}={shown_path(module.path)}: no {CONFIG} is there; "
                "give the folder of a saved adapter"
            )
    Roots(options.lora_roots)
    if options.chat_template is not None:
        read_text(options.chat_template, ConfigError)
