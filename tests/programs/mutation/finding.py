"""Faults that can be put into a module: small edits of its text, each of which a test should notice.

Nothing is changed that only people read: messages, docstrings, annotations, f-strings.
"""

from __future__ import annotations

import ast
import re
from collections.abc import Iterable, Sequence
from typing import Any

from mutation.fault import Fault

Spans = Sequence[tuple[int, int]]
COMPARISONS = {
    ast.Lt: ("<", "<="), ast.LtE: ("<=", "<"), ast.Gt: (">", ">="), ast.GtE: (">=", ">"), ast.Eq: ("==", "!="),
    ast.NotEq: ("!=", "=="), ast.In: ("in", "not in"), ast.NotIn: (r"not\s+in", "in"), ast.Is: ("is", "is not"),
    ast.IsNot: (r"is\s+not", "is"),
}  # fmt: skip
ARITHMETIC = {
    ast.Add: ("+", "-"), ast.Sub: ("-", "+"), ast.Mult: ("*", "+"), ast.FloorDiv: ("//", "*"), ast.Div: ("/", "*"),
    ast.Mod: ("%", "//"), ast.LShift: ("<<", ">>"), ast.RShift: (">>", "<<"), ast.BitAnd: ("&", "|"),
    ast.BitOr: ("|", "&"), ast.BitXor: ("^", "|"), ast.Pow: ("**", "*"),
}  # fmt: skip
METHODS = {
    "clone",
    "contiguous",
    "detach",
    "copy",
    "flatten",
    "t",
    "abs",
    "float",
    "strip",
    "rstrip",
    "resolve",
}
WRAPPERS = {"sorted", "list", "tuple", "set", "dict", "abs", "reversed", "frozenset", "deepcopy"}
EXCHANGED = {"min": "max", "max": "min", "any": "all", "all": "any", "amax": "amin", "floor": "ceil", "ceil": "floor"}
COMMUTATIVE = {"min", "max", "minimum", "maximum", "equal", "gcd", "lcm"}
KEPT = {None, "strict"}  # zip(strict=True) states what holds
KEPT_DECORATORS = re.compile(
    r"property|setter|method|dataclass|overload|contextmanager|cache|jit|fixture|command|option"
)
TYPES = {"tuple", "list", "dict", "set", "type", "Callable", "Literal", "Union", "Optional", "Mapping", "Sequence"}
TOLD = {"warn", "warning", "debug", "info", "error", "cast", "TypeVar", "NewType", "getLogger", "echo", "print"}


def faults_in(source: str, module: str) -> list[Fault]:
    """All faults that could be put into a module, in the order of its text; some may not compile, or change nothing."""
    finder = _Finder(source, module)
    finder.visit(finder.tree)
    found = {(fault.start, fault.end, fault.new): fault for fault in reversed(finder.found)}
    return [found[place] for place in sorted(found)]


def _called(node: ast.expr) -> str:
    """The last name of what is called."""
    return node.id if isinstance(node, ast.Name) else node.attr if isinstance(node, ast.Attribute) else ""


def _is_docstring(node: ast.stmt) -> bool:
    return isinstance(node, ast.Expr) and isinstance(node.value, ast.Constant)


class _Finder(ast.NodeVisitor):
    """Walks a module and notes what could go wrong at each place."""

    def __init__(self, source: str, module: str) -> None:
        self.module, self.data, self.tree, self.found = module, source.encode(), ast.parse(source), list[Fault]()
        self.starts = [0]
        for line in self.data.splitlines(keepends=True):
            self.starts.append(self.starts[-1] + len(line))
        self.scopes: list[tuple[str, bool]] = []  # qualified names, and whether each is a function
        self.bound: list[set[str]] = []
        self.returns: list[str] = []

    # ------------------------------------------------------------------------------------------------------- positions
    def _start(self, node: Any) -> int:
        return self.starts[node.lineno - 1] + int(node.col_offset)

    def _end(self, node: Any) -> int:
        return self.starts[node.end_lineno - 1] + int(node.end_col_offset)

    def _text(self, node: Any) -> str:
        return self.data[self._start(node) : self._end(node)].decode()

    def _add(self, kind: str, start: int, end: int, new: str) -> None:
        name, is_function = self.scopes[-1] if self.scopes else ("", False)
        line = self.data.count(b"\n", 0, start) + 1
        self.found.append(Fault(self.module, kind, line, name if is_function else "", start, end, new))

    def _enter(self, name: str, is_function: bool) -> None:
        outer, in_function = self.scopes[-1] if self.scopes else ("", False)
        between = "" if not outer else ".<locals>." if in_function else "."
        self.scopes.append((outer + between + name, is_function))

    def _replace(self, kind: str, node: Any, new: str) -> None:
        self._add(kind, self._start(node), self._end(node), new)

    def _negate(self, kind: str, test: ast.expr) -> None:
        self._replace(kind, test, f"(not ({self._text(test)}))")

    def _between(self, kind: str, left: ast.expr, right: ast.expr, old: str, new: str) -> None:
        """Another operator between two operands."""
        begin, text = self._end(left), self.data[self._end(left) : self._start(right)].decode()
        pattern = old if "\\" in old else re.escape(old)
        pattern = rf"\b{pattern}\b" if old[0].isalpha() else pattern
        if (match := re.search(pattern, text)) is not None:
            self._add(kind, begin + match.start(), begin + match.end(), new)

    def _each_dropped(self, kind: str, spans: Spans, wanted: Iterable[int]) -> None:
        """One of several items that commas, or words, separate is left out."""
        for i in wanted:
            start = spans[i - 1][1] if i else spans[i][0]
            self._add(kind, start, spans[i][1] if i or len(spans) == 1 else spans[1][0], "")

    def _spans(self, nodes: Iterable[Any]) -> list[tuple[int, int]]:
        return [(self._start(node), self._end(node)) for node in nodes]

    # ------------------------------------------------------------------------------------------------------ statements
    def _function(self, node: ast.FunctionDef | ast.AsyncFunctionDef) -> None:
        for decorator in node.decorator_list:
            if not KEPT_DECORATORS.search(text := self._text(decorator)) and text:
                self._add("decorator dropped", self._start(decorator) - 1, self._end(decorator), "")
        for default in (*node.args.defaults, *node.args.kw_defaults):
            if default is not None:
                self.visit(default)
        self._enter(node.name, True)
        self.bound.append({arg.arg for arg in ast.walk(node.args) if isinstance(arg, ast.arg)})
        self.returns.append(self._text(node.returns) if node.returns is not None else "")
        if self.returns[-1] in ("None", ""):
            for statement in node.body[1 + _is_docstring(node.body[0]) :]:
                if not isinstance(statement, ast.Return):
                    self._replace("returned early", statement, "return")
        self._body(node.body)
        self.scopes.pop()
        self.bound.pop()
        self.returns.pop()

    visit_FunctionDef = visit_AsyncFunctionDef = _function

    def visit_ClassDef(self, node: ast.ClassDef) -> None:
        """Methods and class attributes."""
        self._enter(node.name, False)
        self._body(node.body)
        self.scopes.pop()

    def _body(self, body: Sequence[ast.stmt]) -> None:
        for statement in body:
            if not _is_docstring(statement):
                self.visit(statement)

    def visit_Expr(self, node: ast.Expr) -> None:
        """A call for its effect."""
        if isinstance(node.value, ast.Call):
            if _called(node.value.func) in TOLD:
                return
            self._replace("call dropped", node, "pass")
        self.visit(node.value)

    def visit_Assign(self, node: ast.Assign) -> None:
        """Attributes, items, and names that had a value before."""
        value, names = node.value, {target.id for target in node.targets if isinstance(target, ast.Name)}
        if not self.scopes and isinstance(value, ast.Subscript) and _called(value.value) in TYPES:
            return
        if "__all__" in names:
            return
        bound = self.bound[-1] if self.bound else set()
        unpacks = any(isinstance(target, ast.Tuple) for target in node.targets)
        if not unpacks and names <= bound:
            self._replace("assignment dropped", node, "pass")
        bound |= names | {n.id for target in node.targets for n in ast.walk(target) if isinstance(n, ast.Name)}
        for target in node.targets:
            if isinstance(target, ast.Subscript):
                self.visit(target.slice)
        if isinstance(value, ast.Tuple) and isinstance(node.targets[0], ast.Tuple):
            for element in value.elts:
                self.visit(element)
            return
        self.visit(value)

    def visit_AnnAssign(self, node: ast.AnnAssign) -> None:
        """As an assignment; the annotation says nothing at run time."""
        if node.value is not None:
            if isinstance(node.target, ast.Attribute | ast.Subscript) and self.returns:
                self._replace("assignment dropped", node, "pass")
            self.visit(node.value)

    def visit_AugAssign(self, node: ast.AugAssign) -> None:
        """x += y"""
        self._replace("assignment dropped", node, "pass")
        self.visit(node.value)

    def visit_Return(self, node: ast.Return) -> None:
        """Another truth, or None where None is an answer."""
        if node.value is None:
            return
        annotation = self.returns[-1] if self.returns else ""
        if annotation == "bool":
            self._negate("answer negated", node.value)
        elif "None" in annotation and not (isinstance(node.value, ast.Constant) and node.value.value is None):
            self._replace("returned early", node, "return None")
        self.visit(node.value)

    def visit_Raise(self, node: ast.Raise) -> None:
        """A check that says nothing. What it says is for people."""
        self._replace("raise dropped", node, "pass")

    def visit_Assert(self, node: ast.Assert) -> None:
        """Tells a type checker what is known."""

    def visit_Import(self, node: ast.AST) -> None:
        """Nothing."""

    visit_ImportFrom = visit_JoinedStr = visit_Global = visit_Nonlocal = visit_arguments = visit_Import

    def visit_If(self, node: ast.If) -> None:
        """The condition, and the whole where it guards one step."""
        test = self._text(node.test)
        if "TYPE_CHECKING" in test or "__name__" in test:
            return
        self._negate("condition negated", node.test)
        if not node.orelse and len(node.body) == 1 and not self.data[self._start(node) :].startswith(b"elif"):
            kind = "check dropped" if isinstance(node.body[0], ast.Raise) else "guard dropped"
            self._replace(kind, node, "pass")
        self.visit(node.test)
        self._body(node.body)
        self._body(node.orelse)

    def visit_While(self, node: ast.While) -> None:
        """The condition."""
        self._negate("condition negated", node.test)
        self.generic_visit(node)

    def visit_For(self, node: ast.For) -> None:
        """Only once."""
        last = node.body[-1]
        if not isinstance(last, ast.Return | ast.Raise | ast.Break | ast.Continue) and last.lineno != node.lineno:
            indent = " " * node.body[0].col_offset
            self._add("only once", self._end(last), self._end(last), f"\n{indent}break")
        self.visit(node.iter)
        self._body(node.body)
        self._body(node.orelse)

    def visit_Break(self, node: ast.Break) -> None:
        """The other."""
        self._replace("loop left", node, "continue")

    def visit_Continue(self, node: ast.Continue) -> None:
        """The other."""
        self._replace("loop left", node, "break")

    def visit_With(self, node: ast.With) -> None:
        """Without the context, where nothing of it is named."""
        if all(item.optional_vars is None for item in node.items):
            last, first = self._end(node.items[-1].context_expr), self._start(node.body[0])
            colon = last + self.data[last:first].find(b":")
            self._add("context dropped", self._start(node), colon, "if True")
        for item in node.items:
            self.visit(item.context_expr)
        self._body(node.body)

    def visit_Try(self, node: ast.Try) -> None:
        """Fewer exceptions; nothing at last."""
        for handler in node.handlers:
            if isinstance(handler.type, ast.Tuple):
                self._each_dropped("exception dropped", self._spans(handler.type.elts), range(len(handler.type.elts)))
            self._body(handler.body)
        if node.finalbody:
            self._add("finally dropped", self._start(node.finalbody[0]), self._end(node.finalbody[-1]), "pass")
        for body in (node.body, node.orelse, node.finalbody):
            self._body(body)

    # ----------------------------------------------------------------------------------------------------- expressions
    def visit_Compare(self, node: ast.Compare) -> None:
        """At the edge, or the other way."""
        operands = [node.left, *node.comparators]
        for operator, left, right in zip(node.ops, operands, operands[1:], strict=False):
            self._between("comparison", left, right, *COMPARISONS[type(operator)])
        self.generic_visit(node)

    def visit_BinOp(self, node: ast.BinOp) -> None:
        """Another operator. Texts are added up for people."""
        sides = (node.left, node.right)
        texts = any(isinstance(side, ast.JoinedStr) or isinstance(getattr(side, "value", None), str) for side in sides)
        if not texts and type(node.op) in ARITHMETIC:
            self._between("arithmetic", *sides, *ARITHMETIC[type(node.op)])
        self.generic_visit(node)

    def visit_BoolOp(self, node: ast.BoolOp) -> None:
        """The other word; one part of several."""
        old, new = ("and", "or") if isinstance(node.op, ast.And) else ("or", "and")
        for left, right in zip(node.values, node.values[1:], strict=False):
            self._between("and, or", left, right, old, new)
        self._each_dropped("part of a condition dropped", self._spans(node.values), range(len(node.values)))
        self.generic_visit(node)

    def visit_UnaryOp(self, node: ast.UnaryOp) -> None:
        """Without it."""
        self._add("sign or not dropped", self._start(node), self._start(node.operand), "")
        self.generic_visit(node)

    def visit_IfExp(self, node: ast.IfExp) -> None:
        """The condition."""
        self._negate("condition negated", node.test)
        self.generic_visit(node)

    def visit_comprehension(self, node: ast.comprehension) -> None:
        """Its conditions."""
        for test in node.ifs:
            self._negate("condition negated", test)
        for part in (node.iter, *node.ifs):
            self.visit(part)

    def visit_keyword(self, node: ast.keyword) -> None:
        """zip(strict=True) fails where lengths differ, as an assertion does."""
        if not (node.arg == "strict" and isinstance(node.value, ast.Constant) and node.value.value is True):
            self.visit(node.value)

    def visit_Constant(self, node: ast.Constant) -> None:
        """One more, one less; the other truth."""
        value = node.value
        if isinstance(value, bool):
            self._replace("constant", node, str(not value))
        elif isinstance(value, int):
            for other in (value + 1, value - 1) if value > 0 else (value + 1,):
                self._replace("off by one", node, str(other))
        elif isinstance(value, float):
            self._replace("constant", node, repr(value * 2 if value else 1.0))

    def visit_Subscript(self, node: ast.Subscript) -> None:
        """Not within types: list[int]()."""
        if _called(node.value) not in TYPES:
            self.generic_visit(node)

    def visit_Slice(self, node: ast.Slice) -> None:
        """Without a bound."""
        for bound in (node.lower, node.upper):
            if bound is not None:
                self._replace("bound dropped", bound, "")
        self.generic_visit(node)

    def visit_Call(self, node: ast.Call) -> None:
        """Arguments exchanged or left out, a method or function not called, or another one."""
        name, function = _called(node.func), node.func
        if name in TOLD:
            return
        if isinstance(function, ast.Attribute) and name in METHODS:
            self._add(f".{name}() dropped", self._end(function.value), self._end(node), "")
        if isinstance(function, ast.Name) and name in WRAPPERS and len(node.args) == 1 and not node.keywords:
            self._replace(f"{name}() dropped", node, self._text(node.args[0]))
        if name in EXCHANGED:
            self._add("another function", self._end(function) - len(name), self._end(function), EXCHANGED[name])
        commutes = name in COMMUTATIVE and len(node.args) == 2 and not node.keywords
        for one, other in () if commutes else zip(node.args, node.args[1:], strict=False):
            texts = self._text(one), self._text(other)
            if texts[0] != texts[1] and not any(isinstance(arg, ast.Starred | ast.JoinedStr) for arg in (one, other)):
                between = self.data[self._end(one) : self._start(other)].decode()
                self._add("arguments exchanged", self._start(one), self._end(other), texts[1] + between + texts[0])
        spans = self._spans((*node.args, *node.keywords))
        named = [i for i, item in enumerate((*node.args, *node.keywords)) if getattr(item, "arg", None) not in KEPT]
        if spans == sorted(spans):
            self._each_dropped("keyword dropped", spans, named)
        self.generic_visit(node)

    def _display(self, node: ast.Tuple | ast.List | ast.Set) -> None:
        if len(node.elts) > 1 and isinstance(getattr(node, "ctx", ast.Load()), ast.Load):
            self._each_dropped("element dropped", self._spans(node.elts), range(len(node.elts)))
        self.generic_visit(node)

    visit_Tuple = visit_List = visit_Set = _display

    def visit_Dict(self, node: ast.Dict) -> None:
        """An entry left out."""
        pairs = [(key, value) for key, value in zip(node.keys, node.values, strict=True) if key is not None]
        if len(pairs) > 1 and len(pairs) == len(node.keys):
            spans = [(self._start(key), self._end(value)) for key, value in pairs]
            self._each_dropped("element dropped", spans, range(len(spans)))
        self.generic_visit(node)
