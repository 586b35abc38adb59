"""The user's own functions, named in a job file as "module:function"."""

import difflib
import importlib
from collections.abc import Callable
from typing import Any

from planaria.errors import ConfigError


def user_function(target: str, *, field: str) -> Callable[..., Any]:
    """The function that "module:function" names; what importing its module raises is raised.

    Raises:
        ConfigError: naming `field`: there is no such module or function.
    """
    module_name, _, function_name = target.partition(":")
    if not module_name or not function_name:
        raise ConfigError(field, target, 'write it as "module:function"')
    try:
        module = importlib.import_module(module_name)
    except ModuleNotFoundError as error:
        # A module that the user's own module lacks is the user's error, shown with its traceback.
        if error.name is None or not f"{module_name}.".startswith(f"{error.name}."):
            raise
        remedy = (
            f"there is no module {error.name!r}; run planaria where it can be imported, or set "
            "PYTHONPATH"
        )
        raise ConfigError(field, target, remedy) from error
    function = getattr(module, function_name, None)
    if not callable(function):
        names = [name for name, value in vars(module).items() if callable(value)]
        nearest = difflib.get_close_matches(function_name, names, n=1)
        hint = f"; did you mean {nearest[0]}?" if nearest else ""
        remedy = f"module {module_name!r} has no function {function_name!r}{hint}"
        raise ConfigError(field, target, remedy)
    return function  # type: ignore[no-any-return]
