#!/usr/bin/env bash
# vllm_server.sh MODEL [OPTIONS…]: one vLLM server for engine.settings.urls, with what turnwise asks of it and vLLM's
# OPTIONS, on the GPUs that it sees. HOST is the address to listen on; whoever reaches it can exchange the weights, so it
# is for a network of your own alone. Under Slurm the tasks of a node listen on ports 8000, 8001 and so on. MAX_TOKENS is
# sampling.max_tokens_per_episode.
set -euo pipefail
export VLLM_SERVER_DEV_MODE=1 VLLM_NO_USAGE_STATS=1 HF_HUB_OFFLINE=1 # the first one has the routes for new weights
exec python -m vllm.entrypoints.openai.api_server \
  --model "${1:?the folder of the model to start from}" --served-model-name policy \
  --host "${HOST:-127.0.0.1}" --port "$((${PORT:-8000} + ${SLURM_LOCALID:-0}))" \
  --load-format safetensors --dtype "${DTYPE:-bfloat16}" --max-model-len "${MAX_TOKENS:-18432}" \
  --max-num-seqs "${EPISODES:-96}" --tensor-parallel-size "${GPUS:-1}" \
  --gpu-memory-utilization "${MEMORY_SHARE:-0.9}" --logprobs-mode processed_logprobs --generation-config vllm \
  --enable-prefix-caching --enable-prompt-tokens-details --disable-uvicorn-access-log "${@:2}"
