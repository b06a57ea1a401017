"""A Haystack pipeline, run in a thread: a planner's reply fills the prompt of a solver.

    python examples/frameworks/haystack_pipeline.py
"""

from haystack import Pipeline
from haystack.components.builders import ChatPromptBuilder
from haystack.components.generators.chat import OpenAIChatGenerator
from haystack.dataclasses import ChatMessage
from haystack.utils import Secret

from multirole import from_openai


def solve(question, client):
    def generator(role):
        key = Secret.from_token(client.api_key)
        return OpenAIChatGenerator(key, role, api_base_url=str(client.base_url), max_retries=0)

    template = [ChatMessage.from_user("{{question}}\nPlan: {{plan[0].text}}")]
    pipeline = Pipeline()
    pipeline.add_component("planner", generator("planner"))
    pipeline.add_component("prompt", ChatPromptBuilder(template, required_variables="*"))
    pipeline.add_component("solver", generator("solver"))
    pipeline.connect("planner.replies", "prompt.plan")
    pipeline.connect("prompt.prompt", "solver.messages")
    asked = {"planner": {"messages": [ChatMessage.from_user(question)]}, "prompt": {"question": question}}
    return pipeline.run(asked)["solver"]["replies"][0].text


workflow = from_openai(solve, ["planner", "solver"], use_socket=True)

if __name__ == "__main__":
    from train import train

    train(workflow)
