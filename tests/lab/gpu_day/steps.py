"""The steps of a day with a card, the most valuable first. Each is a command that runs in a process of its own. What it prints as JSON
objects, one a line or as one document, are its results.

Only the standard library is imported here, because the first step installs the packages that the machine lacks.
"""

from __future__ import annotations

from dataclasses import dataclass

PYTHON = "python"  # in a command: the interpreter that runs the day
MARKED = "gpu and not slow"  # value of pytest's option -m, which runs tests on a real card
LAYERS = 4  # number of layers with which the 8B shape is measured, so that a model is bound in seconds
FORMATS = ("bf16", "int4-128", "int8")
SHAPE = "shape "  # begins the name of a step that measures the 8B shape; the format of its weights follows
KERNELS = (
    *("rows", "branches", "products", "experts", "routing", "scans", "attention", "tensor_attention", "warpgroup_attention"),
    *("region", "sampling", "hostile_indices", "casts"),
)
OF_KERNELS = "tests/runtime/device/cuda/test_{}.py"
PLUGIN = "tests.lab.gpu_day.plugin"


@dataclass(frozen=True, slots=True)
class Step:
    name: str
    limit_s: int  # the step is killed after this time
    command: tuple[str, ...]
    small: tuple[str, ...] = ()  # further arguments in a rehearsal, on a model of a card in software


def module(name: str, limit_s: int, what: str, *arguments: str, small: tuple[str, ...] = ()) -> Step:
    return Step(name, limit_s, (PYTHON, "-m", what, *arguments), small)


def tests(name: str, limit_s: int, file: str, *tool: str, small: tuple[str, ...] = (), several_cards: bool = False) -> Step:
    """Return a step that runs the tests of a file with pytest, under a tool if one is given. A rehearsal runs one case of each test.
    Warnings are no errors, because the machine may have other versions of packages. With `several_cards`, the step also passes if all tests
    are skipped, as on a machine with one card."""
    command = (*tool, PYTHON, "-m", "pytest", "-q", "--maxfail=3", "-W", "default", "-p", "no:cacheprovider", "-p", PLUGIN, "-m", MARKED)
    return Step(name, limit_s, (*command, *(("--may-skip",) if several_cards else ()), file), ("--one-case", *small))


def sanitized(tool: str) -> Step:
    """Return a step that runs the tests of products under a tool of compute-sanitizer: small kernels with asynchronous copies in flight."""
    return tests(tool, 60, OF_KERNELS.format("products"), "compute-sanitizer", "--tool", tool, "--error-exitcode", "9")


SMALL_MODEL = ("--small",)

STEPS = (
    module("install", 200, "tests.lab.gpu_day.install"),
    module("machine", 30, "tests.lab.gpu_day.machine"),
    # right answers: kernels against NumPy, families against transformers, bits in every batch, a chat over HTTP
    *(tests(f"kernels: {name}", 60, OF_KERNELS.format(name)) for name in KERNELS),
    tests("families", 90, "tests/compiler/frontend/test_on_gpu.py", small=("-k", "transformers")),
    # `make test` runs these on the card in software; to load a model for 64 sequences there takes most of a minute
    tests("bits", 60, "tests/e2e/test_gpu_bits.py", small=("--collect-only",)),
    tests("kernels: ranks", 60, OF_KERNELS.format("ranks"), several_cards=True),
    tests("bits of several cards", 60, "tests/e2e/test_rank_bits.py", small=("--collect-only",), several_cards=True),
    tests("chat over HTTP", 75, "tests/deploy/test_cuda.py"),
    # shares of what the card can do
    module("copies", 30, "tests.lab.gpu_day.shares", "copies", small=SMALL_MODEL),
    module("product", 60, "tests.lab.gpu_day.shares", "product", small=SMALL_MODEL),
    *(module(f"{SHAPE}{form}", 110, "tests.lab.gpu_day.shares", "shape", form, small=SMALL_MODEL) for form in FORMATS),
    module("serve 0.5b", 110, "tests.lab.gpu_day.served", small=SMALL_MODEL),
    # tools, peers, and a worker that is killed
    sanitized("memcheck"),
    sanitized("racecheck"),
    module("peers", 150, "tests.lab.gpu_day.peers", small=SMALL_MODEL),
    tests("killed worker", 90, "tests/deploy/test_cuda_families.py"),
)

# Steps that show that a day survives them: a process that dies by a signal, and one that hangs with a child that ignores signals.
PLANTED = (
    Step("planted fault", 20, (PYTHON, "-c", "import os; print('{\"begun\": true}', flush=True); os.kill(os.getpid(), 11)")),
    Step("planted hang", 2, ("sh", "-c", "trap '' TERM; sleep 600 & wait")),
)
