"""How a policy lays out its batches: in rows or packed, with pictures or without."""

from torch import nn

from cosmos_app.prepare import RunFiles
from cosmos_app.prompt_rows import has_pictures
from cosmos_app.recipe import Recipe
from cosmos_app.step_share import BatchPlan
from cosmos_parallel import PictureReader, check_packable, runs_packed_rows


def shown_pictures(recipe: Recipe, files: RunFiles) -> PictureReader | None:
    """Return what shows pictures to a run's model, if any may come: of rows, or an environment.

    Raises:
        PictureError: if the model sees, and its processor cannot be loaded.
    """
    may_come = recipe.rollout.environment is not None or has_pictures(files.train)
    return PictureReader.of(files.model) if may_come else None


def batch_plan(model: nn.Module, recipe: Recipe, pictures: PictureReader | None) -> BatchPlan:
    """Return the layout that the recipe asks for, or the one that costs least.

    Raises:
        PackingError: if it asks for one that the model cannot have.
    """
    layout = recipe.trainer.layout
    if layout == "auto":
        can_pack = runs_packed_rows(model) and (pictures is None or pictures.packs)
        layout = "packed" if can_pack else "padded"
    elif layout == "packed":
        check_packable(model)
    return BatchPlan(
        layout=layout,
        max_tokens=recipe.trainer.tokens_per_batch,
        vocab_size=_vocab_size(model),
        pictures=pictures,
    )


def _vocab_size(model: nn.Module) -> int:
    """Return how many tokens the model knows; 0 if it does not say."""
    getter = getattr(model, "get_input_embeddings", None)
    embedding = getter() if getter is not None else None
    return embedding.weight.shape[0] if isinstance(embedding, nn.Embedding) else 0
