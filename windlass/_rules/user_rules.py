"""Rules of the user's own: functions that a server calls with the arrays of a shard.

    @wl.rule(state=("momentum",))
    def heavy_ball(w, g, momentum, lr, beta=0.9):
        momentum *= beta
        momentum += g
        w -= lr * momentum

    w = cluster.tensor("w", (784, 10), rule=heavy_ball(lr=0.1))

The names of the parameters say what they are: ``w`` and ``g``, names of state, and ``count``. All others are numbers
that travel with a push.
"""

import dataclasses
import inspect
import json
from collections.abc import Callable, Sequence
from typing import TYPE_CHECKING, Any, ClassVar, Literal, overload

import numpy as np

from windlass import _core
from windlass._errors import InvalidArgument
from windlass._extras import need_torch
from windlass._rules.rule import OPTIONS, Rule

if TYPE_CHECKING:
    from windlass._rules.user_code import RunningCall

_NUMBERS_MAX = 7
_VECTORS_MAX = 8
_ROW_STATE_MAX = 16
_GIVEN = ("w", "g", "count")
Layout = tuple[int, int, int, bool, bool, bool]


@dataclasses.dataclass(frozen=True)
class UserRule(Rule):
    """A rule that servers find by its module and name."""

    def _name(self, shape: tuple[int, ...]) -> str:
        """The name that servers find it by, and after a space further options as JSON."""
        raise NotImplementedError

    def _layout(self, shape: tuple[int, ...]) -> Layout:
        """State arrays, numbers per row and per shard; whether it needs the whole tensor, whole rows, an init."""
        raise NotImplementedError

    @property
    def _found(self) -> object:
        """The object that servers find by its name."""
        raise NotImplementedError

    @property
    def _is_here(self) -> bool:
        """Whether this process can run it."""
        return True

    def _prepare(self, shape: tuple[int, ...], is_table: bool) -> None:
        """Called before an object is made whose server is this process."""

    @property
    def _kind(self) -> _core.RuleKind:
        return _core.RuleKind.FOREIGN

    def _spec(self, shape: tuple[int, ...]) -> _core.RuleSpec:
        return _core.RuleSpec(self._kind, **self._options(), foreign=(self._name(shape), *self._layout(shape)))


@overload
def rule(function: Callable[..., Any]) -> "RuleFunction": ...


@overload
def rule(
    function: None = None,
    *,
    state: Sequence[str] = (),
    row_state: Sequence[str] = (),
    init: Callable[..., None] | None = None,
    rows: bool = False,
    whole: bool = False,
    arrays: Literal["numpy", "torch"] = "numpy",
) -> "Callable[[Callable[..., Any]], RuleFunction]": ...


def rule(
    function: Callable[..., Any] | None = None,
    *,
    state: Sequence[str] = (),
    row_state: Sequence[str] = (),
    init: Callable[..., None] | None = None,
    rows: bool = False,
    whole: bool = False,
    arrays: Literal["numpy", "torch"] = "numpy",
) -> "RuleFunction | Callable[[Callable[..., Any]], RuleFunction]":
    """Makes a rule of a function, which servers call with arrays that it changes in place.

    The parameters are found by their names: ``w`` the weights, ``g`` the gradient of this update, names of `state` and
    `row_state`, ``count`` how many updates there were with this one. All others are numbers: those without a default
    are given when the rule is made, and each can travel with a push. One that is called ``lr`` is the step size. A
    function that returns an array returns the new weights.

    On a tensor it is called with some of the elements, (n,), of one shard; on a table with some rows, (n, dim), and
    ``count`` is (n, 1).

    state: names of float32 arrays to be kept, of the shape of ``w``; zeros, unless `init` sets them.
    row_state: names of numbers to be kept per row, (n,).
    init: a function of ``w`` and state that is called before the first update; on a table with the rows that are new.
    rows: ``w`` of a tensor is (n, row), whole rows.
    whole: needs all of the tensor, in its shape; it is then one shard, on one server.
    arrays: "torch" for torch tensors instead of numpy arrays; both are views of the same memory.

    The function may be compiled by numba; it then runs without the GIL. Servers in processes of their own import it:
    its module must be one that they allow (``windlass run --allow my_rules``).
    """

    def decorate(function: Callable[..., Any]) -> RuleFunction:
        return RuleFunction(function, tuple(state), tuple(row_state), init, rows, whole, arrays)

    return decorate if function is None else decorate(function)


class RuleFunction:
    """What ``@wl.rule`` makes of a function; called with its numbers it is a rule: ``heavy_ball(lr=0.1)``."""

    is_here = True  #: this process can run it

    def __init__(
        self,
        function: Callable[..., Any],
        state: tuple[str, ...],
        row_state: tuple[str, ...],
        init: Callable[..., None] | None,
        rows: bool,
        whole: bool,
        arrays: str,
    ) -> None:
        if not callable(function):
            raise InvalidArgument(f"rule: expected a function, not {function!r}")
        plain = getattr(function, "py_func", function)  # of what numba compiled
        self.__name__ = plain.__name__
        self.__qualname__ = plain.__qualname__
        self.__module__ = plain.__module__
        self.__doc__ = plain.__doc__
        self._what = f"rule {self.__qualname__!r}"
        self._check(state, row_state, arrays)
        if whole and (rows or row_state):
            raise InvalidArgument(f"{self._what}: whole and rows exclude each other")
        self._state, self._row_state = state, row_state
        self._whole, self._rows, self._arrays = whole, rows, arrays
        self._function = without_gil(function)
        self._init = None if init is None else without_gil(init)
        kept = (*state, *row_state)
        self._wants, numbers = self._parameters(plain, kept)
        self._init_wants: tuple[str, ...] = ()
        if init is not None:
            self._init_wants, more = self._parameters(getattr(init, "py_func", init), kept)
            if more or "g" in self._init_wants or "count" in self._init_wants:
                raise InvalidArgument(f"{self._what}: init takes w and state, not {', '.join(more) or 'g or count'}")
        # The step size comes first, where schedules look for it.
        self._numbers = tuple(sorted(numbers, key=lambda name: name != "lr"))
        if len(numbers) > _NUMBERS_MAX:
            raise InvalidArgument(f"{self._what}: at most {_NUMBERS_MAX} numbers, not {', '.join(numbers)}")
        self._rule = rule_of_numbers(self, numbers)

    def __call__(self, *args: float, **numbers: Any) -> "FunctionRule":
        try:
            return self._rule(*args, **numbers)
        except TypeError as error:
            has = ", ".join(self._numbers) or "none"
            raise InvalidArgument(f"{self._what}: {error}; its numbers are: {has}") from None

    def __repr__(self) -> str:
        return f"<rule {self.name}>"

    @property
    def name(self) -> str:
        """Its module and name."""
        return f"{self.__module__}:{self.__qualname__}"

    def _check(self, state: tuple[str, ...], row_state: tuple[str, ...], arrays: str) -> None:
        names = (*state, *row_state)
        if not all(isinstance(name, str) and name.isidentifier() for name in names) or len({*names}) != len(names):
            raise InvalidArgument(f"{self._what}: state and row_state must be names, each once, not {names}")
        if taken := sorted({*names} & {*_GIVEN}):
            raise InvalidArgument(f"{self._what}: state cannot be called {taken[0]!r}")
        if len(state) > _VECTORS_MAX or len(row_state) > _ROW_STATE_MAX:
            raise InvalidArgument(
                f"{self._what}: at most {_VECTORS_MAX} names of state and {_ROW_STATE_MAX} of row_state, "
                f"not {len(state)} and {len(row_state)}"
            )
        if arrays not in ("numpy", "torch"):
            raise InvalidArgument(f'{self._what}: arrays must be "numpy" or "torch", not {arrays!r}')

    def _parameters(
        self, function: Callable[..., Any], kept: tuple[str, ...]
    ) -> tuple[tuple[str, ...], dict[str, Any]]:
        """All parameters in order, and those that are numbers with their defaults."""
        parameters = inspect.signature(function).parameters
        numbers: dict[str, Any] = {}
        for name, parameter in parameters.items():
            if parameter.kind in (parameter.VAR_POSITIONAL, parameter.VAR_KEYWORD, parameter.POSITIONAL_ONLY):
                raise InvalidArgument(f"{self._what}: expected parameters with names, not {parameter}")
            if name in OPTIONS:
                raise InvalidArgument(f"{self._what}: {name} is an option of every rule, and cannot be a parameter")
            if name not in _GIVEN and name not in kept:
                numbers[name] = parameter.default
        if "w" not in parameters:
            raise InvalidArgument(f"{self._what}: expected a parameter w, the weights")
        return tuple(parameters), numbers

    def layout(self) -> Layout:
        """As in Rule._spec()."""
        rows = self._rows or bool(self._row_state)
        return (len(self._state), len(self._row_state), 0, self._whole, rows, self._init is not None)

    def bind(self, layout: Layout, shape: Sequence[int] | None) -> "Callable[[RunningCall], None]":
        """The function that answers calls for an object. `layout`: what the object's maker expects it to keep."""
        if layout != self.layout():
            raise InvalidArgument(
                f"{self._what} keeps {self.layout()} here (arrays, numbers per row and shard, whole, rows, init), and "
                f"{layout} where the object is made: the two have different versions of it"
            )
        return _Bound(self, tuple(shape) if shape is not None and self._whole else None)

    def compile(self, dims: int) -> None:
        """Compiles it, if numba can, for arrays of so many dimensions, so that no push has to wait for that."""
        if not hasattr(self._function, "py_func"):
            return
        shape = (2,) * dims
        known: dict[str, Any] = {name: np.zeros(shape, np.float32) for name in ("w", "g", *self._state)}
        known |= dict(zip(self._row_state, np.zeros((2, len(self._row_state)), np.float32).T, strict=True))
        known |= dict.fromkeys(self._numbers, 0.5)
        known["count"] = np.ones((2, 1), np.int64) if dims == 2 and not self._whole else 1
        if self._init is not None:
            self._init(*(known[name] for name in self._init_wants))
        self._function(*(known[name] for name in self._wants))


def without_gil(function: Callable[..., Any]) -> Callable[..., Any]:
    """A function that numba compiled, so that it releases the GIL; any other function as it is."""
    if not hasattr(function, "py_func") or not hasattr(function, "targetoptions"):
        return function
    options = function.targetoptions
    if options.get("nogil"):
        return function
    import numba

    again: Callable[..., Any] = numba.jit(**{**options, "nopython": True, "nogil": True})(function.py_func)
    return again


class _Bound:
    """A rule of one object: turns a call's arrays into arguments."""

    def __init__(self, of: RuleFunction, shape: tuple[int, ...] | None) -> None:
        self._of, self._shape = of, shape

    def __call__(self, running: "RunningCall") -> None:
        of, call = self._of, running.native
        count, hyper = call.count, call.hyper
        counts: Any = call.counts
        if counts is not None or of._rows or of._row_state:
            shape: tuple[int, ...] = (call.rows, call.row)
        else:
            shape = (call.rows * call.row,) if self._shape is None else self._shape
        known: dict[str, Any] = {"w": call.w.reshape(shape), "g": call.g.reshape(shape)}
        known |= {name: array.reshape(shape) for name, array in zip(of._state, call.state, strict=True)}
        if of._row_state:
            known |= dict(zip(of._row_state, call.row_scalars.T, strict=True))
        del call
        if count == 0:
            self._begin(known)
            return
        if of._init is not None and counts is not None and (counts == 1).any():
            new = counts == 1
            some = {name: array[new] for name, array in known.items()}
            self._begin(some)
            for name in (*of._state, *of._row_state):
                known[name][new] = some[name]
        known |= zip(of._numbers, hyper, strict=False)
        known["count"] = count if counts is None else counts.astype(np.int64)[:, None]
        result = of._function(*(self._argument(known[name]) for name in of._wants))
        if result is None:
            return
        new_w = np.asarray(result)
        if new_w.shape != shape:
            raise ValueError(f"returned an array of shape {new_w.shape}, expected {shape}")
        known["w"][...] = new_w

    def _begin(self, known: dict[str, Any]) -> None:
        if self._of._init is not None:
            self._of._init(*(self._argument(known[name]) for name in self._of._init_wants))

    def _argument(self, value: Any) -> Any:
        if self._of._arrays != "torch" or not isinstance(value, np.ndarray):
            return value
        return need_torch("rule(arrays='torch')").from_numpy(value)


def rule_of_numbers(of: RuleFunction, numbers: dict[str, Any]) -> "type[FunctionRule]":
    """The rules of a function: its numbers, by name, with their defaults or `inspect.Parameter.empty`."""
    fields: list[Any] = [
        (name, float) if default is inspect.Parameter.empty else (name, float, default)
        for name, default in numbers.items()
    ]
    namespace = {"_function": of, "_steps": "lr" in numbers}
    made: type[FunctionRule] = dataclasses.make_dataclass(
        of.__name__, fields, bases=(FunctionRule,), frozen=True, namespace=namespace
    )
    return made


@dataclasses.dataclass(frozen=True)
class FunctionRule(UserRule):
    """A function with its numbers."""

    _function: ClassVar[RuleFunction]

    @property
    def _state(self) -> tuple[str, ...]:
        of = self._function
        return (*of._state, *(("row_state",) if of._row_state else ()))

    def _state_shapes(self, shape: tuple[int, ...], shards: int) -> dict[str, tuple[int, ...]]:
        of = self._function
        shapes: dict[str, tuple[int, ...]] = dict.fromkeys(of._state, shape)
        if of._row_state:
            shapes["row_state"] = (*shape[:1], len(of._row_state))
        return shapes

    def _numbers(self) -> tuple[float, ...]:
        return tuple(getattr(self, name) for name in self._function._numbers)

    def _name(self, shape: tuple[int, ...]) -> str:
        if not self._function._whole:
            return self._function.name
        return f"{self._function.name} {json.dumps({'shape': list(shape)}, separators=(',', ':'))}"

    def _layout(self, shape: tuple[int, ...]) -> Layout:
        return self._function.layout()

    @property
    def _found(self) -> object:
        return self._function

    @property
    def _is_here(self) -> bool:
        return self._function.is_here

    def _prepare(self, shape: tuple[int, ...], is_table: bool) -> None:
        of = self._function
        of.compile(len(shape) if of._whole else 2 if is_table or of._rows or of._row_state else 1)
