# The GPU image: CUDA 13, Python 3.12, requirements-cuda.lock, this repository. The host driver must support CUDA 13.
# Not built here: no Docker engine at hand. Linted with hadolint.
#
#     docker build --build-arg GIT_SHA=$(git rev-parse HEAD) -t multirole .
#     docker run --rm --gpus all --ipc=host -v "$PWD/runs:/results" multirole
#
# The CPU image is docker/Dockerfile.cpu; docker/compose.yml starts either.
FROM nvidia/cuda:13.0.1-runtime-ubuntu24.04

SHELL ["/bin/bash", "-o", "pipefail", "-c"]

# A C compiler and Python's headers: Triton compiles small launchers at run time. tini: papermill as PID 1 ignores SIGTERM.
# hadolint ignore=DL3008
RUN apt-get update \
    && apt-get install -y --no-install-recommends gcc git libc6-dev make python3.12-dev python3.12-venv tini \
    && rm -rf /var/lib/apt/lists/*

ENV PATH=/opt/venv/bin:$PATH \
    PIP_NO_CACHE_DIR=1 \
    PIP_DISABLE_PIP_VERSION_CHECK=1
WORKDIR /artifact
COPY requirements-cuda.lock ./
RUN python3.12 -m venv /opt/venv && pip install -r requirements-cuda.lock

COPY . .
RUN pip install --no-deps --no-build-isolation -e . \
    && mkdir -p /results /cache/huggingface \
    && chmod 1777 /results /cache /cache/huggingface

ARG GIT_SHA=unknown
LABEL org.opencontainers.image.revision=$GIT_SHA org.opencontainers.image.licenses=Apache-2.0
# hadolint ignore=DL3064
ENV GIT_SHA=$GIT_SHA \
    HOME=/tmp \
    HF_HOME=/cache/huggingface \
    HF_HUB_DISABLE_TELEMETRY=1 \
    OMP_NUM_THREADS=1 \
    PYTHONHASHSEED=0 \
    TOKENIZERS_PARALLELISM=false \
    TQDM_DISABLE=1 \
    VLLM_ENABLE_V1_MULTIPROCESSING=0 \
    VLLM_LOGGING_LEVEL=WARNING

USER 1000:1000
VOLUME /results
ENTRYPOINT ["tini", "-g", "--", "/artifact/docker/entrypoint.sh"]
CMD ["papermill", "-k", "python3", "notebooks/train_cell.ipynb", "/results/train_cell.ipynb", \
     "-p", "workflow", "voting", "-p", "policy", "sp", "-p", "results_dir", "/results"]
