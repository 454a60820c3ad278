# One organisation's site. Build: docker build -t pbmvfl:0.2.0 .
# Where wheels of torch without CUDA come from another index, pass it: --build-arg PIP_EXTRA_INDEX_URL=...
FROM python:3.11.11-slim-bookworm AS build
ARG PIP_EXTRA_INDEX_URL=""
ENV PIP_NO_CACHE_DIR=1 PIP_DISABLE_PIP_VERSION_CHECK=1
WORKDIR /build
COPY pyproject.toml README.md LICENSE constraints.txt ./
COPY src ./src
RUN python -m venv /opt/pbmvfl && /opt/pbmvfl/bin/python -m pip install -c constraints.txt ".[deploy]"

FROM python:3.11.11-slim-bookworm
COPY --from=build /opt/pbmvfl /opt/pbmvfl
RUN groupadd --gid 10001 pbmvfl \
    && useradd --uid 10001 --gid 10001 --no-create-home --shell /usr/sbin/nologin pbmvfl \
    && install -d -o pbmvfl -g pbmvfl -m 0700 /site /var/lib/pbmvfl
# Compiled loops are kept in memory: the root file system is read-only in a compose file of ours.
ENV PATH=/opt/pbmvfl/bin:$PATH OMP_NUM_THREADS=1 PYTHONDONTWRITEBYTECODE=1 \
    NUMBA_CACHE_DIR=/tmp/numba MPLCONFIGDIR=/tmp/matplotlib PBMVFL_STATE=/var/lib/pbmvfl
USER 10001:10001
WORKDIR /site
VOLUME ["/site", "/var/lib/pbmvfl"]
# A site knows its own role; `status` ends with 1 while it does not run.
HEALTHCHECK --interval=30s --timeout=20s --start-period=90s --retries=3 \
    CMD ["sh", "-c", "pbmvfl party status --home /site || pbmvfl server status --home /site"]
ENTRYPOINT ["pbmvfl"]
CMD ["--help"]
