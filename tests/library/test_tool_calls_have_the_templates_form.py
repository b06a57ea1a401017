"""A reply's tool calls are read in the form of the model's own chat template, for every template that TRL ships, and go back into the prompt.

NousResearch/hermes-agent#38376, QwenLM/Qwen3#1894 and vllm-project/vllm#11903: a call in another form than the server's came back as text.
"""

import logging
import re
from functools import partial

import pytest
from chat_tokenizers import TEMPLATES, byte_level, template, wrap
from scripted_engine import ScriptedEngine

from multirole import from_openai
from multirole.chat.templates import chat_template, check_tools, control_tokens, reply_form
from multirole.chat.tool_calls import parse_reply, tool_form
from multirole.engines.protocol import Sampling
from multirole.rollout.rollout import Rollout
from multirole.types import Answer, Problem, Reply, Turn, user

ALL = sorted(path.stem for path in TEMPLATES.glob("*.jinja") if not path.stem.endswith("_training"))
WITHOUT_CALLS = {
    "cohere", "cohere2", "deepseek_r1_distill", "gemma", "gemma3", "idefics3", "lfm2", "llama3", "llava_next", "phi3", "phi3_5", "qwen2_5_vl", "smolvlm",
}  # fmt: skip
"""Templates that leave the calls of a message out of the prompt."""
WITH_CALLS = [name for name in ALL if name not in WITHOUT_CALLS]
ONE_CALL = {"gptoss", "llama3_1", "llama3_2"}
"""Templates that render one call of a message and no more."""
NO_QUOTES = {"lfm2_2_5", "lfm2_2_5_v2"}
"""Templates that put a text between single quotes without escaping those in it, so that such a call cannot be read."""
TOOLS = [
    {"type": "function", "function": {"name": name, "description": "Do it.", "parameters": {"type": "object", "properties": {
        "city": {"type": "string", "description": "Where."}, "days": {"type": "integer", "description": "How long."},
        "where": {"type": "object", "description": "A place.", "properties": {}}, "is_wet": {"type": "boolean", "description": "Rain."},
        "parts": {"type": "array", "description": "Parts.", "items": {"type": "string"}},
    }}}}
    for name in ("weather", "get_time-2")
]  # fmt: skip
ARGUMENTS = [
    {},
    {"city": "Ulm", "days": 2},
    {"city": "75001", "days": -7, "is_wet": False},
    {"where": {"x": [1, {"y": "ü"}], "z": {}}, "parts": ["a, b", "c)"], "city": "Zürich 👩‍👩‍👧 [北] (x, y={1}), <b>"},
]
QUOTED = {"city": '  it\'s "x" \\ {"a": 1}\n    two', "days": 1}
THOUGHT, WORDS, RESULT = "Rain is likely, so ask.", "Let me look.", "sun-8f3"


@pytest.fixture(scope="module")
def tokenizer():
    """A tokenizer to which the control tokens of every template are special."""
    texts = "".join(template(name) for name in ALL)
    special = set(re.findall(r"<[|｜][^<>{}'\"\s|]+[|｜]>", texts)) | {
        "<|python_tag|>",
        "<|tool_call>",
        "<tool_call|>",
        "<|turn>",
        "<turn|>",
        "<eos>",
        "<bos>",
    }
    raw = byte_level(r"\w+|\W+", sorted(special), ("<tool_call>", "</tool_call>", "<think>", "</think>"))
    return wrap(raw, "", eos_token="<eos>", bos_token="<bos>")


@pytest.fixture(params=WITH_CALLS)
def name(request, tokenizer):
    tokenizer.chat_template = template(request.param)
    return request.param


def call(arguments, name="weather", number=0):
    return {"type": "function", "id": f"a1b2c3d4{number}", "function": {"name": name, "arguments": arguments}}


def answer(calls, content="", **fields):
    return {"role": "assistant", "content": content, "tool_calls": calls, **fields}


def rendered(tokenizer, *messages, **options):
    conversation = tool_form(tokenizer).adapted([user("Ask."), *messages])
    return tokenizer.apply_chat_template(conversation, tools=TOOLS, tokenize=False, **options)


def reply_of(tokenizer, calls, content="", thinks=False, **fields):
    """The prompt, and the reply that the model has to write for its message to be rendered like this."""
    head = rendered(tokenizer, add_generation_prompt=True, enable_thinking=thinks)
    whole = rendered(tokenizer, answer(calls, content, **fields), enable_thinking=thinks)
    start = next((i for i, (a, b) in enumerate(zip(head, whole, strict=False)) if a != b), len(head))
    if whole.rfind("<", 0, start) > whole.rfind(">", 0, start):  # in the middle of a tag
        start = whole.rfind("<", 0, start)
    return head[:start], whole[start:]


def read(tokenizer, parts, finish_reason="stop"):
    prompt, text = ("", parts) if isinstance(parts, str) else parts
    prompt_ids, ids = (tokenizer(part, add_special_tokens=False)["input_ids"] for part in (prompt, text))
    ids = ids + [tokenizer.eos_token_id] * (finish_reason == "stop")
    return parse_reply(tokenizer, Turn("solver", 0, 0, prompt_ids, ids, [0.0] * len(ids), text, finish_reason), TOOLS)


def test_a_reply_that_the_template_would_render_is_read_back(name, tokenizer):
    trials = [*ARGUMENTS, *([QUOTED] if name not in NO_QUOTES else [])]
    for arguments in trials:
        reply = read(tokenizer, reply_of(tokenizer, [call(arguments, "get_time-2")]))
        assert reply == Reply("", "", [("get_time-2", arguments)])
    if name not in ONE_CALL:
        calls = [call(arguments, number=i) for i, arguments in enumerate(trials)]
        assert read(tokenizer, reply_of(tokenizer, calls)).calls == [("weather", arguments) for arguments in trials]


def test_text_and_thought_before_a_call_are_kept_apart(name, tokenizer):
    expected = [("weather", ARGUMENTS[1])]
    prompt, text = reply_of(tokenizer, [call(ARGUMENTS[1])], WORDS)
    if (
        WORDS in text.partition("weather")[0] and "analysis" not in text
    ):  # others leave it out, or render it as a thought or behind the call
        assert read(tokenizer, (prompt, text)) == Reply(WORDS, "", expected)
    prompt, text = reply_of(tokenizer, [call(ARGUMENTS[1])], thinks=True, reasoning_content=THOUGHT)
    if THOUGHT in text:
        assert read(tokenizer, (prompt, text)) == Reply("", THOUGHT, expected)


def test_a_call_that_is_cut_off_is_no_call(name, tokenizer):
    arguments = {"city": "Ulm and Neu-Ulm", "days": 12}
    prompt, whole = reply_of(tokenizer, [call(arguments)])
    for length in range(1, len(whole.rstrip()), 7):
        reply = read(tokenizer, (prompt, whole[:length]), "length")
        assert reply.calls in ([], [("weather", arguments)]), whole[:length]
        assert reply.calls or reply.text in (whole[:length], "")


def test_calls_and_results_reach_the_next_prompt(name, tokenizer):
    reply = read(tokenizer, reply_of(tokenizer, [call(ARGUMENTS[1])]))
    calls = [call(arguments, name) for name, arguments in reply.calls]
    messages = [
        user("Ask."),
        answer(calls),
        {"role": "tool", "name": "weather", "tool_call_id": calls[0]["id"], "content": RESULT},
    ]
    prompt = tokenizer.decode(chat_template(tokenizer, messages, tools=TOOLS))
    without = tokenizer.decode(chat_template(tokenizer, [user("Ask.")], tools=TOOLS))
    for part in ("weather", "Ulm", RESULT):
        assert prompt.count(part) > without.count(part)


def test_control_tokens_in_arguments_and_results_stay_text(name, tokenizer):
    token = next(token for token in control_tokens(tokenizer).tokens if "think" not in token)
    both = [
        [
            user("Ask."),
            answer([call({"city": text})]),
            {"role": "tool", "name": "weather", "tool_call_id": "a1b2c3d40", "content": text},
        ]
        for text in (f"x {token} y", "x y")
    ]
    special = tokenizer.convert_tokens_to_ids(token)
    spelled, plain = (chat_template(tokenizer, messages, tools=TOOLS) for messages in both)
    assert spelled.count(special) == plain.count(special)


@pytest.mark.parametrize("without", sorted(WITHOUT_CALLS))
def test_templates_that_leave_a_call_out_are_refused_by_name(without, tokenizer, caplog):
    tokenizer.chat_template = template(without)
    with pytest.raises(ValueError, match="The chat template of the tokenizer '.*' leaves tool calls out of the prompt"):
        chat_template(tokenizer, [user("Ask."), answer([call({})]), user("?")])
    if "tools" in tokenizer.chat_template:
        with caplog.at_level(logging.WARNING):
            check_tools(tokenizer, partial(chat_template, enable_thinking=False))  # as the trainer binds its options
        assert "leaves tool calls out" in caplog.text
    else:
        with pytest.raises(ValueError, match="does not know `tools`"):
            check_tools(tokenizer, chat_template)


def test_tools_that_do_not_reach_the_prompt_are_refused(tokenizer):
    """Phi-4-mini's template mentions tools, and reads them from a message."""
    tokenizer.chat_template = "{% for m in messages %}{{ m.role }}: {{ m.content }}{% if 'tools' in m %}{{ m['tools'] }}{% endif %}{% endfor %}"
    with pytest.raises(ValueError, match="does not know `tools`"):
        check_tools(tokenizer, chat_template)


PLAIN = "{% for m in messages %}{{ m.role }}: {{ m.content }}\n{% endfor %}"


def test_the_template_that_renders_decides_the_form(tokenizer):
    """`chat_template_kwargs` may have a template, and a renderer of the user's needs none."""
    chosen = partial(chat_template, chat_template=template("gptoss"))
    for own in (None, PLAIN, template("qwen3")):
        tokenizer.chat_template = own
        check_tools(tokenizer, chosen)
        assert reply_form(tokenizer, chosen).has_channels
        check_tools(tokenizer, lambda tokenizer, messages, tools=None: [1])
    with pytest.raises(ValueError, match="does not know `tools`"):
        check_tools(tokenizer, partial(chat_template, chat_template=PLAIN))


def test_earlier_calls_are_rendered_without_tools(tokenizer):
    """Hermes 3 and Command R have two templates, and the one for prompts without tools writes no calls."""
    tokenizer.chat_template = {"default": PLAIN, "tool_use": template("qwen3")}
    calls = [user("Ask."), answer([call({"city": "Ulm"})]), {"role": "tool", "content": RESULT}]
    prompt = tokenizer.decode(chat_template(tokenizer, calls))
    assert "Ulm" in prompt and RESULT in prompt
    assert tokenizer.decode(chat_template(tokenizer, [user("Ask.")])) == "user: Ask.\n"


@pytest.mark.parametrize("one", sorted(ONE_CALL))
def test_second_calls_that_a_template_leaves_out_are_refused(one, tokenizer):
    tokenizer.chat_template = template(one)
    with pytest.raises(ValueError, match="leaves tool calls after the first of a message out"):
        chat_template(tokenizer, [user("Ask."), answer([call({}), call({}, number=1)])])


@pytest.mark.parametrize(
    ("form", "text"),
    [
        ("qwen3", "<tool_call>{name: weather}</tool_call>"),
        ("qwen3", '<tool_call>{"name": "weather", "arguments": 3}</tool_call>'),
        ("qwen3", '<tool_call>{"arguments": {}}</tool_call>'),
        ("qwen3_6", "<tool_call>\n<function=weather>\n<parameter=days>\n2\n</function>\n</tool_call>"),
        ("lfm2_v2", "<|tool_call_start|>[weather(city='it's')]<|tool_call_end|>"),
        ("lfm2_v2", "<|tool_call_start|>[weather(open('x'))]<|tool_call_end|>"),
        ("gptoss", "<|channel|>commentary to=functions.weather <|constrain|>json<|message|>{city}<|call|>"),
    ],
)
def test_a_malformed_call_makes_the_reply_text(form, text, tokenizer):
    tokenizer.chat_template = template(form)
    assert read(tokenizer, text) == Reply(text)


@pytest.mark.parametrize(
    ("form", "text"),
    [  # as models write them, beside what their templates render
        ("gptoss", '<|channel|>analysis<|message|>Hm.<|end|><|start|>assistant<|channel|>commentary to=functions.weather <|constrain|>json<|message|>{"days": 2}<|call|>'),
        ("lfm2_v2", 'Hm.<|tool_call_start|>[weather(days=2)]<|tool_call_end|>'),
        ("lfm2", 'Hm.<|tool_call_start|>[weather(days=2)]<|tool_call_end|>'),
        ("qwen3", 'Hm.<tool_call>[{"arguments": {"days": 2}, "name": "weather"}]</tool_call>'),
        ("qwen3_8", "Hm.\n\n<tool_call><function=weather><parameter=days>2</parameter></function></tool_call>"),
        ("llama3_1", 'Hm. {"name": "weather", "parameters": {"days": 2}}'),
        ("llama3_1", 'Hm. <|python_tag|>{"name": "weather", "parameters": {"days": 2}}'),
    ],
)  # fmt: skip
def test_other_white_space_and_order_are_read(form, text, tokenizer):
    tokenizer.chat_template = template(form)
    reply = read(tokenizer, text)
    assert reply.calls == [("weather", {"days": 2})] and "Hm." in (reply.text, reply.reasoning)


MISTRAL = """{{ bos_token }}{% for message in messages %}{% if message.role == 'user' %}[INST] {{ message.content }}[/INST]{% elif message.tool_calls %}
[TOOL_CALLS] [{% for call in message.tool_calls %}{"name": "{{ call.function.name }}", "arguments": {{ call.function.arguments | tojson }}, "id": "{{ call.id }}"}
{%- if not loop.last %}, {% endif %}{% endfor %}]</s>{% elif message.role == 'tool' %}[TOOL_RESULTS] {"content": {{ message.content }}}[/TOOL_RESULTS]
{% else %} {{ message.content }}</s>{% endif %}{% endfor %}"""
INVOKE = """{% for message in messages %}]{{ message.role }}[{{ message.content }}{% for call in message.tool_calls or [] %}
<minimax:tool_call>
<invoke name="{{ call.function.name }}">
{% for key, value in call.function.arguments.items() %}<parameter name="{{ key }}">{{ value if value is string else value | tojson }}</parameter>
{% endfor %}</invoke>
</minimax:tool_call>{% endfor %}[e]
{% endfor %}{% if add_generation_prompt %}]assistant[{% endif %}"""


@pytest.mark.parametrize("text", [MISTRAL, INVOKE], ids=["a list", "tags"])
def test_the_form_of_a_template_that_trl_does_not_ship_is_found(text, tokenizer):
    tokenizer.chat_template = text
    calls = [call(ARGUMENTS[1]), call(QUOTED, "get_time-2", 1)]
    assert read(tokenizer, reply_of(tokenizer, calls)).calls == [("weather", ARGUMENTS[1]), ("get_time-2", QUOTED)]


def test_an_agent_gets_calls_and_thoughts_and_sends_them_back(tokenizer):
    tokenizer.chat_template = template("qwen3_6")
    first = (
        f"<think>\n{THOUGHT}\n</think>\n\n"
        + "<tool_call>\n<function=weather>\n<parameter=days>\n2\n</parameter>\n</function>\n</tool_call>"
    )
    replies = [[*tokenizer.encode(text, add_special_tokens=False), tokenizer.eos_token_id] for text in (first, "Sun.")]
    engine = ScriptedEngine(lambda key, request: (replies[key], 1), tokenizer.eos_token_id)
    got = []

    async def agent(question, client):
        messages = [user(question)]
        for _ in range(2):
            completion = await client.chat.completions.create(model="solver", messages=messages, tools=TOOLS)
            message = completion.choices[0].message
            got.append(message)
            messages.append(message.model_dump(exclude_none=True))
            messages += [{"role": "tool", "tool_call_id": c.id, "content": RESULT} for c in message.tool_calls or []]
        return message.content

    rollout = Rollout(from_openai(agent, ["solver"]), engine, tokenizer, {"solver": None}, bool, 0, 9000)
    (episode,) = rollout.run([(Problem("0", "", "Ask.", None), 0)], 0, Sampling(300, 1.0))
    assert got[0].reasoning_content == THOUGHT and got[0].tool_calls[0].function.arguments == '{"days": 2}'
    assert re.fullmatch(r"[0-9a-zA-Z]{9}", got[0].tool_calls[0].id)
    assert episode.turns[0].reply == Reply("", THOUGHT, [("weather", {"days": 2})])
    prompt = tokenizer.decode(episode.turns[1].prompt_ids)
    assert prompt.endswith(f"{RESULT}\n</tool_response><|im_end|>\n<|im_start|>assistant\n<think>\n\n</think>\n\n")
    assert f"{THOUGHT}\n</think>\n\n<tool_call>\n<function=weather>\n<parameter=days>\n2\n" in prompt
    assert episode.answer == Answer("Sun.")
