"""``cosmos-app doctor``, ``models`` and ``explain``: commands that tell, and start nothing."""

import click

from cosmos_app.guarded import guarded

_KINDS = ("rl", "sft", "preference", "reward_model", "distillation", "wfm_sft", "wfm_rl")


@click.command()
@click.option("--json", "as_json", is_flag=True, help="Print the findings as JSON.")
def doctor(*, as_json: bool) -> None:
    """Check this machine; say what to do.

    Looks at versions, devices, memory, disk, shared memory, compilers, Redis and vLLM. Exit code 0
    when a run can start here, 1 otherwise.
    """
    from cosmos_app.doctor import examine

    guarded(lambda: examine(as_json=as_json))


@click.command()
@click.option("--json", "as_json", is_flag=True, help="Print every model type as JSON.")
def models(*, as_json: bool) -> None:
    """List the language models that can be trained.

    Each with whose implementation it has, and on which parallel axes it divides.
    """
    from cosmos_app.models import show_models

    guarded(lambda: show_models(as_json=as_json))


@click.command()
@click.argument("key", default="")
@click.option("--kind", type=click.Choice(_KINDS), help="Of the recipe; the first with that key.")
@click.option("--json", "as_json", is_flag=True, help="Print tables and keys as JSON.")
@click.option("--schema", is_flag=True, help="Print the JSON Schema of one kind, for editors.")
def explain(key: str, *, kind: str | None, as_json: bool, schema: bool) -> None:
    """Say what the keys of recipes mean.

    KEY is a table, a key, or a word to look for; without one the tables of a recipe are listed.
    A kind may stand behind its table: rollout.engine.transformers.

    \b
    Examples:
      cosmos-app explain                              # what a recipe holds
      cosmos-app explain staleness                    # one table
      cosmos-app explain algorithm                    # its kinds, and the keys of one
      cosmos-app explain algorithm.dapo
      cosmos-app explain rollout.slots                # one key
      cosmos-app explain lr                           # keys of that name, wherever they are
      cosmos-app explain --kind sft data
      cosmos-app explain --schema > recipe.schema.json

    In a file that begins with '#:schema recipe.schema.json', editors with Taplo (Even Better TOML)
    complete keys, show what they mean and mark what is wrong.
    """  # noqa: D301, click wants the character itself
    from cosmos_app.explain import explain_key, print_schema

    if schema:
        guarded(lambda: print_schema(kind))
    guarded(lambda: explain_key(key, kind=kind, as_json=as_json))
