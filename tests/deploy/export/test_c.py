"""The exported C library (an archive or a shared library, and a header) can be built into a program with one command, and gives the same
bits as the native program."""

from __future__ import annotations

import os
import re
import shutil
import struct
import subprocess
import sys
from importlib.util import find_spec
from pathlib import Path

import numpy as np
import pytest
from safetensors.numpy import load_file, save_file

from deploy.export.c import build_command, c_target, export_c
from deploy.model_loading.servable import Servable
from runtime.objects.elf import HEADER, MACHINES
from tests.conftest import ROOT
from tests.deploy.export.conftest import CONTEXT, SCRIPTS
from tests.deploy.export.test_web import ANSWER, NUM_TOKENS, golden, native
from tests.node import PATIENCE_S

pytestmark = pytest.mark.xdist_group("web")  # the tests of this group share one export of the demo model


BUILD_S = 8 * PATIENCE_S  # zig first compiles libc for the foreign architecture, which takes minutes


def built(folder: Path, source: Path, compiler: list[str], name: str, library: str = "libdemo.a") -> Path:
    command = [
        *compiler,
        "-pthread",
        "-Wall",
        "-Wextra",
        "-Werror",
        f"-I{folder}",
        str(source),
        str(folder / library),
        "-Wl,-rpath,$ORIGIN",
        "-Wl,--fatal-warnings",
        "-o",
        str(folder / name),
    ]
    done = subprocess.run(command, capture_output=True, timeout=BUILD_S, check=False)
    assert done.returncode == 0, done.stderr.decode()[-4000:]
    return folder / name


def check_bytes(demo: Servable, folder: Path, command: list[str]) -> None:
    """Check the bytes with one thread and with several threads."""
    prompt, expected, tokens = native(demo)
    for threads in (1, 3):
        asked = [*command, str(threads), str(NUM_TOKENS), *map(str, prompt)]
        done = subprocess.run(asked, cwd=folder, capture_output=True, timeout=PATIENCE_S, check=False)
        assert done.returncode == 0, done.stderr.decode()[-4000:]
        assert [int(x) for x in done.stderr.split()] == tokens
        assert np.frombuffer(done.stdout, np.float32).tobytes() == expected.tobytes()


def compiler() -> list[str]:
    found = shutil.which("cc")
    if found is None or not c_target("x86-64-v3").can_run_here:
        pytest.skip("needs cc on x86-64: install gcc or clang")
    return [found]


def test_the_example_builds_with_the_command_that_it_states(library: Path) -> None:
    """The export has a shared library, so the example uses that."""
    compiler()
    command = re.search(r"cores: +(.+) && \./example$", (library / "example.c").read_text(), re.MULTILINE)
    assert command is not None and "libdemo.so" in command[1]
    subprocess.run(command[1], shell=True, cwd=library, timeout=BUILD_S, check=True)
    done = subprocess.run([library / "example"], cwd=library, capture_output=True, timeout=PATIENCE_S, check=True)
    assert done.stdout.decode() == f"{ANSWER}\n"


@pytest.mark.parametrize("kind", ["a", "so"])
def test_the_library_gives_the_bytes_of_the_native_program(kind: str, library: Path, demo: Servable) -> None:
    """The library computes the same logits as the native program, byte for byte, with every number of threads, and does what model.h
    promises: wrong calls are refused, two sequences are independent, a sequence can be rewound, and no memory leaks."""
    check_bytes(demo, library, [str(built(library, SCRIPTS / "logits.c", compiler(), f"logits-{kind}", f"libdemo.{kind}"))])


def test_the_example_names_what_is_wrong(library: Path, tmp_path: Path) -> None:
    program = built(library, library / "example.c", compiler(), "example-a")

    def said(*arguments: str) -> str:
        done = subprocess.run([program, *arguments], cwd=tmp_path, capture_output=True, timeout=PATIENCE_S, check=False)
        assert not done.stdout.strip() and done.returncode == 1
        return done.stderr.decode().strip()

    assert said() == "weights.bin and pieces.bin must be in this folder"
    for name in ("weights.bin", "pieces.bin"):
        shutil.copy(library / name, tmp_path)
    assert said(*["1"] * CONTEXT) == f"the prompt has {CONTEXT} tokens; expected at most {CONTEXT - 1}"
    assert said("1", "-1").startswith("a token of the prompt is out of range; expected numbers from 0 to ")
    for name in ("pieces.bin", "weights.bin"):
        size = (library / name).stat().st_size
        os.truncate(tmp_path / name, size - 1)
        assert said() == f"{name} has {size - 1} bytes; expected {size}: copy the file of this export"


def test_weights_of_another_model_of_the_same_size_are_refused(demo: Servable, tmp_path: Path) -> None:
    changed = tmp_path / "changed"
    shutil.copytree(ROOT / "tests/golden/models/llama", changed)
    tensors = load_file(changed / "model.safetensors")
    save_file(tensors | {"model.norm.weight": -tensors["model.norm.weight"]}, changed / "model.safetensors")
    models = {"one": golden("llama", demo), "other": golden(str(changed), demo)}
    for name, model in models.items():
        (tmp_path / name).mkdir()
        export_c(model, name, c_target("x86-64-v3"), tmp_path / name)
    one, other = (tmp_path / name for name in models)
    expected, found = (f"{int.from_bytes((folder / 'weights.bin').read_bytes()[-8:], 'little'):016x}" for folder in (one, other))
    assert expected != found and (one / "weights.bin").stat().st_size == (other / "weights.bin").stat().st_size
    assert f"RS_FINGERPRINT UINT64_C(0x{expected})" in (one / "model.h").read_text()
    program = built(one, one / "example.c", compiler(), "example", "libone.a")
    shutil.copy(other / "weights.bin", one)
    done = subprocess.run([program], cwd=one, capture_output=True, timeout=PATIENCE_S, check=False)
    said = f"weights.bin has the fingerprint {found}; expected {expected}: copy the file of this export"
    assert (done.stderr.decode().strip(), done.returncode) == (said, 1)


def test_the_library_needs_no_other(library: Path) -> None:
    """The library depends on no other library, not even libc or libm. It has no global variables, so it writes only to memory that the
    caller provides."""
    listed = subprocess.run(
        [shutil.which("nm") or pytest.skip("needs nm: install binutils"), library / "libdemo.a"], capture_output=True, check=True
    )
    symbols = [line.split() for line in listed.stdout.decode().splitlines() if len(line.split()) >= 2 and not line.endswith(":")]
    defined = {parts[-1] for parts in symbols if parts[-2] in "TtRr"}
    assert {parts[-1] for parts in symbols if parts[-2] == "U"} <= defined
    assert not [parts for parts in symbols if parts[-2] in "BbDdCc"], "no globals"
    assert {re.split(r"[._]", parts[-1])[0] for parts in symbols if parts[-2] == "T"} == {"rs"}


TWO_MODELS = """
#include "model.h"
#include "other/model.h"
#include <stdio.h>
int main(void) {
  printf("%d %d\\n", RS_VOCAB_SIZE, OTHER_VOCAB_SIZE);
  return rs_open(0, 0, 0, 0, 0) != 0 || other_open(0, 0, 0, 0, 0) != 0;   /* both must fail: there are no weights */
}
"""


def test_two_libraries_fit_into_one_program(library: Path, demo: Servable, tmp_path: Path) -> None:
    other = golden("llama", demo)
    (tmp_path / "other").mkdir()
    export_c(other, "other", c_target("x86-64-v3"), tmp_path / "other", prefix="other")
    (tmp_path / "two.c").write_text(TWO_MODELS)
    archives = [library / "libdemo.a", tmp_path / "other" / "libother.a"]
    command = [
        *compiler(),
        "-Wall",
        "-Wextra",
        "-Werror",
        f"-I{library}",
        f"-I{tmp_path}",
        tmp_path / "two.c",
        *archives,
        "-o",
        tmp_path / "two",
    ]
    done = subprocess.run(command, capture_output=True, timeout=PATIENCE_S, check=False)
    assert done.returncode == 0, done.stderr.decode()[-4000:]
    sizes = [model.files.config.vocab_size for model in (demo, other)]
    assert subprocess.run([tmp_path / "two"], capture_output=True, check=True).stdout.split() == [str(size).encode() for size in sizes]


def test_a_prefix_does_not_change_the_name_of_the_model(demo: Servable, tmp_path: Path) -> None:
    library = export_c(golden("llama", demo), "of-rs_me", c_target("x86-64-v3"), tmp_path, prefix="other")
    assert build_command(library.name) in (tmp_path / "example.c").read_text().splitlines()[0] and "of-rs_me" in library.name
    assert "/* of-rs_me as compiled" in (tmp_path / "model.h").read_text() and "other_open(" in (tmp_path / "model.h").read_text()


@pytest.mark.parametrize("kind", ["a", "so"])
def test_library_and_header_are_small(kind: str, library: Path) -> None:
    assert (library / f"libdemo.{kind}").stat().st_size + (library / "model.h").stat().st_size < 400_000


RELOCATABLE, SHARED = 1, 3  # types of files
LOAD, DYNAMIC = 1, 2  # types of segments
HASH, SONAME = 4, 14  # tags of the dynamic table
IMPORTS = {"NEEDED": 1, "RELA": 7, "REL": 17, "TEXTREL": 22, "JMPREL": 23}
LITTLE_ENDIAN_64 = b"\x7fELF\x02\x01\x01\x00"


def test_a_library_for_android_is_one_for_its_loader(demo: Servable, tmp_path: Path) -> None:
    """Android's loader maps pages of 4 and of 16 KiB. The library imports nothing, so it depends on no version of the system. That code
    leaves the platform register alone is a test of the compiler."""
    path = export_c(golden("llama", demo), "demo", c_target("aarch64-android"), tmp_path, shared=True)
    assert "for aarch64-android, unknown-linux-android." in (tmp_path / "model.h").read_text()
    content = (tmp_path / "libdemo.a").read_bytes()
    objects = [content[found.start() :] for found in re.finditer(re.escape(LITTLE_ENDIAN_64), content)]
    assert len(objects) == 2  # kernels and library
    library = path.read_bytes()
    headers = [HEADER.unpack_from(file) for file in (*objects, library)]
    for (ident, found, machine, *_), kind in zip(headers, (RELOCATABLE, RELOCATABLE, SHARED), strict=True):
        assert (ident[:8], found, machine) == (LITTLE_ENDIAN_64, kind, MACHINES["aarch64"])
    segments_at, num_segments = headers[-1][5], headers[-1][10]
    segments = [struct.unpack_from("<IIQQQQQQ", library, segments_at + 56 * i) for i in range(num_segments)]
    loads = [(offset, address, alignment) for kind, _, offset, address, *_, alignment in segments if kind == LOAD]
    assert loads and all(a % (16 << 10) == 0 and address % a == offset % a for offset, address, a in loads)
    ((offset, size),) = [(offset, size) for kind, _, offset, _, _, size, *_ in segments if kind == DYNAMIC]
    tags = {tag for tag, _ in struct.iter_unpack("<QQ", library[offset : offset + size])}
    assert {SONAME, HASH} <= tags and tags.isdisjoint(IMPORTS.values())


MACHINES_IN_QEMU = [
    ("aarch64-linux", "aarch64", []),
    ("aarch64-dotprod", "aarch64", []),
    ("riscv64-linux", "riscv64", ["-cpu", "rv64"]),
    ("riscv64-v", "riscv64", ["-cpu", "rv64,v=true,vlen=128,vext_spec=v1.0"]),
    ("riscv64-v", "riscv64", ["-cpu", "rv64,v=true,vlen=256,vext_spec=v1.0"]),
]


@pytest.mark.slow
@pytest.mark.parametrize(("target", "arch", "flags"), MACHINES_IN_QEMU, ids=[" ".join([m[0], *m[2][1:]]) for m in MACHINES_IN_QEMU])
def test_other_machines_give_the_same_bytes(target: str, arch: str, flags: list[str], demo: Servable, tmp_path: Path) -> None:
    """Under qemu, libraries for three other machines compute the same logits, byte for byte: AArch64, RISC-V without vectors, and RISC-V
    with vectors of two lengths. The archive is linked with musl; the shared library is loaded by the loader of glibc."""
    emulator = shutil.which(f"qemu-{arch}-static") or shutil.which(f"qemu-{arch}")
    if emulator is None or find_spec("ziglang") is None:
        pytest.skip(f"needs qemu-{arch} and a compiler for it: apt install qemu-user-static, pip install ziglang")
    system = Path(f"/usr/{arch}-linux-gnu")
    if not system.exists():
        pytest.skip(f"needs glibc for {arch}: apt install libc6-{'arm64' if arch == 'aarch64' else arch}-cross")
    os.environ.setdefault("ZIG_GLOBAL_CACHE_DIR", str(Path.home() / ".cache/zig"))
    export_c(demo, "demo", c_target(target), tmp_path, shared=True)
    for kind, libc in (("a", "musl"), ("so", "gnu")):
        compiler = [sys.executable, "-m", "ziglang", "cc", "-target", f"{arch}-linux-{libc}"]
        program = built(tmp_path, SCRIPTS / "logits.c", compiler, f"logits-{kind}", f"libdemo.{kind}")
        check_bytes(demo, tmp_path, [emulator, *flags, *([] if kind == "a" else ["-L", str(system)]), str(program)])
