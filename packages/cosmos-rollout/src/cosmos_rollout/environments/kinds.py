"""Every environment that a recipe can name by its ``kind``, the user's own among them."""

from dataclasses import dataclass
from typing import Literal, cast

from cosmos_rollout.environments.environment import Environment
from cosmos_rollout.environments.gymnasium_env import GymnasiumEnvironmentConfig
from cosmos_rollout.environments.tools import ToolEnvironmentConfig
from cosmos_rollout.environments.verifiers_env import VerifiersEnvironmentConfig
from cosmos_rollout.errors import UserCodeError
from cosmos_rollout.user_code import check_reference, load_callable


@dataclass(frozen=True, kw_only=True, slots=True)
class PythonEnvironmentConfig:
    """An environment of the user's: a function without arguments that makes an `Environment`.

    Attributes:
        kind: selects this environment.
        function: ``module:function``, or ``path/to/file.py:function``; a class will do.
    """

    kind: Literal["python"] = "python"
    function: str

    def __post_init__(self) -> None:
        check_reference(self.function)

    def build(self) -> Environment:
        """Import the module and make the environment.

        Raises:
            UserCodeError: if there is no such function, or it makes something else.
        """
        made = load_callable(self.function)()
        missing = [name for name in ("tools", "play", "aclose") if not hasattr(made, name)]
        if missing:
            raise UserCodeError(
                f"{self.function} has to make an Environment; {type(made).__name__} has no "
                f"{', '.join(missing)}"
            )
        return cast(Environment, made)


EnvironmentConfig = (
    ToolEnvironmentConfig
    | GymnasiumEnvironmentConfig
    | VerifiersEnvironmentConfig
    | PythonEnvironmentConfig
)
