"""Trains the model that workload.py serves, once, when the function is built."""

import pickle
import sys

import reviews
from sklearn.feature_extraction.text import TfidfVectorizer
from sklearn.linear_model import LogisticRegression
from sklearn.pipeline import make_pipeline

texts, moods = reviews.make(2000, seed=0)
model = make_pipeline(TfidfVectorizer(), LogisticRegression())
model.fit(texts, moods)
with open(sys.argv[1], "wb") as file:
    pickle.dump(model, file)
