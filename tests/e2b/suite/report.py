"""Says what came of a suite: report.py JUNIT.xml

Tests by directory with the share that passes, and each failure with its reason.
"""

import collections
import sys
import xml.etree.ElementTree as tree

counts = collections.defaultdict(collections.Counter)
failures = []
for case in tree.parse(sys.argv[1]).iter("testcase"):
    group = ".".join(part for part in case.get("classname", "").split(".") if part != "tests")
    kinds = [child.tag for child in case]
    kind = next((kind for kind in ("error", "failure", "skipped") if kind in kinds), "passed")
    counts[group][kind] += 1
    if kind in ("error", "failure"):
        text = case.find(kind).get("message") or ""
        failures.append((group, case.get("name"), text.strip().splitlines()[0][:160] if text.strip() else ""))
total = sum(counts.values(), collections.Counter())
for group, of_group in sorted(counts.items()):
    failed = of_group["error"] + of_group["failure"]
    print(f"{group:70} {of_group['passed']:4} passed {failed:4} failed {of_group['skipped']:4} skipped")
for group, name, text in failures:
    print(f"FAILED {group}::{name}: {text}")
run = total["passed"] + total["error"] + total["failure"]
print(f"{total['passed']} of {run} pass ({100 * total['passed'] / max(run, 1):.1f} %), {total['skipped']} skipped")
