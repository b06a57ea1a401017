"""A DSPy program of two predictors, each with its own model: a planner, and a solver that gets the plan.

DSPy's adapters ask for replies in marked fields. `WholeReply` takes a reply as it is, which suits a model that cannot write such fields.

    python examples/frameworks/dspy_program.py
"""

import dspy
from dspy.utils.exceptions import AdapterParseError

from multirole import from_openai


class WholeReply(dspy.Adapter):
    """Take the whole reply as the signature's only output."""

    def format(self, signature, demos, inputs):
        text = "\n".join([signature.instructions, *(f"{name}: {value}" for name, value in inputs.items())])
        return [{"role": "user", "content": text}]

    def parse(self, signature, completion):
        return dict.fromkeys(signature.output_fields, completion)


class Program(dspy.Module):
    def __init__(self, lm):
        self.plan = dspy.Predict(dspy.Signature("question -> plan", "Plan the solution."))
        self.solve = dspy.Predict(dspy.Signature("question, plan -> answer", "Solve the problem."))
        self.plan.lm, self.solve.lm = lm("planner"), lm("solver")

    async def aforward(self, question):
        plan = await self.plan.acall(question=question)
        return await self.solve.acall(question=question, plan=plan.plan)


async def program(question, client):
    def lm(role):
        return dspy.LM(f"openai/{role}", api_base=str(client.base_url), api_key=client.api_key, cache=False, num_retries=0)

    with dspy.context(adapter=WholeReply()):
        try:
            return (await Program(lm).acall(question=question)).answer
        except AdapterParseError:  # an empty reply
            return ""


workflow = from_openai(program, ["planner", "solver"], use_socket=True)

if __name__ == "__main__":
    from train import train

    train(workflow)
