"""A FastAPI application: validated input, asynchronous and threaded handlers."""

import asyncio
import statistics

from fastapi import FastAPI
from pydantic import BaseModel, Field

app = FastAPI()


class Numbers(BaseModel):
    """What /statistics wants."""

    values: list[float] = Field(min_length=2, max_length=1000)


@app.get("/")
async def greet(name: str = "you"):
    await asyncio.sleep(0.001)
    return {"greeting": f"Hello from FastAPI, {name}!"}


# Not `async`: runs in a thread of the pool.
@app.post("/statistics")
def describe(numbers: Numbers):
    return {
        "mean": statistics.fmean(numbers.values),
        "stdev": statistics.stdev(numbers.values),
        "median": statistics.median(numbers.values),
    }
