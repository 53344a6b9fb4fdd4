"""The intrinsic tiles. Importing this package imports every module of the folder, which registers its intrinsics for programs.

A file defines an intrinsic or a family of them: fields, operands, meaning in NumPy, required features, and code in LLVM IR. A new file here
is a new intrinsic.
"""

from importlib import import_module
from pkgutil import iter_modules

for _module in iter_modules(__path__):
    import_module(f"{__name__}.{_module.name}")
