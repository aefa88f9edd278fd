"""The demonstration from nothing to two pictures: build, fine-tune, reward, look."""

import json
import time
from collections.abc import Callable, Mapping
from contextlib import ExitStack
from dataclasses import replace
from pathlib import Path

import click

from cosmos_app.errors import DataError
from cosmos_app.wfm.demo.accuracy import Shown, show
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
    load_adapter,
    train_rl,
    train_sft,
)

_AUTOENCODER_STEPS = 400
_AUTOENCODER_BATCH = 32
_PICTURES_EACH = 20
_SHARE_RIGHT = 0.5
_SHOWN_EACH = 24
_TELL_EVERY = 100
_TELL_RL_EVERY = 5


def run_demo(sft: Path, rl: Path, output: Path, *, seed: int) -> int:
    """Run the demonstration; return 0. Its last lines say where the pictures are.

    Args:
        sft: recipe of the supervised half.
        rl: recipe of the second half.
        output: directory to make; numbered if it is there.
        seed: of everything.

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
        base = build_base(sft_recipe, output, seed=seed)
        prompts, held_out = prompts_of(SHAPES[:-1]), prompts_of([HELD_OUT])
        (output / "prompts.txt").write_text("\n".join(prompts) + "\n", encoding="utf-8")
        num_steps = rl_recipe.sampler.num_steps
        before = show(load_adapter(base), held_out, num_each=_SHOWN_EACH, num_steps=num_steps)
        click.echo(f"held-out colour accuracy after SFT: {before.accuracy:.3f}")
        recipe = replace(
            rl_recipe,
            model=str(base),
            prompts=str(output / "prompts.txt"),
            output=str(output / "rl"),
            seed=seed,
        )
        scorer = stack.enter_context(client_of(recipe, found))
        trained = train_rl(recipe, scorer=scorer, on_step=_tell_reward(recipe.num_steps))
    after = show(tuned(base, trained), held_out, num_each=_SHOWN_EACH, num_steps=num_steps)
    seconds = time.perf_counter() - started
    _finish(output, before, after, seconds)
    return 0


def build_base(recipe: DiffusionSftConfig, output: Path, *, seed: int) -> Path:
    """Make pictures and a model, fine-tune it on them; return its pipeline directory."""
    pairs = ImageCaptionsConfig(path=str(output / "pairs"), height=SIZE, width=SIZE)
    write_shapes(output / "pairs", num_each=_PICTURES_EACH, share_right=_SHARE_RIGHT, seed=seed)
    error = build_model(
        output / "model",
        pairs.build(),
        num_steps=_AUTOENCODER_STEPS,
        batch_size=_AUTOENCODER_BATCH,
        seed=seed,
    )
    click.echo(f"built a tiny SD3; its autoencoder is {error:.3f} off, of pixels in [-1, 1]")
    recipe = replace(
        recipe, model=str(output / "model"), data=pairs, output=str(output / "sft"), seed=seed
    )

    def tell(step: int, report: StepReport) -> None:
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
        if step % _TELL_RL_EVERY == 0:
            click.echo(f"RL step {step}/{num_steps}  reward {figures['reward']:.3f}")

    return tell


def _finish(output: Path, before: Shown, after: Shown, seconds: float) -> None:
    gain = after.accuracy - before.accuracy
    report = {"before": before.accuracy, "after": after.accuracy, "gain": gain, "seconds": seconds}
    (output / "report.json").write_text(json.dumps(report, indent=1), encoding="utf-8")
    for name, shown in (("before", before), ("after", after)):
        shown.save_grid(output / f"{name}.png")
    click.echo(
        f"held-out colour accuracy {before.accuracy:.3f} -> {after.accuracy:.3f} ({gain:+.3f}) "
        f"in {seconds:.0f} s"
    )
    click.echo(f"{output / 'before.png'}\n{output / 'after.png'}")
