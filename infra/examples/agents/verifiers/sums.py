"""A small taskset of verifiers v1: sums of two digits, right if the answer is a word of the last reply."""

import verifiers.v1 as vf

__all__ = ["Sums"]


class SumData(vf.TaskData):
    answer: str


class Sum(vf.Task[SumData, vf.State, vf.TaskConfig]):
    @vf.reward
    async def says_the_sum(self, trace: vf.Trace) -> float:
        return float(self.data.answer in trace.last_reply.split())


class Sums(vf.Taskset[Sum, vf.TasksetConfig]):
    def load(self):
        for a in range(2, 10):
            for b in range(2, 10):
                yield Sum(SumData(name=f"{a}+{b}", prompt=f"What is {a} + {b} ?", answer=str(a + b)))
