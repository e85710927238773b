"""JSON: serializes a document and parses it again."""

import json


def run(items=2_000):
    document = [
        {"id": i, "name": f"item {i}", "price": i / 7, "tags": ["a", "b", str(i)], "sold": i % 3 == 0}
        for i in range(items)
    ]
    text = json.dumps(document, indent=1)
    assert json.loads(text) == document
    return {"bytes": len(text), "items": items}
