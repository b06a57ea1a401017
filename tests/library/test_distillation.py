"""On-policy distillation adds the KL from a role's teacher on the role's own tokens, and nothing for roles without one."""

import sys
from types import SimpleNamespace

import processes
import pytest
import torch
from datasets import Dataset
from json_server import JsonServer
from peft import LoraConfig, PeftModel
from test_gradients import cut, gradient
from test_partners import by_tokens, lora_of, of_adapter, train
from test_partners import saved as judge
from toy_qwen3 import toy_base, toy_model
from trainers import SUMS, build_model, conversation, episodes_of, rows_of
from transformers import AutoTokenizer

from multirole import MultiRoleGRPOConfig, MultiRoleGRPOTrainer, Single
from multirole.teachers import parse_teachers
from multirole.types import Turn
from multirole.update.distillation import Distillation
from multirole.update.passes.model_passes import MicroBatch
from multirole.update.rows import Row, collate
from multirole.workflows import Voting

TOLERANCE = 1e-6
__all__ = ["judge", "train"]  # fixtures


@pytest.fixture(scope="module")
def saved(tmp_path_factory, tokenizer):
    """The folder of an adapter on the base of `make_library_trainer`, other than the trained ones."""
    folder, model = tmp_path_factory.mktemp("saved"), build_model(tokenizer, {"role": "adapter_t"})
    generator = torch.Generator().manual_seed(7)
    for name, p in model.named_parameters():
        if "lora_" in name:
            p.data = 0.2 * torch.randn(p.shape, generator=generator)
    model.save_pretrained(folder)
    return folder / "adapter_t"


def scored(trainer, episodes, advantage=0.0):
    """Return the rows of the trained roles with an advantage, after their teachers have scored them."""
    rows = rows_of(trainer, episodes)
    for row in rows:
        row.advantage = advantage
    trainer.teachers.score(rows, 0)
    return rows


def logged_kl(trainer):
    return trainer.update_metrics.mean_teacher_kl(trainer.teachers.weights)


@pytest.mark.parametrize("temperature", [1.0, 0.7])
def test_the_gradient_of_one_role_is_that_of_trls_trainer(
    make_library_trainer, saved, tokenizer, tmp_path, temperature, monkeypatch
):
    """Same student, teacher and completions; the outcome has no part in the loss."""
    with monkeypatch.context() as patch:  # as `multirole.trl_parts` does: vLLM's import takes seconds
        patch.setitem(sys.modules, "trl.generation.vllm_generation", SimpleNamespace(VLLMGeneration=None))
        from trl import DistillationConfig, DistillationTrainer
    episodes = episodes_of({"generator": 1})
    ours = make_library_trainer(Single(), teacher={"generator": f"frozen:{saved}"}, temperature=temperature)
    rows = scored(ours, episodes)
    gradient_of_ours = gradient(ours, "shared", rows)

    args = DistillationConfig(
        str(tmp_path), beta=1.0, temperature=temperature, use_cpu=True, bf16=False, gradient_checkpointing=False, report_to="none",
        max_completion_length=96,
    )  # fmt: skip
    teacher = PeftModel.from_pretrained(toy_of(tokenizer), saved).merge_and_unload()
    trls = DistillationTrainer(
        build_model(tokenizer, {"generator": "shared"}), teacher, args=args, processing_class=tokenizer,
        train_dataset=Dataset.from_dict({"prompt": ["question"]}),
    )  # fmt: skip
    batch = collate(rows, tokenizer.pad_token_id, torch.device("cpu"))
    loss = trls.compute_loss(trls.model, batch | {"num_items_in_batch": batch["completion_mask"].sum()})
    loss.backward()
    named = sorted((name, p.grad) for name, p in trls.model.named_parameters() if p.requires_grad)
    expected = torch.cat([grad.flatten() for _, grad in named])
    assert expected.norm() > 1e-3
    torch.testing.assert_close(gradient_of_ours, expected, atol=TOLERANCE, rtol=1e-4)
    assert logged_kl(ours)["generator"] == pytest.approx(loss.item(), rel=1e-5)


def toy_of(tokenizer):
    return toy_model(tokenizer, 0, head_dim=16, max_position_embeddings=1024)


def test_a_weight_scales_the_kl_of_its_role_beside_the_outcome(make_library_trainer, saved):
    """The gradient of the outcome plus, for each token of a role, weight x KL(student || teacher) / all tokens, from whole logits."""
    teacher, weight = {"generator": f"frozen:{saved}", "aggregator": "frozen"}, {"generator": 3.0}
    episodes = episodes_of(Voting().roles, 2)
    plain = make_library_trainer(Voting())
    outcome = gradient(plain, "shared", scored(plain, episodes, 0.5))
    trainer = make_library_trainer(Voting(), teacher=teacher, distillation_weight=weight)
    rows = scored(trainer, episodes, 0.5)
    n_tokens = sum(len(row.turn.completion_ids) for row in rows)
    total, by_role = 0.0, {"generator": [], "aggregator": []}
    model, frozen = trainer.peft_model, next(name for name in trainer.peft_model.peft_config if "frozen" in name)

    def distributions(row):
        ids = torch.tensor([row.turn.prompt_ids + row.turn.completion_ids])
        return model(ids).logits[0, len(row.turn.prompt_ids) - 1 : -1].log_softmax(-1)  # (C, V)

    for row in rows:
        with torch.no_grad():
            if row.turn.role == "generator":
                model.set_adapter(frozen)
                q = distributions(row)
            else:
                with model.disable_adapter():
                    q = distributions(row)
        model.set_adapter("shared")
        p = distributions(row)
        kl = (p.exp() * (p - q)).sum(-1)  # (C,)
        by_role[row.turn.role] += kl.tolist()
        total = total + weight.get(row.turn.role, 1.0) * kl.sum() / n_tokens
    named = [p for name, p in sorted(model.named_parameters()) if ".shared." in name]
    expected = torch.cat([g.flatten() for g in torch.autograd.grad(total, named)])
    assert expected.norm() > 1e-3
    torch.testing.assert_close(gradient(trainer, "shared", rows) - outcome, expected, atol=TOLERANCE, rtol=1e-4)
    means = {role: sum(values) / len(values) for role, values in by_role.items()}
    assert logged_kl(trainer) == pytest.approx(means, rel=1e-4)


def test_passes_do_not_change_the_gradient(make_library_trainer, saved):
    """Shared prompts and micro-batches of any size give the gradient of one padded pass."""
    options = {"teacher": {"generator": f"frozen:{saved}", "aggregator": "frozen"}}
    trainer = make_library_trainer(Voting(), **options)
    rows = scored(trainer, conversation(Voting()))
    trainer.passes.can_share_prompts = False
    cut(trainer, rows, 100_000)
    trainer.teachers.score(rows, 0)
    whole = gradient(trainer, "shared", rows)
    cut(trainer, rows, 150)
    torch.testing.assert_close(gradient(trainer, "shared", rows), whole, atol=TOLERANCE, rtol=1e-4)
    trainer.passes.can_share_prompts = True
    trainer.passes.shares_prompts = lambda rows, key: True
    trainer.teachers.score(rows, 0)
    torch.testing.assert_close(gradient(trainer, "shared", rows), whole, atol=TOLERANCE, rtol=1e-4)


@pytest.mark.slow
def test_bfloat16_passes_give_the_gradient_up_to_their_rounding(make_library_trainer, saved):
    gradients = []
    for bf16 in (False, True):
        trainer = make_library_trainer(
            Voting(), bf16=bf16, teacher={"generator": f"frozen:{saved}", "aggregator": "frozen"}
        )
        gradients.append(gradient(trainer, "shared", scored(trainer, conversation(Voting()))))
    assert torch.nn.functional.cosine_similarity(*gradients, dim=0) > 0.99


def of_tokens(logits: torch.Tensor, old: torch.Tensor, teacher: torch.Tensor, token: int) -> tuple[torch.Tensor, float]:
    """Return the gradient of the loss of one sampled token under a server's teacher, and its `teacher_kl`."""
    turn = Turn("solver", 0, 0, [1], [token], [0.0], "", "stop")
    logps = logits.log_softmax(-1)[token].view(1, 1)
    micro = MicroBatch([Row(None, turn, "a", teacher_logps=teacher[token : token + 1])], 1.0, None, logps=logps)
    micro.batch = {"completion_mask": torch.ones(1, 1), "old_per_token_logps": old[token].view(1, 1)}
    loss = Distillation({"solver": 1.0}, 1.0, (0.2, 0.2)).loss(micro, n_tokens=1)
    (gradient_of_token,) = torch.autograd.grad(loss, logits)
    return gradient_of_token, micro.teacher_kl.item()


def test_sampled_log_probs_have_the_gradient_of_the_kl_in_expectation():
    """Summed over all tokens with the probability that each is sampled: an exact expectation."""
    logits = torch.tensor([0.3, -1.2, 2.0, 0.0, 0.7], dtype=torch.float64, requires_grad=True)
    teacher = torch.tensor([1.0, 0.2, -0.5, 0.1, 0.4], dtype=torch.float64).log_softmax(-1)
    p = logits.log_softmax(-1)
    kl = (p.exp() * (p - teacher)).sum()
    tokens = [of_tokens(logits, p.detach(), teacher, token) for token in range(5)]
    mean = sum(p[i].exp().detach() * g for i, (g, _) in enumerate(tokens))
    torch.testing.assert_close(mean, torch.autograd.grad(kl, logits)[0])
    assert sum(p[i].exp().item() * k for i, (_, k) in enumerate(tokens)) == pytest.approx(kl.item())
    # the teacher finds token 2 less likely: once its ratio is below 1 - 0.2, PPO's clip lets it fall no further
    assert of_tokens(logits, p.detach() + 0.3, teacher, 2)[0].abs().sum() == 0
    assert of_tokens(logits, p.detach() + 0.2, teacher, 2)[0].abs().sum() > 0


# ---- runs


def weights_of(trainer, adapter):
    return of_adapter(lora_of(trainer), adapter)


def is_equal(one, other):
    return all(torch.equal(one[name], other[name]) for name in one) and one.keys() == other.keys()


def test_only_a_taught_role_changes_and_a_run_resumes(train, judge):
    """Bit for bit: a role without a teacher, a run whose weight is 0, and a run that was interrupted."""
    policy = {"solver": "a", "critic": "b"}
    options = {"teacher": {"solver": f"frozen:{judge}"}, "max_steps": 1}
    plain, _ = train(policy, max_steps=1)
    off, _ = train(policy, **options, distillation_weight={"solver": 0})
    assert is_equal(lora_of(plain), lora_of(off)) and "solver/teacher_kl" not in off.state.log_history[0]
    taught, _ = train(policy, **options)
    assert is_equal(weights_of(plain, "adapter_b"), weights_of(taught, "adapter_b"))
    assert not is_equal(weights_of(plain, "adapter_a"), weights_of(taught, "adapter_a"))
    line = taught.state.log_history[0]
    assert line["solver/teacher_kl"] > 0 and "critic/teacher_kl" not in line

    whole, _ = train(policy, **options | {"max_steps": 2})
    resumed, _ = train(policy, resume=f"{whole.args.output_dir}/checkpoint-1", **options | {"max_steps": 2})
    assert is_equal(lora_of(whole), lora_of(resumed))


def test_a_role_learns_from_its_teacher_without_an_outcome(train, judge):
    """`reward_weights=[0]` leaves the outcome out, and the KL falls."""
    options = {"teacher": "solver=frozen:" + str(judge), "reward_weights": [0.0], "max_steps": 6}
    trainer, watch = train({"solver": "a"}, **options)
    assert {row.advantage for row in watch.rows} == {0.0}
    kl = [line["solver/teacher_kl"] for line in trainer.state.log_history if "solver/teacher_kl" in line]
    assert kl[-1] < 0.8 * kl[0]


def test_another_base_teaches_as_the_base_does(make_library_trainer, tokenizer, tmp_path):
    """The same weights, loaded as another model; and a model of another width."""
    same, wide = toy_of(tokenizer), toy_model(tokenizer, 3, hidden_size=48)
    rows = {}
    for name, model in {"same": same, "wide": wide}.items():
        model.save_pretrained(tmp_path / name)
        tokenizer.save_pretrained(tmp_path / name)
    gradients = []
    for teacher in ("frozen", f"base:{tmp_path / 'same'}", f"base:{tmp_path / 'wide'}"):
        trainer = make_library_trainer(Single(), teacher={"generator": teacher})
        rows[teacher] = scored(trainer, episodes_of({"generator": 1}, 2))
        gradients.append(gradient(trainer, "shared", rows[teacher]))
    torch.testing.assert_close(gradients[1], gradients[0], atol=1e-7, rtol=1e-4)
    assert rows[teacher][0].teacher_states.size(1) == 48 and (gradients[2] - gradients[0]).norm() > 1e-3


def test_another_base_is_loaded_at_its_revision(make_library_trainer, monkeypatch):
    asked = []

    def from_pretrained(name, **options):
        asked.append((name, options["revision"]))
        raise OSError("no such name")

    monkeypatch.setattr("multirole.teachers.AutoTokenizer.from_pretrained", from_pretrained)
    with pytest.raises(ValueError, match="'base:toy/base@1a2b' of the role 'generator' cannot be loaded"):
        make_library_trainer(Single(), teacher={"generator": "base:toy/base@1a2b"})
    assert asked == [("toy/base", "1a2b")]


def train_taught(folder, teacher):
    """Train two roles, one of them taught, and save the adapters and what was logged."""
    policy = {"generator": "a", "aggregator": "b"}
    args = MultiRoleGRPOConfig(
        folder, policy=policy, generation_batch_size=8, num_generations=4, max_steps=2, max_completion_length=8, learning_rate=1e-2, bf16=False,
        use_cpu=True, report_to="none", disable_tqdm=True, logging_steps=1, save_strategy="no", teacher={"generator": teacher}, adam_epsilon=1e-5,
    )  # fmt: skip
    rows = Dataset.from_dict({"prompt": [f"{i}+1" for i in range(8)]})
    trainer = MultiRoleGRPOTrainer(
        toy_base(),
        Voting(2, prompts=SUMS),
        by_tokens,
        args,
        rows,
        peft_config=LoraConfig(r=4, target_modules="all-linear"),
    )
    trainer.train()
    if trainer.accelerator.is_main_process:
        kl = [line["generator/teacher_kl"] for line in trainer.state.log_history if "generator/teacher_kl" in line]
        torch.save((lora_of(trainer), kl), f"{folder}/result.pt")


@pytest.mark.slow
def test_two_processes_train_as_one(judge, tmp_path):
    for n in (1, 2):
        (tmp_path / str(n)).mkdir()
        codes = processes.run_together(n, tmp_path / f"log{n}", train_taught, str(tmp_path / str(n)), f"frozen:{judge}")
        assert codes == [0] * n, "".join(log.read_text()[-2000:] for log in tmp_path.glob(f"log{n}*"))
    (alone, kl), (shared, kl_shared) = (torch.load(tmp_path / str(n) / "result.pt") for n in (1, 2))
    assert kl == pytest.approx(kl_shared, rel=1e-4) and kl[0] > 0
    for name in alone:
        torch.testing.assert_close(shared[name], alone[name], atol=2e-5, rtol=1e-3)


# ---- a teacher behind a server


class Server(JsonServer):
    """A vLLM server whose log-prob of a token is -1 - (id % 5) / 10; `vocabulary` decodes, and `tells` is off for one without log-probs."""

    def __init__(self, vocabulary):
        super().__init__()
        self.vocabulary, self.tells = vocabulary, True
        self.teacher = {"url": self.url, "model": "large"}

    def post(self, body, headers):
        self.asked.append(body)
        choice = {"index": 0, "text": "x", "finish_reason": "length", "logprobs": None}
        if self.tells:
            choice["prompt_logprobs"] = [None] + [
                {str(i): {"logprob": -1 - i % 5 / 10, "rank": 1, "decoded_token": self.vocabulary(i)}}
                for i in body["prompt"][1:]
            ]
        head = {"id": "x", "object": "text_completion", "created": 0, "model": body["model"]}
        return 200, head | {"choices": [choice]}


@pytest.fixture
def server():
    pytest.importorskip("openai")
    tokenizer = AutoTokenizer.from_pretrained(toy_base())
    server = Server(lambda i: tokenizer.decode([i]).replace("\ufffd", ""))  # as vLLM does for parts of characters
    yield server
    server.close()


def test_a_server_is_asked_for_the_students_own_tokens(train, server):
    trainer, watch = train({"solver": "a", "critic": "b"}, teacher={"solver": server.teacher}, max_steps=1)
    asked = [body for body in server.asked[1:]]  # the first asks for the vocabulary
    rows = [row for row in watch.rows if row.turn.role == "solver"]
    assert sorted(body["prompt"] for body in asked) == sorted(r.turn.prompt_ids + r.turn.completion_ids for r in rows)
    assert {(body["model"], body["prompt_logprobs"]) for body in asked} == {("large", 0)}
    gaps = []
    for row in rows:
        told = [-1 - token % 5 / 10 for token in row.turn.completion_ids]
        assert row.teacher_logps.tolist() == pytest.approx(told)
        gaps += [p - q for p, q in zip(row.turn.logprobs, told, strict=True)]
    line = trainer.state.log_history[0]
    assert line["solver/teacher_kl"] == pytest.approx(sum(gaps) / len(gaps), abs=1e-3)


def test_a_teacher_that_cannot_teach_is_refused(train, server, tmp_path):
    """In a sentence, before anything is computed."""
    wide = toy_base()
    other = AutoTokenizer.from_pretrained(wide)
    other.add_tokens(["<new>"])
    other.save_pretrained(tmp_path / "other")

    def refused(match, policy=None, **options):
        with pytest.raises(ValueError, match=match):
            train(policy or {"solver": "a", "critic": "frozen"}, train=False, **options)

    refused("A teacher is 'frozen'", teacher={"solver": "past:a"})
    refused("names .'writer'., but the roles are", teacher={"writer": "frozen"})
    refused("teachers of .'critic'., which `policy` does not train", teacher={"critic": "frozen"})
    refused("`teacher` names none for them", teacher={"solver": "frozen"}, distillation_weight={"critic": 1})
    refused("numbers of 0 or more", teacher={"solver": "frozen"}, distillation_weight={"solver": -1})
    refused("must map roles to numbers", teacher={"solver": "frozen"}, distillation_weight="solver")
    refused("`teacher` has 'frozen:nowhere', but there is no", teacher={"solver": "frozen:nowhere"})
    refused("another vocabulary.*such as '<new>'", teacher={"solver": f"base:{tmp_path / 'other'}"})
    refused("cannot be loaded", teacher={"solver": f"base:{tmp_path / 'nowhere'}"})
    refused("at temperature 1", teacher={"solver": server.teacher}, temperature=0.8)
    server.tells = False
    refused("answered without `prompt_logprobs`", teacher={"solver": server.teacher})
    strange = Server(lambda i: "?")
    refused("has another vocabulary than the student: the token 0 is '\\?'", teacher={"solver": strange.teacher})
    strange.http.shutdown()
    refused("No server answers", teacher={"solver": {"url": "http://127.0.0.1:1/v1", "model": "m"}})
    with pytest.raises(ValueError, match="FSDP2 shards the model, and teachers"):
        MultiRoleGRPOConfig(use_cpu=True, bf16=False).check(is_sharded=True, loaded_teachers={"solver": "frozen"})


def test_maps_are_read_from_text():
    assert parse_teachers("solver=frozen, critic=base:some/model") == {"solver": "frozen", "critic": "base:some/model"}
    assert parse_teachers('{"solver": {"url": "http://h/v1", "model": "m"}}') == {
        "solver": '{"model": "m", "url": "http://h/v1"}'
    }
    args = MultiRoleGRPOConfig(use_cpu=True, bf16=False, distillation_weight="solver=0.5")
    assert args.distillation_weight == {"solver": 0.5}
