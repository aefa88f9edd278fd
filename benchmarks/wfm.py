"""Reward per CPU second of DiffusionNFT, Flow-GRPO and DDRL on the coloured shapes of the demo.

    python benchmarks/wfm.py [--quick] [--seeds 0,1] [--demos DIR,...] [--budget-s 60]

Each seed has one fine-tuned tiny SD3, made here or by 'make demo-wfm' before; every method starts
from it, in turn, with rewards computed in the process, and stops when its CPU seconds are spent.
Prints a Markdown table.
"""

import argparse
import statistics
import sys
import tempfile
import time
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from pathlib import Path

import torch

from cosmos_app.quiet import quiet_third_parties
from cosmos_app.wfm.demo.accuracy import colour_accuracy
from cosmos_app.wfm.demo.running import DemoSize, build_base
from cosmos_app.wfm.demo.shapes import HELD_OUT, SHAPES, SIZE, prompts_of
from cosmos_app.wfm.running import load_wfm_recipe
from cosmos_wfm import (
    DdrlConfig,
    DiffusionRl,
    DiffusionRlConfig,
    DiffusionSftConfig,
    FlowGrpoConfig,
    ImageCaptionsConfig,
    NftConfig,
    SdeConfig,
    ValidationConfig,
    draw_samples,
)

CONFIGS = Path(__file__).resolve().parents[1] / "configs" / "wfm"
TARGETS = (0.75, 0.9)
SMOOTHED = 3
FAST = FlowGrpoConfig(clip=5e-3, sde=SdeConfig(num_noisy=4))
METHODS = {
    "DiffusionNFT": NftConfig(kl=1e-4),
    "Flow-GRPO, first 4 steps noisy": FAST,
    "Flow-GRPO, all steps noisy": FlowGrpoConfig(clip=5e-3),
    "DDRL, paper's form": DdrlConfig(beta=0.5, data_weight=0.01, policy=FAST),
}


@dataclass(frozen=True, kw_only=True)
class Curve:
    """One method from one base: CPU seconds and mean reward after each step, and what it made."""

    seconds: Sequence[float]
    rewards: Sequence[float]
    accuracy: float

    def first_at(self, target: float) -> float | None:
        for end in range(SMOOTHED, len(self.rewards) + 1):
            if sum(self.rewards[end - SMOOTHED : end]) / SMOOTHED >= target:
                return self.seconds[end - 1]
        return None


def run(recipe: DiffusionRlConfig, budget_s: float, shown: ValidationConfig) -> Curve:
    """Train until the budget is spent; drawing the pictures that are judged costs nothing of it."""
    training = DiffusionRl(recipe)
    started, seconds, rewards = time.process_time(), [], []
    while not seconds or seconds[-1] < budget_s:
        _, figures = training.step(len(seconds))
        seconds.append(time.process_time() - started)
        rewards.append(figures["reward"])
    accuracy = colour_accuracy(draw_samples(training.adapter, shown), shown.prompts)
    return Curve(seconds=seconds, rewards=rewards, accuracy=accuracy)


def make_demo(seed: int, root: Path, *, quick: bool) -> Path:
    """Make what the demonstration makes before RL."""
    sft = load_wfm_recipe(CONFIGS / "tiny_shapes_sft.toml")
    assert isinstance(sft, DiffusionSftConfig)
    root.mkdir()
    size = DemoSize(pictures_each=2, autoencoder_steps=3) if quick else DemoSize()
    build_base(replace(sft, num_steps=3) if quick else sft, root, seed=seed, size=size)
    (root / "prompts.txt").write_text("\n".join(prompts_of(SHAPES[:-1])))
    return root


def compare(demo: Path, seed: int, budget_s: float) -> Mapping[str, Curve]:
    """Run every method from a demonstration's fine-tuned model; return their curves."""
    rl = load_wfm_recipe(CONFIGS / "tiny_shapes_nft.toml")
    assert isinstance(rl, DiffusionRlConfig)
    (base,) = (demo / "sft" / "safetensors").glob("step_*")
    shown = ValidationConfig(
        prompts=tuple(prompts_of([HELD_OUT])), samples_per_prompt=24, sampler=rl.sampler
    )
    pairs = ImageCaptionsConfig(path=str(demo / "pairs"), height=SIZE, width=SIZE)
    curves: dict[str, Curve] = {}
    for name, algorithm in METHODS.items():
        recipe = replace(
            rl,
            model=str(base),
            prompts=str(demo / "prompts.txt"),
            reward_service=None,
            algorithm=algorithm,
            data=pairs if isinstance(algorithm, DdrlConfig) else None,
            seed=seed,
        )
        curves[name] = run(recipe, budget_s, shown)
        print(f"seed {seed}: {name}: {curves[name]}", file=sys.stderr, flush=True)
    return curves


def table(runs: Sequence[Mapping[str, Curve]], budget_s: float) -> str:
    """Return the rows: each cell lists the seeds in turn."""
    heads = [f"CPU s to reward {target}" for target in TARGETS]
    lines = [
        f"| method | CPU s per step | {' | '.join(heads)} | reward at {budget_s:g} CPU s | "
        "held-out colour accuracy |",
        "|---" * (3 + len(heads) + 1) + "|",
    ]
    for name in METHODS:
        curves = [each[name] for each in runs]
        step_s = [c.seconds[-1] / len(c.seconds) for c in curves]
        reached = [
            ", ".join("never" if (s := c.first_at(t)) is None else f"{s:.0f}" for c in curves)
            for t in TARGETS
        ]
        last = ", ".join(f"{statistics.mean(c.rewards[-SMOOTHED:]):.2f}" for c in curves)
        accuracy = ", ".join(f"{c.accuracy:.2f}" for c in curves)
        cells = [name, f"{statistics.mean(step_s):.2f}", *reached, last, accuracy]
        lines.append(f"| {' | '.join(cells)} |")
    return "\n".join(lines)


def main() -> None:
    """Run and print."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--quick", action="store_true")
    parser.add_argument("--seeds", default="0,1")
    parser.add_argument("--demos", default="", help="outputs of 'make demo-wfm', one per seed")
    parser.add_argument("--budget-s", type=float, default=60.0)
    arguments = parser.parse_args()
    seeds = [0] if arguments.quick else [int(seed) for seed in arguments.seeds.split(",")]
    budget_s = 2.0 if arguments.quick else arguments.budget_s
    torch.set_num_threads(1)
    quiet_third_parties()
    with tempfile.TemporaryDirectory() as scratch:
        demos = [Path(name) for name in arguments.demos.split(",") if name] or [
            make_demo(seed, Path(scratch) / str(seed), quick=arguments.quick) for seed in seeds
        ]
        runs = [compare(demo, seed, budget_s) for demo, seed in zip(demos, seeds, strict=True)]
    print(table(runs, budget_s))


if __name__ == "__main__":
    main()
