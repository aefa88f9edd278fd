"""Complete pipelines of small random weights, built without any download.

Real component classes and tokenizers, the released scheduler and latent settings; only widths are
small. For tests, demonstrations and trying a recipe before a real model is there.
"""

from cosmos_wfm.tiny.captions import tiny_captions
from cosmos_wfm.tiny.images import tiny_sana_pipeline, tiny_sd3_pipeline
from cosmos_wfm.tiny.saving import save_pipeline
from cosmos_wfm.tiny.videos import (
    tiny_cosmos_pipeline,
    tiny_sana_video_pipeline,
    tiny_wan_pipeline,
    tiny_wan_small_pipeline,
)

__all__ = [
    "save_pipeline",
    "tiny_captions",
    "tiny_cosmos_pipeline",
    "tiny_sana_pipeline",
    "tiny_sana_video_pipeline",
    "tiny_sd3_pipeline",
    "tiny_wan_pipeline",
    "tiny_wan_small_pipeline",
]
