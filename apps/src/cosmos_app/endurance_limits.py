"""What the limits of a run that gets no further have to leave time for."""

from collections.abc import Mapping

from cosmos_core.control import EnduranceConfig


def check_standstill(endurance: EnduranceConfig, least_s: Mapping[str, float]) -> None:
    """Refuse to end a run while somebody may yet do what is waited for.

    Args:
        endurance: when a run ends that gets no further.
        least_s: how long others may take, in seconds, by the name of the setting that says so.

    Raises:
        ValueError: naming the longest of those that are longer than ``standstill_s``.
    """
    longest = max(least_s, key=lambda name: least_s[name])
    if 0 < endurance.standstill_s < least_s[longest]:
        raise ValueError(
            f"endurance.standstill_s is {endurance.standstill_s:g} and {longest} "
            f"{least_s[longest]:g}: a run would end for whom that setting still gives time; want "
            f"endurance.standstill_s at least as long, or 0 for no limit, or a shorter {longest}"
        )
