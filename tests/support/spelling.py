"""A tokenizer with a chat template, and engines that spell what they are told to say.

The tokenizer knows bytes and one merge: "ab" is a token of its own, while engines here spell "a"
and "b". So tokens that were made of text a second time are told from those that were sampled.
"""

import asyncio

import tokenizers
from transformers import PreTrainedTokenizerFast

from cosmos_rollout import (
    ChatRenderer,
    Conversation,
    EpisodeLimits,
    InProcessEngine,
    PromptRow,
    Sampling,
    ScriptDecoder,
    VersionSource,
)

TEMPLATE = (
    "{% if tools %}<|im_start|>system\n{{ tools | tojson }}<|im_end|>\n{% endif %}"
    "{% for message in messages %}"
    "<|im_start|>{{ message.role }}\n{{ message.content }}<|im_end|>\n"
    "{% endfor %}{% if add_generation_prompt %}<|im_start|>assistant\n{% endif %}"
)
ALPHABET = sorted(tokenizers.pre_tokenizers.ByteLevel.alphabet())
LETTER = {letter: 2 + index for index, letter in enumerate(ALPHABET)}
END = 1


def make_tokenizer() -> PreTrainedTokenizerFast:
    """Bytes, one merge, and ChatML."""
    vocabulary = {"<|im_start|>": 0, "<|im_end|>": END, **LETTER, "ab": 2 + len(LETTER)}
    model = tokenizers.models.BPE(vocab=vocabulary, merges=[("a", "b")])
    made = tokenizers.Tokenizer(model)
    made.pre_tokenizer = tokenizers.pre_tokenizers.ByteLevel(add_prefix_space=False)
    made.decoder = tokenizers.decoders.ByteLevel()
    made.add_special_tokens(["<|im_start|>", "<|im_end|>"])
    return PreTrainedTokenizerFast(
        tokenizer_object=made, eos_token="<|im_end|>", chat_template=TEMPLATE
    )


TOKENIZER = make_tokenizer()
SIZE = len(TOKENIZER)


def spelled(text: str) -> list[int]:
    """One token a byte, as no tokenizer would have it, and the end."""
    return [*(LETTER[letter] for letter in text.replace(" ", "Ġ").replace("\n", "Ċ")), END]


def says(*replies: str):
    """A script that spells the replies, one a turn; the turn is counted by ends of replies."""

    def script(request, position, version):
        turn = sum(
            1
            for i, token in enumerate(request.prompt_token_ids)
            if token == END and assistant_turn(request.prompt_token_ids[:i])
        )
        return spelled(replies[turn])[position], -0.5 - turn

    return script


def assistant_turn(tokens) -> bool:
    """Whether the turn that is open at the end of these tokens is the assistant's."""
    text = TOKENIZER.decode(list(tokens), skip_special_tokens=False)
    return text.rpartition("<|im_start|>")[2].startswith("assistant")


def engine_of(script, context_length: int = 2048) -> InProcessEngine:
    decoder = ScriptDecoder(script, context_length=context_length, vocabulary_size=SIZE)
    return InProcessEngine(decoder, version=3, source=VersionSource())


SAMPLING = Sampling(max_new_tokens=200, stop_token_ids=(END,), seed=5)
ROW = PromptRow(prompt_id="r", prompt="ab?", answer="4")


async def play(environment, script, *, context_length: int = 2048, limits=None):
    engine = engine_of(script, context_length)
    renderer = ChatRenderer(TOKENIZER, environment.tools)
    conversation = Conversation(
        engine, renderer, name="e", sampling=SAMPLING, limits=limits or EpisodeLimits()
    )
    try:
        async with asyncio.timeout(60):
            return await conversation.play(environment, ROW, seed=1)
    finally:
        await engine.aclose()
        await environment.aclose()
