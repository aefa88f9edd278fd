"""Conversations that are told whole each time, to a transcript and over HTTP."""

import json
from collections.abc import Mapping, Sequence

import httpx
import pytest

pytest.importorskip("aiohttp")

from cosmos_rollout import EpisodeError, Message, Reply
from cosmos_rollout.environments.chat_endpoint import SESSION_HEADER, ChatEndpoint
from cosmos_rollout.environments.tool_calls import read_reply
from cosmos_rollout.environments.transcript import Transcript
from cosmos_rollout.environments.verifiers_env import loader_for

ADD = {"type": "function", "function": {"name": "add"}}
CALL = json.dumps({"name": "add", "arguments": {"a": 1}})


class Player:
    """A chat that says what a list has, and keeps what it was told."""

    def __init__(self, *replies: str) -> None:
        self._replies = list(replies)
        self.told: list[list[Message]] = []
        self.tools: list[Mapping[str, object]] = []

    async def reply(self, messages: Sequence[Message]) -> Reply:
        self.told.append(list(messages))
        text = self._replies.pop(0)
        found = read_reply(text)
        return Reply(
            text=text,
            calls=found.calls,
            content=found.content,
            finish_reason="stop",
            is_last=not self._replies,
        )

    def show(self, tools: Sequence[Mapping[str, object]]) -> None:
        self.tools = list(tools)

    def note(self, metrics: Mapping[str, float]) -> None:
        raise AssertionError(metrics)


def user(text: object) -> Message:
    return {"role": "user", "content": text}


def said(completion: Mapping[str, object]) -> Message:
    (choice,) = completion["choices"]
    return choice["message"]


async def test_only_what_is_new_is_said():
    player = Player("one", "two")
    transcript = Transcript(player)
    told = [user("?")]
    told.append(said(await transcript.completion(told)))
    told.append(user([{"type": "text", "text": "and"}]))
    assert not transcript.is_over
    assert said(await transcript.completion(told)) == {"role": "assistant", "content": "two"}
    assert player.told == [[user("?")], [user([{"type": "text", "text": "and"}])]]
    assert transcript.is_over


@pytest.mark.parametrize(
    "told",
    [
        [user("!"), {"role": "assistant", "content": "one"}, user("x")],
        [user("?"), {"role": "assistant", "content": "ONE"}, user("x")],
        [user("?")],
    ],
)
async def test_what_is_not_a_continuation_is_refused(told):
    transcript = Transcript(Player("one", "two"))
    await transcript.completion([user("?")])
    with pytest.raises(EpisodeError, match="rewrote what had been said"):
        await transcript.completion(told)


async def test_the_model_may_be_asked_to_go_on():
    player = Player("one", "two")
    transcript = Transcript(player)
    answer = said(await transcript.completion([user("?")]))
    await transcript.completion([user("?"), answer])
    assert player.told == [[user("?")], []]


async def test_tools_are_shown_once_and_not_changed():
    player = Player("one", "two")
    transcript = Transcript(player)
    transcript.show([ADD])
    await transcript.completion([user("?")])
    transcript.show([ADD])
    assert player.tools == [ADD]
    with pytest.raises(EpisodeError, match="changed its tools"):
        transcript.show([])


async def asked(url: str, session: str, **body: object) -> httpx.Response:
    async with httpx.AsyncClient(trust_env=False) as client:
        return await client.post(
            f"{url}/chat/completions",
            json={"model": "any", "messages": [user("?")], **body},
            headers={SESSION_HEADER: session},
        )


def answering(player: Player):
    transcript = Transcript(player)

    async def answer(body: Mapping[str, object]) -> dict[str, object]:
        return await transcript.completion(body["messages"])

    return answer


async def test_each_session_is_answered_by_its_own_chat():
    async with ChatEndpoint() as endpoint:
        for name in ("a", "b"):
            endpoint.join(name, answering(Player(f"I am {name}")))
        for name in ("b", "a"):
            completion = (await asked(endpoint.url, name)).json()
            assert said(completion) == {"role": "assistant", "content": f"I am {name}"}
            assert completion["choices"][0]["finish_reason"] == "stop"


async def test_calls_of_tools_are_as_openai_has_them():
    async with ChatEndpoint() as endpoint:
        endpoint.join("a", answering(Player(f"Well. <tool_call>{CALL}</tool_call>")))
        (choice,) = (await asked(endpoint.url, "a")).json()["choices"]
    (call,) = choice["message"]["tool_calls"]
    assert call["function"] == {"name": "add", "arguments": '{"a": 1}'}
    assert (choice["message"]["content"], choice["finish_reason"]) == ("Well.", "tool_calls")


async def test_a_stream_is_one_event_and_its_end():
    async with ChatEndpoint() as endpoint:
        endpoint.join("a", answering(Player(f"<tool_call>{CALL}</tool_call>")))
        response = await asked(endpoint.url, "a", stream=True)
    assert response.headers["content-type"] == "text/event-stream"
    event, end, rest = response.text.split("\n\n")
    assert (end, rest) == ("data: [DONE]", "")
    chunk = json.loads(event.removeprefix("data: "))
    (choice,) = chunk["choices"]
    assert (chunk["object"], choice["finish_reason"]) == ("chat.completion.chunk", "tool_calls")
    (call,) = choice["delta"]["tool_calls"]
    assert (call["index"], call["function"]["name"]) == (0, "add")


async def test_what_cannot_be_recorded_is_refused_with_words_and_not_asked_again():
    async with ChatEndpoint() as endpoint:
        endpoint.join("a", answering(Player("one", "two")))
        await asked(endpoint.url, "a")
        refused = {
            "rewrote what had been said": await asked(endpoint.url, "a", messages=[user("!")]),
            "no conversation": await asked(endpoint.url, "b"),
        }
        endpoint.leave("a")
        refused["no conversation of"] = await asked(endpoint.url, "a")
        async with httpx.AsyncClient(trust_env=False) as client:
            refused["not /v1/responses"] = await client.post(f"{endpoint.url}/responses", json={})
    for words, response in refused.items():
        assert response.status_code == 400
        assert words in response.json()["error"]["message"]


@pytest.mark.parametrize(
    ("installed", "module"),
    [
        ("0.1.10", "verifiers_env_01"),
        ("0.1.10.post1", "verifiers_env_01"),
        ("0.4.0", "verifiers_env_04"),
        ("0.4.3", "verifiers_env_04"),
    ],
)
def test_a_supported_version_of_verifiers_has_a_module(installed, module):
    assert loader_for(installed).__module__ == f"cosmos_rollout.environments.{module}"


@pytest.mark.parametrize(
    "installed", ["0.1.9", "0.1.11", "0.1.100", "0.3.1", "0.5.0", "1.0", "none"]
)
def test_other_versions_of_verifiers_have_none(installed):
    assert loader_for(installed) is None
