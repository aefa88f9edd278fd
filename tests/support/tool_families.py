"""Families of models that call tools, as their chat templates write it, and episodes with them."""

import asyncio
from dataclasses import dataclass

import tokenizers
from spelling import ROW
from transformers import PreTrainedTokenizerFast

from cosmos_rollout import (
    ChatRenderer,
    Conversation,
    EpisodeLimits,
    InProcessEngine,
    Sampling,
    ScriptDecoder,
    ToolEnvironmentConfig,
    VersionSource,
)

BAR = "\uff5c"


@dataclass(frozen=True, kw_only=True)
class Family:
    """A chat template, the tokens it marks turns with, and a call of add(a=2, b=3)."""

    form: str
    template: str
    call: str
    end: str
    shown: str
    special: tuple[str, ...]
    plain: tuple[str, ...] = ()


MISTRAL = Family(
    form="mistral",
    template=(
        "{{ '<s>' }}{% for m in messages %}"
        "{% if m.role == 'user' %}[INST] {{ m.content }}[/INST]"
        "{% elif m.tool_calls is defined %}[TOOL_CALLS] ["
        "{% for c in m.tool_calls %}{% if c.id|length != 9 %}{{ raise_exception('9') }}{% endif %}"
        '{"name": {{ c.function.name|tojson }}, "arguments": {{ c.function.arguments|tojson }}, '
        '"id": "{{ c.id }}"}{% if not loop.last %}, {% endif %}{% endfor %}]</s>'
        "{% elif m.role == 'assistant' %} {{ m.content }}</s>"
        "{% elif m.role == 'tool' %}"
        "{% if m.tool_call_id is undefined or m.tool_call_id|length != 9 %}"
        "{{ raise_exception('Tool call IDs should be alphanumeric strings with length 9!') }}"
        '{% endif %}[TOOL_RESULTS] {"content": {{ m.content|tojson }}, '
        '"call_id": "{{ m.tool_call_id }}"}[/TOOL_RESULTS]{% endif %}{% endfor %}'
    ),
    call='[TOOL_CALLS] [{"name": "add", "arguments": {"a": 2, "b": 3}, "id": "VvvODy9mT"}]',
    end="</s>",
    shown='[TOOL_RESULTS] {"content": "5", "call_id": "VvvODy9mT"}[/TOOL_RESULTS]',
    special=("<s>", "</s>", "[INST]", "[/INST]", "[TOOL_CALLS]", "[TOOL_RESULTS]"),
)
HEADER = "<|start_header_id|>{{ '%s' }}<|end_header_id|>\n\n"
LLAMA = Family(
    form="llama3_json",
    template=(
        "{{ '<|begin_of_text|>' }}{% for m in messages %}"
        "{% if m.tool_calls is defined %}"
        "{% if m.tool_calls|length != 1 %}{{ raise_exception('only one') }}{% endif %}"
        "{% set f = m.tool_calls[0].function %}" + HEADER % "assistant" + '{"name": "{{ f.name }}",'
        ' "parameters": {{ f.arguments|tojson }}}'
        "{% if builtin_tools is defined %}<|eom_id|>{% else %}<|eot_id|>{% endif %}"
        "{% elif m.role == 'tool' %}"
        + HEADER
        % "ipython"
        + "{% if m.content is iterable %}{{ m.content|tojson }}{% endif %}<|eot_id|>"
        "{% else %}<|start_header_id|>{{ m.role }}<|end_header_id|>\n\n{{ m.content }}<|eot_id|>"
        "{% endif %}{% endfor %}{% if add_generation_prompt %}"
        + HEADER % "assistant"
        + "{% endif %}"
    ),
    call='<|python_tag|>{"name": "add", "parameters": {"a": 2, "b": 3}}',
    end="<|eot_id|>",
    shown='<|start_header_id|>ipython<|end_header_id|>\n\n"5"<|eot_id|>'
    "<|start_header_id|>assistant<|end_header_id|>\n\n",
    special=(
        "<|begin_of_text|>",
        "<|start_header_id|>",
        "<|end_header_id|>",
        "<|eot_id|>",
        "<|python_tag|>",
        "<|eom_id|>",
    ),
)
HARMONY = Family(
    form="harmony",
    template=(
        "{% set last = namespace(name=none) %}{% for m in messages %}"
        "{% if m.role == 'assistant' and 'tool_calls' in m %}"
        "{% set c = m.tool_calls[0].function %}<|start|>assistant to=functions.{{ c.name }}"
        "<|channel|>commentary json<|message|>{{ c.arguments|tojson }}<|call|>"
        "{% set last.name = c.name %}"
        "{% elif m.role == 'assistant' %}{% set last.name = none %}"
        "<|start|>assistant<|channel|>final<|message|>{{ m.content }}"
        "{% if loop.last and not add_generation_prompt %}<|return|>{% else %}<|end|>{% endif %}"
        "{% elif m.role == 'tool' %}{% if last.name is none %}{{ raise_exception('no call') }}"
        "{% endif %}<|start|>functions.{{ last.name }} to=assistant<|channel|>commentary"
        "<|message|>{{ m.content|tojson }}<|end|>"
        "{% else %}<|start|>{{ m.role }}<|message|>{{ m.content }}<|end|>{% endif %}{% endfor %}"
        "{% if add_generation_prompt %}<|start|>assistant{% endif %}"
    ),
    call="<|channel|>analysis<|message|>2 and 3<|end|><|start|>assistant<|channel|>commentary "
    'to=functions.add <|constrain|>json<|message|>{"a": 2, "b": 3}',
    end="<|call|>",
    shown='<|start|>functions.add to=assistant<|channel|>commentary<|message|>"5"<|end|>'
    "<|start|>assistant",
    special=(
        "<|start|>",
        "<|channel|>",
        "<|message|>",
        "<|end|>",
        "<|call|>",
        "<|return|>",
        "<|constrain|>",
    ),
)
DEEPSEEK = Family(
    form="deepseek_v3",
    template=(
        "{% set ns = namespace(is_tool=false) %}{{ '<|begin of sentence|>' }}"
        "{% for m in messages %}{% if m.role == 'user' %}{% set ns.is_tool = false %}"
        "<|User|>{{ m.content }}{% elif m.role == 'assistant' and m.content is none %}"
        "<|Assistant|><|tool▁calls▁begin|>{% for c in m.tool_calls %}<|tool▁call▁begin|>function"
        "<|tool▁sep|>{{ c.function.name + '\n```json\n' + c.function.arguments + '\n```' }}"
        "<|tool▁call▁end|>{% endfor %}<|tool▁calls▁end|><|end▁of▁sentence|>"
        "{% elif m.role == 'assistant' %}{% if ns.is_tool %}<|tool▁outputs▁end|>{% else %}"
        "<|Assistant|>{% endif %}{{ m.content }}<|end▁of▁sentence|>{% else %}"
        "{% if not ns.is_tool %}<|tool▁outputs▁begin|>{% endif %}{% set ns.is_tool = true %}"
        "<|tool▁output▁begin|>{{ m.content }}<|tool▁output▁end|>{% endif %}{% endfor %}"
        "{% if ns.is_tool %}<|tool▁outputs▁end|>{% endif %}"
        "{% if add_generation_prompt and not ns.is_tool %}<|Assistant|>{% endif %}"
    )
    .replace("|>", f"{BAR}>")
    .replace("<|", f"<{BAR}"),
    call=(
        "<|tool▁calls▁begin|><|tool▁call▁begin|>function<|tool▁sep|>add\n```json\n"
        '{"a": 2, "b": 3}\n```<|tool▁call▁end|><|tool▁calls▁end|>'
    ).replace("|", BAR),
    end=f"<{BAR}end▁of▁sentence{BAR}>",
    shown=(
        "<|tool▁outputs▁begin|><|tool▁output▁begin|>5<|tool▁output▁end|><|tool▁outputs▁end|>"
    ).replace("|", BAR),
    special=(f"<{BAR}end▁of▁sentence{BAR}>", f"<{BAR}begin of sentence{BAR}>"),
    plain=tuple(
        f"<{BAR}{name}{BAR}>"
        for name in ("User", "Assistant", "tool▁output▁end", "tool▁outputs▁begin", "tool▁sep")
    ),
)
KIMI = Family(
    form="kimi_k2",
    template=(
        "{% for m in messages %}<|im_{{ m.role }}|>{{ m.role }}<|im_middle|>"
        "{% if m.tool_calls is defined %}<|tool_calls_section_begin|>{% for c in m.tool_calls %}"
        "<|tool_call_begin|>{{ c.id }}<|tool_call_argument_begin|>"
        "{{ c.function.arguments|tojson }}<|tool_call_end|>{% endfor %}<|tool_calls_section_end|>"
        "{% elif m.role == 'tool' %}## Return of {{ m.tool_call_id }}\n{{ m.content }}"
        "{% else %}{{ m.content }}{% endif %}<|im_end|>{% endfor %}"
        "{% if add_generation_prompt %}<|im_assistant|>assistant<|im_middle|>{% endif %}"
    ),
    call="<|tool_calls_section_begin|><|tool_call_begin|>functions.add:0"
    '<|tool_call_argument_begin|>{"a": 2, "b": 3}<|tool_call_end|><|tool_calls_section_end|>',
    end="<|im_end|>",
    shown="<|im_tool|>tool<|im_middle|>## Return of functions.add:0\n5<|im_end|>"
    "<|im_assistant|>assistant<|im_middle|>",
    special=("<|im_end|>", "<|im_middle|>", "<|im_user|>", "<|im_assistant|>", "<|im_tool|>"),
)
QWEN = Family(
    form="qwen3_coder",
    template=(
        "{% for m in messages %}{% if m.role == 'tool' %}<|im_start|>user\n<tool_response>\n"
        "{{ m.content }}\n</tool_response>{% else %}<|im_start|>{{ m.role }}\n{{ m.content or '' }}"
        "{% for c in m.tool_calls or [] %}\n<tool_call>\n<function={{ c.function.name }}>\n"
        "{% for k, v in c.function.arguments|items %}<parameter={{ k }}>\n{{ v }}\n</parameter>\n"
        "{% endfor %}</function>\n</tool_call>{% endfor %}{% endif %}<|im_end|>\n{% endfor %}"
        "{% if add_generation_prompt %}<|im_start|>assistant\n{% endif %}"
    ),
    call="<tool_call>\n<function=add>\n<parameter=a>\n2\n</parameter>\n<parameter=b>\n3\n"
    "</parameter>\n</function>\n</tool_call>",
    end="<|im_end|>",
    shown="\n<|im_start|>user\n<tool_response>\n5\n</tool_response><|im_end|>\n"
    "<|im_start|>assistant\n",
    special=("<|im_start|>", "<|im_end|>"),
    plain=("<tool_call>", "</tool_call>", "<tool_response>", "</tool_response>"),
)
GLM = Family(
    form="glm45",
    template=(
        "[gMASK]<sop>{% for m in messages %}{% if m.role == 'tool' %}"
        "{% if messages[loop.index0 - 1].role != 'tool' %}<|observation|>{% endif %}"
        "{{ '\n<tool_response>\n' + m.content + '\n</tool_response>' }}"
        "{% else %}<|{{ m.role }}|>\n{{ m.content }}{% for c in m.tool_calls or [] %}"
        "\n<tool_call>{{ c.function.name }}\n{% for k, v in c.function.arguments|items %}"
        "<arg_key>{{ k }}</arg_key>\n<arg_value>{{ v }}</arg_value>\n{% endfor %}</tool_call>"
        "{% endfor %}{% endif %}{% endfor %}"
        "{% if add_generation_prompt %}<|assistant|>\n{% endif %}"
    ),
    call="<tool_call>add\n<arg_key>a</arg_key>\n<arg_value>2</arg_value>\n"
    "<arg_key>b</arg_key>\n<arg_value>3</arg_value>\n</tool_call>",
    end="<|observation|>",
    shown="\n<tool_response>\n5\n</tool_response><|assistant|>\n",
    special=("[gMASK]", "<sop>", "<|user|>", "<|assistant|>", "<|observation|>"),
    plain=("<tool_call>", "</tool_call>", "<tool_response>", "</tool_response>"),
)
FAMILIES = {f.form: f for f in (MISTRAL, LLAMA, HARMONY, DEEPSEEK, KIMI, QWEN, GLM)}


def tokenizer_of(family: Family) -> PreTrainedTokenizerFast:
    """Bytes, and the family's tokens."""
    alphabet = sorted(tokenizers.pre_tokenizers.ByteLevel.alphabet())
    vocabulary = {letter: index for index, letter in enumerate(alphabet)}
    made = tokenizers.Tokenizer(tokenizers.models.BPE(vocab=vocabulary, merges=[]))
    made.pre_tokenizer = tokenizers.pre_tokenizers.ByteLevel(add_prefix_space=False)
    made.decoder = tokenizers.decoders.ByteLevel()
    made.add_special_tokens(list(family.special))
    made.add_tokens([tokenizers.AddedToken(text, normalized=False) for text in family.plain])
    return PreTrainedTokenizerFast(
        tokenizer_object=made, eos_token=family.end, chat_template=family.template
    )


TOOLS = '''
def add(a: int, b: int) -> str:
    """Add two numbers.

    Args:
        a: the first
        b: the second
    """
    return RESULT.get(a, a + b)
'''


async def play(family: Family, tmp_path, *replies: str, result: str = ""):
    """Return the tokenizer and an episode in which these replies are sampled one after another."""
    tokenizer = tokenizer_of(family)
    path = tmp_path / "tools.py"
    path.write_text(f"{TOOLS}\nRESULT = { ({2: result} if result else {})!r}\n")
    end = tokenizer.convert_tokens_to_ids(family.end)
    spelled = [[*tokenizer.encode(text, add_special_tokens=False), end] for text in replies]

    def script(request, position, version):
        said = spelled[int(request.request_id.partition(".")[2] or 0)]
        return said[position], -0.5

    decoder = ScriptDecoder(script, context_length=4096, vocabulary_size=len(tokenizer))
    engine = InProcessEngine(decoder, version=1, source=VersionSource())
    environment = ToolEnvironmentConfig(functions=(f"{path}:add",)).build()
    sampling = Sampling(max_new_tokens=500, stop_token_ids=(end,))
    renderer = ChatRenderer(tokenizer, environment.tools)
    talk = Conversation(engine, renderer, name="e", sampling=sampling, limits=EpisodeLimits())
    try:
        async with asyncio.timeout(60):
            return tokenizer, await talk.play(environment, ROW, seed=1)
    finally:
        await engine.aclose()
        await environment.aclose()
