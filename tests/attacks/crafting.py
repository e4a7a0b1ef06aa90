"""Helpers for programs that damage a file, or a text, before it is read."""

CRAFT = """
import copy, json, os, resource
import numpy as np

ODD = [None, True, -1, 0, 2**63, 10**30, 0.5, float("inf"), "", "x", "9", "\\x1b[31m", "../../x", [], [0], [[]], {}]
resource.setrlimit(resource.RLIMIT_AS, (8 << 30, 8 << 30))  # what takes more has believed a size

def crafted(document, random):
    # A copy of a document of JSON in which up to three members are something else, or missing.
    whole = [copy.deepcopy(document)]
    for _ in range(random.integers(1, 4)):
        place, member = whole, 0
        while isinstance(place[member], (list, dict)) and place[member] and random.random() < 0.9:
            place = place[member]
            members = list(place) if isinstance(place, dict) else range(len(place))
            member = members[random.integers(len(members))]
        if place is not whole and random.random() < 0.2:
            del place[member]
        else:
            place[member] = copy.deepcopy(ODD[random.integers(len(ODD))])
    return whole[0]

def damage(path, random):
    # Changes, inserts or cuts a few bytes of a file.
    data = bytearray(open(path, "rb").read())
    at, much = int(random.integers(len(data) + 1)), int(random.integers(1, 9))
    kind = random.integers(3)
    data[at : len(data) if kind == 2 else at + much * kind] = b"" if kind == 2 else random.bytes(much)
    with open(path, "wb") as file:
        file.write(data)
"""
