"""What the axes and the schedule of a run may be."""

from cosmos_parallel import LearnerConfig, ParallelConfig
from cosmos_wfm.errors import WfmConfigError


def check_parallel(parallel: ParallelConfig) -> None:
    """Refuse axes that denoisers have no plan for.

    Raises:
        WfmConfigError: if ranks are to share anything but samples, weights and tokens.
    """
    none = ParallelConfig()
    for name in ("tp", "pp", "ep", "pp_schedule"):
        if getattr(parallel, name) != getattr(none, name):
            raise WfmConfigError(
                f"parallel.{name} is {getattr(parallel, name)}; denoisers are shared by dp_shard, "
                "dp_replicate and cp only"
            )


def check_rates(learner: LearnerConfig, num_steps: int) -> None:
    """Refuse a schedule that leaves the last steps without a learning rate.

    Raises:
        WfmConfigError: names the settings.
    """
    try:
        learner.optimizer.schedule.check_updates(num_steps)
    except ValueError as error:
        raise WfmConfigError(str(error)) from error
