"""Two AG2 agents in a dialogue: a student answers, a teacher comments, the student answers again.

    python examples/frameworks/ag2_dialogue.py
"""

from ag2 import Agent
from ag2.config import OpenAIConfig

from multirole import from_openai


async def dialogue(question, client):
    def config(role):
        return OpenAIConfig(model=role, base_url=str(client.base_url), api_key=client.api_key, max_retries=0)

    student = Agent("student", config=config("student"))
    teacher = Agent("teacher", config=config("teacher"))
    first = await student.ask(question)
    comment = await teacher.ask(f"{question}\nA student answers: {first.body or ''}")
    second = await first.ask(comment.body or "")
    return second.body or ""  # None for an empty reply


workflow = from_openai(dialogue, ["student", "teacher"], use_socket=True)

if __name__ == "__main__":
    from train import train

    train(workflow)
