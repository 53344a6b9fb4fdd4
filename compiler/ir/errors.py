"""What can be wrong with a program that is being compiled or interpreted.

CompileError
  AnnotationError   a value cannot have the annotation that is asked of it
  ParseError        (parser) the text is not a program
  VerifyError       (verify) a rule of the IR is broken
  MismatchError     (interpreter) a value does not have the annotation that was promised
  InterpretError    (interpreter) a loop nest does something undefined, such as reading outside of a buffer
"""

from __future__ import annotations


class CompileError(Exception):
    """The program, not the compiler, is at fault."""


class AnnotationError(CompileError):
    """Deduction failed. The builder adds the function and the binding at which it did."""

    def within(self, function: str, binding: str) -> AnnotationError:
        return AnnotationError(f"in function {function!r}, binding {binding!r}: {self}")
