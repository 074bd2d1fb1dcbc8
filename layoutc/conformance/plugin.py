"""The pytest plugin: `pytest --layoutc-spec my.yaml` adds a spec's conformance suite, one test per check.

Every pytest run in an environment with layoutc loads it, so it imports nothing until the option is given.
"""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path
from typing import TYPE_CHECKING, Any

import pytest

if TYPE_CHECKING:
    from layoutc.conformance.ranks import Ranks
    from layoutc.conformance.registry import Check
    from layoutc.conformance.subject import Subject


def pytest_addoption(parser: pytest.Parser) -> None:
    """Adds the options."""
    group = parser.getgroup("layoutc", "conformance of layout specs")
    words = "add the conformance suite of this spec, or of a recipe that comes with a package"
    group.addoption("--layoutc-spec", action="append", default=[], metavar="SPEC", help=words)
    group.addoption("--layoutc-seed", type=int, default=0, metavar="N", help="seed of the weights (default 0)")
    group.addoption("--layoutc-thorough", action="store_true", help="try more shapes")
    group.addoption("--layoutc-no-distributed", action="store_true", help="skip checks that start processes")


def pytest_configure(config: pytest.Config) -> None:
    """Adds the specs to the paths that pytest collects."""
    for spec in config.getoption("--layoutc-spec"):
        config.args.append(str(_spec_file(spec, config)))


def _spec_file(spec: str, config: pytest.Config) -> Path:
    """The file of a spec, given as a path relative to pytest's start directory or as the name of a shipped recipe."""
    from layoutc.build import lookup

    path = config.invocation_params.dir / spec
    if not path.is_file() and Path(spec).name == spec:
        paths = [specs[spec] for specs in lookup.by_package().values() if spec in specs]
        path = paths[0] if len(paths) == 1 else path
    if not path.is_file():
        raise pytest.UsageError(f"--layoutc-spec: {path} does not exist")
    return path.resolve()


def pytest_collect_file(file_path: Path, parent: pytest.Collector) -> pytest.Collector | None:
    """Collects the suite for a file that is one of the named specs."""
    named = parent.config.getoption("--layoutc-spec")
    if not named or file_path.resolve() not in {_spec_file(spec, parent.config) for spec in named}:
        return None
    suite: Suite = Suite.from_parent(parent, path=file_path)
    return suite


class Suite(pytest.File):
    """The checks of a spec. The first one to run compiles it."""

    subject: Subject | None = None
    ranks: Ranks | None = None

    def collect(self) -> Iterator[pytest.Item]:
        """Yields one test per check."""
        from layoutc.conformance.registry import all_checks

        for check in all_checks():
            if not (check.needs_processes and self.config.getoption("--layoutc-no-distributed")):
                item: CheckItem = CheckItem.from_parent(self, name=check.name, check=check)
                yield item

    def compiled(self) -> Subject:
        """The compiled spec. Raises BadSpec for a spec with errors."""
        from layoutc.conformance.ranks import Ranks
        from layoutc.conformance.subject import compile_subject

        if self.subject is None:
            option = self.config.getoption
            if not option("--layoutc-no-distributed"):
                self.ranks = Ranks()
            self.subject = compile_subject(
                self.path, seed=option("--layoutc-seed"), thorough=option("--layoutc-thorough"), ranks=self.ranks
            )
            self.session.config.add_cleanup(self.close)
        return self.subject

    def close(self) -> None:
        """Ends the processes and removes the package."""
        if self.ranks is not None:
            self.ranks.stop()
        if self.subject is not None:
            self.subject.close()
            self.subject = None


class CheckItem(pytest.Item):
    """A check of a spec."""

    def __init__(self, *, check: Check, **options: Any) -> None:
        super().__init__(**options)
        self.check = check

    def runtest(self) -> None:
        """Runs the check. Skips one that does not apply, with its reason."""
        from layoutc.conformance.registry import Failure
        from layoutc.conformance.runner import run_check

        suite = self.parent
        assert isinstance(suite, Suite)
        self.outcome = run_check(suite.compiled(), self.check)
        if self.outcome.status == "skip":
            pytest.skip(self.outcome.message)
        if self.outcome.status == "fail":
            raise Failure(self.outcome.message)

    def repr_failure(self, excinfo: pytest.ExceptionInfo[BaseException], style: Any = None) -> Any:
        """The finding and its location, instead of a traceback through the suite."""
        from layoutc.conformance.registry import Failure
        from layoutc.conformance.report import explanation
        from layoutc.conformance.subject import BadSpec, Unusable

        if isinstance(excinfo.value, BadSpec | Unusable):
            return str(excinfo.value)
        if isinstance(excinfo.value, Failure):
            return f"failed: {self.check.meaning}\n{explanation(self.outcome)}"
        return super().repr_failure(excinfo, style)

    def reportinfo(self) -> tuple[Path, int, str]:
        """The spec and the check's name."""
        return self.path, 0, f"{self.path.name}: {self.check.name}"
