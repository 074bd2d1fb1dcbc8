"""Fuzzes `layoutc check`: damaged specs must give findings, never a traceback, and none may take a second.

    python tests/programs/fuzz.py 500000                     half a million, coverage-guided (pip install -e .[fuzz])
    python tests/programs/fuzz.py 500000 --seed 1 --random   the same mutations at random, without atheris

Inputs begin as the specs in specs/ and tests/errors. An input that fails is printed and left beside the command, where
atheris calls it crash-<hash>. What passes must also compile to Python, and every finding must render in every form.
"""

from __future__ import annotations

import argparse
import random
import re
import sys
import tempfile
import time
from collections.abc import Callable
from pathlib import Path

LIMIT = 1.0  # seconds of processor time for one input
TOKEN = re.compile(rb"[A-Za-z_][\w-]*|-?\d+|[^\w\s]")
TESTS = Path(__file__).resolve().parents[1]
SEEDS = [path.read_bytes() for folder in (TESTS.parent / "specs", TESTS / "errors") for path in folder.glob("*.yaml")]
WORDS = sorted(
    {word for text in SEEDS for word in TOKEN.findall(text)}
    | {b"0", b"-1", b"7", b"129", b"4294967296", b"1e400", b".nan", b"&a", b"*a", b"<<", b"!!int", b"|", b">", b"\t"}
    | {b"- - - - - -", b"{{{{{{", b"[[[[[[", b"\xff", b"\xef\xbb\xbf", "é".encode(), b"0x1F", b"1:30", b"---", b"..."}
)


def one(content: bytes) -> None:
    """What `layoutc check` does with one file, in every form: what it accepts compiles."""
    from layoutc.build.pipeline import check
    from layoutc.diagnostics.diagnostic import has_errors, tidy
    from layoutc.diagnostics.renderers import FORMS, render
    from layoutc.spec.checks.read import read_spec_bytes

    start = time.process_time()
    spec, found = read_spec_bytes(content, "specs/x.yaml")
    for form in FORMS:
        render(tidy(found), form)
    if any(item.code == "LC907" for item in check(content, "specs/x.yaml")):
        raise AssertionError("a spec passes, and no code can be written for it")
    took = time.process_time() - start
    if (spec is None) != has_errors(found):
        raise AssertionError("a spec is refused without an error, or passed with one")
    if took > LIMIT:
        raise AssertionError(f"took {took:.2f} s")


def mutated(content: bytes, rng: random.Random) -> bytes:
    """A few damages: words exchanged, lines taken from elsewhere, doubled, moved or dropped, bytes flipped."""
    for _ in range(rng.choice((1, 1, 1, 2, 3, 6))):
        content = rng.choice(DAMAGES)(content, rng)
    return content[:4096]


def _exchange(content: bytes, rng: random.Random) -> bytes:
    found = list(TOKEN.finditer(content))
    if not found:
        return rng.choice(WORDS)
    match = rng.choice(found)
    return content[: match.start()] + rng.choice(WORDS) + content[match.end() :]


def _insert(content: bytes, rng: random.Random) -> bytes:
    at = rng.randrange(len(content) + 1)
    return content[:at] + rng.choice(WORDS) + content[at:]


def _flip(content: bytes, rng: random.Random) -> bytes:
    at = rng.randrange(len(content) + 1)
    return content[:at] + rng.randbytes(1) + content[at + rng.randrange(2) :]


def _cut(content: bytes, rng: random.Random) -> bytes:
    start = rng.randrange(len(content) + 1)
    return content[:start] + content[start + rng.randrange(40) :]


def _splice(content: bytes, rng: random.Random) -> bytes:
    lines, other = content.split(b"\n"), rng.choice(SEEDS).split(b"\n")
    at, start = rng.randrange(len(lines) + 1), rng.randrange(len(other))
    return b"\n".join([*lines[:at], *other[start : start + rng.randrange(1, 5)], *lines[at + rng.randrange(3) :]])


def _indent(content: bytes, rng: random.Random) -> bytes:
    lines = content.split(b"\n")
    at = rng.randrange(len(lines))
    lines[at] = rng.choice((b" ", b"  ", b"    ", b"\t", b"- ")) + lines[at]
    return b"\n".join(lines)


DAMAGES: tuple[Callable[[bytes, random.Random], bytes], ...] = (
    _exchange,
    _exchange,
    _exchange,
    _insert,
    _flip,
    _cut,
    _splice,
    _indent,
)


def at_random(count: int, seed: int) -> None:
    """`count` inputs, each a seed with damages; some are damaged again."""
    rng, content, longest = random.Random(seed), b"", 0.0
    start = time.monotonic()
    for number in range(count):
        content = mutated(content if number % 4 else rng.choice(SEEDS), rng)
        before = time.process_time()
        try:
            one(content)
        except BaseException:
            print(f"input {number} of seed {seed}:\n{content!r}", file=sys.stderr)
            raise
        longest = max(longest, time.process_time() - before)
    print(f"{count} inputs in {time.monotonic() - start:.0f} s, none failed; the longest took {longest * 1e3:.0f} ms")


def guided(count: int, seed: int) -> None:
    """The same with atheris choosing what to damage next, by the code that inputs reach."""
    import atheris  # type: ignore[import-not-found,unused-ignore]

    with atheris.instrument_imports(include=["layoutc"]):
        pass

    def damage(data: bytes, max_size: int, number: int) -> bytes:
        return mutated(data, random.Random(number))[:max_size]

    corpus = Path(tempfile.mkdtemp(prefix="layoutc-fuzz-"))
    for number, text in enumerate(SEEDS):
        (corpus / str(number)).write_bytes(text)
    options = [f"-runs={count}", f"-seed={seed}", "-max_len=4096", "-timeout=10", "-rss_limit_mb=4096", str(corpus)]
    atheris.Setup([sys.argv[0], *options], one, custom_mutator=damage)
    atheris.Fuzz()


if __name__ == "__main__":
    parser = argparse.ArgumentParser(description="Fuzzes `layoutc check`.")
    parser.add_argument("count", type=int, help="how many inputs")
    parser.add_argument("--seed", type=int, default=1)
    parser.add_argument("--random", action="store_true", help="without atheris")
    given = parser.parse_args()
    (at_random if given.random else guided)(given.count, given.seed)
