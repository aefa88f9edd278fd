"""What recipes of world models can say: factors of the pairwise sweep, each level as overrides."""

from collections.abc import Mapping
from pathlib import Path

import pairs_rl

from cosmos_wfm import (
    save_pipeline,
    tiny_cosmos_pipeline,
    tiny_sana_pipeline,
    tiny_sana_video_pipeline,
    tiny_sd3_pipeline,
    tiny_wan_pipeline,
    tiny_wan_small_pipeline,
)

STEPS = 3
_MODELS = {
    "sd3": tiny_sd3_pipeline,
    "sana": tiny_sana_pipeline,
    "wan": tiny_wan_pipeline,
    "wan_small": tiny_wan_small_pipeline,
    "cosmos": tiny_cosmos_pipeline,
    "sana_video": tiny_sana_video_pipeline,
}
_IMAGES = frozenset(("sd3", "sana"))
_PIXELS = 64
FIXED = (f"num_steps={STEPS}", "dashboard.enabled=false", "save_every=0")
_RL = ("groups_per_step=2", "samples_per_group=2")
_DDRL = "policy={clip=1e-4, kl=0.0, sde={kind='flow', eta=0.7}}"
_OPTIMIZERS = ("adamw", "sgd", "muon", "adamw_8bit")

VICTIMS = ("all",)

LEVELS: dict[str, dict[str, tuple[str, ...]]] = {
    "task": {
        "nft": (*_RL, "algorithm={kind='nft'}"),
        "nft_lagging": (*_RL, "algorithm={kind='nft', kl=0.0, decay={rate=0.5}}"),
        "flow_grpo": (*_RL, "algorithm={kind='flow_grpo', kl=0.01}"),
        "dance": (*_RL, "algorithm={kind='flow_grpo', sde={kind='dance', num_noisy=1}}"),
        "awm": (*_RL, "algorithm={kind='awm', kl=1e-4, standardise='group'}"),
        "ddrl": (*_RL, "algorithm={kind='ddrl', form='paper', " + _DDRL + "}"),
        "ddrl_shortcut": (*_RL, "algorithm={kind='ddrl', form='shortcut', " + _DDRL + "}"),
        "sft": ("batch_size=4",),
    },
    "model": {name: (f"model={{files}}/{name}",) for name in _MODELS},
    "tuning": {
        "lora": ("tuning={kind='lora', rank=4, alpha=8}",),
        "full": ("tuning={kind='full'}",),
    },
    "guidance": {"none": (), "some": ("sampler.guidance=3.0",)},
    "ranks": {
        "one": (),
        "fsdp": (),
        "replicated": ("parallel={dp_replicate=2, dp_shard=1}",),
        "cp": ("parallel.cp=2",),
    },
    "micro": {"one": ("micro_batch_size=1",), "three": ("micro_batch_size=3",)},
    "recompute": {"no": (), "yes": ("recompute=true",)},
    "validation": {
        "none": (),
        "each": (
            "validation={prompts=['a red square', 'a blue circle'], every=1, samples_per_prompt=1,"
            " sampler={num_steps=2, height=PIXELS, width=PIXELS, frames=FRAMES}}",
        ),
    },
    "dtype": {"float32": (), "bfloat16": ("compute.dtype=bfloat16",)},
    "compile": {"none": (), "aot_eager": ("compute.compile=aot_eager",)},
    "optimizer": {name: pairs_rl.LEVELS["optimizer"][name] for name in _OPTIMIZERS},
    "ema": {"none": ("learner.ema=none",), "kept": ("learner.ema={decay=0.5}",)},
    "apart": {
        "no": (),
        "in_step": ("disaggregated={replicas=1}",),
        "ahead": ("disaggregated={replicas=2, max_lag=1}",),
    },
    "checkpoints": {"none": (), "each": ("checkpoint_every=1",)},
}
_APART = frozenset(("in_step", "ahead"))
CONFLICTS = (
    {"task": frozenset(("sft",)), "apart": _APART},
    {"task": frozenset(("sft",)), "guidance": frozenset(("some",))},
    {"task": frozenset(("nft", "nft_lagging", "awm")), "guidance": frozenset(("some",))},
    {"ranks": frozenset(("one",)), "dtype": frozenset(("bfloat16",))},
)


def recipe_of(row: Mapping[str, str]) -> str:
    """Return the recipe that a row overrides."""
    return f"configs/wfm/sd3_{'sft' if row['task'] == 'sft' else 'nft'}_mock.toml"


def num_ranks(row: Mapping[str, str]) -> int:
    """Return how many processes torchrun starts; 1 for none."""
    return 1 if row["ranks"] == "one" else 2


def overrides_of(row: Mapping[str, str], files: Path) -> list[str]:
    """Return a row as the overrides of its recipe."""
    frames = 1 if row["model"] in _IMAGES else 5
    size = f"height={_PIXELS}, width={_PIXELS}, frames={frames}"
    if row["task"] == "sft":
        sizes = [f"data={{kind='mock', num_samples=6, {size}}}"]
    else:
        sizes = [f"sampler={{num_steps=3, {size}}}"]
    if row["task"].startswith("ddrl"):
        sizes.append(f"data={{kind='mock', num_samples=6, {size}}}")
    chosen = (override for factor, level in row.items() for override in LEVELS[factor][level])
    return [
        each.replace("{files}", str(files))
        .replace("PIXELS", str(_PIXELS))
        .replace("FRAMES", str(frames))
        for each in (*FIXED, *sizes, *chosen)
    ]


def write_files(files: Path) -> None:
    """Write a tiny pipeline of each family."""
    for name, build in _MODELS.items():
        if not (files / name).exists():
            save_pipeline(build(), files / name)
