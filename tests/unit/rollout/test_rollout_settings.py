"""Settings that nothing could be done with are refused where they are made."""

from pathlib import Path

import pytest

from cosmos_rollout import (
    CodeReward,
    EndpointConfig,
    EpisodeLimits,
    ExactReward,
    FormatReward,
    LengthReward,
    PythonReward,
    RewardPoolConfig,
    Sampling,
    SandboxLimits,
    ScriptedConfig,
    SGLangConfig,
    TeacherSettings,
    ToolEnvironmentConfig,
    VLLMConfig,
)

NAN, INF = float("nan"), float("inf")


@pytest.mark.parametrize(
    ("make", "words"),
    [
        (lambda: FormatReward(pattern="("), "pattern '\\('"),
        (lambda: LengthReward(target=5, limit=5), "target 5 has to be below limit 5"),
        (lambda: PythonReward(function="nothing"), "module:function"),
        (lambda: RewardPoolConfig(rewards=(ExactReward(), ExactReward())), r"twice: \['exact'\]"),
        (lambda: RewardPoolConfig(rewards=()), "at least one"),
        (lambda: RewardPoolConfig(rewards=(ExactReward(weight=NAN),)), r"not of: \['exact'\]"),
        (lambda: RewardPoolConfig(timeout_s=NAN), "timeout_s have to be positive"),
        (lambda: RewardPoolConfig(timeout_s=INF), "start_timeout_s have to be positive and finite"),
        (lambda: EpisodeLimits(timeout_s=INF), "timeout_s have to be positive and finite"),
        (
            lambda: ToolEnvironmentConfig(functions=("a:f",), timeout_s=NAN),
            "timeout_s and num_workers have to be positive and finite",
        ),
        (
            lambda: EndpointConfig(url="http://x/v1", model="m", timeout_s=NAN),
            "timeout_s and connect_s have to be positive and finite",
        ),
        (
            lambda: EndpointConfig(url="http://x/v1", model="m", connect_s=NAN),
            "timeout_s and connect_s have to be positive and finite",
        ),
        (lambda: CodeReward(timeout_s=NAN), "have to be positive and finite .*, found nan, 64"),
        (lambda: CodeReward(timeout_s=INF), "have to be positive and finite .*, found inf, 64"),
        (lambda: SandboxLimits(timeout_s=NAN), "have to be positive and finite .*, found nan, 64"),
        (lambda: SandboxLimits(files_mib=-1), "files_mib have to be 0 or more, found 16 and -1"),
        (lambda: TeacherSettings(deadline_s=NAN), "have to be positive and finite, found nan"),
        (lambda: TeacherSettings(top_k=-1), "top_k has to be 0 or more, found -1"),
        (lambda: ScriptedConfig(step_s=NAN), "step_s has to be 0 or more and finite, found nan"),
        (lambda: ScriptedConfig(mean_length=0), "mean_length has to be 1 or more, found 0"),
        (lambda: VLLMConfig(shutdown_s=NAN), "shutdown_s has to be positive and finite"),
        (
            lambda: SGLangConfig(interpreter=Path("p"), start_s=NAN),
            "have to be positive and finite",
        ),
        (lambda: RewardPoolConfig(memory_mib=-1), "memory_mib has to be 0 or more, found -1"),
        (lambda: Sampling(temperature=NAN), "temperature has to be 0 or more, found nan"),
        (lambda: EpisodeLimits(timeout_s=NAN), "timeout_s have to be positive"),
    ],
)
def test_wrong_settings_are_refused_where_they_are_made(make, words):
    with pytest.raises(ValueError, match=words):
        make()
