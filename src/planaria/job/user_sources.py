"""The source of the user's modules, which a head sends to the machines of its job.

A job names functions of the user's ("module:function"). Their modules are looked for in the
directories in which the job's processes look first: beside the job file, and in the current
directory. What these modules import is followed, as far as it is found there; of a package all
modules are taken, and a package need not have an `__init__.py`. Modules that are installed must be
installed on every machine.
"""

import ast
import hashlib
import importlib.util
from collections.abc import Iterator, Sequence
from pathlib import Path

from planaria.core.job import JobConfig
from planaria.core.machine_messages import SOURCES_BYTES_MAX, SourceFile
from planaria.errors import ConfigError


def user_sources(config: JobConfig, search_path: Sequence[str]) -> tuple[SourceFile, ...]:
    """The files of the user's modules, in the order of their paths.

    Args:
        search_path: directories in which modules are looked for, the first one first.

    Raises:
        ConfigError: the files have more than SOURCES_BYTES_MAX bytes, or one cannot be read.
    """
    directories = [Path(directory) for directory in search_path]
    files: dict[str, SourceFile] = {}
    num_bytes = 0
    waiting = [
        (field, target.partition(":")[0])
        for field, target in (
            ("model.target", config.model.target),
            ("data.target", config.data.target),
            ("data.collate", config.data.collate),
            ("evaluation.target", config.evaluation.target),
            *((f"evaluation.metrics.{n}", t) for n, t in config.evaluation.metrics.items()),
        )
        if target
    ]
    seen: set[str] = set()
    while waiting:
        field, module = waiting.pop()
        top = module.partition(".")[0]
        if top in seen:
            continue
        seen.add(top)
        for directory, path in _files_of(top, directories):
            name = path.relative_to(directory).as_posix()
            if name in files:  # The same part of a package, from the directory before.
                continue
            data = _read(path, field, module)
            num_bytes += len(data)
            if num_bytes > SOURCES_BYTES_MAX:
                remedy = (
                    f"its modules have more than {SOURCES_BYTES_MAX >> 20} MiB; install them on "
                    "every machine, and leave only small ones beside the job"
                )
                raise ConfigError(field, module, remedy)
            digest = hashlib.sha256(data).hexdigest()
            files[name] = SourceFile(path=name, data=data, sha256=digest)
            waiting += [(field, imported) for imported in _imports(data)]
    return tuple(files[name] for name in sorted(files))


def _files_of(top: str, directories: Sequence[Path]) -> Iterator[tuple[Path, Path]]:
    """The files of a top-level module, each with its directory; none if it is not found there.

    As for Python, all directories of that name without an `__init__.py` are one package, unless
    there is another module of that name.
    """
    for directory in directories:
        package, module = directory / top, directory / f"{top}.py"
        if (package / "__init__.py").is_file():
            yield from ((directory, path) for path in _modules_in(package))
            return
        if module.is_file():
            yield directory, module
            return
    parts = [directory for directory in directories if (directory / top).is_dir()]
    if parts and top.isidentifier() and not _is_installed(top):
        for directory in parts:
            yield from ((directory, path) for path in _modules_in(directory / top))


def _modules_in(package: Path) -> list[Path]:
    """The modules of a package, without files whose names are no text: nothing imports those."""
    return [path for path in sorted(package.rglob("*.py")) if _is_text(path.relative_to(package))]


def _is_text(path: Path) -> bool:
    return str(path).encode(errors="ignore").decode() == str(path)


def _is_installed(top: str) -> bool:
    """Whether a top-level module comes with Python or from an installed package."""
    try:
        spec = importlib.util.find_spec(top)
    except ValueError:  # It is that of this program (`__main__`).
        return True
    return spec is not None and spec.origin is not None  # Directories without a file have none.


def _read(path: Path, field: str, module: str) -> bytes:
    try:
        return path.read_bytes()
    except OSError as error:
        raise ConfigError(field, module, f"{path} cannot be read: {error.strerror}") from error


def _imports(data: bytes) -> Iterator[str]:
    """The modules that a file imports; none if it is no Python, which whoever imports it says."""
    try:
        tree = ast.parse(data)
    except (SyntaxError, ValueError):
        return
    for node in ast.walk(tree):
        if isinstance(node, ast.Import):
            yield from (alias.name for alias in node.names)
        elif isinstance(node, ast.ImportFrom) and node.module and not node.level:
            yield node.module
