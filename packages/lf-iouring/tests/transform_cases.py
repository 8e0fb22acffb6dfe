"""Transforms that worker processes import."""

import itertools
import os
import signal
import time
from pathlib import Path

import numpy as np


def add_one(arrays, context):
    """In place."""
    arrays["tokens"] += 1


def invert(arrays, context):
    """Samples in place: an image, and points in rows of different numbers, each row by its own number of them."""
    arrays["camera"] ^= 255
    ends = arrays["points.offsets"]
    for low, high in itertools.pairwise(ends):
        arrays["points"][low:high] += high - low


def noise(arrays, context):
    """Random numbers by record and by step, into arrays of their own."""
    rows = np.array([context.rng_of(row).random() for row in range(len(context.ids))])
    return {"noise": rows, "tokens": arrays["tokens"].copy(), "step": np.array([context.rng().random()])}


def packed(arrays, context):
    """Everything a packed batch holds."""
    names = ("tokens", "loss_mask", "position_ids", "segment_ids")
    return {name: arrays[name].astype(np.int32) for name in names}


class Failing:
    """Raises at one step, once a file says so."""

    def __init__(self, step, flag):
        self.step, self.flag = step, str(flag)

    def __call__(self, arrays, context):
        if context.step == self.step and Path(self.flag).exists():
            raise ZeroDivisionError("one over nothing")


class Waiting:
    """Blocks for good at one step while a file exists, and says where it is."""

    def __init__(self, step, flag):
        self.step, self.flag = step, str(flag)

    def __call__(self, arrays, context):
        while context.step == self.step and Path(self.flag).exists():
            Path(self.flag + f".{os.getpid()}").touch()
            time.sleep(0.01)


class Dying(Waiting):
    """Ends its process at one step, the first time."""

    def __call__(self, arrays, context):
        if context.step == self.step and Path(self.flag).exists():
            Path(self.flag).unlink()
            os.kill(os.getpid(), signal.SIGKILL)


def nothing_declared(arrays, context):
    return {"tokens": arrays["tokens"]}


def replaces(arrays, context):
    arrays["tokens"] = arrays["tokens"] + 1


def writes_lengths(arrays, context):
    arrays["lengths"][...] = 0


def wrong_dtype(arrays, context):
    return {"tokens": arrays["tokens"].astype(np.float64)}
