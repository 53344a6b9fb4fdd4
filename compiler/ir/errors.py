"""Errors in a program that is being compiled or interpreted. An error with a package or module in parentheses is defined there.

CompileError
  AnnotationError   a value cannot have the annotation that a binding or an operator requires
  UnknownShape      (operators) a loop nest needs extents that the annotation of an operand does not have
  BadIndex          (operators) the interpreter finds an index outside its range
  ParseError        (parser) the text is not a program
  VerifyError       (verify) the program breaks a rule of the IR
  MismatchError     (interpreter) a value does not match its annotation
  InterpretError    (interpreter) a loop nest does something undefined, such as reading outside a buffer
"""

from __future__ import annotations


class CompileError(Exception):
    """Base class of errors in the program that is compiled, as opposed to errors in the compiler."""


class AnnotationError(CompileError):
    """Raised if deduction fails. If the value of a binding that the builder emits has no annotation, the builder adds the names of the
    function and of the binding (`within`)."""

    def within(self, function: str, binding: str) -> AnnotationError:
        return AnnotationError(f"in function {function!r}, binding {binding!r}: {self}")
