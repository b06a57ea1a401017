"""Two agents of the OpenAI Agents SDK: a planner hands its plan to a solver.

    python examples/frameworks/agents_sdk_pipeline.py
"""

from agents import Agent, OpenAIChatCompletionsModel, Runner, set_tracing_disabled

from multirole import from_openai

set_tracing_disabled(True)


async def pipeline(question, client):
    planner = Agent("Planner", model=OpenAIChatCompletionsModel("planner", client))
    solver = Agent("Solver", model=OpenAIChatCompletionsModel("solver", client))
    plan = await Runner.run(planner, question)
    answer = await Runner.run(solver, f"{question}\nPlan: {plan.final_output}")
    return str(answer.final_output)


workflow = from_openai(pipeline, ["planner", "solver"])

if __name__ == "__main__":
    from train import train

    train(workflow)
