"""Imports every module of the standard library that the native run can import.

The list of modules that fail is printed, so it must be the same in a sandbox.
Skipped: modules that print, open windows or browsers, or need threads or other
processes at import time.
"""
import importlib
import pkgutil
import sys
import warnings

warnings.simplefilter("ignore")
SKIPPED = {"antigravity", "this", "idlelib", "turtledemo", "__main__"}

failed = []
count = 0
for name in sorted(sys.stdlib_module_names):
    if name in SKIPPED:
        continue
    try:
        module = importlib.import_module(name)
    except ImportError as error:
        failed.append(name)
        continue
    count += 1
    if hasattr(module, "__path__") and name not in ("test", "lib2to3", "ensurepip", "tkinter", "distutils"):
        for info in sorted(pkgutil.iter_modules(module.__path__, name + "."), key=lambda i: i.name):
            if info.name.endswith("__main__") or ".test" in info.name or "windows" in info.name or "win32" in info.name:
                continue
            try:
                importlib.import_module(info.name)
                count += 1
            except ImportError as error:
                failed.append(info.name)
print("imported", count)
print("failed", failed)
