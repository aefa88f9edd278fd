"""The demonstration from nothing to two pictures: build, fine-tune, reward, look."""

import json
import time
from collections.abc import Callable, Mapping
from contextlib import ExitStack
from dataclasses import dataclass, replace
from pathlib import Path

import click

from cosmos_app.errors import DataError
from cosmos_app.wfm.demo.accuracy import colour_accuracy
from cosmos_app.wfm.demo.model import build_model
from cosmos_app.wfm.demo.service import client_of, reward_service
from cosmos_app.wfm.demo.shapes import HELD_OUT, SHAPES, SIZE, prompts_of, write_shapes
from cosmos_app.wfm.running import load_wfm_recipe
from cosmos_parallel import StepReport
from cosmos_wfm import (
    DiffusionModelAdapter,
    DiffusionRlConfig,
    DiffusionSftConfig,
    ImageCaptionsConfig,
    ValidationConfig,
    draw_samples,
    load_adapter,
    save_grid,
    train_rl,
    train_sft,
)

_AUTOENCODER_BATCH = 32
_SHARE_RIGHT = 0.5
_SHOWN_EACH = 24
_GRID_COLUMNS = 12
_ENLARGED = 4
_TELL_EVERY = 100
_TELL_RL_EVERY = 5


@dataclass(frozen=True, kw_only=True, slots=True)
class DemoSize:
    """How much is built.

    Attributes:
        pictures_each: of each shape in each colour.
        autoencoder_steps: of its training.
    """

    pictures_each: int = 20
    autoencoder_steps: int = 400


def run_demo(sft: Path, rl: Path, output: Path, *, seed: int, size: DemoSize | None = None) -> int:
    """Run the demonstration; return 0. Its last lines say where the pictures are.

    Args:
        sft: recipe of the supervised half.
        rl: recipe of the second half.
        output: directory to make; numbered if it is there.
        seed: of everything.
        size: of what is built.

    Raises:
        DataError: if a recipe is not of its kind.
    """
    started = time.perf_counter()
    output = free_directory(output)
    output.mkdir(parents=True)
    sft_recipe, rl_recipe = _recipes(sft, rl)
    with ExitStack() as stack:
        log = output / "reward-service.log"
        service = reward_service(list(rl_recipe.rewards), log)
        found = stack.enter_context(service)  # ready before it is needed
        base = build_base(sft_recipe, output, seed=seed, size=size or DemoSize())
        prompts = prompts_of(SHAPES[:-1])
        shown = ValidationConfig(
            prompts=tuple(prompts_of([HELD_OUT])),
            samples_per_prompt=_SHOWN_EACH,
            sampler=rl_recipe.sampler,
        )
        (output / "prompts.txt").write_text("\n".join(prompts) + "\n", encoding="utf-8")
        before = look(load_adapter(base), shown, output / "before.png")
        click.echo(f"held-out colour accuracy after SFT: {before:.3f}")
        recipe = replace(
            rl_recipe,
            model=str(base),
            prompts=str(output / "prompts.txt"),
            output=str(output / "rl"),
            seed=seed,
        )
        scorer = stack.enter_context(client_of(recipe, found))
        trained = train_rl(recipe, scorer=scorer, on_step=_tell_reward(recipe.num_steps))
    after = look(tuned(base, trained), shown, output / "after.png")
    seconds = time.perf_counter() - started
    report = {"before": before, "after": after, "gain": after - before, "seconds": seconds}
    (output / "report.json").write_text(json.dumps(report, indent=1), encoding="utf-8")
    click.echo(
        f"held-out colour accuracy {before:.3f} -> {after:.3f} ({after - before:+.3f}) "
        f"in {seconds:.0f} s"
    )
    click.echo(f"{output / 'before.png'}\n{output / 'after.png'}")
    return 0


def look(adapter: DiffusionModelAdapter, shown: ValidationConfig, path: Path) -> float:
    """Draw pictures, write some of them as a grid, and return how many have the right colour."""
    pixels = draw_samples(adapter, shown, at_once=shown.samples_per_prompt)
    save_grid(pixels[:, :_GRID_COLUMNS], path, enlarged=_ENLARGED)
    return colour_accuracy(pixels, shown.prompts)


def build_base(recipe: DiffusionSftConfig, output: Path, *, seed: int, size: DemoSize) -> Path:
    """Make pictures and a model, fine-tune it on them; return its pipeline directory."""
    pairs = ImageCaptionsConfig(path=str(output / "pairs"), height=SIZE, width=SIZE)
    write_shapes(output / "pairs", num_each=size.pictures_each, share_right=_SHARE_RIGHT, seed=seed)
    error = build_model(
        output / "model",
        pairs.build(),
        num_steps=size.autoencoder_steps,
        batch_size=_AUTOENCODER_BATCH,
        seed=seed,
    )
    click.echo(f"built a tiny SD3; its autoencoder is {error:.3f} off, of pixels in [-1, 1]")
    recipe = replace(
        recipe, model=str(output / "model"), data=pairs, output=str(output / "sft"), seed=seed
    )

    def tell(step: int, report: StepReport, figures: Mapping[str, float]) -> None:
        if step % _TELL_EVERY == 0:
            click.echo(f"SFT step {step}/{recipe.num_steps}  loss {report.loss:.4f}")

    return train_sft(recipe, on_step=tell)


def tuned(base: Path, trained: Path) -> DiffusionModelAdapter:
    """Return a pipeline with the adapters that were trained, loaded as diffusers loads them."""
    adapter = load_adapter(base)
    adapter.pipeline.load_lora_weights(
        trained / "lora", weight_name="model.safetensors", adapter_name="default"
    )
    return adapter


def free_directory(wanted: Path) -> Path:
    """Return a directory that is not there yet, numbered from 2 if it has to be."""
    number, found = 1, wanted
    while found.exists():
        number += 1
        found = wanted.with_name(f"{wanted.name}-{number}")
    return found


def _recipes(sft: Path, rl: Path) -> tuple[DiffusionSftConfig, DiffusionRlConfig]:
    first, second = load_wfm_recipe(sft), load_wfm_recipe(rl)
    if not isinstance(first, DiffusionSftConfig) or not isinstance(second, DiffusionRlConfig):
        raise DataError(f"want a recipe of kind wfm_sft and one of wfm_rl; found {sft} and {rl}")
    return first, second


def _tell_reward(num_steps: int) -> Callable[[int, StepReport, Mapping[str, float]], None]:
    def tell(step: int, report: StepReport, figures: Mapping[str, float]) -> None:
        if step % _TELL_RL_EVERY == 0 and "reward" in figures:
            click.echo(f"RL step {step}/{num_steps}  reward {figures['reward']:.3f}")

    return tell
