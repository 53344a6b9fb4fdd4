"""`relaxserve serve`: start the server. Its options are made from the table of settings."""

from __future__ import annotations

import asyncio
import logging
import os
import sys
from collections.abc import Callable
from contextlib import suppress
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import msgspec
import typer
from typer.core import TyperCommand

from deploy import demo
from deploy.cli.output import Bars, errors
from deploy.cli.root import SERVING
from deploy.cli.sources import OPTIONS, LoadOption, name_of, optional, signed
from deploy.secrets import hub_token, take_secrets
from deploy.settings import (
    DEFAULTS,
    PREFIX,
    SETTINGS,
    TYPES,
    Setting,
    check_models,
    gather,
    model_spec,
    num_bytes,
    service_links,
    stages_of,
)
from server.defaults import DefaultsError, read_texts
from server.models.state import ModelSpec
from server.settings import ServerSettings, SettingsError

if TYPE_CHECKING:
    from server.models.operations import Operation
    from server.models.registry import Registry

log = logging.getLogger(__name__)

FIRST = "smollm2"  # the model that new users are told to download; once downloaded, it is served if no model is named

HELP = """Serve models; without any, smollm2 if `relaxserve pull smollm2` has downloaded it, and the built-in demo model.

Every option can also be given as an environment variable (RELAXSERVE_PORT for --port) or as a key in the --config file (port: 9000).
Options win over variables, variables over the file. --no-SWITCH turns one off.

[bold]Examples[/bold]

  relaxserve serve

  relaxserve serve qwen2.5-coder-1.5b

  relaxserve serve ~/models/Qwen2.5-0.5B-Instruct=qwen --quantize int8

  relaxserve serve --config models.yaml --host 0.0.0.0 --api-key-file keys
"""


def _serve(model: list[str] | None = None, config: Path | None = None, **arguments: Any) -> None:
    """Serve until stopped. `arguments` has a value for each option; None or []: it was not given. Fail if no model could be loaded. The
    help shows HELP instead of this text."""
    arguments.pop("help_all")
    model = [*(model or ()), *(arguments.pop("more_models") or ())]
    form = {name: value for name in OPTIONS if (value := arguments.pop(name, None)) not in (None, [])}
    settings, specs = gather(arguments, os.environ, config=config, models=model)
    token = hub_token(take_secrets(os.environ))
    if links := service_links(os.environ):
        note = f"ignored: {', '.join(links)}; Kubernetes sets them for a Service, unless the pod has enableServiceLinks: false"
        errors.print(note, highlight=False, soft_wrap=True)
    if not specs and (settings.state_file is None or not settings.state_file.exists()):
        specs = default_models()
    elif form and not model:
        options = ", ".join(map(name_of, form))
        raise SettingsError(
            f"{options} without MODEL: they apply only to models on the command line; in the file, set the fields of each model"
        )
    specs = _formed(specs, form)
    from deploy.logs import configure
    from server.models.load_report import LOADS

    configure(settings.log_level, settings.log_format)
    if shows_bars(settings) and settings.log_level != "debug":
        logging.getLogger(LOADS).setLevel(logging.WARNING)
    from deploy.serve import serve as run_server

    if not run_server(settings, specs, greet, token):
        raise typer.Exit(1)


def default_models() -> list[ModelSpec]:
    """Return the models that are served if none is named: the demo model, and before it FIRST if this model was downloaded."""
    from deploy.model_loading.origins import here

    return [model_spec(name) for name in (FIRST, demo.NAME) if name == demo.NAME or here(name) is not None]


def _formed(specs: list[ModelSpec], form: dict[str, Any]) -> list[ModelSpec]:
    """Apply the options that describe models, `form`, to all models that are served. Raise SettingsError if an option is wrong, or gives an
    alias to several models. `form` is changed."""
    aliases = tuple(form.pop("aliases", ()))
    if aliases and len(specs) > 1:
        raise SettingsError(f"--alias with {len(specs)} models; expected one model. In the file of --config, each model has aliases")
    try:
        defaults = read_texts(form.pop("defaults", []), name_of("defaults"))
    except DefaultsError as error:
        raise SettingsError(str(error)) from error
    form |= {"defaults": defaults} if defaults.given else {}  # without the option, the defaults of the configuration file stay
    if (stages := form.get("stages")) is not None:
        form["stages"] = stages_of(stages)
    specs = [msgspec.structs.replace(spec, **form, aliases=(*aliases, *spec.aliases)) for spec in specs]
    check_models(specs)
    return specs


async def greet(registry: Registry, url: str) -> bool:
    """Show the progress of loads until they have ended, then print one line, if it can be written: the server's address and its models.
    With JSON as the format of the log, log the address instead. Return False, without this line, if loads were requested and none
    succeeded."""
    from server.models.load_report import LOADS

    operations = registry.operations.all()
    if shows_bars(registry.settings):
        with Bars() as bars:
            await asyncio.gather(*(_follow(operation, bars) for operation in operations))
        logging.getLogger(LOADS).setLevel(logging.NOTSET)  # no bar shows later loads, so log them
    else:
        await asyncio.gather(*(operation.wait() for operation in operations))  # the log reports when each load begins and ends
    if operations and not registry.models():
        return False
    if registry.settings.log_format == "json":
        log.info("relaxserve at %s", url, extra={"fields": {"url": url}})
        return True
    await registry.measuring.measure()
    with suppress(OSError):  # standard error is closed, or its disk is full; `errors` would end the process at a broken pipe
        print(greeting(registry, url), file=sys.stderr, flush=True)
    return True


def shows_bars(settings: ServerSettings) -> bool:
    """Return whether a person watches the loads at a terminal. Then progress bars and the greeting replace the log lines about loads."""
    return errors.is_terminal and settings.log_format == "text"


def greeting(registry: Registry, url: str) -> str:
    """Return the line that tells the server's address and its models."""
    from server.models.load_report import summary

    ready = [model for model in registry.models() if model.loaded is not None]
    models = ", ".join(summary(model) for model in ready) or "no model is loaded"
    if [model.spec.source for model in ready] == [demo.NAME]:
        models += f", a toy: `relaxserve pull {FIRST}` downloads a real model, which the next start serves"
    return f"relaxserve at {url}: {models}; console at {url}/, API at {url}/v1"


async def _follow(operation: Operation, bars: Bars) -> None:
    """Show the progress of a load in a bar until it has ended."""
    async for _ in operation.watch():
        if operation.ended_at is None:
            bars.show(operation.model, operation.stage, operation.fraction)


# --- options -----------------------------------------------------------------------------------------------------------


def _bytes(text: str) -> int:
    """Parse a size for typer. Raise BadParameter if it is none."""
    try:
        return num_bytes(text)
    except ValueError:
        raise typer.BadParameter(f"{text!r} is not a number of bytes; expected a number such as 1000000, 64M or 2G") from None


def _shown(name: str, default: Any) -> str:
    """Format a default in the syntax that the option accepts. Only numbers of bytes have units."""
    if name.endswith("_bytes") and default % (1 << 10) == 0:
        return f"{default >> 20}M" if default % (1 << 20) == 0 else f"{default >> 10}K"
    if isinstance(default, tuple):
        return ",".join(default)
    return f"{default:g}" if isinstance(default, float) else str(default)


METAVARS = {"str": "TEXT", "int": "N", "float": "SECONDS", "bool": "", "Path": "FILE", "tuple[str, ...]": "TEXT"}


def _annotation(setting: Setting) -> Any:
    """Return the typer option of a setting. Its default is None, which means "not given": the setting then comes from the environment, the
    file or the defaults."""
    kind = TYPES[setting.name].removesuffix(" | None")
    default = DEFAULTS[setting.name]
    shown = f" [dim]({_shown(setting.name, default)})[/dim]" if default not in (None, (), False) else ""
    about: dict[str, Any] = {"help": setting.meaning + shown, "rich_help_panel": setting.group, "show_default": False}
    about["metavar"] = "BYTES" if setting.name.endswith("_bytes") else METAVARS[kind]
    option = "--" + setting.name.replace("_", "-").removesuffix("s" if kind.startswith("tuple") else "")
    if setting.name.endswith("_bytes"):
        return Annotated[int | None, typer.Option(option, parser=_bytes, **about)]
    types: dict[str, Any] = {"str": str, "int": int, "float": float, "bool": bool, "Path": Path, "tuple[str, ...]": list[str]}
    flag = f"{option}/--no-{option[2:]}" if kind == "bool" else option
    return Annotated[types[kind] | None, typer.Option(flag, **about)]


OF_MODELS = "Models on the command line"  # a panel of the help
HELP_ALL = f"{__name__}.help_all"  # key of the context's data: whether the help shows all options


def _show_all(ctx: typer.Context, asked: bool) -> None:
    """If asked, print the help with all options and end the program."""
    if asked:
        ctx.meta[HELP_ALL] = True
        typer.echo(ctx.get_help())
        raise typer.Exit


def _with_options(function: Callable[..., None]) -> Callable[..., None]:
    """Give the function a signature for typer, with one parameter for each option, and HELP as its docstring. Return the function."""
    model = Annotated[
        list[str] | None,
        typer.Argument(help="PATH_OR_ID[=NAME], 'demo', or a name in `ls --available`.", metavar="MODEL", show_default=False),
    ]
    config = Annotated[Path | None, typer.Option(help=f"YAML file with settings and models. [{PREFIX}CONFIG]", metavar="FILE")]
    help_all = Annotated[
        bool | None,
        typer.Option("--help-all", callback=_show_all, is_eager=True, metavar="", help="Show all options and exit.", show_default=False),
    ]
    more = LoadOption(list[str], "Another way to write MODEL; may be repeated.", "MODEL", ("--model", "-m")).annotation(OF_MODELS)
    own = {"model": model, "config": config, "help_all": help_all, "more_models": more}
    of_models = {field: option.annotation(OF_MODELS) for field, option in OPTIONS.items()}
    settings = {setting.name: _annotation(setting) for setting in SETTINGS if setting.in_arguments}
    function.__doc__ = HELP
    return signed(function, [optional(name, annotation) for name, annotation in (own | of_models | settings).items()])


# Parameters of the options on the first page of the help.
COMMON = {
    *("quantize", "max_context", "kv_cache_bytes", "device", "embeddings", "aliases", "defaults", "model_root", "allow_hub"),
    *("config", "host", "port", "api_key_file", "admin_key_file", "memory_limit_bytes", "help", "help_all"),
}
FIRST_PAGE = "Options that most people need; --help-all shows all"


class ServeCommand(TyperCommand):
    """The command `serve`. Its --help shows one panel with the options that most people need, and --help-all shows all options. Both show
    only one name of each option: columns with further names would leave little room for the meanings."""

    def format_help(self, ctx: Any, formatter: Any) -> None:
        options: list[Any] = [param for param in self.get_params(ctx) if param.param_type_name == "option"]
        before = [(param, vars(param).copy()) for param in options]
        try:
            for param in options:
                param.opts, param.secondary_opts = [next(name for name in param.opts if name.startswith("--"))], []
                if not ctx.meta.get(HELP_ALL):
                    param.hidden, param.rich_help_panel = param.name not in COMMON, FIRST_PAGE
            super().format_help(ctx, formatter)
        finally:
            for param, attributes in before:
                vars(param).update(attributes)


serve = _with_options(_serve)


def add_to(app: typer.Typer) -> typer.Typer:
    """Register `serve` as a command of `app`, and return `app`."""
    app.command("serve", cls=ServeCommand, rich_help_panel=SERVING)(serve)
    return app
