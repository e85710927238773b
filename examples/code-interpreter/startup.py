"""What each kernel shows beside what IPython knows: the data of a matplotlib figure as `e2b/chart`, and
of a pandas table as `e2b/data`, and images that are saved. Where there are none the result is what it
is without. And the module by which python_context.py changes variables of the environment."""

import json
import os
import random
import sys
import types

from IPython import get_ipython
from IPython.display import display
from IPython.core.formatters import BaseFormatter
from traitlets import ObjectName, Unicode


class ChartFormatter(BaseFormatter):
    format_type = Unicode("e2b/chart")
    print_method = ObjectName("_repr_e2b_chart_")
    _return_type = (dict,)


class TableFormatter(BaseFormatter):
    format_type = Unicode("e2b/data")
    print_method = ObjectName("_repr_e2b_data_")
    _return_type = (dict,)


def chart_of(figure):
    """The elements of a figure; none of one that e2b_charts does not understand."""
    from e2b_charts import chart_figure_to_dict

    try:
        return checked(chart_figure_to_dict(figure))
    except Exception:
        return None


def table_of(table):
    """The columns of a table, with times as text; none of one with other values than JSON has."""
    try:
        columns = table.to_dict(orient="list")
        return checked({str(name): [plain(value) for value in column] for name, column in columns.items()})
    except Exception:
        return None


def plain(value):
    return value.isoformat() if hasattr(value, "isoformat") else value


def checked(shown):
    """What cannot travel as JSON would take the whole result with it."""
    json.dumps(shown)
    return shown


def register(display):
    charts, tables = ChartFormatter(parent=display), TableFormatter(parent=display)
    charts.for_type_by_name("matplotlib.figure", "Figure", chart_of)
    for module in ("pandas", "pandas.core.frame"):
        tables.for_type_by_name(module, "DataFrame", table_of)
    display.formatters["e2b/chart"] = charts
    display.formatters["e2b/data"] = tables


def show_saved_images():
    """Saving an image to a file shows it, as E2B's template does."""
    try:
        from PIL.Image import Image
    except ImportError:
        return
    save = Image.save

    def save_and_show(image, file, format=None, **options):
        save(image, file, format, **options)
        if isinstance(file, (str, os.PathLike)) and os.path.isfile(file):
            display(image)

    Image.save = save_and_show


def reseed():
    """A sandbox begins as a copy, of this process or of another sandbox, and draws other numbers all
    the same."""
    random.seed()
    if "numpy" in sys.modules:
        sys.modules["numpy"].random.seed()


class Variables(types.ModuleType):
    """Changes variables of the environment: each is NAME=VALUE, or NAME if it is removed."""

    undo = []

    def stay(self, changes):
        self.change(changes)
        if any(change.startswith("E2B_SANDBOX_ID=") for change in changes):
            reseed()

    def change(self, changes):
        before = []
        for change in changes:
            name, has_value, value = change.partition("=")
            old = os.environ.pop(name, None)
            before.append(name if old is None else f"{name}={old}")
            if has_value:
                os.environ[name] = value
        return before

    def lend(self, changes):
        self.undo = self.change(changes)

    def give_back(self):
        self.change(self.undo)


register(get_ipython().display_formatter)
show_saved_images()
sys.modules["thaw_variables"] = Variables("thaw_variables")
