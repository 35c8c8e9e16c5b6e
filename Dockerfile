# lapclip on the CPU, as a user without rights. How to run it: docs/guide-searching.md, "In a container".
FROM python:3.11-slim AS build

ENV PIP_NO_CACHE_DIR=1 PIP_DISABLE_PIP_VERSION_CHECK=1
RUN python -m venv /opt/lapclip
WORKDIR /source

# The usual index has torch with CUDA on Linux: several gigabytes. To leave it out, pass the options of PyTorch's installation
# page for the CPU: --build-arg TORCH_OPTIONS="--index-url ..."; its other packages come from the usual index, below.
ARG TORCH_OPTIONS=""
COPY constraints.txt ./
RUN /opt/lapclip/bin/pip install --no-deps --constraint constraints.txt ${TORCH_OPTIONS} torch

ARG EXTRAS=heic
COPY pyproject.toml MANIFEST.in README.md LICENSE ./
COPY src ./src
RUN /opt/lapclip/bin/pip install --constraint constraints.txt ".[${EXTRAS}]"


FROM python:3.11-slim

# The home folder is the one place that lapclip writes to: runs, the cache with packs and indexes, and downloaded models.
RUN useradd --uid 1000 --create-home --home-dir /lapclip lapclip
COPY --from=build /opt/lapclip /opt/lapclip
ENV PATH="/opt/lapclip/bin:$PATH" LAPCLIP_CACHE=/lapclip/cache
USER 1000
WORKDIR /lapclip
VOLUME /lapclip
EXPOSE 8765
ENTRYPOINT ["lapclip"]
CMD ["--help"]
