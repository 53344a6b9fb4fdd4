"""Find the test files that a change can reach.

A file depends on the modules that it imports or names in a string, on the modules of packages that it lists, on the fixtures that it uses,
and on the data files that it names. Everything is read from the text of the files, so a dependency that is never used counts too. If a
file's name is computed, the pattern of an f-string or the name of its folder counts.
"""

from __future__ import annotations

import ast
import re
import subprocess
from collections import defaultdict
from collections.abc import Collection, Iterable, Iterator, Mapping
from dataclasses import dataclass
from fnmatch import fnmatchcase
from functools import cached_property
from pathlib import Path, PurePosixPath

IMPORT = re.compile(r"^[ \t]*(?:import[ \t]+([\w., \t]+)|from[ \t]+([\w.]+)[ \t]+import[ \t]+(\([^)]*\)|[^\n]+))", re.MULTILINE)
STRING = re.compile(r"""["']([\w./*{}\-]+)["']""")
LISTED = re.compile(r"(?:(\w+)\.)?__(?:path|file)__")
LISTS = ("iter_modules(", "walk_packages(", ".glob(", "modules_in(")
PROGRAM = "deploy.entry.relaxserve"  # the module behind the command `relaxserve`
COMMAND = "deploy.cli"  # what PROGRAM imports after it has found the installation
# Files that every test depends on: .gitignore decides which files git lists, tests/kept_code.py imports current_code.py at the first
# compilation, and pytest loads one_thread.py.
FOR_ALL = ("pyproject.toml", "constraints.txt", "Makefile", ".gitignore", "tests/current_code.py", "tests/one_thread.py")


@dataclass(frozen=True, slots=True)
class Reached:
    """A test file that a change reaches. `distance` is the number of imports between the file and the change."""

    path: str
    distance: int


class Tree:
    """The files of a checkout and what each of them depends on. `texts` maps the path of each Python file to its text; `paths` are all
    files."""

    def __init__(self, texts: Mapping[str, str], paths: Collection[str]) -> None:
        self._texts = texts
        self.paths = frozenset(paths)
        self._modules = {_module_of(path): path for path in texts}

    @staticmethod
    def of(root: Path) -> Tree:
        listed = _git(root, "ls-files", "--cached", "--others", "--exclude-standard")
        paths = [path for path in listed if (root / path).is_file()]
        return Tree({path: (root / path).read_text() for path in paths if path.endswith(".py")}, paths)

    @property
    def tests(self) -> list[str]:
        return sorted(path for path in self._texts if fnmatchcase(path, "tests/*test_*.py"))

    def reached(self, changed: Iterable[str]) -> list[Reached]:
        """Return the test files that depend on a changed file, nearest first."""
        changed = set(changed)
        if changed & {*FOR_ALL, "tests/conftest.py"}:
            changed |= set(self.tests)
        distances = dict.fromkeys(changed, 0)
        wave = {user for path in changed for user in self._importers[path] | self._readers_of(path)} - changed
        while wave:
            distances.update(dict.fromkeys(wave, 1 + max(distances.values())))
            wave = {user for path in wave for user in self._importers[path]} - distances.keys()
        return sorted(
            (Reached(path, distances[path]) for path in self.tests if path in distances), key=lambda found: (found.distance, found.path)
        )

    @cached_property
    def _importers(self) -> Mapping[str, set[str]]:
        importers: defaultdict[str, set[str]] = defaultdict(set)
        for path in self._texts:
            for used in self.dependencies(path):
                importers[used].add(path)
        return importers

    def dependencies(self, path: str) -> set[str]:
        """Return the Python files that the file `path` depends on directly."""
        if path.endswith("conftest.py"):
            return set()  # each test depends on the parts that it uses
        text = self._texts[path]
        found = self._imported(text) | self._listed(path, text)
        if path.startswith("tests/"):
            found |= self._fixtures_of(path, text) | self._command(text)
        return found - {path}

    def _command(self, text: str) -> set[str]:
        """Return the modules behind the command `relaxserve` if the text of a test names it."""
        return {self._modules[PROGRAM], self._modules[COMMAND], *self._run_by({PROGRAM})} if '"relaxserve"' in text else set()

    def _imported(self, text: str) -> set[str]:
        named = {word for word in STRING.findall(text) if "." in word and word in self._modules}
        names = set(named)
        for plain, package, members in IMPORT.findall(text):
            names |= {name.split()[0] for name in plain.split(",") if name.strip()}
            if package:
                names |= {package, *(f"{package}.{member.split()[0]}" for member in _members(members))}
        imported = {self._modules[part] for name in names for part in _with_parents(name) if part in self._modules}
        return imported | self._run_by(named)

    def _run_by(self, names: Collection[str]) -> set[str]:
        """Return the modules that `python -m NAME` runs where the name is that of a package."""
        return {self._modules[main] for main in (f"{name}.__main__" for name in names) if main in self._modules}

    def _listed(self, path: str, text: str) -> set[str]:
        """Return the modules of packages whose folder the file lists."""
        if not any(call in text for call in LISTS):
            return set()
        imported = {_module_of(used): used for used in self._imported(text)}
        folders: set[str] = set()
        for name in LISTED.findall(text):
            owners = (
                [path]
                if not name
                else [used for module, used in imported.items() if module.rpartition(".")[2] == name or f" as {name}" in text]
            )
            folders |= {f"{PurePosixPath(owner).parent}/" for owner in owners if owner.endswith(("__init__.py", "__main__.py"))}
        return {other for other in self._texts if any(other.startswith(folder) for folder in folders)}

    def _fixtures_of(self, path: str, text: str) -> set[str]:
        """Return what the fixtures that a test file uses depend on. Only these parts of the conftest.py files count, because the whole of
        them depends on half of the project."""
        return {used for conftest, names in self._conftests_of(path, text) for used in self._parts(conftest, names)}

    def _conftests_of(self, path: str, text: str) -> Iterator[tuple[str, set[str]]]:
        """Yield each conftest.py that applies to a file, nearest first, and the names that the file and nearer ones use."""
        for folder in PurePosixPath(path).parents:
            conftest = f"{folder}/conftest.py"
            if conftest in self._texts and conftest != path:
                names = set(re.findall(r"\w+", text))
                yield conftest, names
                text += self._used_text(conftest, names)

    def _parts(self, conftest: str, names: set[str]) -> set[str]:
        text = self._used_text(conftest, names)
        words = set(re.findall(r"\w+", text))
        bound: set[str] = set()
        for plain, package, members in IMPORT.findall(self._texts[conftest]):
            for member in _members(members) if package else ():
                if member.split()[-1] in words:
                    bound |= {package, f"{package}.{member.split()[0]}"}
            bound |= {name.split()[0] for name in plain.split(",") if name.strip()}
        modules = {self._modules[part] for name in bound for part in _with_parents(name) if part in self._modules}
        return modules | self._imported(text) | self._command(text) | {conftest}

    def _used_text(self, conftest: str, names: set[str]) -> str:
        """Return the text of the functions and classes of a conftest.py that are used by name, by another of them, or for every test. Hooks
        do not count: they order and report tests."""
        parts = self._conftests[conftest]
        used = {name for name, text in parts.items() if name in names or "autouse=True" in text}
        while True:
            more = {name for name in parts if any(re.search(rf"\b{name}\b", parts[user]) for user in used)} | used
            if more == used:
                return "\n".join(parts[name] for name in sorted(used))
            used = more

    @cached_property
    def _conftests(self) -> Mapping[str, Mapping[str, str]]:
        """The text of each function, class and assignment of each conftest.py, by name."""
        return {path: _parts_of(text) for path, text in self._texts.items() if path.endswith("conftest.py")}

    def _readers_of(self, path: str) -> set[str]:
        """Return the Python files that may read the file `path` as data. Tests may list Python files too; product code lists none."""
        name, is_code = PurePosixPath(path).name, path in self._texts
        exact = {name, path} if is_code else {name, PurePosixPath(path).stem, *PurePosixPath(path).parts[1:-1]}
        if not is_code:
            exact |= {PurePosixPath(path).parts[0]} - {"server", "compiler", "runtime", "deploy", "tests"}
        found: set[str] = set()
        for reader, words in self._words.items():
            if is_code and not reader.startswith("tests/"):
                continue
            if not exact.isdisjoint(words) or any(fnmatchcase(name, word) for word in words if "*" in word):
                found.add(reader)
        return found - {path}

    @cached_property
    def _words(self) -> Mapping[str, set[str]]:
        """The names of files and folders in the strings of each Python file. A name that is computed in part is a pattern."""
        words: dict[str, set[str]] = {}
        for path, text in self._texts.items():
            if path.endswith("conftest.py"):
                continue  # the strings of a fixture belong to the tests that use it
            used = "".join(self._used_text(conftest, names) for conftest, names in self._conftests_of(path, text))
            parts = {part for string in STRING.findall(text + used) for part in (string, *string.split("/"))}
            patterns = {re.sub(r"\{[^}]*\}", "*", part) for part in parts}
            words[path] = {part for part in patterns if len(part.replace("*", "").replace(".", "")) > 1}
        return words


def changed_files(root: Path, base: str) -> list[str]:
    """Return the files that differ from the commit `base`, untracked ones included."""
    return sorted({*_git(root, "diff", "--name-only", "--no-renames", base), *_git(root, "ls-files", "--others", "--exclude-standard")})


def commit_before(root: Path) -> str:
    """Return the commit where the branch left its upstream. If nothing differs from that commit, or there is no upstream, return HEAD, or
    the commit before it if nothing differs from HEAD either."""
    try:
        upstream = _git(root, "merge-base", "HEAD", "@{upstream}")[0]
    except subprocess.CalledProcessError:
        upstream = "HEAD"
    return next((base for base in (upstream, "HEAD") if changed_files(root, base)), "HEAD~1")


def _git(root: Path, *arguments: str) -> list[str]:
    return subprocess.run(["git", *arguments], cwd=root, check=True, capture_output=True, text=True).stdout.splitlines()


def _module_of(path: str) -> str:
    return path.removesuffix(".py").removesuffix("/__init__").replace("/", ".")


def _with_parents(name: str) -> list[str]:
    parts = name.split(".")
    return [".".join(parts[: count + 1]) for count in range(len(parts))]


def _members(listed: str) -> list[str]:
    without_comments = re.sub(r"#[^\n]*", "", listed)
    return [member.strip() for member in without_comments.strip(" ()\n").split(",") if member.strip()]


def _parts_of(text: str) -> dict[str, str]:
    parts: dict[str, str] = {}
    for node in ast.parse(text).body:
        source = ast.get_source_segment(text, node) or ""
        if isinstance(node, ast.FunctionDef | ast.AsyncFunctionDef | ast.ClassDef):
            decorators = "\n".join(ast.get_source_segment(text, decorator) or "" for decorator in node.decorator_list)
            parts[node.name] = f"{decorators}\n{source}"
        elif isinstance(node, ast.Assign):
            parts.update({target.id: source for target in node.targets if isinstance(target, ast.Name)})
    return parts
