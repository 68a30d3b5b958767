"""A launcher of many nodes, such as Slurm's srun, that the environment names: what it is started with, and its end."""

from __future__ import annotations

import os
import shlex
import socket
import sys
from collections.abc import Mapping, Sequence
from contextlib import closing

from tasks.core.child_processes import ChildProcess, Guardian
from tasks.core.passing_faults import PassingFault
from tasks.models.settings import LaunchSettings

LAUNCH = "TURNWISE_LAUNCH"
STOP_SECONDS = 60.0  # in which a launcher, told to stop, ends its ranks on other machines; Slurm takes 30 of its own


def launch_command(
    stage: str, launch: LaunchSettings, options: Sequence[str], environment: Mapping[str, str]
) -> list[str] | None:
    """What starts the ranks of a stage, where the environment names a launcher of many nodes, such as `srun --ntasks
    16`: so that DVC and a flow, which know one command per stage, can train on all of them. ValueError where it cannot
    be read.
    """
    if launch.launcher != "external" or not environment.get(LAUNCH):
        return None
    try:
        words = shlex.split(environment[LAUNCH])
    except ValueError as error:
        raise ValueError(
            f"{LAUNCH} is {environment[LAUNCH]!r}, which no shell could read ({error}), so no rank was started. "
            f"Correct it, or unset it and start the ranks yourself."
        ) from None
    return [*words, sys.executable, "-m", "tasks", stage, *options]


def run_launched(command: Sequence[str]) -> None:
    """Until its ranks have ended. A mistake they tell themselves, and this process ends with its status; of one that
    was killed nobody may have told, so that is a PassingFault. Where this process is stopped, the launcher has time to
    end its ranks elsewhere.
    """
    kept = {name: value for name, value in os.environ.items() if name != LAUNCH}
    with closing(Guardian(grace_seconds=STOP_SECONDS)) as guardian:
        guardian.watch_descendants()
        try:
            launcher = ChildProcess(command, guardian=guardian, env=kept, grace_seconds=STOP_SECONDS)
        except OSError as error:
            raise ValueError(
                f"{LAUNCH} begins with {command[0]}, which {socket.gethostname()} cannot start ({error.strerror}), so "
                f"no rank was started. Correct it, or unset it and start the ranks yourself."
            ) from None
        try:
            status = launcher.wait()
        finally:
            launcher.stop()
    if status < 0 or status >= 128:
        raise PassingFault(
            f"{command[0]}, the launcher of {LAUNCH}, {launcher.how_it_ended()}, as where a rank was killed or its "
            f"node was lost (128 and a signal; 9 often is a machine out of memory), so not all was trained. Run the "
            f"same command again: it goes on from the last checkpoint."
        )
    if status:
        raise SystemExit(status)
