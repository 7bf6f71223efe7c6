# shellcheck shell=bash
# Install vLLM, Ray and Leeway on a GPU machine without network:
#
#   . benchmarks/gpu/unpack.sh      in the root of the checkout that contains the .gpu/ of pack.sh
#
# Unpacks .gpu/ once into $LEEWAY_SITE (default: /tmp/leeway-site), sets libraries to offline mode, and defines `leeway`.
# Requires the packages of benchmarks/gpu/base.txt for the python3 in PATH.
export LEEWAY_SITE=${LEEWAY_SITE:-/tmp/leeway-site}
python3 -m benchmarks.gpu.site_folder .gpu "$LEEWAY_SITE" || return 1
export PYTHONPATH=$LEEWAY_SITE:$PWD${PYTHONPATH:+:$PYTHONPATH} PYTHONUNBUFFERED=1 TOKENIZERS_PARALLELISM=false
export HF_HUB_OFFLINE=1 TRANSFORMERS_OFFLINE=1 VLLM_NO_USAGE_STATS=1 VLLM_DO_NOT_TRACK=1 RAY_USAGE_STATS_ENABLED=0
export VLLM_USE_FLASHINFER_SAMPLER=0 VLLM_USE_DEEP_GEMM=0 WANDB_MODE=disabled
leeway() { python3 -m leeway "$@"; }
