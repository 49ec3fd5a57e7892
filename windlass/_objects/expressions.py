"""Expressions over the key and the numbers of a row, which the servers evaluate: ``wl.key`` and ``wl.row``.

An expression is kept in postfix, as it travels (docs/formats/wire.md), and knows whether it is a number, a key, or true
or false. Servers check it again before they use it.
"""

import numbers
import operator
import struct
from typing import Any, Literal

import numpy as np

from windlass._errors import InvalidArgument

Kind = Literal["number", "key", "condition"]
Step = tuple[int, "float | int | None"]  # an operation, and what follows it

NUMBER, CONSTANT, TRUE, FALSE = 1, 2, 3, 4
KEY, COLUMN, UPDATES, NORM, SUM, MEAN, MIN, MAX, ABSMAX = range(8, 17)
ADD, SUBTRACT, MULTIPLY, DIVIDE, NEGATE, ABS, MODULO, AS_NUMBER = range(24, 32)
LESS, LESS_EQUAL, GREATER, GREATER_EQUAL, EQUAL, NOT_EQUAL = range(40, 46)
AND, OR, NOT = range(48, 51)

KEYS = 1 << 64
HOLDS = {  # what a comparison is for keys, which are integers
    LESS: operator.lt,
    LESS_EQUAL: operator.le,
    GREATER: operator.gt,
    GREATER_EQUAL: operator.ge,
    EQUAL: operator.eq,
    NOT_EQUAL: operator.ne,
}
MIRRORED = {
    LESS: GREATER,
    LESS_EQUAL: GREATER_EQUAL,
    GREATER: LESS,
    GREATER_EQUAL: LESS_EQUAL,
    EQUAL: EQUAL,
    NOT_EQUAL: NOT_EQUAL,
}


class Expression:
    """Something that servers compute for every row; made from ``wl.key`` and ``wl.row`` by operators.

    Numbers have ``+ - * /``, ``abs()`` and comparisons; conditions have ``&``, ``|`` and ``~``. Keys are compared as
    unsigned 64-bit numbers, exactly, and have ``%``; everything else is float64.
    """

    __slots__ = ("_kind", "_steps", "_text")
    __hash__ = None  # type: ignore[assignment]

    def __init__(self, kind: Kind, steps: tuple[Step, ...], text: str) -> None:
        self._kind: Kind = kind
        self._steps = steps
        self._text = text

    def __repr__(self) -> str:
        return self._text

    def __bool__(self) -> bool:
        raise InvalidArgument(
            f"{self._text} is decided on the servers, row by row; combine conditions with & and | and ~, each in"
            " parentheses, not with and, or, not or a chain of comparisons"
        )

    # -- numbers ---------------------------------------------------------------------------------------------------

    def __add__(self, other: Any) -> "Expression":
        return _calculate(ADD, self, other, "+")

    def __radd__(self, other: Any) -> "Expression":
        return _calculate(ADD, other, self, "+")

    def __sub__(self, other: Any) -> "Expression":
        return _calculate(SUBTRACT, self, other, "-")

    def __rsub__(self, other: Any) -> "Expression":
        return _calculate(SUBTRACT, other, self, "-")

    def __mul__(self, other: Any) -> "Expression":
        return _calculate(MULTIPLY, self, other, "*")

    def __rmul__(self, other: Any) -> "Expression":
        return _calculate(MULTIPLY, other, self, "*")

    def __truediv__(self, other: Any) -> "Expression":
        return _calculate(DIVIDE, self, other, "/")

    def __rtruediv__(self, other: Any) -> "Expression":
        return _calculate(DIVIDE, other, self, "/")

    def __neg__(self) -> "Expression":
        of = _number(self)
        return Expression("number", (*of._steps, (NEGATE, None)), f"(-{self})")

    def __abs__(self) -> "Expression":
        of = _number(self)
        return Expression("number", (*of._steps, (ABS, None)), f"abs({self})")

    def __mod__(self, by: int) -> "Expression":
        if self._kind != "key":
            raise InvalidArgument(f"{self} % {by!r}: only keys have a remainder, not {_kind_of(self)}")
        if not _is_integer(by) or not 0 < int(by) < KEYS:
            raise InvalidArgument(f"{self} % {by!r}: a remainder is by a whole number from 1 to 2**64 - 1")
        return Expression("key", (*self._steps, (CONSTANT, int(by)), (MODULO, None)), f"({self} % {by})")

    # -- comparisons -----------------------------------------------------------------------------------------------

    def __lt__(self, other: Any) -> "Expression":
        return _compare(LESS, self, other, "<")

    def __le__(self, other: Any) -> "Expression":
        return _compare(LESS_EQUAL, self, other, "<=")

    def __gt__(self, other: Any) -> "Expression":
        return _compare(GREATER, self, other, ">")

    def __ge__(self, other: Any) -> "Expression":
        return _compare(GREATER_EQUAL, self, other, ">=")

    def __eq__(self, other: Any) -> "Expression":  # type: ignore[override]
        return _compare(EQUAL, self, other, "==")

    def __ne__(self, other: Any) -> "Expression":  # type: ignore[override]
        return _compare(NOT_EQUAL, self, other, "!=")

    # -- conditions ------------------------------------------------------------------------------------------------

    def __and__(self, other: Any) -> "Expression":
        return _combine(AND, self, other, "&")

    def __rand__(self, other: Any) -> "Expression":
        return _combine(AND, other, self, "&")

    def __or__(self, other: Any) -> "Expression":
        return _combine(OR, self, other, "|")

    def __ror__(self, other: Any) -> "Expression":
        return _combine(OR, other, self, "|")

    def __invert__(self) -> "Expression":
        of = _condition(self, f"~{self}")
        return Expression("condition", (*of._steps, (NOT, None)), f"~{self}")


class Row:
    """The numbers of a row, in expressions: ``wl.row[3]``, ``wl.row.norm()``; see docs/guide/functions.md."""

    __slots__ = ()
    __iter__ = None  # it has as many numbers as the object's rows

    def __repr__(self) -> str:
        return "wl.row"

    def __getitem__(self, column: int) -> Expression:
        """The number in that column; -1 is the last."""
        if not _is_integer(column):
            raise InvalidArgument(f"wl.row[{column!r}]: a column is a whole number")
        return Expression("number", ((COLUMN, int(column)),), f"wl.row[{column}]")

    def norm(self) -> Expression:
        """The square root of the sum of the squares."""
        return Expression("number", ((NORM, None),), "wl.row.norm()")

    def sum(self) -> Expression:
        """The sum of the numbers."""
        return Expression("number", ((SUM, None),), "wl.row.sum()")

    def mean(self) -> Expression:
        """The mean of the numbers."""
        return Expression("number", ((MEAN, None),), "wl.row.mean()")

    def min(self) -> Expression:
        """The smallest number; NaN if one of them is NaN."""
        return Expression("number", ((MIN, None),), "wl.row.min()")

    def max(self) -> Expression:
        """The largest number; NaN if one of them is NaN."""
        return Expression("number", ((MAX, None),), "wl.row.max()")

    def absmax(self) -> Expression:
        """The largest absolute value; NaN if one of them is NaN."""
        return Expression("number", ((ABSMAX, None),), "wl.row.absmax()")

    @property
    def updates(self) -> Expression:
        """How often the row was updated; for tables only."""
        return Expression("number", ((UPDATES, None),), "wl.row.updates")


key = Expression("key", ((KEY, None),), "wl.key")
row = Row()


def encode(expression: Any, kind: Kind, width: int, what: str) -> bytes:
    """The expression as it travels. `width`: numbers in a row."""
    if not isinstance(expression, Expression):
        raise InvalidArgument(f"{what}: expected an expression of wl.key and wl.row, saw {expression!r}")
    if kind == "number" and expression._kind == "key":
        expression = _number(expression)
    if expression._kind != kind:
        wanted = "a condition, which holds or does not" if kind == "condition" else "a number"
        raise InvalidArgument(f"{what}: expected {wanted}, saw {expression}, which is {_kind_of(expression)}")
    out = bytearray()
    for op, value in expression._steps:
        out.append(op)
        if op == COLUMN:
            assert isinstance(value, int)
            if not -width <= value < width:
                raise InvalidArgument(f"{what}: column {value} of rows with {width}")
            out += struct.pack("<I", value % width)
        elif op == CONSTANT:
            out += struct.pack("<Q", value)
        elif op == NUMBER:
            out += struct.pack("<d", value)
    return bytes(out)


def _is_integer(value: object) -> bool:
    return isinstance(value, numbers.Integral | np.integer) and not isinstance(value, bool | np.bool_)


def _kind_of(expression: Expression) -> str:
    return {"number": "a number", "key": "a key", "condition": "true or false"}[expression._kind]


def _number(value: Any) -> Expression:
    """A number, or a key as one."""
    if isinstance(value, Expression):
        if value._kind == "condition":
            raise InvalidArgument(f"{value} is true or false and no number")
        if value._kind == "number":
            return value
        return Expression("number", (*value._steps, (AS_NUMBER, None)), value._text)
    if isinstance(value, bool | np.bool_) or not isinstance(value, numbers.Real | np.number):
        raise InvalidArgument(f"expected a number or an expression of wl.key and wl.row, saw {value!r}")
    try:
        return Expression("number", ((NUMBER, float(value)),), repr(value))
    except OverflowError:
        raise InvalidArgument(f"{value!r} does not fit a float64") from None


def _calculate(op: int, left: Any, right: Any, sign: str) -> Expression:
    a, b = _number(left), _number(right)
    return Expression("number", (*a._steps, *b._steps, (op, None)), f"({a} {sign} {b})")


def _compare(op: int, left: Expression, right: Any, sign: str) -> Expression:
    if left._kind == "condition" or (isinstance(right, Expression) and right._kind == "condition"):
        raise InvalidArgument(f"{left} {sign} {right}: conditions are combined with & and |, not compared")
    text = f"({left} {sign} {right!r})"
    if left._kind == "key" and not isinstance(right, Expression):
        return _compare_key(op, left, right, text)
    if not (left._kind == "key" and isinstance(right, Expression) and right._kind == "key"):
        left, right = _number(left), _number(right)
    return Expression("condition", (*left._steps, *right._steps, (op, None)), text)


def _compare_key(op: int, left: Expression, value: Any, text: str) -> Expression:
    """Compares a key with a constant, exactly."""
    if isinstance(value, float | np.floating) and float(value).is_integer():
        value = int(value)
    if not _is_integer(value):
        raise InvalidArgument(f"{text}: a key is compared with a whole number, not {value!r}")
    constant = int(value)
    if -(KEYS // 2) <= constant < 0 and op in (EQUAL, NOT_EQUAL):
        constant += KEYS  # keys are bit patterns
    elif constant < 0:
        raise InvalidArgument(f"{text}: keys are ordered as unsigned numbers, 0 to 2**64 - 1")
    if constant >= KEYS:
        return Expression("condition", ((TRUE if HOLDS[op](0, constant) else FALSE, None),), text)
    return Expression("condition", (*left._steps, (CONSTANT, constant), (op, None)), text)


def _condition(value: Any, text: str) -> Expression:
    if isinstance(value, bool | np.bool_):
        return Expression("condition", ((TRUE if value else FALSE, None),), repr(value))
    if not isinstance(value, Expression) or value._kind != "condition":
        raise InvalidArgument(
            f"{text}: & and | and ~ combine conditions, and {value!r} is none; put comparisons in parentheses"
        )
    return value


def _combine(op: int, left: Any, right: Any, sign: str) -> Expression:
    text = f"({left!r} {sign} {right!r})"
    a, b = _condition(left, text), _condition(right, text)
    return Expression("condition", (*a._steps, *b._steps, (op, None)), text)


__all__ = ["Expression", "Row", "encode", "key", "row"]
