"""Read pickled numpy arrays of numbers, and nothing else.

A pickle is a program. Its opcodes are first checked against those of arrays, so that it can neither name a
function of its choice, nor nest, nor fill memory; then it is run with stand-ins for numpy's functions, which
check their arguments.
"""

import io
import pickle
import pickletools
import re
from typing import Any, ClassVar

import numpy as np

MAX_INSTRUCTIONS = 300  # an array has about fifty
# What pickles of arrays of numbers consist of, in the protocols 3 to 5 of Python 3.
NAMES_OF_INSTRUCTIONS = """
    PROTO FRAME STOP MARK GLOBAL STACK_GLOBAL REDUCE BUILD NONE NEWTRUE NEWFALSE
    LONG1 BININT BININT1 BININT2 SHORT_BINUNICODE BINUNICODE BINBYTES SHORT_BINBYTES BINBYTES8 BYTEARRAY8
    TUPLE TUPLE1 TUPLE2 TUPLE3 EMPTY_TUPLE BINPUT LONG_BINPUT MEMOIZE BINGET LONG_BINGET
"""
INSTRUCTIONS = frozenset(NAMES_OF_INSTRUCTIONS.split())
# What damaged bytes raise is not documented: pickle names the first and "others".
ERRORS = (pickle.UnpicklingError, ValueError, TypeError, LookupError, EOFError)
ERRORS += (AttributeError, OverflowError, MemoryError)


def unpickle_array(data: bytes) -> np.ndarray:
    """Read a pickled array of numbers."""
    try:
        _check_instructions(data)
        found = _ArrayUnpickler(io.BytesIO(data)).load()
    except ERRORS as error:
        raise ValueError(f"not a pickled array of numbers: {error}") from error
    array = getattr(found, "array", None)
    if not isinstance(array, np.ndarray):
        raise ValueError(f"not a pickled array of numbers, but of type {type(found).__name__}")
    return array


def _check_instructions(data: bytes) -> None:
    for count, (instruction, argument, _) in enumerate(pickletools.genops(data)):
        if instruction.name not in INSTRUCTIONS:
            raise ValueError(f"it has the opcode {instruction.name}")
        # Memory is allocated for all places before one.
        is_place = instruction.name in ("BINPUT", "LONG_BINPUT")
        if count > MAX_INSTRUCTIONS or (is_place and int(argument) > MAX_INSTRUCTIONS):
            raise ValueError(f"it has more than {MAX_INSTRUCTIONS} instructions")


class _NumberType:
    def __init__(self, name: str, *flags: Any):
        if not re.fullmatch(r"[<>=|]?[fiu][1248]", name):
            raise pickle.UnpicklingError(f"{name} is not a type of numbers")
        self.dtype = np.dtype(name)

    def __setstate__(self, state: tuple) -> None:
        if state[1] in ("<", ">"):
            self.dtype = self.dtype.newbyteorder(state[1])


class _PickledArray:
    """What a pickled numpy array becomes, up to protocol 4 by its state, from 5 on by its arguments."""

    def __init__(self, *arguments: Any):
        self.array = _array(*arguments) if arguments[0] is not None else None  # None: for ndarray

    def __setstate__(self, state: tuple) -> None:
        _, shape, number_type, fortran_order, data = state
        self.array = _array(data, number_type, shape, "F" if fortran_order else "C")


def _array(data: bytes, number_type: _NumberType, shape: tuple[int, ...], order: str) -> np.ndarray:
    return np.frombuffer(data, number_type.dtype).reshape(shape, order=order)


class _ArrayUnpickler(pickle.Unpickler):
    NAMES: ClassVar = {
        "_reconstruct": _PickledArray,
        "_frombuffer": _PickledArray,
        "dtype": _NumberType,
        "ndarray": None,
    }

    def find_class(self, module: str, name: str) -> Any:
        if name not in self.NAMES:
            raise pickle.UnpicklingError(f"it names {module}.{name}")
        return self.NAMES[name]
