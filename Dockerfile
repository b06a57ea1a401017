# GPU image: CUDA 13, Python 3.12, requirements-cuda.lock and this repository. It has not been built yet; see
# docker/README.md for how to run it, on one machine or under SLURM, and for what was tested.
#
#     docker build --build-arg GIT_SHA=$(git rev-parse HEAD) -t multirole .
#
# devel instead of runtime: the wheels contain the CUDA libraries, but FlashInfer compiles kernels at run time with nvcc.
# 13.0.2 is the release of nvidia-cuda-runtime in the lock. docker/README.md says where the digest is from.
ARG CUDA_IMAGE=nvidia/cuda:13.0.2-devel-ubuntu24.04@sha256:5dc1bca23d05bd37b011be68ec470c03b403a5da07ec3a86e41af9470e9d0cc6
FROM ${CUDA_IMAGE}

SHELL ["/bin/bash", "-o", "pipefail", "-c"]

# Compilers and Python's headers: Triton and FlashInfer compile at run time. libibverbs: without it NCCL falls back to TCP
# between nodes. git: provenance records the commit. tini: papermill would ignore SIGTERM as PID 1. Versions are not pinned
# because Ubuntu removes old ones, which would break the build.
# hadolint ignore=DL3008
RUN apt-get update \
    && DEBIAN_FRONTEND=noninteractive apt-get install -y --no-install-recommends \
        g++ gcc git ibverbs-providers libc6-dev libibverbs1 make python3.12-dev python3.12-venv tini \
    && rm -rf /var/lib/apt/lists/*

ENV PATH=/opt/venv/bin:$PATH \
    PIP_NO_CACHE_DIR=1 \
    PIP_DISABLE_PIP_VERSION_CHECK=1
WORKDIR /artifact

# Install the lock before copying the code, so that a code change does not reinstall everything. pip reads both arguments.
ARG PIP_INDEX_URL
ARG PIP_EXTRA_INDEX_URL
COPY requirements-cuda.lock ./
RUN python3.12 -m venv /opt/venv \
    && pip install -r requirements-cuda.lock \
    && pip check

# Editable, so that a checkout mounted over /artifact is used. chmod: files of a checkout may be unreadable for others. The
# link and the stamp let `make` use this environment instead of creating one.
COPY . .
RUN pip install --no-deps --no-build-isolation -r requirements-clone.txt \
    && python -m compileall -q src \
    && ln -s /opt/venv .venv \
    && touch .venv/setup.stamp \
    && chmod -R a+rX . \
    && mkdir -p /results /cache \
    && chmod 1777 /results /cache

# Any user, with or without an entry in passwd, can write only to /tmp, /results and /cache, so the home and all caches
# of compiled kernels are there. getpass reads USER before passwd.
ARG GIT_SHA=unknown
LABEL org.opencontainers.image.revision=$GIT_SHA org.opencontainers.image.licenses=Apache-2.0
# hadolint ignore=DL3064
ENV GIT_SHA=$GIT_SHA \
    HOME=/tmp \
    USER=multirole \
    XDG_CACHE_HOME=/cache \
    HF_HOME=/cache/huggingface \
    CUDA_CACHE_PATH=/cache/cuda \
    CUDA_HOME=/usr/local/cuda \
    FLASHINFER_WORKSPACE_BASE=/cache \
    TORCHINDUCTOR_CACHE_DIR=/cache/inductor \
    TRITON_CACHE_DIR=/cache/triton \
    HF_HUB_DISABLE_TELEMETRY=1 \
    OMP_NUM_THREADS=1 \
    PYTHONHASHSEED=0 \
    TOKENIZERS_PARALLELISM=false \
    TQDM_DISABLE=1 \
    VLLM_ENABLE_V1_MULTIPROCESSING=0 \
    VLLM_LOGGING_LEVEL=WARNING \
    VLLM_NO_USAGE_STATS=1

USER 1000:1000
VOLUME ["/results", "/cache"]
ENTRYPOINT ["tini", "-s", "-g", "--", "/artifact/docker/entrypoint.sh"]
# The paper's smallest scale. --log-output prints a line per iteration.
CMD ["papermill", "--log-output", "-k", "python3", "notebooks/train_cell.ipynb", "/results/train_cell.ipynb", \
     "-p", "workflow", "voting", "-p", "policy", "sp", "-p", "scale", "0.6b", "-p", "results_dir", "/results"]
