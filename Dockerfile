# Groundwork with the packages of requirements.txt, for GPUs, or for CPUs with DEVICE=cpu:
#   docker build --tag groundwork .
#   docker build --tag groundwork:cpu --build-arg DEVICE=cpu .
# STORES lists libraries for mirrors and data on s3:// or gs://. hf:// needs none. Mount shards and runs:
#   docker run --init --gpus all --shm-size 8g -v ./data:/groundwork/data -v ./runs:/groundwork/runs groundwork \
#       python -m pretrain.launch --config_file accelerate_configs/ddp.yaml --num_processes 8 train.py --config recipes/NAME.yaml
# For several machines with InfiniBand, add --network host --device /dev/infiniband --ulimit memlock=-1.
ARG DEVICE=cuda

# torch.compile and DeepSpeed need the compiler. Runs record their commit with git.
FROM python:3.12-slim-bookworm AS cpu
RUN apt-get update && apt-get install --yes --no-install-recommends build-essential git make \
    && rm -rf /var/lib/apt/lists/*

# NCCL needs libibverbs and its providers for InfiniBand. Without them it falls back to TCP.
# DeepSpeed's offload needs nvcc from the CUDA toolkit. Torch brings its own CUDA libraries. The machine's driver must be
# 580 or newer.
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
# For CPUs, install torch first, from the index without CUDA libraries: 0.2 GB instead of 4.
RUN python3 -m venv .venv \
    && if [ "$DEVICE" = cpu ]; then \
        .venv/bin/pip install --no-cache-dir "$(grep '^torch==' requirements.txt)" --index-url https://download.pytorch.org/whl/cpu; \
    fi \
    && .venv/bin/pip install --no-cache-dir -r requirements.txt ${STORES}
COPY . .
RUN git config --system --add safe.directory /groundwork
ENV PATH=/groundwork/.venv/bin:$PATH PYTHONUNBUFFERED=1
CMD ["python", "train.py", "--help"]
