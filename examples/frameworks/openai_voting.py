"""Voting in plain `openai`: three solvers, a judge that picks one.

    python examples/frameworks/openai_voting.py
    multirole train -p workflow examples/frameworks/openai_voting.py:voting -p policy ip
"""

import asyncio
import re

from multirole import Duty, Edge, Structure, from_openai


async def vote(question, client):
    async def ask(role, text):
        reply = await client.chat.completions.create(model=role, messages=[{"role": "user", "content": text}])
        return reply.choices[0].message.content

    drafts = await asyncio.gather(*(ask("solver", question) for _ in range(3)))
    listed = "\n".join(f"--- Solution {i} ---\n{draft}" for i, draft in enumerate(drafts, start=1))
    verdict = await ask("judge", f"{question}\n{listed}\nWhich is right? Reply \\boxed{{N}}.")
    picked = re.findall(r"\\boxed\{([123])\}", verdict)
    return drafts[int(picked[-1]) - 1 if picked else 0]


structure = Structure(
    duties={"solver": Duty("solves"), "judge": Duty("selects", "solver")},
    edges=(Edge("question", "solver"), Edge("solver", "judge", "all drafts"), Edge("judge", "answer", "the one it picks")),
)
voting = from_openai(vote, {"solver": 3, "judge": 1}, structure=structure)

if __name__ == "__main__":
    from train import train

    train(voting)
