"""A conversation that the chat template cannot render is refused when the trainer is built, with the cause; every other one is rendered."""

import pytest
from chat_tokenizers import FAMILIES, SMOLLM2_CHAT, TEMPLATES, byte_level, template, wrap
from trainers import library_trainer

from multirole.chat.templates import chat_template, check_chats
from multirole.types import Answer, Problem, Structure, assistant, user
from multirole.workflows import WORKFLOWS, EvalOpt, Single, Voting

SYSTEM = {"role": "system", "content": "Be brief."}
SHIPPED = sorted(path.stem for path in TEMPLATES.glob("*.jinja") if not path.stem.endswith("_training"))
ALTERNATING = {"cohere", "cohere2", "gemma", "gemma3"}


def with_template(text):
    tokenizer = wrap(
        byte_level(r"\w+|\W+", ["<|im_start|>", "<|im_end|>", "<s>"]), text, eos_token="<|im_end|>", bos_token="<s>"
    )
    tokenizer.name_or_path = "org/model"
    return tokenizer


def check(tokenizer, workflow, *histories):
    problems = [Problem(str(i), "", "q", None, list(history)) for i, history in enumerate(histories or [()])]
    check_chats(chat_template, tokenizer, workflow, problems)


class Own:
    """A user's workflow, which declares nothing."""

    name, roles = "own", {"solver": 1}

    async def run(self, problem, call):
        return Answer((await call("solver", problem.messages)).text)


@pytest.mark.parametrize("name", SHIPPED)
def test_every_template_that_trl_ships_writes_every_message(name):
    """Includes the templates of vision models, which iterate over the parts of a message (huggingface/trl#5871)."""
    tokenizer = with_template(template(name))
    shown = tokenizer.decode(chat_template(tokenizer, [user("What is 1+1?")]))
    assert "What is 1+1?" in shown
    for workflow in (Single(), Voting(), Own()):
        check(tokenizer, workflow)
    if name in ALTERNATING:
        with pytest.raises(ValueError, match="'eval_opt' cannot be played.*'org/model' refuses.*must alternate"):
            check(tokenizer, EvalOpt())
    else:
        check(tokenizer, EvalOpt())
        shown = tokenizer.decode(chat_template(tokenizer, [user("q1"), assistant("a1"), assistant("a2"), user("q2")]))
        assert all(word in shown for word in ("q1", "a1", "a2", "q2"))


@pytest.mark.parametrize("name", ["smolvlm", "idefics3", "llava_next"])
def test_control_tokens_in_parts_are_text_too(name):
    tokenizer = with_template(template(name))
    end = tokenizer.eos_token_id
    plain = chat_template(tokenizer, [user("x")]).count(end)
    assert chat_template(tokenizer, [user("x<|im_end|>")]).count(end) == plain


def test_a_system_turn_that_a_template_refuses(tmp_path):
    tokenizer = with_template(template("gemma"))
    for workflow in (cls() for cls in WORKFLOWS.values() if cls is not EvalOpt):
        with pytest.raises(
            ValueError, match=f"{workflow.name!r} cannot be played.*roles system, user: System role not"
        ):
            check(tokenizer, workflow, [], [SYSTEM])
    check(tokenizer, Own(), [SYSTEM])  # which may put it elsewhere
    with pytest.raises(ValueError, match="refuses messages of the roles system, user: System role not supported"):
        chat_template(tokenizer, [SYSTEM, user("q")])


def test_user_supplied_workflows_may_declare_their_conversations():
    class Debate(Own):
        structure = Structure(chats=(("user", "user"),))

    with pytest.raises(ValueError, match="'own' cannot be played.*roles user, user: .*must alternate"):
        check(with_template(template("gemma")), Debate())
    check(with_template(SMOLLM2_CHAT), Debate())


@pytest.mark.parametrize(
    ("text", "message"),
    [
        (None, "The tokenizer 'org/model' has no chat template"),
        ("Hello.", "'org/model' leaves out message 1 of a conversation of the roles user"),
        ("{{ raise_exception('no users') }}", "'org/model' refuses messages of the roles user: no users"),
        (
            "{% for m in messages %}{{ m.content }}{% endif %}",
            "'org/model' refuses messages of the roles user: .*endif",
        ),
    ],
    ids=["no template", "one that says the same", "one that refuses", "one with a mistake"],
)
def test_an_unusable_template_is_not_blamed_on_the_workflow(text, message):
    tokenizer = with_template(text)
    for workflow in (Single(), Own()):
        with pytest.raises(ValueError, match=message) as error:
            check(tokenizer, workflow)
        assert repr(workflow.name) not in str(error.value)


@pytest.mark.parametrize("text", [None, template("gemma")], ids=["no template", "alternating"])
def test_a_trainer_is_refused_before_its_engine_is_built(text, tmp_path, monkeypatch):
    monkeypatch.setattr("multirole.engines.load_engine", lambda *_: pytest.fail("the engine was built"))
    with pytest.raises(ValueError, match="no chat template|must alternate"):
        library_trainer(EvalOpt(), with_template(text), tmp_path)


def test_a_user_supplied_renderer_needs_no_template(tmp_path):
    tokenizer = FAMILIES["slow"]()
    check_chats(lambda tokenizer, messages: tokenizer.encode(str(messages)), tokenizer, EvalOpt(), [])


def test_a_default_system_turn_gives_way_to_the_row_s_own():
    for tokenizer, default in (
        (FAMILIES["smollm2"](), "You are a helpful AI assistant named SmolLM"),
        (with_template(template("qwen2_5")), "You are Qwen"),
    ):
        without, with_system = (
            tokenizer.decode(chat_template(tokenizer, m)) for m in ([user("q")], [SYSTEM, user("q")])
        )
        assert default in without and default not in with_system and "Be brief." in with_system
        assert without.count("<|im_start|>") == with_system.count("<|im_start|>") == 3


def test_options_of_the_template_reach_it():
    tokenizer = with_template("{% for m in messages %}{{ m.content }}{{ mood }}{% endfor %}")
    assert tokenizer.decode(chat_template(tokenizer, [user("a"), user("<|im_end|>")], mood="!")) == "a!<|im_end|>!"
    replaced = chat_template(tokenizer, [user("a")], chat_template="{{ messages[0].content * 2 }}")
    assert tokenizer.decode(replaced) == "aa"


def test_texts_in_parts_are_joined():
    tokenizer = FAMILIES["qwen3"]()
    parts = {"role": "user", "content": [{"type": "text", "text": "What is "}, {"type": "text", "text": "1+1?"}]}
    assert chat_template(tokenizer, [parts]) == chat_template(tokenizer, [user("What is 1+1?")])
