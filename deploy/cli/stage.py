"""`relaxserve stage`: offer this machine for some layers of models that another machine serves."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated

import typer


def stage(
    secret_file: Annotated[Path, typer.Option(help="File with the secret that servers must know.", metavar="FILE")],
    listen: Annotated[str, typer.Option(help="Address and port to listen on.", metavar="HOST:PORT")] = "127.0.0.1:7070",
) -> None:
    """Compute some layers of models that other machines serve with --stages. Models are loaded from the same path, or the same name, as on
    the server. The traffic is not encrypted: use a network that you trust, or a tunnel.

    [bold]Examples[/bold]

      relaxserve stage --listen 10.0.0.2:7070 --secret-file stage.secret

      relaxserve serve ~/models/large --stages 10.0.0.2:7070,local --stage-secret-file stage.secret
    """
    from deploy.cli.output import errors
    from deploy.listening import listen as listener_of
    from deploy.logs import configure
    from deploy.stages.host import offer
    from server.secret_file import read_secret
    from server.settings import SettingsError

    host, _, port = listen.rpartition(":")
    if not host or not port.isdecimal() or int(port) >= 1 << 16:
        raise SettingsError(f"--listen is {listen!r:.100}; expected HOST:PORT, such as 0.0.0.0:7070")
    secret = read_secret(secret_file, "--secret-file")
    configure("info", "text")
    listener = listener_of(host.removeprefix("[").removesuffix("]"), int(port))
    host, port = listener.getsockname()[:2]
    errors.print(f"relaxserve stage at {host} port {port}", highlight=False, soft_wrap=True)
    offer(listener, secret)
