"""`relaxserve`: register all commands. All but `help` and `version` are functions of other modules.

A command imports the modules that it needs only when it runs, so that `--help`, `ps` and `chat` need not wait for the compiler's imports.
"""

from __future__ import annotations

from typing import Annotated, Any

import typer
from typer.core import TyperGroup

from deploy.cli import (
    admin,
    bench,
    chat,
    compile,
    compiler,
    doctor,
    dynamo,
    export,
    generate,
    inspect,
    launch,
    models,
    replay,
    running,
    serve,
    stage,
)
from deploy.cli.root import COMPILER, MODELS, SERVING, new_app, tell_version

app = new_app()

serve.add_to(app)
app.command("load", rich_help_panel=SERVING)(admin.load)
app.command("unload", rich_help_panel=SERVING)(admin.unload)
app.command("stop", rich_help_panel=SERVING)(running.stop)
app.command("ps", rich_help_panel=SERVING)(admin.ps)
app.command("show", rich_help_panel=SERVING)(running.show)
app.command("cp", rich_help_panel=SERVING)(running.cp)
app.command("create", rich_help_panel=SERVING)(running.create)
app.command("chat", rich_help_panel=SERVING)(chat.chat)
app.command("launch", rich_help_panel=SERVING)(launch.launch)
app.command("stage", rich_help_panel=SERVING)(stage.stage)
app.command("dynamo", rich_help_panel=SERVING, add_help_option=False, context_settings=dynamo.CONTEXT, options_metavar="MODEL [OPTIONS]")(
    dynamo.dynamo
)
app.command("replay", rich_help_panel=SERVING)(replay.replay)
app.command("run", rich_help_panel=SERVING)(models.run)
app.command("pull", rich_help_panel=MODELS)(models.pull)
app.command("ls", rich_help_panel=MODELS)(models.ls)
app.command("rm", rich_help_panel=MODELS)(models.rm)
app.command("doctor", rich_help_panel=MODELS)(doctor.doctor)
app.command("inspect", rich_help_panel=MODELS)(inspect.inspect)
app.command("compile", rich_help_panel=MODELS)(compile.compile_)
app.command("generate", rich_help_panel=MODELS)(generate.generate)
app.command("export", rich_help_panel=MODELS)(export.export)
app.command("opt", rich_help_panel=COMPILER)(compiler.opt)
app.command("eval", rich_help_panel=COMPILER)(compiler.eval_)
app.add_typer(compiler.cache, name="cache", rich_help_panel=COMPILER)
app.command("bench", rich_help_panel=COMPILER, add_help_option=False, context_settings=bench.CONTEXT, options_metavar="[NAME [OPTIONS]]")(
    bench.bench
)


@app.command("help", hidden=True)
def help_(ctx: typer.Context, command: Annotated[list[str] | None, typer.Argument(help="Name of a command.")] = None) -> None:
    """Show the help of a command, or list all commands.

    [bold]Examples[/bold]

      relaxserve help serve
    """
    parent = ctx.find_root()
    found: Any = parent.command
    for name in command or ():
        below = found.get_command(parent, name) if isinstance(found, TyperGroup) else None
        if below is None:
            raise typer.BadParameter(f"{name!r} is no command; `relaxserve help` lists them")
        found, parent = below, typer.Context(below, info_name=below.name, parent=parent)
    typer.echo(found.get_help(parent))


@app.command("version", hidden=True)
def version_() -> None:
    """Show the version.

    [bold]Examples[/bold]

      relaxserve version
    """
    tell_version(True)
