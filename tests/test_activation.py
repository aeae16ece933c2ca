"""When the plugin is on, and when torch gets patched: each case in an interpreter of its own.

Most cases use a tiny stand-in for torch that reports how far its import has come, and one for
`fsdp_skip1.patch` that notes what it was asked to do. The cases at the end use the real torch.
"""

from __future__ import annotations

import os
import subprocess
import sys
import textwrap

import pytest

FSDP2 = "torch.distributed.fsdp._fully_shard"

FAKE_TORCH = {
    "torch/__init__.py": """
        import builtins
        at = getattr(builtins, "at", lambda point: None)
        at("torch:start")
        at("torch:end")
        """,
    "torch/distributed/__init__.py": "",
    "torch/distributed/fsdp/__init__.py": """
        from ._fully_shard import fully_shard
        from . import later
        """,
    "torch/distributed/fsdp/later.py": "",
    "torch/distributed/fsdp/_fully_shard/__init__.py": """
        from torch import at
        at("fsdp2:start")
        from ._fully_shard import fully_shard
        at("fsdp2:end")
        """,
    "torch/distributed/fsdp/_fully_shard/_fully_shard.py": """
        from torch import at
        at("fsdp2:middle")
        def fully_shard(): pass
        """,
}

PRELUDE = f"""
import builtins, sys, threading, types, warnings
FSDP2 = {FSDP2!r}
patch = types.ModuleType("fsdp_skip1.patch")
patch.calls, patch.answer, patch.error, patch.live, patch.during = [], True, None, False, None
def install(*, zero_copy):
    # What the real one relies on: FSDP2 is there, with everything in it.
    assert "fully_shard" in vars(sys.modules[FSDP2])
    patch.calls.append(("install", zero_copy))
    if patch.during: patch.during()
    if patch.error: raise patch.error
    patch.live = patch.answer
    return patch.answer
def remove():
    patch.calls.append(("remove",))
    if patch.error: raise patch.error
    patch.live = False
patch.install, patch.remove = install, remove
sys.modules["fsdp_skip1.patch"] = patch

def at_point(point, action):
    builtins.at = lambda now: action() if now == point else None
def observers():
    return [f for f in sys.meta_path if type(f).__module__ == "fsdp_skip1.activation"]
def heard(record):
    return [str(w.message) for w in record if "fsdp_skip1" in str(w.message)]
"""


@pytest.fixture
def python(tmp_path):
    """Run code in a clean interpreter with the stand-ins; its output, or the test fails."""
    for name, text in FAKE_TORCH.items():
        file = tmp_path / name
        file.parent.mkdir(parents=True, exist_ok=True)
        file.write_text(textwrap.dedent(text))

    def run(code, *options, prelude=PRELUDE, **variables):
        return _run(prelude + textwrap.dedent(code), options, {"PYTHONPATH": tmp_path, **variables})

    return run


def _run(code, options=(), variables=()):
    return _start([*options, "-c", code], variables)


def _start(arguments, variables):
    environment = {
        key: value
        for key, value in os.environ.items()
        if key not in ("FSDP_SKIP1", "TORCH_DEVICE_BACKEND_AUTOLOAD", "PYTHONWARNINGS")
    }
    # What a run from a source tree needs in front of it, PYTHONPATH of our own included.
    paths = [str(dict(variables).get("PYTHONPATH", "")), os.environ.get("PYTHONPATH", "")]
    environment.update({key: str(value) for key, value in dict(variables).items()})
    environment["PYTHONPATH"] = os.pathsep.join(filter(None, paths))
    done = subprocess.run(
        [sys.executable, *arguments],
        env=environment,
        capture_output=True,
        text=True,
        timeout=120,
        check=False,
    )
    assert done.returncode == 0, done.stdout + done.stderr
    return done


# --- import -----------------------------------------------------------------------------------


def test_import_is_cheap_and_quiet(python):
    done = python(
        """
        before = set(sys.modules)
        import fsdp_skip1
        new = {name for name in set(sys.modules) - before if not name.startswith("fsdp_skip1")}
        print(*sorted(new))
        assert fsdp_skip1.is_enabled()
        assert len(observers()) == 1
        """,
        # threading, types and warnings of the usual prelude would hide what the package imports.
        prelude="""
import sys
def observers():
    return [f for f in sys.meta_path if type(f).__module__ == "fsdp_skip1.activation"]
""",
    )
    # Nothing but itself: not even threading, functools or warnings.
    assert done.stdout.split() == ["__future__", "_fsdp_skip1_autoload"]
    assert done.stderr == ""


def test_import_before_torch(python):
    python(
        """
        import fsdp_skip1
        assert "wrapt" not in sys.modules
        import torch
        assert "wrapt" in sys.modules and not observers()
        assert FSDP2 not in sys.modules and patch.calls == []
        import torch.distributed.fsdp
        assert patch.calls == [("install", True)]
        assert fsdp_skip1.is_enabled()
        spec = sys.modules[FSDP2].__spec__
        assert type(spec.loader).__name__ == "SourceFileLoader", spec.loader
        """
    )


def test_import_after_fsdp2(python):
    python(
        """
        import torch.distributed.fsdp, fsdp_skip1
        assert patch.calls == [("install", True)]
        assert not observers() and "wrapt" not in sys.modules
        """
    )


def test_import_between_torch_and_fsdp2(python):
    python(
        """
        import torch, fsdp_skip1
        assert patch.calls == [] and not observers()
        import torch.distributed.fsdp
        assert patch.calls == [("install", True)]
        """
    )


@pytest.mark.parametrize("point", ["torch:start", "torch:end", "fsdp2:start", "fsdp2:middle"])
def test_import_within_the_import_of_torch(python, point):
    python(
        f"""
        def action():
            import fsdp_skip1
            assert patch.calls == []
        at_point({point!r}, action)
        import torch.distributed.fsdp
        assert "fsdp_skip1" in sys.modules
        assert patch.calls == [("install", True)], patch.calls
        assert not observers()
        """
    )


def test_import_at_the_end_of_the_import_of_fsdp2(python):
    python(
        """
        at_point("fsdp2:end", lambda: __import__("fsdp_skip1"))
        import torch.distributed.fsdp
        assert patch.calls == [("install", True)]
        """
    )


def test_import_while_another_thread_imports_fsdp2(python):
    python(
        """
        inside, go_on = threading.Event(), threading.Event()
        at_point("fsdp2:middle", lambda: (inside.set(), go_on.wait(30)))
        thread = threading.Thread(target=__import__, args=("torch.distributed.fsdp",))
        thread.start()
        inside.wait(30)
        threading.Timer(0.2, go_on.set).start()
        import fsdp_skip1
        assert patch.calls == [("install", True)], patch.calls
        thread.join(30)
        """
    )


def test_import_from_several_threads(python):
    python(
        """
        start = threading.Barrier(8)
        def work(number):
            start.wait()
            __import__("fsdp_skip1" if number % 2 else "torch.distributed.fsdp")
        threads = [threading.Thread(target=work, args=(n,)) for n in range(8)]
        for thread in threads: thread.start()
        for thread in threads: thread.join(30); assert not thread.is_alive()
        import fsdp_skip1
        assert fsdp_skip1.is_enabled()
        assert patch.live and set(patch.calls) == {("install", True)}
        assert not observers()
        """
    )


def test_import_twice_keeps_a_disable(python):
    python(
        """
        import fsdp_skip1
        fsdp_skip1.disable()
        del sys.modules["fsdp_skip1"]
        import fsdp_skip1
        assert not fsdp_skip1.is_enabled()
        """
    )


def test_import_anew_sends_the_first_copy_home(python):
    python(
        """
        import fsdp_skip1 as first
        import torch  # the first one's hook is waiting for FSDP2 now
        def forget():
            for name in [n for n in sys.modules if n.partition(".")[0] == "fsdp_skip1"]:
                del sys.modules[name]
        forget()
        sys.modules["fsdp_skip1.patch"] = patch
        import fsdp_skip1 as second
        assert second is not first
        import torch.distributed.fsdp
        assert patch.calls == [("install", True)]
        # And once more, now that the second one is at work: it lets go before the third takes over.
        forget()
        third_patch = types.ModuleType("fsdp_skip1.patch")
        third_patch.live = False
        def install(*, zero_copy):
            assert not patch.live
            third_patch.live = True
            return True
        third_patch.install = install
        third_patch.remove = lambda: setattr(third_patch, "live", False)
        sys.modules["fsdp_skip1.patch"] = third_patch
        import fsdp_skip1 as third
        assert third_patch.live and not second.is_enabled() and third.is_enabled()
        third.disable()
        assert not third_patch.live and not patch.live
        """
    )


def test_import_anew_before_torch(python):
    python(
        """
        import fsdp_skip1
        for name in ("fsdp_skip1", "fsdp_skip1.activation"):
            del sys.modules[name]
        import fsdp_skip1
        assert len(observers()) == 1
        import torch.distributed.fsdp
        assert patch.calls == [("install", True)]
        """
    )


def test_looking_for_torch_without_importing_it(python):
    python(
        """
        import fsdp_skip1, importlib.util
        assert importlib.util.find_spec("torch").name == "torch"
        assert "torch" not in sys.modules
        import torch.distributed.fsdp
        assert patch.calls == [("install", True)]
        """
    )


def test_no_finder_is_passed_over(python):
    # The observer leaves sys.meta_path in the middle of a walk along it.
    python(
        """
        import fsdp_skip1
        class Finder:
            seen = []
            def find_spec(self, name, path=None, target=None):
                self.seen.append(name)
        import wrapt
        wrapt.register_post_import_hook(lambda module: None, "something.else")
        watch = observers()[0]
        sys.meta_path.remove(watch)
        sys.meta_path[:0] = [watch, Finder()]
        import torch
        assert "torch" in Finder.seen
        assert not observers()
        """
    )


def test_observer_taken_away(python):
    python(
        """
        import fsdp_skip1
        sys.meta_path.remove(observers()[0])
        assert fsdp_skip1.enable() and len(observers()) == 1
        sys.meta_path.remove(observers()[0])
        import torch.distributed.fsdp
        assert patch.calls == []
        assert fsdp_skip1.is_enabled()
        assert patch.calls == [("install", True)]
        """
    )


def test_fsdp2_imported_anew(python):
    python(
        """
        import fsdp_skip1, torch.distributed.fsdp
        for name in [n for n in sys.modules if n.startswith(FSDP2)]:
            del sys.modules[name]
        __import__(FSDP2)
        assert fsdp_skip1.is_enabled()
        assert patch.calls == [("install", True)] * 2
        """
    )


def test_torch_without_fsdp2(python, tmp_path):
    package = tmp_path / "torch/distributed/fsdp"
    for file in [*(package / "_fully_shard").iterdir()]:
        file.unlink()
    (package / "_fully_shard").rmdir()
    (package / "__init__.py").write_text("")
    python(
        """
        import fsdp_skip1
        with warnings.catch_warnings(record=True) as record:
            warnings.simplefilter("always")
            import torch.distributed.fsdp
            assert not fsdp_skip1.enable()
        assert len(heard(record)) == 1 and FSDP2 in heard(record)[0], heard(record)
        assert not fsdp_skip1.is_enabled() and patch.calls == []
        """
    )


# --- calls ------------------------------------------------------------------------------------


def test_enable_and_disable(python):
    python(
        """
        import fsdp_skip1, torch.distributed.fsdp
        assert fsdp_skip1.disable() is None and fsdp_skip1.disable() is None
        assert not fsdp_skip1.is_enabled() and not patch.live
        assert fsdp_skip1.enable() is True and fsdp_skip1.enable() is True
        assert fsdp_skip1.is_enabled() and patch.live
        assert fsdp_skip1.enable(zero_copy=False) is True
        assert patch.calls[-1] == ("install", False)
        """
    )


def test_disable_before_torch_leaves_nothing_behind(python):
    python(
        """
        import fsdp_skip1
        fsdp_skip1.disable()
        assert not observers()
        import torch.distributed.fsdp
        assert "wrapt" not in sys.modules and patch.calls == []
        """
    )


def test_hook_that_fires_after_disable_does_nothing(python):
    python(
        """
        import fsdp_skip1, torch
        fsdp_skip1.disable()
        import torch.distributed.fsdp
        assert patch.calls == []
        assert fsdp_skip1.enable() and patch.calls == [("install", True)]
        """
    )


def test_one_hook_however_often_it_is_switched(python):
    python(
        """
        import fsdp_skip1, torch
        for _ in range(3):
            fsdp_skip1.disable(); fsdp_skip1.enable(zero_copy=False)
        import wrapt.importer
        assert len(wrapt.importer._post_import_hooks[FSDP2]) == 1
        import torch.distributed.fsdp
        assert patch.calls == [("install", False)]
        """
    )


def test_context_managers_restore_what_was_before(python):
    python(
        """
        import fsdp_skip1 as f, torch.distributed.fsdp
        from fsdp_skip1 import activation
        f.enable(zero_copy=False)
        with f.disabled() as on:
            assert on is False and not patch.live
            with f.enabled() as on:
                assert on is True and patch.calls[-1] == ("install", True)
                with f.disabled():
                    assert not f.is_enabled()
                assert patch.calls[-1] == ("install", True)
            assert not f.is_enabled() and not patch.live
        assert f.is_enabled() and patch.calls[-1] == ("install", False)
        try:
            with f.disabled():
                raise KeyError
        except KeyError:
            pass
        assert f.is_enabled() and activation.decision().zero_copy is False
        again = f.disabled()
        with again:
            with again:
                assert not f.is_enabled()
            assert not f.is_enabled()
        assert f.is_enabled()
        """
    )


def test_decorators(python):
    python(
        """
        import fsdp_skip1 as f, torch.distributed.fsdp
        @f.disabled()
        def off(depth):
            "words"
            assert not f.is_enabled()
            if depth: off(depth - 1)
            assert not f.is_enabled()
            return depth
        @f.enabled(zero_copy=False)
        def on():
            return patch.calls[-1]
        assert off(2) == 2 and (off.__name__, off.__doc__) == ("off", "words")
        assert f.is_enabled() and patch.calls[-1] == ("install", True)
        f.disable()
        assert on() == ("install", False) and not f.is_enabled()
        """
    )


def test_the_reason_is_kept(python):
    python(
        """
        import fsdp_skip1 as f
        from fsdp_skip1.activation import decision
        first = decision()
        assert (first.on, first.zero_copy, first.cause) == (True, True, "import")
        f.disable()
        assert (decision().on, decision().cause) == (False, "call")
        with f.enabled():
            assert (decision().on, decision().cause) == (True, "call")
        try: first.on = False
        except AttributeError: pass
        else: raise SystemExit("a decision was changed")
        assert first.on
        """
    )


def test_toggles_from_several_threads(python):
    python(
        """
        import fsdp_skip1 as f, torch.distributed.fsdp
        sys.setswitchinterval(1e-5)
        busy = []
        def during():
            busy.append(1); assert len(busy) == 1, "two threads install at once"; busy.pop()
        patch.during = during
        def work(number):
            for step in range(100):
                f.enable(zero_copy=bool(step % 2)) if (step + number) % 3 else f.disable()
        threads = [threading.Thread(target=work, args=(n,)) for n in range(4)]
        with warnings.catch_warnings(record=True) as record:
            for thread in threads: thread.start()
            for thread in threads: thread.join(60); assert not thread.is_alive()
        assert not heard(record), heard(record)
        f.enable(); assert patch.live and f.is_enabled()
        f.disable(); assert not patch.live
        """
    )


def test_a_call_from_within_an_installation(python):
    python(
        """
        import fsdp_skip1 as f, torch.distributed.fsdp
        f.disable()
        def during():
            patch.during = None
            f.disable()
        patch.during = during
        f.enable()
        assert not patch.live and not f.is_enabled()
        """
    )


def test_an_import_does_not_wait_for_a_thread_at_work(python):
    # That thread may be waiting for a lock that the import holds.
    python(
        """
        import fsdp_skip1 as f, torch.distributed.fsdp
        inside, go_on = threading.Event(), threading.Event()
        patch.during = lambda: (inside.set(), go_on.wait(30))
        thread = threading.Thread(target=lambda: f.enable(zero_copy=False))
        thread.start(); inside.wait(30)
        from fsdp_skip1 import activation
        activation._want(activation.Decision(False, True, "import"), wait=False)
        assert thread.is_alive() and ("remove",) not in patch.calls
        patch.during = None
        go_on.set(); thread.join(30)
        # Left to the thread that was at work.
        assert patch.calls[-1] == ("remove",) and not patch.live
        """
    )


@pytest.mark.skipif(not hasattr(os, "fork"), reason="needs fork")
def test_fork_while_another_thread_is_at_work(python):
    python(
        """
        import os, fsdp_skip1 as f, torch.distributed.fsdp
        inside, go_on = threading.Event(), threading.Event()
        patch.during = lambda: (inside.set(), go_on.wait(60))
        thread = threading.Thread(target=lambda: f.enable(zero_copy=False))
        thread.start(); inside.wait(30)
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")
            child = os.fork()
        if child == 0:
            import signal
            signal.alarm(30)
            patch.during = None
            # The thread is gone, half-way: the next occasion brings it to its end.
            assert f.is_enabled() and patch.live
            f.disable(); assert not patch.live
            f.enable(); assert patch.live
            sys.stdout.flush(); os._exit(0)
        _, status = os.waitpid(child, 0)
        go_on.set(); thread.join(30)
        assert status == 0, status
        """
    )


# --- when things go wrong ------------------------------------------------------------------------


def test_a_torch_that_is_not_understood(python):
    python(
        """
        import fsdp_skip1 as f
        patch.answer = False
        import torch.distributed.fsdp
        assert not f.is_enabled() and f.enable() is False
        with f.enabled() as on: assert on is False
        """
    )


@pytest.mark.parametrize("options", [(), ("-W", "error")], ids=["default", "W-error"])
@pytest.mark.parametrize(
    "order", ["fsdp_skip1, torch.distributed.fsdp", "torch.distributed.fsdp, fsdp_skip1"]
)
def test_patch_raises(python, order, options):
    done = python(
        f"""
        patch.error = RuntimeError("broken on purpose")
        import {order}
        assert not fsdp_skip1.is_enabled() and fsdp_skip1.enable() is False
        fsdp_skip1.disable()
        """,
        *options,
    )
    # Once for each direction, on stderr either way: as a warning, or through the log.
    assert done.stderr.count("could not switch itself on") == 1, done.stderr
    assert done.stderr.count("could not switch itself off") == 1, done.stderr
    assert "Traceback" not in done.stderr


def test_patch_cannot_be_imported(python):
    done = python(
        """
        sys.modules["fsdp_skip1.patch"] = None
        import fsdp_skip1, torch.distributed.fsdp
        assert not fsdp_skip1.is_enabled()
        """
    )
    assert done.stderr.count("could not switch itself on") == 1, done.stderr


def test_wrapt_cannot_be_imported(python):
    done = python(
        """
        sys.modules["wrapt"] = None
        import fsdp_skip1, torch.distributed.fsdp
        assert patch.calls == []
        """
    )
    assert done.stderr.count("could not switch itself on") == 1, done.stderr


def test_import_of_torch_fails(python):
    python(
        """
        import fsdp_skip1
        def fail(): raise ValueError("broken torch")
        at_point("fsdp2:middle", fail)
        try: import torch.distributed.fsdp
        except ValueError: pass
        else: raise SystemExit("no error")
        del builtins.at
        sys.modules["torch"].at = lambda point: None
        import torch.distributed.fsdp
        assert patch.calls == [("install", True)]
        """
    )


def test_warnings_point_at_the_caller(python):
    python(
        """
        import fsdp_skip1 as f
        with warnings.catch_warnings(record=True) as record:
            warnings.simplefilter("always")
            exec(compile("f.enable()", "caller.py", "exec"))
            f.enable()
        (warning,) = record
        assert warning.filename == "caller.py" and warning.category is f.FsdpSkip1Warning
        """,
        FSDP_SKIP1="0",
    )


def test_log_adds_no_handler_and_never_raises(python):
    python(
        """
        from fsdp_skip1 import notices
        notices.log("debug", "unheard")
        assert "logging" not in sys.modules
        import logging
        seen = []
        class Handler(logging.Handler):
            def emit(self, record): seen.append((record.levelname, record.getMessage()))
        logger = logging.getLogger("fsdp_skip1")
        assert logger.handlers == [] and logging.getLogger().handlers == []
        logger.addHandler(Handler()); logger.setLevel("INFO")
        notices.log("info", "%d groups", 3)
        notices.log("debug", "unheard")
        notices.log("no such level", "unheard")
        assert seen == [("INFO", "3 groups")], seen
        """,
        prelude="import sys",
    )


# --- FSDP_SKIP1 -------------------------------------------------------------------------------

ON = ["1", "true", "on", "yes", "TRUE", "On", " yes "]
OFF = ["0", "false", "off", "no", "FALSE", "Off", " no "]


@pytest.mark.parametrize("value", ON)
def test_variable_on(python, value):
    done = python(
        """
        at_point("torch:end", __import__("_fsdp_skip1_autoload").autoload)
        import torch
        assert "fsdp_skip1" in sys.modules
        import torch.distributed.fsdp, fsdp_skip1
        from fsdp_skip1.activation import decision
        assert fsdp_skip1.is_enabled() and decision().cause == "variable"
        assert patch.calls == [("install", True)]
        fsdp_skip1.disable()
        assert not fsdp_skip1.is_enabled() and not patch.live
        """,
        FSDP_SKIP1=value,
    )
    assert done.stderr == ""


@pytest.mark.parametrize("value", OFF)
def test_variable_off(python, value):
    python(
        """
        import _fsdp_skip1_autoload
        _fsdp_skip1_autoload.autoload()
        assert "fsdp_skip1" not in sys.modules
        import fsdp_skip1 as f, torch.distributed.fsdp
        from fsdp_skip1.activation import decision
        assert not f.is_enabled() and decision().cause == "variable"
        with warnings.catch_warnings(record=True) as record:
            warnings.simplefilter("always")
            assert f.enable() is False
            with f.enabled(zero_copy=False) as on: assert on is False
            f.disable()
        assert len(record) == 1 and "FSDP_SKIP1=0" in str(record[0].message)
        assert not f.is_enabled() and "install" not in str(patch.calls)
        """,
        FSDP_SKIP1=value,
    )


@pytest.mark.parametrize("value", ["", "  "])
def test_variable_empty(python, value):
    done = python(
        """
        import _fsdp_skip1_autoload
        _fsdp_skip1_autoload.autoload()
        assert "fsdp_skip1" not in sys.modules
        import fsdp_skip1
        assert fsdp_skip1.is_enabled()
        """,
        FSDP_SKIP1=value,
    )
    assert done.stderr == ""


@pytest.mark.parametrize("options", [(), ("-W", "error")], ids=["default", "W-error"])
@pytest.mark.parametrize("autoload", [True, False], ids=["autoload", "import"])
def test_variable_garbage(python, autoload, options):
    done = python(
        f"""
        import _fsdp_skip1_autoload
        if {autoload}:
            _fsdp_skip1_autoload.autoload(); _fsdp_skip1_autoload.autoload()
            assert "fsdp_skip1" not in sys.modules
        import fsdp_skip1
        assert fsdp_skip1.is_enabled() and fsdp_skip1.enable()
        """,
        *options,
        FSDP_SKIP1="ture",
    )
    assert done.stderr.count("FSDP_SKIP1='ture' is ignored") == 1, done.stderr


def test_variable_is_read_again_by_enable(python):
    python(
        """
        import os, fsdp_skip1 as f
        os.environ["FSDP_SKIP1"] = "0"
        assert f.is_enabled()
        warnings.simplefilter("ignore")
        assert not f.enable() and not f.is_enabled()
        os.environ["FSDP_SKIP1"] = "1"
        assert f.enable() and f.is_enabled()
        """
    )


def test_autoload_imports_nothing_while_unset(python):
    python(
        """
        before = set(sys.modules)
        import _fsdp_skip1_autoload
        _fsdp_skip1_autoload.autoload()
        assert set(sys.modules) - before == {"_fsdp_skip1_autoload"}
        """,
        prelude="import sys",
    )


@pytest.mark.parametrize("options", [(), ("-W", "error")], ids=["default", "W-error"])
def test_autoload_of_a_broken_package(python, options):
    done = python(
        """
        sys.modules["fsdp_skip1"] = None
        import _fsdp_skip1_autoload
        _fsdp_skip1_autoload.autoload()
        """,
        *options,
        FSDP_SKIP1="1",
    )
    assert done.stderr.count("fsdp_skip1 could not be loaded") == 1, done.stderr


# --- the real torch -------------------------------------------------------------------------------

REPORT = """
import os, sys
import torch
after_torch = "fsdp_skip1" in sys.modules
import torch.distributed.fsdp
patched = getattr(sys.modules.get("fsdp_skip1.patch"), "__name__", None)
on = after_torch and sys.modules["fsdp_skip1"].is_enabled()
print("loaded" if after_torch else "absent", "on" if on else "off", patched)
"""


@pytest.mark.real_torch
@pytest.mark.parametrize(
    ("variables", "expected"),
    [
        ({}, "absent off None"),
        ({"FSDP_SKIP1": "0"}, "absent off None"),
        ({"FSDP_SKIP1": "1"}, "loaded on fsdp_skip1.patch"),
        ({"FSDP_SKIP1": "1", "TORCH_DEVICE_BACKEND_AUTOLOAD": "0"}, "absent off None"),
    ],
    ids=["unset", "0", "1", "1-without-autoload"],
)
def test_autoload_by_the_real_torch(variables, expected):
    done = _run(REPORT, variables=variables)
    assert done.stdout.split("\n")[0] == expected, done.stdout + done.stderr
    assert "fsdp_skip1" not in done.stderr


@pytest.mark.real_torch
def test_garbage_does_not_break_the_real_torch():
    done = _run("import torch; print(torch.__version__)", variables={"FSDP_SKIP1": "ture"})
    assert done.stderr.count("FSDP_SKIP1='ture' is ignored") == 1, done.stderr


@pytest.mark.real_torch
def test_spawned_children_inherit_the_variable(tmp_path):
    script = tmp_path / "spawning.py"
    script.write_text(
        textwrap.dedent(
            """
            import sys
            import torch.multiprocessing

            def child(rank):
                import torch.distributed.fsdp
                import fsdp_skip1.activation as activation
                print("child", activation.is_enabled(), activation.decision().cause, flush=True)

            if __name__ == "__main__":
                torch.multiprocessing.spawn(child, nprocs=1)
            """
        )
    )
    done = _start([str(script)], {"FSDP_SKIP1": "1"})
    assert "child True variable" in done.stdout, done.stdout + done.stderr
