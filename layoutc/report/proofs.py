"""Static proofs about a layout: each is a statement, how it was shown, and whether it holds.

Most proofs enumerate every value or byte of the smallest weights that cover whole tiles of the layout, and of one that
fills the last tile only partly. Above a budget, the proof checks the form of the steps instead. Index maps repeat with
the tile, so statements that hold for these weights hold for all that the recipe accepts.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from dataclasses import fields, replace
from itertools import product
from math import inf, lcm, prod

from layoutc.diagnostics.diagnostic import Diagnostic
from layoutc.ints.sizes import cdiv
from layoutc.layout.chain import Chain, Join, Pad, Permute, Reorder, Repeat, Split
from layoutc.layout.layout import Buffer, Layout, Plane, Source, codes_per_group, is_swizzled, swizzle_chain
from layoutc.plan.plan import Gather, Plan
from layoutc.report.describe import padding_bytes
from layoutc.report.proof import Proof, proof
from layoutc.report.proofs_of_files import OF_FILES
from layoutc.report.proofs_of_values import OF_VALUES

BUDGET = 2**16  # values or bytes that one proof may walk


def prove(plan: Plan) -> list[Proof]:
    """All proofs about a plan, in the order of the compiler's stages."""
    return [proof for prover in PROVERS for proof in prover(plan)]


def failures(proofs: list[Proof], path: str) -> list[Diagnostic]:
    """A finding for each statement that does not hold."""
    why = "generated code relies on it, so this is a bug in layoutc, not in the spec"
    help = "report it with this spec; do not use what is generated from it"
    return [
        Diagnostic("LC403", f"not so: {one.statement}", path, why=f"{one.counter}; {why}", help=help)
        for one in proofs
        if not one.holds
    ]


# ----------------------------------------------------------------------------------------------- index maps of buffers
def buffers_are_bijections(plan: Plan) -> Iterator[Proof]:
    """Packing, order, repetition and padding: no two values share a bit, and each bit is a value's or padding."""
    for buffer in plan.layout.buffers:
        statement = "every value lies at bits of its own and is found again from them; all other bits are padding, zero"
        shapes = _to_walk(plan.layout, buffer)
        if shapes:
            counter = next((case for shape in shapes if (case := _not_a_bijection(buffer, *shape))), "")
            yield proof(buffer.name, statement, f"every value and every bit enumerated, {_weights(shapes)}", counter)
        else:
            shape = _tiles(plan.layout, buffer, 1, 1)
            counter = _step_by_step(buffer.chain(*shape))
            yield proof(buffer.name, statement, f"each step keeps values apart ({_large(shape)})", counter)


def _to_walk(layout: Layout, buffer: Buffer) -> list[tuple[int, int]]:
    """Shapes with whole tiles of a buffer, several along each axis if affordable, and one with a partial tile."""
    sizes = [[_tiles(layout, buffer, 2, 3)], [_tiles(layout, buffer, 1, 1)]]
    if buffer.pads or any(times > 1 for times in buffer.repeats):
        m, k = _tiles(layout, buffer, 1, 1)
        torn = m + layout.multiple_m, k + layout.multiple_k  # the last tile is as empty as the recipe allows
        sizes = [[*shapes, torn] for shapes in sizes]
    return next((shapes for shapes in sizes if all(_slots(buffer, *shape) <= BUDGET for shape in shapes)), [])


def _slots(buffer: Buffer, m: int, k: int) -> int:
    """The number of values that a buffer has room for."""
    return buffer.chain(m, k).nbytes * 8 // buffer.bits


def _not_a_bijection(buffer: Buffer, m: int, k: int) -> str:
    """The first counterexample, including padding that differs from the description's; "" if there is none."""
    chain, bits = buffer.chain(m, k), buffer.bits
    width = chain.shapes[-1][-1] * bits // 8
    # A row is whole bytes, and its values start at multiples of `bits`, so only values with the same start overlap.
    slots = {row * width * 8 + bit for row in range(chain.nbytes // width) for bit in range(0, width * 8, bits)}
    taken: dict[int, tuple[int, ...]] = {}
    for value in product(*map(range, chain.start)):
        places = chain.positions(value)
        if not places:
            return f"value {value} is stored nowhere"
        for byte, bit in places:
            first = byte * 8 + bit
            if first in taken or first not in slots:
                return f"value {value} begins at bit {first}, which is {taken.get(first, 'no place for one')}"
            if chain.value_at(byte, bit) != value:
                return f"byte {byte}, bit {bit} should give back value {value}"
            taken[first] = value
    for first in slots:
        if (chain.value_at(*divmod(first, 8)) is None) == (first in taken):
            return f"bit {first} is neither a value's nor padding"
    spare, stated = (len(slots) - len(taken)) * bits, padding_bytes(buffer, m, k) * 8
    return "" if spare == stated else f"{spare} bits of padding, not {stated}"


def _step_by_step(chain: Chain) -> str:
    """The first step that could map two values to one position; "" if there is none."""
    for step, shape in zip(chain.steps, chain.shapes, strict=False):
        match step:
            case Permute(order):
                sound = sorted(order) == list(range(len(shape)))
            case Repeat(dim, times, limit):
                sound = (shape[dim] - 1) * times < limit
            case Pad(multiples):
                sound = all(multiple >= 1 for multiple in multiples)
            case Split(dim, sizes):
                sound = shape[dim] % prod(sizes) == 0
            case Reorder(dim, order):
                sound = sorted(order) == list(range(shape[dim]))
            case Join(counts):
                sound = sum(counts) == len(shape)
        if not sound:
            return f"{step} on {shape}"
    last = chain.shapes[-1][-1]
    return f"a row of {last} values ends inside a byte" if last * chain.bits % 8 else ""


def swizzle_is_a_bijection(plan: Plan) -> Iterator[Proof]:
    """The GEMM's order of a padded scale buffer is a bijection."""
    swizzle = plan.layout.swizzle
    if swizzle is None:
        return
    statement = "the swizzle moves every scale of a padded buffer to a place of its own"
    tile = (swizzle.tile(0), swizzle.tile(1))
    shape = (2 * tile[0], 2 * tile[1])
    names = ", ".join(buffer.name for buffer in plan.layout.buffers if is_swizzled(plan.layout, buffer))
    if prod(shape) > BUDGET:
        counter = _step_by_step(swizzle_chain(swizzle, shape))
        yield proof(names, statement, f"each step keeps values apart ({_large(shape)})", counter)
        return
    chain = swizzle_chain(swizzle, shape)
    places = {index: chain.positions(index) for index in product(*map(range, shape))}
    wrong = next((f"{i} goes to {p}" for i, p in places.items() if [chain.value_at(*at) for at in p] != [i]), "")
    if not wrong and {byte for positions in places.values() for byte, _ in positions} != set(range(prod(shape))):
        wrong = "some places of the buffer get no scale"
    yield proof(names, statement, f"every place of 2 x 2 tiles of {tile[0]} x {tile[1]} enumerated", wrong)


# -------------------------------------------------------------------------------------------------------------- blocks
def blocks_partition_the_weight(plan: Plan) -> Iterator[Proof]:
    """Each element has exactly one code and one scale, at the buffer entry that its indices lead to."""
    for source in plan.layout.sources:
        for plane in source.planes:
            sizes = "x".join("all" if size is None else str(size) for size in (plane.per_m, plane.per_k))
            statement = f"blocks of {sizes} partition the weight: every element in one, none without an element"
            whole = _shape_for(plan.layout, 2 * (plane.per_m or 1), 2 * (plane.per_k or 1))
            shapes = [whole, (whole[0] + plan.layout.multiple_m, whole[1] + plan.layout.multiple_k)]
            tries = product(shapes, (0, 1))
            counter = next((case for shape, axis in tries if (case := _not_a_partition(plane, shape, axis))), "")
            yield proof(plane.name, statement, f"edges of blocks compared, {_weights(shapes)}", counter)
    statement = "the entry that an element's row and column lead to holds the value of its block"
    for buffer in plan.layout.buffers:
        if buffer.dims and not buffer.plane.per_m == buffer.plane.per_k == 1:
            shape = _tiles(plan.layout, buffer, 1, 1)
            every = _slots(buffer, *shape) <= BUDGET
            how = "every entry" if every else "the first and last entries along each dim"
            counter = _not_its_block(buffer, *shape, every)
            yield proof(buffer.name, statement, f"{how} compared, {_weights([shape])}", counter)


def _not_a_partition(plane: Plane, shape: tuple[int, int], axis: int) -> str:
    """Why blocks along one axis leave gaps, overlap, or don't have one stored value each; "" if they partition it."""
    size, per = shape[axis], (plane.per_m, plane.per_k)[axis] or shape[axis]
    entries = cdiv(size, per)
    looked_at = range(entries) if entries <= BUDGET else (0, 1, entries - 2, entries - 1)
    for entry in looked_at:
        begin, end = entry * per, min(size, (entry + 1) * per)
        after = min(size, end) if entry == entries - 1 else (entry + 1) * per
        if not begin < end or end != after or (entry == entries - 1 and end != size):
            return f"block {entry} along {'mk'[axis]} is [{begin}, {end})"
    stored = plane.shape(*shape)
    count = stored[axis] if len(stored) == 2 else 1
    count = count * 8 // plane.bits if axis == 1 and plane.bits < 8 else count
    return "" if count == entries else f"{entries} blocks along {'mk'[axis]}, but {count} values are stored"


def _not_its_block(buffer: Buffer, m: int, k: int, every: bool) -> str:
    """Compares each buffer entry with the block of the elements that lead to it, without using the steps."""
    chain = replace(buffer, swizzle=None, words=0).chain(m, k)  # a swizzle moves entries afterwards
    sizes = [cdiv(m if dim.axis == "m" else k, dim.per) for dim in buffer.dims]
    padded = chain.shapes[-1]
    per = {"m": buffer.plane.per_m, "k": buffer.plane.per_k}
    axes = sorted(buffer.dims, key=lambda dim: "mk".index(dim.axis))
    looked_at = (range(size) if every else sorted({0, size // 2, size - 1}) for size in sizes)
    for entry in product(*looked_at):
        offset = 0
        for index, size in zip(entry, padded, strict=True):
            offset = offset * size + index
        at = {dim.axis: index * dim.per for dim, index in zip(buffer.dims, entry, strict=True)}
        block = tuple(at[dim.axis] // (per[dim.axis] or 1) for dim in axes)
        value = chain.value_at(*divmod(offset * chain.bits, 8))
        if value != block:
            return f"entry {entry} holds the value of block {value}, not of {block}"
    return ""


# ---------------------------------------------------------------------------------------------------------------- cuts
def cuts_cross_nothing(plan: Plan) -> Iterator[Proof]:
    """Cuts at multiples of the alignment split nothing, and all other cuts split something."""
    rows = plan.shard_rows
    tiled = any(buffer.swizzle or buffer.words for buffer in plan.layout.buffers)
    what = "no block, no byte and no tile" if tiled else "no block and no byte"
    where = f"at multiples of {rows}, and crosses one anywhere else" if rows > 1 else "at any row"
    statement = f"a cut between rows crosses {what} {where}"
    if 2 * rows <= BUDGET // 8:
        cuts, how = list(range(1, 2 * rows + 1)), f"every cut of {2 * rows + 1} rows enumerated"
    else:
        cuts = sorted({rows, 2 * rows, *(rows // prime for prime in _primes(rows))})
        how = f"enumerated: {', '.join(map(str, cuts))}; crossings come in multiples, and these have all divisors"
    wrong = ((cut, what) for cut in cuts if bool(what := _crossed(plan.layout, cut)) == (cut % rows == 0))
    counter = next((f"a cut at row {cut} crosses {what or 'nothing'}" for cut, what in wrong), "")
    yield proof("shards", statement, how, counter)


def _crossed(layout: Layout, cut: int) -> str:
    """What the rows above and below a cut share: a value of a plane, or a byte or tile of a buffer; "" if nothing."""
    for source in layout.sources:
        for plane in source.planes:
            if plane.per_m is not None and (cut - 1) // plane.per_m == cut // plane.per_m:
                return f"a value of {plane.name}"
    for buffer in layout.buffers:
        plane = buffer.plane
        if buffer.swizzle or buffer.words:
            if not _splits(layout, buffer, cut):
                return f"a tile of {buffer.name}"
        elif buffer.bits < 8 and plane.per_m is not None:
            above, below = (_bytes_of_row(layout, buffer, row, cut) for row in (cut - 1, cut))
            if above & below:
                return f"a byte of {buffer.name}"
    return ""


def _splits(layout: Layout, buffer: Buffer, rows: int) -> bool:
    """True if `rows` rows fill whole tiles and words of a swizzled buffer with a whole other axis. Tries the split."""
    try:
        last = buffer.chain(rows, _tiles(layout, buffer, 1, 1)[1]).shapes[-1][-1]
        return last * buffer.bits % (buffer.words or 8) == 0
    except ValueError:
        return False


def _bytes_of_row(layout: Layout, buffer: Buffer, row: int, cut: int) -> set[int]:
    """The bytes of a buffer that hold a row's first and last value, in a weight that is cut at `cut`."""
    plane = buffer.plane
    rows = lcm(layout.multiple_m, (plane.per_m or 1) * codes_per_group(buffer.bits))
    chain = buffer.chain(cdiv(cut + 1, rows) * rows, layout.multiple_k)
    ends = {0, chain.start[-1] - 1} if len(chain.start) == 2 else {0}
    values = [(row // (plane.per_m or 1), end)[: len(chain.start)] for end in ends]
    starts = [byte * 8 + bit for value in values for byte, bit in chain.positions(value)]
    return {(start + each) // 8 for start in starts for each in range(chain.bits)}


def _primes(number: int) -> list[int]:
    primes, divisor = [], 2
    while divisor * divisor <= number:
        if number % divisor == 0:
            primes.append(divisor)
            while number % divisor == 0:
                number //= divisor
        divisor += 1
    return [*primes, number] if number > 1 else primes


# --------------------------------------------------------------------------------------------------------- derivations
def derivations_are_lossless(plan: Plan) -> Iterator[Proof]:
    """Orientations share codes and scales exactly if they quantize alike; states the first difference otherwise."""
    layout = plan.layout
    base = layout.orientations[0]
    first = layout.source(base)
    for orientation in layout.orientations[1:]:
        other = layout.source(orientation)
        if other == first:
            own = [buffer for buffer in layout.buffers if buffer.orientation == orientation]
            strangers = [buffer.name for buffer in own if buffer.plane not in first.planes]
            counter = f"{', '.join(strangers)} is made of other planes" if strangers else ""
            statement = f"{orientation} follows from {base} without loss: the same codes and scales, laid out anew"
            method = "one quantization; every buffer is made of its planes"
        else:
            reason = _told_apart(first, other)
            counter = "" if reason else f"{base} and {orientation} quantize alike, so one copy would do"
            statement = f"{orientation} does not follow from {base}: {reason or 'they differ'}"
            method = "quantizations compared; blocks by two elements that only one joins"
        yield proof(orientation, statement, method, counter)


def _told_apart(a: Source, b: Source) -> str:
    """Two elements that share a scale in only one of the sources; else what else differs; "" if nothing does."""
    for axis, name in enumerate("mk"):
        runs = [_run(source, axis) for source in (a, b)]
        if runs[0] != runs[1]:
            joining, parting = (a.name, b.name) if runs[0] > runs[1] else (b.name, a.name)
            apart = f"elements {int(min(runs))} apart along {name}"
            return f"{apart} can share a scale of {joining}, never one of {parting}"
    pairs = [(field.name, *(getattr(s.quantization, field.name) for s in (a, b))) for field in fields(a.quantization)]
    different = ((name, _short(mine), _short(theirs)) for name, mine, theirs in pairs if mine != theirs)
    return "; ".join(f"{name} is {mine} {a.name}, {theirs} {b.name}" for name, mine, theirs in different)


def _run(source: Source, axis: int) -> float:
    """How many neighbors along an axis share a scale or zero point."""
    runs = ((plane.per_m, plane.per_k)[axis] or inf for plane in source.planes if plane.kind != "data")
    return min(runs, default=inf)


def _short(value: object) -> str:
    return str(getattr(value, "name", value))


# -------------------------------------------------------------------------------------------------------------- gathers
def gathers_are_minimal(plan: Plan) -> Iterator[Proof]:
    """Each pass moves every code and scale that it needs once, and no other bit, if no cut falls inside a block."""
    return (_minimal(plan, gather) for gather in (plan.forward, plan.backward, plan.both))


def _minimal(plan: Plan, gather: Gather) -> Proof:
    layout = plan.layout
    wanted = {"forward": ("rowwise",), "backward": ("columnwise",), "both": layout.orientations}[gather.name]
    wanted = tuple(name for name in wanted if name in layout.orientations) or layout.orientations[:1]
    sources = dict.fromkeys(layout.source(name) for name in wanted)
    needed = dict.fromkeys(plane for source in sources for plane in source.planes if plane.per_m is not None)
    per_m = lcm(*(plane.per_m or 1 for plane in needed))
    per_k = lcm(*((plane.per_k or 1) * codes_per_group(plane.bits) for plane in needed))
    m, k = _shape_for(layout, per_m, per_k)
    values = {plane: cdiv(m, plane.per_m or m) * cdiv(k, plane.per_k or k) for plane in needed}
    least = sum(count * plane.bits for plane, count in values.items())
    moved = sum(plane.nbytes(m, k) for plane in gather.planes) * 8
    parts = " + ".join(_bits(plane) for plane in needed) or "nothing"
    statement = f"moves {float(gather.bytes_per_element):.4f} B/element, the least there is: {parts}"
    if any((plane.per_m or 1) > 1 for plane in gather.planes):
        statement += "; of a block that is cut, each rank that has rows of it sends the scales"
    if plan.slots_differ and gather.name != "both":
        statement += "; FSDP2 then fills it up to the larger pass"
    method = f"values counted, {_weights([(m, k)])}: {least:,} bits needed, {moved:,} moved"
    missing = [name for name in wanted if name not in gather.serves]
    counter = "" if moved == least else f"{moved:,} bits are moved where {least:,} would do"
    return proof(f"{gather.name} gather", statement, method, f"{missing[0]} is not served" if missing else counter)


def _bits(plane: Plane) -> str:
    if plane.per_m == plane.per_k == 1:
        return f"{plane.bits} bits an element"
    sizes = "x".join("all" if size is None else str(size) for size in (plane.per_m, plane.per_k))
    return f"{plane.bits} bits for {sizes}"


# -------------------------------------------------------------------------------------------------------------- shapes
def _tiles(layout: Layout, buffer: Buffer, rows: int, columns: int) -> tuple[int, int]:
    """The smallest weight that the recipe accepts and that fills rows x columns whole tiles of a buffer."""
    sizes = {"m": 1, "k": 1}
    for dim, multiple in zip(buffer.dims, buffer.multiples if buffer.dims else (), strict=True):
        covers = buffer.plane.per_m if dim.axis == "m" else buffer.plane.per_k
        sizes[dim.axis] = lcm(dim.per * lcm(dim.multiple, multiple), covers or 1)
    return _shape_for(layout, sizes["m"] * rows, sizes["k"] * columns)


def _shape_for(layout: Layout, per_m: int, per_k: int) -> tuple[int, int]:
    """The smallest weight that the recipe accepts and that consists of whole (per_m, per_k) blocks."""
    return lcm(layout.multiple_m, per_m), lcm(layout.multiple_k, per_k)


def _weights(shapes: list[tuple[int, int]]) -> str:
    return "weights of " + " and ".join(f"{m} x {k}" for m, k in dict.fromkeys(shapes))


def _large(shape: tuple[int, int]) -> str:
    return f"{shape[0]} x {shape[1]} is too large to enumerate"


Prover = Callable[[Plan], Iterator[Proof]]
PROVERS: tuple[Prover, ...] = (
    buffers_are_bijections,
    swizzle_is_a_bijection,
    blocks_partition_the_weight,
    cuts_cross_nothing,
    derivations_are_lossless,
    gathers_are_minimal,
    *OF_VALUES,
    *OF_FILES,
)
