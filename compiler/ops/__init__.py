"""The operators. Importing this package imports every module in it and in its sub-packages, which fills the operator tables."""

from importlib import import_module
from pkgutil import walk_packages

for _module in walk_packages(__path__, f"{__name__}."):
    import_module(_module.name)
