"""A task set, an environment of two agents, and a harness in this process, for the tests of `from_verifiers`."""

import verifiers.v1 as vf
from openai import AsyncOpenAI
from verifiers.v1.runtimes import ProgramResult, SubprocessConfig


class SumData(vf.TaskData):
    answer: str


class SumTask(vf.Task[SumData, vf.State, vf.TaskConfig]):
    @vf.reward
    async def length(self, trace) -> float:
        """The number of characters of the last reply."""
        return float(len(trace.last_reply))


class Sums(vf.Taskset[SumTask, vf.TasksetConfig]):
    def load(self):
        return [SumTask(SumData(prompt=f"{i}+1", answer=str(i + 1)), self.config.task) for i in range(4)]


class InProcess(vf.Harness[vf.HarnessConfig]):
    EXECUTES_CODE = NEEDS_CONTAINER = False

    async def launch(self, ctx, trace, runtime, endpoint, secret, mcp_urls, data, **_):
        _, prompt = self.resolve_prompt(data)
        client = AsyncOpenAI(base_url=endpoint, api_key=secret)
        await client.chat.completions.create(model=ctx.model, messages=[{"role": "user", "content": str(prompt)}])
        return ProgramResult(0, "", "")


HERE = vf.AgentConfig(runtime=SubprocessConfig())  # with the harness of the task set, which is that of this module


class PairConfig(vf.EnvConfig):
    solver: vf.AgentConfig = HERE
    checker: vf.AgentConfig = HERE


class Pair(vf.Env[PairConfig]):
    async def run(self, task, agents):
        await agents.solver.run(task)
        await agents.checker.run(task)


__all__ = ["InProcess", "Pair", "Sums"]
