"""Build `libcuda.so.1` in software. A driver function of this library calls a Python function in the process that loaded the library, or
returns `not supported` (refused.py).

The first call imports `tests.gpu.driver.attach` into the interpreter of the process, which fills the library's table of functions. A
process therefore needs only the library: on `LD_LIBRARY_PATH`, or loaded by its path.
"""

from __future__ import annotations

import os
import shutil
import subprocess
from pathlib import Path

from tests.gpu.driver.calls import C_TYPES, FUNCTIONS, Result
from tests.gpu.driver.refused import REFUSED
from tests.gpu.ptx import native

ROOT = Path(__file__).parents[3]

ATTACH = """
#include <stddef.h>
#include <stdio.h>
#include <stdlib.h>
extern int PyGILState_Ensure(void) __attribute__((weak));
extern void PyGILState_Release(int) __attribute__((weak));
extern int PyRun_SimpleString(const char *) __attribute__((weak));
extern int Py_IsInitialized(void) __attribute__((weak));
void *software_gpu_functions[COUNT];
static int attach(void) {
  if (software_gpu_functions[0]) return 1;
  if (!Py_IsInitialized || !Py_IsInitialized()) { fputs("software GPU: the library works in Python processes alone\\n", stderr); return 0; }
  int state = PyGILState_Ensure();
  PyRun_SimpleString("import sys\\nif ROOT not in sys.path: sys.path.append(ROOT)\\n"
                     "from tests.gpu.driver.attach import attach\\nattach(LIBRARY)\\n");
  PyGILState_Release(state);
  return software_gpu_functions[0] != NULL;
}
"""


def source(library: Path) -> str:
    """Return the C source of the library, which will be installed at the path `library`."""
    text = ATTACH.replace("COUNT", str(len(FUNCTIONS))).replace("ROOT", f"'{ROOT}'").replace("LIBRARY", f"'{library}'")
    lines = [text]
    # sorted, because the order of the table depends on which module was imported first
    for number, (name, (signature, _)) in enumerate(sorted(FUNCTIONS.items())):
        types = [C_TYPES[letter][1] for letter in signature]
        declared = ", ".join(f"{type_} a{n}" for n, type_ in enumerate(types)) or "void"
        passed = ", ".join(f"a{n}" for n in range(len(types)))
        called = f"((int (*)({', '.join(types) or 'void'}))software_gpu_functions[{number}])({passed})"
        lines.append(f"int {name}({declared}) {{ return attach() ? {called} : {Result.NO_DEVICE:d}; }}")
    lines += [f"int {name}(void) {{ return {Result.NOT_SUPPORTED:d}; }}" for name in REFUSED if name not in FUNCTIONS]
    lines.append(native.SOURCE.read_text())
    return "\n".join(lines) + "\n"


def compiler() -> str | None:
    return next((found for name in (os.environ.get("CC"), "cc", "gcc", "clang") if name and (found := shutil.which(name))), None)


def build(folder: Path) -> Path:
    """Return the path of the library in a folder. Compile the library first if its source has changed."""
    import tests.gpu.driver.attach  # noqa: F401  fills the table of functions

    library = folder.resolve() / "libcuda.so.1"
    text = source(library)
    written = folder / "libcuda.c"
    if not library.exists() or not written.exists() or written.read_text() != text:
        folder.mkdir(parents=True, exist_ok=True)
        written.write_text(text)
        fresh = folder / f"libcuda.{os.getpid()}.so"
        used = compiler()
        assert used is not None, "the software driver is built by a C compiler; none is installed"
        # Contraction would round once where native.c rounds twice. The library runs only here, so it may use all features of this CPU.
        flags = ["-O3", "-march=native", "-ffp-contract=off", "-fno-math-errno", "-fno-trapping-math"]
        command = [used, "-shared", "-fPIC", "-w", *flags, str(written), "-Wl,-soname,libcuda.so.1", "-lm", "-o", str(fresh)]
        subprocess.run(command, check=True, capture_output=True)
        fresh.replace(library)
    return library
