# syntax=docker/dockerfile:1
# cribo for CPUs or for NVIDIA GPUs; docs/containers.md explains its use.
#   docker build -t cribo .
#   docker build -t cribo:cuda --build-arg TORCH=cu130 .
FROM python:3.12-slim-trixie

# Build of PyTorch: cpu, or the CUDA version that the driver supports, such as cu130 or cu126.
ARG TORCH=cpu
# Extras of the package, separated by spaces; pyproject.toml lists them.
ARG EXTRAS="cluster explore export search stream"

LABEL org.opencontainers.image.title="cribo" \
      org.opencontainers.image.description="Dense visual representations from unlabelled images" \
      org.opencontainers.image.licenses="Apache-2.0"

SHELL ["/bin/bash", "-o", "pipefail", "-c"]

# Some versions of KubeRay check the health of their pods by wget.
# hadolint ignore=DL3008
RUN apt-get update \
    && apt-get install --yes --no-install-recommends wget \
    && rm -rf /var/lib/apt/lists/*

# All dependencies, in a layer that is rebuilt only if pyproject.toml changes. They are installed into the Python of the
# system, because KubeRay starts login shells, which reset PATH.
# hadolint ignore=SC2046
RUN --mount=from=ghcr.io/astral-sh/uv:0.13,source=/uv,target=/bin/uv \
    --mount=type=cache,target=/root/.cache/uv \
    --mount=type=bind,source=pyproject.toml,target=/source/pyproject.toml \
    uv pip install --system --link-mode copy --compile-bytecode --torch-backend "$TORCH" \
        --requirements /source/pyproject.toml $(echo "$EXTRAS" | sed -E 's/\w+/--extra &/g')

RUN --mount=from=ghcr.io/astral-sh/uv:0.13,source=/uv,target=/bin/uv \
    --mount=type=cache,target=/root/.cache/uv \
    --mount=type=bind,target=/source \
    uv pip install --system --link-mode copy --compile-bytecode --no-deps /source

# Every user may write to the home and work folders, so that `docker run --user` and random user IDs of a cluster work.
# Such users have no name in /etc/passwd: USER is what Python takes instead.
RUN useradd --uid 1000 --create-home cribo \
    && install --directory --mode 1777 /home/cribo /home/cribo/.cache /work
ENV HOME=/home/cribo USER=cribo PYTHONUNBUFFERED=1
USER 1000
WORKDIR /work
EXPOSE 7860
ENTRYPOINT ["cribo"]
CMD ["--help"]
