"""What each kernel shows beside what IPython knows: the data of a matplotlib figure as `e2b/chart`, and
of a pandas table as `e2b/data`. Where there are none the result is what it is without."""

import json

from IPython import get_ipython
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


register(get_ipython().display_formatter)
