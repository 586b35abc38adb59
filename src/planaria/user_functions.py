"""The user's own functions, named in a job file as "module:function"."""

import difflib
import hashlib
import importlib
import random
import sys
import threading
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any, Final

import numpy as np

from planaria.errors import ConfigError

_importing: Final = threading.local()  # Its `named`: what names the module that is imported.


def user_function(target: str, *, field: str) -> Callable[..., Any]:
    """The function that "module:function" names; what importing its module raises is raised.

    Raises:
        ConfigError: naming `field`: there is no such module or function.
    """
    module_name, _, function_name = target.partition(":")
    if not module_name or not function_name:
        raise ConfigError(field, target, 'write it as "module:function"')
    try:
        with importing_for(field, target), _seeding(module_name):
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


@contextmanager
def _seeding(name: str) -> Iterator[None]:
    """A context in which a module is imported, which draws from a seed of its name.

    Each process imports a module itself, and all must get the same one. A seed that the module sets
    itself holds on. What fails leaves Python's, numpy's and torch's generators as they were. Torch
    is seeded on the processor, and only where it is loaded: what trains nothing runs without it.
    """
    if name in sys.modules:
        yield
        return
    digest = hashlib.blake2b(name.encode(), digest_size=4).digest()
    seed = int.from_bytes(digest, "little")
    torch = sys.modules.get("torch")
    before = random.getstate(), np.random.get_state()
    torch_before = torch.default_generator.get_state() if torch else None
    random.seed(seed)
    np.random.seed(seed)
    if torch:
        torch.default_generator.manual_seed(seed)
    try:
        yield
    except BaseException:
        random.setstate(before[0])
        np.random.set_state(before[1])
        if torch:
            torch.default_generator.set_state(torch_before)
        raise


@contextmanager
def importing_for(field: str, named: str) -> Iterator[None]:
    """A time in which a module of the user is imported that a job names."""
    before = getattr(_importing, "named", None)
    _importing.named = (field, named)
    try:
        yield
    finally:
        _importing.named = before


def refuse_while_importing() -> None:
    """Refuses work on a job where a module that a job names is only being imported.

    Raises:
        ConfigError: it is. The processes of a job import its modules, and each would begin another
            job.
    """
    if (named := getattr(_importing, "named", None)) is not None:
        remedy = (
            "this module trains a job while it is imported, as each process of a job imports it; "
            'put the training under if __name__ == "__main__":'
        )
        raise ConfigError(named[0], named[1], remedy)
