"""The house: which room may import which, and what a file may hold.

Imports inside of functions count, and those that only a type checker follows.
"""

from __future__ import annotations

import ast
import re
import subprocess
import sys
import tomllib
from collections.abc import Iterator
from fnmatch import fnmatch
from functools import cache
from pathlib import Path

import pytest
import yaml

pytestmark = pytest.mark.checkout
ROOT = Path(__file__).parent.parent
SPECS = sorted((ROOT / "specs").glob("*.yaml"))
MODULES = sorted((ROOT / "layoutc").rglob("*.py"))
GENERATED = sorted((ROOT / "generated").rglob("*.py"))
TESTS = sorted((ROOT / "tests").rglob("*.py"))
MOST_MODULES, MOST_LINES = 14, 400  # of a folder, and of a module

# Each room: the rooms that it may import, and the packages beside the standard library. Whatever
# is not named may not be imported; what stands further down in the table may import what stands further up.
COMPILER = {
    "ints": ("", ""),
    "diagnostics": ("", "yaml"),
    "spec": ("diagnostics", "pydantic yaml"),
    "spec.checks": ("diagnostics spec runtime.bindings", "pydantic pydantic_core"),
    "layout": ("ints spec runtime.bindings", ""),
    "plan": ("ints spec layout", ""),
    "estimate": ("ints plan", ""),
    "models": ("", "torch transformers yaml"),
    "budget": ("ints layout plan estimate models", ""),
    "emit": ("spec layout plan runtime.bindings", "jinja2"),
    "report": ("ints diagnostics spec layout plan estimate runtime.bindings checkpoint checkpoint.common", "rich"),
    "explorer": ("ints spec layout plan report", ""),
    "charts": ("", "matplotlib"),
    "report.budgets": ("models budget report charts", "matplotlib yaml"),
    "build": ("diagnostics spec spec.checks layout plan emit", "click"),
}
RUNTIME = {
    "runtime": ("ints runtime.bindings", "torch"),
    "runtime.bindings": ("", ""),
    "runtime.sharding": ("ints runtime", "torch"),
    "runtime.storage": ("ints runtime", "torch"),
    "runtime.triton": ("", "torch triton"),
    "runtime.kernels": ("ints runtime runtime.triton", "torch triton"),
    "runtime.weight": ("ints runtime runtime.sharding runtime.storage runtime.kernels", "torch"),
    "runtime.quantize": ("runtime runtime.sharding runtime.storage runtime.kernels runtime.weight", "torch"),
    "runtime.operands": ("ints runtime runtime.triton runtime.kernels runtime.weight", "torch triton"),
    "runtime.products": (
        "runtime runtime.sharding runtime.kernels runtime.weight runtime.quantize runtime.operands",
        "torch",
    ),
    "runtime.fsdp2": (
        "ints runtime runtime.sharding runtime.storage runtime.kernels runtime.weight runtime.quantize",
        "torch",
    ),
    "runtime.dispatch": (
        "ints runtime runtime.sharding runtime.storage runtime.weight runtime.quantize runtime.products",
        "torch",
    ),
    "runtime.cast": (
        "ints runtime runtime.sharding runtime.kernels runtime.weight runtime.quantize runtime.products runtime.fsdp2 "
        "runtime.dispatch",
        "torch",
    ),
    "runtime.train": (
        "runtime runtime.bindings runtime.sharding runtime.storage runtime.weight runtime.quantize runtime.dispatch "
        "runtime.cast",
        "torch",
    ),
    "runtime.optim": (
        "ints runtime runtime.sharding runtime.triton runtime.kernels runtime.weight runtime.dispatch runtime.train",
        "torch triton",
    ),
}
ABOVE = {
    "checkpoint.untrusted": ("runtime", "torch"),
    "checkpoint.common": (
        "ints runtime runtime.sharding runtime.weight runtime.quantize runtime.cast",
        "torch",
    ),
    "checkpoint.bindings": ("runtime.bindings", ""),
    "checkpoint.held": (
        "ints runtime runtime.bindings runtime.weight checkpoint.untrusted checkpoint.bindings",
        "torch",
    ),
    "checkpoint.safetensors": (
        "ints runtime runtime.bindings runtime.sharding runtime.weight runtime.quantize runtime.cast "
        "checkpoint.bindings checkpoint.common checkpoint.untrusted checkpoint.held",
        "torch safetensors",
    ),
    "checkpoint.gguf": (
        "runtime runtime.bindings runtime.weight checkpoint.common checkpoint.untrusted checkpoint.held "
        "checkpoint.safetensors",
        "torch gguf",
    ),
    "checkpoint": (
        "layoutc runtime runtime.bindings runtime.sharding runtime.storage runtime.weight runtime.quantize "
        "runtime.train runtime.optim checkpoint.common checkpoint.untrusted checkpoint.safetensors checkpoint.gguf",
        "torch",
    ),
    "integrations": (
        "layoutc runtime.storage runtime.products runtime.weight checkpoint",
        "torch accelerate lightning peft torchtitan transformers",
    ),
    "bench": (
        "layoutc ints runtime runtime.kernels runtime.weight runtime.quantize runtime.products runtime.fsdp2 "
        "runtime.train",
        "torch triton rich",
    ),
    "conformance.model": ("spec layout", "numpy yaml"),
    "conformance": (
        "ints diagnostics spec.checks layout plan build conformance.model",
        "torch numpy pytest",
    ),
    "conformance.checks": (
        "layoutc ints spec layout runtime runtime.weight runtime.fsdp2 conformance conformance.model",
        "torch numpy",
    ),
    "doctor": (
        "runtime runtime.kernels runtime.weight runtime.products runtime.train",
        "torch",
    ),
    "cli": (
        "layoutc diagnostics spec spec.checks plan estimate models budget build report charts report.budgets explorer "
        "checkpoint conformance bench doctor",
        "click resvg_py",
    ),
}
ROOMS = COMPILER | RUNTIME | ABOVE
# What layoutc itself hands out, each when it is first asked for; and the names in pickles, which never move.
DOORS = {"layoutc", "layoutc.__main__", "layoutc.pickled"}
OLD_NAMES = {f"layoutc.runtime.{name}" for name in ("broadcasts", "casting", "plain_state")}
# Imports against the table, each with the reason.
EXCEPTIONS: set[tuple[str, str]] = set()


def name_of(path: Path) -> str:
    """Of a module, as it is imported."""
    parts = path.relative_to(ROOT).with_suffix("").parts
    return ".".join(parts[:-1] if parts[-1] == "__init__" else parts)


NAMES = {name_of(path): path for path in MODULES}


def room_of(name: str) -> str:
    """The folder that a module lies in, below layoutc; of layoutc itself and of its own modules: "layoutc"."""
    package = name if NAMES.get(name, Path()).name == "__init__.py" else name.rpartition(".")[0]
    return package.removeprefix("layoutc.").replace("runtime.torch_private", "runtime")  # which is one place, in parts


@cache
def tree_of(path: Path) -> ast.Module:
    """A Python file, parsed once."""
    return ast.parse(path.read_text(encoding="utf-8"))


@cache
def imported(path: Path) -> frozenset[str]:
    """Full names of all modules that a file imports, wherever in the file."""
    return names_in(tree_of(path))


def names_in(tree: ast.Module) -> frozenset[str]:
    found: set[str] = set()
    for node in ast.walk(tree):
        if isinstance(node, ast.Import):
            found |= {alias.name for alias in node.names}
        elif isinstance(node, ast.ImportFrom) and node.level == 0:
            for alias in node.names:
                full = f"{node.module}.{alias.name}"
                found.add(full if full in NAMES else str(node.module))
    return frozenset(found)


@cache
def imported_at_once(path: Path) -> frozenset[str]:
    """Of those, what is imported as soon as the file is: not inside of functions, and not for type checkers."""
    tree = ast.parse(path.read_text(encoding="utf-8"))
    tree.body = [node for node in tree.body if not isinstance(node, ast.FunctionDef | ast.ClassDef)]
    tree.body = [node for node in tree.body if not (isinstance(node, ast.If) and "TYPE_CHECKING" in ast.unparse(node))]
    return names_in(tree)


def ours(path: Path) -> set[str]:
    return {name for name in imported(path) if name.split(".")[0] == "layoutc"}


def packages(path: Path) -> set[str]:
    """Beside the standard library and layoutc."""
    return {name.partition(".")[0] for name in imported(path)} - set(sys.stdlib_module_names) - {"layoutc"}


def against_the_table(name: str, path: Path) -> Iterator[str]:
    """What a module imports that its room must not."""
    room = room_of(name)
    rooms, foreign = (set(words.split()) for words in ROOMS[room])
    for other in sorted(ours(path)):
        if room_of(other) not in {room, *rooms} and (name, other) not in EXCEPTIONS:
            yield f"{name} imports {other}, but {room} may import {', '.join(sorted(rooms)) or 'nothing'} of layoutc"
    for package in sorted(packages(path) - foreign):
        yield f"{name} imports {package}, but {room} may import {', '.join(sorted(foreign)) or 'no package'}"


def rings(graph: dict[str, set[str]]) -> list[set[str]]:
    """Sets of nodes that reach one another."""
    reached: dict[str, set[str]] = {}
    for node in graph:
        seen, left = set[str](), [node]
        while left:
            for other in graph[left.pop()] - seen:
                seen.add(other)
                left.append(other)
        reached[node] = seen
    found: list[set[str]] = []
    for node in graph:
        ring = {other for other in reached[node] if node in reached[other]}
        if len(ring) > 1 and ring not in found:
            found.append(ring)
    return found


def test_every_module_is_in_a_room() -> None:
    assert {room_of(name) for name in NAMES} - {"layoutc"} == set(ROOMS)


def test_rooms_import_what_the_table_says() -> None:
    names = sorted(set(NAMES) - DOORS - OLD_NAMES)
    assert [one for name in names for one in against_the_table(name, NAMES[name])] == []


def test_the_table_says_no_more_than_is_so() -> None:
    """A room that is allowed and never imported is a rule that nobody has looked at."""
    used = {room: set[str]() for room in ROOMS}
    for name, path in NAMES.items():
        if name not in DOORS | OLD_NAMES:
            used[room_of(name)] |= {room_of(other) for other in ours(path)} | packages(path)
    for room, (rooms, foreign) in ROOMS.items():
        assert not {*rooms.split(), *foreign.split()} - used[room], room
    assert all(other in ours(NAMES[name]) for name, other in EXCEPTIONS)


def test_no_rooms_import_one_another() -> None:
    graph = {room: {other for other in rooms.split() if other in ROOMS} for room, (rooms, _) in ROOMS.items()}
    for name, other in EXCEPTIONS:
        graph[room_of(name)].add(room_of(other))
    assert rings(graph) == []


def test_no_modules_import_one_another() -> None:
    graph = {name: ours(path) & set(NAMES) - {name} for name, path in NAMES.items() if name not in DOORS | OLD_NAMES}
    assert rings({name: others & graph.keys() for name, others in graph.items()}) == []


def test_old_names_are_those_of_pickles_alone() -> None:
    for name in OLD_NAMES:
        assert ours(NAMES[name]) == {"layoutc.pickled"}
    for path in (*MODULES, *GENERATED):
        assert not imported(path) & OLD_NAMES, path


def test_generated_code_needs_torch_and_the_runtime_alone() -> None:
    """And its kernels Triton, which nothing else imports before a card is there."""
    for path in GENERATED:
        assert packages(path) <= ({"torch", "triton"} if path.name == "kernels.py" else {"torch"}), path
        assert all(name.startswith("layoutc.runtime") for name in ours(path)), path


def test_what_users_import_needs_no_triton() -> None:
    """torch's wheels for CPUs, macOS and Windows come without it."""
    from layoutc import _RUNTIME

    doors = [
        *_RUNTIME.values(),
        *(name for name in NAMES if re.match(r"layoutc\.(bench|checkpoint|integrations)\.", name)),
    ]
    seen: dict[str, str] = dict.fromkeys(doors, "a user")
    left = list(seen)
    while left:
        name = left.pop()
        for other in imported_at_once(NAMES[name]):
            assert other.partition(".")[0] != "triton", f"{name}, which {seen[name]} imports, imports {other}"
            if other in NAMES and other not in seen:
                seen[other] = name
                left.append(other)


# How many there are today: these numbers only fall.
MOST_FOREIGN_READS = 122
OF_NAMEDTUPLES = {"_asdict", "_fields", "_make", "_replace"}


def own_names(tree: ast.Module) -> set[str]:
    """Names that the classes of a module define: methods, attributes of the class, and what methods assign to self."""
    names: set[str] = set()
    for of_class in (node for node in ast.walk(tree) if isinstance(node, ast.ClassDef)):
        for node in ast.walk(of_class):
            if isinstance(node, ast.FunctionDef):
                names.add(node.name)
            elif isinstance(node, ast.Name) and isinstance(node.ctx, ast.Store):
                names.add(node.id)
            elif isinstance(node, ast.Attribute) and isinstance(node.ctx, ast.Store):
                names |= {node.attr} if isinstance(node.value, ast.Name) and node.value.id == "self" else set()
    return names


def foreign_reads(path: Path) -> Iterator[str]:
    """Private attributes in a file that no class of it defines, except those that a class has from its bases."""
    tree = tree_of(path)
    own, methods = own_names(tree), set[ast.AST]()
    for of_class in (node for node in ast.walk(tree) if isinstance(node, ast.ClassDef)):
        methods |= set(ast.walk(of_class))
    for node in ast.walk(tree):
        if isinstance(node, ast.Attribute) and re.match(r"_[^_]", node.attr) and node.attr not in own | OF_NAMEDTUPLES:
            owner = ast.unparse(node.value)
            is_inherited = node in methods and owner in ("self", "cls")
            if not is_inherited and owner not in ("aten", "torch.ops.aten", "os", "sys"):  # no classes
                yield node.attr


def test_private_attributes_of_other_classes() -> None:
    """Of torch's they are in one place, which says what each is; of ours, a class has a name for others to read."""
    found = {name: list(foreign_reads(path)) for name, path in NAMES.items() if not name.startswith(OF_TORCH)}
    assert sum(map(len, found.values())) <= MOST_FOREIGN_READS
    assert not [name for name, reads in found.items() if "_planes" in reads]


OF_TORCH = "layoutc.runtime.torch_private"


def test_private_names_of_fsdp2_stand_in_few_files() -> None:
    """In the place of all private names."""
    private = re.compile(r"_fully_shard|_composable_state|_training_state|_fsdp_param|_reshard_after_forward")
    found = {name_of(path) for path in MODULES if private.search(path.read_text(encoding="utf-8"))}
    assert [name for name in found if not name.startswith(OF_TORCH)] == []
    assert not [path for path in GENERATED if private.search(path.read_text(encoding="utf-8"))]


def test_private_names_of_torch_stand_in_one_file() -> None:
    """And one that torch.distributed.checkpoint writes into files. Call stacks are looked at in `callers` alone."""
    private = re.compile(
        r"\btorch\._[a-zA-Z]|from torch[\w.]*\._\w+ import|from torch[\w.]* import (\w+, )*_\w|torch\.ops\._"
    )
    stacks = re.compile(r"\bsys\._getframe|\bf_back\b")
    found = {expression: set[str]() for expression in (private, stacks)}
    for name, path in NAMES.items():
        if room_of(name).startswith(("runtime", "checkpoint")):
            text = re.sub(r'"""[\s\S]*?"""|"[^"\n]*"|#.*', "", path.read_text(encoding="utf-8"))
            for expression, names in found.items():
                names |= {name} if expression.search(text) else set()
    elsewhere = {one: {name for name in names if not name.startswith(OF_TORCH)} for one, names in found.items()}
    assert elsewhere[private] == {"layoutc.checkpoint.untrusted.metadata"}
    assert elsewhere[stacks] == {"layoutc.runtime.callers"}


def test_layout_plan_and_estimates_are_pure() -> None:
    """They read no file, no clock, nothing but their arguments."""
    effects = {"io", "os", "pathlib", "random", "subprocess", "time"}
    for name, path in NAMES.items():
        if room_of(name) in ("ints", "layout", "plan", "estimate", "budget"):
            assert not {one.partition(".")[0] for one in imported(path)} & effects, name


def test_a_module_is_one_idea_of_at_most_400_lines() -> None:
    """Its first line says which."""
    texts = {name_of(path): path.read_text(encoding="utf-8") for path in MODULES}
    lines = {name: len(text.splitlines()) for name, text in texts.items()}
    assert {name: count for name, count in lines.items() if count > MOST_LINES} == {}
    first = {name: re.match(r'"""(.*)', text) for name, text in texts.items()}
    silent = [name for name, line in first.items() if line is None or len(line[1]) < 20]
    assert silent == [], "the first line of a module says what it is"


def test_no_two_modules_say_the_same_of_themselves() -> None:
    said: dict[str, str] = {}
    for name, path in NAMES.items():
        if name not in OLD_NAMES:
            first = (ast.get_docstring(tree_of(path)) or "").partition("\n\n")[0]
            assert said.setdefault(first, name) == name, (name, said[first])


def test_a_folder_has_at_most_14_modules() -> None:
    folders: dict[Path, int] = {}
    for path in MODULES:
        counts = path.name != "__init__.py" and name_of(path) not in OLD_NAMES
        folders[path.parent] = folders.get(path.parent, 0) + counts
    assert {folder: count for folder, count in folders.items() if count > MOST_MODULES} == {}


def test_every_folder_is_installed() -> None:
    project = tomllib.loads((ROOT / "pyproject.toml").read_text(encoding="utf-8"))
    expected = {name_of(path) for path in MODULES if path.name == "__init__.py"} | {"layoutc.recipes", "layoutc.specs"}
    assert set(project["tool"]["setuptools"]["packages"]) == expected


def test_a_spec_is_at_most_60_lines() -> None:
    """Of what is generated from it: tests/emit/test_generated_size.py."""
    assert [path.name for path in SPECS if len(path.read_text(encoding="utf-8").splitlines()) > 60] == []


def test_pytest_enters_every_folder_of_tests() -> None:
    """Its own list of folders to leave out has `build`."""
    options = tomllib.loads((ROOT / "pyproject.toml").read_text(encoding="utf-8"))["tool"]["pytest"]["ini_options"]
    folders = {part for path in TESTS for part in path.relative_to(ROOT / "tests").parts[:-1]}
    assert not [name for name in folders for pattern in options["norecursedirs"] if fnmatch(name, pattern)]


def test_test_files_have_names_of_their_own() -> None:
    """pytest imports them by name alone."""
    names = [path.name for path in TESTS if path.name.startswith("test_")]
    assert sorted(names) == sorted(set(names))


def test_no_code_knows_a_recipe_or_a_format_by_name() -> None:
    names = {path.stem for path in SPECS}
    for file in ("formats.yaml", "rules.yaml"):
        names |= set(yaml.safe_load((ROOT / "layoutc" / "spec" / file).read_text(encoding="utf-8"))) - {
            "f32",
            "f16",
            "bf16",
        }  # also words for dtypes
    word = re.compile(rf"(?<![\w-])({'|'.join(sorted(map(re.escape, names)))})(?![\w-])")
    templates = sorted((ROOT / "layoutc" / "emit" / "templates").glob("*.j2"))
    assert templates
    # Tables of what users type.
    examples = {"layoutc.spec.checks.pydantic_errors", "layoutc.runtime.optim.states"}
    code = [
        path for name, path in NAMES.items() if room_of(name) in {*COMPILER, *RUNTIME, "cli"} and name not in examples
    ]
    for path in (*code, *templates):
        text = path.read_text(encoding="utf-8")
        prose_free = text if path.suffix == ".j2" else _without_prose(text)
        assert not word.search(prose_free), (path.name, word.search(prose_free))


def test_parameters_of_kernels_are_none_of_their_launcher() -> None:
    """Triton writes a function with them, beside names of its own, when a kernel is first launched on a card."""
    own = {"options", "grid", "warmup", "stream", "device", "num_warps", "num_stages", "num_ctas", "maxnreg", "debug"}
    kernels = 0
    for path in (*MODULES, *GENERATED):
        for node in ast.walk(tree_of(path)):
            if isinstance(node, ast.FunctionDef) and any(
                ast.unparse(one) == "triton.jit" for one in node.decorator_list
            ):
                kernels += 1
                names = {argument.arg for argument in node.args.args}
                assert not names & own, (path.name, node.name, names & own)
    assert kernels > 200


def test_the_runtime_makes_no_tensor_on_the_default_device() -> None:
    """Which is a card after torch.set_default_device("cuda"), where tensors of the host can't be pinned or read."""
    makers = {"arange", "as_tensor", "empty", "eye", "full", "linspace", "ones", "rand", "randint", "randn", "randperm"}
    makers |= {"scalar_tensor", "tensor", "zeros"}
    rooms = tuple(f"layoutc.{room}" for room in ("runtime", "checkpoint", "integrations"))
    paths = [*GENERATED, *(path for name, path in NAMES.items() if name.startswith(rooms))]
    calls = [(path, node) for path in paths for node in ast.walk(tree_of(path)) if isinstance(node, ast.Call)]
    made = [(path, call) for path, call in calls if ast.unparse(call.func) in {f"torch.{name}" for name in makers}]
    assert len(made) > 50
    assert [
        (path.name, call.lineno) for path, call in made if not {"device", None} & {word.arg for word in call.keywords}
    ] == []


def _without_prose(text: str) -> str:
    """Code without docstrings, comments, and messages that give an example in backquotes."""
    text = re.sub(r'"""[\s\S]*?"""|#.*', "", text)
    return re.sub(r"`[^`]*`", "", text)


def test_importing_layoutc_and_the_command_line_imports_no_torch() -> None:
    program = "import sys, layoutc, layoutc.cli, layoutc.build.pipeline; sys.exit('torch' in sys.modules)"
    assert subprocess.run([sys.executable, "-c", program], check=False).returncode == 0


def test_programs_of_the_environment_are_started_as_modules() -> None:
    """By the Python that runs: where the environment is not activated, the path has none of them."""
    programs = {"layoutc", "mypy", "pip", "pytest", "python", "python3", "ruff", "torchrun"}
    named = re.compile(rf"""["']({"|".join(programs)})["']""")
    for path in (*TESTS, *MODULES):
        text = path.read_text(encoding="utf-8")
        for node in ast.walk(tree_of(path)) if named.search(text) else ():
            if isinstance(node, ast.List) and len(node.elts) > 1 and isinstance(node.elts[0], ast.Constant):
                assert node.elts[0].value not in programs, f"{path}:{node.lineno}: [sys.executable, '-m', ...]"
