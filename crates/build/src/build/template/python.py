"""Turns a Python interpreter into a runtime template, and its copies into programs.

The interpreter imports this file as `sitecustomize`, that is within its own start, before it
looks at what it is to run (`-m`). So whatever runs afterwards runs as it would have without
a template: no frame of this file is below it, and nothing of it is left in `sys.modules`.
`docs/decisions/0030-runtime-templates.md` says why it is done so.
"""

import sys


def _become(modules):
    """Loads modules, is frozen as a template, and becomes whatever a copy is to be."""
    import os
    import posix

    here = os.path.dirname(__file__)
    # This file is nowhere when the program runs.
    os.unlink(__file__)
    os.rmdir(here)
    sys.path.remove(here)
    sys.path_importer_cache.pop(here, None)

    def load_customization():
        """Imports the `sitecustomize` that the interpreter would have found; `None`: none."""
        own = sys.modules.pop("sitecustomize", None)
        try:
            import sitecustomize

            return sitecustomize
        except ImportError as error:
            if error.name != "sitecustomize":
                raise
            if own is not None:
                sys.modules["sitecustomize"] = own
            return None

    def load(names):
        import importlib

        for name in names:
            importlib.import_module(name)

    def freeze():
        import gc

        gc.collect()
        # The collector leaves alone what is there: its marks would write every page.
        gc.freeze()
        sys.stdout.flush()
        sys.stderr.flush()
        device = os.open("/dev/thaw", os.O_WRONLY | os.O_CLOEXEC)
        try:
            os.write(device, b"template")
        finally:
            os.close(device)

    def words(path):
        with open(path, "rb") as file:
            return file.read().split(b"\0")[:-1]

    def take_environment():
        # First: it takes from the C library's environment what it has, and that is in the other one.
        os.environ.clear()
        posix.environ.clear()
        for variable in words("/proc/self/environ"):
            name, _, value = variable.partition(b"=")
            posix.environ[name] = value
            os.environ[os.fsdecode(name)] = os.fsdecode(value)
        time = sys.modules.get("time")
        if time is not None:
            time.tzset()

    def draw_again():
        """Generators that were seeded in the template are seeded anew."""
        for name in ("random", "numpy.random"):
            module = sys.modules.get(name)
            if module is not None:
                module.seed()

    def forget_directories():
        """What was looked for and not found may be there now."""
        for path, finder in list(sys.path_importer_cache.items()):
            if finder is None:
                del sys.path_importer_cache[path]
            elif hasattr(finder, "invalidate_caches"):
                finder.invalidate_caches()

    def given_paths():
        """What `PYTHONPATH` names, as the interpreter has it (site.removeduppaths)."""
        given = os.environ.get("PYTHONPATH")
        return [os.path.abspath(path) for path in given.split(os.pathsep)] if given else []

    def take_over():
        """Becomes what the copy was given: its environment, and what depends on it."""
        before = given_paths()
        take_environment()
        forget_directories()
        rest = [path for path in sys.path if path not in before]
        sys.path[:] = list(dict.fromkeys(given_paths() + rest))

    def add_site_directories():
        """Those that exist now, and did not in the template; their `.pth` files, too."""
        import site

        directories = site.getsitepackages()
        if site.ENABLE_USER_SITE:
            directories.append(site.getusersitepackages())
        for directory in directories:
            if directory not in sys.path and os.path.isdir(directory):
                site.addsitedir(directory)

    def check_search_path(path):
        """Refuses a program with a module of its own that it would have loaded in the place of one
        that the template has loaded: one that comes before it in the search path."""
        from importlib.machinery import all_suffixes

        homes = {}
        for name, module in list(sys.modules.items()):
            spec = getattr(module, "__spec__", None)
            if "." in name or spec is None or not spec.has_location:
                continue
            home = os.path.dirname(spec.origin)
            is_package = spec.submodule_search_locations is not None
            homes[name] = os.path.dirname(home) if is_package else home

        def entries(directory):
            try:
                return set(os.listdir(directory or "."))
            except OSError:
                return set()

        def has_module(directory, inside, name):
            if any(name + suffix in inside for suffix in all_suffixes()):
                return True
            return name in inside and any(
                "__init__" + suffix in entries(os.path.join(directory, name))
                for suffix in all_suffixes()
            )

        for directory in path:
            homes = {name: home for name, home in homes.items() if home != directory}
            inside = entries(directory) if homes else set()
            for name, home in homes.items():
                if has_module(directory, inside, name):
                    sys.stderr.write(
                        f"the template has loaded the module {name} of {home}, and there is one in "
                        f"{directory or os.getcwd()}\n"
                    )
                    os._exit(1)

    def run(words):
        """Has the interpreter run what it was to run, when this file is done."""
        main = sys.modules["__main__"].__dict__
        if words[:1] == ["-m"]:
            prepare, first = _module(words[1]), os.getcwd()
            sys.argv[:] = ["-m"] + words[2:]
        elif words[:1] == ["-c"]:
            code = compile(words[1], "<string>", "exec", dont_inherit=True)
            prepare, first = _code(main, lambda: code, ""), os.getcwd()
            sys.argv[:] = ["-c"] + words[2:]
        else:
            first, code = _script(main, words[0])
            prepare = _code(main, code, first)
            sys.argv[:] = words
        if getattr(sys.flags, "safe_path", False):
            check_search_path(sys.path)
        else:
            check_search_path([first] + sys.path)
        sys.orig_argv[:] = [arguments[0]] + words
        sys.modules["runpy"] = _Runner(prepare)

    customized = load_customization()
    load(modules)
    while True:
        freeze()
        take_over()
        arguments = [os.fsdecode(word) for word in words("/proc/self/cmdline")]
        if arguments[1:3] != ["-m", "thaw-template"]:
            break
        load(arguments[3:])
    draw_again()
    add_site_directories()
    if customized is None:
        customized = load_customization()
    run(arguments[1:])
    return customized is not None


class _Runner:
    """Stands for the module `runpy`, which the interpreter imports to run a module (`-m`).

    It asks for one function and calls it from its own code, with two arguments of no use
    here. `str.format` takes any number of arguments and looks up an attribute of the first:
    so no function of Python's lies between the interpreter and the program.
    """

    def __init__(self, prepare):
        self.prepare = prepare

    @property
    def _run_module_as_main(self):
        from functools import partial

        del sys.modules["runpy"]
        return partial("{0.outcome}".format, _Program(self.prepare()))


class _Program:
    """Whose `outcome` is that of a callable, called from code in C alone."""

    from operator import methodcaller

    outcome = property(methodcaller("run"))

    def __init__(self, run):
        self.run = run


def _module(name):
    def prepare():
        from functools import partial

        import runpy

        return partial(runpy._run_module_as_main, name, True)

    return prepare


def _code(main, code, first):
    """Runs the code in the main module; `first` takes the place of the search path's first."""

    def prepare():
        from functools import partial

        if not getattr(sys.flags, "safe_path", False):
            sys.path[0] = first
        return partial(exec, code(), main)

    return prepare


def _script(main, name):
    """The directory of a script, which is searched for modules first, and what gives its code."""
    import os
    from importlib.machinery import SourceFileLoader

    shown = name[2:] if name.startswith("./") else name
    path = shown if shown.startswith("/") else os.getcwd() + "/" + shown
    real = os.path.join(os.path.dirname(path), os.readlink(path)) if os.path.islink(path) else path

    def code():
        with open(path, "rb") as file:
            source = file.read()
        main["__file__"] = path
        main["__cached__"] = None
        main["__loader__"] = SourceFileLoader("__main__", path)
        return compile(source, path, "exec", dont_inherit=True)

    return os.path.dirname(os.path.realpath(real)), code


if not _become(sys.orig_argv[3:]):
    # The interpreter takes this for having found no `sitecustomize`.
    raise ImportError("No module named 'sitecustomize'", name="sitecustomize")
