"""Roles that are played and not trained: the base, a saved adapter, past selves of an adapter, and models behind a server.

No token of a partner is trained, no tensor of one moves, and the weights that play it are those that the map names.
"""

import asyncio
import json
import re
from dataclasses import replace
from pathlib import Path
from types import SimpleNamespace

import pytest
import torch
from chat_tokenizers import FAMILIES
from datasets import Dataset
from json_server import JsonServer
from peft import LoraConfig, PeftModel, get_peft_model
from scripted_engine import ScriptedEngine
from toy_qwen3 import toy_base, toy_tokenizer
from trainers import slow_but
from transformers import AutoModelForCausalLM

from multirole import MultiRoleCallback, MultiRoleGRPOConfig, MultiRoleGRPOTrainer, RoleValue
from multirole.engines import endpoint
from multirole.engines.endpoint import Endpoint, Reply, ReplyRecord, WithEndpoints
from multirole.engines.protocol import EngineError, Request, RequestRefused, Sampling
from multirole.inputs.adapters import add_adapters
from multirole.policy import adapter_names, frozen_name, parse_policy
from multirole.rollout.past_selves import versions_at
from multirole.rollout.rollout import Rollout
from multirole.types import Answer, Problem, user
from multirole.update.rows import Row

LORA = LoraConfig(r=4, lora_alpha=8, target_modules="all-linear", task_type="CAUSAL_LM", init_lora_weights=False)


class Talk:
    """Every role of a map says something, one after the other."""

    name = "talk"

    def __init__(self, *roles):
        self.roles = dict.fromkeys(roles, 1)

    async def run(self, problem, call):
        text = problem.question
        for role in self.roles:
            text = (await call(role, [user(f"{role} {text[:20]}")])).text
        return Answer(text)


def by_tokens(episodes, **_):
    return [sum(sum(turn.completion_ids) for turn in episode.turns) % 7 for episode in episodes]


class Watch(MultiRoleCallback):
    """Keeps what was trained, and the weights after each iteration."""

    def __init__(self):
        self.rows, self.episodes, self.weights = [], [], {}

    def on_update_begin(self, trainer, rows, steps):
        self.rows += rows

    def on_rollout_end(self, trainer, episodes):
        self.episodes.append(episodes)

    def on_iteration_end(self, trainer, iteration):
        self.weights[iteration.number] = lora_of(trainer)


def lora_of(trainer) -> dict[str, torch.Tensor]:
    return {name: p.detach().clone() for name, p in trainer.peft_model.named_parameters() if "lora_" in name}


def of_adapter(weights, name) -> dict[str, torch.Tensor]:
    return {key.replace(f".{name}.", "."): value for key, value in weights.items() if f".{name}." in key}


@pytest.fixture(scope="module")
def saved(tmp_path_factory) -> Path:
    """The folder of an adapter that changes the toy base."""
    torch.manual_seed(5)
    folder = tmp_path_factory.mktemp("saved")
    add_adapters(AutoModelForCausalLM.from_pretrained(toy_base()), LORA, ["adapter_judge"]).save_pretrained(folder)
    return folder / "adapter_judge"


@pytest.fixture
def train(tmp_path):
    """train(policy, resume=None, **config) -> the trainer and what it trained; by default two iterations of two problems."""

    def make(policy, resume=None, train=True, model=None, callbacks=(), **config):
        usual = {
            "generation_batch_size": 8, "num_generations": 4, "max_prompt_tokens": 200, "max_completion_length": 12, "max_steps": 2, "save_steps": 1,
            "learning_rate": 1e-2,
            "logging_steps": 1, "report_to": "none", "use_cpu": True, "bf16": False, "disable_tqdm": True, "lr_scheduler_type": "constant",
        }  # fmt: skip
        watch = Watch()
        trainer = MultiRoleGRPOTrainer(
            model or toy_base(), Talk(*policy), by_tokens, MultiRoleGRPOConfig(str(tmp_path / "out"), policy=policy, **usual | config),
            Dataset.from_dict({"prompt": [f"question {i}" for i in range(8)]}), peft_config=None if model else LORA, callbacks=[watch, *callbacks],
            processing_class=toy_tokenizer(),
        )  # fmt: skip
        if train:
            trainer.train(resume_from_checkpoint=resume)
        return trainer, watch

    return make


@pytest.mark.parametrize("engine", slow_but(["transformers"], ["transformers", "generate", "vllm"]))
def test_no_token_of_a_partner_is_trained_and_no_frozen_tensor_moves(train, saved, engine):
    """The engine's log-probs say who played: the base without an adapter, the saved adapter, and the trained one."""
    if engine == "vllm":
        pytest.importorskip("vllm")
    policy = {"base": "frozen", "judge": f"frozen:{saved}", "solver": "a"}
    trainer, watch = train(policy, engine=engine)
    assert {(row.turn.role, row.adapter) for row in watch.rows} == {("solver", "adapter_a")} and len(watch.rows) == 16
    assert trainer.adapters == ["adapter_a"]
    assert {p for group in trainer.optimizer.param_groups for p in group["params"]} == {
        p for name, p in trainer.peft_model.named_parameters() if ".adapter_a." in name
    }
    judge = frozen_name(policy["judge"])
    loaded = of_adapter(
        {
            n: p
            for n, p in PeftModel.from_pretrained(
                AutoModelForCausalLM.from_pretrained(toy_base()), saved
            ).named_parameters()
        },
        "default",
    )
    for after in watch.weights.values():
        assert all(torch.equal(after_part, loaded[key]) for key, after_part in of_adapter(after, judge).items())
    moved = [of_adapter(watch.weights[i], "adapter_a") for i in (1, 2)]
    assert any(not torch.equal(moved[0][key], moved[1][key]) for key in moved[0])

    trainer.create_optimizer()  # `train_only`, as in training
    turns = [turn for episode in watch.episodes[1] for turn in episode.turns]
    tolerance = 1e-4
    for role, adapter, is_base in (("base", "adapter_a", True), ("judge", judge, False)):
        rows = [Row(watch.episodes[1][0], turn, adapter) for turn in turns if turn.role == role]
        assert len(rows) == 8 and {row.turn.version for row in rows} == {None}
        for row, logps in zip(rows, trainer.logprobs_of(rows, base=is_base), strict=True):
            assert row.turn.logprobs == pytest.approx(logps.tolist(), abs=tolerance)
    line = trainer.state.log_history[0]
    assert line["solver/rows"] == line["base/turns"] == line["judge/turns"] == 8
    assert "base/rows" not in line and "base/advantage_abs" not in line and "billed_prompt_tokens" not in line
    trainer.engine.close()


def test_a_run_with_partners_resumes_as_an_uninterrupted_one(train, saved):
    """Frozen adapters and past selves are in the checkpoint, and an episode draws the same past self again."""
    policy = {"solver": "a", "judge": f"frozen:{saved}", "opponent": "past:a"}
    options = {"past_every": 1, "past_selves": 2, "max_steps": 4}
    whole, watch = train(policy, **options)
    names = [f"adapter_a_past_{i}" for i in range(2)]
    for number, weights in watch.weights.items():
        versions = versions_at(number, 1, 2)
        for name, version in zip(names, versions, strict=False):
            if version:
                past, then = of_adapter(weights, name), of_adapter(watch.weights[version], "adapter_a")
                assert all(torch.equal(past[key], then[key]) for key in then)
    drawn = [{t.version for e in episodes for t in e.turns if t.role == "opponent"} for episodes in watch.episodes]
    assert drawn[0] == {0} and drawn[1] <= {0, 1} and drawn[2] <= {2, 1} and drawn[3] <= {2, 3}
    assert max(map(len, drawn)) == 2
    resumed, again = train(policy, resume=f"{whole.args.output_dir}/checkpoint-2", **options)
    for name, value in lora_of(whole).items():
        assert torch.equal(lora_of(resumed)[name], value), name
    assert [[t.text for e in i for t in e.turns] for i in again.episodes] == [
        [t.text for e in i for t in e.turns] for i in watch.episodes[2:]
    ]
    with pytest.raises(
        ValueError, match=r"has past selves by `past_every` and `past_selves` \[1, 2\], but this run has \[1, 3\]"
    ):
        train(policy, resume=f"{whole.args.output_dir}/checkpoint-2", **options | {"past_selves": 3})


def test_an_adapter_of_the_users_resumes_beside_partners(train, saved):
    """PEFT writes the adapter "default" into the checkpoint itself, and the partners' beside it, where transformers looks first."""
    policy = {"solver": "a", "judge": f"frozen:{saved}", "opponent": "past:a"}

    def trained(resume=None):
        torch.manual_seed(0)
        model = get_peft_model(AutoModelForCausalLM.from_pretrained(toy_base()), LORA)
        return train(policy, resume=resume, model=model, max_steps=4)[0]

    whole = trained()
    resumed = trained(f"{whole.args.output_dir}/checkpoint-2")
    assert whole.adapters == ["default"]
    for name, value in lora_of(whole).items():
        assert torch.equal(lora_of(resumed)[name], value), name


def test_a_second_run_begins_with_its_own_past_selves(train):
    trainer, watch = train({"solver": "a", "opponent": "past:a"}, past_every=1, past_selves=2, max_steps=3)
    start = of_adapter(lora_of(trainer), "adapter_a")
    trainer.train()
    first = of_adapter(watch.weights[1], "adapter_a_past_0")
    assert all(torch.equal(first[key], value) for key, value in start.items())
    assert any(not torch.equal(of_adapter(watch.weights[1], "adapter_a_past_1")[key], start[key]) for key in start)


def test_past_selves_of_the_best_checkpoint_play_after_it_was_loaded(train):
    trainer, _ = train({"solver": "a", "opponent": "past:a"}, past_every=1, past_selves=3, max_steps=3)
    assert sorted(trainer.partners.past.versions(3).values()) == [1, 2, 3]
    trainer.state.best_model_checkpoint = f"{trainer.args.output_dir}/checkpoint-1"
    trainer._load_best_model()
    assert sorted(trainer.partners.past.versions(3).values()) == [0, 1]
    assert [len(names) for names in trainer.partners.past.playing(3).values()] == [2]


def test_a_checkpoint_with_a_saved_adapter_says_why_it_does_not_fit(train, saved):
    """The policy map may be the same: a teacher's adapter is in the checkpoint, too."""
    whole, _ = train({"solver": "a"}, teacher={"solver": f"frozen:{saved}"})
    with pytest.raises(ValueError, match="Resume with the same `policy` and `teacher`"):
        train({"solver": "a"}, resume=f"{whole.args.output_dir}/checkpoint-1")


def test_callbacks_of_the_user_are_restored_beside_the_trainers(train):
    """`restore_callback_states_from_checkpoint` makes callbacks anew. The trainer's own stay the objects that it counts with."""
    policy = {"solver": "a", "judge": "frozen"}
    options = {"max_sampled_tokens": 10**6, "restore_callback_states_from_checkpoint": True, "max_steps": 4}
    whole, _ = train(policy, **options)
    resumed, _ = train(policy, resume=f"{whole.args.output_dir}/checkpoint-2", **options)
    assert resumed.budget.spent == whole.budget.spent and resumed.budget in resumed.callback_handler.callbacks
    assert resumed.run_state in resumed.callback_handler.callbacks


def test_which_past_selves_there_are_follows_from_the_iteration():
    assert [versions_at(i, 5, 3) for i in (0, 4, 5, 11, 15, 21)] == [
        [0],
        [0],
        [0, 5],
        [0, 5, 10],
        [15, 5, 10],
        [15, 20, 10],
    ]
    assert versions_at(7, 3, 1) == [6]


# ---- models behind a server


class Server(JsonServer):
    """An OpenAI-compatible server that never says the same twice, and may refuse."""

    status = 200

    def refusal(self, text):
        """Return the error of a request, or None."""

    def get(self):
        return self.status if self.status in (401, 403) else 200, {"data": []}

    def post(self, body, headers):
        self.asked.append(body | {"key": headers["authorization"]})
        if (error := self.refusal(body["messages"][0]["content"])) is not None:
            return 400, {"error": error}
        message = {"role": "assistant", "content": f"<think>hm</think>{len(self.asked)}"}
        reply = {
            "id": "x", "object": "chat.completion", "created": 0, "model": body["model"],
            "choices": [{"index": 0, "finish_reason": "stop", "message": message}],
            "usage": {"prompt_tokens": 11, "completion_tokens": 3, "total_tokens": 14},
        }  # fmt: skip
        return self.status, reply if self.status == 200 else {"error": {"message": "no"}}


@pytest.fixture
def server():
    pytest.importorskip("openai")
    server = Server()
    yield server
    server.close()


def test_the_replies_of_an_endpoint_are_recorded_and_replayed(train, server, monkeypatch):
    """The server counts its replies, so a run that asked again would differ from the uninterrupted one."""
    monkeypatch.setenv("A_KEY", "secret")
    policy = {"solver": "a", "critic": {"url": server.url, "model": "large", "key_env": "A_KEY"}, "closer": "a"}
    whole, watch = train(policy)
    assert {row.turn.role for row in watch.rows} == {"solver", "closer"}
    n_asked = len(server.asked)
    assert n_asked == 16
    request = server.asked[0]
    assert (request["model"], request["max_tokens"], request["key"]) == ("large", 12, "Bearer secret")
    assert request["messages"][0]["content"].startswith("critic ") and isinstance(request["seed"], int)
    turns = [turn for episode in watch.episodes[0] for turn in episode.turns if turn.role == "critic"]
    assert {turn.text for turn in turns} == {str(i) for i in range(1, 9)} and turns[0].billed == (11, 3)
    line = whole.state.log_history[0]
    assert (line["critic/turns"], line["critic/billed_prompt_tokens"], line["critic/billed_completion_tokens"]) == (
        8,
        88,
        24,
    )
    written = "".join(
        file.read_text() for file in Path(whole.args.output_dir).rglob("*") if file.suffix in (".json", ".jsonl", ".md")
    )
    assert (
        "secret" not in written
        and "127.0.0.1" not in (Path(whole.args.output_dir) / "checkpoint-2" / "README.md").read_text()
    )

    resumed, again = train(policy, resume=f"{whole.args.output_dir}/checkpoint-1")
    assert len(server.asked) == n_asked  # nothing was asked again
    for name, value in lora_of(whole).items():
        assert torch.equal(lora_of(resumed)[name], value), name
    assert [t.text for e in again.episodes[0] for t in e.turns] == [t.text for e in watch.episodes[1] for t in e.turns]
    train(policy, max_steps=1)
    assert len(server.asked) == n_asked + 8  # a new run in the same folder asks anew
    whole.state.global_step = 1  # whose weights played these episodes
    with pytest.raises(
        ValueError,
        match=r"A fork replays episodes, and the endpoints that play \['critic'\] would have to be asked again",
    ):
        from multirole.rollout.forks import fork

        fork(whole, watch.episodes[1][0], "solver", iteration=1)


@pytest.mark.parametrize(
    ("status", "message"), [(500, "gave no reply to a request to 'large'"), (400, "refuses a request to 'large': ")]
)
def test_a_lost_reply_ends_the_run_and_is_no_reward(train, server, monkeypatch, status, message):
    monkeypatch.setattr(endpoint, "RETRIES", 0)
    trainer, watch = train({"solver": "a", "critic": {"url": server.url, "model": "large"}}, train=False)
    server.status = status
    with pytest.raises((EngineError, RuntimeError), match=message):
        trainer.train()
    assert not watch.episodes and not watch.rows
    server.status = 200
    trainer.train()  # the failed requests are forgotten
    assert len(watch.rows) == 16


def test_a_record_that_ends_in_half_a_line_is_continued_without_reading_all_of_it(tmp_path, monkeypatch):
    made = [ReplyRecord(tmp_path / "replies", 0, str) for _ in range(3)]
    reply = Reply("é", "stop", 1, 1)
    made[0].add("a", reply)
    with made[0].file.open("a") as file:
        file.write('{"key": "b", "te')
    made[1].find("a")
    monkeypatch.setattr(Path, "read_bytes", None)
    for key in ("c", "d"):
        made[1].add(key, reply)
    assert [made[2].find(key) for key in "abcd"] == [reply, None, reply, reply]
    assert len(made[2].file.read_text().splitlines()) == 4


def test_an_engine_that_failed_leaves_nothing_to_wait_for():
    class Fails(ScriptedEngine):
        def step(self):
            raise EngineError("lost")

    recorded = SimpleNamespace(key=str, find=lambda key: Reply("yes", "stop", 1, 1))
    engine, request = WithEndpoints(Fails(lambda key, request: ([5], 1), 0), recorded), Request([5], None, 0, 1, 1.0)
    remote = replace(request, endpoint=endpoint.Endpoint("http://h/v1", "m"))
    engine.add(0, request)
    engine.add(1, remote)
    with pytest.raises(EngineError, match="lost"):
        engine.step()
    engine.add(2, remote)
    assert [key for key, _ in engine.step()] == [2]
    engine.close()


@pytest.mark.parametrize(
    "error",
    [
        {"message": "no", "code": "context_length_exceeded"},
        {"message": "This model's maximum context length is 9 tokens.", "code": 400},
        {"message": "no", "code": 400, "type": "exceed_context_size_error"},
    ],
    ids=["OpenAI", "vLLM", "llama.cpp"],
)
def test_a_conversation_that_is_too_long_for_a_server_ends_its_episode_alone(train, server, error):
    """Also in a run that is resumed, which does not ask again."""
    policy, longest = {"critic": {"url": server.url, "model": "large"}, "solver": "a"}, ("1", "3", "5", "7")
    server.refusal = lambda text: error if text.endswith(longest) else None
    trainer, watch = train(policy)
    episodes = [episode for played in watch.episodes for episode in played]
    ended = {episode.problem.question[-1]: (episode.answer.reason, len(episode.turns)) for episode in episodes}
    assert (
        ended == {n: ("prompt_overflow", 0) if n in longest else (None, 2) for n in ended}
        and len(set(ended.values())) == 2
    )
    n_asked = len(server.asked)
    _, again = train(policy, resume=f"{trainer.args.output_dir}/checkpoint-1")
    assert len(server.asked) == n_asked and [e.answer for e in again.episodes[0]] == [
        e.answer for e in watch.episodes[1]
    ]


# ---- what is refused

MAPS = {
    "all roles are partners": ({"x": "frozen", "y": "frozen"}, "trains no role"),
    "past selves of nobody": ({"x": "a", "y": "past:b"}, "plays past selves of ['b'], but trains ['a'] only"),
    "no adapter": ({"x": "a", "y": None}, "write 'frozen'"),
    "no model": ({"x": "a", "y": {"url": "http://h/v1"}}, "an endpoint without a url or a model"),
    "another field": (
        {"x": "a", "y": {"url": "http://h/v1", "model": "m", "api_key": "k"}},
        "an endpoint with ['api_key']",
    ),
    "no address": ({"x": "a", "y": {"url": "h:80", "model": "m"}}, "the url 'h:80', which is not an address"),
    "a name with a space": ({"x": "a b", "y": "frozen"}, "cannot be part of a file or module name"),
}


@pytest.mark.parametrize("name", MAPS)
def test_maps_that_cannot_work(name):
    policy, message = MAPS[name]
    with pytest.raises(ValueError, match=re.escape(message)):
        parse_policy(policy, ["x", "y"])


def test_frozen_is_no_name_of_an_adapter():
    with pytest.raises(
        ValueError, match="would name an adapter 'frozen' for the role of this name, but the name is reserved"
    ):
        parse_policy("ip", ["frozen", "y"])
    parsed = parse_policy("x=frozen, y=a", ["x", "y"])
    assert parsed == {"x": "frozen", "y": "adapter_a"} and adapter_names(parsed) == ["adapter_a"]


def test_a_parsed_map_parses_to_itself():
    policy = {
        "x": "a",
        "y": "past:a",
        "z": "frozen:some/folder",
        "w": {"url": "http://h:1/v1", "model": "m", "options": {"top_p": None}},
    }
    parsed = parse_policy(policy, list("xyzw"))
    assert parsed["x"] == "adapter_a" and parsed["y"] == "past:adapter_a"
    assert parse_policy(parsed, list("xyzw")) == parsed == parse_policy(json.dumps(policy), list("xyzw"))


@pytest.mark.parametrize(
    ("policy", "options", "message"),
    [
        (
            {"x": "a", "y": "frozen"},
            {"role_beta": {"y": 0.1}},
            "`role_beta` weighs the KL penalty of ['y'], which `policy` does not train",
        ),
        (
            {"x": "a", "y": "frozen"},
            {"past_every": 3},
            "`past_every=3` and `past_selves=4` are for roles that past selves play",
        ),
        (
            {"x": "a", "y": "frozen"},
            {"role_order": ["x", "y"]},
            "`role_order` gives iterations to ['y'], which `policy` does not train",
        ),
        ({"x": "a", "y": "past:a"}, {"max_staleness": 1}, "copies the past selves that play ['y']"),
        ({"x": "a", "y": "frozen:nowhere"}, {}, "'frozen:nowhere', but there is no adapter_config.json in this folder"),
    ],
)
def test_options_that_cannot_work_with_partners(train, policy, options, message):
    with pytest.raises(ValueError, match=re.escape(message)):
        train(policy, train=False, **options)


def test_a_folder_of_adapters_is_refused_with_one_of_them(train, saved):
    with pytest.raises(ValueError, match=re.escape(f"Write one of those in it, such as 'frozen:{saved}'")):
        train({"x": "a", "y": f"frozen:{saved.parent}"}, train=False)


def test_past_selves_under_fsdp2_are_refused_before_a_model_is_loaded(tmp_path, monkeypatch):
    """`accelerate launch` says so in the environment, the accelerator only after the model is loaded."""
    monkeypatch.setenv("ACCELERATE_USE_FSDP", "true")
    monkeypatch.setattr(MultiRoleGRPOConfig, "world_size", 2)
    policy = {"x": "a", "y": "past:a"}
    args = MultiRoleGRPOConfig(
        str(tmp_path), policy=policy, generation_batch_size=4, num_generations=2, report_to="none"
    )
    with pytest.raises(ValueError, match="FSDP2 shards the model, and frozen adapters and past selves"):
        MultiRoleGRPOTrainer(
            "no/model", Talk("x", "y"), by_tokens, args, Dataset.from_dict({"prompt": ["1"]}), peft_config=LORA
        )


def test_partners_that_cannot_be_reached_are_refused_before_anything_is_loaded(train, server):
    for part, message in (
        ({"key_env": "NOT_SET_ANYWHERE"}, "in the environment variable NOT_SET_ANYWHERE, which is not set"),
        ({"url": "http://127.0.0.1:9/v1"}, "No server answers at http://127.0.0.1:9/v1 for the role 'y'"),
    ):
        with pytest.raises(ValueError, match=re.escape(message)):
            train({"x": "a", "y": {"url": server.url, "model": "m"} | part}, train=False)
    server.status = 401
    with pytest.raises(ValueError, match="refuses the key of the role 'y'"):
        train({"x": "a", "y": {"url": server.url, "model": "m"}}, train=False)
    server.status = 200
    with pytest.raises(ValueError, match=r"LeaveOneOutCredit replays episodes, and the endpoints that play \['y'\]"):
        train({"x": "a", "y": {"url": server.url, "model": "m"}}, train=False, credit="leave_one_out")
    with pytest.raises(ValueError, match="RoleValue replays episodes"):
        train({"x": "a", "y": {"url": server.url, "model": "m"}}, train=False, callbacks=[RoleValue()])


class Strict(Talk):
    async def run(self, problem, call):
        messages = [{"role": "system", "content": "Be strict."}, user("Judge.")]
        return Answer((await call("judge", messages)).text)


def test_a_partner_is_sent_what_the_template_of_the_base_refuses(server, tmp_path):
    """Gemma's has no system messages; the ids of such a prompt only seed and count."""
    gemma = FAMILIES["gemma"]()
    engine = WithEndpoints(ScriptedEngine(None, gemma.eos_token_id), ReplyRecord(tmp_path, 0, lambda: "start"))
    rollout = Rollout(Strict("judge"), engine, gemma, {"judge": Endpoint(server.url, "large")}, bool, 0, 500)
    (episode,) = rollout.run([(Problem("p", "", "q", None), 0)], 0, Sampling(5, 1.0))
    assert episode.answer.text == "1" and [m["role"] for m in server.asked[0]["messages"]] == ["system", "user"]


@pytest.mark.parametrize("status", [400, 403, 404, 422])
def test_a_request_that_a_server_refuses_is_no_outage(server, tmp_path, status):
    server.status = status
    engine = WithEndpoints(ScriptedEngine(None, 0), ReplyRecord(tmp_path, 0, lambda: "start"))
    request = Request([1], None, 0, 4, 1.0, messages=[user("Judge.")])
    with pytest.raises(RequestRefused, match="refuses a request to 'wrong': .*no"):
        asyncio.run(engine._ask(Endpoint(server.url, "wrong"), request))
    assert len(server.asked) == 1


def test_a_page_instead_of_json_names_the_url(server, tmp_path, monkeypatch):
    openai = pytest.importorskip("openai")

    async def page(*_, **__):
        return "<html>"

    monkeypatch.setattr(openai.resources.chat.completions.AsyncCompletions, "create", page)
    engine = WithEndpoints(ScriptedEngine(None, 0), ReplyRecord(tmp_path, 0, lambda: "start"))
    with pytest.raises(EngineError, match="a text that is not JSON: '<html>'. Does `url` end with"):
        asyncio.run(engine._ask(Endpoint(server.url, "large"), Request([1], None, 0, 4, 1.0, messages=[user("x")])))
