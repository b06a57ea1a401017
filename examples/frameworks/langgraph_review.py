"""An evaluator loop in LangGraph: a writer drafts, a critic reviews, at most twice.

    python examples/frameworks/langgraph_review.py
"""

from typing import TypedDict

from langchain_openai import ChatOpenAI
from langgraph.graph import END, START, StateGraph

from multirole import from_openai


class State(TypedDict):
    question: str
    draft: str
    review: str
    rounds: int


async def review(question, client):
    models = {role: ChatOpenAI(model=role, base_url=str(client.base_url), api_key=client.api_key, max_retries=0)
              for role in ("writer", "critic")}  # fmt: skip

    async def write(state):
        reply = await models["writer"].ainvoke(f"{state['question']}\n{state['draft']}\n{state['review']}".strip())
        return {"draft": reply.text, "rounds": state["rounds"] + 1}

    async def judge(state):
        reply = await models["critic"].ainvoke(f"{state['question']}\nAnswer: {state['draft']}\nIs it right?")
        return {"review": reply.text}

    graph = StateGraph(State).add_node("write", write).add_node("judge", judge)
    graph.add_edge(START, "write").add_edge("judge", "write")
    graph.add_conditional_edges("write", lambda state: END if state["rounds"] == 2 else "judge")
    final = await graph.compile().ainvoke({"question": question, "draft": "", "review": "", "rounds": 0})
    return final["draft"]


workflow = from_openai(review, ["writer", "critic"], use_socket=True)

if __name__ == "__main__":
    from train import train

    train(workflow)
