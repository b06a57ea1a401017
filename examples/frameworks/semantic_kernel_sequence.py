"""Two agents of Semantic Kernel in its sequential orchestration: a solver answers, and an editor gets the answer.

    python examples/frameworks/semantic_kernel_sequence.py
"""

from semantic_kernel.agents import ChatCompletionAgent, SequentialOrchestration
from semantic_kernel.agents.runtime import InProcessRuntime
from semantic_kernel.connectors.ai.open_ai import OpenAIChatCompletion

from multirole import from_openai


async def sequence(question, client):
    def agent(role, instructions):
        service = OpenAIChatCompletion(ai_model_id=role, async_client=client)
        return ChatCompletionAgent(name=role, instructions=instructions, service=service)

    agents = [agent("solver", "Solve the problem."), agent("editor", "Correct the answer.")]
    runtime = InProcessRuntime()
    runtime.start()
    result = await SequentialOrchestration(members=agents).invoke(question, runtime=runtime)
    answer = await result.get()
    await runtime.stop_when_idle()
    return str(answer)


workflow = from_openai(sequence, ["solver", "editor"])

if __name__ == "__main__":
    from train import train

    train(workflow)
