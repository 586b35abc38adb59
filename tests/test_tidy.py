"""The rules of docs/ARCHITECTURE.md and of the code's style that a machine can check.

A rule is a function from one file to its problems, each "line: what is wrong; the way out". Every
rule runs over the whole tree, and over small snippets that it must and must not refuse.

Source: TigerBeetle's tidy.zig, style as a test in which a banned call names its replacement.
"""

import ast
import re
from collections import Counter
from collections.abc import Callable, Iterator
from functools import cache
from pathlib import Path

import pytest

from helpers.source_files import FUNCTIONS, File, outline

ROOT = Path(__file__).resolve().parent.parent

# From the bottom up. What stands on one level is apart: only the top imports within its level.
LEVELS = (
    {"errors"},
    {"core"},
    {"observe"},
    {"schedule"},
    {"estimator"},
    {"planner", "restorer"},
    {"placement"},
    {"policies"},
    {"protocol", "store"},
    {"coordinator", "systems"},
    {"user_functions"},
    {"transport"},
    {"checkpoint"},
    {"data", "models", "profiles"},
    {"engine", "nodes", "simulator"},
    {"torchrun"},
    {"papers"},
    {"show"},
    {"job"},
    {"chaos", "planaria"},
    {"__main__", "cli"},
)
WALL = 10  # The levels below it decide, the others act.
TOP = len(LEVELS) - 1
# The worker does what the plan says; it never makes one. And what paces a job's layers and links
# knows nothing of the estimator that it is held against.
NEVER = {
    *(("engine", "policies"), ("engine", "coordinator")),
    *(("engine", "estimator"), ("models", "estimator"), ("transport", "estimator")),
}

KNOW_TORCH = {"data", "engine", "models", "torchrun"}
TORCH = {"torch", "transformers", "datasets", "tokenizers"}
ACTING = {
    *("asyncio", "concurrent", "ctypes", "glob", "http", "io", "logging", "mmap"),
    *("multiprocessing", "os", "pathlib", "psutil", "queue", "secrets", "select", "selectors"),
    *("shutil", "signal", "socket", "subprocess", "sys", "tempfile", "threading", "time", "uuid"),
}
ACTING_CALLS = {
    **dict.fromkeys(("open", "print", "input"), "return the data and let the caller act"),
    **{
        f"{module}.{name}": "take now_s as an argument"
        for module in ("datetime", "datetime.datetime", "date", "datetime.date")
        for name in ("now", "utcnow", "today")
    },
    **{
        f"{module}.{name}": "take the data as an argument"
        for module in ("np", "numpy")
        for name in ("load", "save", "savez", "loadtxt", "savetxt", "fromfile", "memmap")
    },
}
SEEDED = {"Random", "Generator", "default_rng", "SeedSequence", "BitGenerator", "PCG64", "Philox"}

LINES_MAX, FUNCTION_LINES_MAX, COLUMNS_MAX, PARAMETERS_MAX = 600, 60, 100, 6
# Classes whose constructors may take more parameters, since users write them out.
PUBLIC_CONSTRUCTORS = {"MemoryCheckpointer"}
SMALL_LINES = 60
# Small modules that no other imports, or only one.
ALONE = {
    "planaria.__main__": "python -m",
    "planaria.simulator.__main__": "python -m",
    "planaria.schedule.warm": "named to the fork server, which imports it",
    "planaria.nodes.head.observer": "a protocol, which others implement without importing it",
}
PREPOSITIONS = {
    *("about", "above", "after", "against", "along", "among", "around", "as", "at", "before"),
    *("behind", "below", "beneath", "beside", "besides", "between", "beyond", "by", "despite"),
    *("during", "for", "from", "in", "inside", "into", "near", "of", "on", "onto", "outside"),
    *("over", "per", "since", "than", "through", "to", "toward", "towards", "under", "until"),
    *("upon", "via", "with", "within", "without"),
}
RELATIVES = {"how", "if", "that", "what", "when", "where", "which", "while", "who", "whom", "whose"}
# Participles that do not end in -ed. Not those that are verbs as they stand: cut, put, read, run.
PARTICIPLES = {
    *("begun", "bound", "broken", "brought", "built", "caught", "chosen", "dealt", "done"),
    *("drawn", "driven", "fallen", "felt", "forgotten", "found", "frozen", "given", "gone"),
    *("grown", "heard", "held", "hidden", "hung", "kept", "known", "laid", "learnt", "led"),
    *("left", "lent", "lost", "made", "met", "paid", "said", "seen", "sent", "shown", "slept"),
    *("sold", "sought", "spent", "spoilt", "stolen", "stood", "struck", "swept", "taken"),
    *("thrown", "told", "torn", "undone", "understood", "withdrawn", "won", "worn", "written"),
}
NO_PARTICIPLES = {"exceed", "feed", "heed", "need", "proceed", "seed", "speed", "succeed"}
PARTICLES = PREPOSITIONS | {"again", "and", "anew", "apart", "away", "back", "not", "off", "out"}
CITATION = re.compile(r'docs/(\w+)\.md,\s+((?:"[^"]+"(?:\s+and\s+)?)+)')
MARKERS = re.compile(r"\b(TO" + r"DO|FIX" + r"ME|X" + r"XX)\b")
MACHINE_PATH = re.compile(r"(?<![\w.<>])/(home|root|work)/")


Problem = tuple[int, str]
Rule = Callable[[File], Iterator[Problem]]


def layers(file: File) -> Iterator[Problem]:
    """Imports inside the package go down only."""
    if not file.module:
        return
    own = _level(file.part)
    if own is None:
        yield 1, f"{file.part} has no layer; add it to LEVELS in tests/test_tidy.py"
        return
    for line, name in outline(file).imports:
        if name.startswith("."):
            yield line, f"relative import {name}; write the whole name"
        if name.split(".")[0] != "planaria":
            continue
        part = File("", name, "").part
        part = part if _level(part) is not None else "planaria"
        level = _level(part)
        assert level is not None
        sideways = level == own and part != file.part and own != TOP
        if level > own or sideways or (file.part, part) in NEVER:
            yield line, f"{file.part} imports {name}; imports go down only: move it or pass it in"


def torch_is_apart(file: File) -> Iterator[Problem]:
    """Only these folders may know what a tensor is."""
    if not file.module or file.part in KNOW_TORCH:
        return
    for line, name in outline(file).imports:
        if name.split(".")[0] in TORCH or name.startswith("safetensors.torch"):
            yield line, f"imports {name}; use bytes or numpy, or move it to {sorted(KNOW_TORCH)}"


def purity(file: File) -> Iterator[Problem]:
    """Below the wall: no sockets, threads, processes, files, wall clock or global random state."""
    level = _level(file.part) if file.module else None
    if level is None or level >= WALL:
        return
    for line, name in outline(file).imports:
        if name.split(".")[0] in ACTING:
            yield line, f"pure code imports {name}; take what it gives as an argument"
        if re.fullmatch(r"random\.(?!Random$)\w+|numpy\.random\.[a-z]\w*", name):
            yield line, f"pure code imports {name}; take rng as an argument"
    for call in file.nodes(ast.Call):
        yield from _impure_call(call)


def _impure_call(call: ast.Call) -> Iterator[Problem]:
    name = ast.unparse(call.func)
    if name in ACTING_CALLS:
        yield call.lineno, f"pure code calls {name}(); {ACTING_CALLS[name]}"
    drawn = re.fullmatch(r"(?:random|np\.random|numpy\.random)\.(\w+)", name)
    unseeded = not call.args and not call.keywords
    if drawn and (drawn[1] not in SEEDED or unseeded):
        yield call.lineno, f"{name}() draws from global state; take rng or a seed as an argument"


def sizes(file: File) -> Iterator[Problem]:
    """600 lines a file, 60 a function, 100 columns, 6 parameters a constructor, ASCII."""
    lines = file.source.splitlines()
    if len(lines) > LINES_MAX:
        yield LINES_MAX + 1, f"{len(lines)} lines, {LINES_MAX} are allowed; split the file by idea"
    for node in file.nodes(*FUNCTIONS):
        length = (node.end_lineno or node.lineno) - node.lineno + 1
        if length > FUNCTION_LINES_MAX:
            yield node.lineno, f"{node.name} has {length} lines, {FUNCTION_LINES_MAX} allowed"
    for made in file.nodes(ast.ClassDef):
        if file.module and made.name not in PUBLIC_CONSTRUCTORS:
            yield from _long_constructors(made)
    for number, text in enumerate(lines, start=1):
        if len(text) > COLUMNS_MAX:
            yield number, f"{len(text)} columns, {COLUMNS_MAX} are allowed; break the line"
        if not text.isascii():
            yield number, "is not ASCII; write it in ASCII or as an escape"


def _long_constructors(made: ast.ClassDef) -> Iterator[Problem]:
    """The constructor of a class, if it has too many parameters besides `self`."""
    for node in made.body:
        if isinstance(node, ast.FunctionDef) and node.name == "__init__":
            count = len(node.args.posonlyargs + node.args.args + node.args.kwonlyargs) - 1
            if count > PARAMETERS_MAX:
                yield node.lineno, f"{made.name} takes {count} parameters; give it a record"


def speech(file: File) -> Iterator[Problem]:
    """Only cli, show and `if __name__ == "__main__"` blocks print."""
    if not file.module or file.part in {"cli", "show"}:
        return
    allowed = {inner for block in _main_blocks(file.tree) for inner in ast.walk(block)}
    for call in file.nodes(ast.Call):
        is_print = isinstance(call.func, ast.Name) and call.func.id == "print"
        if is_print and call not in allowed:
            yield call.lineno, "prints; return the text, or log it"


def handlers(file: File) -> Iterator[Problem]:
    """No bare except, and no handler that does nothing."""
    for node in file.nodes(ast.ExceptHandler):
        if node.type is None:
            yield node.lineno, "bare except; name the exception that is expected"
        if all(isinstance(inner, ast.Pass) or _is_ellipsis(inner) for inner in node.body):
            yield node.lineno, "handler does nothing; act on it, or let it through"


def leftovers(file: File) -> Iterator[Problem]:
    """No notes of unfinished work and no path of one machine."""
    for pattern, problem in (
        (MARKERS, "notes unfinished work; finish it or open an issue"),
        (MACHINE_PATH, "names a path of one machine; use a relative one, or tmp_path in tests"),
    ):
        for match in pattern.finditer(file.source):
            yield file.source.count("\n", 0, match.start()) + 1, problem


def packages(file: File) -> Iterator[Problem]:
    """Public names live in planaria/__init__.py and nowhere else."""
    is_package = file.module.count(".") > 0 and file.path.endswith("__init__.py")
    if is_package and file.source.strip():
        yield 1, "a sub-package's __init__.py is empty; put the code in a module"


def docstrings(file: File) -> Iterator[Problem]:
    """Every module says what it is."""
    if file.source.strip() and not ast.get_docstring(file.tree):
        yield 1, "no module docstring; say in a sentence what it is"


def sentences(file: File) -> Iterator[Problem]:
    """No docstring, and no entry of Args or Attributes, begins with a preposition."""
    if not file.module:
        return
    for node in (file.tree, *file.nodes(ast.ClassDef), *file.nodes(*FUNCTIONS)):
        text = ast.get_docstring(node)
        if text:
            line = 1 if isinstance(node, ast.Module) else node.lineno
            yield from ((line, problem) for problem in _fragments(text))


def _fragments(docstring: str) -> Iterator[str]:
    if _first_word(docstring) in PREPOSITIONS:
        yield f'"{docstring.splitlines()[0]}" begins with a preposition; name the thing'
    section = ""
    for line in docstring.splitlines():
        if re.fullmatch(r"[A-Z]\w+:", line):
            section = line
        elif line and not line.startswith(" "):
            section = ""
        entry = re.fullmatch(r" {4}([\w*, ]+): (.*)", line)
        is_listed = section in {"Args:", "Attributes:"}
        if entry and is_listed and _first_word(entry[2]) in PREPOSITIONS | RELATIVES:
            yield f'"{line.strip()}" begins with "{_first_word(entry[2])}"; name the thing'


def _first_word(text: str) -> str:
    word = re.match(r"\w+", text.lstrip('("'))
    return word[0].lower() if word else ""


def verbs(file: File) -> Iterator[Problem]:
    """No function is a bare participle: it acts or returns something. Locals are nouns."""
    if not file.module:
        return
    for node in file.nodes(*FUNCTIONS):
        if any(ast.unparse(mark) == "property" for mark in node.decorator_list):
            continue  # It is read as a field.
        words = node.name.strip("_").split("_")
        others = [word for word in words if word not in PARTICLES]
        is_phrase = words[0] in {"on", "with", "without"}
        if others and not is_phrase and all(_is_participle(word) for word in others):
            yield node.lineno, f"{node.name} is a participle; name what it does or returns"
    for local in file.nodes(ast.Name):
        if local.id in {"one", "found", "told"}:
            yield local.lineno, f"{local.id} names nothing; take a noun"


def _is_participle(word: str) -> bool:
    is_regular = len(word) > 3 and word.endswith("ed") and word not in NO_PARTICIPLES
    return is_regular or word in PARTICIPLES


RULES: tuple[Rule, ...] = (
    *(layers, torch_is_apart, purity, sizes),
    *(speech, handlers, leftovers, packages, docstrings, sentences, verbs),
)


def _level(part: str) -> int | None:
    return next((index for index, level in enumerate(LEVELS) if part in level), None)


def _main_blocks(tree: ast.Module) -> Iterator[ast.If]:
    for node in tree.body:
        if isinstance(node, ast.If) and ast.unparse(node.test) == "__name__ == '__main__'":
            yield node


def _is_ellipsis(node: ast.stmt) -> bool:
    return isinstance(node, ast.Expr) and ast.unparse(node) == "..."


@cache
def _tree_files() -> tuple[File, ...]:
    found = []
    for folder in ("src", "tests", "benchmarks", "examples"):
        for path in sorted((ROOT / folder).rglob("*.py")):
            relative = path.relative_to(ROOT)
            parts = relative.with_suffix("").parts[1:] if folder == "src" else ()
            module = ".".join(parts).removesuffix(".__init__")
            found.append(File(str(relative), module, path.read_text(encoding="utf-8")))
    return tuple(found)


def _problems(rule: Rule, file: File) -> list[str]:
    return [f"{file.path}:{line}: {text}" for line, text in rule(file)]


def test_the_tree_keeps_every_rule() -> None:
    """Each problem names its file and line and the way out."""
    files = _tree_files()

    assert len(files) > 10
    problems = [text for file in files for rule in RULES for text in _problems(rule, file)]
    assert not problems, "\n".join(problems)


def test_no_two_modules_of_tests_have_one_name() -> None:
    """Pytest imports each by its name alone, and knows only one of them."""
    names = Counter(Path(file.path).name for file in _tree_files() if file.path[:6] == "tests/")
    del names["__init__.py"]

    assert [name for name, number in names.items() if number > 1] == []


def test_no_two_classes_have_one_name() -> None:
    """One name is one thing: a reader who searches for it arrives at one place."""
    names = Counter(name for file in _tree_files() if file.module for name in outline(file).classes)

    assert [name for name, number in names.items() if number > 1] == []


def test_no_two_modules_have_one_name() -> None:
    """Only a modelled part has the name of what it models."""
    names = Counter(
        file.module.rpartition(".")[2]
        for file in _tree_files()
        if file.module
        and not file.module.startswith("planaria.simulator.modelled.")
        and not file.path.endswith("__init__.py")
    )

    assert [name for name, number in names.items() if number > 1] == ["__main__"]


def test_a_small_module_has_more_than_one_importer() -> None:
    """One that only one other needs belongs to that one."""
    files = [file for file in _tree_files() if file.module and file.source.strip()]
    importers: dict[str, set[str]] = {file.module: set() for file in files}
    for file in files:
        for _, name in outline(file).imports:
            found = name if name in importers else name.rpartition(".")[0]
            importers.get(found, set()).add(file.module)

    alone = [
        file.module
        for file in files
        if len(file.source.splitlines()) < SMALL_LINES and len(importers[file.module]) < 2
    ]
    assert sorted(alone) == sorted(ALONE)


def test_both_workers_run_the_same_decisions() -> None:
    """What a worker decides was written twice once, and simulations proved the copy."""
    protocol = "planaria.protocol.worker_state"
    called = [
        {name for _, name in outline(file).imports if name.startswith(protocol)}
        for file in _tree_files()
        if file.module in {"planaria.engine.worker", "planaria.simulator.modelled.worker"}
    ]

    assert len(called) == 2
    assert all(
        f"{protocol}.{name}" in names
        for names in called
        for name in (
            "on_order",
            "on_settled",
            "on_exchanged",
            "on_computed",
            "on_iteration_told",
            "votes",
        )
    )


def test_a_section_that_is_cited_is_there() -> None:
    """A reader who looks for the reason of a rule finds it under the title that the code names."""
    missing = []
    for file in _tree_files():
        for page, titles in CITATION.findall(file.source):
            text = (ROOT / "docs" / f"{page}.md").read_text(encoding="utf-8")
            headings = {line.lstrip("# ") for line in text.splitlines() if line.startswith("#")}
            cited = (" ".join(title.split()) for title in re.findall(r'"([^"]+)"', titles))
            missing += [
                f"{file.path}: {page}.md, {title}" for title in cited if title not in headings
            ]

    assert missing == []


def test_text_files_name_no_machine_path_and_no_unfinished_work() -> None:
    """What a reader copies from docs and examples must work on the reader's machine."""
    names = ("Makefile", "README.md", "CHANGELOG.md", ".ci/run", "pyproject.toml")
    texts = [ROOT / name for name in names] + [
        path
        for folder in ("docs", "examples", "benchmarks")
        for path in sorted((ROOT / folder).rglob("*"))
        if path.suffix in {".md", ".toml", ".json", ".txt"}
    ]
    files = [File(str(path.relative_to(ROOT)), "", path.read_text("utf-8")) for path in texts]

    problems = [problem for file in files for problem in _problems(leftovers, file)]
    assert not problems, "\n".join(problems)


BAD: tuple[tuple[Rule, str, str, int], ...] = (
    (layers, "planaria.core.plan", "from planaria.schedule.action import Action\n", 1),
    (layers, "planaria.engine.worker", "import planaria.coordinator.step\n", 1),
    (layers, "planaria.engine.worker", "def f():\n    import planaria.nodes.agent\n", 2),
    (layers, "planaria.transport.pacing", "from planaria.estimator.time import Span\n", 1),
    (layers, "planaria.models.paced", "import planaria.estimator.reductions\n", 1),
    (layers, "planaria.planner.plans", "from planaria.cli import main as cli\n", 1),
    (layers, "planaria.planner.plans", "from planaria import __version__\n", 1),
    (layers, "planaria.planner.plans", "from .templates import templates\n", 1),
    (layers, "planaria.novel.thing", "x = 1\n", 1),
    (torch_is_apart, "planaria.nodes.agent", "x = 1\nimport torch\n", 2),
    (torch_is_apart, "planaria.cli.main", "def f():\n    from torch import nn\n", 2),
    (torch_is_apart, "planaria.checkpoint.disk.tiers", "import safetensors.torch\n", 1),
    (purity, "planaria.planner.plans", "import time\n", 1),
    (purity, "planaria.planner.plans", "import os.path\n", 1),
    (purity, "planaria.coordinator.step", "from threading import Lock\n", 1),
    (purity, "planaria.core.job", "def f():\n    return open('x')\n", 2),
    (purity, "planaria.core.job", "import datetime\nx = datetime.datetime.now()\n", 2),
    (purity, "planaria.core.samples", "import numpy as np\nx = np.random.rand(3)\n", 2),
    (purity, "planaria.core.samples", "import numpy as np\nx = np.random.default_rng()\n", 2),
    (purity, "planaria.core.samples", "import random\nx = random.random()\n", 2),
    (purity, "planaria.core.samples", "from random import shuffle\n", 1),
    (purity, "planaria.core.samples", "import numpy as np\nx = np.load('x.npy')\n", 2),
    (sizes, "planaria.core.plan", "x = 1\n" * 601, 601),
    (sizes, "planaria.core.plan", "def f():\n" + "    x = 1\n" * 60, 1),
    (sizes, "", "x = 1  # " + "x" * 93 + "\n", 1),
    (
        sizes,
        "planaria.core.plan",
        "class A:\n    def __init__(self, a, b, c, *, d, e, f, g):\n        self.a = a\n",
        2,
    ),
    (sizes, "planaria.core.plan", "x = '\u00e9'\n", 1),
    (speech, "planaria.engine.worker", "x = 1\nprint(x)\n", 2),
    (handlers, "", "try:\n    x()\nexcept:\n    y()\n", 3),
    (handlers, "", "try:\n    x()\nexcept OSError:\n    pass\n", 3),
    (handlers, "", "try:\n    x()\nexcept OSError:\n    ...\n", 3),
    (leftovers, "", "x = 1\n# TO" + "DO: more\n", 2),
    (leftovers, "", "x = '/" + "home/me/data'\n", 1),
    (packages, "planaria.core", "from planaria.core.plan import Plan\n", 1),
    (docstrings, "planaria.core.plan", "x = 1\n", 1),
    (sentences, "planaria.core.plan", '"""Of whole nodes, so many."""\n', 1),
    (verbs, "planaria.core.plan", "def told(x):\n    return x\n", 1),
    (verbs, "planaria.core.plan", "def value(x):\n    found = x\n", 2),
    (verbs, "planaria.core.plan", "class A:\n    def _gone_on(self):\n        return 1\n", 2),
    (verbs, "planaria.core.plan", "def committed_again():\n    return 1\n", 1),
    (
        sentences,
        "planaria.core.plan",
        'def f(x):\n    """F.\n\n    Args:\n        x: of it.\n    """\n',
        1,
    ),
)

GOOD: tuple[tuple[Rule, str, str], ...] = (
    (
        layers,
        "planaria.cli.main",
        "from planaria.job.training_job import Job\nimport planaria.job.config\n",
    ),
    (layers, "planaria.simulator.simulation", "from planaria.simulator.loop import run\n"),
    (layers, "planaria.nodes.agent", "from planaria.coordinator.step import step\n"),
    (layers, "", "import planaria.cli.main\n"),
    (torch_is_apart, "planaria.engine.stage", "import torch\n"),
    (torch_is_apart, "planaria.nodes.agent", "import torchless\n"),
    (purity, "planaria.estimator.peak_memory", "from planaria.estimator.time import timeline\n"),
    (purity, "planaria.core.samples", "import numpy as np\nx = np.random.default_rng(3)\n"),
    (purity, "planaria.core.samples", "import random\nx = random.Random(3).random()\n"),
    (purity, "planaria.nodes.agent", "import os, time\nx = open('x')\n"),
    (sizes, "planaria.core.plan", "def f():\n" + "    x = 1\n" * 59),
    (
        sizes,
        "planaria.core.plan",
        "class A:\n    def __init__(self, a, b, c, *, d, e, f):\n        self.a = a\n",
    ),
    (speech, "planaria.cli.main", "print(1)\n"),
    (speech, "planaria.job.config", "if __name__ == '__main__':\n    print(1)\n"),
    (handlers, "", "try:\n    x()\nexcept OSError:\n    y()\n"),
    (leftovers, "", "url = 'https://example.com/home/page'\n"),
    (packages, "planaria", "from planaria.job.training_job import Job\n"),
    (docstrings, "planaria.core", ""),
    (sentences, "planaria.core.plan", '"""Plans.\n\nArgs:\n    x: index of it.\n"""\n'),
    (verbs, "planaria.core.plan", "def seed():\n    def on_lost():\n        return 1\n"),
    (verbs, "planaria.core.plan", "def lost_nodes():\n    return 1\n"),
    (verbs, "", "def told(x):\n    return x\n"),
)


@pytest.mark.parametrize(("rule", "module", "source", "line"), BAD)
def test_rules_refuse_bad_code(rule: Rule, module: str, source: str, line: int) -> None:
    """A rule that lets its own bad example through checks nothing."""
    lines = [number for number, _ in rule(File("x/__init__.py", module, source))]

    assert lines == [line]


@pytest.mark.parametrize(("rule", "module", "source"), GOOD)
def test_rules_let_good_code_through(rule: Rule, module: str, source: str) -> None:
    """A rule that refuses what is allowed makes people write around it."""
    assert list(rule(File("x/__init__.py", module, source))) == []


def test_every_rule_has_a_bad_and_a_good_example() -> None:
    """A new rule comes with its proof."""
    assert {rule for rule, *_ in BAD} == set(RULES)
    assert {rule for rule, *_ in GOOD} == set(RULES)
