"""Judges ``assert f(2, 3) == 5`` outside of the process that runs f.

The statement is walked here, in a process that never runs a program under test. Only a call of the program
itself (or a name or attribute of it) is handed to ``call`` as source text, and what comes back must be a
plain value. So the expected value, the comparison and the functions around the call (``len``, ``abs``,
``math.isclose``) are ours: no equality, builtin or assert that the program replaces has a say.

A test of another form (a comprehension, a library function around the call) would have to be decided by the
program's own process; it is refused when the data is read, since a verdict that can be forged is worse than
none.
"""

import ast
import builtins
import math
import operator
import sys
from collections.abc import Callable

# Functions that a test may put around the program's answer: cheap on any plain value of bounded size.
FUNCTIONS = {
    f.__name__: f
    for f in (
        abs,
        all,
        any,
        bool,
        dict,
        float,
        frozenset,
        int,
        isinstance,
        len,
        list,
        max,
        min,
        repr,
        round,
        set,
    )
    + (sorted, str, sum, tuple, type)
}
FUNCTIONS |= {
    f"math.{name}": getattr(math, name) for name in "ceil fabs floor isclose isinf isnan sqrt".split()
}
FUNCTIONS["sys.getsizeof"] = sys.getsizeof
CONSTANTS = {"math.pi": math.pi, "math.e": math.e, "math.inf": math.inf, "math.nan": math.nan}
OPERATORS = {
    ast.Eq: operator.eq,
    ast.NotEq: operator.ne,
    ast.Lt: operator.lt,
    ast.LtE: operator.le,
    ast.Gt: operator.gt,
    ast.GtE: operator.ge,
    ast.Is: operator.is_,
    ast.IsNot: operator.is_not,
    ast.In: lambda a, b: a in b,
    ast.NotIn: lambda a, b: a not in b,
    ast.Add: operator.add,
    ast.Sub: operator.sub,
    ast.Mult: operator.mul,
    ast.Div: operator.truediv,
    ast.FloorDiv: operator.floordiv,
    ast.Mod: operator.mod,
    ast.Pow: operator.pow,
    ast.Not: operator.not_,
    ast.USub: operator.neg,
    ast.UAdd: operator.pos,
    ast.Invert: operator.invert,
}
LIBRARIES = sys.stdlib_module_names | {"np", "numpy", "pd", "pandas", "torch"}


def parse_test(test: str) -> ast.expr:
    """The condition of one assert statement; raises ValueError for any other form."""
    try:
        body = ast.parse(test.strip()).body
    except (SyntaxError, ValueError) as error:
        raise ValueError(f"test {test!r}: not Python: {error}") from None
    if len(body) != 1 or not isinstance(body[0], ast.Assert):
        raise ValueError(f"test {test!r}: one assert statement expected")
    condition = body[0].test
    try:
        _walk(condition, _own_functions(condition), lambda text: None, dry=True)
    except _Refused as error:
        raise ValueError(
            f"test {test!r}: {error} cannot be judged outside of the program; accepted: calls of the "
            f"program, literals, operators, and {', '.join(FUNCTIONS)}"
        ) from None
    return condition


def holds(condition: ast.expr, call: Callable[[str], object]) -> bool:
    """Whether the condition is true, with ``call(source)`` for the value of an expression of the program.

    An operation that fails on the values makes it False. What ``call`` raises passes through, save the errors
    that such operations raise (ArithmeticError, LookupError, TypeError, ValueError, RecursionError).
    """
    try:
        return bool(_walk(condition, _own_functions(condition), call))
    except (ArithmeticError, LookupError, TypeError, ValueError, RecursionError):
        return False


def called_names(condition: ast.expr) -> set[str]:
    """Names the condition calls and the program must define."""
    calls = (node.func for node in ast.walk(condition) if isinstance(node, ast.Call))
    return {func.id for func in calls if isinstance(func, ast.Name)} - _own_functions(condition).keys()


class _Refused(Exception):
    pass


def _own_functions(condition: ast.expr) -> dict[str, Callable]:
    """FUNCTIONS, unless the test calls builtins only: then the program is to define, say, its own ``sum``."""
    calls = {ast.unparse(node.func) for node in ast.walk(condition) if isinstance(node, ast.Call)}
    return FUNCTIONS if calls - FUNCTIONS.keys() - vars(builtins).keys() else {}


def _first_name(node: ast.expr) -> str:
    """``f`` of ``f(1).value``."""
    while isinstance(node, ast.Call | ast.Attribute):
        node = node.func if isinstance(node, ast.Call) else node.value
    if not isinstance(node, ast.Name):
        raise _Refused(ast.unparse(node))
    return node.id


def _walk(node: ast.expr, functions: dict[str, Callable], call: Callable[[str], object], dry: bool = False):
    """The value of ``node``; ``dry`` only visits, to find what is refused."""

    def walk(child):
        return _walk(child, functions, call, dry)

    match node:
        case ast.Constant():
            return node.value
        case ast.Tuple() | ast.List() | ast.Set():
            kind = {ast.Tuple: tuple, ast.List: list, ast.Set: set}[type(node)]
            return kind([walk(item) for item in node.elts])
        case ast.Dict() if None not in node.keys:
            return {walk(key): walk(value) for key, value in zip(node.keys, node.values, strict=True)}
        case ast.UnaryOp():
            value = walk(node.operand)
            return None if dry else OPERATORS[type(node.op)](value)
        case ast.BinOp() if type(node.op) in OPERATORS:
            left, right = walk(node.left), walk(node.right)
            return None if dry else _arithmetic(node.op, left, right)
        case ast.BoolOp():
            value = None
            for child in node.values:
                value = walk(child)
                if not dry and bool(value) == isinstance(node.op, ast.Or):
                    break
            return value
        case ast.Compare():
            left, value = walk(node.left), None
            for op, child in zip(node.ops, node.comparators, strict=True):
                right = walk(child)
                value = dry or OPERATORS[type(op)](left, right)
                if not value:
                    break
                left = right
            return value
        case ast.Subscript(slice=ast.Slice()):
            value = walk(node.value)
            bounds = [end and walk(end) for end in (node.slice.lower, node.slice.upper, node.slice.step)]
            return None if dry else value[slice(*bounds)]
        case ast.Subscript():
            value, index = walk(node.value), walk(node.slice)
            return None if dry else value[index]
        case ast.Call() if (name := ast.unparse(node.func)) in functions:
            values = [walk(item) for item in node.args]
            named = {keyword.arg: walk(keyword.value) for keyword in node.keywords}
            return None if dry else functions[name](*values, **named)
        case ast.Name() if node.id in functions:
            return functions[node.id]  # a type, as in isinstance(f(), list)
        case ast.Attribute() if (name := ast.unparse(node)) in CONSTANTS:
            return CONSTANTS[name]
        case ast.Call() | ast.Attribute() | ast.Name():
            name = _first_name(node)
            own = ast.unparse(getattr(node, "func", node)) == name  # no method, as in np.allclose(f(1), 2)
            if functions and hasattr(builtins, name) or name in LIBRARIES and not own:
                raise _Refused(ast.unparse(node))
            return call(ast.unparse(node))
    raise _Refused(ast.unparse(node))


def _arithmetic(op: ast.operator, left, right):
    """Bounded: a program's answer must not make the judge build a number or a text without end."""
    numbers = all(isinstance(value, int | float | complex) for value in (left, right))
    if not numbers and not (isinstance(op, ast.Add) and type(left) is type(right) in (str, list, tuple)):
        raise TypeError("arithmetic on numbers, addition of two texts, lists or tuples")
    if isinstance(op, ast.Pow) and isinstance(left, int) and left.bit_length() * abs(right) > 1e5:
        raise OverflowError("a power of more than 100,000 bits")
    return OPERATORS[type(op)](left, right)
