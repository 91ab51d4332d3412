# Groundwork with everything that requirements.txt pins, for GPUs or, with DEVICE=cpu, without:
#   docker build --tag groundwork .
#   docker build --tag groundwork:cpu --build-arg DEVICE=cpu .
# STORES are libraries for mirrors and data elsewhere (s3://, gs://); hf:// needs none. Shards and runs are mounted:
#   docker run --init --gpus all --shm-size 8g -v ./data:/groundwork/data -v ./runs:/groundwork/runs groundwork \
#       python -m pretrain.launch --config_file accelerate_configs/ddp.yaml --num_processes 8 train.py --config recipes/NAME.yaml
ARG DEVICE=cuda

# The compiler is for torch.compile and DeepSpeed, git for the commit that a run records.
FROM python:3.12-slim-bookworm AS cpu
RUN apt-get update && apt-get install --yes --no-install-recommends build-essential git make \
    && rm -rf /var/lib/apt/lists/*

# libibverbs with its providers is what NCCL needs for InfiniBand between machines; without it, it falls back to TCP.
# Of the CUDA toolkit only nvcc is used, by DeepSpeed's offload; torch brings its own libraries. The driver of the
# machine has to be 580 or newer.
FROM nvidia/cuda:13.0.1-devel-ubuntu24.04 AS cuda
RUN apt-get update \
    && apt-get install --yes --no-install-recommends build-essential git make python3 python3-dev python3-venv \
        libibverbs1 ibverbs-providers librdmacm1 \
    && rm -rf /var/lib/apt/lists/*

FROM ${DEVICE}
ARG DEVICE
ARG STORES="s3fs gcsfs"
WORKDIR /groundwork
COPY requirements.txt .
# On a CPU torch comes first, from the index without CUDA's libraries: 0.2 GB instead of 4.
RUN python3 -m venv .venv \
    && if [ "$DEVICE" = cpu ]; then \
        .venv/bin/pip install --no-cache-dir "$(grep '^torch==' requirements.txt)" --index-url https://download.pytorch.org/whl/cpu; \
    fi \
    && .venv/bin/pip install --no-cache-dir -r requirements.txt ${STORES}
COPY . .
RUN git config --system --add safe.directory /groundwork
ENV PATH=/groundwork/.venv/bin:$PATH PYTHONUNBUFFERED=1
CMD ["python", "train.py", "--help"]
