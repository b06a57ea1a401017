"""An AutoGen team: a writer and a critic speak in turn, and the writer has the last word.

    python examples/frameworks/autogen_team.py
"""

from autogen_agentchat.agents import AssistantAgent
from autogen_agentchat.conditions import MaxMessageTermination
from autogen_agentchat.teams import RoundRobinGroupChat
from autogen_ext.models.openai import OpenAIChatCompletionClient

from multirole import from_openai

INFO = {"vision": False, "function_calling": False, "json_output": False, "structured_output": False, "family": "unknown"}


async def team(question, client):
    def agent(role, task):
        model = OpenAIChatCompletionClient(
            model=role, base_url=str(client.base_url), api_key=client.api_key, max_retries=0, model_info=INFO
        )
        return AssistantAgent(role, model, system_message=task)

    writer = agent("writer", "Solve the problem.")
    critic = agent("critic", "Say what is wrong.")
    chat = RoundRobinGroupChat([writer, critic], termination_condition=MaxMessageTermination(4))
    result = await chat.run(task=question)
    return result.messages[-1].content


workflow = from_openai(team, ["writer", "critic"], use_socket=True)

if __name__ == "__main__":
    from train import train

    train(workflow)
