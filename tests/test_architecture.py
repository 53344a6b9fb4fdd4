"""Checks of the source tree: imports point in one direction, every module belongs to a layer, and documents name only files that exist."""

from __future__ import annotations

import ast
import re
import subprocess
import sys
import tomllib
from pathlib import Path
from string import ascii_lowercase
from typing import Any

import pytest

import compiler.machine.intrinsics
from compiler.ir.tiles import TILE_OPS
from compiler.machine.target import NAMED
from tests.conftest import LONGEST

assert compiler.machine.intrinsics  # importing the package registers all intrinsics

ROOT = Path(__file__).parent.parent
PRODUCT = ("deploy", "server", "compiler", "runtime")
PATHS = re.compile(r"`((?:deploy|server|compiler|runtime|tests|docs|docker)/[\w./-]*|[\w-]+\.(?:toml|md|txt))`")
OF_MODELS = ("merges.txt", "vocab.txt", "relaxserve.toml")  # files in the folder of a model

PAGES = [
    "ARCHITECTURE.md",
    "CONTRIBUTING.md",
    "README.md",
    *sorted(path.relative_to(ROOT).as_posix() for path in ROOT.glob("docs/**/*.md")),
]


def contracts() -> list[dict[str, Any]]:
    return tomllib.loads((ROOT / "pyproject.toml").read_text())["tool"]["importlinter"]["contracts"]


def test_imports_point_one_way() -> None:
    command = [Path(sys.executable).with_name("lint-imports"), "--no-cache", "--config", ROOT / "pyproject.toml"]
    result = subprocess.run(command, cwd=ROOT, capture_output=True, text=True)
    assert result.returncode == 0, result.stdout


def test_every_part_of_the_compiler_has_a_layer() -> None:
    layers = next(c["layers"] for c in contracts() if c["name"] == "the layers of the compiler")
    placed = {part.strip() for layer in layers for part in layer.split("|")}
    parts = {p.stem for p in (ROOT / "compiler").iterdir() if p.stem != "__init__" and (p.suffix == ".py" or (p / "__init__.py").exists())}
    assert parts - {p.removeprefix("compiler.") for p in placed} == set()


def test_every_step_of_a_load_has_a_place_in_its_order() -> None:
    """The list of loading steps in `deploy/model_loading/__init__.py` is complete and has the same order as the layers that import-linter
    enforces."""
    layers = next(c["layers"] for c in contracts() if c["name"] == "a load runs in one direction")
    steps = [layer.removeprefix("deploy.model_loading.") for layer in reversed(layers)]
    folder = ROOT / "deploy" / "model_loading"
    assert set(steps) == {p.stem for p in folder.glob("*.py")} - {"__init__"}
    assert re.findall(r"^(\w+) {2,}", (folder / "__init__.py").read_text(), re.MULTILINE) == steps


@pytest.mark.parametrize("page", PAGES)
def test_pages_name_only_what_exists(page: str) -> None:
    named = PATHS.findall((ROOT / page).read_text())
    assert named or page.startswith("docs/"), "the pattern finds no file"
    assert [path for path in named if path not in OF_MODELS and not (ROOT / path).exists()] == []


def test_the_architecture_walks_through_all_packages() -> None:
    text = (ROOT / "ARCHITECTURE.md").read_text()
    packages = [p.parent.relative_to(ROOT).as_posix() for top in ("compiler", "server") for p in (ROOT / top).glob("*/__init__.py")]
    assert [p for p in packages if f"{p}/" not in text and f"`{p}`" not in text and p != "server/console"] == []


def test_every_package_tells_its_purpose() -> None:
    """Every `__init__.py` begins with a docstring that says in one sentence what its package does."""
    packages = [path for top in PRODUCT for path in (ROOT / top).rglob("__init__.py")]
    told = {path: (ast.get_docstring(ast.parse(path.read_text())) or "").split("\n\n")[0] for path in packages}
    assert len(told) > 40
    assert [str(path) for path, purpose in told.items() if not purpose.endswith((".", ":"))] == []


def test_tests_are_no_packages() -> None:
    """No test folder has an `__init__.py`. Test files in different folders may have the same name, which works only in pytest's importlib
    mode; an `__init__.py` would break this mode."""
    assert list((ROOT / "tests").rglob("__init__.py")) == []


MATTERS = ("server/api/vendors",)


def test_tests_mirror_the_tree() -> None:
    """Every test folder mirrors a source folder of the same name. The exceptions are e2e (tests of the whole product), real (real models),
    the folders of tests that contain modules with tests beside them: gpu (the software GPU), check (the selection of tests), doubles,
    golden and lab; and the folders in MATTERS, each about a matter of several packages."""
    folders = {p.parent.relative_to(ROOT / "tests") for p in (ROOT / "tests").rglob("test_*.py")}
    assert {folder for folder in MATTERS if folder not in {f.as_posix() for f in folders}} == set()
    assert {f.parts[0] for f in folders if not (ROOT / f).is_dir() and f.as_posix() not in MATTERS} == {
        "e2e",
        "gpu",
        "check",
        "doubles",
        "golden",
        "lab",
        "real",
    }


# Expressions that yield the address of an array. Runtime and compiler may not import ctypes at all, except in the folder of devices.
ADDRESSES = re.compile(r"\.ctypes\.data|\.ctypes\.get_|__array_interface__|\baddress_of\b|ctypes\.addressof")
FOREIGN = re.compile(r"\bimport ctypes\b|\bfrom ctypes\b")
DEVICES = ROOT / "runtime" / "device"
# Modules that must not read the content of tensors. `runtime/session.py` is not among them, because callers pass arrays to it; it lets the
# device copy them.
ABOVE_THE_DEVICE = ("vm/*.py", "memory.py", "kv_pool.py")


def test_only_a_device_knows_addresses() -> None:
    modules = [p for top in PRODUCT for p in (ROOT / top).rglob("*.py") if not p.is_relative_to(DEVICES)]
    assert [str(p.relative_to(ROOT)) for p in modules if ADDRESSES.search(p.read_text())] == []
    inside = [p for p in modules if p.relative_to(ROOT).parts[0] in ("runtime", "compiler")]
    assert [str(p.relative_to(ROOT)) for p in inside if FOREIGN.search(p.read_text())] == []
    assert ADDRESSES.search((DEVICES / "cpu" / "memory.py").read_text()), "the pattern finds no address"
    assert FOREIGN.search((DEVICES / "cpu" / "device.py").read_text()), "the pattern finds no import"


def test_above_the_device_tensors_are_opaque() -> None:
    """Runtime modules outside the folder of devices, such as the virtual machine, neither create nor read NumPy arrays."""
    makes = re.compile(r"NDArray|np\.(ndarray|array|empty|zeros|frombuffer|copyto|asarray)\b")
    modules = [path for pattern in ABOVE_THE_DEVICE for path in (ROOT / "runtime").glob(pattern)]
    assert len(modules) > len(ABOVE_THE_DEVICE)
    assert [str(path) for path in modules if makes.search(path.read_text())] == []


def test_the_page_size_is_defined_once() -> None:
    """Only one module defines the size of a KV page. Kernels, the engine and the test doubles import it. A second definition would go
    unnoticed until the two differ."""
    defines = re.compile(r"^\s*PAGE(_SIZE|_TOKENS)?\b[^=\n]*= *\d|\bpage_size *= *\d", re.MULTILINE)
    found = [p.relative_to(ROOT) for top in PRODUCT for p in (ROOT / top).rglob("*.py") if defines.search(p.read_text())]
    assert [str(path) for path in found] == ["runtime/cache_groups.py"]


def strings_of(path: Path) -> set[str]:
    return {node.value for node in ast.walk(ast.parse(path.read_text())) if isinstance(node, ast.Constant) and isinstance(node.value, str)}


def test_only_the_machines_folder_names_features() -> None:
    """CPU features are named only in `compiler/machine`; the rest of the compiler asks that folder. A few names are not checked, because
    they also have other meanings: fma is a scalar function too, bf16 is an element type, and RISC-V extensions are single letters."""
    features = {f for target in NAMED.values() for f in target.features} - {"fma", "bf16", *ascii_lowercase} | {"avxvnni"}
    folder = ROOT / "compiler/machine"
    assert features <= {text for path in folder.rglob("*.py") for text in strings_of(path)}, "the folder does not name all features"
    modules = [p for p in (ROOT / "compiler").rglob("*.py") if not p.is_relative_to(folder)]
    assert {str(p.relative_to(ROOT)): names for p in modules if (names := strings_of(p) & features)} == {}


def test_only_its_file_names_an_intrinsic() -> None:
    """The name of an intrinsic occurs only in its own file; other modules use its class. Names that are English words are not checked,
    because buffers have such names too."""
    names = {name for name in TILE_OPS if "_" in name and TILE_OPS[name].__module__.startswith("compiler.")}
    tiles = ROOT / "compiler/machine/intrinsics"
    assert names <= {text for path in tiles.glob("*.py") for text in strings_of(path)}, "the folder does not name all intrinsics"
    modules = [p for top in ("compiler", "deploy") for p in (ROOT / top).rglob("*.py") if not p.is_relative_to(tiles)]
    assert {str(p.relative_to(ROOT)): found for p in modules if (found := strings_of(p) & names)} == {}


def test_what_begins_first_exists() -> None:
    """Every entry of LONGEST is a group, or a file whose tests do not all belong to one. Other entries would have no effect: that file or
    group would run last."""
    texts = {path.relative_to(ROOT / "tests").as_posix(): path.read_text() for path in (ROOT / "tests").rglob("test_*.py")}
    marked = {name for text in texts.values() for name in re.findall(r'xdist_group\("([^"]+)"\)', text)}
    alone = {name for name, text in texts.items() if not re.search(r"^pytestmark = .*xdist_group\(", text, re.MULTILINE)}
    assert [name for name in LONGEST if name not in marked | alone] == []


@pytest.mark.xdist_group("one process")
def test_groups_of_tests_stay_in_one_process(request: pytest.FixtureRequest) -> None:
    """All tests of an xdist group run in one process. Otherwise every process would start its own copy of the server or model that the
    group shares."""
    assert not getattr(request.config.option, "loadgroup", False) or request.node.nodeid.endswith("@one process")
