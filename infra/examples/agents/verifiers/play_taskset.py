"""A taskset of verifiers v1 as an agent of turnwise: `environment.name: agent` starts this for each episode.

`play_taskset.py problems TASKSET` prints the tasks as Problems. Without arguments it plays the one of TURNWISE_PROBLEM:
verifiers runs its own harness, which asks the policy, and scores the rollout; its reward is the verdict. A rollout that
failed for another reason than the policy ends this program with an error, so that it is no verdict.
"""

import asyncio
import json
import os
import sys
from pathlib import Path

import verifiers.v1 as vf
from verifiers.v1.utils.loaders import taskset_class, taskset_config_type

HARNESS = {"id": os.environ.get("VERIFIERS_HARNESS", "null")}  # a plain chat loop with the task's tools
SUCCESS_REWARD = 1.0


def main() -> None:
    os.environ["PATH"] = f"{Path(sys.executable).parent}:{os.environ['PATH']}"  # for uv
    if sys.argv[1:2] == ["problems"]:
        print_problems(sys.argv[2])
    else:
        problem = json.loads(Path(os.environ["TURNWISE_PROBLEM"]).read_text())
        result = asyncio.run(play(problem["world"]["taskset"], problem["world"]["index"]))
        Path(os.environ["TURNWISE_RESULT"]).write_text(json.dumps(result))


def load(name: str) -> vf.Taskset:
    return taskset_class(name)(taskset_config_type(name)(id=name))


def print_problems(name: str) -> None:
    for task in load(name):
        id = f"{name}-{task.data.idx:06d}"
        print(
            json.dumps(
                {
                    "id": id,
                    "category": name,
                    "level": 1,
                    "requests": [task.data.prompt_text],
                    "world": {"taskset": name, "index": task.data.idx},
                    "reference": [{"calls": [], "answer": str(getattr(task.data, "answer", ""))}],
                    "split_group": id,
                }
            )
        )


async def play(name: str, index: int) -> dict:
    """The rollout of one task, as TURNWISE_RESULT has it."""
    (task,) = load(name).include(idx=[index])
    client = vf.EvalClientConfig(base_url=os.environ["OPENAI_BASE_URL"], api_key_var="OPENAI_API_KEY")
    config = {"harness": HARNESS, "model": os.environ["TURNWISE_MODEL"]}
    trace = await vf.Agent(vf.AgentConfig(**config, runtime=vf.SubprocessConfig(), client=client)).run(task)
    if not trace.ok:
        raise SystemExit(f"verifiers: {trace.errors[-1].type if trace.errors else trace.stop_condition}")
    rewards = {key: reward.value for key, reward in trace.rewards.items() if reward is not None}
    success = trace.reward >= SUCCESS_REWARD
    return {"success": success, "answer": trace.last_reply, "details": {"reward": trace.reward, "rewards": rewards}}


if __name__ == "__main__":
    main()
