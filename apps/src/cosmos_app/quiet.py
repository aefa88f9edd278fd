"""Third parties' start-up chatter that says nothing to a user is kept off the terminal."""

import logging
import os

QUIET = {
    "HF_HUB_OFFLINE": "1",
    "TOKENIZERS_PARALLELISM": "false",
    "VLLM_NO_USAGE_STATS": "1",
    "VLLM_LOGGING_LEVEL": "WARNING",
    "PYTHONUNBUFFERED": "1",
}
"""What every process of a run finds in its environment."""

# torchao tries every compiled extension it ships, whatever the machine; torch warns torchao.
# transformers and diffusers name what is not installed here and is not used.
_CHATTY = (
    "torchao",
    "torch.utils._pytree",
    "transformers.utils.import_utils",
    "diffusers.quantizers.torchao.torchao_quantizer",
    # names what CLIP, and T5, cut of each prompt, at each batch: runs say it once
    "diffusers.pipelines.stable_diffusion_3.pipeline_stable_diffusion_3",
)
# Of a model that somebody else made, what these have to say is worth reading.
_SILENT = {
    "TRANSFORMERS_VERBOSITY": "error",
    "DIFFUSERS_VERBOSITY": "error",
    "TQDM_DISABLE": "1",
}


def quiet_third_parties() -> None:
    """Let only errors of the chatty loggers through; call it before they are imported."""
    for name in _CHATTY:
        logging.getLogger(name).addFilter(_is_error)


def silence_loading() -> None:
    """Show no bars and warnings of loading and saving, where the models are our own tiny ones.

    Call it before transformers and diffusers are imported. What is set already stays.
    """
    for name, value in _SILENT.items():
        os.environ.setdefault(name, value)


def _is_error(record: logging.LogRecord) -> bool:
    return record.levelno >= logging.ERROR
