#!/usr/bin/env bash
# torchrun.sh NODES RANKS LEADER [STAGE]: one stage, train unless said otherwise. Run it on every node, in the project's
# folder, which all nodes share. RANKS are those of this node, one per GPU; LEADER is HOST[:PORT] of any one node, the
# same everywhere. params.yaml has launch.launcher: external and launch.num_trainers: the ranks of all nodes. Nodes wait
# JOIN_SECONDS for each other, 300 unless exported; launch.meet_seconds is how long their ranks do, afterwards.
set -euo pipefail
nodes=${1:?number of nodes} ranks=${2:?ranks of this node} leader=${3:?HOST[:PORT] of one node} stage=${4:-train}
[[ $leader == *:* ]] || leader+=:29400
exec python -m torch.distributed.run --nnodes="$nodes" --nproc-per-node="$ranks" --rdzv-backend=c10d \
  --rdzv-endpoint="$leader" --rdzv-id="turnwise-$stage" --rdzv-conf="join_timeout=${JOIN_SECONDS:-300}" --max-restarts=0 \
  -m tasks "$stage"
