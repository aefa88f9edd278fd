"""Replicas of a world model import, before they are forked, what their pipeline's index names."""

import json

import pytest

pytest.importorskip("diffusers")

from cosmos_app.wfm.disaggregated.modules import rollout_modules
from cosmos_wfm import DiffusionRlConfig

INDEX = {
    "_class_name": "SanaPipeline",
    "_diffusers_version": "0.42.1",
    "text_encoder": ["transformers", "Gemma2Model"],
    "transformer": ["diffusers", "SanaTransformer2DModel"],
    "safety_checker": [None, None],
    "vae": ["somebody_elses", "Vae"],  # their own module, beside the weights
}


@pytest.mark.parametrize(
    ("text", "named"),
    [
        (
            json.dumps(INDEX),
            [
                "diffusers:SanaPipeline",
                "transformers:Gemma2Model",
                "diffusers:SanaTransformer2DModel",
            ],
        ),
        ("{}", []),
        ("[1]", []),
        ("{", []),
        (None, []),
    ],
)
def test_replicas_import_the_classes_of_the_pipeline(tmp_path, text, named):
    if text is not None:
        (tmp_path / "model_index.json").write_text(text)
    recipe = DiffusionRlConfig(
        model=str(tmp_path), prompts="p.txt", output="out", rewards={"prompt_colour": 1.0}
    )
    modules = rollout_modules(recipe)
    assert "cosmos_app.wfm.disaggregated.replica" in modules
    assert [module for module in modules if ":" in module] == named
