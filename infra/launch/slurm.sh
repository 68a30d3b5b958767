#!/usr/bin/env bash
# MODEL=FOLDER sbatch infra/launch/slurm.sh: the whole flow on nodes of Slurm, from the project's folder, which all nodes
# share. The last node has a vLLM server per GPU, the others a rank per GPU. Change the numbers below; infra/scaling.md
# has the lines of params.yaml that go with them. SERVERS=no is for an engine in the trainers' own processes.
#SBATCH --job-name=turnwise
#SBATCH --nodes=3
#SBATCH --ntasks-per-node=8
#SBATCH --gpus-per-node=8
#SBATCH --cpus-per-task=12
#SBATCH --exclusive
#SBATCH --time=48:00:00
#SBATCH --requeue
#SBATCH --open-mode=append
#SBATCH --output=turnwise-%j.log
set -euo pipefail
export PATH="$PWD/.venv/bin:$PATH" SRUN_CPUS_PER_TASK=$SLURM_CPUS_PER_TASK
per_node=$SLURM_NTASKS_PER_NODE
mapfile -t nodes < <(scontrol show hostnames "$SLURM_JOB_NODELIST")
export MASTER_ADDR=${nodes[0]} MASTER_PORT=${MASTER_PORT:-29500}

if [[ ${SERVERS:-yes} == yes ]]; then
  model=${MODEL:?the folder of the model to start from}
  export VLLM_HOST=${nodes[-1]} # engine.settings.urls: ["http://$VLLM_HOST:8000", "http://$VLLM_HOST:8001", …]
  unset "nodes[-1]"
  # Each server is started again where it dies, and takes no other with it, until the flow has ended: this shell becomes
  # the flow, so it is the parent of `serve` as long as it lives.
  serve() {
    srun --nodes=1 --nodelist="$VLLM_HOST" --ntasks="$per_node" --gpus-per-task=1 --kill-on-bad-exit=0 \
      env HOST="$VLLM_HOST" infra/launch/again.sh infra/launch/vllm_server.sh "$model" &
    while read -r _ _ _ parent _ </proc/self/stat && ((parent == $$)); do sleep 1; done
    kill $!
  }
  serve &
fi

# `python -m tasks warm_start` and `train`, whoever calls them, become this; the other stages run on the first node alone.
# Where a rank dies the others notice, say so and end themselves; srun killing them would hide which one it was.
trainers=$(IFS=, && echo "${nodes[*]}")
tasks=$((${#nodes[@]} * per_node))
export TURNWISE_LAUNCH="srun --nodes=${#nodes[@]} --nodelist=$trainers --ntasks=$tasks --gpus-per-task=1 --kill-on-bad-exit=0"
exec python -m flows run
