"""Model serving with scikit-learn: judges the mood of reviews."""

import os
import pickle

import reviews

with open(os.path.join(os.path.dirname(os.path.abspath(__file__)), "model.pickle"), "rb") as file:
    MODEL = pickle.load(file)


def run(count=50, seed=1):
    texts, moods = reviews.make(count, seed + 1000)
    right = sum(MODEL.predict(texts) == moods)
    return {"reviews": count, "right": int(right)}
