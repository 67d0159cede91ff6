import os


class Run:
    url = "http://127.0.0.1/x"


n = 0


def login(**k):
    return True


def init(**k):
    return Run()


def log(d, step=None, **k):
    global n
    n += 1
    if n >= int(os.environ.get("FAIL_AT", "3")):
        raise ConnectionError("wandb: network is unreachable")


def finish(*a, **k):
    if os.environ.get("FAIL_FINISH"):
        raise ConnectionError("finish failed")


class Histogram:
    def __init__(self, *a, **k):
        pass


class Table:
    def __init__(self, *a, **k):
        pass
