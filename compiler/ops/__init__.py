"""The operators: every module of this folder and of those in it, found by itself. Importing this fills the tables."""

from importlib import import_module
from pkgutil import walk_packages

for _module in walk_packages(__path__, f"{__name__}."):
    import_module(_module.name)
