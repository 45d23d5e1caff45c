# SPDX-License-Identifier: Apache-2.0
"""One mechanism for touching vLLM: a :class:`Hook` names a symbol and what we expect of it, a :class:`Patch` replaces it.

Patches are idempotent (every process that vLLM forks or spawns runs them again), reversible, visible (the replacement carries
``__vllm_dflash__``, the original) and never import a module just to patch it: heavy modules are patched right after their own
import, by a finder at the front of ``sys.meta_path``.
"""

import dataclasses
import functools
import importlib
import importlib.abc
import importlib.machinery
import importlib.util
import inspect
import sys
from collections.abc import Callable, Sequence
from types import ModuleType
from typing import Any, Literal

MARK = "__vllm_dflash__"
Moment = Literal["load", "patch", "v1", "v2"]


@dataclasses.dataclass(frozen=True, slots=True)
class Hook:
    """A vLLM symbol that we rely on.

    ``path`` is ``"module:name"`` or ``"module:Class.name"``; ``params`` are the leading parameters that it must accept (empty:
    any). ``moment`` says when it is checked, see :mod:`vllm_dflash.hooks`.
    """

    path: str
    why: str
    until: str
    moment: Moment
    params: tuple[str, ...] = ()

    @property
    def module(self) -> str:
        """Dotted name of the module that defines the symbol."""
        return self.path.partition(":")[0]

    @property
    def name(self) -> str:
        """Name inside the module, possibly ``Class.name``."""
        return self.path.partition(":")[2]

    def problem(self) -> str | None:
        """None if vLLM has the symbol as expected, else one sentence: expected ..., found ..."""
        try:
            target = functools.reduce(getattr, self.name.split("."), importlib.import_module(self.module))
        except ImportError as error:
            return f"{self.path}: expected module {self.module}, found {error}"
        except AttributeError:
            return f"{self.path}: expected this name, found none"
        if not self.params:
            return None
        found = tuple(inspect.signature(original_of(target)).parameters)
        found = found[1:] if found[:1] == ("self",) else found
        if found[: len(self.params)] != self.params:
            return f"{self.path}: expected parameters beginning with {self.params}, found {found}"
        return None


@dataclasses.dataclass(frozen=True, slots=True)
class Patch:
    """Replace the symbol of ``hook`` by ``wrap(original)``; ``rebind`` lists modules that may hold the name by value."""

    hook: Hook
    wrap: Callable[[Any], Any]
    rebind: tuple[str, ...] = ()

    def install(self, on_problem: Callable[[str], None]) -> None:
        """Apply now where the modules are already imported, and after their import where they are not."""
        for module in (self.hook.module, *self.rebind):
            when_imported(module, lambda found: self._apply_soft(found, on_problem))

    def apply(self) -> bool:
        """Import the module and replace the symbol there and in ``rebind``; False if it was replaced before."""
        importlib.import_module(self.hook.module)
        return self._everywhere(self._replace)

    def undo(self) -> bool:
        """Put the original back wherever it was replaced; False if nothing was."""
        return self._everywhere(self._restore)

    def _everywhere(self, change: Callable[[ModuleType], bool]) -> bool:
        changed = [change(sys.modules[m]) for m in (self.hook.module, *self.rebind) if m in sys.modules]
        return any(changed)

    def _apply_soft(self, module: ModuleType, on_problem: Callable[[str], None]) -> None:
        try:
            problem = self.hook.problem()
            if problem is None:
                self._replace(module)
            else:
                on_problem(problem)
        except Exception as error:  # noqa: BLE001 - a plugin must never break the import of a vLLM module
            on_problem(f"{self.hook.path}: {type(error).__name__}: {error}")

    def _replace(self, module: ModuleType) -> bool:
        owner, name = self._owner(module)
        current = getattr(owner, name)
        if hasattr(current, MARK):
            return False
        replacement = self.wrap(current)
        setattr(replacement, MARK, current)
        static = isinstance(inspect.getattr_static(owner, name), staticmethod)
        setattr(owner, name, staticmethod(replacement) if static else replacement)
        return True

    def _restore(self, module: ModuleType) -> bool:
        owner, name = self._owner(module)
        current = getattr(owner, name)
        if not hasattr(current, MARK):
            return False
        original = getattr(current, MARK)
        static = isinstance(inspect.getattr_static(owner, name), staticmethod)
        setattr(owner, name, staticmethod(original) if static else original)
        return True

    def _owner(self, module: ModuleType) -> tuple[Any, str]:
        *parents, name = self.hook.name.split(".")
        return functools.reduce(getattr, parents, module), name


def original_of(symbol: Any) -> Any:
    """The symbol that a patch of ours replaced, or the symbol itself."""
    return getattr(symbol, MARK, symbol)


def when_imported(module: str, callback: Callable[[ModuleType], None]) -> None:
    """Call ``callback(module)`` now if the module is imported, else right after its import."""
    if module in sys.modules:
        callback(sys.modules[module])
        return
    finder = next((f for f in sys.meta_path if isinstance(f, _PostImportFinder)), None)
    if finder is None:
        finder = _PostImportFinder()
        sys.meta_path.insert(0, finder)
    finder.wanted.setdefault(module, []).append(callback)


class _PostImportFinder(importlib.abc.MetaPathFinder):
    """Runs callbacks after the import of wanted modules; invisible for all others."""

    def __init__(self) -> None:
        self.wanted: dict[str, list[Callable[[ModuleType], None]]] = {}

    def find_spec(
        self, fullname: str, path: Sequence[str] | None, target: ModuleType | None = None
    ) -> importlib.machinery.ModuleSpec | None:
        """Return the real spec with callbacks attached; disarmed for this name first, so that the look-up below terminates."""
        del path, target
        callbacks = self.wanted.pop(fullname, None)
        if callbacks is None:
            return None
        spec = importlib.util.find_spec(fullname)
        if spec is None or spec.loader is None:
            self.wanted[fullname] = callbacks
            return None
        execute = spec.loader.exec_module

        def exec_module(module: ModuleType) -> None:
            try:
                execute(module)
            except BaseException:
                self.wanted[fullname] = callbacks  # a failed import may be tried again
                raise
            for callback in callbacks:
                callback(module)

        spec.loader.exec_module = exec_module  # type: ignore[method-assign]  # one instance, not the loader's class
        return spec
