"""Two agents of Google's ADK in a workflow: a planner's reply is the message to a solver, whose instruction quotes the question.

    python examples/frameworks/google_adk_sequence.py
"""

import os

os.environ["LITELLM_LOCAL_MODEL_COST_MAP"] = "True"  # or LiteLLM downloads prices first

from google.adk.agents import LlmAgent
from google.adk.models.lite_llm import LiteLlm
from google.adk.runners import InMemoryRunner
from google.adk.workflow import START, Workflow
from google.genai.types import Content, Part

from multirole import from_openai


async def sequence(question, client):
    def agent(role, instruction):
        model = LiteLlm(f"openai/{role}", api_base=str(client.base_url), api_key=client.api_key, num_retries=0, max_retries=0)
        return LlmAgent(name=role, model=model, instruction=instruction, output_key=role)

    steps = agent("planner", "Plan the solution."), agent("solver", "Solve {question} by this plan.")
    runner = InMemoryRunner(node=Workflow(name="sequence", edges=[(START, *steps)]), app_name="sequence")
    names = {"app_name": "sequence", "user_id": "user"}
    session = await runner.session_service.create_session(**names, state={"question": question})
    said = Content(role="user", parts=[Part(text=question)])
    async for _ in runner.run_async(user_id="user", session_id=session.id, new_message=said):
        pass
    session = await runner.session_service.get_session(**names, session_id=session.id)
    return session.state.get("solver", "")  # an empty reply leaves no answer


workflow = from_openai(sequence, ["planner", "solver"], use_socket=True)

if __name__ == "__main__":
    from train import train

    train(workflow)
