"""Runs the user's script as Python would: as `__main__`, in this thread, with its own arguments."""

from __future__ import annotations

import importlib
import importlib.util
import io
import sys
import traceback
from collections.abc import Sequence
from types import CodeType, ModuleType, TracebackType

INTERRUPTED = 130


def run(script: str, argv: Sequence[str], module: bool) -> int:
    """Runs it to its end; returns its exit code. An exception's traceback is printed, from the script's own line on.

    Not by runpy, which takes `__main__` away when the script ends: what the engine still holds may name it.
    """
    try:
        code, main = _load_module(script) if module else _load_file(script)
        sys.modules["__main__"] = main
        sys.argv = [str(main.__file__), *argv]
        exec(code, main.__dict__)
    except SystemExit as error:
        return _exit_code(error)
    except KeyboardInterrupt:
        return INTERRUPTED
    except BaseException as error:
        show(error)
        return 1
    return 0


def show(error: BaseException) -> None:
    """Prints the traceback without this package's frames at its top, by the hook that the script may have set."""
    shown = error.with_traceback(_from_script(error.__traceback__))
    try:
        sys.excepthook(type(shown), shown, shown.__traceback__)
    except Exception:
        traceback.print_exception(shown)


def _load_file(path: str) -> tuple[CodeType, ModuleType]:
    main = ModuleType("__main__")
    main.__file__ = path
    main.__dict__["__builtins__"] = __builtins__
    with io.open_code(path) as file:
        return compile(file.read(), path, "exec", dont_inherit=True), main


def _load_module(name: str) -> tuple[CodeType, ModuleType]:
    spec = importlib.util.find_spec(name)
    if spec is not None and spec.submodule_search_locations is not None:
        spec = importlib.util.find_spec(f"{name}.__main__")
    code = spec.loader.get_code(spec.name) if spec is not None and spec.loader is not None else None  # type: ignore[attr-defined]
    if spec is None or code is None:
        raise SystemExit(f"pipe-launch: module '{name}' is not found or cannot be run; -m takes a module, or a package with __main__.py")
    main = ModuleType("__main__")
    main.__dict__.update(__file__=spec.origin, __spec__=spec, __package__=spec.parent, __loader__=spec.loader, __builtins__=__builtins__)
    return code, main


def _exit_code(error: SystemExit) -> int:
    """As Python does: nothing is 0, a number itself, anything else is printed and 1."""
    if error.code is None or isinstance(error.code, int):
        return error.code or 0
    print(error.code, file=sys.stderr)
    return 1


def _from_script(trace: TracebackType | None) -> TracebackType | None:
    while trace is not None and trace.tb_frame.f_code.co_filename == __file__:
        trace = trace.tb_next
    return trace
