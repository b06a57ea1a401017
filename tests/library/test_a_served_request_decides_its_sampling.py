"""A server of trained adapters honours what a request says about sampling, on both of the engines that it uses, and serves saved models."""

import asyncio
import functools
import json
import shutil
from dataclasses import replace

import httpx
import pytest
import torch
from datasets import Dataset
from openai import AsyncOpenAI, BadRequestError, InternalServerError
from peft import LoraConfig, get_peft_model
from toy_qwen3 import save_toy_base, toy_tokenizer
from transformers import AutoModelForCausalLM, GPT2Config

from multirole import MultiRoleGRPOConfig, MultiRoleGRPOTrainer, Voting, serve
from multirole.chat.templates import chat_template
from multirole.engines.generate import GenerateEngine
from multirole.engines.protocol import Request, Sampling
from multirole.engines.sampling import nucleus
from multirole.openai_api.serving import ModelServer
from multirole.saving.layout import SERVING
from multirole.serve import base_alone, load_server, read_saved
from multirole_cpu.engine import TransformersEngine

ASK = {"model": "solver", "messages": [{"role": "user", "content": "Compute left to right: 7+5*2"}]}
ENGINES = (TransformersEngine, GenerateEngine)


@pytest.fixture(params=ENGINES, ids=lambda engine: engine.__name__)
def server(request, tokenizer, make_model) -> ModelServer:
    engine = request.param(tokenizer.eos_token_id, max_length=200)
    engine.publish(make_model({"solver": "shared"}), 0)
    return ModelServer(engine, tokenizer, {"solver": "shared"}, Sampling(16, 1.0), max_prompt_tokens=100)


def ask(server: ModelServer, *requests: dict) -> list:
    """Send requests together, each as the fields that differ from `ASK`; return the completions."""

    async def send_all():
        transport = httpx.ASGITransport(server.app())
        async with AsyncOpenAI(
            base_url="http://h/v1", api_key="any", max_retries=0, http_client=httpx.AsyncClient(transport=transport)
        ) as client:
            pending = [asyncio.ensure_future(client.chat.completions.create(**ASK | fields)) for fields in requests]
            while not all(task.done() for task in pending):
                await asyncio.sleep(0)
                server._advance()
            return await asyncio.gather(*pending)

    return asyncio.run(send_all())


def texts(completion) -> list[str]:
    return [choice.message.content for choice in completion.choices]


def scores(completion) -> list[float]:
    return [token.logprob for token in completion.choices[0].logprobs.content]


def forward_logprobs(server: ModelServer, model, ids: list[int], temperature: float = 1.0) -> torch.Tensor:
    """Log-probs (T, V) of every token after the prompt, by one forward pass."""
    prompt = server.render(server.tokenizer, ASK["messages"])
    with torch.no_grad():
        logits = model(torch.tensor([prompt + ids])).logits[0, len(prompt) - 1 : -1]
    return (logits / temperature).log_softmax(-1)


def sampled(server: ModelServer, **fields) -> tuple:
    """Send one request; return its completion, with log-probs, and the token ids of its reply."""
    turns, call = [], server._call

    async def noted(*args, **kwargs):
        turns.append(await call(*args, **kwargs))
        return turns[-1]

    server._call = noted
    (completion,) = ask(server, fields | {"logprobs": True})
    server._call = call
    return completion, turns[0].completion_ids


def test_temperature_zero_takes_the_likeliest_token_and_logprobs_are_the_models(server, make_model):
    greedy, ids = sampled(server, temperature=0)
    tiny, again = ask(server, {"temperature": 1e-6}, {"temperature": 0.0, "top_p": 0.3, "seed": 4})
    assert texts(greedy) == texts(tiny) == texts(again)
    expected = forward_logprobs(server, make_model({"solver": "shared"}), ids)
    assert expected.argmax(-1).tolist() == ids
    assert scores(greedy) == pytest.approx(expected.max(-1).values.tolist(), abs=1e-4)
    assert greedy.usage.completion_tokens == len(ids) and greedy.choices[0].logprobs.content[0].top_logprobs == []


def test_the_temperature_of_a_request_and_else_that_of_training_is_used(server, make_model):
    server.sampling = Sampling(16, 0.7)
    for fields, temperature in (({"temperature": 1.8}, 1.8), ({}, 0.7)):
        completion, ids = sampled(server, **fields)
        expected = forward_logprobs(server, make_model({"solver": "shared"}), ids, temperature)
        assert scores(completion) == pytest.approx(
            [row[i].item() for row, i in zip(expected, ids, strict=True)], abs=1e-4
        )


def test_a_seed_gives_the_same_replies_and_no_seed_gives_others(server):
    seeded = {"temperature": 1.5, "seed": 11, "n": 3}
    first, second, other, unseeded, later = ask(server, seeded, seeded, seeded | {"seed": 12}, {"n": 3}, {"n": 3})
    assert texts(first) == texts(second) and [choice.index for choice in first.choices] == [0, 1, 2]
    groups = [texts(completion) for completion in (first, other, unseeded, later)]
    assert len({text for group in groups for text in group}) == 12


def test_n_replies_are_one_completion_in_a_stream_too(server):
    (whole,) = ask(server, {"n": 2, "seed": 3})
    one, two = ask(server, {"seed": 3}, {"n": 2, "seed": 3, "logprobs": True})
    assert texts(one) == texts(whole)[:1] and texts(two) == texts(whole)
    assert two.usage.completion_tokens == sum(len(choice.logprobs.content) for choice in two.choices)

    async def stream():
        transport = httpx.ASGITransport(server.app())
        async with httpx.AsyncClient(transport=transport, base_url="http://h") as client:
            body = ASK | {"n": 2, "seed": 3, "stream": True}
            pending = asyncio.ensure_future(client.post("/v1/chat/completions", json=body))
            while not pending.done():
                await asyncio.sleep(0)
                server._advance()
            return [json.loads(line[6:]) for line in (await pending).text.splitlines() if line.startswith("data: {")]

    parts = [choice for chunk in asyncio.run(stream()) for choice in chunk["choices"]]
    streamed = ["".join(part["delta"].get("content", "") for part in parts if part["index"] == i) for i in range(2)]
    assert streamed == texts(whole) and sum(part["finish_reason"] is not None for part in parts) == 2


@pytest.mark.parametrize("server", [TransformersEngine], indirect=True)
def test_a_response_is_sampled_as_a_completion_is(server):
    """pydantic-ai's and the Agents SDK's default is `/v1/responses`."""
    (greedy,) = ask(server, {"temperature": 0})
    fields = {"model": "solver", "input": ASK["messages"][0]["content"]}

    async def send():
        transport = httpx.ASGITransport(server.app())
        async with httpx.AsyncClient(transport=transport, base_url="http://h") as client:
            bodies = [fields | {"temperature": 0}, fields | {"temperature": 3}, fields | {"n": 2}]
            pending = [asyncio.ensure_future(client.post("/v1/responses", json=body)) for body in bodies]
            while not all(task.done() for task in pending):
                await asyncio.sleep(0)
                server._advance()
            return await asyncio.gather(*pending)

    done, *refused = asyncio.run(send())
    assert done.json()["output"][0]["content"][0]["text"] == texts(greedy)[0]
    assert [answer.status_code for answer in refused] == [400, 400]


def test_a_reply_ends_before_a_stop_text_and_no_later_token_is_sampled(server):
    replies = ask(server, *({"seed": seed, "temperature": 1.2} for seed in range(100)))
    seed, free = next(  # a byte of another character is no text by itself
        (seed, reply)
        for seed, reply in enumerate(replies)
        if len(texts(reply)[0]) >= 4 and texts(reply)[0][:4].isascii()
    )
    text = texts(free)[0]
    stop = text[2:4]
    stopped, either, never = ask(
        server,
        *(
            {"seed": seed, "temperature": 1.2, "stop": one, "logprobs": True}
            for one in (stop, ["never", stop], "never")
        ),
    )
    for completion in (stopped, either):
        assert texts(completion) == [text[: text.find(stop)]] and completion.choices[0].finish_reason == "stop"
        tokens = [token.token for token in completion.choices[0].logprobs.content]
        assert stop in "".join(tokens) and stop not in "".join(tokens[:-1])
        assert completion.usage.completion_tokens == len(tokens)
    assert texts(never) == [text] and never.choices[0].finish_reason == free.choices[0].finish_reason


def test_an_engine_that_does_not_stop_by_itself_gives_the_same_reply(server, monkeypatch):
    (free,) = ask(server, {"seed": 8})
    fields = {"seed": 8, "stop": texts(free)[0][1:3], "logprobs": True}
    (stopped,) = ask(server, fields)
    add = server.engine.add
    monkeypatch.setattr(
        server.engine,
        "add",
        lambda key, r: add(key, Request(r.prompt_ids, r.adapter, r.seed, r.max_tokens, r.temperature)),
    )
    (cut,) = ask(server, fields)
    assert cut.choices == stopped.choices


def test_top_p_samples_from_the_likeliest_tokens_alone(server, make_model):
    (greedy,) = ask(server, {"temperature": 0})
    narrow, none, wide = ask(server, *({"top_p": p, "seed": 2, "temperature": 1.7} for p in (1e-9, 0, 1)))
    assert texts(narrow) == texts(none) == texts(greedy) and texts(wide) == texts(
        ask(server, {"seed": 2, "temperature": 1.7})[0]
    )
    first = forward_logprobs(server, make_model({"solver": "shared"}), [0]).exp()[0]
    ordered = first.sort(descending=True)
    n = int((ordered.values.cumsum(0) < 0.1).sum()) + 1
    seen = [sampled(server, top_p=0.1, seed=seed, max_tokens=1) for seed in range(12)]
    assert {ids[0] for _, ids in seen} <= set(ordered.indices[:n].tolist()) and len({ids[0] for _, ids in seen}) > 1
    for completion, (token, *_) in seen:  # renormalised: of the distribution that was sampled from
        assert scores(completion) == pytest.approx([(first[token] / ordered.values[:n].sum()).log().item()], abs=1e-4)


def test_the_nucleus_is_the_fewest_tokens_that_reach_top_p():
    logits = torch.tensor([[0.5, 0.3, 0.15, 0.05]]).log().repeat(5, 1)
    kept = nucleus(logits, torch.tensor([0.5, 0.51, 0.8, 1.0, 0.0])).isfinite().sum(-1)
    assert kept.tolist() == [1, 2, 2, 4, 1] or kept.tolist() == [
        1,
        2,
        3,
        4,
        1,
    ]  # 0.5 + 0.3 rounds to either side of 0.8


WRONG = [
    ({"temperature": -0.1}, "`temperature` must be a number from 0 to 2"), ({"temperature": "0"}, "`temperature`"), ({"temperature": True}, "`temperature`"),
    ({"top_p": 1.1}, "`top_p` must be a number from 0 to 1"), ({"seed": 1.5}, "`seed` must be an integer"), ({"seed": True}, "`seed`"),
    ({"n": 0}, "`n` must be an integer from 1 to 128"), ({"n": 129}, "`n`"), ({"n": True}, "`n`"), ({"stop": ""}, "`stop` must be a text"),
    ({"stop": ["a", 1]}, "`stop`"), ({"stop": {"a": 1}}, "`stop`"), ({"logprobs": 3}, "`logprobs` must be true or false"),
    ({"logprobs": True, "top_logprobs": 2}, "`top_logprobs=2` is refused: the server keeps"), ({"logit_bias": {"5": 1}}, "the model's own distribution"),
    ({"presence_penalty": 0.5}, "the model's own distribution"), ({"response_format": {"type": "json_object"}}, "does not constrain replies"),
    ({"tool_choice": "required"}, "the model decides"),
]  # fmt: skip


@pytest.mark.parametrize("server", [TransformersEngine], indirect=True)
def test_what_cannot_be_honoured_is_refused_with_a_servers_reason(server):
    for fields, message in WRONG:
        with pytest.raises(BadRequestError, match="(?s)" + message) as error:
            ask(server, fields)
        assert "trainer" not in str(error.value) and "the loss" not in str(error.value), fields
    for render in (chat_template, functools.partial(chat_template, enable_thinking=True), len):
        server.render = render
        for thinking in (False, True):
            body = {"chat_template_kwargs": {"enable_thinking": thinking}}
            if render is not len and thinking == isinstance(render, functools.partial):
                ask(server, {"extra_body": body})
                continue
            with pytest.raises(BadRequestError, match="prompts are rendered as in training"):
                ask(server, {"extra_body": body})
    server.render = chat_template
    server.ignore = ("temperature", "logprobs")
    (ignoring,) = ask(server, {"temperature": "hot", "logprobs": True})
    assert ignoring.choices[0].logprobs is None
    nulls = dict.fromkeys(("temperature", "top_p", "seed", "stop", "n", "logprobs"))
    assert ask(server, nulls | {"stop": []})[0].choices[0].finish_reason in ("stop", "length")


# ---- what `save_model` wrote


@pytest.fixture(scope="module")
def saved(tmp_path_factory):
    """(folder, trainer): the output of a run of one iteration, with `model`, which `save_model` wrote, and the base."""
    folder, tokenizer = tmp_path_factory.mktemp("saved"), toy_tokenizer()
    base = save_toy_base(folder / "base", tokenizer, 1024)
    args = MultiRoleGRPOConfig(
        str(folder / "out"), report_to="none", bf16=False, use_cpu=True, max_steps=1, save_steps=1, policy="generator=a,aggregator=b",
        temperature=0.8, max_prompt_tokens=900, max_completion_length=8, num_generations=2, generation_batch_size=2,
    )  # fmt: skip
    trainer = MultiRoleGRPOTrainer(
        base, Voting(prompts="general"), lambda completions, **_: [0.0, 1.0], args, Dataset.from_dict({"prompt": ["1+1"]}),
        peft_config=LoraConfig(r=4, target_modules="all-linear", task_type="CAUSAL_LM", init_lora_weights=False),
    )  # fmt: skip
    trainer.train()
    trainer.save_model(str(folder / "model"))
    return folder, trainer


def greedy_reply(trainer, adapter: str) -> list[int]:
    tokenizer, model = trainer._tokenizer, trainer.peft_model
    model.set_adapter(adapter)
    model.eval()
    ids = tokenizer.apply_chat_template(
        ASK["messages"], add_generation_prompt=True, enable_thinking=False, return_dict=False
    )
    reply: list[int] = []
    with torch.no_grad():
        while len(reply) < 8 and reply[-1:] != [tokenizer.eos_token_id]:
            reply.append(int(model(torch.tensor([ids + reply])).logits[0, -1].argmax()))
    return reply


@pytest.mark.parametrize("place", ["model", "out/checkpoint-1"])
def test_each_role_of_a_saved_model_is_served_as_it_was_trained(saved, place):
    folder, trainer = saved
    server = load_server(read_saved(folder / place))
    assert isinstance(server.engine, TransformersEngine) and server.policy == {
        "generator": "adapter_a",
        "aggregator": "adapter_b",
    }
    assert (server.sampling, server.max_prompt_tokens) == (Sampling(8, 0.8), 900)
    replies = ask(server, *({"model": role, "temperature": 0, "logprobs": True} for role in server.policy))
    expected = [greedy_reply(trainer, adapter) for adapter in server.policy.values()]
    assert expected[0] != expected[1]
    for reply, ids in zip(replies, expected, strict=True):
        assert texts(reply) == [trainer._tokenizer.decode(ids, skip_special_tokens=True)]


def test_adapters_without_a_record_are_served_under_their_names(saved, tmp_path):
    folder, trainer = saved
    checkpoint = shutil.copytree(folder / "out" / "checkpoint-1", tmp_path / "checkpoint")
    (checkpoint / SERVING).unlink()
    assert read_saved(checkpoint).policy == trainer.policy  # a checkpoint tells it a second time
    (checkpoint / "trainer_state.json").unlink()
    assert read_saved(checkpoint).policy == {"adapter_a": "adapter_a", "adapter_b": "adapter_b"}
    one = read_saved(checkpoint / "adapter_a")
    assert (
        one.policy == {"default": "default"}
        and one.folders == {"default": checkpoint / "adapter_a"}
        and one.base == str(folder / "base")
    )


def test_the_revision_of_the_base_is_saved_and_served(saved, tmp_path, monkeypatch):
    folder, trainer = saved
    assert read_saved(folder / "model").revision is None  # of a folder
    monkeypatch.setattr(trainer, "model_options", {"revision": "025f7769"})
    trainer.save_model(str(tmp_path))
    assert read_saved(tmp_path).revision == "025f7769" and read_saved(tmp_path, "another base").revision is None
    (at := tmp_path / "toy@home").mkdir()
    for named, base, revision in (
        ("toy/base@1a2b", "toy/base", "1a2b"),
        ("toy/base", "toy/base", None),
        (str(at), str(at), None),
    ):
        for roles in (read_saved(tmp_path, named), base_alone(named)):
            assert (roles.base, roles.revision) == (base, revision)


def test_a_base_alone_is_served(saved, tokenizer):
    """Without adapters, under the name "base"; it may play a role of a run on another base."""
    folder, _ = saved
    server = load_server(base_alone(str(folder / "base")))
    assert server.policy == {"base": None}
    (reply,) = ask(server, {"model": "base", "temperature": 0, "logprobs": True, "max_tokens": 4})
    model = AutoModelForCausalLM.from_pretrained(folder / "base", dtype=torch.float32)
    likeliest = forward_logprobs(server, model, [0])[0].max().item()
    assert scores(reply)[0] == pytest.approx(likeliest, abs=1e-4)
    with pytest.raises(ValueError, match="There is nothing to serve"):
        base_alone(None)


def edited(folder, target, **facts):
    shutil.copytree(folder / "model", target)
    (target / SERVING).write_text(json.dumps(json.loads((target / SERVING).read_text()) | facts))
    return target


def test_what_cannot_be_served_is_refused_before_a_model_is_loaded(saved, tmp_path):
    folder, _ = saved
    with pytest.raises(ValueError, match=r"out holds no adapters: .*Serve .*checkpoint-1\."):
        read_saved(folder / "out")
    with pytest.raises(ValueError, match="there is no such folder"):
        read_saved(folder / "misspelt")
    # a folder that came from elsewhere cannot name files outside of itself
    for adapter in ("../model/adapter_a", "/etc", "adapter_c", ".."):
        with pytest.raises(ValueError, match="maps roles to the adapters .* and holds"):
            read_saved(edited(folder, tmp_path / f"m{abs(hash(adapter))}", policy={"generator": adapter}))
    own = edited(folder, tmp_path / "own", has_own_render=True)
    with pytest.raises(ValueError, match=r"a `render` of its own.*read_saved\(folder, render=\.\.\.\)"):
        read_saved(own)
    assert read_saved(own, render=len).render is len
    with pytest.raises(ValueError, match=r"base model '.*nowhere' cannot be loaded(?s:.*)`--model`"):
        load_server(read_saved(folder / "model", str(tmp_path / "nowhere")))
    other = save_toy_base(tmp_path / "other", toy_tokenizer(), 1024, hidden_size=48)
    with pytest.raises(ValueError, match="adapter_a does not fit the base model"):
        load_server(read_saved(folder / "model", other))


def test_a_base_that_the_quick_engine_does_not_know_is_served_by_generate(saved, tmp_path):
    base = AutoModelForCausalLM.from_config(GPT2Config(vocab_size=300, n_embd=16, n_layer=1, n_head=2, n_positions=64))
    base.save_pretrained(tmp_path / "gpt2")
    model = get_peft_model(
        base,
        LoraConfig(r=2, target_modules=["c_attn"], fan_in_fan_out=True, task_type="CAUSAL_LM"),
        adapter_name="adapter_a",
    )
    model.save_pretrained(tmp_path / "model")
    toy_tokenizer().save_pretrained(tmp_path / "model")
    server = load_server(
        replace(read_saved(tmp_path / "model", str(tmp_path / "gpt2")), sampling=Sampling(4, 1.0), max_prompt_tokens=60)
    )
    assert isinstance(server.engine, GenerateEngine)
    (reply,) = ask(
        server,
        {"model": "adapter_a", "messages": [{"role": "user", "content": "1"}], "temperature": 0, "logprobs": True},
    )
    assert 1 <= len(reply.choices[0].logprobs.content) <= 4


def test_a_conversation_beyond_the_bases_context_is_refused_and_a_reply_ends_there(tmp_path):
    """GPT-2 has learned positions, and no others."""
    base = AutoModelForCausalLM.from_config(
        GPT2Config(vocab_size=300, n_embd=16, n_layer=1, n_head=2, n_positions=64, bos_token_id=None, eos_token_id=299)
    )
    base.save_pretrained(tmp_path)
    toy_tokenizer().save_pretrained(tmp_path)
    server = load_server(base_alone(str(tmp_path)))
    with pytest.raises(BadRequestError, match="63 at most") as refused:
        ask(server, {"model": "base", "messages": [{"role": "user", "content": "x" * 100}]})
    assert refused.value.code == "context_length_exceeded"
    (reply,) = ask(server, {"model": "base", "messages": [{"role": "user", "content": "1"}], "seed": 1, "stop": None})
    assert reply.usage.total_tokens <= 64


def test_an_error_of_the_engine_is_answered_and_the_next_request_is_served(server, monkeypatch):
    with monkeypatch.context() as broken:
        broken.setattr(server.engine, "step", lambda: 1 / 0)
        with pytest.raises((InternalServerError, ZeroDivisionError)):
            ask(server, {})
    assert server._waiting == {}


def test_a_base_with_code_of_its_own_is_loaded_where_that_is_asked_for(saved, monkeypatch):
    folder, _ = saved
    seen, load = [], AutoModelForCausalLM.from_pretrained
    monkeypatch.setattr(
        serve.AutoModelForCausalLM,
        "from_pretrained",
        lambda *a, **options: seen.append(options["trust_remote_code"]) or load(*a, **options),
    )
    for trust in (False, True):
        load_server(base_alone(str(folder / "base")), trust_remote_code=trust)
    assert seen == [False, True]
