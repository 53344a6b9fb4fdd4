"""The intrinsic tiles. Importing this package imports every module of the folder, and each module registers its intrinsics.

Most modules define one intrinsic or a family: fields, operands, meaning in NumPy, required CPU features, and LLVM IR. The other modules
define what several intrinsics share, or emit the code of a large one. To add an intrinsic, add a module.
"""

from importlib import import_module
from pkgutil import iter_modules

for _module in iter_modules(__path__):
    import_module(f"{__name__}.{_module.name}")
