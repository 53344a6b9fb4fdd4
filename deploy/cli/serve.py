"""`relaxserve serve`."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated

import typer
from rich.console import Console

from deploy import demo
from deploy.serve import model_spec
from deploy.serve import serve as run_server
from server.settings import ServerSettings, SettingsError

console = Console(stderr=True)


def serve(
    model: Annotated[list[str] | None, typer.Option(help="PATH_OR_ID[=NAME]; may be given several times.")] = None,
    host: Annotated[str, typer.Option(help="Address to listen on.")] = "127.0.0.1",
    port: Annotated[int, typer.Option(help="Port to listen on.")] = 8000,
    insecure: Annotated[bool, typer.Option(help="Serve other machines without keys.")] = False,
    api_key_file: Annotated[Path | None, typer.Option(help="File with one API key per line, read again when it changes.")] = None,
    admin_key_file: Annotated[Path | None, typer.Option(help="The same for /admin.")] = None,
    model_root: Annotated[Path, typer.Option(help="Folder below which /admin may load models.")] = Path("models"),
    strict: Annotated[bool, typer.Option(help="Refuse unknown fields instead of reporting them.")] = False,
) -> None:
    """Serve models; without --model, the small built-in demo model.

    [bold]Examples[/bold]

      relaxserve serve
      relaxserve serve --model ~/models/Qwen2.5-0.5B-Instruct=qwen --port 9000
    """
    specs = [model_spec(m) for m in model] if model else [model_spec(f"{demo.MODEL}={demo.NAME}")]
    try:
        settings = ServerSettings(
            host=host,
            port=port,
            insecure=insecure,
            api_key_file=api_key_file,
            admin_key_file=admin_key_file,
            model_root=model_root,
            strict=strict,
        )
    except SettingsError as error:
        console.print(f"[red]{error}[/red]")
        raise typer.Exit(2) from None
    url = f"http://{host}:{port}"
    name = specs[0].name
    console.print(f"[bold]relaxserve[/bold] on {url}  ·  console at {url}/  ·  API at {url}/v1  ·  model {name!r}")
    console.print(
        f"""try:  curl {url}/v1/chat/completions -H 'Content-Type: application/json' -d '{{"model": "{name}", "messages": """
        """[{"role": "user", "content": "What is the capital of France?"}]}'""",
        markup=False,
        highlight=False,
        soft_wrap=True,
    )
    run_server(settings, specs)
