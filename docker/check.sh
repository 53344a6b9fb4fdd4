#!/usr/bin/env bash
# Build docker/cpu.Dockerfile without a container engine, start the server in the image, and ask the demo model a question. The server runs as the
# image's user, who cannot write to the root file system. The script needs root, buildah and debootstrap (Debian: apt install buildah debootstrap).
# It stores the base image and the layers in the folder WORK for the next run.
set -euo pipefail
cd "$(dirname "$0")/.."

WORK=${WORK:-/var/tmp/relaxserve-image}
MIRROR=${MIRROR:-http://deb.debian.org/debian}
BASE=localhost/relaxserve-base
IMAGE=localhost/relaxserve-cpu
export STORAGE_DRIVER=vfs BUILDAH_ISOLATION=chroot REGISTRY_AUTH_FILE=/dev/null
storage=(--root "$WORK/storage" --runroot "$WORK/run")
certificates=(-v /etc/ssl/certs:/etc/ssl/certs:ro -v /usr/share/ca-certificates:/usr/share/ca-certificates:ro)

for tool in buildah debootstrap; do
  command -v "$tool" >/dev/null || { echo "$tool is missing; on Debian: apt install buildah debootstrap" >&2; exit 1; }
done
mkdir -p "$WORK"

# Make a base image that replaces the official one: a small Debian with its Python.
if ! buildah "${storage[@]}" inspect --type image "$BASE" >/dev/null 2>&1; then
  rm -rf "$WORK/root"
  debootstrap --variant=minbase --include=python3,python3-venv,ca-certificates bookworm "$WORK/root" "$MIRROR"
  container=$(buildah "${storage[@]}" from scratch)
  buildah "${storage[@]}" add --quiet "$container" "$WORK/root" /
  buildah "${storage[@]}" commit --quiet --rm "$container" "$BASE"
  rm -rf "$WORK/root"
fi

# Pass the host's package index and proxy settings to the build.
pip_settings=()
for file in /etc/pip.conf "$HOME/.config/pip/pip.conf" "$HOME/.pip/pip.conf"; do
  if [ -f "$file" ]; then pip_settings+=(-v "$file:/etc/pip.conf:ro"); break; fi
done
for name in $(env | grep -oE '^(PIP_[A-Z_]+|https?_proxy|HTTPS?_PROXY|no_proxy|NO_PROXY|SSL_CERT_FILE|REQUESTS_CA_BUNDLE)' || true); do
  pip_settings+=(--env "$name=${!name}")
done
buildah "${storage[@]}" build --format docker --quiet --pull-never --network host "${certificates[@]}" "${pip_settings[@]}" \
  --build-arg "BASE=$BASE" -f docker/cpu.Dockerfile -t "$IMAGE" .

# Check the size of /opt/relaxserve. With at most 325 MB of it, an image based on python:3.12-slim (125 MB) stays below 450 MB.
installed=$(buildah "${storage[@]}" run "$(buildah "${storage[@]}" from --pull-never "$IMAGE")" -- du -s --apparent-size --block-size=MB /opt/relaxserve | cut -f1 | tr -dc 0-9)
echo "/opt/relaxserve has $installed MB"
[ "$installed" -le 325 ] || { echo "/opt/relaxserve may have at most 325 MB, so that the image stays below 450 MB" >&2; exit 1; }

# Run the server as the image's user, with empty folders as volumes. The user cannot write anywhere else.
container=$(buildah "${storage[@]}" from --pull-never "$IMAGE")
port=$(python3 -c 'import socket; s = socket.socket(); s.bind(("127.0.0.1", 0)); print(s.getsockname()[1])')
buildah "${storage[@]}" run --network host --env "RELAXSERVE_HOST=127.0.0.1" --env "RELAXSERVE_PORT=$port" "$container" -- relaxserve serve &
server=$!
cleanup() {
  kill "$server" 2>/dev/null || true
  wait "$server" 2>/dev/null || true
  buildah "${storage[@]}" rm "$container" >/dev/null
}
trap cleanup EXIT

for _ in $(seq 120); do
  kill -0 "$server" || { echo "the server ended before it was ready" >&2; exit 1; }
  if python3 -c "import urllib.request as r; r.urlopen('http://127.0.0.1:$port/health/ready', timeout=2)" 2>/dev/null; then break; fi
  sleep 1
done

buildah "${storage[@]}" run --network host --env "RELAXSERVE_URL=http://127.0.0.1:$port" "$container" -- sh -euc '
  test "$(id -u)" = 10001 || { echo "the server runs as user $(id -u), expected 10001" >&2; exit 1; }
  python3 -I -m deploy.health || { echo "the health check does not find the server" >&2; exit 1; }
  ! touch /opt/relaxserve/written 2>/dev/null || { echo "the root file system can be written by the server" >&2; exit 1; }
  answer=$(relaxserve chat "What is the capital of France?" --temperature 0)
  echo "the image answers: $answer"
  case "$answer" in *Paris*) ;; *) exit 1 ;; esac
'
