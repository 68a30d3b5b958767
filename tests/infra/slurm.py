"""Stand-ins for Slurm's programs: a job's variables, and programs in a folder that PATH begins with."""

from __future__ import annotations

import os
from collections.abc import Sequence
from pathlib import Path

# In one write: several programs of a job write to one pipe.
SAYS = 'said=$(printf "%s " "$(basename "$0")"; printf "%q " "$@"); echo "$said"'
# As many processes as --ntasks says, each with the numbers that Slurm gives it, and the worst of their statuses. One
# that fails ends the others where --kill-on-bad-exit is 1, and SIGTERM ends all.
SRUN = """
while [[ $1 == --* ]]; do
  case $1 in --ntasks=*) tasks=${1#*=} ;; --nodes=*) nodes=${1#*=} ;; --kill-on-bad-exit=*) kills=${1#*=} ;; esac
  shift
done
here=$((tasks / nodes)) started=()
trap 'kill "${started[@]}"; exit 143' TERM
for ((rank = 0; rank < tasks; rank++)); do
  SLURM_PROCID=$rank SLURM_NTASKS=$tasks SLURM_LOCALID=$((rank % here)) "$@" &
  started+=($!)
done
worst=0
for process in "${started[@]}"; do
  status=0
  wait -n || status=$?
  ((status && ${kills:-0})) && kill "${started[@]}" 2>/dev/null
  ((status > worst)) && worst=$status
done
exit "$worst"
"""


def allocation(folder: Path, *, nodes: Sequence[str], per_node: int) -> dict[str, str]:
    """The variables of a job that was given `nodes`, whose programs are in `folder`; the batch's own step is a task."""
    stand_ins(folder, scontrol="; ".join(f"echo {node}" for node in nodes))
    return {
        **os.environ, "PATH": f"{folder}:{os.environ['PATH']}", "SLURM_JOB_NODELIST": "nodes", "SLURM_PROCID": "0",
        "SLURM_NTASKS": str(len(nodes) * per_node), "SLURM_LOCALID": "0", "SLURM_NTASKS_PER_NODE": str(per_node),
        "SLURM_CPUS_PER_TASK": "1",
    }  # fmt: skip


def stand_ins(folder: Path, **programs: str) -> None:
    """Programs of bash, by name."""
    for name, text in programs.items():
        (folder / name).write_text(f"#!/usr/bin/env bash\n{text}\n", encoding="utf-8")
        (folder / name).chmod(0o755)
