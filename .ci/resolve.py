"""Can README's installs be had from published wheels, on machines that CI does not run on? Downloads metadata alone.

    python .ci/resolve.py            needs uv: pip reads environment markers for the Python that runs it, whatever
                                     --platform says, and so takes Linux's requirements for those of macOS

Fails where constraints.txt contradicts what a wheel requires, where a platform has no wheel of a pinned version, and
where something is installed that constraints.txt does not pin. torch pins its own CUDA libraries.
"""

from __future__ import annotations

import os
import re
import subprocess
import sys
from pathlib import Path

ROOT = Path(__file__).resolve().parent.parent
PLATFORMS = ("x86_64-manylinux_2_28", "aarch64-manylinux_2_28", "aarch64-apple-darwin", "x86_64-pc-windows-msvc")
PYTHONS = ("3.11", "3.12", "3.13", "3.14")
PINNED_BY_TORCH = re.compile(r"(nvidia|cuda)-[a-z0-9-]+==")
ENVIRONMENT = {**os.environ, "MACOSX_DEPLOYMENT_TARGET": "14.0"}  # the oldest that torch has wheels for


def normal(requirement: str) -> str:
    """A pin, as PEP 503 writes names."""
    name, _, version = requirement.partition("==")
    return f"{re.sub(r'[-_.]+', '-', name).lower()}=={version}"


def resolved(platform: str, python: str) -> list[str]:
    """The pins of everything that `.[dev]` installs there. Raises SystemExit with uv's reason where nothing fits."""
    target = ["--python-platform", platform, "--python-version", python]
    quiet = ["--quiet", "--no-config", "--no-header", "--no-annotate", "--no-python-downloads"]
    command = [sys.executable, "-m", "uv", "pip", "compile", *quiet, *target, "--only-binary", ":all:"]
    command += ["--constraints", "constraints.txt", "--extra", "dev", "pyproject.toml"]
    done = subprocess.run(command, cwd=ROOT, env=ENVIRONMENT, capture_output=True, text=True, timeout=300, check=False)
    if done.returncode:
        raise SystemExit(f"{platform}, Python {python}: can't be installed\n{done.stderr.strip()}")
    return [line for line in done.stdout.splitlines() if "==" in line]


def main() -> None:
    """A line for each platform and Python."""
    lines = (ROOT / "constraints.txt").read_text(encoding="utf-8").splitlines()
    pins = {normal(line) for line in lines if "==" in line and not line.startswith("#")}
    for platform in PLATFORMS:
        for python in PYTHONS:
            found = [normal(line) for line in resolved(platform, python)]
            loose = [pin for pin in found if pin not in pins and not PINNED_BY_TORCH.match(pin)]
            if loose:
                raise SystemExit(f"{platform}, Python {python}: constraints.txt does not pin {', '.join(loose)}")
            key = [pin for pin in found if pin.startswith(("torch==", "triton=="))]
            print(f"{platform}, Python {python}: {len(found)} packages, {', '.join(key)}", flush=True)


if __name__ == "__main__":
    main()
