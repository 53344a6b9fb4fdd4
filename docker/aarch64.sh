#!/usr/bin/env bash
# Run the package, and every process that it starts, on an AArch64 machine emulated by qemu:
#
#     docker/aarch64.sh -m pytest -q -n 0 tests/runtime tests/compiler/backends/cpu/codegen
#     QEMU_CPU=neoverse-n1 docker/aarch64.sh -c 'from deploy.cli import main; main()' generate demo -p "What is the capital of Italy?"
#
# QEMU_CPU is max (the default), neoverse-n1 (dot products, but no i8mm) or cortex-a72 (neither dot products nor i8mm). Emulation is about twenty
# times slower than hardware.
# The script needs root and Debian 12 or newer with qemu-user-static. It stores the emulated system in the folder WORK, and uses it again when it
# runs the next time.
set -euo pipefail
cd "$(dirname "$0")/.."

WORK=${WORK:-/var/tmp/relaxserve-aarch64}
PYTHON=$WORK/root/usr/bin/python3.11
EMULATOR=/usr/bin/qemu-aarch64-static
PACKAGES=(
  libc6 libgcc-s1 libstdc++6 libexpat1 zlib1g libssl3 libffi8 libbz2-1.0 liblzma5 libsqlite3-0 libuuid1 libncursesw6 libtinfo6 libreadline8
  libcrypt1 libdb5.3 libnsl2 libtirpc3 python3.11 python3.11-minimal libpython3.11-minimal libpython3.11-stdlib
)

[ -x "$EMULATOR" ] || { echo "qemu-user-static is missing; on Debian: apt install qemu-user-static" >&2; exit 1; }

if [ ! -e "$WORK/ready" ]; then
  rm -rf "$WORK"
  mkdir -p "$WORK"/{packages,wheels,root,site,home}
  dpkg --add-architecture arm64
  apt-get update -qq
  (cd "$WORK/packages" && apt-get download -qq -o APT::Sandbox::User=root "${PACKAGES[@]/%/:arm64}")
  for package in "$WORK"/packages/*.deb; do dpkg-deb -x "$package" "$WORK/root"; done
  platforms=()
  for version in 2014 _2_17 _2_24 _2_27 _2_28 _2_31 _2_34 _2_35; do platforms+=(--platform "manylinux${version}_aarch64"); done
  make --silent setup
  readarray -t needed < <(.venv/bin/python docker/requirements.py)
  .venv/bin/python -m pip download --quiet --disable-pip-version-check "${platforms[@]}" --python-version 3.11 --implementation cp --abi cp311 \
    --abi abi3 --abi none --require-hashes --only-binary :all: -c constraints.txt -d "$WORK/wheels" "${needed[@]}" pytest pytest-xdist hypothesis httpx
  for wheel in "$WORK"/wheels/*.whl; do python3 -m zipfile -e "$wheel" "$WORK/site"; done
  touch "$WORK/ready"
fi

# A server starts workers as separate processes, so the Linux kernel must run every AArch64 executable with qemu.
kinds=/proc/sys/fs/binfmt_misc
[ -e "$kinds/register" ] || mount -t binfmt_misc none "$kinds"
if [ ! -e "$kinds/qemu-aarch64" ]; then
  header='\x7fELF\x02\x01\x01\x00\x00\x00\x00\x00\x00\x00\x00\x00\x02\x00\xb7\x00'
  mask='\xff\xff\xff\xff\xff\xff\xff\x00\xff\xff\xff\xff\xff\xff\xff\xff\xfe\xff\xff\xff'
  echo ":qemu-aarch64:M::$header:$mask:$EMULATOR:F" >"$kinds/register"
fi

exec env PYTHONPATH="$WORK/site:$PWD" QEMU_LD_PREFIX="$WORK/root" QEMU_CPU="${QEMU_CPU:-max}" HOME="$WORK/home" \
  "$EMULATOR" -L "$WORK/root" "$PYTHON" "$@"
