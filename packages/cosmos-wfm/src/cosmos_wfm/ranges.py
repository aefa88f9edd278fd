"""The least that numbers of a config may be."""

from cosmos_wfm.errors import WfmConfigError


def check_at_least(subject: str, config: object, **least: int) -> None:
    """Refuse a config one of whose fields is too small.

    Args:
        subject: what the config is of, for the error.
        config: has the fields.
        **least: what each of them must be at least.

    Raises:
        WfmConfigError: names the field.
    """
    for name, low in least.items():
        if getattr(config, name) < low:
            raise WfmConfigError(
                f"{subject}: {name} is {getattr(config, name)}; it must be {low} or more"
            )
