"""Loading a model's processor, also where torchvision, which reads videos, is not installed."""

from pathlib import Path
from typing import TYPE_CHECKING, Any

from cosmos_parallel.errors import PictureError

if TYPE_CHECKING:
    from transformers import PretrainedConfig


def load_processor(path: Path, config: "PretrainedConfig") -> Any:  # classes without stubs
    """Return the processor of a model directory.

    Raises:
        PictureError: if transformers cannot load it.
    """
    from transformers import AutoProcessor
    from transformers.utils.import_utils import is_torchvision_available

    try:
        if is_torchvision_available():
            return AutoProcessor.from_pretrained(path, local_files_only=True)
        return _without_videos(config).from_pretrained(path, local_files_only=True)
    except (ImportError, OSError, ValueError, KeyError, TypeError) as error:
        raise PictureError(f"{path}: its processor cannot be loaded: {error}") from error


def _without_videos(config: "PretrainedConfig") -> Any:
    """Return the class of a model's processor, which is content without a reader of videos.

    Pictures are the same to it; models that see no videos have it as it is.
    """
    from transformers import PROCESSOR_MAPPING, AutoImageProcessor, AutoTokenizer

    own: Any = PROCESSOR_MAPPING[type(config)]

    class WithoutVideos(own):
        @classmethod
        def _get_arguments_from_pretrained(
            cls, pretrained_model_name_or_path: Path, *args: object, **kwargs: Any
        ) -> list[Any]:
            readers = {"image_processor": AutoImageProcessor, "tokenizer": AutoTokenizer}
            return [
                readers[name].from_pretrained(pretrained_model_name_or_path, local_files_only=True)
                if name in readers
                else None
                for name in cls.get_attributes()
            ]

        def check_argument_for_proper_class(self, argument_name: str, argument: object) -> Any:
            if argument is None:
                return None
            return super().check_argument_for_proper_class(argument_name, argument)

    return WithoutVideos
