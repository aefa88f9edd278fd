"""``cosmos-app evaluate``, on the command line."""

import asyncio
from pathlib import Path

import click

from cosmos_app.guarded import guarded

_FILE = click.Path(path_type=Path, dir_okay=False)


@click.command()
@click.argument(
    "recipe", type=click.Path(path_type=Path, exists=True), metavar="RECIPE.toml|RUN_DIR"
)
@click.argument("overrides", nargs=-1, metavar="[PATH=VALUE]...")
@click.option("--url", required=True, help="The server: http://HOST:PORT/v1.")
@click.option("--model", required=True, help="What the model is called there.")
@click.option("--key-file", type=_FILE, help="File that holds the bearer token.")
@click.option("--context-length", type=click.IntRange(1), help="For servers that do not tell it.")
@click.option(
    "--max-running",
    type=click.IntRange(1),
    default=64,
    show_default=True,
    help="Answers that are asked for at once.",
)
@click.option(
    "--timeout",
    "timeout_s",
    type=click.FloatRange(0, min_open=True),
    default=120.0,
    show_default=True,
    help="Seconds without a word after which an answer has failed.",
)
@click.option("--samples", type=_FILE, help="File that every answer is added to, as JSON lines.")
@click.option("--json", "as_json", is_flag=True, help="Print the figures as JSON, nothing else.")
def evaluate(  # noqa: PLR0913, click hands every option over by name
    recipe: Path,
    overrides: tuple[str, ...],
    *,
    url: str,
    model: str,
    key_file: Path | None,
    context_length: int | None,
    max_running: int,
    timeout_s: float,
    samples: Path | None,
    as_json: bool,
) -> None:
    """Measure a server on a recipe's held-out prompts.

    Any OpenAI-compatible server that knows return_token_ids, such as 'vllm serve', answers the
    prompts that a run of the recipe validates on, in its environment, sampled as its [validation]
    says, and is rewarded as there: the figures stand beside those of the trained model. Of a run's
    directory the run's own prompts are asked, and what it measured itself is shown too.

    The server has to have the tokens of the recipe's model: model.path names them where no run
    lies at 'output'.

    \b
    Examples:
      cosmos-app evaluate runs/quickstart --url http://127.0.0.1:8000/v1 --model my-model
      cosmos-app evaluate configs/math.toml model.path=my-hf-model data.path=my.jsonl \\
          validation.samples=4 validation.temperature=0.6 --url http://gpu:8000/v1 --model my-model

    Exit codes: 0 done, 1 the server failed or is not there, 2 it does not fit the recipe, which is
    wrong, or its files are.
    """  # noqa: D301, click wants the character itself
    from cosmos_app.evaluation.answering import Asked, evaluate_server
    from cosmos_rollout import EndpointConfig

    try:
        server = EndpointConfig(
            url=url,
            model=model,
            key_file=key_file,
            context_length=context_length or 0,
            max_running=max_running,
            timeout_s=timeout_s,
        )
    except ValueError as error:
        raise click.UsageError(str(error)) from error
    asked = Asked(recipe=recipe, overrides=overrides, server=server, samples=samples)
    guarded(lambda: asyncio.run(evaluate_server(asked, as_json=as_json)))
