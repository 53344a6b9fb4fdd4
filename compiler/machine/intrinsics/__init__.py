"""The intrinsic tiles: every module of this folder, found by itself. Importing this makes them known to programs.

A file has an intrinsic, or a family of them: its fields, its operands, its meaning in NumPy, the features it needs, and how it is written
in LLVM IR. A new file here is a new intrinsic.
"""

from importlib import import_module
from pkgutil import iter_modules

for _module in iter_modules(__path__):
    import_module(f"{__name__}.{_module.name}")
