# An image of `rest-local serve`. docs/howto/container.md has the commands.
#
# BUILD_BASE   what compiles: needs apt, and gcc 13 or newer (11 and 12 compile llama.cpp's code for AMX so that it
#              crashes). For NVIDIA GPUs: nvidia/cuda:12.9.1-devel-ubuntu24.04
# RUN_BASE     what runs, with the same Python and C library. For NVIDIA GPUs: nvidia/cuda:12.9.1-runtime-ubuntu24.04
# CMAKE_ARGS   settings of llama.cpp. Without them it is compiled for the processor that builds the image;
#              -DGGML_NATIVE=OFF makes an image for other machines
# EXTRAS       extras of pyproject.toml
ARG BUILD_BASE=debian:trixie-slim
ARG RUN_BASE=debian:trixie-slim

FROM ${BUILD_BASE} AS build
ARG CMAKE_ARGS=""
ARG EXTRAS=images
RUN apt-get update \
 && DEBIAN_FRONTEND=noninteractive apt-get install --yes --no-install-recommends \
        build-essential ca-certificates cmake ninja-build python3 python3-dev python3-venv \
 && rm -rf /var/lib/apt/lists/*
WORKDIR /src
# First what rarely changes: with the same pyproject.toml, llama.cpp is not compiled again.
COPY pyproject.toml ./
COPY scripts/compiler_check.py scripts/
RUN python3 -m venv /opt/rest-local \
 && python3 -c 'import tomllib; print(*tomllib.load(open("pyproject.toml", "rb"))["project"]["dependencies"], sep="\n")' \
        > requirements.txt \
 && CMAKE_ARGS="$CMAKE_ARGS" CMAKE_BUILD_PARALLEL_LEVEL="$(nproc)" \
        python3 scripts/compiler_check.py \
        /opt/rest-local/bin/python -m pip install --no-cache-dir --requirement requirements.txt
COPY . .
RUN /opt/rest-local/bin/python -m pip install --no-cache-dir ".[$EXTRAS]" \
 && /opt/rest-local/bin/python -m pip uninstall --yes pip

FROM ${RUN_BASE}
RUN apt-get update \
 && DEBIAN_FRONTEND=noninteractive apt-get install --yes --no-install-recommends ca-certificates libgomp1 python3 \
 && rm -rf /var/lib/apt/lists/* \
 && useradd --uid 10001 --no-create-home --home-dir /data rest-local \
 && install --directory --owner=rest-local --group=rest-local --mode=0700 /cache /data /models
COPY --from=build /opt/rest-local /opt/rest-local
# Every option of a command can be set in the environment. The address is the container's own, and needs keys.
ENV PATH=/opt/rest-local/bin:$PATH \
    HF_HOME=/models/huggingface \
    REST_LOCAL_MODELS=/models \
    REST_LOCAL_DATA=/data \
    REST_LOCAL_CACHE=/cache \
    REST_LOCAL_CONFIG=/data/config.toml \
    REST_LOCAL_HOST=0.0.0.0 \
    REST_LOCAL_PORT=8012 \
    REST_LOCAL_API_KEY_FILE=/data/keys
USER 10001:10001
WORKDIR /data
VOLUME ["/cache", "/data", "/models"]
EXPOSE 8012
# 200 once the model is loaded, 503 before that. Downloads and large models take their time.
HEALTHCHECK --interval=15s --timeout=5s --start-period=10m --retries=3 \
    CMD ["python3", "-c", "import http.client, os; c = http.client.HTTPConnection('127.0.0.1', int(os.environ['REST_LOCAL_PORT']), timeout=4); c.request('GET', '/health'); raise SystemExit(c.getresponse().status != 200)"]
ENTRYPOINT ["rest-local"]
CMD ["serve"]
