"""Recipes of world models: the configs of ``cosmos_wfm`` themselves, told apart by ``kind``."""

from collections.abc import Mapping

from cosmos_wfm import DiffusionRlConfig, DiffusionSftConfig

WfmRecipe = DiffusionSftConfig | DiffusionRlConfig
WFM_KINDS: Mapping[str, type[DiffusionSftConfig] | type[DiffusionRlConfig]] = {
    "wfm_rl": DiffusionRlConfig,
    "wfm_sft": DiffusionSftConfig,
}
