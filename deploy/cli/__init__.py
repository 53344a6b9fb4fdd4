"""The command line: one file per group of commands; `main` assembles them."""

from deploy.cli.main import main

__all__ = ["main"]
