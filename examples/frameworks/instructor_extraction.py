"""Typed replies with instructor: a solver answers in free text, and an extractor's reply is read into a Pydantic model.

    python examples/frameworks/instructor_extraction.py
"""

import instructor
from instructor.core import IncompleteOutputException, InstructorRetryException
from pydantic import BaseModel

from multirole import from_openai


class Answer(BaseModel):
    value: int


async def extraction(question, client):
    reply = await client.chat.completions.create(model="solver", messages=[{"role": "user", "content": question}])
    typed = instructor.from_openai(client, mode=instructor.Mode.MD_JSON)
    messages = [{"role": "user", "content": f"{question}\n{reply.choices[0].message.content}"}]
    try:
        answer = await typed.chat.completions.create(Answer, messages, model="extractor", max_retries=0)
    except (InstructorRetryException, IncompleteOutputException) as error:  # no such JSON: the text is scored
        return error.last_completion.choices[0].message.content
    return f"\\boxed{{{answer.value}}}"


workflow = from_openai(extraction, ["solver", "extractor"])

if __name__ == "__main__":
    from train import train

    train(workflow)
