"""A LlamaIndex workflow of two steps: a writer drafts, and a critic's review sends the draft back once.

    python examples/frameworks/llama_index_workflow.py
"""

from llama_index.core.llms import ChatMessage
from llama_index.core.workflow import Event, StartEvent, StopEvent, Workflow, step
from llama_index.llms.openai_like import OpenAILike

from multirole import from_openai


class Draft(Event):
    text: str


class Review(Event):
    text: str


class Writing(Workflow):
    def __init__(self, question, client):
        super().__init__(timeout=None)
        self.question = question
        self.models = {role: OpenAILike(model=role, async_openai_client=client, is_chat_model=True) for role in ("writer", "critic")}

    async def ask(self, role, text):
        return (await self.models[role].achat([ChatMessage(f"{self.question}\n{text}".strip())])).message.content

    @step
    async def write(self, event: StartEvent | Review) -> Draft | StopEvent:
        if isinstance(event, StartEvent):
            return Draft(text=await self.ask("writer", ""))
        return StopEvent(result=await self.ask("writer", event.text))

    @step
    async def judge(self, event: Draft) -> Review:
        return Review(text=await self.ask("critic", f"Answer: {event.text}"))


async def writing(question, client):
    return await Writing(question, client).run()


workflow = from_openai(writing, ["writer", "critic"], ignore=("temperature",))

if __name__ == "__main__":
    from train import train

    train(workflow)
