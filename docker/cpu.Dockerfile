# An image of relaxserve for CPUs, smaller than 450 MB. The environment of relaxserve has no pip; downloads of catalogue models use the base
# image's. The file works for amd64 and arm64:
#
#     docker build -f docker/cpu.Dockerfile -t relaxserve .
#     docker build -f docker/cpu.Dockerfile --build-arg EXTRAS=hub,otel -t relaxserve .
#     docker buildx build --platform linux/amd64,linux/arm64 -f docker/cpu.Dockerfile -t REGISTRY/relaxserve --push .
#     docker run --read-only --tmpfs /tmp -p 127.0.0.1:8000:8000 -v relaxserve-cache:/cache \
#         -e RELAXSERVE_API_KEYS=a-long-key relaxserve

ARG BASE=python:3.12-slim-bookworm

FROM ${BASE} AS build
WORKDIR /src
RUN apt-get update && apt-get install --yes --no-install-recommends binutils
RUN python3 -m venv /build && python3 -m venv --without-pip /opt/relaxserve
COPY constraints.txt pyproject.toml README.md LICENSE ./
COPY docker/requirements.py docker/
# pip checks the hash of each file that it installs. It takes no source, because it would build one with packages whose hash nobody checks.
ENV PIP_NO_CACHE_DIR=1 PIP_DISABLE_PIP_VERSION_CHECK=1 CHECK="--require-hashes --only-binary :all: -c constraints.txt"
RUN sed -n '/^pip==/,/[^\\]$/p' constraints.txt > pip.txt \
 && /build/bin/python -m pip install --require-hashes -r pip.txt \
 && /build/bin/python -m pip install $CHECK setuptools
COPY compiler compiler
COPY runtime runtime
COPY server server
COPY deploy deploy
ARG EXTRAS=hub
# Remove what the image does not need: tests of other packages, their files for type checkers and C compilers, and the symbols of large
# libraries.
RUN /build/bin/python -m pip --python /opt/relaxserve install $CHECK $(python3 docker/requirements.py "$EXTRAS") \
 && /build/bin/python -m pip wheel --no-index --no-deps --no-build-isolation --wheel-dir /wheels . \
 && /build/bin/python -m pip --python /opt/relaxserve install --no-index --no-deps /wheels/*.whl \
 && /opt/relaxserve/bin/python -m deploy.sbom constraints.txt > /opt/relaxserve/sbom.json \
 && find /opt/relaxserve/lib -type d -name tests -prune -exec rm -r {} + \
 && find /opt/relaxserve/lib -name '*.pyi' -delete -o -name '*.a' -delete -o -name '*.pxd' -delete -o -path '*/include/*.h' -delete \
 && find /opt/relaxserve/lib \( -name libllvmlite.so -o -name tokenizers.abi3.so -o -name hf_xet.abi3.so \) -exec strip --strip-unneeded {} +

FROM ${BASE}
RUN useradd --uid 10001 --user-group --no-create-home --shell /usr/sbin/nologin relaxserve \
 && install -d -o relaxserve -g relaxserve /cache /models /state
COPY --from=build /opt/relaxserve /opt/relaxserve
USER relaxserve
# The server writes only to volumes, so the root file system can be read-only. Some libraries write to /tmp.
VOLUME ["/cache", "/models", "/state"]
ENV PATH=/opt/relaxserve/bin:$PATH \
    PYTHONDONTWRITEBYTECODE=1 \
    PYTHONUNBUFFERED=1 \
    RELAXSERVE_CACHE=/cache \
    HF_HOME=/cache/hub \
    RELAXSERVE_HOST=0.0.0.0 \
    RELAXSERVE_PORT=8000 \
    RELAXSERVE_MODEL_ROOT=/models \
    RELAXSERVE_STATE_FILE=/state/models.json
EXPOSE 8000
HEALTHCHECK --interval=10s --timeout=3s --start-period=20s CMD ["python3", "-I", "-m", "deploy.health"]
STOPSIGNAL SIGTERM
ENTRYPOINT ["relaxserve"]
CMD ["serve"]
