"""Environments: what the model talks to between its prompt and its reward."""

from cosmos_rollout.environments.conversation import Conversation
from cosmos_rollout.environments.environment import Chat, Environment, EpisodeLimits, Reply
from cosmos_rollout.environments.gymnasium_env import (
    GymnasiumEnvironment,
    GymnasiumEnvironmentConfig,
)
from cosmos_rollout.environments.kinds import EnvironmentConfig, PythonEnvironmentConfig
from cosmos_rollout.environments.rendering import ChatRenderer, ChatTokenizer
from cosmos_rollout.environments.tool_calls import ToolCall
from cosmos_rollout.environments.tools import ToolEnvironment, ToolEnvironmentConfig
from cosmos_rollout.environments.verifiers_env import VerifiersEnvironmentConfig
from cosmos_rollout.environments.verifiers_env_01 import VerifiersEnvironment

__all__ = [
    "Chat",
    "ChatRenderer",
    "ChatTokenizer",
    "Conversation",
    "Environment",
    "EnvironmentConfig",
    "EpisodeLimits",
    "GymnasiumEnvironment",
    "GymnasiumEnvironmentConfig",
    "PythonEnvironmentConfig",
    "Reply",
    "ToolCall",
    "ToolEnvironment",
    "ToolEnvironmentConfig",
    "VerifiersEnvironment",
    "VerifiersEnvironmentConfig",
]
