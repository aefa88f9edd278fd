"""Ranges of the numbers of a recipe."""

from collections.abc import Mapping

from cosmos_parallel import LearnerConfig


def require_at_least(settings: object, least: Mapping[str, float]) -> None:
    """Check that numbers of a table are in range.

    Args:
        settings: the table.
        least: what each may be at least, by the name of its field.

    Raises:
        ValueError: naming the first that is out of range.
    """
    for name, lowest in least.items():
        if not getattr(settings, name) >= lowest:  # nor is what is no number
            raise ValueError(f"{name} is {getattr(settings, name)}; it must be {lowest:g} or more")


def check_rates(learner: LearnerConfig, num_updates: int) -> None:
    """Check that a schedule lasts as long as a run, or leaves a rate to go on with.

    Args:
        learner: of the run.
        num_updates: that it makes.

    Raises:
        ValueError: if the last updates would change nothing, naming the settings.
    """
    schedule = learner.optimizer.schedule
    idle = num_updates - schedule.num_steps
    if schedule.shape != "constant" and schedule.final_factor == 0.0 and idle > 0:
        raise ValueError(
            f"learner.optimizer.schedule.num_steps is {schedule.num_steps}, of {num_updates} "
            f"updates of the run: the last {idle} would have a learning rate of 0; set it to "
            f"{num_updates}, or final_factor above 0"
        )
