# Loaded by the interpreter when it starts, for a build that compares two copies: at SIGPWR it
# draws from every generator that the program has, and says what came and which times the program
# keeps.
import gc
import os
import signal
import sys
import time

_HERE = "/.thaw-probe"
_BEGAN = int(time.time())
_LINES_MAX = 64
_UNITS = (1, 1000, 1000000, 1000000000)
_STANDARD = os.path.dirname(os.__file__) + "/"
_LIBRARIES = (_STANDARD, "/opt/site-packages/", _HERE)
# Objects that the collector of garbage does not show.
_HIDDEN = gc.get_freeze_count()


def _is(value, kind):
    # isinstance() asks the value, which may be a proxy.
    return issubclass(type(value), kind)


def _is_of_python(path):
    # Whether a file is the standard library's, whose own use of random decides nothing that lasts.
    if type(path) is not str or path.startswith("<frozen "):
        return True
    path = os.path.abspath(path)
    is_library = "/site-packages/" in path or "/dist-packages/" in path
    return path.startswith((_STANDARD, _HERE)) and not is_library


def _names_random(code):
    # Whether code of a function, or of one within it, names something `random`: it may import it.
    if "random" in code.co_names:
        return True
    return any(_names_random(inner) for inner in code.co_consts if type(inner) is type(code))


def _refers_to_random(module):
    # Whether a module of the program, or of a library, has it, or a method of its one generator.
    inner = module.__dict__
    if inner.get("__name__") != "__main__" and _is_of_python(inner.get("__file__")):
        return False
    random = sys.modules["random"]
    bound = (type(random.choice), type(random.random))
    return any(
        value is random or type(value) in bound and value.__self__ is random._inst
        for value in list(inner.values())
    )


def _draws_from_random():
    # The standard library loads the module for itself.
    if gc.get_freeze_count() != _HIDDEN:
        return True
    modules = [module for module in list(sys.modules.values()) if _is(module, type(sys))]
    if any(_refers_to_random(module) for module in modules):
        return True
    return any(
        not _is_of_python(item.__code__.co_filename) and _names_random(item.__code__)
        for item in gc.get_objects()
        if type(item) is type(_answer)
    )


def _drawn():
    random = sys.modules.get("random")
    if random is not None:
        if _draws_from_random():
            yield "the module random=%r" % random.random()
        own = getattr(random, "_inst", None)
        found = [
            item
            for item in gc.get_objects()
            if _is(item, random.Random)
            and not _is(item, random.SystemRandom)
            and item is not own
        ]
        for number, item in enumerate(found[:_LINES_MAX]):
            yield "an object random.Random (%d)=%r" % (number + 1, item.random())
    numpy = sys.modules.get("numpy")
    if numpy is not None and "numpy.random" in sys.modules:
        yield "numpy.random=%r" % numpy.random.random()


def _is_kept(value):
    # Whether it is a time since the program began.
    now = time.time()
    kind = type(value)
    if kind in (int, float):
        return any(_BEGAN <= value // unit <= now for unit in _UNITS)
    if kind is time.struct_time:
        local = time.mktime(value)
        return any(_BEGAN <= moment <= now for moment in (local, local - time.timezone))
    datetime = sys.modules.get("datetime")
    if datetime is None or not _is(value, datetime.date):
        return False
    if not _is(value, datetime.datetime):
        return value == datetime.date.today()
    # One without a zone is local time, or UTC.
    utc = value if value.tzinfo else value.replace(tzinfo=datetime.timezone.utc)
    return any(_BEGAN <= moment.timestamp() <= now for moment in (value, utc))


def _own_modules():
    # Modules of the program's own files, with the names that an author knows them by.
    for module in list(sys.modules.values()):
        if not _is(module, type(sys)):
            continue
        path = module.__dict__.get("__file__")
        if type(path) is not str or os.path.abspath(path).startswith(_LIBRARIES):
            continue
        if "site-packages" in path or "dist-packages" in path:
            continue
        name = module.__dict__.get("__name__")
        main = os.path.splitext(os.path.basename(path))[0]
        yield (main if name == "__main__" else name), name, module.__dict__


def _inside(value, modules):
    # What classes, objects of classes of the program, and dictionaries hold; none of its code runs.
    if _is(value, dict):
        named = [("[%r]" % key, item) for key, item in list(value.items()) if type(key) is str]
        return named[:1000]
    owner = value if _is(value, type) else type(value)
    if type.__getattribute__(owner, "__module__") not in modules:
        return []
    try:
        items = type.__dict__["__dict__"].__get__(value) if owner is value else object.__getattribute__(value, "__dict__")
    except AttributeError:
        return []
    return [("." + key, item) for key, item in list(items.items()) if not key.startswith("__")]


def _kept_times():
    own = list(_own_modules())
    modules = {name for _, name, _ in own}
    # A value that two modules know is named once.
    seen = set()
    for shown, _, names in own:
        for name, value in list(names.items()):
            if name.startswith("__") or id(value) in seen:
                continue
            seen.add(id(value))
            name = "%s.%s" % (shown, name)
            for suffix, item in [("", value)] + _inside(value, modules):
                try:
                    if _is_kept(item):
                        yield "time %s%s=%r" % (name, suffix, item)
                except Exception:
                    # It is beyond what a time can be.
                    pass


def _kept_dates():
    # uvicorn makes the header once a second, for all answers until then.
    if "uvicorn.server" not in sys.modules:
        return
    for item in gc.get_objects():
        kind = type(item)
        if kind.__name__ == "ServerState" and kind.__module__ == "uvicorn.server":
            if any(name == b"date" for name, _ in item.default_headers):
                yield "date uvicorn=kept"
                return


def _answer(_number, _frame):
    lines = list(_drawn())
    for found in (_kept_dates, _kept_times):
        try:
            for _, line in zip(range(_LINES_MAX), found()):
                lines.append(line)
        except Exception:
            # Something of the program's does not let others look.
            pass
    text = "".join("thaw-probe %s\n" % line for line in lines)
    os.write(2, (text + "thaw-probe .\n").encode(errors="replace"))


if os.environ.pop("THAW_PROBE_SEEDED", None):
    # A runtime template has loaded it before the program begins.
    import random  # noqa: F401
signal.signal(signal.SIGPWR, _answer)
sys.path[:] = [path for path in sys.path if path != _HERE]
_own = os.environ.pop("THAW_PROBE_PYTHONPATH", None)
if _own is None:
    os.environ.pop("PYTHONPATH", None)
else:
    os.environ["PYTHONPATH"] = _own
# The one that the interpreter would have loaded.
del sys.modules["sitecustomize"]
try:
    import sitecustomize  # noqa: F401
except ImportError:
    pass
