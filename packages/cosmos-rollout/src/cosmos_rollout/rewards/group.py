"""A reward that needs all siblings of a group at once, such as a rank among them."""

from dataclasses import dataclass
from typing import Literal

from cosmos_rollout.rewards.scoring import GroupRewardFunction
from cosmos_rollout.user_code import check_reference, load_callable


@dataclass(frozen=True, kw_only=True, slots=True)
class GroupReward:
    """A function of the user's: ``def reward(samples: Sequence[RewardInput]) -> Sequence[float]``.

    It is called once the whole group is generated, with the siblings that have rewards of their
    own, in order.

    Attributes:
        kind: selects this reward.
        function: ``module:function``, or ``path/to/file.py:function``.
        name: its name in trajectories and reports; the function's if empty.
        weight: its factor in the total.
    """

    kind: Literal["group"] = "group"
    function: str
    name: str = ""
    weight: float = 1.0

    def __post_init__(self) -> None:
        function = check_reference(self.function)
        if not self.name:
            object.__setattr__(self, "name", function)

    def build(self) -> GroupRewardFunction:
        """Import the module and return the function.

        Raises:
            UserCodeError: if there is no such module or function.
        """
        return load_callable(self.function)
