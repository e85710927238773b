"""Ask Thaw to freeze this program, and learn which copy of it this is.

    import thaw

    thaw.before_freeze(connections.close)     # what no two copies may share
    thaw.after_thaw(lambda generation: connections.open())
    load_everything()
    generation = thaw.freeze()                # copies begin here

One file without dependencies: copy it beside your program. It talks to
`/dev/thaw`, which every sandbox has. Outside a sandbox, `freeze()` does nothing
and returns 0, so that the same program runs anywhere.
"""

_DEVICE = "/dev/thaw"
_before = []
_after = []
_seeded = None


def before_freeze(hook):
    """Call `hook()` before a freeze; the last one given is called first."""
    _before.append(hook)
    return hook


def after_thaw(hook):
    """Call `hook(generation)` when `freeze()` goes on, in the order given.

    That is in every copy, and in the original too if it was not ended.
    """
    _after.append(hook)
    return hook


def generation():
    """Which copy this is: 0 for the original, n for a copy of the n-th generation.

    A copy of a copy that was frozen again is of the next generation.
    """
    try:
        with open(_DEVICE, "rb") as device:
            return int(device.read())
    except FileNotFoundError:
        return 0


def freeze():
    """Freeze the program here, if somebody wants that, and return `generation()`.

    Comes back at once if nobody does (`thaw run`), or if this is a copy already.
    Every thread of the program must come to wait for something, and the function
    says `freeze = "program"` in `[entry]` of its thaw.toml if it waits for
    clients earlier.
    """
    try:
        device = open(_DEVICE, "wb", buffering=0)
    except FileNotFoundError:
        return 0
    with device:
        for hook in reversed(_before):
            hook()
        device.write(b"freeze")
    which = generation()
    for hook in _after:
        hook(which)
    return which


def reseed():
    """Seed `random` and `numpy.random` if this is another copy than at the last call.

    Call it where a request begins, in a program that is frozen when it first waits for
    clients: until then all copies draw the same numbers. Returns whether it has seeded.
    Generators of your own (`random.Random()`) seed where it returns `True`.
    """
    global _seeded
    import sys

    which = generation()
    if which == _seeded:
        return False
    _seeded = which
    import random

    random.seed()
    if "numpy.random" in sys.modules:
        sys.modules["numpy"].random.seed()
    return True
