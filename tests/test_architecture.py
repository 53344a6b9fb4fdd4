"""The shape of the whole: imports point one way, every module has its place, and the page that describes it names what exists."""

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

assert compiler.machine.intrinsics  # all intrinsics are known

ROOT = Path(__file__).parent.parent
PRODUCT = ("deploy", "server", "compiler", "runtime")
PATHS = re.compile(r"`((?:deploy|server|compiler|runtime|tests|docs|docker)/[\w./-]*|[\w-]+\.(?:toml|md|txt))`")


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
    """The list that newcomers read names the files in the order that import-linter holds."""
    layers = next(c["layers"] for c in contracts() if c["name"] == "a load runs in one direction")
    steps = [layer.removeprefix("deploy.model_loading.") for layer in reversed(layers)]
    folder = ROOT / "deploy" / "model_loading"
    assert set(steps) == {p.stem for p in folder.glob("*.py")} - {"__init__"}
    assert re.findall(r"^(\w+) {2,}", (folder / "__init__.py").read_text(), re.MULTILINE) == steps


@pytest.mark.parametrize("page", ["ARCHITECTURE.md", "README.md"])
def test_pages_name_only_what_exists(page: str) -> None:
    named = PATHS.findall((ROOT / page).read_text())
    assert named, "a page of the project names its files"
    assert [path for path in named if not (ROOT / path).exists()] == []


def test_the_architecture_walks_through_all_packages() -> None:
    text = (ROOT / "ARCHITECTURE.md").read_text()
    packages = [p.parent.relative_to(ROOT).as_posix() for top in ("compiler", "server") for p in (ROOT / top).glob("*/__init__.py")]
    assert [p for p in packages if f"{p}/" not in text and f"`{p}`" not in text and p != "server/console"] == []


def test_every_package_tells_its_purpose() -> None:
    """In the first line of its `__init__.py`, as one sentence."""
    packages = [path for top in PRODUCT for path in (ROOT / top).rglob("__init__.py")]
    told = {path: (ast.get_docstring(ast.parse(path.read_text())) or "").split("\n\n")[0] for path in packages}
    assert len(told) > 40
    assert [str(path) for path, purpose in told.items() if not purpose.endswith((".", ":"))] == []


def test_tests_are_no_packages() -> None:
    """With importlib mode two files of one name may stand in two folders; an __init__.py would join what must stay apart."""
    assert list((ROOT / "tests").rglob("__init__.py")) == []


def test_tests_mirror_the_tree() -> None:
    """Except for those of whole paths, in e2e, the inputs of attackers, in hostile, and those of the GPU in software, in gpu."""
    folders = {p.parent.relative_to(ROOT / "tests") for p in (ROOT / "tests").rglob("test_*.py")}
    assert {str(f) for f in folders if not (ROOT / f).is_dir()} <= {"e2e", "hostile", "gpu"}


# Addresses of arrays; and in the runtime and the compiler, whatever else is called through ctypes.
ADDRESSES = re.compile(r"\.ctypes\.data|\.ctypes\.get_|__array_interface__|\baddress_of\b|ctypes\.addressof")
FOREIGN = re.compile(r"\bimport ctypes\b|\bfrom ctypes\b")
DEVICES = ROOT / "runtime" / "device"
# What only handles tensors. `runtime/session.py` is the edge: it takes and returns arrays, and copies them by the device.
ABOVE_THE_DEVICE = ("vm/*.py", "memory.py", "kv_pool.py")


def test_only_a_device_knows_addresses() -> None:
    modules = [p for top in PRODUCT for p in (ROOT / top).rglob("*.py") if not p.is_relative_to(DEVICES)]
    assert [str(p.relative_to(ROOT)) for p in modules if ADDRESSES.search(p.read_text())] == []
    inside = [p for p in modules if p.relative_to(ROOT).parts[0] in ("runtime", "compiler")]
    assert [str(p.relative_to(ROOT)) for p in inside if FOREIGN.search(p.read_text())] == []
    assert ADDRESSES.search((DEVICES / "cpu" / "memory.py").read_text()), "the pattern finds what it looks for"
    assert FOREIGN.search((DEVICES / "cpu" / "device.py").read_text()), "the pattern finds what it looks for"


def test_above_the_device_tensors_are_opaque() -> None:
    """What runs above a device neither makes nor reads NumPy arrays."""
    makes = re.compile(r"NDArray|np\.(ndarray|array|empty|zeros|frombuffer|copyto|asarray)\b")
    modules = [path for pattern in ABOVE_THE_DEVICE for path in (ROOT / "runtime").glob(pattern)]
    assert len(modules) > len(ABOVE_THE_DEVICE)
    assert [str(path) for path in modules if makes.search(path.read_text())] == []


def test_the_page_size_is_defined_once() -> None:
    """Kernels, the engine and the doubles import it: a copy would go unnoticed until it differs."""
    defines = re.compile(r"^\s*PAGE(_SIZE|_TOKENS)?\b[^=\n]*= *\d|\bpage_size *= *\d", re.MULTILINE)
    found = [p.relative_to(ROOT) for top in PRODUCT for p in (ROOT / top).rglob("*.py") if defines.search(p.read_text())]
    assert [str(path) for path in found] == ["runtime/cache_groups.py"]


def strings_of(path: Path) -> set[str]:
    return {node.value for node in ast.walk(ast.parse(path.read_text())) if isinstance(node, ast.Constant) and isinstance(node.value, str)}


def test_only_the_machines_folder_names_features() -> None:
    """Other parts ask its tables for what a target has. A function of scalars is called fma, too, an element type bf16, and the
    extensions of RISC-V have a letter each."""
    features = {f for target in NAMED.values() for f in target.features} - {"fma", "bf16", *ascii_lowercase} | {"avxvnni"}
    folder = ROOT / "compiler/machine"
    assert features <= {text for path in folder.rglob("*.py") for text in strings_of(path)}, "features are strings there"
    modules = [p for p in (ROOT / "compiler").rglob("*.py") if not p.is_relative_to(folder)]
    assert {str(p.relative_to(ROOT)): names for p in modules if (names := strings_of(p) & features)} == {}


def test_only_its_file_names_an_intrinsic() -> None:
    """Others have its class. The names that are words of English are left out: buffers are called so, too."""
    names = {name for name in TILE_OPS if "_" in name and TILE_OPS[name].__module__.startswith("compiler.")}
    tiles = ROOT / "compiler/machine/intrinsics"
    assert names <= {text for path in tiles.glob("*.py") for text in strings_of(path)}, "names are strings there"
    modules = [p for top in ("compiler", "deploy") for p in (ROOT / top).rglob("*.py") if not p.is_relative_to(tiles)]
    assert {str(p.relative_to(ROOT)): found for p in modules if (found := strings_of(p) & names)} == {}


def test_what_begins_first_exists() -> None:
    """A file or a group that was renamed would begin last."""
    marked = {name for path in (ROOT / "tests").rglob("test_*.py") for name in re.findall(r'xdist_group\("([^"]+)"\)', path.read_text())}
    assert [name for name in LONGEST if name not in marked and not (ROOT / "tests" / name).is_file()] == []


@pytest.mark.xdist_group("one process")
def test_groups_of_tests_stay_in_one_process(request: pytest.FixtureRequest) -> None:
    """A pytest that pytest-xdist does not know ignores the mark in silence, and what a group shares is made by every process."""
    assert not getattr(request.config.option, "loadgroup", False) or request.node.nodeid.endswith("@one process")
