"""A Flask application: a word count over what is posted to it."""

import collections
import os
import re

from flask import Flask, jsonify, render_template_string, request

app = Flask(__name__)

PAGE = "<h1>Hello from Flask, {{ name }}!</h1>\n"


@app.get("/")
def greet():
    return render_template_string(PAGE, name=request.args.get("name", "you"))


@app.get("/pid")
def process():
    return jsonify(worker=os.getpid(), master=os.getppid())


@app.post("/words")
def words():
    text = request.get_data(as_text=True).lower()
    counts = collections.Counter(re.findall(r"[^\W\d_]+", text))
    return jsonify(total=counts.total(), top=counts.most_common(3))
