"""Another package ships specs and built recipes by entry points, as one installed beside layoutc would."""

from __future__ import annotations

import importlib
import json
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path

import pytest
import torch
from click.testing import CliRunner, Result
from places import ROOT
from torch import nn

import layoutc
from layoutc import checkpoint
from layoutc.cli.app import main
from layoutc.runtime.errors import LayoutError

SPECS = ROOT / "specs"


def run(*args: object) -> Result:
    return CliRunner().invoke(main, [str(arg) for arg in args])


@pytest.fixture
def installed(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[Path]:
    """A package with a folder of specs, what is built from them, and the metadata that an installer writes."""
    site, elsewhere = tmp_path / "site", tmp_path / "elsewhere"
    theirs, info = site / "their_package", site / "their_package-1.0.dist-info"
    for folder in (theirs / "layouts", info, elsewhere):
        folder.mkdir(parents=True)
    (theirs / "__init__.py").write_text("")
    text = (SPECS / "mxfp8.yaml").read_text(encoding="utf-8").replace("name: mxfp8", "name: their_format")
    (theirs / "layouts" / "their_format.yaml").write_text(text, encoding="utf-8")
    assert run("build", "--specs", theirs / "layouts", "--out", theirs / "built").exit_code == 0
    (info / "METADATA").write_text("Metadata-Version: 2.1\nName: their-package\nVersion: 1.0\n")
    (info / "entry_points.txt").write_text(
        "[layoutc.specs]\ntheirs = their_package.layouts\ngone = no_such_package.layouts\n"
        "[layoutc.recipes]\ntheir_format = their_package.built.their_format\n"
    )
    monkeypatch.syspath_prepend(site)
    monkeypatch.chdir(elsewhere)
    importlib.invalidate_caches()
    yield theirs
    for name in [name for name in sys.modules if name.partition(".")[0] == "their_package"]:
        del sys.modules[name]


def test_commands_find_shipped_specs_by_name(installed: Path) -> None:
    shown = run("show", "their_format", "--specs", "theirs")
    assert shown.exit_code == 0, shown.output
    assert "their_format" in shown.output
    assert run("check", "--specs", "theirs").exit_code == 0
    assert run("build", "--specs", "theirs", "--out", "mine").exit_code == 0
    built = (Path("mine") / "their_format" / "tensor.py").read_bytes()
    assert built == (installed / "built" / "their_format" / "tensor.py").read_bytes()
    tested = run("test", "their_format", "--specs", "theirs", "--check", "encode")
    assert tested.exit_code == 0, tested.output


def test_a_folder_comes_before_a_shipped_name(installed: Path) -> None:
    Path("theirs").mkdir()
    refused = run("check", "--specs", "theirs")
    assert refused.exit_code == 2
    assert "theirs holds no YAML file" in refused.output


def test_a_name_whose_package_is_gone_is_a_folder_that_does_not_exist(installed: Path) -> None:
    refused = run("check", "--specs", "gone")
    assert refused.exit_code == 2
    assert "gone does not exist" in refused.output


def test_new_copies_a_shipped_spec_and_writes_here(installed: Path) -> None:
    made = run("new", "my_format", "--from", "their_format", "--specs", "mine")
    assert made.exit_code == 0, made.output
    assert "name: my_format" in Path("mine/my_format.yaml").read_text(encoding="utf-8")
    assert run("new", "other", "--specs", "theirs").exit_code == 0  # writes a folder here, never into the package
    assert Path("theirs/other.yaml").is_file()
    assert [path.name for path in (installed / "layouts").iterdir()] == ["their_format.yaml"]


def test_models_are_quantized_by_a_shipped_recipes_name(installed: Path) -> None:
    weight = torch.randn(64, 96, generator=torch.Generator().manual_seed(0))
    models = [nn.Linear(96, 64, bias=False) for _ in range(2)]
    for model, recipe in zip(models, ("their_format", "mxfp8"), strict=True):
        model.weight = nn.Parameter(weight.clone())
        layoutc.quantize_(model, recipe)
    theirs, ours = (model.weight.data for model in models)
    assert type(theirs).__module__.startswith("their_package.built.their_format")
    for name, plane in ours.planes().items():
        assert torch.equal(plane, theirs.planes()[name]), name
    with pytest.raises(ValueError, match=r"no recipe 'nobodys'.*their_format"):
        layoutc.quantize_(nn.Linear(32, 32), "nobodys")


def test_the_built_in_specs_are_shipped(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    assert run("show", "nvfp4", "--specs", "layoutc").exit_code == 0
    assert run("new", "my_format", "--from", "nvfp4").exit_code == 0
    ours = (SPECS / "nvfp4.yaml").read_text(encoding="utf-8").replace("name: nvfp4", "name: my_format")
    assert Path("specs/my_format.yaml").read_text(encoding="utf-8") == ours


@pytest.mark.parametrize(
    "arguments",
    [
        ("show", "nvfp4"),
        ("check", "nvfp4", "mxfp8"),
        ("check", "--explain", "mxfp8"),
        ("build", "mxfp8", "--out", "quant", "--quiet"),
        ("test", "fp8_current", "--check", "encode"),
        ("new", "my_format", "--from", "nvfp4", "--specs", "mine"),
    ],
    ids=lambda arguments: arguments[0],
)
def test_recipes_are_found_by_name_in_any_directory(
    arguments: tuple[str, ...], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(tmp_path)
    done = run(*arguments)
    assert done.exit_code == 0, done.output


@pytest.mark.parametrize("command", ["show", "check", "build", "test"])
def test_a_name_that_nothing_has_is_answered_with_those_there_are(
    command: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(tmp_path)
    ships = f"layoutc ships {len(list(SPECS.glob('*.yaml')))}, which `layoutc list` names."
    refused = run(command, "zebra")
    assert refused.exit_code == 2
    assert refused.output.endswith(f"Error: there is no recipe 'zebra'. {ships}\n")
    assert run(command, "nvfp5").output.endswith("Error: there is no recipe 'nvfp5'. Did you mean nvfp4?\n")
    Path("mine").mkdir()
    Path("mine/own.yaml").write_bytes((SPECS / "mxfp8.yaml").read_bytes())
    for name, hint in {"own1": "Did you mean own?", "nvfp4": "leave out --specs, or write --specs layoutc."}.items():
        refused = run(command, name, "--specs", "mine")
        assert refused.exit_code == 2
        assert f"mine has no recipe '{name}'." in refused.output
        assert refused.output.endswith(f"{hint}\n")


@pytest.mark.parametrize("command", ["check", "build", "test"])
def test_a_directory_without_specs_is_answered_with_what_can_be_named(
    command: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(tmp_path)
    refused = run(command)
    assert refused.exit_code == 2
    assert "specs does not exist; name a recipe or a spec, or a folder with --specs. layoutc ships" in refused.output


def test_a_recipe_that_two_packages_ship_is_not_chosen_between(installed: Path) -> None:
    (installed / "layouts" / "nvfp4.yaml").write_bytes((SPECS / "nvfp4.yaml").read_bytes())
    refused = run("check", "nvfp4")
    assert refused.exit_code == 2
    assert "layoutc and theirs ship a recipe nvfp4; name one: --specs layoutc" in refused.output
    assert run("check", "nvfp4", "--specs", "theirs").exit_code == 0


@pytest.mark.checkout
def test_a_program_beside_a_checkout_imports_the_package_inside(tmp_path: Path) -> None:
    """A folder `layoutc` beside a program comes before installed packages."""
    (tmp_path / "layoutc").symlink_to(ROOT, target_is_directory=True)
    text = (
        "import layoutc.recipes\nfrom layoutc import __version__\nprint(layoutc.__file__, len(layoutc.recipes.RECIPES))"
    )
    (tmp_path / "program.py").write_text(text)
    command = [sys.executable, str(tmp_path / "program.py")]
    done = subprocess.run(command, capture_output=True, text=True, timeout=900, check=False)
    file, count = done.stdout.rsplit(" ", 1)
    assert Path(file).resolve() == ROOT / "layoutc" / "__init__.py"
    assert int(count) > 30


# ------------------------------------------------------------------------------------- every way to name a recipe
def linear() -> nn.Module:
    return nn.Linear(64, 32, bias=False)


def class_for(recipe: object) -> str:
    model = linear()
    assert layoutc.quantize_(model, recipe) == ["weight"]  # type: ignore[arg-type]
    return f"{type(model.weight).__module__}"


def test_own_recipe_is_found_by_name_spec_folder_and_module(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, request: pytest.FixtureRequest
) -> None:
    """In a folder with specs/ and generated/, as `layoutc new` and `layoutc build` leave it, and from elsewhere."""
    monkeypatch.chdir(tmp_path)
    name = "found_by_all_names"
    assert run("new", name, "--from", "mxfp8").exit_code == 0
    assert run("build").exit_code == 0
    folder = tmp_path / "generated" / name
    request.addfinalizer(lambda: [sys.modules.pop(one) for one in list(sys.modules) if name in one])
    module = class_for(name)
    for way in (
        f"specs/{name}.yaml",
        f"generated/{name}",
        Path("generated") / name,
        sys.modules[module.rpartition(".")[0]],
    ):
        assert class_for(way) == module
    for command in ("show", "list", "plan"):
        for way in (name, f"specs/{name}.yaml", f"generated/{name}"):
            words = ["--shapes", "a=64x64", "--recipe", way] if command == "plan" else [way]
            done = run(command, *words)
            assert done.exit_code == 0, done.output
            assert name in done.output
    elsewhere = tmp_path / "elsewhere"
    elsewhere.mkdir()
    monkeypatch.chdir(elsewhere)
    assert class_for(folder) == class_for(tmp_path / "specs" / f"{name}.yaml") == module
    with pytest.raises(ValueError, match=f"there is no recipe '{name}' .* its spec's path, or its imported module"):
        layoutc.quantize_(linear(), name)


def test_files_of_own_recipe_are_read_once_it_is_named_or_imported(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, request: pytest.FixtureRequest
) -> None:
    """A config.json imports nothing from the working directory; the error says which names are there."""
    safetensors = pytest.importorskip("safetensors.torch")
    monkeypatch.chdir(tmp_path)
    name = "files_of_own"
    text = (SPECS / "fp8_rowwise.yaml").read_text().replace("fp8_rowwise", name).replace("fbgemm_fp8", "my-own-tool")
    Path("specs").mkdir()
    Path(f"specs/{name}.yaml").write_text(text)
    assert run("build").exit_code == 0
    request.addfinalizer(lambda: [sys.modules.pop(one) for one in list(sys.modules) if name in one])
    codes, scales = torch.randn(32, 64).to(torch.float8_e4m3fn), torch.rand(32, 1)
    Path("folder").mkdir()
    safetensors.save_file({"weight": codes, "weight_scale": scales}, "folder/model.safetensors")
    config = {"quantization_config": {"quant_method": "my-own-tool", "activation_scale_ub": 1200.0}}
    Path("folder/config.json").write_text(json.dumps(config))

    unknown = (
        rf"no installed recipe knows: quant_method = 'my-own-tool'[\s\S]*here \({name}\) [\s\S]* files='{name}/BINDING'"
    )
    with pytest.raises(LayoutError, match=unknown):
        checkpoint.quantize_as_stored(linear(), "folder")
    with pytest.raises(LayoutError, match=unknown):
        checkpoint.load_safetensors(linear(), "folder", convert=True)
    with pytest.warns(UserWarning, match=rf"listed as they lie in the files: .*{unknown}"):
        assert "float8_e4m3fn" in run("show", "--checkpoint", "folder").output
    assert f"{name}/BINDING" in run("convert", "folder", "plain", "--dtype", "float32").output.replace("\n", " ")
    assert not any(name in one for one in sys.modules)
    done = run("convert", "folder", "plain", "--from", f"{name}/fbgemm", "--dtype", "float32")
    assert done.exit_code == 0, done.output
    values = safetensors.load_file("plain/model.safetensors")["weight"]
    assert torch.equal(values, codes.float() * scales)

    model = linear()  # convert has imported the recipe
    assert checkpoint.quantize_as_stored(model, "folder") == {"weight": name}
    checkpoint.load_safetensors(model, "folder")
    assert torch.equal(model.weight.dequantize(torch.float32), values)  # type: ignore[operator]


def test_spec_that_changed_since_its_build_is_refused(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    assert run("new", "changed_since", "--from", "mxfp8").exit_code == 0
    for way in ("specs/changed_since.yaml", "changed_since"):
        with pytest.raises(ValueError, match=r"has not been built: run `layoutc build specs/changed_since\.yaml`"):
            layoutc.quantize_(linear(), way)
    assert run("build").exit_code == 0
    with pytest.raises(ValueError, match="generated is a folder of recipes: changed_since; name one, as generated/ch"):
        layoutc.quantize_(linear(), "generated")
    assert "generated is a folder of recipes: name one, as generated/changed_since." in run("show", "generated").output
    spec = Path("specs/changed_since.yaml")
    spec.write_text(spec.read_text() + "\n# a remark\n")
    with pytest.raises(ValueError, match=r"has not been built; .* was built from another text"):
        layoutc.quantize_(linear(), spec)
    done = run("show", "generated/changed_since")
    assert done.exit_code == 2
    assert "specs/changed_since.yaml has changed since; give the spec's path" in done.output.replace("\n", " ")


@pytest.mark.parametrize(
    ("recipe", "match"),
    [
        ("nvfp5", "Did you mean nvfp4"),
        ("Float8BlockScaling", "Did you mean fp8_block"),
        ("rowwise", "Did you mean fp8_rowwise_all"),
        (type("MXFP8BlockScaling", (), {})(), "MXFP8BlockScaling names no recipe: pass 'mxfp8', or give"),
        ("zebra", "Those that there are, `layoutc list` names"),
        ("no/such", "no/such is none"),
        (torch, "torch is no recipe's package"),
        (3, "int names no recipe"),
    ],
)
def test_what_names_no_recipe_is_refused_with_the_ways(recipe: object, match: str) -> None:
    with pytest.raises(ValueError, match=match) as refused:
        layoutc.quantize_(linear(), recipe)  # type: ignore[arg-type]
    assert "its spec's path, or its imported module" in str(refused.value)


def test_entry_point_of_no_recipe_is_named_and_left_out(installed: Path) -> None:
    """Checkpoints, files of other programs and `doctor` go on without it; asking for it by name says what is wrong."""
    points = installed.parent / "their_package-1.0.dist-info" / "entry_points.txt"
    points.write_text(points.read_text() + "wrong = their_package\nmissing = their_package.nothing\n")
    from layoutc.runtime.installed import every, named

    whose = r"the entry point wrong = 'their_package' of their-package 1\.0, group layoutc\.recipes, names no recipe"
    with pytest.warns(UserWarning, match="names no recipe") as warned:
        found = every()
    assert [one.__name__ for one in found][-1] == "their_package.built.their_format"
    told = [str(one.message).partition(" of their-package 1.0, group layoutc.recipes, ")[0] for one in warned]
    assert told == ["the entry point wrong = 'their_package'", "the entry point missing = 'their_package.nothing'"]
    with pytest.warns(UserWarning, match=whose):
        assert named("wrong") == []
    with pytest.raises(ValueError, match=whose):
        layoutc.quantize_(linear(), "wrong")
    shown = run("doctor")
    assert "recipe wrong" in shown.output
    assert "their-package 1.0" in shown.output.replace("\n", " ")
