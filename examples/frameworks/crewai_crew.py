"""A CrewAI crew, run in a thread: a planner's task and then a solver's, which gets the plan as its context.

    python examples/frameworks/crewai_crew.py
"""

import os

os.environ["CREWAI_DISABLE_TELEMETRY"] = "true"

from crewai import LLM, Agent, Crew, Task

from multirole import from_openai


def solve(question, client):
    def agent(role, goal):
        llm = LLM(
            model=role, provider="openai", base_url=str(client.base_url), api_key=client.api_key, max_retries=0
        )
        return Agent(role=role, goal=goal, backstory="You calculate.", llm=llm)

    plan = Task(description=question, expected_output="a plan", agent=agent("planner", "Plan the solution."))
    answer = Task(description=question, expected_output="the answer", agent=agent("solver", "Solve it."), context=[plan])
    return Crew(agents=[plan.agent, answer.agent], tasks=[plan, answer]).kickoff().raw


workflow = from_openai(solve, ["planner", "solver"], use_socket=True)

if __name__ == "__main__":
    from train import train

    train(workflow)
