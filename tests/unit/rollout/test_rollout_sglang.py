"""SGLang's settings, and what is said where there is none. The engine: in the contract suite."""

import importlib.util
from pathlib import Path

import pytest

from cosmos_rollout import EngineSetup, EngineStartError, SGLangConfig


def test_settings_become_options_of_the_server() -> None:
    config = SGLangConfig(
        device="cpu",
        context_length=256,
        memory_share=0.5,
        extra={"disable_cuda_graph": True, "max_total_tokens": 4096, "enable_metrics": False},
    )
    words = config.arguments(EngineSetup(model_path=Path("/models/tiny"), version=3))
    options = dict(zip(words, [*words[1:], ""], strict=True))
    valued = {name: options[name] for name in words if not options[name].startswith("--")}
    assert valued["--model-path"] == "/models/tiny"
    assert valued["--weight-version"] == "3"
    assert valued["--context-length"] == "256"
    assert valued["--mem-fraction-static"] == "0.5"
    assert valued["--max-total-tokens"] == "4096"
    assert "--disable-cuda-graph" in words
    assert "--enable-metrics" not in words
    assert {"--skip-tokenizer-init", "--disable-overlap-schedule"} <= set(words)
    assert "--mem-fraction-static" not in SGLangConfig().arguments(EngineSetup(model_path=Path()))


@pytest.mark.parametrize(
    ("settings", "message"),
    [
        ({"max_running": 0}, "max_running and tensor_parallel have to be 1 or more"),
        ({"memory_share": 1.0}, r"memory_share has to be in \[0, 1\)"),
        ({"start_s": 0.0}, "start_s, request_s and shutdown_s have to be positive"),
    ],
)
def test_settings_that_make_no_sense_are_refused(settings: dict[str, float], message: str) -> None:
    with pytest.raises(ValueError, match=message):
        SGLangConfig(**settings)  # pyright: ignore[reportArgumentType]


async def test_a_python_that_is_not_there_is_named(tmp_path: Path) -> None:
    config = SGLangConfig(interpreter=tmp_path / "python")
    with pytest.raises(EngineStartError, match=str(tmp_path / "python")):
        await config.build(EngineSetup(model_path=tmp_path))


async def test_a_python_without_sglang_is_a_start_error_with_its_last_words(
    tmp_path: Path,
) -> None:
    if importlib.util.find_spec("sglang") is not None:
        return
    with pytest.raises(EngineStartError, match="No module named 'sglang'"):
        await SGLangConfig(start_s=120.0).build(EngineSetup(model_path=tmp_path))
