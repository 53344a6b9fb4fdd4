"""The command line: one file per group of commands, put together here."""

from deploy.cli.main import main

__all__ = ["main"]
