# SPDX-License-Identifier: Apache-2.0
"""The patch mechanism on modules made for the test: what may be replaced, when, and how it is taken back."""

import functools
import pickle
import sys

import pytest

from vllm_dflash.patching import Hook, Patch, original_of, when_imported

SOURCE = """
def speak(name, loud=False):
    return f"hello {name}"

class Config:
    @staticmethod
    def read(config):
        return dict(config)

    def write(self, target):
        return target
"""

BROKEN = """
import os
if not os.path.exists({ready!r}):
    raise RuntimeError("first import fails")
"""


def hook(path: str, *params: str) -> Hook:
    return Hook(path=path, moment="load", params=params, why="test", until="test")


@pytest.fixture
def package(tmp_path, monkeypatch):
    """An importable module `patch_me` that nobody has imported, and its user `patch_user`, which holds a name by value."""
    (tmp_path / "patch_me.py").write_text(SOURCE)
    (tmp_path / "patch_user.py").write_text("from patch_me import speak\n")
    (tmp_path / "patch_broken.py").write_text(BROKEN.format(ready=str(tmp_path / "ready")))
    monkeypatch.syspath_prepend(str(tmp_path))
    finders = list(sys.meta_path)
    yield tmp_path
    sys.meta_path[:] = finders
    for name in ("patch_me", "patch_user", "patch_broken"):
        sys.modules.pop(name, None)


def louder(original):
    @functools.wraps(original)
    def speak(*args, **kwargs):
        return original(*args, **kwargs).upper()

    return speak


SPEAK = hook("patch_me:speak", "name")


def test_apply_replaces_once_and_undo_restores(package):
    """Breaks when a second registration wraps the wrapper, or undo leaves one of two bindings."""
    import patch_me
    import patch_user

    before = patch_me.speak
    patch = Patch(SPEAK, louder, rebind=("patch_user",))
    assert patch.apply() is True
    assert patch.apply() is False
    assert patch_me.speak("Ada") == patch_user.speak("Ada") == "HELLO ADA"
    assert patch_me.speak.__name__ == "speak"
    assert original_of(patch_me.speak) is before
    assert patch.undo() is True
    assert patch_me.speak is patch_user.speak is before
    assert patch.undo() is False


def test_rebinding_imports_nothing(package):
    """Breaks when patching a light module drags a heavy one in."""
    Patch(SPEAK, louder, rebind=("patch_user",)).apply()
    assert "patch_user" not in sys.modules


def test_install_waits_for_the_import(package):
    """Breaks when the finder runs too late, or imports the module itself."""
    problems = []
    Patch(SPEAK, louder, rebind=("patch_user",)).install(problems.append)
    assert "patch_me" not in sys.modules
    import patch_user

    assert patch_user.speak("Ada") == "HELLO ADA"
    assert problems == []


def test_install_twice_before_the_import_wraps_once(package):
    """Breaks when vLLM loads its plugins twice before it imports the runner: the wrapper would run twice."""
    for _ in range(2):
        Patch(SPEAK, louder).install(pytest.fail)
    import patch_me

    assert not hasattr(original_of(patch_me.speak), "__vllm_dflash__")


def test_a_staticmethod_stays_one_and_pickles(package):
    """Breaks when the wrapper loses its qualified name: vLLM pickles a partial over it on its way to worker processes."""
    import patch_me

    def wrap(original):
        @functools.wraps(original)
        def read(config, extra=None):
            return {**original(config), "ours": True}

        return read

    patch = Patch(hook("patch_me:Config.read", "config"), wrap)
    patch.apply()
    assert patch_me.Config.read({"a": 1}) == patch_me.Config().read({"a": 1}) == {"a": 1, "ours": True}
    travelled = pickle.loads(pickle.dumps(functools.partial(patch_me.Config.read, extra=1)))
    assert travelled({}) == {"ours": True}
    patch.undo()
    assert patch_me.Config().read({"a": 1}) == {"a": 1}


def test_a_problem_leaves_the_module_as_it_is(package):
    """Breaks when a function whose signature changed is wrapped all the same."""
    problems = []
    Patch(hook("patch_me:speak", "person"), louder).install(problems.append)
    import patch_me

    assert patch_me.speak("Ada") == "hello Ada"
    assert problems == ["patch_me:speak: expected parameters beginning with ('person',), found ('name', 'loud')"]


def test_a_failing_wrap_is_reported_not_raised(package):
    """Breaks when an error of ours makes the import of a vLLM module fail."""
    problems = []

    def wrap(original):
        raise KeyError("oops")

    Patch(SPEAK, wrap).install(problems.append)
    import patch_me

    assert patch_me.speak("Ada") == "hello Ada"
    assert problems == ["patch_me:speak: KeyError: 'oops'"]


def test_a_failed_import_may_be_tried_again(package):
    """Breaks when the callback is lost with the first, failed import."""
    seen = []
    when_imported("patch_broken", seen.append)
    with pytest.raises(RuntimeError, match="first import fails"):
        __import__("patch_broken")
    assert seen == []
    (package / "ready").touch()
    module = __import__("patch_broken")
    assert seen == [module]


def test_callback_runs_now_when_imported_already(package):
    """Breaks when the plugin is loaded after the runner."""
    import patch_me

    seen = []
    when_imported("patch_me", seen.append)
    assert seen == [patch_me]


def test_a_missing_module_stays_missing(package):
    """Breaks when the finder turns an ordinary ModuleNotFoundError into something else."""
    when_imported("patch_nowhere", pytest.fail)
    with pytest.raises(ModuleNotFoundError, match="patch_nowhere"):
        __import__("patch_nowhere")


@pytest.mark.parametrize(
    ("path", "params", "problem"),
    [
        ("patch_me:speak", ("name",), None),
        ("patch_me:speak", ("name", "loud"), None),
        ("patch_me:speak", (), None),
        ("patch_me:Config.write", ("target",), None),
        ("patch_me:speak", ("loud",), "expected parameters beginning with ('loud',), found ('name', 'loud')"),
        ("patch_me:shout", ("name",), "expected this name, found none"),
        ("patch_me:Config.erase", ("name",), "expected this name, found none"),
        ("patch_gone:speak", ("name",), "expected module patch_gone, found No module named 'patch_gone'"),
    ],
)
def test_a_hook_says_what_differs(package, path, params, problem):
    """Breaks when a moved or changed symbol of vLLM passes the check."""
    found = hook(path, *params).problem()
    assert found == (problem and f"{path}: {problem}")


def test_a_hook_sees_through_our_own_patch(package):
    """Breaks when `doctor`, or a second process, reports our own replacement as a difference."""

    def wrap(original):
        def speak(*args):
            return original(*args)

        return speak

    Patch(SPEAK, wrap).apply()
    assert SPEAK.problem() is None
