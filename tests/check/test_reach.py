"""`make check` finds the tests that a change reaches, in a made-up project and in this one."""

from __future__ import annotations

import subprocess
from pathlib import Path

import pytest

from tests.check.reach import Tree, changed_files, commit_before
from tests.conftest import ROOT

PROJECT = {
    "runtime/files.py": "",
    "server/__init__.py": "",
    "server/api/__init__.py": "",
    "server/api/chat.py": "import runtime.files\n",
    "server/endpoints.py": "from pkgutil import iter_modules\nfrom server import api\nFOUND = [*iter_modules(api.__path__)]\n",
    "server/app.py": "from server.endpoints import (\n    FOUND,  # all of them\n)\n",
    "server/start.py": 'COMMAND = ("python", "-m", "server.app")\n',
    "compiler/cache.py": 'from pathlib import Path\nTABLE = Path("tables", "table.json")\n',
    "compiler/tables/table.json": "{}",
    "deploy/entry/relaxserve/__init__.py": "from deploy.cli import main\n",
    "deploy/entry/relaxserve/__main__.py": "import deploy.entry.relaxserve\n",
    "deploy/cli/__init__.py": "from server import start\n",
    "deploy/cli/__main__.py": "import deploy.cli\n",
    "docs/api.md": "# API",
    "pyproject.toml": "",
    "tests/conftest.py": (
        "import subprocess\nimport pytest\nfrom compiler import cache\n"
        "def run():\n    subprocess.run(['relaxserve'])\n    return \"relaxserve\"\n"
        "@pytest.fixture\ndef started():\n    return run()\n"
        "@pytest.fixture\ndef cached():\n    return cache.TABLE\n"
    ),
    "tests/server/test_app.py": "import server.app\n",
    "tests/server/test_start.py": "def test_it(started): ...\n",
    "tests/compiler/test_cache.py": "def test_it(cached): ...\n",
    "tests/runtime/test_files.py": "from runtime import files\n",
    "tests/test_docs.py": 'from pathlib import Path\nPAGES = Path("docs").glob("*.md")\n',
    "tests/test_layers.py": 'from pathlib import Path\nFILES = Path().rglob("*.py")\n',
    "tests/deploy/test_root.py": 'COMMAND = ("python", "-m", "deploy.cli")\n',
    "tests/test_alone.py": "",
}  # fmt: skip


def reached(*changed: str, **added: str) -> list[str]:
    tree = Tree({path: text for path, text in PROJECT.items() if path.endswith(".py")}, PROJECT)
    return [Path(found.path).name for found in tree.reached(changed) if found.path != "tests/test_layers.py"]


@pytest.mark.parametrize(
    ("changed", "tests"),
    [
        (
            "runtime/files.py",
            ["test_files.py", "test_app.py", "test_start.py", "test_root.py"],
        ),  # imports, a package that is listed, the command
        ("server/endpoints.py", ["test_app.py", "test_start.py", "test_root.py"]),
        ("server/start.py", ["test_start.py", "test_root.py"]),  # only the fixture `started` and test_root.py run the command
        ("server/__init__.py", ["test_app.py", "test_start.py", "test_root.py"]),  # a package comes with its modules
        ("deploy/cli/__main__.py", ["test_root.py"]),  # what `python -m` runs
        ("deploy/entry/relaxserve/__main__.py", ["test_start.py"]),  # `python -m relaxserve` runs it
        ("compiler/cache.py", ["test_cache.py"]),  # only the fixture `cached` uses it
        ("compiler/tables/table.json", ["test_cache.py"]),  # data that a module names
        ("docs/api.md", ["test_docs.py"]),  # data that a pattern matches
        ("tests/test_alone.py", ["test_alone.py"]),
    ],
)
def test_a_change_reaches(changed: str, tests: list[str]) -> None:
    assert sorted(reached(changed)) == sorted(tests)


@pytest.mark.parametrize("changed", ["pyproject.toml", ".gitignore", "tests/current_code.py", "tests/conftest.py"])
def test_every_test_depends_on(changed: str) -> None:
    assert len(reached(changed)) == sum(Path(path).name.startswith("test_") for path in PROJECT) - 1


def test_nearer_tests_come_first() -> None:
    assert reached("runtime/files.py")[0] == "test_files.py"


def test_a_test_that_reads_all_code_is_reached_by_each_file() -> None:
    tree = Tree({path: text for path, text in PROJECT.items() if path.endswith(".py")}, PROJECT)
    assert all("tests/test_layers.py" in {found.path for found in tree.reached([path])} for path in PROJECT if path.endswith(".py"))


def test_changes_are_those_since_the_branch_left_its_upstream(tmp_path: Path) -> None:
    def git(*arguments: str) -> None:
        identity = ("-c", "user.name=a", "-c", "user.email=a@example.org", "-c", "init.defaultBranch=main")
        subprocess.run(["git", *identity, *arguments], cwd=tmp_path, check=True, capture_output=True)

    git("init")
    for name in ("first", "second"):
        (tmp_path / name).write_text(name)
        git("add", name)
        git("commit", "-m", name)
    assert commit_before(tmp_path) == "HEAD~1", "without changes, the last commit is checked"
    assert changed_files(tmp_path, "HEAD~1") == ["second"]
    (tmp_path / "third").write_text("untracked")
    assert commit_before(tmp_path) == "HEAD"
    assert changed_files(tmp_path, "HEAD") == ["third"]
    git("branch", "trunk", "HEAD~1")
    git("branch", "--set-upstream-to", "trunk")
    assert changed_files(tmp_path, commit_before(tmp_path)) == ["second", "third"]


@pytest.mark.parametrize(
    ("changed", "reaches", "leaves_out"),
    [
        ("server/text/detokenize.py", "tests/server/text/test_detokenize.py", "tests/compiler/ir/test_dims.py"),
        ("compiler/passes/legalize.py", "tests/compiler/passes/test_legalize.py", "tests/server/engine/test_loop.py"),
        ("compiler/frontend/families/llama4.py", "tests/compiler/frontend/test_models.py", "tests/server/test_limits.py"),
        ("deploy/worker.py", "tests/deploy/test_worker.py", "tests/compiler/passes/test_legalize.py"),
        ("runtime/web/engine.mjs", "tests/deploy/export/test_web.py", "tests/compiler/ir/test_dims.py"),
        ("tests/lab/serving/chaos.py", "tests/lab/test_main.py", "tests/deploy/bench/compute/test_quality.py"),  # main lists the modules
        ("deploy/bench/compute/quality.py", "tests/deploy/cli/test_commands.py", "tests/server/test_limits.py"),
        ("docs/operations.md", "tests/test_docs.py", "tests/compiler/ir/test_dims.py"),
    ],
)
def test_in_this_project(project: Tree, changed: str, reaches: str, leaves_out: str) -> None:
    assert {changed, reaches, leaves_out} <= project.paths
    found = {found.path for found in project.reached([changed])}
    assert reaches in found and leaves_out not in found


@pytest.fixture(scope="module")
def project() -> Tree:
    return Tree.of(ROOT)
