"""Two Pydantic AI agents: a solver answers, a critic comments, and the solver answers again with the conversation so far.

    python examples/frameworks/pydantic_ai_review.py
"""

from pydantic_ai import Agent
from pydantic_ai.models.openai import OpenAIChatModel
from pydantic_ai.providers.openai import OpenAIProvider

from multirole import from_openai


async def review(question, client):
    provider = OpenAIProvider(openai_client=client)
    solver = Agent(OpenAIChatModel("solver", provider=provider))
    critic = Agent(OpenAIChatModel("critic", provider=provider))
    draft = await solver.run(question)
    comment = await critic.run(f"{question}\nAnswer: {draft.output}\nIs it right?")
    final = await solver.run(comment.output, message_history=draft.all_messages())
    return final.output


workflow = from_openai(review, ["solver", "critic"])

if __name__ == "__main__":
    from train import train

    train(workflow)
