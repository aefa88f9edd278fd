"""What a run needs on disk before its first process: data files and a model directory.

Everything made here lies in the run directory, is made once, and is found again on ``--resume``.
"""

import json
from collections.abc import Iterable, Iterator, Mapping
from dataclasses import dataclass, replace
from pathlib import Path
from typing import TYPE_CHECKING, Any, cast

from cosmos_app.chat_templates import require_chat_template
from cosmos_app.context_length import require_context
from cosmos_app.engine_workers import require_workers
from cosmos_app.errors import DataError
from cosmos_app.held import held_training
from cosmos_app.length_reward import budget_of
from cosmos_app.prompt_rows import prompt_rows
from cosmos_app.quickstart.tiny_model import TinyModelConfig, architecture, build_tiny_model
from cosmos_app.recipe import PolicyConfig, Recipe
from cosmos_app.required_rewards import require_rewards
from cosmos_app.servable import check_prompts
from cosmos_parallel import (
    MeshError,
    PictureError,
    PictureReader,
    check_model_directory,
    check_place,
    check_trainable,
    read_config,
)
from cosmos_parallel import ModelConfig as HeldModelConfig
from cosmos_rollout import RewardPoolConfig, data_set_of, has_words

if TYPE_CHECKING:
    from transformers import PretrainedConfig

NEED_ANSWERS = frozenset({"exact", "boxed_math", "math", "gsm8k", "multiple_choice"})
"""Kinds of rewards that no row without an answer can have."""
_SOME_TOKENS = 16
"""How many a model that is built will have, its data say."""


@dataclass(frozen=True, kw_only=True, slots=True)
class RunFiles:
    """Where a run's inputs lie.

    Attributes:
        train: JSON lines that training prompts are taken from.
        held_out: JSON lines that only validation sees.
        built_model: the model built for this run; absent when the recipe names one.
        model: the model that RL starts from.
    """

    train: Path
    held_out: Path
    built_model: Path
    model: Path

    @property
    def with_rows(self) -> list[Path]:
        """The data files that have rows, once they are written."""
        return [path for path in (self.train, self.held_out) if path.stat().st_size]


def run_files(recipe: Recipe, run_dir: Path) -> RunFiles:
    """Return the paths of a run's inputs, whether or not they exist yet."""
    warm = recipe.model.path is None and recipe.warmup.steps > 0
    built = run_dir / "model"
    return RunFiles(
        train=run_dir / "data" / "train.jsonl",
        held_out=run_dir / "data" / "held_out.jsonl",
        built_model=built,
        model=(run_dir / "warm_model" if warm else recipe.model.path or built).absolute(),
    )


def check_inputs(recipe: Recipe) -> tuple[str, ...]:
    """Look at every file the recipe names, before anything is written.

    Returns:
        What is legal but unwise.

    Raises:
        DataError: naming file, line and what is wrong, or the setting of a function that is not
            there.
        MeshError: if the model cannot be divided as the recipe says.
        CheckpointPlaceError: if nothing knows how to reach where checkpoints should lie.
    """
    require_rewards(recipe)
    check_place(recipe.trainer.checkpoints)
    for source in recipe.data.sources:
        for path in (source.path, source.held_out_path):
            if path is None:
                continue
            images, videos = _num_shown(path, source.name, recipe)
            if images or videos:
                require_sight(recipe.model.path, path, videos=videos > 0)
                _require_shown(recipe, path, videos=videos > 0)
    model = recipe.model.path or recipe.model.tiny
    require_trainable(model, recipe.policy, held_training(recipe))
    if recipe.model.path is not None:
        require_teacher_of(recipe, recipe.model.path)
    require_context("rollout.engine", recipe.rollout.engine, model)
    require_workers("rollout.engine", recipe.rollout.engine, config_of(model))
    if recipe.teacher.replicas and recipe.model.teacher is not None:
        require_context("teacher.engine", recipe.teacher.engine, recipe.model.teacher)
        require_workers("teacher.engine", recipe.teacher.engine, config_of(recipe.model.teacher))
    if recipe.rollout.environment is not None:
        require_chat_template(recipe.model.path, "rollout.environment")
    return check_prompts(recipe)


def require_sight(model: Path | None, data: Path, *, videos: bool = False) -> None:
    """Check that a model can be shown the pictures of its data, and its videos if it has any.

    Raises:
        DataError: if it sees none.
    """
    if model is None:
        raise DataError(f"data file {data}: has pictures; name a model that sees by model.path")
    require_model(model)
    reader = PictureReader.of(model)
    if reader is None:
        raise DataError(
            f"data file {data}: has pictures, and the model {model} sees none: it is of type "
            f"{read_config(model).model_type}, or has no preprocessor_config.json"
        )
    if videos:
        try:
            reader.check_videos()
        except PictureError as error:
            raise DataError(f"data file {data}: has videos: {error}") from error


def _require_shown(recipe: Recipe, data: Path, *, videos: bool) -> None:
    """Check that all that read a recipe's prompts take pictures and videos.

    Raises:
        DataError: naming the part that takes none.
    """
    kind = recipe.rollout.engine.kind
    if kind != "vllm":
        raise DataError(
            f"data file {data}: has pictures, which rollout.engine.kind={kind!r} does not take; "
            "'vllm' does"
        )
    if recipe.teacher.urls:
        raise DataError(
            f"data file {data}: has pictures, which servers at teacher.urls are not shown; have "
            "teachers of the run's own score (teacher.replicas), or the policy's ranks"
        )
    scores_by = recipe.teacher.engine.kind
    if recipe.teacher.replicas and scores_by != "vllm":
        raise DataError(
            f"data file {data}: has pictures, which teacher.engine.kind={scores_by!r} does not "
            "take; 'vllm' does"
        )
    teacher = recipe.model.teacher
    if teacher is not None and "teacher_logprobs" in recipe.algorithm.build().needs:
        require_sight(teacher, data, videos=videos)


def _num_shown(path: Path, name: str, recipe: Recipe) -> tuple[int, int]:
    """Read all rows of a file of a data set, and count their pictures and videos.

    Raises:
        DataError: if one lacks the answer that a reward compares with, or its budget of tokens, or
            no reward judges it.
    """
    images = videos = 0
    budget = getattr(recipe.length_reward, "field", "")
    for number, row in enumerate(prompt_rows(path, sampling=recipe.data.video_sampling), 1):
        where = f"data file {path}: row {number}"
        if recipe.rollout.environment is None:
            _require_judged(row, name or data_set_of(row), recipe.reward, where)
        if budget:
            _require_budget(row, budget, where)
        images += len(row.get("images", ()))
        videos += len(row.get("videos", ()))
    return images, videos


def _require_judged(
    row: Mapping[str, Any], data_set: str, rewards: RewardPoolConfig, where: str
) -> None:
    parts = (*rewards.rewards, *rewards.group_rewards)
    due = [part for part in parts if rewards.judges(part.name, data_set)]
    if not due:
        raise DataError(
            f"{where}: it is of the data set {data_set!r}, which no reward judges: reward.sets "
            "gives each to others"
        )
    needing = [part.name for part in due if part.kind in NEED_ANSWERS]
    if needing and row.get("answer") is None:
        raise DataError(
            f"{where} has no 'answer', which the reward {needing[0]!r} compares with (found: "
            f"{', '.join(sorted(row))}); give it one, or set reward.rewards, or reward.sets"
        )


def _require_budget(row: Mapping[str, Any], field: str, where: str) -> None:
    try:
        budget_of(row, field)
    except ValueError as error:
        raise DataError(f"{where}: {error}") from error


def require_teacher_of(recipe: Recipe, model: Path) -> None:
    """Look whether a recipe's teacher, if its algorithm wants one, has the tokens of the model.

    Raises:
        DataError: if it has not, or the policy's ranks, which score by it, cannot divide it.
    """
    teacher = recipe.model.teacher
    if teacher is None or "teacher_logprobs" not in recipe.algorithm.build().needs:
        return
    require_one_vocabulary(teacher, model)
    if not recipe.teacher.is_beside:
        require_scoring(teacher, recipe.policy, recipe.model.training)


def prepare_model(recipe: Recipe, files: RunFiles) -> int:
    """Build the tiny model when the recipe names none; return its number of parameters, or 0.

    Raises:
        DataError: if the recipe names a directory without a model in it, or a teacher with other
            tokens than those of the data.
    """
    if recipe.model.path is not None:
        require_model(recipe.model.path)
        return 0
    texts = (
        text
        for path in files.with_rows
        for row in prompt_rows(path)
        for text in (json.dumps(row, ensure_ascii=False), *texts_in(row))
    )
    parameters = build_once(files.built_model, texts, recipe.model.tiny, recipe.seed)
    require_teacher_of(recipe, files.built_model)
    return parameters


def texts_in(row: object) -> Iterator[str]:
    """Yield all texts of a row, however deep; what shows it whole writes a new line otherwise."""
    waiting = [row]
    while waiting:
        found = waiting.pop()
        if isinstance(found, str):
            yield found
        elif isinstance(found, dict):
            waiting += cast("dict[object, object]", found).values()
        elif isinstance(found, list):
            waiting += cast("list[object]", found)


def build_once(directory: Path, texts: Iterable[str], tiny: TinyModelConfig, seed: int) -> int:
    """Build a tiny model that knows the characters of ``texts``, unless it is there already.

    Returns:
        Its number of parameters; 0 if it was there.
    """
    if directory.exists():
        return 0
    partial = directory.with_suffix(".partial")
    parameters = build_tiny_model(partial, texts, tiny, seed)
    partial.replace(directory)
    return parameters


def require_one_vocabulary(teacher: Path, model: Path) -> None:
    """Look whether a teacher has the tokens of the model that learns from it, by the same numbers.

    Tokenizers of both are compared where the teacher has one: what one family calls by a number
    means something else in another. A teacher may have tokens more, or other names for some, among
    the numbers that both models have. One of the two may have rows more (Qwen2.5 of 7B and above
    than the smaller ones): padding, which neither tokenizer has a token for.

    Raises:
        DataError: if it does not.
        ModelNotFoundError: if there is no model where the teacher should be.
    """
    check_model_directory(teacher)
    theirs, ours = (read_config(path).get_text_config().vocab_size for path in (teacher, model))
    if not any(teacher.glob("tokenizer*.json")):
        if theirs != ours:
            raise DataError(
                f"teacher={teacher}: it knows {theirs} tokens and the model {ours}, and it has no "
                "tokenizer that would say which are padding; they need one vocabulary"
            )
        return
    their_ids, our_ids = (_token_ids(path) for path in (teacher, model))
    other = [t for t in sorted(our_ids.keys() & their_ids) if our_ids[t] != their_ids[t]]
    if other or not our_ids.keys() & their_ids:
        example = f"{other[0]!r} is {their_ids[other[0]]} there and {our_ids[other[0]]} here"
        raise DataError(
            f"teacher={teacher}: it numbers tokens otherwise than the model "
            f"({example if other else 'they have none in common'}); they need one vocabulary"
        )
    shared = min(theirs, ours)
    alone = [t for ids in (their_ids, our_ids) for t, number in ids.items() if number >= shared]
    if theirs != ours and alone:
        raise DataError(
            f"teacher={teacher}: it knows {theirs} tokens and the model {ours}, and {alone[0]!r} "
            f"is none of the first {shared}; they need one vocabulary, padding aside"
        )


def _token_ids(path: Path) -> Mapping[str, int]:
    from transformers import AutoTokenizer

    tokenizer: Any = AutoTokenizer.from_pretrained(path)  # of any model
    return tokenizer.get_vocab()


def require_trainable(
    model: Path | TinyModelConfig, policy: PolicyConfig, training: HeldModelConfig
) -> None:
    """Check that a directory holds a model, and that a replica's ranks can divide it.

    Args:
        model: its directory, or what is built.
        policy: the ranks.
        training: how they hold it.

    Raises:
        DataError: naming what is missing.
        MeshError: saying which degree does not divide what.
    """
    if isinstance(model, Path):
        require_model(model)
    check_trainable(config_of(model), training, policy.parallel, policy.ranks)


def config_of(model: Path | TinyModelConfig) -> "PretrainedConfig":
    """Return the config of a model, or of one that is built, but for the size of its vocabulary."""
    return read_config(model) if isinstance(model, Path) else architecture(model, _SOME_TOKENS)


def require_scoring(teacher: Path, policy: PolicyConfig, training: HeldModelConfig) -> None:
    """Check that a replica's ranks can divide a teacher that they score by, as they hold it.

    Raises:
        DataError: saying which degree does not divide what.
    """
    held = replace(training, lora=None)
    try:
        check_trainable(read_config(teacher), held, policy.parallel, policy.ranks)
    except MeshError as error:
        raise DataError(f"teacher={teacher}: {error}") from error


def require_model(path: Path) -> None:
    """Check that a directory holds a model.

    Raises:
        DataError: naming what is missing, also of a tokenizer, which transformers 5 may load
            without its vocabulary.
    """
    if not path.is_dir():
        raise DataError(
            f"model.path={path}: no such directory; give a local Hugging Face model directory "
            "(config.json, *.safetensors, tokenizer files)"
        )
    missing = [
        what
        for what, found in (
            ("config.json", (path / "config.json").exists()),
            ("*.safetensors", any(path.glob("*.safetensors"))),
            ("tokenizer.json or tokenizer_config.json", any(path.glob("tokenizer*.json"))),
        )
        if not found
    ]
    if missing:
        raise DataError(f"model.path={path}: not a complete model, it has no {', '.join(missing)}")
    require_words(path)


def require_words(path: Path) -> None:
    """Check that a model directory has a tokenizer with words.

    Raises:
        DataError: if it has not.
    """
    from transformers import AutoTokenizer

    try:
        tokenizer = AutoTokenizer.from_pretrained(path)
    except (ImportError, KeyError, OSError, TypeError, ValueError) as error:
        raise DataError(f"model.path={path}: its tokenizer cannot be loaded: {error}") from error
    if not has_words(tokenizer):
        raise DataError(
            f"model.path={path}: its tokenizer has no vocabulary (tokenizer.json, or vocab.json "
            "and merges.txt, or a .model file): all texts would be unknown tokens"
        )
