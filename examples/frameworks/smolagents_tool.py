"""A tool-using smolagents agent, run in a thread: it writes code that calls a calculator, and tries again if the code fails.

The code runs in this process. For a model that you do not trust, pass one of smolagents' remote executors (`executor_type`).

    python examples/frameworks/smolagents_tool.py
"""

from smolagents import CodeAgent, LogLevel, OpenAIModel, tool

from multirole import from_openai


@tool
def add(a: int, b: int) -> int:
    """Add two numbers.

    Args:
        a: the first.
        b: the second.
    """
    return a + b


PROMPTS = {
    "system_prompt": "Write code in <code></code> that uses `add` and `final_answer`.",
    "planning": {"initial_plan": "", "update_plan_pre_messages": "", "update_plan_post_messages": ""},
    "managed_agent": {"task": "", "report": ""},
    "final_answer": {"pre_messages": "Answer the task.", "post_messages": "{{task}}"},
}


def solve(question, client):
    model = OpenAIModel("coder", api_base=str(client.base_url), api_key=client.api_key, client_kwargs={"max_retries": 0})
    agent = CodeAgent([add], model, prompt_templates=PROMPTS, max_steps=2, verbosity_level=LogLevel.OFF)
    return str(agent.run(question))


workflow = from_openai(solve, ["coder"], use_socket=True, ignore=("stop",))

if __name__ == "__main__":
    from train import train

    train(workflow)
