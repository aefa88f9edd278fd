"""An S3-compatible store as the environment names it, told to fsspec, which opens addresses."""

from collections.abc import Mapping

_PREFIX = "PROD_S3_CHECKPOINT_"


def s3_settings(environment: Mapping[str, str]) -> dict[str, object]:
    """Return the settings of fsspec's S3 driver that an environment names.

    ``PROD_S3_CHECKPOINT_ACCESS_KEY_ID``, ``_SECRET_ACCESS_KEY``, ``_ENDPOINT_URL`` and
    ``_REGION_NAME``; what is missing is left to the driver, which knows AWS's own variables.
    """
    named = {
        setting: environment[_PREFIX + name]
        for name, setting in (
            ("ACCESS_KEY_ID", "key"),
            ("SECRET_ACCESS_KEY", "secret"),
            ("ENDPOINT_URL", "endpoint_url"),
        )
        if environment.get(_PREFIX + name)
    }
    region = environment.get(f"{_PREFIX}REGION_NAME")
    return {**named, **({"client_kwargs": {"region_name": region}} if region else {})}


def use_object_store(environment: Mapping[str, str]) -> None:
    """Have ``s3://`` addresses opened as an environment says; nothing changes if it says nothing.

    It is told to fsspec's configuration of this process: data, saves and checkpoints alike.
    """
    import fsspec.config

    settings = s3_settings(environment)
    if settings:
        fsspec.config.conf.setdefault("s3", {}).update(settings)
