"""What stands in backquotes in docstrings, comments, messages and pages exists: names, files, commands and options."""

from __future__ import annotations

import ast
import builtins
import importlib
import importlib.util
import keyword
import re
from functools import cache
from pathlib import Path
from typing import Any

import click
import pytest

from layoutc.cli.app import main

pytestmark = pytest.mark.checkout
ROOT = Path(__file__).parent.parent
CODE = sorted([*(ROOT / "layoutc").rglob("*.py"), *(ROOT / "generated").rglob("*.py")])
PAGES = [
    ROOT / "README.md",
    ROOT / "CONTRIBUTING.md",
    ROOT / "CHANGELOG.md",
    ROOT / "specs" / "README.md",
    *sorted((ROOT / "docs" / "pages").glob("*.md")),
    ROOT / "layoutc" / "diagnostics" / "catalogue.yaml",
]
FILE = re.compile(r"[\w./-]+\.(?:py|md|yaml|toml|txt|json)|[\w-]+(?:/[\w-]+)*/")
OTHERS = {  # torch's, transformers', accelerate's, Lightning's, torchtitan's, YAML's
    *("triton_op", "redistribute", "transformers", "Trainer", "null", "optimizer_cls_and_kwargs", "save_model"),
    *("get_memory_footprint", "dcp_to_torch_save"),
    *("quant_predicate", "global_scale", "qtensor"),  # MLX's, ModelOpt's
    *(
        "from_pretrained",
        "add_adapter",  # PEFT's name for it, too
        "target_parameters",
        "set_experts_implementation",
        "configure_model",
        "llama3",
        "llama3_8b",
        "save_state",
        "load_state",
    ),
    *("parameters_to_vector", "resize_token_embeddings", "cpu_offload", "init_empty_weights"),
    *("load_checkpoint_and_dispatch", "DPOTrainer", "GRPOTrainer", "use_deterministic_algorithms"),
    *(
        "replicate",
        "_composable",
        "replicate_with_fsdp",
        "fft",
        "t_",
        "transpose_",
        "unsqueeze_",
        "hinge_embedding_loss",
    ),
    *("to_empty", "tie_weights", "weight_g_idx", "text_config", "head_count_kv", "device_map", "transform_config"),
}
MADE_UP = {"mxfp8_v2", "_rowwise", "ROWWISE_", "element_power"}  # examples, parts of names, what a page defines
EXAMPLES = re.compile(r"\b(mine|my_\w+|their_\w+|path|x|your_\w+)\b")  # what a reader would name otherwise


@cache
def parsed(path: Path) -> tuple[str, tuple[str, ...], frozenset[str]]:
    """Of a Python file: its text, its strings, and the names in its code."""
    text = path.read_text(encoding="utf-8")
    strings, names = [], set()
    for node in ast.walk(ast.parse(text)):
        if isinstance(node, ast.Constant) and isinstance(node.value, str):
            strings.append(node.value)
        names |= {value for value in map(vars(node).get, ("id", "attr", "arg", "name")) if isinstance(value, str)}
    return text, tuple(strings), frozenset(names)


def quoted(path: Path) -> list[str]:
    """What stands in backquotes in a file: of Python, in its comments and strings alone."""
    if path.suffix == ".py":
        text, strings, _ = parsed(path)
        text = "\n\n".join([*strings, *re.findall(r"(?:^ *#.*\n)+|#.*$", text, flags=re.M)])
    else:
        text = re.sub(r"```[\s\S]*?```", "", path.read_text(encoding="utf-8"))
    return [re.sub(r"\s*\n\s*#?\s*", " ", span) for span in re.findall(r"(?<!`)`([^`]+)`(?!`)", text)]


@cache
def words() -> frozenset[str]:
    """Every name in code, every word of specs, formats and rules, and what Python brings."""
    found = {*keyword.kwlist, *dir(builtins)}
    for path in CODE:
        _, strings, names = parsed(path)
        found |= {*names, path.stem, path.parent.name}
        found |= {word for one in strings if re.fullmatch(r"[\w.-]+", one) for word in re.findall(r"\w+", one)}
    for path in (*ROOT.glob("specs/*.yaml"), *ROOT.glob("layoutc/*/*.yaml"), ROOT / "pyproject.toml"):
        if path.name != "catalogue.yaml":
            found |= set(re.findall(r"\w+", path.read_text(encoding="utf-8")))
    return frozenset(found | OTHERS | MADE_UP)


def resolve(dotted: str) -> Any:
    """An object by its full name: modules are imported as far as they can be. Raises AttributeError."""
    first, *rest = dotted.split(".")
    found = importlib.import_module(first)
    for depth, name in enumerate(rest, 2):
        if not hasattr(found, name):
            module = ".".join(dotted.split(".")[:depth])
            try:
                importlib.import_module(module)
            except ImportError as error:
                if importlib.util.find_spec(module) is None:
                    raise AttributeError(f"{dotted} is not there") from None
                if "pip install" not in str(error):
                    raise
                return None  # needs a package that is not installed here
        found = getattr(found, name)
    return found


def check_command(line: str) -> None:
    """`layoutc verb ...`: the verb exists, and so do the options."""
    _, *arguments = line.split()
    verb = next((word for word in arguments if not word.startswith("-")), None)
    if verb is None or verb.isupper():
        return
    command = main.get_command(click.Context(main), verb)
    assert command is not None, f"no verb {verb}"
    options = {name for param in command.params for name in (*param.opts, *param.secondary_opts)}
    given = {word.partition("=")[0] for word in arguments if re.match(r"--?[a-z]", word)}
    assert given <= options | {"--help"}, given - options


def check(span: str, path: Path) -> None:
    """Raises AssertionError for what is not there."""
    if span.startswith("layoutc "):
        check_command(span)
        return
    if re.search(r"[{}<>]", span) or EXAMPLES.search(span):
        return
    if span in ("layoutc.json", "config.json"):  # of checkpoints
        return
    if FILE.fullmatch(span):
        places = (
            ROOT,
            ROOT / "layoutc",
            ROOT / "layoutc" / "runtime",
            ROOT / "generated" / "nvfp4",
            path.parent,
            path.parent.parent,
        )
        assert any((place / span).exists() for place in places), "no such file"
        return
    for dotted in re.findall(r"(?<![\w./\"'-])layoutc(?:\.\w+)+", span):
        try:
            resolve(dotted)
        except AttributeError as error:
            raise AssertionError(str(error)) from None
    names = set(re.findall(r"([A-Za-z_]\w*)\(", span))
    if re.fullmatch(r"[A-Za-z_][\w.]*(\(.*\))?", span):
        names |= set(re.split(r"\.", span.partition("(")[0]))
    assert not {name for name in names if name and name not in words()}, names - words()


def test_what_stands_in_backquotes_exists() -> None:
    missing = []
    for path in (*CODE, *PAGES):
        for span in quoted(path):
            try:
                check(span, path)
            except AssertionError as error:
                missing.append(f"{path.relative_to(ROOT)}: `{span}`: {error}".partition("\n")[0])
    assert not missing, "\n".join(missing)
