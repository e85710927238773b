"""Chameleon: renders an HTML table from a page template."""

import hashlib

from chameleon import PageTemplate

TABLE = PageTemplate("""
<table xmlns="http://www.w3.org/1999/xhtml"
       xmlns:tal="http://xml.zope.org/namespaces/tal">
  <tr tal:repeat="row table">
    <td tal:repeat="column row">${column}</td>
  </tr>
</table>
""")


def run(rows=200, columns=10):
    table = [[row * column for column in range(columns)] for row in range(rows)]
    page = TABLE.render(table=table)
    return {"bytes": len(page), "sha256": hashlib.sha256(page.encode()).hexdigest()}
